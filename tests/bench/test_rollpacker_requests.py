"""What is watched in a simulated run is what it says; one fetch feeds once; the planner's figures play the planner's own rule."""

import json

import pytest

from orchestrator.sim.paper_setups import ROLLPACKER, rollpacker
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers import rollpacker_planner, rollpacker_requests

ALONE = ["run.mode=sync_plus", *(f"sim.tasks.{task}.reward_seconds=0" for task in ("math", "code", "judged"))]


def test_every_trained_trajectory_is_seen_by_the_watch_with_its_tokens_and_the_run_is_the_same() -> None:
    config = rollpacker(
        "7B/8k", "veRL", 8, steps=2, extra=[*ALONE, "rollout.groups_per_step=16", "rollout.environments=128"]
    )
    said, run = rollpacker_requests.watched(config)
    trained = {line["id"] for line in run.journal if line["state"] == "trained"}
    assert trained <= {one.trajectory for one in said if one.whole}
    assert run.events_of("step")
    assert simulate(config).events.decode().splitlines() == [
        json.dumps(e, sort_keys=True, separators=(",", ":")) for e in run.events
    ]
    longest = max(said, key=lambda one: one.tokens)
    middle = longest.end - longest.per_token * longest.tokens / 2
    assert longest.prompt < rollpacker_requests._held([longest], middle) < longest.prompt + longest.tokens


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_trainer_that_is_fed_once_uses_no_more_than_its_share(share: float) -> None:
    extra = [*rollpacker_requests.MATH, f"sim.feed_once={share}", "rollout.rounds.enabled=false"]
    config = rollpacker("7B/8k", "+ stream trainer", 4, steps=3, extra=[*extra, "rollout.groups_per_step=32"])
    events = [json.loads(line) for line in simulate(config).events.splitlines()]
    fed = [event["metrics"]["stream_fed"] for event in events if event["kind"] == "step"]
    assert max(fed) > 0
    assert max(fed) <= share if share else max(fed) > 0.25


def test_streaming_a_judges_layers_beside_its_computation_is_never_slower() -> None:
    detail, rows = rollpacker_requests.figure_14b({})
    for one in detail.values():
        assert one["pipelined"] <= one["apart"]
    streamed = [one["streamed_layers"] for one in detail.values()]
    assert streamed == sorted(streamed), "longer sequences leave less room"
    assert streamed[-1] == 14, "half of 28"
    assert len(rows) == 2


@pytest.mark.parametrize("size", list(ROLLPACKER))
def test_the_planners_rung_has_a_worker_a_gpu_and_stays_within_servers(size: str) -> None:
    config = rollpacker_planner.rung(size, 1, 2)
    assert config.rollout.workers == ROLLPACKER[size][1]
    assert (config.sim.tensor_parallel, config.rollout.planner.max_tp) == (1, 8)
