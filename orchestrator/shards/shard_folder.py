"""Where the shards of a run lie, and how long.

Guarantees: :meth:`ShardFolder.finish` returns when the shard can be read by every process of this machine; a shard is freed
when nothing refers to it any more, neither a trajectory nor a sample nor a job of the writer; where seven eighths of shared
memory are in use, shards go to the disk, and where that is full it is one RunError and nothing is left half written. What a
process left that was killed is removed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import xxhash

from orchestrator.api import Prompt, RunError, SampleFacts, Trajectory, Turn
from orchestrator.shards.trajectory_shard import OpenShard, ShardContext, encode, encode_slices

if TYPE_CHECKING:
    import pyarrow as pa

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rl-coserve-shards-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
PRIVATE = 1 << 14  # bytes of a shard, below which its writer reads its own copy: a mapping costs more than it saves
_OTHERS = 8  # one part of so many of shared memory is for others: Ray's object store and collectives die where a page is missing


_NOTHING = Trajectory("", "", "", Prompt("", "", 0, ""), (Turn((), (), (), ()),), None, "", 0, False)


class Shard:
    """One, by reference: its file, bytes and digest (xxh3-64). Equal where these are."""

    __slots__ = ("__weakref__", "contexts", "digest", "path", "size")

    def __init__(self, path: str, size: int, digest: str, contexts: tuple[ShardContext, ...] = ()) -> None:
        self.path = path
        self.size = size
        self.digest = digest
        self.contexts = contexts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Shard{self._key()}"

    def __reduce__(self) -> Any:
        return Shard, (self.path, self.size, self.digest)  # the other side neither needs the contexts nor frees it

    def data(self) -> pa.Buffer:
        """All of it, unchecked. Raises OSError."""
        return map_file(self.path)

    def open(self) -> OpenShard:
        """Read it. Raises RunError where it is gone, or is not what was written."""
        return OpenShard(self.checked())

    def checked(self) -> pa.Buffer:
        """All of it. Raises RunError as :meth:`open`."""
        try:
            data = self.data()
        except OSError as error:
            raise RunError(f"shard {self.path} is lost: {error}") from error
        if data.size != self.size or xxhash.xxh3_64_hexdigest(memoryview(data)) != self.digest:
            raise RunError(f"shard {self.path} is damaged: {data.size} of {self.size} bytes, or another digest")
        return data

    def is_there(self) -> bool:
        """Whether the file has the size that it was written with."""
        try:
            return os.stat(self.path).st_size == self.size
        except OSError:
            return False

    def _key(self) -> tuple[str, int, str]:
        return self.path, self.size, self.digest


class ShardTurns(tuple[Turn, ...]):
    """The turns of a finished trajectory, whose numbers lie in ``shard``."""

    shard: Shard

    @classmethod
    def of(cls, turns: Iterable[Turn], shard: Shard) -> Self:
        """Turns with their shard."""
        made = cls(turns)
        made.shard = shard
        return made


@dataclass(frozen=True, slots=True)
class LaidTrajectory:
    """A trajectory's shard on its way to another process: in a file of that one's folders at ``path``, or, where there is none
    (""), in ``data``; with its bytes, digest and contexts."""

    data: bytes | None
    path: str
    size: int
    digest: str
    contexts: tuple[ShardContext, ...]

    def row(self) -> tuple[Any, ...]:
        """As it travels."""
        rows = [(item.first_turn, item.end_turn, item.versions, tuple(item.facts)) for item in self.contexts]
        return self.data, self.path, self.size, self.digest, rows

    @classmethod
    def of(cls, row: Sequence[Any]) -> LaidTrajectory:
        """Of what :meth:`row` gave."""
        contexts = tuple(
            ShardContext(first, end, tuple((version, count) for version, count in versions), SampleFacts(*facts))
            for first, end, versions, facts in row[4]
        )
        return cls(row[0], row[1], row[2], row[3], contexts)


def shard_of(trajectory: Trajectory) -> Shard | None:
    """The shard of a finished trajectory; None: its turns are in memory."""
    turns = trajectory.turns
    return turns.shard if isinstance(turns, ShardTurns) else None


def map_file(path: str) -> pa.Buffer:
    """A file's content, mapped. Raises OSError."""
    import pyarrow as pa  # here: what is not finished needs none of it

    with pa.memory_map(path) as file:
        return file.read_buffer()


class ShardFolder:
    """The shards of one process. ``disk``: a folder of the run's own, for what finds no room in ``memory``."""

    def __init__(self, disk: Path, memory: Path = SHARED_MEMORY) -> None:
        encode(_NOTHING)  # what Arrow loads for its first one is not the loop's time
        shutil.rmtree(disk, ignore_errors=True)
        self._folders = [disk]
        self._lock = -1
        with contextlib.suppress(OSError):
            self._folders.insert(0, self._open_memory(memory))
        self._numbers = count()
        self.bytes = 0  # of shards that are there

    def finish(self, trajectory: Trajectory) -> Trajectory:
        """The same with its numbers in a shard; one that is finished is returned as it is. Raises RunError."""
        return trajectory if shard_of(trajectory) is not None else self._laid(trajectory, *encode(trajectory))

    async def finish_in_slices(self, trajectory: Trajectory) -> Trajectory:
        """The same, while others have a turn of the loop whenever a few thousand tokens are done."""
        if shard_of(trajectory) is not None:
            return trajectory
        slices = encode_slices(trajectory)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return self._laid(trajectory, *end.value)
            await asyncio.sleep(0)

    def _laid(self, trajectory: Trajectory, data: pa.Buffer, contexts: tuple[ShardContext, ...]) -> Trajectory:
        path = _write(self._folders, f"{next(self._numbers):08d}.arrow", memoryview(data), self.bytes)
        shard = self._own(Shard(path, data.size, _digest(data), contexts))
        turns = OpenShard(data if data.size < PRIVATE else shard.data()).attached(trajectory.turns)
        return replace(trajectory, turns=ShardTurns.of(turns, shard))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where other processes of the run may lay trajectories (:class:`TrajectoryWriter`), the first one first."""
        return tuple(self._folders)

    @property
    def capacity(self) -> int:
        """Bytes of the file system that shards lie in first."""
        return shutil.disk_usage(self._folders[0].parent).total

    def adopt(self, laid: LaidTrajectory) -> ShardTurns:
        """The turns of what another process has laid here, or has said by value: the file is this folder's from now on. Raises
        RunError for one that is elsewhere, is gone, or is not what was laid."""
        path = laid.path
        if laid.data is not None:
            path = _write(self._folders, f"{next(self._numbers):08d}.arrow", memoryview(laid.data), self.bytes)
        elif Path(path).parent not in self._folders:
            raise RunError(f"shard {path} lies in none of {', '.join(map(str, self._folders))}")
        shard = self._own(Shard(path, laid.size, laid.digest, laid.contexts))
        return ShardTurns.of(shard.open().turns(), shard)

    def lost(self, trajectories: Iterable[Trajectory]) -> list[str]:
        """Those whose shard is not there any more, by id."""
        shards = ((trajectory.id, shard_of(trajectory)) for trajectory in trajectories)
        return [name for name, shard in shards if shard is not None and not shard.is_there()]

    def close(self) -> None:
        """Remove all. What is mapped can be read on. Idempotent."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _own(self, shard: Shard) -> Shard:
        self.bytes += shard.size
        weakref.finalize(shard, self._free, shard.path, shard.size).atexit = False
        return shard

    def _free(self, path: str, size: int) -> None:
        self.bytes -= size
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _open_memory(self, memory: Path) -> Path:
        """A folder there for this process alone, locked while it lives."""
        for left in memory.glob(f"{_PREFIX}*"):
            _remove_unless_locked(left)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return folder


class TrajectoryWriter:
    """Lays trajectories into ``folders`` of another process's :class:`ShardFolder`. ``name``: of this process alone."""

    def __init__(self, folders: Sequence[Path], name: str) -> None:
        encode(_NOTHING)
        self._folders, self._name, self._numbers = folders, name, count()

    def lay(self, trajectory: Trajectory) -> LaidTrajectory:
        """Whole on the disk, or in shared memory. Raises RunError."""
        data, contexts = encode(trajectory)
        path = _write(self._folders, f"{self._name}-{next(self._numbers):08d}.arrow", memoryview(data))
        return LaidTrajectory(None, path, data.size, _digest(data), contexts)


def lay_by_value(trajectory: Trajectory) -> LaidTrajectory:
    """For who has no folder in common with the other side. Raises RunError."""
    data, contexts = encode(trajectory)
    return LaidTrajectory(data.to_pybytes(), "", data.size, _digest(data), contexts)


def turns_by_value(laid: LaidTrajectory) -> tuple[Turn, ...]:
    """The other side's, in memory. Raises RunError for what was laid in a file, or is no shard."""
    import pyarrow as pa

    if laid.data is None:
        raise RunError(f"shard {laid.path} was to come by value")
    return tuple(_in_memory(turn) for turn in OpenShard(pa.py_buffer(laid.data)).turns())


def _in_memory(turn: Turn) -> Turn:
    start = turn.context
    return replace(
        turn,
        observation_ids=tuple(turn.observation_ids),
        action_ids=tuple(turn.action_ids),
        logprobs=tuple(turn.logprobs),
        context=None if start is None else replace(start, token_ids=tuple(start.token_ids)),
    )


def _digest(data: pa.Buffer) -> str:
    return xxhash.xxh3_64_hexdigest(memoryview(data))


def _write(folders: Sequence[Path], name: str, data: memoryview, held: int = 0) -> str:
    """A new file in the first folder that has room. Raises RunError, in which ``held`` says how many bytes there are already."""
    problem: OSError | None = None
    for folder in folders:
        path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder != folders[-1]:
                _leave_room(folder, len(data))
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                rest = data
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            return str(path)
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                os.unlink(path)
            if error.errno not in _FULL:
                break
    assert problem is not None
    raise RunError(
        f"a trajectory's shard cannot be written: {problem.strerror}, {problem.filename or path} "
        f"({held >> 20} MiB of shards are held)"
    )


def _leave_room(folder: Path, size: int) -> None:
    """Raises OSError where so many bytes more would take what is for others."""
    facts = os.statvfs(folder)
    if facts.f_bavail * facts.f_frsize - size < facts.f_blocks * facts.f_frsize // _OTHERS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _remove_unless_locked(folder: Path) -> None:
    """If it is ours and its process is gone."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(file)
