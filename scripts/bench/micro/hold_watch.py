"""What went on while an event loop was held, seen from a process of its own, which needs no interpreter lock of theirs; on Linux.

    python -m scripts.bench.micro.hold_watch FOLDER            started by :class:`HoldWatch`, until its stdin closes

A loop of :class:`scripts.bench.micro.busy_loop.BusySelector` says in a file of a few bytes since when it has been at work. Where
that is longer than :data:`LIMIT` it is looked at every :data:`EVERY` seconds: what its thread does in the kernel, which other
threads of its process computed or waited for a processor, whether the machine itself or this process stood still. Each thread is
asked for its Python stack, by a signal of its own: its own handler writes it, without the interpreter's lock, so that a thread
that keeps the lock is seen as well. What stays in the kernel answers when it comes out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import heapq
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 0.1  # seconds
EVERY = 0.02
_THREADS_EVERY = 0.25  # seconds between two looks at what all threads have computed
_KEPT = 8  # of a loop, the longest
_ASKED = 40  # times that the threads of a process are asked for their stacks
_FRAMES = 10  # of a stack, the innermost
_SIGNAL = signal.SIGUSR1
_BEAT = struct.Struct("<qqd")  # process, thread, since when it is at work: seconds of the monotonic clock, 0: it is not
_PATIENCE = 20  # milliseconds in which a thread begins its answer
_HEADER = "(most recent call first):\n"
_LOOKS = "hold-watch"  # a file that is there when it looks
_TGKILL = 234  # of Linux on x86-64


class Beat:
    """The file of one loop; made on the loop's thread. ``name``: the loop's."""

    def __init__(self, folder: Path, name: str) -> None:
        self._stacks = (folder / f"{name}.stacks").open("ab", buffering=0)
        faulthandler.register(_SIGNAL, file=self._stacks, all_threads=False)
        partial = folder / f"{name}.partial"
        partial.write_bytes(_BEAT.pack(os.getpid(), threading.get_native_id(), 0.0))
        with partial.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BEAT.size)
        self._since = memoryview(self._map).cast("d")
        partial.rename(folder / f"{name}.beat")

    def at_work(self, since: float) -> None:
        """0: it is not."""
        self._since[2] = since

    def close(self) -> None:
        """No thread is asked any more."""
        self.at_work(0.0)
        faulthandler.unregister(_SIGNAL)
        self._stacks.close()


class HoldWatch:
    """The process that looks; ``folder``: where the beats are."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "scripts.bench.micro.hold_watch", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        self._folder = folder

    @property
    def looks(self) -> bool:
        """Whether it is up, and has found a loop."""
        return (self._folder / _LOOKS).exists()

    def stop(self) -> dict[str, list[dict[str, Any]]]:
        """It ends; what it saw, by loop, the longest first."""
        said, _ = self._process.communicate()
        found: dict[str, list[dict[str, Any]]] = json.loads(said)
        return found


def children(pid: int) -> list[int]:
    """Of a process, begun by any of its threads."""
    found = [file.read_text(encoding="ascii").split() for file in _tasks(pid, "children")]
    return sorted({int(one) for row in found for one in row})


def priority_of(pid: int) -> dict[str, Any]:
    """What a process has of the processors beside others: niceness within its autogroup, and the autogroup's own."""
    found: dict[str, Any] = {"nice": os.getpriority(os.PRIO_PROCESS, pid)}
    with contextlib.suppress(OSError, ValueError, IndexError):
        group, _, nice = Path(f"/proc/{pid}/autogroup").read_text(encoding="ascii").split()
        found |= {"autogroup": group, "autogroup_nice": int(nice)}
    return found


def share_priority(pids: list[int]) -> None:
    """Processes in sessions of their own get the niceness of this one's autogroup, where the system lets this one give it."""
    with contextlib.suppress(OSError, LookupError):
        wanted = priority_of(os.getpid())["autogroup_nice"]
        for pid in pids:
            with contextlib.suppress(OSError, LookupError):
                if priority_of(pid)["autogroup_nice"] != wanted:
                    Path(f"/proc/{pid}/autogroup").write_text(str(wanted), encoding="ascii")


# -- in the process --------------------------------------------------------------------------------------------------


class _Hold:
    """One, while it lasts."""

    def __init__(self, since: float, before: dict[int, tuple[float, float]], machine: tuple[float, ...]) -> None:
        self.since, self.before, self.machine = since, before, machine
        self.seen = self.gap = 0.0
        self.asked = 0.0  # seconds of it after which the threads were asked last
        self.after: dict[int, tuple[float, float]] = {}
        self.kernel: Counter[str] = Counter()
        self.stacks: dict[str, str] = {}


class _Loop:
    """One that is looked at."""

    def __init__(self, beat: Path) -> None:
        self.name = beat.stem
        with beat.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _BEAT.size, access=mmap.ACCESS_READ)
        self.pid, self.thread, _ = _BEAT.unpack(self._map[:])
        self._stacks = beat.with_suffix(".stacks")
        self._asks = 0
        self._threads: dict[int, tuple[float, float]] = {}
        self._machine: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._hold: _Hold | None = None
        self._number = 0
        self.longest: list[tuple[float, int, dict[str, Any]]] = []

    def look(self, gap: float) -> None:
        """``gap``: seconds since the last time."""
        now, (_, _, since) = time.monotonic(), _BEAT.unpack(self._map[:])
        hold = self._hold
        if hold is not None and hold.since != since:
            self._end(hold)
            hold = None
        if since and now - since >= LIMIT:
            if hold is None:
                hold = self._hold = _Hold(since, self._threads, self._machine)
            hold.seen, hold.gap = now - since, max(hold.gap, gap)
            hold.after |= _spent(self.pid)
            hold.kernel[_in_kernel(self.pid, self.thread)] += 1
            if hold.seen >= 2 * hold.asked and self._asks < _ASKED:
                hold.asked = hold.seen
                self._asks += 1
                hold.stacks |= self._ask()

    def count(self) -> None:
        """What all threads have computed and waited until now; while one is held that stays as it was."""
        if self._hold is None:
            self._threads, self._machine = _spent(self.pid), _of_machine()

    def end(self) -> list[dict[str, Any]]:
        """What was seen, the longest first."""
        if self._hold is not None:
            self._end(self._hold)
        return [found for _, _, found in sorted(self.longest, reverse=True)]

    def _end(self, hold: _Hold) -> None:
        self._hold = None
        threads = {}
        for thread, (ran, waited) in (hold.after | _spent(self.pid)).items():
            before = hold.before.get(thread, (0.0, 0.0))
            spent = {"computed": round(ran - before[0], 3), "waited": round(waited - before[1], 3)}
            if max(spent.values()) >= 0.01:
                threads["loop" if thread == self.thread else str(thread)] = spent
        machine = zip(("stolen", "input_output", "idle"), _of_machine(), hold.machine, strict=True)
        found = {
            "began": hold.since,
            "seen_seconds": round(hold.seen, 3),
            "kernel": dict(hold.kernel.most_common(4)),
            "threads": threads,  # from at most a quarter of a second before it on
            "machine": {name: round(now - before, 3) for name, now, before in machine},  # of all processors together
            "longest_gap": round(hold.gap, 3),  # in which this process did not look
            "stacks": hold.stacks,
        }
        self._number += 1
        heapq.heappush(self.longest, (hold.seen, self._number, found))
        if len(self.longest) > _KEPT:
            heapq.heappop(self.longest)

    def _ask(self) -> dict[str, str]:
        """Stacks of those threads that answer at once."""
        found = {}
        threads = sorted(_spent(self.pid), key=lambda thread: thread != self.thread)
        for thread in threads[:16]:
            with contextlib.suppress(OSError), self._stacks.open("rb") as file:
                file.seek(0, os.SEEK_END)
                if ctypes.CDLL(None).syscall(_TGKILL, self.pid, thread, int(_SIGNAL)):
                    continue
                said = b""
                for _ in range(_PATIENCE):
                    time.sleep(0.001)
                    if not (more := file.read()) and said:
                        break
                    said += more
                # of several the last: the others are of threads that were asked before, and were in the kernel
                rows = said.decode(errors="replace").rpartition(_HEADER)[2].splitlines()
                stack = " < ".join(_short(row) for row in rows[:_FRAMES] if row.lstrip().startswith("File "))
                if stack:
                    found["loop" if thread == self.thread else str(thread)] = stack
        return found


def _short(row: str) -> str:
    """Of ``File "/a/b/c.py", line 3 in name``: ``b/c.py:3 name``."""
    _, file, rest = row.split('"', 2)
    number, _, name = rest.removeprefix(", line ").partition(" in ")
    return f"{'/'.join(Path(file).parts[-2:])}:{number} {name}"


def _tasks(pid: int, name: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            file = Path(f"/proc/{pid}/task/{thread}/{name}")
            if file.exists():
                yield file


def _spent(pid: int) -> dict[int, tuple[float, float]]:
    """Of each thread: seconds that it computed, and waited for a processor."""
    found = {}
    for file in _tasks(pid, "schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = file.read_text(encoding="ascii").split()
            found[int(file.parent.name)] = (int(ran) / 1e9, int(waited) / 1e9)
    return found


def _of_machine() -> tuple[float, ...]:
    """Seconds that its processors were stolen by the machine's own host, waited for a disk, did nothing."""
    with open("/proc/stat", encoding="ascii") as file:
        row = [int(one) / os.sysconf("SC_CLK_TCK") for one in file.readline().split()[1:]]
    return row[7], row[4], row[3]


def _in_kernel(pid: int, thread: int) -> str:
    """State, and where in the kernel it is; without the right to look there only where it waits."""
    task = Path(f"/proc/{pid}/task/{thread}")
    try:
        state = task.joinpath("stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        if state == "R":
            return "R"
        try:
            rows = task.joinpath("stack").read_text(encoding="ascii").splitlines()
            place = " < ".join(row.split("] ", 1)[1].split("+")[0] for row in rows[:6])
        except OSError:
            place = task.joinpath("wchan").read_text(encoding="ascii")
    except (OSError, IndexError):
        return "gone"
    return f"{state} {place}"


def main() -> None:
    """Look until stdin closes; then say what was seen."""
    folder, loops = Path(sys.argv[1]), dict[str, _Loop]()
    last, counted = time.monotonic(), 0.0
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        now = time.monotonic()
        gap, last = now - last, now
        for loop in loops.values():
            loop.look(gap)
        if now - counted >= _THREADS_EVERY:
            counted = now
            for beat in folder.glob("*.beat"):
                if beat.stem not in loops:
                    loops[beat.stem] = _Loop(beat)
                    (folder / _LOOKS).touch()
            for loop in loops.values():
                loop.count()
    print(json.dumps({name: loop.end() for name, loop in loops.items()}))


if __name__ == "__main__":
    main()
