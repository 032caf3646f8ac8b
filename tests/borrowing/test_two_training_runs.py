"""Two whole runs on one fleet: two real ``vllm serve`` and two ``rl-coserve train`` without workers of their own. The one gives a
server up to the other, has it again when that is killed, and gives it up again when that is resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.ledger import END_STATES, recount
from orchestrator.tasks.frozenlake import VOCABULARY
from tests.support.real_runs import end, of, start

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(1800)]
TOKEN = "the-token-of-two-training-runs-0123456789"
SETTINGS = [
    "examples/frozenlake.toml",
    "run.steps=1000",
    "run.minutes=30",
    "rollout.workers=0",
    "rollout.borrowed.most=2",
    "rollout.borrowed.every=1",
    "rollout.borrowed.idle=0",
    "rollout.borrowed.lease=30",
    "rollout.borrowed.patience=120",
    "rollout.groups_per_step=2",
    "rollout.environments=16",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "trainer.micro_batch_size=8",
    "trainer.entropy_coefficient=0.05",  # so that weights change, though it has not learned anything yet
    "checkpoint.every=1",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "warmup.steps=0",
]


@pytest.fixture
def servers(tmp_path: Path, vllm_serve: Any) -> Iterator[list[Any]]:
    from megatron_rlplugin.tiny_model import create_qwen3

    create_qwen3(
        str(tmp_path / "model"), hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2, head_dim=32,
        vocabulary=VOCABULARY, max_positions=64, dtype="float32", seed=5,
    )  # fmt: skip

    with ExitStack() as stack:

        def serve(name: str) -> Any:
            (tmp_path / name).mkdir()
            options = ("--max-model-len", "64", "--max-num-seqs", "16")
            return stack.enter_context(vllm_serve(tmp_path / name, tmp_path / "model", TOKEN, *options))

        with ThreadPoolExecutor() as together:
            made = list(together.map(serve, ("a", "b")))
        yield made


def status(server: Any) -> dict[str, Any]:
    asked = urllib.request.Request(f"{server.url}/rl/status", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_two_runs_share_a_fleet_and_the_one_that_was_killed_has_its_share_again_when_it_is_resumed(
    servers: list[Any], tmp_path: Path
) -> None:
    runs = {name: tmp_path / "runs" / f"{name}-001" for name in ("one", "two")}
    place = [f"run.folder={tmp_path / 'runs'}", f"model.path={tmp_path / 'model'}"]
    place += [f"rollout.served={json.dumps([server.url for server in servers])}"]
    place += [f"rollout.served_token_file={servers[0].token_file}"]
    alive: dict[str, subprocess.Popen[str]] = {}

    def holders() -> list[str]:
        leases = [status(server)["lease"] for server in servers]
        return sorted(lease["job"] if lease else "" for lease in leases)

    def until(true: Callable[[], Any], seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            for process in alive.values():
                assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline, (holders(), [of(run, "returned") for run in runs.values()])
            time.sleep(0.3)

    def steps(name: str, more: int) -> None:
        before = len(of(runs[name], "step"))
        until(lambda: len(of(runs[name], "step")) >= before + more)

    try:
        alive["one"] = start(*SETTINGS, *place, "run.name=one", "run.seed=1")
        steps("one", 1)
        assert holders() == ["one-001", "one-001"]
        alive["two"] = start(*SETTINGS, *place, "run.name=two", "run.seed=2")
        steps("two", 2)
        assert holders() == ["one-001", "two-001"]
        assert [event["reason"] for event in of(runs["one"], "returned")] == ["another job's share"]
        steps("one", 1)
        end(alive.pop("two"))  # SIGKILL
        until(lambda: holders() == ["one-001", "one-001"])
        steps("one", 2)
        alive["two"] = start("--resume", str(runs["two"]))
        steps("two", 2)
        assert holders() == ["one-001", "two-001"]
        assert [event["reason"] for event in of(runs["one"], "returned")] == ["another job's share"] * 2
        steps("one", 1)
        for name in ("two", "one"):
            alive[name].send_signal(signal.SIGINT)
            said, _ = alive[name].communicate(timeout=200)
            process = alive.pop(name)
            assert process.returncode == 130, said[-3000:]  # interrupted
    finally:
        for process in alive.values():
            end(process)
    fresh, resumed = (event["resumed_from"] for event in of(runs["two"], "run_start"))
    assert (fresh, resumed >= 1) == (None, True)
    for name, run in runs.items():
        counts = of(run, "run_end")[-1]["ledger"]
        assert counts["started"] == counts["in_flight"] + sum(counts[state] for state in END_STATES), name
        assert recount((run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()) == counts, name
        # The servers had the weights of the run whose turns they generated.
        assert max(step["metrics"]["logprob_gap_max"] for step in of(run, "step")) < 1e-3, name
    assert holders() == ["", ""]
    assert [(found["unfinished"], found["suspended"]) for found in map(status, servers)] == [(0, False)] * 2
