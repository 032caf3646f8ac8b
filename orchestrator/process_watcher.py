"""The watcher of a process that runs others' code (an environment, a reward function): when its owner is gone, or it is, nothing
of it is left.

:func:`fork_under_watch` splits the process in two. The one that returns runs their code; the other does nothing but
wait, for the end of the first or for the other end of its standard input to close, which the kernel does however the
orchestrator ends (``kill -9`` included). Then it kills all its descendants, those that left the process group too: it is
their subreaper (prctl(2)). In a container it is process 1, and reaps what nobody waits for.

Guarantees: it runs no code of theirs and shares no lock with it, so a busy loop does not hold it up; their
process is killed by the kernel when the watcher is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def fork_under_watch() -> None:
    """Returns in the child; the parent watches and ends with the child's code. Call before there are threads."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:
            os._exit(1)
        return
    code: int | None = None
    try:
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGINT, _end)
        _silence_output()  # so that the environment's end is the end of the pipe
        code = _wait(child)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        killed = _kill_all(child)
        os._exit(killed if code is None else code)


def take_pipes() -> tuple[int, int]:
    """Standard input and output moved to private descriptors, which children do not inherit: the first is empty from now on,
    and what is printed goes to standard error."""
    requests, replies = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return requests, replies


def _wait(child: int) -> int | None:
    """Until the child ends (its exit code) or standard input is closed at its other end (None). Reaps orphans meanwhile."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to `tell`
    ends = select.poll()
    ends.register(told, select.POLLIN)
    ends.register(0, 0)  # hang-ups are always told
    while True:
        code = _reap(child, os.WNOHANG)
        if code is not None:
            return code
        for descriptor, what in ends.poll():
            if descriptor == told:
                os.read(told, 4096)
            elif what & select.POLLNVAL:
                ends.unregister(0)  # there is no standard input
            else:
                return None


def _reap(child: int, options: int) -> int | None:
    """Reap what has ended, or with no options wait for one; the exit code of ``child``, as a shell has it, if it was there."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
        if not options:
            return code


def _kill_all(child: int) -> int:
    """Kill and reap all descendants; orphans become our children. Returns the exit code of ``child`` if it was one of them."""
    found = 1
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = _reap(child, 0)
        found = found if code is None else code
    return found


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text(encoding="ascii").split()]
    # a kernel without CONFIG_PROC_CHILDREN: what is in our process group goes, and we with it
    except FileNotFoundError:
        os.killpg(0, signal.SIGKILL)
        raise


def _silence_output() -> None:
    empty = os.open(os.devnull, os.O_WRONLY)
    os.dup2(empty, 1)
    os.close(empty)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
