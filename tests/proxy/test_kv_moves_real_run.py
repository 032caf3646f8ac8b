"""A whole run whose turns go to another engine than their prefix: real engines in Ray actors, KV moved between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
RUN = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.environments=32",
    "rollout.workers=2",
    "trainer.micro_batch_size=8",
    "evaluation.prompts=16",
    "evaluation.every=0",
    "warmup.steps=2",
    "run.steps=3",
    "rollout.kv_transfer.enabled=true",
    "rollout.kv_transfer.min_tokens=1",
]
PLACED = (
    "rollout.prediction.enabled=true",
    "rollout.placement.enabled=true",
    "rollout.placement.certainty=0.0",
    "rollout.placement.prefill_seconds=0.01",
    "rollout.placement.token_seconds=1.0",  # so that every gain is worth a move
    "rollout.placement.interference=0.2",
    "rollout.placement.renew_share=0.01",
    "rollout.placement.renew_seconds=0.0",
)

PARTED = (
    "rollout.kv_transfer.carrier=mooncake",
    "rollout.disaggregation.enabled=true",
    "rollout.disaggregation.prefill=P",
    "rollout.disaggregation.decode=D",
    "rollout.disaggregation.min_tokens=1",
    "rollout.disaggregation.degrees={vllm-0=2}",
    'rollout.routing.hardware={vllm-0="P", vllm-1="D"}',
    "rollout.groups_per_step=2",
    "rollout.dynamic_sampling=false",
    "rollout.environments=16",
    "run.steps=2",
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("rollout.routing.policy=round-robin",), id="every other turn goes to the other engine"),
        pytest.param(PLACED, id="trajectories are placed by predicted length, and move in gaps"),
        pytest.param(PARTED, id="prefill on an engine of two devices, decode on one of one, over Mooncake"),
    ],
)
def test_a_run_whose_turns_change_engines_moves_their_kv_and_accounts_for_every_trajectory(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *RUN, *options]
    done = subprocess.run(
        [*command, f'run.folder="{tmp_path}"', "run.name=t"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / "t-001"
    events = list(read_events(folder / "events.jsonl"))
    moves = [event for event in events if event["kind"] == "kv_moved"]
    assert moves
    assert {event["source"] for event in moves} <= {"vllm-0", "vllm-1"}
    assert all(event["tokens"] > 0 and event["bytes"] > 0 for event in moves)
    faults = Counter(event["detail"][:60] for event in events if event["kind"] == "fault" and event["cause"] == "kv")
    assert all("differs" in detail or "updating" in detail for detail in faults), faults
    counted = recount((folder / "ledger.jsonl").read_text().splitlines())
    ends = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed", "in_flight")
    assert counted["started"] == sum(counted[name] for name in ends)
    assert json.loads((folder / "summary.json").read_text())["steps"] == (2 if options is PARTED else 3)
    assert {event["carrier"] for event in moves} == ({"mooncake"} if options is PARTED else {"tcp"})
