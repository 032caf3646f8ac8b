"""The spawner's own program; see ``spawner.py``. Standard library only, run by path: it must stay small and start fast."""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys


def serve(requests: socket.socket) -> None:
    """Until the other end closes the socket; then what still runs is ended, with what it started: a program that has not got
    round to asking the kernel for that (``PR_SET_PDEATHSIG``) would outlive us, and so would one that bubblewrap had just made
    and not told anything yet."""
    started: list = []  # type: ignore[type-arg]
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, 1 << 18, 253)
        if not text:
            _end(started)
            return
        _forget_ended(started)
        for number in descriptors:
            os.set_inheritable(number, False)
        with socket.socket(fileno=descriptors.pop()) as answer:
            held = []
            try:
                request = json.loads(text)
                free = 1 + max((*request["numbers"], answer.fileno(), *descriptors))  # above it nothing is overwritten
                held = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in descriptors]
                started += _answer(answer, request, held)
            except (OSError, ValueError, KeyError) as error:
                _send(answer, {"error": str(error)}, [])
            finally:
                for number in (*held, *descriptors):
                    os.close(number)


def _end(started: list) -> None:  # type: ignore[type-arg]
    for watch in started:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # from now on ids are ours until we reap them
    while left := _children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list:  # type: ignore[type-arg]
    """Orphans of what we started are among them: we are their subreaper. None where the kernel does not say."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _forget_ended(started: list) -> None:  # type: ignore[type-arg]
    """Close the descriptors of programs that have ended: they are readable."""
    poll = select.poll()
    for watch in started:
        poll.register(watch, select.POLLIN)
    for watch, _ in poll.poll(0):
        started.remove(watch)
        os.close(watch)


def _answer(answer: socket.socket, request: dict, descriptors: list) -> list:  # type: ignore[type-arg]
    """Start it, and say so. Returns the descriptor that watches it, if it still runs."""
    moves = [(os.POSIX_SPAWN_DUP2, held, wanted) for held, wanted in zip(descriptors, request["numbers"], strict=True)]
    pid = os.posix_spawn(
        request["command"][0],
        request["command"],
        request["environment"],
        file_actions=moves,
        setsigdef=[signal.SIGCHLD, signal.SIGINT, signal.SIGTERM],
    )
    try:
        watch = [os.pidfd_open(pid)]
    except ProcessLookupError:  # it has ended, and the kernel has reaped it
        watch = []
    _send(answer, {"pid": pid}, watch)
    return watch


def _send(answer: socket.socket, found: dict, descriptors: list) -> None:  # type: ignore[type-arg]
    try:
        socket.send_fds(answer, [json.dumps(found).encode()], descriptors)
    except OSError:
        return  # nobody waits for it any more; what was started ends by the caller's other descriptors


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, linux/prctl.h: orphans come to us
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the orchestrator ends first, and closes the socket
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(int(sys.argv[1]), False)  # who has it can start programs
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
