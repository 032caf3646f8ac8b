"""The pools of a whole run change while it goes on. Engines and trainer are twins in real processes; Ray, the relay, the
environments' processes, the journals and the command are the run's own. With tiny engines: marked long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import parse_config
from orchestrator.ledger import LIVE_STATES, recount
from tests.support import real_runs

pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SMALL = ["rollout.group_size=4", "rollout.groups_per_step=2", "rollout.environments=12", "evaluation.prompts=4"]
SMALL += [
    "rollout.dynamic_sampling=false",
    "warmup.steps=0",
    "relay.kind=fsspec",
    "run.name=run",
    "trainer.micro_batch_size=8",
]
TWINS = [
    "sim.decode_seconds_per_step=0.02",
    "environment.backend=subprocess",
    "environment.idle_seconds=600",
    "run.steps=400",
]


class Running:
    """A run under way."""

    def __init__(self, folder: Path, module: str, *more: str) -> None:
        words = [
            sys.executable,
            "-m",
            module,
            "train",
            "examples/frozenlake.toml",
            *SMALL,
            *more,
            f"run.folder={folder}",
        ]
        self.path = folder / "run-001"
        self.process = subprocess.Popen(
            words,
            cwd=real_runs.ROOT,
            env={**os.environ, "NO_COLOR": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def scale(self, *changes: str) -> int:
        words = [sys.executable, "-m", "orchestrator.cli", "scale", *changes, "--run", str(self.path)]
        return subprocess.run(words, cwd=real_runs.ROOT, check=False, capture_output=True, timeout=60).returncode

    def until(self, true: Callable[[], Any], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or self.process.poll() is not None:
                real_runs.end(self.process)
                raise AssertionError(self.process.communicate()[0][-3000:])
            time.sleep(0.2)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return real_runs.of(self.path, kind)

    def scaled(self) -> list[tuple[str, str, int]]:
        return [(event["worker"], event["what"], event["engines"]) for event in self.of("scaled")]

    def processes(self) -> dict[str, int]:
        lines = (self.path / "processes").read_text(encoding="utf-8").splitlines()
        return {name: int(pid) for name, pid in (line.split() for line in lines)}

    def served_by(self, worker: str) -> int:
        """Turns so far."""
        file = self.path / "turns.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return sum(json.loads(line)[2] == worker for line in lines)

    def closed(self) -> dict[str, Any]:
        """It has ended; its ledger."""
        said, _ = self.process.communicate(timeout=300)
        assert self.process.returncode in (0, 130), said[-3000:]
        counted = recount((self.path / "ledger.jsonl").read_text(encoding="utf-8").splitlines())
        assert counted == self.of("run_end")[-1]["ledger"]
        return counted


def last_states(run: Path) -> dict[str, str]:
    """By trajectory."""
    whole_lines = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in whole_lines if line.endswith("\n")]
    return {record["id"]: record["state"] for record in records}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.long
def test_engines_and_environments_are_added_and_taken_away_while_a_run_goes_on(tmp_path: Path) -> None:
    run = Running(tmp_path, "scripts.bench.micro.engine_twins", *TWINS, "ray.cpus=5")
    try:
        run.until(lambda: len(run.of("step")) >= 2)
        assert run.scale("rollout=+1", "environments=+12", "rewards=1") == 0
        run.until(lambda: run.scaled() == [("vllm-1", "added", 2)])
        run.until(lambda: run.served_by("vllm-1"))
        run.until(lambda: run.of("environments")[-1]["size"] == 24)
        pid = run.processes()["vllm-1"]
        assert run.scale("rollout=1", "environments=8") == 0
        run.until(lambda: run.scaled()[1:] == [("vllm-1", "removed", 1)])
        run.until(lambda: not alive(pid))
        run.until(lambda: run.of("environments")[-1]["size"] == 8)
        run.until(lambda: sum(run.of("environments")[-1][state] for state in ("ready", "busy", "recycling")) <= 8)
        run.process.terminate()
        counted = run.closed()
    finally:
        real_runs.end(run.process)
    assert counted["trained"] > 0
    assert set(counted["failed_by_cause"]) <= {"interrupted"}
    assert run.of("fault") == []


@pytest.mark.long
def test_the_trainers_death_leaves_engines_alive_and_what_is_in_flight(tmp_path: Path) -> None:
    more = ["run.steps=24", "checkpoint.every=4", "rollout.workers=2", "relay.kind=mooncake", "ray.cpus=5"]
    run = Running(tmp_path, "scripts.bench.micro.engine_twins", *TWINS, *more)
    try:
        run.until(lambda: len(run.of("step")) >= 6)
        before = run.processes()
        flying = [name for name, state in last_states(run.path).items() if state in LIVE_STATES]
        os.kill(before["trainer"], signal.SIGKILL)
        run.until(lambda: run.of("recovered"))
        after = run.processes()
        counted = run.closed()
    finally:
        real_runs.end(run.process)
    assert {name for name in before if after[name] != before[name]} == {"trainer"}
    assert [event["what"] for event in run.of("recovered")] == ["trainer"]
    assert len(run.of("run_start")) == 1
    assert [event["version"] for event in run.of("step")] == list(range(1, 25)), (
        "no step is lost, none is trained twice"
    )
    assert counted["failed"] == 0
    assert counted["trained"] == 24 * 8
    ended = last_states(run.path)
    assert {ended[name] for name in flying} <= {"trained", "aborted_redundant", "evicted_stale"}
    assert [ended[name] for name in flying].count("trained") > 0
    alpha = parse_config(json.loads((run.path / "config.json").read_text(encoding="utf-8"))).rollout.alpha
    assert max(int(lag) for event in run.of("step") for lag in event["lag"]) <= alpha


@pytest.mark.long
def test_real_engines_are_added_and_taken_away_while_a_run_goes_on(tmp_path: Path) -> None:
    run = Running(tmp_path, "orchestrator.cli", "run.steps=2000", "rollout.workers=1")
    try:
        run.until(lambda: len(run.of("step")) >= 2, 200)
        assert run.scale("rollout=+1") == 0
        run.until(lambda: run.scaled() == [("vllm-1", "added", 2)], 200)
        run.until(lambda: run.served_by("vllm-1"))
        versions = {event["version"] for event in run.of("worker")}
        run.until(
            lambda: any(event["name"] == "vllm-1" and event["version"] > max(versions) for event in run.of("worker"))
        )
        assert run.scale("rollout=-1") == 0
        run.until(lambda: run.scaled()[1:] == [("vllm-1", "removed", 1)])
        run.process.terminate()
        assert run.closed()["trained"] > 0
    finally:
        real_runs.end(run.process)
    assert run.of("fault") == []
