"""Traces of others as the simulator's workload: CSV, JSON lines or Parquet, plain or compressed (.gz, .bz2, .zst).

Guarantees: a file is read block by block, so one of any length takes a block's memory and what is kept of it; a row that
cannot be played is one ConfigError with file, row and column, before anything is simulated; nothing is drawn but by the seed
that is given. Columns go by any of their names in ``NAMES``, which are also those of the public traces of Azure
(``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``) and Mooncake (``timestamp``, ``input_length``, ``output_length``);
others are left alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from orchestrator.api import ConfigError
from orchestrator.sim.recorded_traces import MOST, PREFIX, EpisodeTrace, EpisodeTraces, TracedTurn
from orchestrator.sim.seeded_draws import lognormal, random_stream

if TYPE_CHECKING:
    import pyarrow as pa

# a column's meaning -> its names
NAMES = {
    "response_tokens": ("response_tokens", "GeneratedTokens", "output_length", "output_tokens", "completion_tokens"),
    "prompt_tokens": ("prompt_tokens", "ContextTokens", "input_length", "input_tokens"),
    "seconds": ("seconds", "tool_seconds", "environment_seconds", "duration_seconds"),
    "arrival": ("arrival_seconds", "timestamp", "TIMESTAMP"),
    "trajectory": ("trajectory", "trajectory_id", "session_id"),
    "group": ("group", "group_id", "prompt_id"),
    "task": ("task",),
    "reward": ("reward",),
}
WORDS = ("trajectory", "group", "task")  # columns of text
PROMPT, OBSERVATION = 512, 256  # tokens of a first and of a later observation, where a trace has no prompt_tokens
_TOKENS = 1 << 24  # of a turn at most: more is a mistake
_SECONDS = 1e9
_BLOCK = 8 << 20  # bytes


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Seconds of environment steps, by task ("": of all) in the order of the file."""

    by_task: dict[str, array[float]]

    def draw(self, task: str, *parts: object) -> float:
        """One of the task's rows, or of all where it has none: a function of ``parts``."""
        times = self.by_task.get(task) or self.by_task[""]
        return times[random_stream("tool", *parts).randrange(len(times))]


class Arrivals(Sequence[tuple[float, int, int]]):
    """Seconds since the first one, prompt tokens, answer tokens: 16 bytes a request."""

    def __init__(self) -> None:
        self._times, self._prompts, self._answers = array("d"), array("i"), array("i")

    def append(self, when: float, prompt: int, answer: int) -> None:
        """One more."""
        self._times.append(when)
        self._prompts.append(prompt)
        self._answers.append(answer)

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, place: int) -> tuple[float, int, int]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[float, int, int]]: ...
    def __getitem__(self, place: int | slice) -> tuple[float, int, int] | list[tuple[float, int, int]]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return self._times[place], self._prompts[place], self._answers[place]


@dataclass(frozen=True, slots=True)
class DrawnTimes:
    """What an environment's step takes where a trace does not say: lognormal (``sim.environment_seconds_mean`` and ``_sigma``),
    or a row of ``tools``."""

    seed: int
    mean: float
    sigma: float
    tools: ToolTimes | None = None

    def draw(self, task: str, episode: int, turn: int) -> float:
        """Of one turn of one episode."""
        if self.tools is not None:
            return self.tools.draw(task, self.seed, episode, turn)
        return lognormal(random_stream("tool", self.seed, episode, turn), self.mean, self.sigma)


def read_tools(file: str | Path, field: str = "sim.tool_trace") -> ToolTimes:
    """Column ``seconds``, and ``task`` where it matters; a row without one is of all tasks. Raises ConfigError."""
    by_task: dict[str, array[float]] = {"": array("d")}
    for row in _Rows(Path(file), field, ("seconds",), ("task",)):
        seconds = row.number("seconds", _SECONDS)
        by_task[""].append(seconds)
        if task := row.word("task", needed=False):
            by_task.setdefault(task, array("d")).append(seconds)
    return ToolTimes(by_task)


def read_arrivals(file: str | Path, field: str = "sim.borrowed.trace") -> Arrivals:
    """Requests of users, in order of time: ``arrival_seconds``, or ``timestamp`` (a number: milliseconds, as Mooncake's; ISO
    8601, as Azure's), ``prompt_tokens``, ``response_tokens``. Raises ConfigError."""
    found, first, last = Arrivals(), None, 0.0
    for row in _Rows(Path(file), field, ("arrival", "prompt_tokens", "response_tokens")):
        when = row.number("arrival", float("inf"))
        first = when if first is None else first
        if found and when < last:
            raise row.wrong("arrival", "is earlier than the row before it: sort the file by time")
        last = when
        found.append(when - first, row.tokens("prompt_tokens"), row.tokens("response_tokens"))
    return found


def read_lengths(
    file: str | Path, rows: int, group_size: int, times: DrawnTimes, field: str = "sim.trace"
) -> EpisodeTraces:
    """The first ``rows`` turns of a trace, as episodes. Needs ``response_tokens``; ``prompt_tokens`` is the whole context that a
    turn was asked with. What it lacks is made by rule: without ``trajectory`` each row is an episode; without ``group`` the
    episodes of ``group_size`` neighbours in order of their prompts' length are a group (the last may be smaller: its members
    are played again); without ``prompt_tokens`` first observations have 512 tokens, later ones 256; without ``seconds``, or
    where ``times`` brings a file of them, environments take what ``times`` draws; without ``reward`` it is drawn as ever. A
    group is of the task of its first member. Raises ConfigError."""
    if not 0 < rows <= MOST:
        raise ConfigError("sim.trace_rows", rows, f"must be above 0 and at most {MOST}")
    episodes: dict[str, _Episode] = {}
    data = _Rows(
        Path(file), field, ("response_tokens",), ("prompt_tokens", "seconds", "trajectory", "group", "task", "reward")
    )
    for number, row in enumerate(data):
        if number == rows:
            break
        name = row.word("trajectory") if data.has("trajectory") else str(number)
        whose = {meaning: row.word(meaning) for meaning in ("group", "task")}
        episode = episodes.setdefault(name, _Episode(len(episodes), **whose))
        for meaning, its in (("group", episode.group), ("task", episode.task)):
            if whose[meaning] != its:
                raise row.wrong(meaning, f"is {its!r:.60} in an earlier row of its trajectory: it has one")
        episode.add_turn(row, data, times)
    kept = sorted(episodes.values(), key=lambda one: one.number)
    if data.has("group"):
        groups: dict[str, list[int]] = {}
        for one in kept:
            groups.setdefault(one.group, []).append(one.number)
        members = [tuple(group) for group in groups.values()]
    else:
        order = sorted(kept, key=lambda one: (one.turns[0].observation, one.number))
        alike = [order[start : start + group_size] for start in range(0, len(order), group_size)]
        members = sorted(tuple(sorted(one.number for one in group)) for group in alike)
    tasks = tuple(kept[group[0]].task for group in members) if data.has("task") else ()
    return EpisodeTraces(tuple(EpisodeTrace(tuple(one.turns), 0.0, one.reward) for one in kept), tuple(members), tasks)


class _Episode:
    """One trajectory while its rows are read."""

    def __init__(self, number: int, group: str, task: str) -> None:
        self.number, self.group, self.task = number, group, task
        self.turns: list[TracedTurn] = []
        self.reward: float | None = None
        self._context = 0

    def add_turn(self, row: _Row, data: _Rows, times: DrawnTimes) -> None:
        turn, said = len(self.turns), row.tokens("response_tokens")
        observation = OBSERVATION if turn else PROMPT
        if data.has("prompt_tokens"):
            whole = row.tokens("prompt_tokens")
            if whole <= self._context:
                fix = (
                    f"must be above {self._context}, the total of the trajectory's earlier turns: sort its rows by turn"
                )
                raise row.wrong("prompt_tokens", fix)
            observation = whole - self._context
        self._context += observation + said
        known = data.has("seconds") and times.tools is None
        seconds = row.number("seconds", _SECONDS) if known else times.draw(self.task, self.number, turn)
        self.turns.append(TracedTurn(max(observation, 1 if turn else PREFIX), said, seconds))
        if data.has("reward"):
            self.reward = row.number("reward", _SECONDS, -_SECONDS)


class _Row:
    """One of a file, by the meanings of its columns."""

    __slots__ = ("_data", "_number", "_values")

    def __init__(self, data: _Rows, number: int, values: dict[str, Any]) -> None:
        self._data, self._number, self._values = data, number, values

    def wrong(self, meaning: str, fix: str) -> ConfigError:
        """What is the matter with one of its values."""
        where = f"{self._data.file}: row {self._number}, column {self._data.columns[meaning]!r}"
        return ConfigError(self._data.field, f"{where} = {self._values[meaning]!r:.60}", fix)

    def number(self, meaning: str, most: float, least: float = 0.0) -> float:
        value = self._values[meaning]
        if value is None or not least <= value <= most or value == float("inf"):
            raise self.wrong(meaning, f"must be a number from {least:g} to {most:g}")
        return float(value)

    def tokens(self, meaning: str) -> int:
        value = self._values[meaning]
        if value is None or not 1 <= value <= _TOKENS or value != int(value):
            raise self.wrong(meaning, f"must be a whole number from 1 to {_TOKENS}")
        return int(value)

    def word(self, meaning: str, *, needed: bool = True) -> str:
        """Nothing where the file has no such column, or the row no value and none is ``needed``."""
        value = self._values.get(meaning)
        if needed and not value and meaning in self._values:
            raise self.wrong(meaning, "is missing: name it in each row, or leave the column out")
        return str(value or "")


class _Rows:
    """The rows of a file, with the columns that mean something. ``field``: the key that names it."""

    def __init__(self, file: Path, field: str, needed: Sequence[str], useful: Sequence[str] = ()) -> None:
        self.file, self.field = file, field
        self.columns: dict[str, str] = {}
        self._needed, self._wanted = tuple(needed), (*needed, *useful)

    def has(self, meaning: str) -> bool:
        """Whether the file has such a column; known once its first row was read."""
        return meaning in self.columns

    def __iter__(self) -> Iterator[_Row]:
        import pyarrow as pa  # here: a simulation without traces needs no pyarrow

        count = 0
        try:
            for batch in self._batches():
                values = {meaning: self._values(batch, meaning) for meaning in self.columns}
                for place in range(batch.num_rows):
                    count += 1
                    yield _Row(self, count, {meaning: column[place] for meaning, column in values.items()})
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            fix = f"cannot be read as CSV, JSON lines or Parquet (by its ending), after row {count}: {error!s:.200}"
            raise ConfigError(self.field, str(self.file), fix) from error
        if not count:
            raise ConfigError(self.field, str(self.file), "has no rows")

    def _find_columns(self, names: Sequence[str]) -> None:
        for meaning in self._wanted:
            if found := [name for name in NAMES[meaning] if name in names]:
                self.columns[meaning] = found[0]
        for meaning, column in self.columns.items():
            if names.count(column) > 1:
                fix = f"has {names.count(column)} columns {column!r}: leave one ({meaning})"
                raise ConfigError(self.field, str(self.file), fix)
        for meaning in self._needed:
            if meaning not in self.columns:
                known = ", ".join(NAMES[meaning])
                fix = f"has no column for {meaning} (one of {known}); its columns: {', '.join(map(str, names))!s:.300}"
                raise ConfigError(self.field, str(self.file), fix)

    def _types(self, schema: pa.Schema) -> dict[str, pa.DataType]:
        """What each column is read as, whatever its first block looks like: one of whole numbers may have others later."""
        import pyarrow as pa

        types = {}
        for meaning, column in self.columns.items():
            seen = schema.field(column).type
            types[column] = pa.string() if meaning in WORDS else pa.float64()
            if meaning == "arrival" and pa.types.is_timestamp(seen):
                types[column] = pa.timestamp("ns", seen.tz)
            elif meaning == "arrival" and pa.types.is_string(seen):
                types[column] = seen
        return types

    def _values(self, batch: pa.RecordBatch, meaning: str) -> list[Any]:
        import pyarrow as pa
        import pyarrow.compute as pc

        column = batch.column(batch.schema.get_field_index(self.columns[meaning]))
        if meaning in WORDS:
            return column.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]
        if meaning == "arrival":
            if pa.types.is_timestamp(column.type) or pa.types.is_string(column.type):
                microseconds = column.cast(pa.timestamp("ns")).cast(pa.timestamp("us"), safe=False).cast(pa.int64())
                return pc.divide(microseconds.cast(pa.float64()), 1e6).to_pylist()  # type: ignore[no-any-return]
            scale = 1.0 if self.columns[meaning] == "arrival_seconds" else 1e-3
            return pc.multiply(column.cast(pa.float64()), scale).to_pylist()  # type: ignore[no-any-return]
        return column.cast(pa.float64()).to_pylist()  # type: ignore[no-any-return]

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Blocks of the columns that mean something, and of no other: those are not even parsed."""
        import pyarrow as pa
        from pyarrow import csv, json, parquet

        suffixes = [suffix for suffix in self.file.suffixes if suffix not in (".gz", ".bz2", ".zst")]
        kind = suffixes[-1] if suffixes else ""
        if kind == ".parquet":
            with parquet.ParquetFile(self.file) as data:
                self._find_columns(data.schema_arrow.names)
                yield from data.iter_batches(batch_size=65536, columns=list(self.columns.values()))
            return
        if kind not in (".csv", ".jsonl", ".json"):
            fix = "its name must end in .csv, .jsonl or .parquet (and .gz, .bz2 or .zst after the first two)"
            raise ConfigError(self.field, str(self.file), fix)

        def opened(types: dict[str, pa.DataType] | None = None) -> Any:
            if kind == ".csv":
                kept = csv.ConvertOptions(column_types=types, include_columns=list(types)) if types else None
                blocks = csv.ReadOptions(block_size=_BLOCK, use_threads=False)
                return csv.open_csv(stream, read_options=blocks, convert_options=kept)
            schema = pa.schema(list(types.items())) if types else None
            others = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore") if types else None
            return json.open_json(stream, json.ReadOptions(block_size=_BLOCK, use_threads=False), others)

        with pa.input_stream(str(self.file), compression="detect") as stream:
            schema = opened().schema  # of the first block
        self._find_columns(schema.names)
        with pa.input_stream(str(self.file), compression="detect") as stream:
            yield from opened(self._types(schema))
