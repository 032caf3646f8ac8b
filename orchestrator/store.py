"""The trajectory store: every trajectory that produced something, in Parquet, under ``trajectories/``.

Layout: ``task=NAME/date=2026-01-31/version=N/part-000001.parquet``: the day (UTC) on which the episode ended, and the version
of the first generated token (-1: none was generated). Part numbers count through the whole store and are never given twice,
a resume included. The names are those of Hive partitions, so DuckDB, Polars, Spark and ``datasets`` read the folder as one
table.

Guarantees:

* A file under its final name is complete (written aside, synced, renamed) and never changes afterwards.
* A file holds rows of one training step, and either only trained ones or none; both facts are in its footer. So
  :meth:`TrajectoryStore.discard_after` moves files and rewrites nothing.
* What :meth:`TrajectoryStore.flush` returned from survives a crash. The pipeline flushes before it commits a checkpoint,
  so a checkpoint never claims a row that is not on disk. The journals are synced before a file is written: what a row says
  of its trajectory's end, the ledger says.
* :meth:`TrajectoryStore.append` does not wait for the disk: a thread writes, or asks a process that writes what lies in shards
  (:mod:`orchestrator.runtime.record_writer`), so that this one's interpreter is free. What is not on disk yet is held, what lies
  in a shard by reference, and given to the next writer when one dies. Once ``backlog`` bytes wait beside the batch that was
  trained last, those who would add more are to wait until :meth:`TrajectoryStore.behind` says that there is room: a run starts
  no group and trains no batch then. A batch may be as large as it is: it has the next step's time to be written.
* Stored and read back, a trajectory is equal to the original, log-probs to the last bit.

Reading is by column: ``read_trajectories(folder, columns=["total_reward"])`` touches no token, and a filter on task, date
or version opens no file of another one. The first rows of an order are read from the files that may hold them
(:meth:`PartIndex.read_first`): of all others the footer is, once.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from orchestrator.api import ConfigError, ContextStart, Prompt, RoutedExperts, RunError, Trajectory, Turn
from orchestrator.durable_files import Syncable, sync
from orchestrator.shards.shard_folder import Shard, shard_of

TRAINED = "trained"
NO_VERSION = -1  # of a trajectory that ended before its first generated token
BACKLOG = 1 << 30  # bytes that may wait for the disk where nothing is said
_ROW_BYTES = 8192  # that each row counts beside its numbers: its reference, a page's rest, a name in shared memory
_TOKEN_BYTES = 64  # of a token and its log-prob in Python's tuples
_FILE_BYTES = 1 << 28  # of rows in a file, as they count in the backlog
_FOLDERS = 1024  # that are remembered to be on disk: each version has its own
_READERS = 4  # of footers, at a time: Arrow reads one without the interpreter's lock
_PIECE = 16  # rows that become Arrow at a time
_ROLLED_BACK = "_rolled_back"  # datasets skip names that start with an underscore
_PART = re.compile(r"part-(\d+)\.parquet")
FORMAT = 1  # of the files; those without a number are of this one, too
_FORMAT_KEY = b"rl_coserve.format"
_STEP_KEY = b"rl_coserve.step"
_TRAINED_KEY = b"rl_coserve.trained"

_TURN = pa.struct(
    [
        ("observation_ids", pa.list_(pa.int32())),
        ("action_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.struct([("version", pa.int64()), ("count", pa.int32())]))),
        ("reward_step", pa.float64()),
        ("done", pa.bool_()),
        ("generate_seconds", pa.float64()),
        ("environment_seconds", pa.float64()),
    ]
)

_NUMBERS = {
    "observation_ids": np.int32,
    "action_ids": np.int32,
    "logprobs": np.float64,
}  # of a turn, in Python's tuples
_CONTEXT = pa.struct(
    [
        ("turn", pa.int32()),  # that begins it
        ("token_ids", pa.list_(pa.int32())),
        ("reason", pa.string()),
        ("dropped_turns", pa.int32()),
        ("dropped_tokens", pa.int32()),
    ]
)

_EXPERTS = pa.struct(
    [
        ("turn", pa.int32()),
        ("first", pa.int32()),
        ("layers", pa.int32()),
        ("choices", pa.int32()),
        ("width", pa.int32()),
        ("data", pa.large_binary()),
    ]
)

# The metadata structure of the notes on agentic-RL infrastructure (section 6), plus versions and log-probs.
_FILE_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),  # the prompt's key
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("total_reward", pa.float64()),  # null: never scored
        ("outcome", pa.string()),  # a ledger end, with its cause: "trained", "evicted_stale", "failed: env_timeout"
        ("step", pa.int64()),  # training step it was trained in, or that was current when it ended
        ("position", pa.int32()),  # its place in that step's batch; null: not trained
        ("weight", pa.float64()),  # in the loss of that step; null: not trained
        ("first_version", pa.int64()),
        ("env_version", pa.string()),
        ("env_seed", pa.int64()),
        ("total_steps", pa.int32()),  # turns
        ("total_tokens", pa.int32()),
        ("generated_tokens", pa.int32()),
        ("wall_time", pa.float64()),  # seconds from start to end of the episode, scoring not included
        ("truncated", pa.bool_()),
        ("env_errors", pa.int32()),
        ("errors", pa.list_(pa.string())),
        ("started_at", pa.float64()),  # seconds since the run's start
        ("finished_at", pa.float64()),
        ("scored_at", pa.float64()),
        ("prompt_task", pa.string()),
        ("prompt_seed", pa.int64()),
        ("prompt_payload", pa.string()),
        ("contexts", pa.list_(_CONTEXT)),  # those that began anew; null or empty: one context
        (
            "experts",
            pa.list_(_EXPERTS),
        ),  # that engines chose, by turn, for routing replay; null or empty: none are known
        ("metrics", pa.map_(pa.string(), pa.float64())),  # of the reward function; null or empty: it gave none
    ]
)
_PARTITIONS = pa.schema([("task", pa.string()), ("date", pa.string()), ("version", pa.int64())])
# Pages that were written with a checksum (older files have none) are compared with it: a flipped bit is no other token.
_PARQUET = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
SCHEMA = pa.schema([*_FILE_SCHEMA, *_PARTITIONS])
_SHOWN = pa.schema([*SCHEMA, ("__filename", pa.string())])
_FILES = 512  # that are read at a time: Arrow keeps the footers of a data set's files, 0.1 MiB of each
_INDEXED = (  # columns whose bounds are looked at
    "trajectory_id", "group_id", "outcome", "step", "total_reward", "generated_tokens", "finished_at",
)  # fmt: skip

_FileKey = tuple[str, str, int, int, bool]  # task, date, first version, step, trained
_NO_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A trajectory, by reference where it lies in a shard, and what is said of it where it is stored: see
    :meth:`TrajectoryStore.append`."""

    trajectory: Trajectory | Shard
    step: int
    outcome: str
    position: int | None
    weight: float

    @property
    def bytes(self) -> int:
        """That it keeps from being freed, about."""
        held = self.trajectory
        if isinstance(held, Shard):
            return _ROW_BYTES + held.size
        return _ROW_BYTES + _TOKEN_BYTES * sum(len(turn.observation_ids) + len(turn.action_ids) for turn in held.turns)


class PartWriter(Protocol):
    """Writes a file of rows that lie in shards; see :func:`write_part`."""

    def write_part(self, final: Path, step: int, trained: bool, rows: Sequence[StoredRow]) -> None: ...


class TrajectoryStore:
    """The writer; one a run. ``rows_per_file`` bounds a file, and what is kept in memory between flushes. ``epoch``: the
    date at which a trajectory's times are 0, so that this reads no clock. ``journals``: logs that are synced first.
    ``writer``: writes what lies in the shards of ``finish``; None: this process writes, and where nobody waits for room
    :meth:`append` does. ``backlog``: bytes that may wait for the disk, beside as many as the newest batch has; 0: ``BACKLOG``."""

    def __init__(
        self,
        folder: str | Path,
        rows_per_file: int = 4096,
        *,
        epoch: datetime = _NO_EPOCH,
        journals: Sequence[Syncable] = (),
        finish: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
        writer: PartWriter | None = None,
        backlog: int = 0,
    ) -> None:
        self._backlog = backlog or BACKLOG
        self._finish = finish
        self._writer = writer
        self._folder = Path(folder)
        self._journals = journals
        self._known: set[Path] = set()  # some of the folders whose names are on disk
        self._epoch = epoch.astimezone(UTC)
        self._rows_per_file = rows_per_file
        self._pending: dict[_FileKey, list[StoredRow]] = {}
        self._pending_rows = self._pending_bytes = 0
        self._taken: dict[_FileKey, list[StoredRow]] = {}  # being written, by a thread perhaps
        self._appended = self._appended_bytes = 0
        self._batch, self._batch_bytes = -1, 0  # that was trained last: its step
        self._written = self._written_bytes = 0  # counted by who writes; that is one at a time
        self._taken_until = self._on_disk = 0  # of what was appended first: taken, and all written
        self._writing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._parts = max((_part_number(file) for file in self._folder.rglob("part-*.parquet")), default=0)
        for leftover in list(self._folder.rglob(".part-*.partial")):  # of a writer that was killed
            leftover.unlink()

    def append(
        self,
        trajectory: Trajectory,
        step: int,
        outcome: str,
        *,
        position: int | None = None,
        weight: float = 1.0,
    ) -> None:
        """Keep one trajectory; it is on disk after the next :meth:`flush`. ``position`` and ``weight``: its place in the
        step's batch, and what it counted there."""
        date = (self._epoch + timedelta(seconds=trajectory.finished_at)).date().isoformat()
        versions = trajectory.versions
        first = versions[0][0] if versions else NO_VERSION
        key = (trajectory.task, date, first, step, outcome == TRAINED)
        finished = self._finish(trajectory)
        row = StoredRow(shard_of(finished) or finished, step, outcome, position, weight)
        self._pending.setdefault(key, []).append(row)
        self._pending_rows += 1
        self._pending_bytes += row.bytes
        self._appended += 1
        self._appended_bytes += row.bytes
        if outcome == TRAINED:
            self._batch_bytes = row.bytes + (self._batch_bytes if step == self._batch else 0)
            self._batch = step
        if self._writer is None and self._waiting_bytes > self._backlog:
            self._await_thread()
        if self._pending_rows >= self._rows_per_file or self._pending_bytes >= _FILE_BYTES:
            self._hand_over()

    def behind(self) -> str:
        """What waits for the disk, in words, where that is more than may; "" where there is room. Raises RunError where it
        cannot be written: that is kept, and tried again by the next flush."""
        if self._writing is not None and self._writing.done():
            self._await_thread()
        if self._waiting_bytes <= self._backlog + self._batch_bytes:
            return ""
        self._hand_over()
        rows = self._appended - self._written
        return f"the trajectory store: {self._waiting_bytes >> 20} MiB of {rows} trajectories are not on disk yet"

    def flush(self) -> None:
        """Write what was appended, and sync it. Raises RunError; what is not on disk yet is then still pending."""
        self._await_thread()
        self._taken = self._take()
        self._settle(self._write_all)

    async def flushed(self) -> None:
        """:meth:`flush` of what was appended until now, in a thread: the event loop goes on."""
        wanted = self._appended
        while self._on_disk < wanted:
            self._hand_over()
            if self._writing is not None:
                await asyncio.wait([asyncio.wrap_future(self._writing)])
                if self._writing is not None and self._writing.done():
                    self._await_thread()

    def close(self) -> None:
        """Flush. Idempotent."""
        self.flush()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    @property
    def _waiting_bytes(self) -> int:
        return self._appended_bytes - self._written_bytes

    def _hand_over(self) -> None:
        """Let the thread write what is pending; while it is at work, or its error was not heard, later."""
        if self._writing is not None:
            if not self._writing.done() or self._writing.exception() is not None:
                return
            self._await_thread()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectory store")
        self._taken = self._take()
        self._writing = self._thread.submit(self._write_all)

    def _await_thread(self) -> None:
        """What it was given is written, or pending again and the error raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._settle(writing.result)

    def _settle(self, done: Callable[[], None]) -> None:
        try:
            done()
        finally:
            for key, rows in self._taken.items():  # what could not be written
                self._pending[key] = rows + self._pending.get(key, [])
                self._pending_rows += len(rows)
                self._pending_bytes += sum(row.bytes for row in rows)
            self._taken = {}

    def _take(self) -> dict[_FileKey, list[StoredRow]]:
        taken, self._pending, self._pending_rows, self._pending_bytes = self._pending, {}, 0, 0
        self._taken_until = self._appended
        return taken

    def _write_all(self) -> None:
        """What was taken; it stays taken until it is on disk."""
        for journal in self._journals if self._taken else ():
            journal.sync()
        try:
            for key in sorted(self._taken):
                rows = self._taken[key]
                while rows:
                    count, size = self._of_a_file(rows)
                    self._write(key, rows[:count])
                    del rows[:count]
                    self._written += count
                    self._written_bytes += size
                del self._taken[key]
            self._on_disk = self._taken_until
        except OSError as error:  # a full disk
            raise RunError(f"{self._folder} cannot be written: {error.strerror or error}") from error

    def _of_a_file(self, rows: Sequence[StoredRow]) -> tuple[int, int]:
        """How many of these the next file gets, and their bytes."""
        count = size = 0
        for row in rows[: self._rows_per_file]:
            if count and size + row.bytes > _FILE_BYTES:
                break
            count, size = count + 1, size + row.bytes
        return count, size

    def discard_after(self, steps: int) -> int:
        """Go back to a checkpoint that contains ``steps`` training steps: rows trained in a later one (``step >= steps``)
        leave the data set, and the number of files that left is returned. They are moved to ``_rolled_back/``, not
        deleted. Rows that ended untrained stay, as their ends stay in the ledger."""
        moved = 0
        for file in _parts(self._folder):
            step, trained = _footer(file)
            if trained and step >= steps:
                target = self._folder / _ROLLED_BACK / file.relative_to(self._folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
                self._sync_up(target.parent)
                sync(file.parent)
                moved += 1
        return moved

    def _write(self, key: _FileKey, rows: list[StoredRow]) -> None:
        task, date, version, step, trained = key
        folder = self._folder / f"task={quote(task, safe='')}" / f"date={date}" / f"version={version}"
        if folder not in self._known:  # one that is there may be of a process that was killed before it synced
            folder.mkdir(parents=True, exist_ok=True)
            self._sync_up(folder.parent)
            if len(self._known) >= _FOLDERS:
                self._known.clear()
            self._known.add(folder)
        self._parts += 1  # before the write: a number whose write failed is not used again
        final = folder / f"part-{self._parts:06d}.parquet"
        if self._writer is not None and all(isinstance(row.trajectory, Shard) for row in rows):
            self._writer.write_part(final, step, trained, rows)
        else:
            write_part(final, step, trained, rows)

    def _sync_up(self, folder: Path) -> None:
        """The names in this folder, and in those above it to the run's."""
        while True:
            sync(folder)
            if folder == self._folder.parent:
                return
            folder = folder.parent


def write_part(
    final: Path, step: int, trained: bool, rows: Sequence[StoredRow], wanted: Callable[[], None] = lambda: None
) -> None:
    """One file, complete under its name or not there. ``wanted`` is called before it gets it, and may raise. Raises OSError."""
    facts = {
        _FORMAT_KEY: str(FORMAT).encode(),
        _STEP_KEY: str(step).encode(),
        _TRAINED_KEY: b"1" if trained else b"0",
    }
    schema = _FILE_SCHEMA.with_metadata(facts)
    partial = final.parent / f".{final.name}.partial"  # datasets skip names that start with a dot
    # In small pieces: the interpreter's lock is held while one is converted, and an event loop may want it.
    pieces = [
        pa.RecordBatch.from_pylist([_with_arrays(_to_row(row)) for row in rows[at : at + _PIECE]], schema=schema)
        for at in range(0, len(rows), _PIECE)
    ]
    table = pa.Table.from_batches(pieces, schema=schema)
    pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
    sync(partial)
    wanted()
    os.replace(partial, final)
    sync(final.parent)


def read_trajectories(
    folder: str | Path,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    *,
    ordered: bool = True,
    parts: Sequence[Path] | None = None,
) -> pa.Table:
    """The stored trajectories, reading only ``columns`` (all when None) of the rows that pass ``filter``, a pyarrow
    expression such as ``pc.field("outcome") == "trained"``. ``ordered``: as they were written; else sooner, on
    all cores. ``parts``: of these files only (:meth:`PartIndex.parts_with`). A folder without any gives an empty table."""
    files = _parts(Path(folder)) if parts is None else parts
    names = list(columns) if columns is not None else None
    tables = []
    with _damage(folder):
        for at in range(0, len(files), _FILES):
            data = _dataset(Path(folder), files[at : at + _FILES])
            tables.append(data.to_table(columns=names, filter=filter, use_threads=not ordered))
    if not tables:
        return _SHOWN.empty_table().select(names or SCHEMA.names)
    return pa.concat_tables(tables)


class PartIndex:
    """A store's files by the bounds of some columns, as their footers tell. Each footer is read once, as a file never changes,
    and not kept: it takes a hundred times as much memory as the bounds."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._known: dict[Path, _PartBounds] = {}

    @property
    def rows(self) -> int:
        """In all files."""
        return sum(bounds.rows for bounds in self._bounds().values())

    def parts_with(self, column: str, value: str) -> list[Path]:
        """The files that may hold a row with this value, in the order of writing."""
        return [file for file, bounds in self._bounds().items() if bounds.may_hold(column, value, value)]

    def read_first(
        self,
        columns: Sequence[str],
        filter: pc.Expression | None,
        order: Sequence[tuple[str, str]],
        most: int,
        ranges: Sequence[tuple[str, Any, Any]] = (),
    ) -> tuple[pa.Table, int]:
        """The first ``most`` rows, and how many rows pass ``filter`` (None: all). ``order``: pyarrow's sort keys, columns of
        numbers that are among ``columns``; of two alike the smaller id comes first. A row without a value of the first key
        is none of them. ``ranges``: what a row that passes has, at least and at most (None: any), by column. What is read:
        of each file its footer; with a filter, the columns that it names, of the files that may hold such a row; and
        ``columns`` of the files only that hold one of the rows, as far as statistics can say."""
        key = order[0][0]
        where = pc.field(key).is_valid() if filter is None else filter & pc.field(key).is_valid()
        parts = {
            file: bounds
            for file, bounds in self._bounds().items()
            if all(bounds.may_hold(*one) for one in ranges) and bounds.held(key)
        }
        if filter is None and all(bounds.nulls[key] is not None for bounds in parts.values()):
            total = sum(bounds.held(key) for bounds in parts.values())
        else:
            holding, total = self._passing(list(parts), where)
            parts = {file: parts[file] for file in holding}
        found = SCHEMA.empty_table().select(list(columns))
        waiting = sorted(((bounds.best(order), -_part_number(file), file) for file, bounds in parts.items()))
        most, least = min(most, total), 1
        while most and waiting:
            last = _rank(found.slice(most - 1).to_pylist()[0], order) if found.num_rows == most else ()
            batch: list[Path] = []
            rows = 0
            while waiting and waiting[-1][0] >= last and (rows < most or len(batch) < least) and len(batch) < _FILES:
                file = waiting.pop()[-1]
                batch.append(file)
                rows += parts[file].held(key)
            if not batch:
                break
            with _damage(self._folder):
                table = _dataset(self._folder, batch).to_table(columns=list(columns), filter=where)
            table = pa.concat_tables([found, table])
            found = table.take(pc.select_k_unstable(table, most, [*order, ("trajectory_id", "ascending")]))
            least *= 2  # of a filter that few rows of a file pass
        return found, total

    def _passing(self, files: Sequence[Path], where: pc.Expression) -> tuple[list[Path], int]:
        """The files that hold a row that passes, and how many rows do."""
        names = read_trajectories(self._folder, ["__filename"], where, ordered=False, parts=files)["__filename"]
        holding = {_part_number(Path(name)) for name in names.unique().to_pylist()}
        return [file for file in files if _part_number(file) in holding], len(names)

    def _bounds(self) -> dict[Path, _PartBounds]:
        """Of each file that is there now, in the order of writing."""
        files = _parts(self._folder)
        new = [file for file in files if file not in self._known]
        with _damage(self._folder), ThreadPoolExecutor(_READERS) as readers:
            self._known.update(zip(new, readers.map(_PartBounds.of, new), strict=True))
        self._known = {file: self._known[file] for file in files}
        return self._known


@dataclass(frozen=True, slots=True)
class _PartBounds:
    """Of a file. ``limits``: by column its least and greatest value; one that is not there may hold anything. ``nulls``: by
    column how many rows have no value, None: not known."""

    rows: int
    limits: Mapping[str, tuple[Any, Any]]
    nulls: Mapping[str, int | None]

    @classmethod
    def of(cls, file: Path) -> _PartBounds:
        """By its footer."""
        footer = pq.read_metadata(file)
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        limits, nulls = {}, {}
        for name in _INDEXED:
            facts = [_statistics(group, name) for group in groups]
            counts = [fact.null_count if fact is not None and fact.has_null_count else None for fact in facts]
            nulls[name] = None if None in counts else sum(count or 0 for count in counts)
            pairs = zip(facts, groups, counts, strict=True)
            full = [fact for fact, group, count in pairs if group.num_rows > (count or 0)]
            if full and all(fact is not None and fact.has_min_max for fact in full):
                limits[name] = min(fact.min for fact in full), max(fact.max for fact in full)
        return cls(footer.num_rows, limits, nulls)

    def held(self, name: str) -> int:
        """Rows that have a value there, at most."""
        return self.rows - (self.nulls[name] or 0)

    def may_hold(self, name: str, least: Any, most: Any) -> bool:
        """Whether a row may have a value between these (None: any)."""
        if not self.held(name):
            return False
        low, high = self.limits.get(name, (None, None))
        return (most is None or low is None or low <= most) and (least is None or high is None or high >= least)

    def best(self, order: Sequence[tuple[str, str]]) -> tuple[float, ...]:
        """The rank that no row of it is above; where there are no statistics, anything may be in the file."""
        known = [(self.limits.get(name), by) for name, by in order]
        return tuple(math.inf if one is None else float(one[1] if by == "descending" else -one[0]) for one, by in known)


_places: dict[str, int] = {}  # of a column among all leaves of all columns, in the file before


def _statistics(group: Any, name: str) -> Any:
    """Of a top-level column; None where there are none. It does not ask the footer for its schema, which would keep the footer
    until the garbage collector finds both."""
    near = _places.get(name, -1)
    for place in (near, *range(group.num_columns - 1, -1, -1)):
        if 0 <= place < group.num_columns and group.column(place).path_in_schema == name:
            _places[name] = place
            return group.column(place).statistics
    return None


def _rank(row: Mapping[str, Any], order: Sequence[tuple[str, str]]) -> tuple[float, ...]:
    """What comes sooner is larger."""
    return tuple(float(row[name] if by == "descending" else -row[name]) for name, by in order)


def open_store(folder: str | Path) -> Any:
    """The folder as a pyarrow data set, for what is too much to read at once; None when it holds no trajectory."""
    files = _parts(Path(folder))
    return _dataset(Path(folder), files) if files else None


def trained_parts(folder: str | Path) -> dict[int, list[Path]]:
    """The files with trained trajectories, by training step. Reads footers only."""
    found: dict[int, list[Path]] = {}
    for file in _parts(Path(folder)):
        step, trained = _footer(file)
        if trained:
            found.setdefault(step, []).append(file)
    return found


def trained_rows(folder: str | Path) -> dict[int, int]:
    """How many trained trajectories there are, by training step. Reads footers only."""
    found = trained_parts(folder)
    return {step: sum(pq.read_metadata(file).num_rows for file in files) for step, files in found.items()}


def last_environments(folder: str | Path) -> dict[str, list[str]]:
    """The versions of each task's environment in the step that was trained last. Raises ConfigError for a damaged file."""
    found: dict[str, list[str]] = {}
    if parts := trained_parts(folder):
        with _damage(folder):
            table = _dataset(Path(folder), parts[max(parts)]).to_table(
                ["prompt_task", "env_version"], use_threads=False
            )
        for row in table.to_pylist():
            versions = found.setdefault(row["prompt_task"], [])
            if row["env_version"] not in versions:
                versions.append(row["env_version"])
    return found


def read_parts(folder: str | Path, files: Sequence[Path]) -> pa.Table:
    """All columns of some files of a store. Raises ConfigError for a damaged one."""
    with _damage(folder):
        return _dataset(Path(folder), files).to_table(use_threads=False)


@contextmanager
def _damage(folder: str | Path) -> Iterator[None]:
    """Arrow's errors as one of ours."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError("trajectories", str(folder), f"holds a file that cannot be read: {error}") from error


def _dataset(folder: Path, files: Sequence[Path]) -> Any:
    partitioning = ds.partitioning(_PARTITIONS, flavor="hive")
    return ds.dataset(
        [str(file) for file in files],
        schema=SCHEMA,
        format=_PARQUET,
        partitioning=partitioning,
        partition_base_dir=str(folder),
    )


def to_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """A full row (``read_trajectories(folder).to_pylist()``) as the trajectory it was stored from."""
    return Trajectory(
        id=row["trajectory_id"],
        group_id=row["group_id"],
        task=row["task"],
        prompt=Prompt(row["task_id"], row["prompt_task"], row["prompt_seed"], row["prompt_payload"]),
        turns=_to_turns(row),
        reward=row["total_reward"],
        env_version=row["env_version"],
        env_seed=row["env_seed"],
        truncated=row["truncated"],
        errors=tuple(row["errors"]),
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        scored_at=row["scored_at"],
        metrics=tuple(row.get("metrics") or ()),
    )


def recent_scored(folder: str | Path, last: int, before: float) -> list[Trajectory]:
    """Of each task, the ``last`` trajectories that passed the filters and were scored at ``before`` (seconds of the run) or
    earlier, oldest first: what a filter remembers that saw them. Few columns of all rows are read, then the rows. One that was
    too old for the run when its score came, and so never met a filter, is taken for one that passed."""
    scored = pc.field("total_reward").is_valid() & (pc.field("scored_at") <= before)
    seen = read_trajectories(folder, ["task", "scored_at", "outcome"], scored).to_pylist()
    times: dict[str, list[float]] = {}
    for row in seen:
        if _passed(row["outcome"]):
            times.setdefault(row["task"], []).append(row["scored_at"])
    found: list[Trajectory] = []
    for task, at in times.items():
        since = sorted(at)[-last:][0]
        rows = read_trajectories(
            folder, filter=scored & (pc.field("task") == task) & (pc.field("scored_at") >= since)
        ).to_pylist()
        kept = [to_trajectory(row) for row in rows if _passed(row["outcome"])]
        found += sorted(kept, key=lambda one: (one.scored_at, one.id))[-last:]
    return found


def _passed(outcome: str) -> bool:
    """Whether it passed the filters, as far as its end says. What a whole group was left out for is no filter's reason."""
    state, _, cause = outcome.partition(": ")
    return state != "failed" and (state != "filtered" or cause in ("group_too_small", "zero_variance", "balance"))


def count_by_outcome(folder: str | Path) -> dict[str, int]:
    """How many rows ended how, by outcome as stored (``failed: cause``): what the ledger is recounted with."""
    counted = read_trajectories(folder, columns=["outcome"]).group_by("outcome").aggregate([([], "count_all")])
    return dict(sorted(zip(counted["outcome"].to_pylist(), counted["count_all"].to_pylist(), strict=True)))


def _to_row(row: StoredRow) -> dict[str, Any]:
    """Raises RunError where its shard is lost."""
    held = row.trajectory
    trajectory = held.open().trajectory() if isinstance(held, Shard) else held
    versions = trajectory.versions
    prompt = trajectory.prompt
    return {
        "task_id": prompt.key,
        "trajectory_id": trajectory.id,
        "group_id": trajectory.group_id,
        "turns": [_from_turn(turn) for turn in trajectory.turns],
        "total_reward": trajectory.reward,
        "outcome": row.outcome,
        "step": row.step,
        "position": row.position,
        "weight": row.weight if row.outcome == TRAINED else None,
        "first_version": versions[0][0] if versions else NO_VERSION,
        "env_version": trajectory.env_version,
        "env_seed": trajectory.env_seed,
        "total_steps": len(trajectory.turns),
        "total_tokens": sum(len(turn.observation_ids) + len(turn.action_ids) for turn in trajectory.turns),
        "generated_tokens": trajectory.generated_tokens,
        "wall_time": trajectory.finished_at - trajectory.started_at,
        "truncated": trajectory.truncated,
        "env_errors": len(trajectory.errors),
        "errors": list(trajectory.errors),
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
        "scored_at": trajectory.scored_at,
        "prompt_task": prompt.task,
        "prompt_seed": prompt.seed,
        "prompt_payload": prompt.payload,
        "contexts": [
            {"turn": index, **{item.name: getattr(turn.context, item.name) for item in fields(turn.context)}}
            for index, turn in enumerate(trajectory.turns)
            if turn.context
        ],
        "experts": [
            {"turn": index, **{item.name: getattr(chosen, item.name) for item in fields(chosen)}}
            for index, chosen in enumerate(turn.experts for turn in trajectory.turns)
            if chosen
        ],
        "metrics": trajectory.metrics,
    }


def _from_turn(turn: Turn) -> dict[str, Any]:
    return {
        "observation_ids": turn.observation_ids,
        "action_ids": turn.action_ids,
        "logprobs": turn.logprobs,
        "versions": [{"version": version, "count": count} for version, count in turn.versions],
        "reward_step": turn.reward,
        "done": turn.done,
        "generate_seconds": turn.generate_seconds,
        "environment_seconds": turn.environment_seconds,
    }


def _with_arrays(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its numbers as arrays, one turn after the other: Arrow copies those at once, and looks at each of a tuple
    with the interpreter's lock held, for 0.3 s where sixteen trajectories have 20,000 tokens each."""
    turns = [{**turn, **{name: np.array(turn[name], kind) for name, kind in _NUMBERS.items()}} for turn in row["turns"]]
    contexts = [{**start, "token_ids": np.array(start["token_ids"], np.int32)} for start in row["contexts"]]
    return {**row, "turns": turns, "contexts": contexts}


def _to_turns(row: Mapping[str, Any]) -> tuple[Turn, ...]:
    turns = [_to_turn(turn) for turn in row["turns"]]
    for start in row.get("contexts") or ():
        facts = {name: start[name] for name in ("reason", "dropped_turns", "dropped_tokens")}
        turns[start["turn"]] = replace(turns[start["turn"]], context=ContextStart(tuple(start["token_ids"]), **facts))
    for chosen in row.get("experts") or ():
        said = {name: value for name, value in chosen.items() if name != "turn"}
        turns[chosen["turn"]] = replace(turns[chosen["turn"]], experts=RoutedExperts(**said))
    return tuple(turns)


def _to_turn(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        observation_ids=tuple(turn["observation_ids"]),
        action_ids=tuple(turn["action_ids"]),
        logprobs=tuple(turn["logprobs"]),
        versions=tuple((span["version"], span["count"]) for span in turn["versions"]),
        reward=turn["reward_step"],
        done=turn["done"],
        generate_seconds=turn["generate_seconds"],
        environment_seconds=turn["environment_seconds"],
    )


def _parts(folder: Path) -> list[Path]:
    """The data set's files, those that were rolled back not included, in the order of writing."""
    return sorted(folder.glob("task=*/date=*/version=*/part-*.parquet"), key=_part_number)


def _part_number(file: Path) -> int:
    match = _PART.fullmatch(file.name)
    return int(match[1]) if match else 0


def _footer(file: Path) -> tuple[int, bool]:
    """(step, trained) of a file's rows. Raises ConfigError for a damaged file, and for one of a newer version."""
    try:
        metadata = pq.read_schema(file).metadata
        found, step, trained = int(metadata.get(_FORMAT_KEY, b"1")), int(metadata[_STEP_KEY]), metadata[_TRAINED_KEY]
        if trained not in (b"0", b"1"):
            raise ValueError(f"trained {trained!r:.40}")
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("trajectories", str(file), f"is not a trajectory store file: {error!r:.300}") from error
    if found > FORMAT:
        fix = f"is of format {found}, this version reads {FORMAT}: use the version that wrote it, or a newer one"
        raise ConfigError("trajectories", str(file), fix)
    return step, trained == b"1"
