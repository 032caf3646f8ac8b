"""Checkpoints: atomic, verified, the last few kept.

A checkpoint is a folder ``step-000012`` with the trainer's files, ``state.json`` (step, version, journal position, the
buffer's trajectories, or where they lie in ``buffer.shards``) and ``files.json`` (size and xxh3-64 of every file). It is
written under a temporary name, synced, and renamed: a folder with its final name is complete. Loading verifies every file;
a damaged checkpoint is skipped with a message, the one before it is used. What a checkpoint claims of the journal is on disk
before it has its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import xxhash

from orchestrator.api import CHECKPOINT_DIGESTS as DIGESTS
from orchestrator.api import ContextStart, Prompt, RunError, Trajectory, Turn
from orchestrator.api.jsontext import parse_object, pieces
from orchestrator.durable_files import Syncable, sync
from orchestrator.shards.shard_folder import Shard, map_file, shard_of
from orchestrator.shards.trajectory_shard import OpenShard

FORMAT = 2  # of state.json where the buffer lies in a file of its own; all else, and what has no number, is of format 1
_PREFIX = "step-"
_NAME = re.compile(r"step-(\d+)")
_STATE, _FILES, _BUFFER = "state.json", "files.json", "buffer.shards"
_ALIGNED = 64  # bytes, that a shard in that file begins at a multiple of, for Arrow
_PARTIAL = ".partial-"
_logger = logging.getLogger("rl-coserve")


@dataclass(frozen=True)
class CheckpointState:
    """What a resume needs beside the trainer's own files. ``step``: training steps done."""

    step: int
    version: int
    journal_sequence: int
    elapsed: float  # seconds of the run so far
    buffer: tuple[Trajectory, ...]
    success_history: tuple[tuple[int, float], ...] = ()
    # the long-prompt queue and its like (orchestrator.tail_batching); None: there are none
    rounds: dict[str, Any] | None = None
    # of test cases, by prompt: adaptive timeouts
    run_times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # of the engines (orchestrator.policies.parallelism.degree_reallocation); None: nobody chooses them
    degrees: dict[str, Any] | None = None
    entropies: tuple[float, ...] = ()  # of the first steps (orchestrator.policies.training.learning_alarms)
    redundancy: float | None = None  # launched over needed from now on; None: what the config says


class CheckpointWriter(Protocol):
    """See :func:`write_checkpoint`."""

    def write_checkpoint(self, partial: Path, state: CheckpointState, shards: Sequence[Shard]) -> Path: ...


class Checkpoints:
    """The checkpoints of one run folder. ``journals``: logs of the run, each synced before a checkpoint is committed."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        journals: Sequence[Syncable] = (),
        keep_every: int = 0,
        writer: CheckpointWriter | None = None,
    ) -> None:
        """``writer``: writes those whose buffer lies in shards; None: this process does."""
        self._folder = folder
        self._keep = keep
        self._keep_every = keep_every  # steps; 0: none beyond ``keep``
        self._journals = journals
        self._writer = writer

    def begin(self, step: int) -> Path:
        """An empty folder for the trainer to write into; :meth:`commit` makes it a checkpoint. Raises RunError."""
        partial = self._folder / f"{_PARTIAL}{step:06d}"
        with _writing(partial):
            self._folder.mkdir(parents=True, exist_ok=True)
            if partial.exists():
                shutil.rmtree(partial)
            (partial / "trainer").mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: CheckpointState) -> Path:
        """Write the state, sync everything, rename. Drops the oldest beyond ``keep``; one that cannot be removed (on NFS, where
        somebody has a file of it open) is a warning, and tried again after the next. Raises RunError where the disk is full, or a
        log cannot be synced; those before are as they were."""
        for journal in self._journals:
            journal.sync()
        with _writing(partial):
            final = self._write(partial, state)
        for old in self.all()[: -self._keep]:
            if not self._keep_every or _step(old) % self._keep_every or not _step(old):
                try:
                    shutil.rmtree(old)
                except OSError as error:
                    _logger.warning("%s is not removed yet: %s", old, error)
        return final

    def _write(self, partial: Path, state: CheckpointState) -> Path:
        shards = [shard for trajectory in state.buffer if (shard := shard_of(trajectory)) is not None]
        if len(shards) < len(state.buffer):
            return write_checkpoint(partial, state)
        write = write_checkpoint if self._writer is None else self._writer.write_checkpoint
        return write(partial, replace(state, buffer=()), shards)

    async def committed(self, partial: Path, state: CheckpointState) -> Path:
        """:meth:`commit`, for the event loop; a run's own do it beside the loop
        (:mod:`orchestrator.runtime.run_records`)."""
        return self.commit(partial, state)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first. What has another name, a copy for example, is none."""
        found = [path for path in self._folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step)

    def last_step(self) -> int:
        """Of the newest by name, 0 without one; it may turn out to be damaged."""
        return max(map(_step, self.all()), default=0)

    def newest(self) -> tuple[Path, CheckpointState, list[str]] | None:
        """The newest intact checkpoint, its state, and what was wrong with newer ones; None when there is none at all. Raises
        RunError when none is intact, and when one is of a newer version: that is no damage, and nothing is gone back on."""
        damaged: list[str] = []
        for folder in reversed(self.all()):
            problem = verify(folder)
            if not problem:
                return folder, _read_state(folder), damaged
            damaged.append(f"{folder.name}: {problem}")
        if damaged:
            raise RunError(f"no intact checkpoint in {self._folder}: {'; '.join(damaged)}")
        return None

    def drop_after(self, step: int) -> None:
        """Remove checkpoints of later steps (a resume went back behind them), and partial ones. Raises RunError."""
        later = [folder for folder in self.all() if _step(folder) > step]
        for folder in (*later, *self._folder.glob(f"{_PARTIAL}*")):
            with _writing(folder):
                shutil.rmtree(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the disk refuses there is the run's error."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}") from error


def write_checkpoint(
    partial: Path, state: CheckpointState, shards: Sequence[Shard] = (), wanted: Callable[[], None] = lambda: None
) -> Path:
    """Write state and digests into a folder that the trainer has written into, sync all, give it its name. ``shards``: the
    buffer's trajectories, where they are not in ``state``; they are copied as they are. ``wanted`` is called before it gets the
    name, and may raise. Raises OSError, and RunError where a shard is lost."""
    final = partial.with_name(f"{_PREFIX}{state.step:06d}")
    if not partial.exists() and final.exists() and not verify(final):  # by one that died before it could say so
        return final
    facts: dict[str, Any] = {"format": 1, **vars(state)}
    if shards:
        facts |= {"format": FORMAT, "buffer": _copy_shards(partial / _BUFFER, shards)}
    # beside an event loop, perhaps, which goes on between pieces
    with (partial / _STATE).open("w", encoding="utf-8") as stream:
        stream.writelines(pieces(facts))
    known = _digests_beside(partial)
    files = {
        name: [size, known[name][1] if known.get(name, [None])[0] == size else _digest(partial / name)]
        for name, size in _sizes(partial).items()
        if name != _FILES  # of one that died before
    }
    (partial / _FILES).write_text(json.dumps({"format": 1, "files": files}, sort_keys=True), encoding="utf-8")
    for path in (*sorted(partial.rglob("*"), reverse=True), partial):  # what is in a folder before the folder
        sync(path)
    wanted()
    if final.exists():  # written before a resume went back behind it
        shutil.rmtree(final)
    os.replace(partial, final)
    sync(final.parent)
    sync(final.parent.parent)
    return final


def _copy_shards(file: Path, shards: Sequence[Shard]) -> list[list[Any]]:
    """Where each lies in the file: offset, bytes, digest."""
    places: list[list[Any]] = []
    with file.open("wb") as stream:
        for shard in shards:
            stream.write(bytes(-stream.tell() % _ALIGNED))
            places.append([stream.tell(), shard.size, shard.digest])
            stream.write(shard.checked())
    return places


def verify(folder: Path) -> str:
    """What is wrong with a checkpoint folder, "" when nothing is: every file is there as it was written, and no other is.
    Raises RunError for one of a newer version."""
    try:
        said = parse_object((folder / _FILES).read_bytes(), finite=True)
    except (OSError, ValueError) as error:
        return f"{_FILES}: {error}"
    _check_format(folder / _FILES, said)
    files = said.get("files", said)  # before there was a format: the files alone
    if not isinstance(files, dict) or _STATE not in files:
        return f"{_FILES} lists no {_STATE}"
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - {_FILES}
    for name, facts in files.items():
        if name not in there:
            return f"{name} is missing"
        file = folder / name
        if facts != [file.stat().st_size, _digest(file)]:
            return f"{name} is damaged"
    more = sorted(there - files.keys())
    return f"{more[0]} was not part of it" if more else ""


def _check_format(file: Path, data: dict[str, Any]) -> None:
    found = data.get("format", 1)
    if type(found) is int and found > FORMAT:
        fix = (
            f"is of format {found}, this version reads {FORMAT}: resume with the version that wrote it, or a newer one"
        )
        raise RunError(f"{file} {fix}")


def _read_state(folder: Path) -> CheckpointState:
    """Raises RunError for what no run could go on from, though its digest is right."""
    file = folder / _STATE
    try:
        data = parse_object(file.read_bytes(), finite=True)
        _check_format(file, data)
        if data.get("format") == FORMAT:
            data["buffer"] = [_at(folder / _BUFFER, *place) for place in data["buffer"]]
        else:
            data["buffer"] = [_trajectory_from_json(item) for item in data["buffer"]]
        return _state_from_json(data)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise RunError(f"{file} is not a run's state: {error!r:.300}") from error


def _at(file: Path, offset: int, size: int, digest: str) -> Trajectory:
    """The trajectory of a shard that lies there; its numbers stay there until it is dropped."""
    data = map_file(str(file)).slice(_whole(offset), _whole(size))
    if data.size != size or xxhash.xxh3_64_hexdigest(memoryview(data)) != digest:
        raise ValueError(f"{file.name} holds another shard at {offset}")
    return OpenShard(data).trajectory()


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file, by its path in the folder."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}


def _digests_beside(partial: Path) -> dict[str, list[Any]]:
    """Size and digest of what the trainer's ranks have digested themselves, each on its own node; what is not listed, or has
    another size, is read again here."""
    found: dict[str, list[Any]] = {}
    for file in sorted((partial / "trainer").glob(DIGESTS.format("*"))):
        found |= {f"trainer/{name}": facts for name, facts in parse_object(file.read_bytes(), finite=True).items()}
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, cast(Any, xxhash.xxh3_64)).hexdigest()


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def _state_from_json(data: dict[str, Any]) -> CheckpointState:
    rounds = data.get("rounds")
    if rounds is not None and not isinstance(rounds, dict):
        raise ValueError(f"rounds: {rounds!r:.100}")
    return CheckpointState(
        step=_whole(data["step"]),
        version=_whole(data["version"]),
        journal_sequence=_whole(data["journal_sequence"]),
        elapsed=float(data["elapsed"]),
        buffer=tuple(data["buffer"]),
        success_history=tuple((int(step), float(value)) for step, value in data["success_history"]),
        rounds=rounds,
        entropies=tuple(float(value) for value in data.get("entropies", ())),
        degrees=_degrees(data.get("degrees")),
        redundancy=_redundancy(data.get("redundancy")),
        run_times={str(prompt): [float(one) for one in times] for prompt, times in data.get("run_times", {}).items()},
    )


def _redundancy(data: Any) -> float | None:
    if data is None:
        return None
    if not (found := float(data)) >= 1:
        raise ValueError(f"redundancy: {data!r:.60}")
    return found


def _degrees(data: Any) -> dict[str, Any] | None:
    if data is None:
        return None
    return {
        "degrees": [_whole(one) for one in data["degrees"]],
        **({"experts": _whole(data["experts"])} if "experts" in data else {}),
        "cost": float(data["cost"]),
        "measured": bool(data["measured"]),
    }


def _context_from_json(data: dict[str, Any] | None) -> ContextStart | None:
    if data is None:
        return None
    return of_kinds(ContextStart(**{**data, "token_ids": _tokens(data["token_ids"])}))


def _trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    turns = tuple(
        of_kinds(
            Turn(
                **{
                    **turn,
                    "observation_ids": _tokens(turn["observation_ids"]),
                    "action_ids": _tokens(turn["action_ids"]),
                    "logprobs": tuple(float(value) for value in turn["logprobs"]),
                    "versions": tuple((_whole(v), _whole(n)) for v, n in turn["versions"]),
                    "context": _context_from_json(turn.get("context")),
                }
            )
        )
        for turn in data["turns"]
    )
    for turn in turns:
        if not len(turn.action_ids) == len(turn.logprobs) == sum(count for _, count in turn.versions):
            raise ValueError(
                f"trajectory {data['id']!r:.100}: a turn's tokens, log-probs and versions differ in number"
            )
    prompt = of_kinds(Prompt(**data["prompt"]))
    metrics = tuple((str(name), float(value)) for name, value in data.get("metrics", ()))
    told = {"errors": tuple(map(str, data["errors"])), "metrics": metrics}
    return of_kinds(Trajectory(**{**data, "prompt": prompt, "turns": turns, **told}))


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "float | None": (int, float, type(None)),
}  # fmt: skip
_Record = TypeVar("_Record", Prompt, Turn, ContextStart, Trajectory)


def of_kinds(record: _Record) -> _Record:
    """The record, if its plain fields hold what they are annotated with. Raises TypeError."""
    for item in fields(record):
        wanted, value = _KINDS.get(str(item.type)), getattr(record, item.name)
        if wanted is not None and (type(value) not in wanted):
            raise TypeError(f"{type(record).__name__}.{item.name} = {value!r:.60}")
    return record


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.60} is no whole number")
    return value


def _tokens(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.60} are no token ids")
    return tuple(_whole(value) for value in values)
