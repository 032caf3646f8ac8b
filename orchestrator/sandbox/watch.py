"""What the processes of a sandbox hold in memory together, looked at from outside: where no cgroup limits it,
and in sockets, which no cgroup counts."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


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
