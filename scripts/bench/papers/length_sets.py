"""Trajectory sets that length predictors are judged on: what a run recorded, packed ones, and tau-bench's trajectories.

A set is a list of :class:`Case` in the order in which they ended. A packed set (``lengths_NAME.json.xz`` beside this module;
``scripts/bench/data/pack_lengths.py`` makes one of a run folder) holds token ids, times and what says which prompt was
whose, and nothing else: no text, no reward, no path; its header says where it is from. Tokens of tau-bench are words
and signs, hashed: a count that needs no tokenizer, some three quarters of a language model's.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, ContextStart, Prompt, Trajectory, Turn
from orchestrator.policies.prediction.length_features import (
    PROMPT_TOKENS,
    TAIL_TOKENS,
    TrajectoryProgress,
    turn_boundaries,
)
from orchestrator.policies.prediction.length_predictor import LengthOutcome
from orchestrator.sim.recorded_traces import PREFIX, EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.store import read_trajectories, to_trajectory

_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Case:
    """A trajectory of a set; ``prompt`` names what it was asked, ``trial`` counts those of one prompt. ``asked``: when each of
    its forecasts was asked for, ``ended``: when it was over, in seconds; nothing where that is not known."""

    prompt: str
    trial: int
    outcome: LengthOutcome
    asked: tuple[float, ...] = ()
    ended: float = 0.0


FORMAT = "rl-coserve lengths 1"
PACKED = Path(__file__).parent


def outcome_of(trajectory: Trajectory, *, complete: bool = True) -> LengthOutcome:
    """What a predictor learns of a trajectory."""
    said = tuple(len(turn.action_ids) for turn in trajectory.turns)
    return LengthOutcome(tuple(turn_boundaries(trajectory)), said, complete)


def recorded(folder: str | Path) -> list[Case]:
    """Trajectories of a run folder that came to their own end. Raises ConfigError."""
    return _cases(trajectories_of(folder))


def trajectories_of(folder: str | Path) -> list[Trajectory]:
    """The same as they were stored, in the order in which they ended. Raises ConfigError."""
    path = Path(folder)
    if not (path / "trajectories").is_dir():
        raise ConfigError(
            "sets",
            str(folder),
            "is not a run folder with trajectories; record one: scripts/bench/data/record_lengths.sh",
        )
    found = []
    for row in read_trajectories(path / "trajectories").to_pylist():
        whole = row["outcome"] == "trained" or row["total_reward"] is not None
        if whole and row["turns"]:
            found.append(to_trajectory(row))
    return sorted(found, key=lambda one: (one.finished_at, one.id))


def pack(trajectories: list[Trajectory], about: Mapping[str, str]) -> bytes:
    """A packed set. ``about``: what was recorded, how, and its licence."""
    prompts: dict[str, int] = {}
    rows = []
    for one in trajectories:
        number = prompts.setdefault(f"{one.task}/{one.prompt.key}", len(prompts))
        turns = [
            [list(turn.observation_ids), list(turn.action_ids), turn.generate_seconds, turn.environment_seconds]
            + ([] if turn.context is None else [list(turn.context.token_ids)])
            for turn in one.turns
        ]
        rows.append([one.task, number, round(one.started_at, 3), round(one.finished_at, 3), turns])
    text = json.dumps({"format": FORMAT, **about, "trajectories": rows}, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def packed(file: str | Path) -> list[Case]:
    """A packed set. Raises ConfigError for what is none."""
    return _cases(trajectories_in(file))


def trajectories_in(file: str | Path) -> list[Trajectory]:
    """Those of a packed set. Raises ConfigError for what is none."""
    try:
        data = json.loads(lzma.decompress(Path(file).read_bytes()))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        return [_unpacked(number, row) for number, row in enumerate(data["trajectories"])]
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError("sets", str(file), f"is no packed set of trajectories: {error!r}") from error


def episodes(file: str | Path) -> EpisodeTraces:
    """A packed set as the simulator plays it: lengths and times of each turn, in groups of a prompt; resets take no time, and a
    reward is drawn. Raises ConfigError for what is none."""
    found, groups, tasks = list[EpisodeTrace](), dict[tuple[str, str], list[int]](), list[str]()
    for one in trajectories_in(file):
        turns = tuple(
            TracedTurn(
                max(len(turn.observation_ids), 1 if number else PREFIX), len(turn.action_ids), turn.environment_seconds
            )
            for number, turn in enumerate(one.turns)
        )
        key = (one.task, one.prompt.key)
        if key not in groups:
            tasks.append(one.task)
        groups.setdefault(key, []).append(len(found))
        found.append(EpisodeTrace(turns, 0.0, None))
    return EpisodeTraces(tuple(found), tuple(map(tuple, groups.values())), tuple(tasks))


def built_in() -> dict[str, Path]:
    """The packed sets that come with the package, by name."""
    return {path.name[len("lengths_") : -len(".json.xz")]: path for path in sorted(PACKED.glob("lengths_*.json.xz"))}


def _unpacked(number: int, row: list[Any]) -> Trajectory:
    task, prompt, started, ended, turns = row
    made = tuple(
        Turn(
            tuple(seen),
            tuple(said),
            (),
            (),
            generate_seconds=generating,
            environment_seconds=environment,
            context=ContextStart(tuple(context[0]), "restart", 0, 0) if context else None,
        )
        for seen, said, generating, environment, *context in turns
    )
    whose = Prompt(str(prompt), task, 0, "")
    return Trajectory(f"t{number}", f"g{prompt}", task, whose, made, None, "1", 0, False, (), started, ended)


def _cases(trajectories: list[Trajectory]) -> list[Case]:
    seen: dict[tuple[str, str], int] = {}
    found = []
    for one in trajectories:
        key = (one.task, one.prompt.key)
        trial = seen[key] = seen.get(key, -1) + 1
        found.append(Case(one.prompt.key, trial, outcome_of(one), _asked(one), one.finished_at))
    return found


def _asked(trajectory: Trajectory) -> tuple[float, ...]:
    """When the first observation was known, and when each turn but the last was over and its environment began to work."""
    now, found = trajectory.started_at, [trajectory.started_at]
    for turn in trajectory.turns[:-1]:
        found.append(min(trajectory.finished_at, now + turn.generate_seconds))
        now += turn.generate_seconds + turn.environment_seconds
    return tuple(found)


def tau_bench(file: str) -> list[Case]:
    """``historical_trajectories`` of sierra-research/tau-bench (MIT), gzip or plain: an assistant's message is a turn, what
    stands before it its observation. Times of tools are not in it."""
    rows = sorted(_rows(file), key=lambda row: (row["trial"], row["task_id"]))
    return _counted([(str(row["task_id"]), _dialogue(number, row)) for number, row in enumerate(rows)])


def tau_bench_words(file: str) -> dict[int, str]:
    """The word of each id of :func:`tau_bench`."""
    return {
        zlib.crc32(word.encode()): word for row in _rows(file) for message in row["traj"] for word in _words(message)
    }


def _rows(file: str) -> list[dict[str, Any]]:
    data = Path(file).read_bytes()
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return rows


def _words(message: dict[str, Any]) -> list[str]:
    calls = (json.dumps(call["function"]) for call in message.get("tool_calls") or [])
    return _WORDS.findall(" ".join([message.get("content") or "", *calls]))


def _dialogue(number: int, row: dict[str, Any]) -> LengthOutcome:
    context: list[int] = []
    heard: list[int] = []
    said: list[int] = []
    before: list[TrajectoryProgress] = []
    opening: tuple[int, ...] = ()
    since: list[int] = []
    for message in row["traj"]:
        tokens = [zlib.crc32(word.encode()) for word in _words(message)]
        if message["role"] != "assistant":
            since += tokens
            continue
        opening = opening or tuple(since[-PROMPT_TOKENS:])
        context += [] if said else since
        tail, prompt = tuple(context[-TAIL_TOKENS:]), str(row["task_id"])
        times = (0.0,) * max(0, len(said) - 1)
        known = tuple(heard) or (len(since),)
        before.append(TrajectoryProgress(str(number), "tau-bench", prompt, opening, tail, known, tuple(said), times))
        heard.append(len(since))
        context += [*(since if said else []), *tokens]
        said.append(max(1, len(tokens)))
        since = []
    return LengthOutcome(tuple(before), tuple(said), True)


def _counted(rows: list[tuple[str, LengthOutcome]]) -> list[Case]:
    seen: dict[str, int] = {}
    found = []
    for prompt, outcome in rows:
        trial = seen[prompt] = seen.get(prompt, -1) + 1
        found.append(Case(prompt, trial, outcome))
    return found
