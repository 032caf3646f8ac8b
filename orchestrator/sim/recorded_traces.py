"""Recorded trajectories as the simulator's workload: how long turns were, what environments took, what was earned.

Guarantees: lengths of observations and responses, the number of turns, seconds of environments and rewards are those of the
store's rows, in groups as they were recorded; a trajectory plays one recorded episode from its start to its end. What is
not recorded by turn is not invented: resets take what is left of the episode's wall time, and engine times come from the
simulator's cost model, since another fleet is what one asks it about.

The number of the episode stands in its first observation (``PREFIX`` tokens), as a prompt stands in front of what a policy
says about it: so environment, engine and audit know it without knowing of each other. Shorter first observations are
lengthened to that. Reading touches the columns of ``_COLUMNS``, no token of the policy and no log-prob.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from orchestrator.api import ConfigError
from orchestrator.sim.seeded_draws import END, VOCABULARY, random_stream

PREFIX = 4  # tokens
_BASE = len(VOCABULARY) - 2
MOST = _BASE**PREFIX  # episodes
_ETERNITY = 1e12  # seconds
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are even in [0, 1), however many
_COLUMNS = (
    "group_id",
    "total_reward",
    "wall_time",
    "turns.list.element.observation_ids",
    "turns.list.element.versions",
    "turns.list.element.generate_seconds",
    "turns.list.element.environment_seconds",
)


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """Tokens and seconds of one turn. ``response`` may be longer than the simulated engine's context allows."""

    observation: int
    response: int
    environment_seconds: float


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """One recorded episode; ``reward`` is None when it was never scored."""

    turns: tuple[TracedTurn, ...]
    reset_seconds: float
    reward: float | None


@dataclass(frozen=True, slots=True)
class EpisodeTraces:
    """Episodes by number, which numbers belong to each recorded group, and of which task each group is (empty: all of one)."""

    episodes: tuple[EpisodeTrace, ...]
    groups: tuple[tuple[int, ...], ...]
    tasks: tuple[str, ...] = ()

    def episode_of(self, context: Sequence[int]) -> EpisodeTrace:
        """The episode whose number a context begins with."""
        number = 0
        for token in context[:PREFIX]:
            number = number * _BASE + token - 2
        return self.episodes[number % len(self.episodes)]

    def opening(self, number: int) -> tuple[int, ...]:
        """The tokens that name an episode."""
        digits = []
        for _ in range(PREFIX):
            number, digit = divmod(number, _BASE)
            digits.append(2 + digit)
        return tuple(reversed(digits))

    def response(self, context: Sequence[int], turn: int, limit: int) -> tuple[int, ...]:
        """What the policy says in a turn: words, then END if it ends before ``limit`` tokens. Past the recorded turns it
        says what it said last."""
        turns = self.episode_of(context).turns
        length = max(1, turns[min(turn, len(turns) - 1)].response)
        words = tuple(2 + (turn + place) % _BASE for place in range(min(length, limit)))
        return (*words[:-1], END) if length <= limit else words

    def spread(self) -> EpisodeTraces:
        """The same, its groups in an order of which any first part is from all over the recording: a short simulation then
        plays what the whole run played, not the policy that it began with."""
        count = len(self.groups)
        stride = next(step for step in itertools.count(round(count * _GOLDEN)) if math.gcd(step, count) == 1)
        order = [place * stride % count for place in range(count)]
        tasks = tuple(self.tasks[place] for place in order) if self.tasks else ()
        return replace(self, groups=tuple(self.groups[place] for place in order), tasks=tasks)

    def in_grains(self, grain: int) -> EpisodeTraces:
        """The same in simulated tokens, each of which stands for ``grain`` of these: rounded at random to either side, so that
        means are kept; always to the same."""
        if grain == 1:
            return self

        def turn_of(number: int, place: int, turn: TracedTurn) -> TracedTurn:
            rng = random_stream("grain", number, place)
            seen, said = (int(tokens / grain + rng.random()) for tokens in (turn.observation, turn.response))
            return replace(turn, observation=max(seen, 1 if place else PREFIX), response=max(1, said))

        episodes = (
            replace(one, turns=tuple(turn_of(number, place, turn) for place, turn in enumerate(one.turns)))
            for number, one in enumerate(self.episodes)
        )
        return replace(self, episodes=tuple(episodes))

    def longer_than(self, room: int) -> int:
        """How many episodes have more tokens than an engine's context."""
        return sum(sum(turn.observation + turn.response for turn in one.turns) > room for one in self.episodes)

    @property
    def turns_max(self) -> int:
        """The most turns of an episode."""
        return max(len(trace.turns) for trace in self.episodes)

    @property
    def response_max(self) -> int:
        """The longest response, in tokens."""
        return max(turn.response for trace in self.episodes for turn in trace.turns)


def load_traces(folder: str | Path, rows: int) -> EpisodeTraces:
    """The first ``rows`` episodes with at least one turn, of a run folder or its ``trajectories``; a group's task is that of its
    file's folder. Raises ConfigError."""
    import pyarrow as pa  # here: a simulation without traces needs no pyarrow
    import pyarrow.parquet as pq

    if not 0 < rows <= MOST:
        raise ConfigError("sim.trace_rows", rows, f"must be above 0 and at most {MOST}")
    episodes: list[EpisodeTrace] = []
    groups: dict[str, list[int]] = {}
    tasks: dict[str, str] = {}  # of each group
    for file in _files(Path(folder)):
        task = next(part.removeprefix("task=") for part in file.parts[::-1] if part.startswith("task="))
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as data:
                table = data.read(columns=list(_COLUMNS), use_threads=False)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError("sim.trace", str(file), f"cannot be read as Parquet: {error}") from error
        if "turns" not in table.column_names:
            raise ConfigError("sim.trace", str(file), "has no column 'turns', so it is not a run's trajectory file")
        for row in table.to_pylist():
            if row["turns"] and len(episodes) < rows:
                try:
                    episodes.append(_trace(row))
                except (TypeError, ValueError, KeyError) as error:
                    fix = f"holds a trajectory that no run can have written: {error!r:.200}"
                    raise ConfigError("sim.trace", str(file), fix) from error
                groups.setdefault(row["group_id"], []).append(len(episodes) - 1)
                tasks.setdefault(row["group_id"], unquote(task))
        if len(episodes) == rows:
            break
    if not episodes:
        raise ConfigError("sim.trace", str(folder), "holds no trajectory with a turn; give another run's folder")
    return EpisodeTraces(tuple(episodes), tuple(tuple(of) for of in groups.values()), tuple(tasks.values()))


def _files(folder: Path) -> Iterator[Path]:
    """The store's files, in the order of writing; see :mod:`orchestrator.store`."""
    for root in (folder / "trajectories", folder):
        found = sorted(root.glob("task=*/**/part-*.parquet"), key=lambda path: (path.name, str(path)))
        if found:
            return iter(found)
    raise ConfigError(
        "sim.trace", str(folder), "holds no trajectories; give a run folder, or the trajectories folder in it"
    )


def _trace(row: dict[str, Any]) -> EpisodeTrace:
    turns = tuple(
        TracedTurn(
            len(turn["observation_ids"]), sum(span["count"] for span in turn["versions"]), turn["environment_seconds"]
        )
        for turn in row["turns"]
    )
    busy = sum(turn["generate_seconds"] + turn["environment_seconds"] for turn in row["turns"])
    times = (row["wall_time"], busy, *(turn.environment_seconds for turn in turns))
    if not all(0 <= value < _ETERNITY for value in times) or any(turn.response < 0 for turn in turns):
        raise ValueError("lengths or times below 0, or beyond all bounds")
    return EpisodeTrace(turns, max(0.0, row["wall_time"] - busy), row["total_reward"])
