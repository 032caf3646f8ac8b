"""A whole run whose trainer and two vLLM engines take turns on (pretended) shared devices: half of the engines are freed within
a step, their requests migrate, gradients are taken there, and the worker comes back with the new weights. CPU processes have
their own memory: what is real is everything else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
STEPS = 2
OVERRIDES = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    'run.mode="sync_plus"',
    f"run.steps={STEPS}",
    "run.name=t",
    "rollout.alpha=0",
    "rollout.workers=2",
    "rollout.groups_per_step=8",
    "rollout.redundant_groups=1.0",
    "rollout.environments=64",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.colocation.enabled=true",
    "trainer.stream=true",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "evaluation.prompts=20",
    "evaluation.every=0",
    "warmup.steps=5",
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_is_freed_within_a_step_streamed_on_and_returned(ranks: int, tmp_path: Path) -> None:
    """With a rank a worker, one of the two replicas streams, and the other joins for the rest."""
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *OVERRIDES]
    command.append(f"trainer.data_parallel={ranks}")
    process = subprocess.Popen(
        [*command, f'run.folder="{tmp_path}"'],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=540)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    run = tmp_path / "t-001"
    events = read_events(run / "events.jsonl")
    freed = [event for event in events if event["kind"] == "stream_trigger" and event["freed"]]
    assert len(freed) == STEPS
    assert all(len(event["freed"]) == 1 and 0.2 <= event["fraction"] <= 0.5 for event in freed)
    moves = [event for event in events if event["kind"] == "handover"]
    assert [event for event in moves if event["error"]] == []
    assert [event["what"] for event in moves].count("residency stream") == STEPS
    order = [
        "freed" if event["kind"] == "handover" and event["what"] == "residency stream" else "collected"
        for event in events
        if (event["kind"] == "handover" and event["what"] == "residency stream")
        or (event["kind"] == "stage" and event["stage"] == "get_batch")
    ]
    assert order == ["freed", "collected"] * STEPS, "while the rest of the batch was still played, on the other worker"
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["version"] for event in steps] == [1, 2]
    assert any(event["metrics"]["stream_fed"] > 0 for event in steps)
    assert all(event["metrics"]["stream_restarts"] == 0 for event in steps)
    assert not [event for event in events if event["kind"] in ("fault", "alarm")]
    counts = recount((run / "ledger.jsonl").read_text().splitlines())
    assert counts["trained"] == STEPS * 64
    assert (run / "model-final" / "config.json").is_file()
