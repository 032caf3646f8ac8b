"""What the processes of a sandbox hold in memory together, looked at from outside, where no cgroup limits it."""

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


def resident_bytes(pid: int) -> int:
    """Resident memory of ``pid`` and its descendants; what they share is counted for each (so it is never too little)."""
    total = 0
    for each in descendants(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
        except (OSError, IndexError):
            continue
    return total
