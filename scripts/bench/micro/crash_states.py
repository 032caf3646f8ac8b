"""What a disk may hold after the power failed: states of a folder that a trace of operations allows.

Of a file, what was written since its last sync may be there, not, in part, or as blocks of 512 bytes of which some are old, some
zeros and some nothing that anybody wrote. Of a folder, each new, lost or changed name since its last sync may be there or not,
in any combination; a rename is one change, whole or not at all. This is what POSIX leaves open, more than any journalling file
system does (Pillai and others, OSDI 2014).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from scripts.bench.micro.file_trace import Operation

BLOCK = 512
Dropped = Callable[[Operation], bool]


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    changed: bool = False  # since


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


@dataclass
class _Change:
    """Of names, atomic: (folder, name, what it means then; None: nothing)."""

    parts: list[tuple[_Folder, str, _File | _Folder | None]]


class Disk:
    """What operations leave, and what of it is synced. ``dropped``: syncs that do not take place."""

    def __init__(self, operations: Iterable[Operation] = (), dropped: Dropped = lambda _: False) -> None:
        self._root = _Folder()
        self._pending: list[_Change] = []
        self._dropped = dropped
        for operation in operations:
            self.apply(operation)

    def apply(self, operation: Operation) -> None:
        """One more operation. Raises LookupError for one on what is not there."""
        path = operation.path
        match operation.kind:
            case "create":
                self._change([(*self._place(path), _File())])
            case "mkdir":
                self._change([(*self._place(path), _Folder())])
            case "unlink" | "rmdir":
                self._change([(*self._place(path), None)])
            case "rename":
                moved = self._find(path)
                self._change([(*self._place(path), None), (*self._place(operation.to), moved)])
            case "write":
                file = self._file(path)
                end = operation.at + len(operation.data)
                file.content.extend(bytes(max(0, end - len(file.content))))
                file.content[operation.at : end] = operation.data
                file.changed = True
            case "truncate":
                file = self._file(path)
                file.content = file.content[: operation.at]
                file.changed = True
            case "sync" if not self._dropped(operation):
                self._sync(self._find(path))

    def cut(self, rng: random.Random, target: Path) -> None:
        """The power fails: write one of the possible states to ``target``, an empty folder."""
        tree, style = self._root, rng.choice(("prefix", "subset", "none", "all"))
        names: dict[int, dict[str, _File | _Folder]] = {}
        share, stop = rng.random(), rng.randrange(len(self._pending) + 1)
        for index, change in enumerate(self._pending):
            kept = {"prefix": index < stop, "subset": rng.random() < share, "none": False, "all": True}[style]
            for folder, name, what in change.parts if kept else ():
                found = names.setdefault(id(folder), dict(folder.synced))
                found.pop(name, None)
                if what is not None:
                    found[name] = what
        self._write(tree, names, rng, target)

    def whole(self, target: Path) -> None:
        """What a process that was killed leaves: everything."""
        self._write_whole(self._root, target)

    def content(self, path: str) -> bytes:
        """Of a file, now; empty: there is none."""
        try:
            return bytes(self._file(path).content)
        except LookupError:
            return b""

    # -- names -------------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> _File | _Folder:
        found: _File | _Folder = self._root
        for part in PurePosixPath(path).parts:
            if not isinstance(found, _Folder):
                raise LookupError(path)
            found = found.names[part]
        return found

    def _file(self, path: str) -> _File:
        found = self._find(path)
        if not isinstance(found, _File):
            raise LookupError(path)
        return found

    def _place(self, path: str) -> tuple[_Folder, str]:
        pure = PurePosixPath(path)
        folder = self._find(str(pure.parent))
        if not isinstance(folder, _Folder):
            raise LookupError(path)
        return folder, pure.name

    def _change(self, parts: list[tuple[_Folder, str, _File | _Folder | None]]) -> None:
        for folder, name, what in parts:
            folder.names.pop(name, None)
            if what is not None:
                folder.names[name] = what
        self._pending.append(_Change(parts))

    def _sync(self, what: _File | _Folder) -> None:
        if isinstance(what, _File):
            what.synced, what.changed = bytes(what.content), False
            return
        kept: list[_Change] = []
        done: list[_Change] = []
        later: set[tuple[int, str]] = set()  # names of changes that are on disk now: what was before these is, too
        for change in reversed(self._pending):
            names = {(id(folder), name) for folder, name, _ in change.parts}
            if later.isdisjoint(names) and all(folder is not what for folder, _, _ in change.parts):
                kept.append(change)
            else:
                done.append(change)
                later |= names
        self._pending = kept[::-1]
        for change in reversed(done):
            for folder, name, meant in change.parts:
                folder.synced.pop(name, None)
                if meant is not None:
                    folder.synced[name] = meant

    # -- states ------------------------------------------------------------------------------------------------------

    def _write(
        self, folder: _Folder, names: dict[int, dict[str, _File | _Folder]], rng: random.Random, target: Path
    ) -> None:
        for name, what in names.get(id(folder), folder.synced).items():
            if isinstance(what, _Folder):
                (target / name).mkdir()
                self._write(what, names, rng, target / name)
            else:
                content = torn(what.synced, bytes(what.content), rng) if what.changed else what.synced
                (target / name).write_bytes(content)

    def _write_whole(self, folder: _Folder, target: Path) -> None:
        for name, what in folder.names.items():
            if isinstance(what, _Folder):
                (target / name).mkdir()
                self._write_whole(what, target / name)
            else:
                (target / name).write_bytes(what.content)


def torn(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """What may be there of a file that was synced as ``before`` and then written to ``after``."""
    style = rng.choice(("before", "after", "prefix", "blocks", "blocks"))
    if style == "before":
        return before
    if style == "after":
        return after
    if not after.startswith(before):
        return rng.choice((before, after))
    size = rng.randint(len(before), len(after))
    if style == "prefix":
        return after[:size]
    size = rng.choice((size, len(after)))
    content = bytearray(after[:size])
    for begin in range(len(before) // BLOCK * BLOCK, size, BLOCK):
        first, end = max(begin, len(before)), min(begin + BLOCK, size)
        match rng.randrange(4):
            case 0:
                content[first:end] = bytes(end - first)
            case 1 if rng.random() < 0.3:
                content[first:end] = rng.randbytes(end - first)
    return bytes(content)
