"""Features of the four papers together in whole runs with real engines and a real trainer: a tiny model on a CPU, two steps.
Three in every run of the tests, the others in the long tier. All pairs there are: tests/config/test_composition_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount
from tests.support.real_runs import end, start

pytestmark = [pytest.mark.engine, pytest.mark.timeout(540)]
STEPS = 2
SMALL = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "run.name=t",
    f"run.steps={STEPS}",
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.group_size=4",
    "rollout.redundant_groups=1.0",
    "rollout.environments=32",
    "trainer.micro_batch_size=4",
    "checkpoint.every=0",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "warmup.steps=2",
]
ONE_OFF = ["run.mode=one_off", "rollout.alpha=1"]
AREAL = ["run.mode=areal", "rollout.alpha=1"]
ASYNC = ["run.mode=async", "rollout.alpha=1"]
TWO = ["rollout.workers=2"]
ROUNDS = ["rollout.rounds.enabled=true"]
FORECASTS = ["rollout.prediction.enabled=true"]
BY_FORECASTS = [*ROUNDS, *FORECASTS, "rollout.rounds.predict=progressive"]
PLACED = [*FORECASTS, "rollout.placement.enabled=true"]
SPEEDS = "rollout.placement.degrees.speeds={1 = 1.0, 2 = 0.7}"
DEGREES = [*PLACED, "rollout.placement.degrees.enabled=true", "rollout.placement.degrees.start=[2]", SPEEDS]
MOVES = ["rollout.kv_transfer.enabled=true", "rollout.kv_transfer.min_tokens=8"]
APART = [
    *MOVES,
    'rollout.routing.hardware={vllm-0 = "H800", vllm-1 = "H20"}',
    "rollout.disaggregation.enabled=true",
    "rollout.disaggregation.prefill=H800",
    "rollout.disaggregation.decode=H20",
    "rollout.disaggregation.min_tokens=8",
]
STREAM = ["trainer.stream=true"]
COLOCATED = [*TWO, *STREAM, "rollout.colocation.enabled=true"]
COLLECTIVE = ["rollout.weights=collective"]
PLANNED = [*TWO, "rollout.planner.enabled=true"]
DYNAMIC = ["rollout.dynamic_sampling=true", "rollout.max_filtered_groups=4", "rollout.dynamic_concurrency=true"]
SHORT = {
    "one-off, tail batching by forecasts, streamed training": [*ONE_OFF, *BY_FORECASTS, *STREAM],
    "colocation of two replicas, tail batching, prediction": [
        *COLOCATED,
        *ROUNDS,
        *FORECASTS,
        "trainer.data_parallel=2",
    ],
    "areal, prediction and priority, dynamic sampling": [*AREAL, *FORECASTS, *DYNAMIC],
}
LONG = {
    "colocation, degrees": [*COLOCATED, *DEGREES, "trainer.data_parallel=2"],
    "colocation, planner, tail batching": [*COLOCATED, *PLANNED, *ROUNDS],
    "colocation, KV that moves, placement": [*COLOCATED, *MOVES, *PLACED],
    "planner, tail batching, prediction": [*PLANNED, *ROUNDS, *FORECASTS],
    "planner, streamed training, async": [*PLANNED, *STREAM, *ASYNC],
    "degrees, tail batching by forecasts": [*TWO, *DEGREES, *BY_FORECASTS],
    "prefill and decode apart, placement": [*TWO, *APART, *PLACED],
    "prefill and decode apart, tail batching, streamed training": [*TWO, *APART, *ROUNDS, *STREAM],
    "collective, tail batching, streamed training": [*TWO, *COLLECTIVE, *ROUNDS, *STREAM],
    "collective, placement, KV that moves, async": [*TWO, *COLLECTIVE, *PLACED, *MOVES, *ASYNC],
    "one-off, placement, KV that moves": [*TWO, *ONE_OFF, *PLACED, *MOVES],
    "areal, streamed training, redundant groups": [*AREAL, *STREAM, "rollout.redundant_groups=1.5"],
}


@pytest.mark.parametrize(
    "name",
    [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)],
    ids=lambda name: name.replace(" ", "-"),
)
def test_features_of_several_papers_train_together(name: str, tmp_path: Path) -> None:
    chosen = {**SHORT, **LONG}[name]
    process = start("examples/frozenlake.toml", *SMALL, *chosen, f'run.folder="{tmp_path}"')
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    assert process.returncode == 0, output
    run = tmp_path / "t-001"
    events = read_events(run / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["version"] for event in steps] == list(range(1, STEPS + 1))
    assert not [event for event in events if event["kind"] == "fault"]
    counts = recount((run / "ledger.jsonl").read_text().splitlines())
    assert counts["trained"] == STEPS * 16
    kinds = {event["kind"] for event in events}
    told = [event["redundancy"] for event in events if event["kind"] == "dynamic_sampling"]
    assert bool(told) == ("dynamic sampling" in name)
    assert all(1 <= one <= 2 for one in told), "at most four of four groups were replaced"
    shown = {"rounds": "round", "planner": "plan", "degrees": "degrees", "colocation": "stream_trigger"}
    for key, kind in shown.items():
        assert (kind in kinds) == any(f"{key}.enabled=true" in one for one in chosen), kind
    if "data_parallel=2" in str(chosen) and "degrees" not in name:
        assert any(event["metrics"]["stream_fed"] > 0 for event in steps), "one of the two replicas streamed"
