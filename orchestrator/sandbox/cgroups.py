"""A cgroup for each run, where this process may make one: memory, processes and processor time of all of it together.

Guarantees: nothing is asked of the user; where no hierarchy can be written (most containers) :func:`find_hierarchies`
returns nothing and the limits of each process stand alone, with the memory of all of them watched from outside
(:func:`resident_bytes`), as is in any case what no cgroup counts (:func:`socket_bytes`), and what files take beside their
content (:func:`inode_bytes`). Both versions of the interface are
known; of version 2, the controllers must be delegated to this process's own group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.sandbox.limits import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000  # microseconds; one processor's worth of each
_EXTRA_PROCESSES = 8  # bubblewrap's own
_PAGE = os.sysconf("SC_PAGE_SIZE")
_INODE = 1024  # bytes of the kernel for a file: its inode, its name, a short text in it


@dataclass(frozen=True, slots=True)
class CgroupHierarchy:
    """A folder in which groups can be made, and the controllers that act there."""

    folder: str
    controllers: tuple[str, ...]
    unified: bool


class RunCgroups:
    """The groups of one run, one a hierarchy."""

    def __init__(self, hierarchies: Sequence[CgroupHierarchy], limits: SandboxLimits) -> None:
        self._made: list[tuple[CgroupHierarchy, Path]] = []
        name = f"rl-coserve-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            for hierarchy in hierarchies:
                folder = Path(hierarchy.folder) / name
                folder.mkdir()
                self._made.append((hierarchy, folder))
                for controller in hierarchy.controllers:
                    for file, value in _settings(controller, limits, hierarchy.unified):
                        (folder / file).write_text(value)
        except BaseException:
            self._remove()
            raise

    @property
    def procs(self) -> tuple[str, ...]:
        """The files that a process writes its id to, to join."""
        return tuple(str(folder / "cgroup.procs") for _, folder in self._made)

    @property
    def limits_memory(self) -> bool:
        """Whether memory is limited here."""
        return any("memory" in hierarchy.controllers for hierarchy, _ in self._made)

    def out_of_memory(self) -> bool:
        """Whether the kernel has ended a process of the run because the run's memory was used up."""
        for hierarchy, folder in self._made:
            if "memory" in hierarchy.controllers:
                file = folder / ("memory.events" if hierarchy.unified else "memory.oom_control")
                fields = dict(line.split() for line in file.read_text().splitlines())
                return int(fields.get("oom_kill", "0")) > 0
        return False

    async def remove(self) -> None:
        """Call when every process of the run has been killed; the kernel may need a moment to let go of them."""
        for _ in range(100):
            if self._remove():
                return
            await asyncio.sleep(0.01)

    def _remove(self) -> bool:
        for entry in list(self._made):
            with contextlib.suppress(OSError):  # busy still
                entry[1].rmdir()
                self._made.remove(entry)
        return not self._made


def _settings(controller: str, limits: SandboxLimits, unified: bool) -> list[tuple[str, str]]:
    if controller == "memory":
        return [("memory.max" if unified else "memory.limit_in_bytes", str(limits.memory_bytes))]
    if controller == "pids":
        return [("pids.max", str(limits.processes + _EXTRA_PROCESSES))]
    if unified:
        return [("cpu.max", f"{_PERIOD} {_PERIOD}")]
    return [("cpu.cfs_period_us", str(_PERIOD)), ("cpu.cfs_quota_us", str(_PERIOD))]


def find_hierarchies(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[CgroupHierarchy, ...]:
    """The hierarchies in which this process may make groups; empty where there are none."""
    found = []
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        _, names, path = line.split(":", 2)
        unified = not names
        if unified:
            folder = Path(root + path)
            delegated = _words(folder / "cgroup.subtree_control")
            controllers = tuple(name for name in CONTROLLERS if name in delegated)
        else:
            folder = Path(root) / names / path.lstrip("/")
            controllers = tuple(name for name in CONTROLLERS if name in names.split(","))
        if controllers and _usable(folder):
            found.append(CgroupHierarchy(str(folder), controllers, unified))
    return tuple(found)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _usable(folder: Path) -> bool:
    """Whether a group can be made and removed there: permissions do not tell (root on a read-only mount)."""
    probe = folder / f"rl-coserve-{os.getpid()}-{secrets.token_hex(6)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Process ids of ``pid`` and all its descendants now; those that end meanwhile are left out."""
    found, front = [], [pid]
    while front:
        parent = front.pop()
        found.append(parent)
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                front += [int(child) for child in Path(f"/proc/{parent}/task/{task}/children").read_text().split()]
            except OSError:
                continue
    return found


def socket_bytes(pid: int) -> int:
    """What the sockets of ``pid`` and its descendants may hold: each is charged with all of its buffer. In flight between
    processes are no more than one process may have open; the kernel sees to that."""
    found: set[str] = set()
    for each in descendants(pid):
        try:
            with os.scandir(f"/proc/{each}/fd") as entries:
                found |= {name for entry in entries if (name := os.readlink(entry.path)).startswith("socket:")}
        except OSError:
            continue
    return len(found) * _BUFFER


def inode_bytes(pid: int, folders: Sequence[str], scratch_bytes: int) -> int:
    """What the files in ``folders``, as that process sees them, take beside their content: the size of a tmpfs says nothing of
    it. A folder that is not yet the sandbox's own, of ``scratch_bytes``, is none of its."""
    found = 0
    for folder in folders:
        with contextlib.suppress(OSError):
            facts = os.statvfs(f"/proc/{pid}/root{folder}")
            if 0 <= facts.f_blocks * facts.f_frsize - scratch_bytes < _PAGE:
                found += facts.f_files - facts.f_ffree
    return found * _INODE


def _default_buffer() -> int:
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    except (OSError, ValueError):
        return 212_992


def resident_bytes(pid: int) -> int:
    """Resident memory of ``pid`` and its descendants; what they share is counted for each (so it is never too little)."""
    total = 0
    for each in descendants(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue
    return total


_BUFFER = _default_buffer()
