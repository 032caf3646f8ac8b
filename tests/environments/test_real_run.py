"""A real run (vLLM, Megatron-Core, Ray, Mooncake) whose environments live in processes that are killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import read_events

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "run.name=t",
    "run.steps=4",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "evaluation.prompts=20",
    "evaluation.every=0",
    "warmup.steps=5",
    "environment.backend=subprocess",
    "environment.size=6",
    "environment.warm=2",
]


def test_killed_environments_cost_their_trajectories_and_a_killed_run_leaves_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SETTINGS]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, f'run.folder="{tmp_path}"'], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    run = tmp_path / "t-001"
    try:
        _until(lambda: len(_of(run, "step")) >= 1, process, tmp_path)
        killed = 0
        while len(_of(run, "step")) < 3:
            for pid in _workers(process.pid)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            time.sleep(1.0)
            assert process.poll() is None, (tmp_path / "output").read_text()
        pool = _of(run, "environments")[-1]
        assert killed
        assert pool["started"] > 6
        assert pool["replaced"]
        causes = _of(run, "step")[-1]["ledger"]["failed_by_cause"]
        assert set(causes) <= {"environment_died"}
        alive = _workers(process.pid)
        assert alive
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _until(lambda: not any(_runs_worker(pid) for pid in alive), None, tmp_path)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _of(run: Path, kind: str) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    return [event for event in read_events(file) if event["kind"] == kind] if file.exists() else []


def _until(condition: Any, process: subprocess.Popen[bytes] | None, folder: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        said = (folder / "output").read_text()
        assert time.monotonic() < deadline, said
        assert process is None or process.poll() is None, said
        time.sleep(0.1)


def _workers(orchestrator: int) -> list[int]:
    """Environment processes below the orchestrator, without their watchers."""
    found = []
    for watcher in _children(orchestrator):
        found += [pid for pid in _children(watcher) if _runs_worker(pid)]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _runs_worker(pid: int) -> bool:
    try:
        return b"orchestrator.environments.environment_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
