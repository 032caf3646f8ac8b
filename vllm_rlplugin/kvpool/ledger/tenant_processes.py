"""What may be said about, and done to, the process of another tenant.

Guarantees: a process is killed only if it can be seen here and has the pool's file open: a number in the ledger may be one of
another namespace, and mean somebody else.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path


def holds_file(pid: int, path: Path) -> bool:
    """Whether this process has the file open."""
    try:
        wanted = path.stat()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    return False


def is_stopped(pid: int) -> bool:
    """Whether it was stopped by a signal, or by a debugger."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def kill_tenants(pids: Iterable[int], path: Path) -> list[int]:
    """End those that may be; returns them."""
    return [pid for pid in pids if kill_tenant(pid, path)]


def kill_tenant(pid: int, path: Path) -> bool:
    """End it, if it may be; whether that was done."""
    if pid <= 0 or pid == os.getpid() or not holds_file(pid, path):
        return False
    os.kill(pid, signal.SIGKILL)
    return True
