"""A whole run on two serving GPUs, of which it has one at a time: real ``vllm serve`` rollout engines in two pools, a serving
engine with users in the one, and ``rl-coserve train`` without a worker of its own. The crowded one is given back for the other,
which is killed, and the first is taken again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from orchestrator.api import http as wire  # noqa: E402
from orchestrator.events import read_events  # noqa: E402
from orchestrator.ledger import END_STATES, recount  # noqa: E402
from orchestrator.tasks.calculator import CalculatorTask  # noqa: E402
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path  # noqa: E402
from vllm_rlplugin.server.server_lease import lease_path  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(880)]

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-the-exchanged-run-0123456789"
POOLS = [f"test-exchanged-{os.getpid()}-{number}" for number in range(2)]
USERS = 15
SETTINGS = [
    "run.steps=500",
    "run.minutes=30",  # ended by the test: start-up counts, which takes minutes on a busy machine
    "rollout.workers=0",
    "rollout.borrowed.most=1",
    "rollout.borrowed.every=0.5",
    "rollout.borrowed.window=4",
    "rollout.borrowed.crowded=0.3",
    "rollout.borrowed.margin=0.1",
    "rollout.borrowed.patience=20",  # a live server on a busy machine is silent for seconds
    "rollout.borrowed.rest=2",
    "rollout.borrowed.idle=0",
    "rollout.borrowed.lease=30",
    "rollout.routing.served_cap=12",
    "rollout.environments=16",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.group_size=4",
    "rollout.groups_per_step=4",
    "rollout.engine.max_model_len=352",
    "rollout.engine.max_num_seqs=16",
    "trainer.micro_batch_size=8",
    "trainer.stream=false",
    "trainer.entropy_coefficient=0.05",  # so that weights change, though it has not learned anything yet
    "warmup.steps=0",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "task.name=calculator",
]


class Users:
    """So many who ask the serving engine all the time, each something else; ``answers``: the statuses of what they got."""

    def __init__(self, url: str, model: str) -> None:
        self.answers: list[int] = []
        self._url, self._model, self._stop = url, model, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(USERS)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, user: int) -> None:
        number = user * 1000
        while not self._stop.is_set():
            number += 1
            prompt = [(7 * at + 13 * number) % 80 + 5 for at in range(240)]
            body = {"model": self._model, "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            self.answers.append(requests.post(f"{self._url}/v1/completions", json=body, timeout=120).status_code)


@pytest.fixture
def servers(tmp_path: Path, vllm_serve: Any) -> Iterator[tuple[Any, Any, Any, str]]:
    """Serving engine, the rollout engine beside it, the one in the other pool, model of the rollout engines."""
    from megatron_rlplugin.tiny_model import create_qwen3

    common: dict[str, Any] = {"max_positions": 352, "dtype": "float32", "intermediate_size": 128, "head_dim": 32}
    served = [chr(33 + at) for at in range(93)]
    serves = create_qwen3(
        str(tmp_path / "a"), hidden_size=64, layers=2, heads=2, kv_heads=1, seed=1, vocabulary=served, **common
    )
    words = list(CalculatorTask(10).vocabulary)
    rolls = create_qwen3(
        str(tmp_path / "b"), hidden_size=64, layers=2, heads=4, kv_heads=2, seed=2, vocabulary=words, **common
    )
    both = ["--rl-kv-pool-mib", "4", "--rl-kv-pool-page-kib", "32", "--rl-kv-pool-keep", "1"]
    both += ["--max-model-len", "352", "--max-num-seqs", "16"]
    slo = [
        "--rl-kv-pool-role",
        "serving",
        "--rl-kv-pool-lent",
        "1",
        "--rl-kv-pool-ttft",
        "20",
        "--rl-kv-pool-tpot",
        "10",
    ]
    wanted = {
        "serving": (serves, POOLS[0], [*slo, "--rl-kv-pool-window", "1", "--num-gpu-blocks-override", "192"]),
        "near": (rolls, POOLS[0], ["--rl-kv-pool-budget-mib", "3", "--num-gpu-blocks-override", "96"]),
        "far": (rolls, POOLS[1], ["--rl-kv-pool-budget-mib", "3", "--num-gpu-blocks-override", "96"]),
    }
    with ExitStack() as stack:
        for pool in POOLS:
            lease = lease_path(pool_path(pool))
            for file in (pool_path(pool), lease, lease.with_name(f"{lease.name}.lock")):
                stack.callback(partial(file.unlink, missing_ok=True))

        def start(name: str) -> Any:
            model, pool, flags = wanted[name]
            (tmp_path / name).mkdir()
            options = ["--rl-kv-pool", pool, *both, *flags]
            return stack.enter_context(vllm_serve(tmp_path / name, Path(model), TOKEN, *options))

        with ThreadPoolExecutor() as together:
            made = list(together.map(start, wanted))
        yield made[0], made[1], made[2], rolls


def status(server: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return dict(requests.get(f"{server.url}{wire.STATUS}", headers=headers, timeout=60).json())


def test_a_run_gives_a_crowded_server_back_for_another_and_takes_it_again_when_that_is_killed(
    servers: tuple[Any, Any, Any, str], tmp_path: Path
) -> None:
    serving, near, far, model = servers
    folder = tmp_path / "runs"
    place = [f'run.folder="{folder}"', "run.name=exchanged", f'model.path="{model}"']
    names = tmp_path / "servers"
    names.write_text("# none yet\n")
    place += [
        f'rollout.served=["{near.url}"]',
        f'rollout.borrowed.file="{names}"',
        f'rollout.served_token_file="{near.token_file}"',
    ]
    words = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SETTINGS, *place]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, stdout=output, stderr=output)
    file = folder / "exchanged-001" / "events.jsonl"

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(file) if event["kind"] == kind] if file.exists() else []

    def used() -> float:
        """The share of its memory that serving uses beside the near one, in the mean."""
        return float(status(near)["device"]["serving_now"])

    def told(kind: str) -> list[tuple[str, str]]:
        names = {near.url: "near", far.url: "far"}
        return [(names[event["worker"]], event["reason"]) for event in events(kind)]

    def until(true: Callable[[], Any], seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert run.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, (told("borrowed"), told("returned"), log.read_text()[-3000:])
            time.sleep(0.1)

    def steps(more: int) -> None:
        before = len(events("step"))
        until(lambda: len(events("step")) >= before + more)

    try:
        until(lambda: len(events("step")) >= 1, 300)
        assert told("borrowed") == [("near", "the run starts")]
        with Users(serving.url, str(Path(model).parent / "a")) as users:
            until(lambda: used() > 0.4)
            time.sleep(5)  # longer than the window
            assert told("returned") == [], "the last one is kept, however crowded, while there is no other"
            names.write_text(f"{far.url}\n")
            until(lambda: told("returned") == [("near", "crowded")])
            until(lambda: told("borrowed")[1:] == [("far", "used least")])
            steps(2)
            assert status(far)["lease"]["job"] == "exchanged-001"
            assert (status(near)["lease"], status(near)["activation"]["state"]) == (None, "inactive")
            assert status(near)["unfinished"] == 0
        os.killpg(far.process.pid, signal.SIGKILL)
        until(lambda: told("borrowed")[2:] == [("near", "used least")])
        assert events("activated")[-1]["worker"] == near.url
        steps(2)
        until(lambda: told("returned")[1:] == [("far", "gone")])
        found = status(near)
        assert (found["lease"]["job"], found["activation"]["state"]) == ("exchanged-001", "active")
        assert found["weight_version"] >= events("step")[-2]["version"]
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
    assert recount((folder / "exchanged-001" / "ledger.jsonl").read_text().splitlines()) == counts
    assert counts["failed"] <= counts["in_flight"] + 16, counts  # those that the interruption ended
    # The weights were right all the time: the trainer finds the log-probs that the rollout had at the same version.
    gaps = [event["metrics"]["logprob_gap_max"] for event in events("step")]
    assert len(gaps) >= 5
    assert max(gaps) < 1e-3
    moved = sum(event["requests"] for event in (*events("returned"), *events("handed_back")))
    assert moved >= 1, "requests that went on elsewhere, with their tokens"
    # Users saw nothing of it, and nobody else was harmed.
    assert set(users.answers) == {200}
    assert [server.process.poll() for server in (serving, near)] == [None, None]
    assert (status(near)["lease"], status(near)["unfinished"], status(near)["suspended"]) == (None, 0, False)
