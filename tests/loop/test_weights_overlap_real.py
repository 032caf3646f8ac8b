"""A version travels beside the next training step in a whole run: real engines, a real trainer, a relay that takes its time."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount
from tests.loop.test_composed_runs import ASYNC, SMALL
from tests.support.real_runs import end, of, start
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(540)]
STEPS = 4
PUT_SECONDS = 2.0
# fsspec's files of this machine, of which each takes its time to be written: no part of the run knows.
SLOW_FILES = f"""
import time
import fsspec
from fsspec.implementations.local import LocalFileSystem

class SlowFiles(LocalFileSystem):
    protocol = "slow"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("slow://") if isinstance(path, str) else path)

    def pipe_file(self, path, value, mode="overwrite", **options):
        time.sleep({PUT_SECONDS})
        self.makedirs(self._parent(path), exist_ok=True)
        return super().pipe_file(path, value, mode=mode, **options)

fsspec.register_implementation("slow", SlowFiles)
"""


def begin(tmp_path: Path) -> subprocess.Popen[str]:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(SLOW_FILES, encoding="utf-8")
    slow = ["relay.kind=fsspec", f"relay.master=slow://{tmp_path}/relay", "trainer.data_parallel=2"]
    steps = [f"run.steps={STEPS}", "checkpoint.every=2", "rollout.weights_overlap=true", f'run.folder="{tmp_path}"']
    return start("examples/frozenlake.toml", *SMALL, *ASYNC, *slow, *steps, path=modules)


def test_a_step_trains_while_the_version_before_it_is_on_its_way(tmp_path: Path) -> None:
    process = begin(tmp_path)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    assert process.returncode == 0, output
    run = tmp_path / "t-001"
    events = read_events(run / "events.jsonl")
    assert [event["version"] for event in events if event["kind"] == "step"] == list(range(1, STEPS + 1))
    assert not [event for event in events if event["kind"] == "fault"]
    assert recount((run / "ledger.jsonl").read_text().splitlines())["trained"] == STEPS * 16
    lags = [int(lag) for event in events if event["kind"] == "step" for lag in event["lag"]]
    assert max(lags) <= 1
    stages = {
        name: {event["step"]: event for event in events if event["kind"] == "stage" and event["stage"] == name}
        for name in ("train_step", "publish", "resume")
    }
    published = [event for event in events if event["kind"] == "stage" and event["stage"] == "publish"][1:]
    assert [event["step"] for event in published] == list(range(STEPS))
    for event in published[:-1]:
        assert event["end"] - event["start"] >= PUT_SECONDS
        after = stages["train_step"][event["step"] + 1]
        assert after["start"] < event["end"], "the next step began before the version was on the relay"
        assert event["end"] <= stages["resume"][event["step"] + 1]["end"]


def test_a_trainer_that_dies_while_a_version_is_on_its_way_comes_back_with_that_version(tmp_path: Path) -> None:
    process, run = begin(tmp_path), tmp_path / "t-001"
    try:
        wait_for(lambda: [event for event in of(run, "step") if event["step"] == 1] or process.poll() is not None, 300)
        assert len([event for event in of(run, "stage") if event["stage"] == "publish"]) == 2, "a third is under way"
        rows = dict(line.split() for line in (run / "processes").read_text(encoding="utf-8").splitlines())
        os.kill(int(rows["trainer"]), signal.SIGKILL)
        output, _ = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 0, output
    (recovered,) = of(run, "recovered")
    assert recovered["what"] == "trainer"
    assert "bit for bit" not in recovered["detail"], "its weights are those that it had"
    assert [event["version"] for event in of(run, "step")] == list(range(1, STEPS + 1))
    assert recount((run / "ledger.jsonl").read_text().splitlines())["trained"] == STEPS * 16
    published = [event["step"] for event in of(run, "stage") if event["stage"] == "publish"]
    assert published == [0, *range(STEPS)]
