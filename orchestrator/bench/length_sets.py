"""Trajectory sets that length predictors are judged on: what a run recorded, and tau-bench's trajectories.

A set is a list of :class:`Case` in the order in which they ended. Tokens of a text are its words and signs, hashed: a count that
needs no tokenizer, some three quarters of a language model's.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Trajectory
from orchestrator.policies.features import PROMPT_TOKENS, TAIL_TOKENS, Progress, boundaries
from orchestrator.policies.prediction import Outcome
from orchestrator.store import read_trajectories, to_trajectory

_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Case:
    """A trajectory of a set; ``prompt`` names what it was asked, ``trial`` counts those of one prompt."""

    prompt: str
    trial: int
    outcome: Outcome


def outcome_of(trajectory: Trajectory, *, complete: bool = True) -> Outcome:
    """What a predictor learns of a trajectory."""
    said = tuple(len(turn.action_ids) for turn in trajectory.turns)
    return Outcome(tuple(boundaries(trajectory)), said, complete)


def recorded(folder: str) -> list[Case]:
    """Trajectories of a run folder that came to their own end. Raises ConfigError."""
    path = Path(folder)
    if not (path / "trajectories").is_dir():
        raise ConfigError("sets", folder, "is no run folder with trajectories; record one: scripts/record_lengths.sh")
    found: list[tuple[float, Trajectory]] = []
    for row in read_trajectories(path / "trajectories").to_pylist():
        whole = row["outcome"] == "trained" or row["total_reward"] is not None
        if whole and row["turns"]:
            found.append((row["finished_at"], to_trajectory(row)))
    found.sort(key=lambda item: item[0])
    return _counted([(one.prompt.key, outcome_of(one)) for _, one in found])


def tau_bench(file: str) -> list[Case]:
    """``historical_trajectories`` of sierra-research/tau-bench (MIT), gzip or plain: an assistant's message is a turn, what
    stands before it its observation. Times of tools are not in it."""
    data = Path(file).read_bytes()
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    rows.sort(key=lambda row: (row["trial"], row["task_id"]))
    return _counted([(str(row["task_id"]), _dialogue(number, row)) for number, row in enumerate(rows)])


def _dialogue(number: int, row: dict[str, Any]) -> Outcome:
    context: list[int] = []
    heard: list[int] = []
    said: list[int] = []
    before: list[Progress] = []
    opening: tuple[int, ...] = ()
    since: list[int] = []
    for message in row["traj"]:
        calls = (json.dumps(call["function"]) for call in message.get("tool_calls") or [])
        tokens = [
            zlib.crc32(word.encode()) for word in _WORDS.findall(" ".join([message.get("content") or "", *calls]))
        ]
        if message["role"] != "assistant":
            since += tokens
            continue
        opening = opening or tuple(since[-PROMPT_TOKENS:])
        context += [] if said else since
        tail, prompt = tuple(context[-TAIL_TOKENS:]), str(row["task_id"])
        times = (0.0,) * max(0, len(said) - 1)
        known = tuple(heard) or (len(since),)
        before.append(Progress(str(number), "tau-bench", prompt, opening, tail, known, tuple(said), times))
        heard.append(len(since))
        context += [*(since if said else []), *tokens]
        said.append(max(1, len(tokens)))
        since = []
    return Outcome(tuple(before), tuple(said), True)


def _counted(rows: list[tuple[str, Outcome]]) -> list[Case]:
    seen: dict[str, int] = {}
    found = []
    for prompt, outcome in rows:
        trial = seen[prompt] = seen.get(prompt, -1) + 1
        found.append(Case(prompt, trial, outcome))
    return found
