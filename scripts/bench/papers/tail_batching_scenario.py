"""The workload of ``tail-batching``: one epoch of prompts whose response lengths are a production service's (ServeGen).

The lengths are in ``response_lengths.json`` beside this module, with their source: 160 prompts of 12 members, in tokens divided
by 64, because a CPU generates them. What a prompt's members have in common is what the requests of one client have in common.
The same episodes go to the real engine and to the simulator; what an engine costs is no part of this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import Config, load_config
from orchestrator.sim.recorded_traces import PREFIX, EpisodeTrace, EpisodeTraces, TracedTurn

LENGTHS = Path(__file__).with_name("response_lengths.json")
PROMPTS, RESPONSES = 16, 8  # P0, R0; the paper has 128 and 8
ETA = 1.25
MAX_LEN, SLOTS = 512, 256
# prompts at a time, and tokens of each one's eight members: plain rounds that the costs are fitted to, none of them the epoch's
CALIBRATION = [
    (prompts, members)
    for prompts in (2, 8, 16, 25)
    for members in ([4] * RESPONSES, [4] * (RESPONSES - 1) + [64], [48] * RESPONSES)
]
CALIBRATION_ROUNDS = 3


def lengths() -> dict[str, Any]:
    """``prompts``: tokens of each member's response, and where they are from."""
    found: dict[str, Any] = json.loads(LENGTHS.read_text(encoding="utf-8"))
    return found


def traces() -> EpisodeTraces:
    """The episodes: one turn each, environments that take no time."""
    episodes: list[EpisodeTrace] = []
    groups: list[tuple[int, ...]] = []
    for members in lengths()["prompts"]:
        groups.append(tuple(range(len(episodes), len(episodes) + len(members))))
        episodes += [EpisodeTrace((TracedTurn(PREFIX, length, 0.0),), 0.0, None) for length in members]
    return EpisodeTraces(tuple(episodes), tuple(groups))


def alike(lengths_of_members: Sequence[int]) -> EpisodeTraces:
    """Any number of prompts whose members have these lengths: a round's time is then that of its terms, and of nothing drawn."""
    episodes = tuple(EpisodeTrace((TracedTurn(PREFIX, length, 0.0),), 0.0, None) for length in lengths_of_members)
    return EpisodeTraces(episodes, (tuple(range(len(episodes))),))


def scenario(*overrides: str, tail: bool, seed: int = 0) -> Config:
    """One epoch in mode ``sync_plus``, with short and long rounds or plain ones."""
    prompts = len(lengths()["prompts"])
    return load_config(
        None,
        [
            "run.name=tail-batching",
            f"run.seed={seed}",
            "run.mode=sync_plus",
            "rollout.alpha=0",
            f"run.steps={prompts // PROMPTS}",
            "rollout.workers=1",
            "rollout.environments=256",
            f"rollout.groups_per_step={PROMPTS}",
            f"rollout.group_size={RESPONSES}",
            "rollout.stall_timeout=600",
            "rollout.trajectory_timeout=3000",
            f"rollout.engine.max_model_len={MAX_LEN}",
            f"rollout.engine.max_num_seqs={SLOTS}",
            f"rollout.rounds.enabled={str(tail).lower()}",
            f"rollout.rounds.eta_prompts={ETA}",
            f"rollout.rounds.eta_responses={ETA}",
            f"rollout.rounds.epoch_prompts={prompts}",
            "evaluation.prompts=1",
            "sim.environment_seconds_mean=0",
            "sim.reward_seconds=0",
            *overrides,
        ],
    )
