"""A whole run on a serving GPU that is lent, reclaimed and lent again, as docs/recipes/lend.md has it: two real ``vllm serve`` in
one pool, users who ask the one, and ``rl-coserve train`` with a worker of its own that borrows the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from orchestrator.api import http as wire  # noqa: E402
from orchestrator.cli import main  # noqa: E402
from orchestrator.events import read_events  # noqa: E402
from orchestrator.ledger import END_STATES, recount  # noqa: E402
from orchestrator.tasks.calculator import CalculatorTask  # noqa: E402
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path  # noqa: E402
from vllm_rlplugin.server.server_lease import lease_path  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(880)]

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-the-lent-run-0123456789"
POOL = f"test-lent-{os.getpid()}"
SETTINGS = [
    "run.steps=500",
    "run.minutes=30",  # ended by the test: start-up counts, which takes minutes on a busy machine
    "rollout.workers=1",
    "rollout.borrowed.most=1",
    "rollout.borrowed.every=0.5",
    "rollout.borrowed.patience=20",  # a live server on a busy machine is silent for seconds
    "rollout.borrowed.rest=2",
    "rollout.borrowed.idle=0",
    "rollout.borrowed.lease=30",
    "rollout.routing.cap=2",
    "rollout.routing.served_cap=12",
    "rollout.environments=16",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.group_size=4",
    "rollout.groups_per_step=4",
    "rollout.engine.max_model_len=352",
    "rollout.engine.max_num_seqs=16",
    "trainer.micro_batch_size=8",
    "trainer.stream=false",
    "warmup.steps=0",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "task.name=calculator",
]


class Users:
    """Who asks the serving engine all the time; ``answers``: the statuses of what they got."""

    def __init__(self, url: str, model: str) -> None:
        self.answers: list[int] = []
        self._url, self._model, self._stop = url, model, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        number = 0
        while not self._stop.wait(0.3):
            number += 1
            prompt = [(7 * at + 13 * number) % 80 + 5 for at in range(40)]
            body = {"model": self._model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            self.answers.append(requests.post(f"{self._url}/v1/completions", json=body, timeout=60).status_code)


@pytest.fixture
def servers(tmp_path: Path, vllm_serve: Any) -> Iterator[tuple[Any, Any, str]]:
    """Serving engine, rollout engine, model of the latter."""
    from megatron_rlplugin.tiny_model import create_qwen3

    common: dict[str, Any] = {"max_positions": 352, "dtype": "float32", "intermediate_size": 128, "head_dim": 32}
    served = [chr(33 + at) for at in range(93)]
    models = {
        "serving": create_qwen3(
            str(tmp_path / "a"), hidden_size=64, layers=2, heads=2, kv_heads=1, seed=1, vocabulary=served, **common
        ),
        "rollout": create_qwen3(
            str(tmp_path / "b"),
            hidden_size=64,
            layers=2,
            heads=4,
            kv_heads=2,
            seed=2,
            vocabulary=list(CalculatorTask(10).vocabulary),
            **common,
        ),
    }
    both = ["--rl-kv-pool", POOL, "--rl-kv-pool-mib", "8", "--rl-kv-pool-page-kib", "32", "--rl-kv-pool-keep", "1"]
    both += ["--max-model-len", "352", "--max-num-seqs", "16", "--num-gpu-blocks-override", "192"]
    slo = ["--rl-kv-pool-ttft", "20", "--rl-kv-pool-tpot", "10", "--rl-kv-pool-window", "1"]
    own = {
        "serving": ["--rl-kv-pool-role", "serving", *slo],
        "rollout": ["--rl-kv-pool-budget-mib", "6"],
    }
    with ExitStack() as stack:
        stack.callback(lambda: pool_path(POOL).unlink(missing_ok=True))
        lease = lease_path(pool_path(POOL))
        for file in (lease, lease.with_name(f"{lease.name}.lock")):
            stack.callback(partial(file.unlink, missing_ok=True))
        made = []
        for role, flags in own.items():
            (tmp_path / role).mkdir()
            made.append(stack.enter_context(vllm_serve(tmp_path / role, Path(models[role]), TOKEN, *both, *flags)))
        yield made[0], made[1], models["rollout"]


def asked(server: Any, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return dict(requests.get(f"{server.url}{path}", headers=headers, timeout=60).json())


def status(server: Any) -> dict[str, Any]:
    return asked(server, wire.STATUS)


def computes(server: Any) -> int:
    """Requests that run now."""
    return int(asked(server, wire.STATS)["running"])


def generated(server: Any) -> int:
    """Tokens, ever."""
    return int(asked(server, wire.STATS)["generated"])


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """``rl-coserve lend`` or ``reclaim`` of this pool."""
    capsys.readouterr()
    code = main([words[0], "--pool", POOL, "--json", *words[1:]])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_goes_on_while_the_gpu_that_it_borrowed_is_reclaimed_and_uses_it_again_when_it_is_lent(
    servers: tuple[Any, Any, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving, rollout, model = servers
    folder = tmp_path / "runs"
    place = [f'run.folder="{folder}"', "run.name=lent", f'model.path="{model}"']
    place += [f'rollout.served=["{rollout.url}"]', f'rollout.served_token_file="{rollout.token_file}"']
    words = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SETTINGS, *place]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, stdout=output, stderr=output)
    events_file = folder / "lent-001" / "events.jsonl"

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(events_file) if event["kind"] == kind] if events_file.exists() else []

    def until(true: Callable[[], Any], seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert run.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, (log.read_text()[-3000:], rollout.log.read_text()[-3000:])
            time.sleep(0.1)

    def lent() -> dict[str, Any]:
        return dict(command(capsys, "lend", "--status")[1]["rollouts"][0])

    try:
        with Users(serving.url, str(Path(model).parent / "a")) as users:
            # It borrows the server, and its turns run there.
            until(lambda: len(events("step")) >= 1 and lent()["tokens"] > 200, 300)
            assert status(rollout)["lease"]["job"] == "lent-001"
            until(lambda: computes(rollout) >= 4)
            made = generated(rollout)  # some tokens each
            until(lambda: generated(rollout) >= made + 60 and computes(rollout) >= 4)
            # Everything back, in the middle of it.
            code, found = command(capsys, "reclaim")
            assert (code, found["killed"]) == (0, [])
            assert found["out"] == found["kept"]
            until(lambda: events("handed_back") and events("returned"))
            returned = events("returned")[-1]
            assert (returned["worker"], returned["reason"]) == (rollout.url, "reclaimed")
            until(lambda: status(rollout)["activation"]["state"] == "inactive")
            assert (lent()["inactive"], lent()["pages"]) == (True, 0)
            until(lambda: status(rollout)["lease"] is None)
            before, computed = len(events("step")), lent()["tokens"]
            until(lambda: len(events("step")) >= before + 2)
            assert lent()["tokens"] == computed, "nothing ran there meanwhile"
            # Lent again, and used again.
            had = len(events("borrowed"))
            command(capsys, "lend", "--max", "1")
            until(lambda: len(events("borrowed")) > had)
            assert events("borrowed")[-1]["reason"] == "used least"
            assert events("activated")[-1]["worker"] == rollout.url
            until(lambda: lent()["tokens"] > computed + 200)
            before = len(events("step"))
            until(lambda: len(events("step")) >= before + 1)
        run.send_signal(signal.SIGINT)
        assert run.wait(90) == 130, log.read_text()[-3000:]  # interrupted
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    # The ledger closes, and says what the journal says.
    (end,) = events("run_end")
    assert end["status"] == "interrupted"
    counts = end["ledger"]
    assert counts["started"] == counts["in_flight"] + sum(counts[state] for state in END_STATES)
    assert recount((folder / "lent-001" / "ledger.jsonl").read_text().splitlines()) == counts
    # What was handed back went on elsewhere, with its tokens; users saw nothing; nobody was killed.
    told = events("handed_back")
    assert {event["worker"] for event in told} == {rollout.url}
    assert sum(event["requests"] for event in told) >= 1
    assert sum(event["tokens"] for event in told) >= 1
    assert set(users.answers) == {200}
    assert serving.process.poll() is None
    assert rollout.process.poll() is None
    assert status(rollout)["lease"] is None
    assert (status(rollout)["unfinished"], status(rollout)["suspended"]) == (0, False)
