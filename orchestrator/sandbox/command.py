"""The command line of the sandbox: bubblewrap around prlimit around the program. Nothing is run here.

What it asks for (each an attempt in ``tests/sandbox/test_escapes.py``):

* namespaces of its own for users, processes, network, mounts, IPC, host name and cgroups; no nesting of them;
* a root that holds ``/usr`` (read-only; without this package, where it lies there), an empty ``/proc`` of its own, five
  devices, and three folders that can be written, each a tmpfs with a size: ``/box`` (the working folder), ``/tmp``,
  ``/dev/shm``. Nothing else of the host;
* no capability, no way to regain one, no environment variable, no terminal, no descriptor but 0, 1 and 2;
* limits of each process by prlimit, set inside, so that processes are counted in this sandbox only (kernel 5.14);
* started by root, it runs as a user id of its own: limits on processes do not hold for user id 0;
* it dies with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.sandbox.limits import SandboxLimits

WORK = "/box"
SCRATCH = ("/dev/shm", "/tmp", WORK)  # what can be written
PATH = "/usr/local/bin:/usr/bin:/bin"
INSIDE_ID = 1000  # user and group id as the program sees them
FIRST_ID, ID_RANGE = 50_000, 9_000  # user ids on the host when root starts it; they own nothing

# The first process inside: waits for the program. (bubblewrap's own is left to the host to reap; and the program itself must
# not be the first process, which the kernel shields from signals.) Its own words, "Killed", go nowhere.
_FIRST = 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'

# Joins the cgroups whose files are named before "--", then becomes the rest of its arguments. When the machine's memory runs
# out it goes first (as root it cannot take that back: what was inherited may have allowed it to be spared).
_JOIN = (
    "echo 1000 2>/dev/null >/proc/self/oom_score_adj; "
    'while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; exec "$@"'
)


@dataclass(frozen=True, slots=True)
class SandboxTools:
    """Absolute paths of what the command line is made of. ``python`` and ``binds`` are seen inside."""

    bwrap: str
    prlimit: str
    setpriv: str
    shell: str
    python: str
    binds: tuple[str, ...]  # read-only, at the same path inside
    closed: tuple[str, ...] = ()  # folders in what is seen inside that are empty there


@dataclass(frozen=True, slots=True)
class SandboxFile:
    """A file for the sandbox: its content is read from descriptor ``fd``, from its start."""

    path: str  # absolute, inside
    fd: int
    writable: bool


@dataclass(frozen=True, slots=True)
class SharedPaths:
    """What of the host a sandbox sees beside ``/usr``. ``sockets``: (path inside, path on the host) of Unix sockets
    that it may connect to, its only ways out; each, with the folder that it is alone in, is given to the sandbox's
    user. ``readable``: files and folders, at the same path inside."""

    sockets: tuple[tuple[str, str], ...] = ()
    readable: tuple[str, ...] = ()


NOTHING_SHARED = SharedPaths()


def find_tools() -> SandboxTools:
    """Where everything is. Raises ConfigError when something is missing: there is no running outside a sandbox."""
    found: dict[str, str] = {}
    for name, package in {
        "bwrap": "bubblewrap",
        "prlimit": "util-linux",
        "setpriv": "util-linux",
        "sh": "dash",
    }.items():
        path = shutil.which(name, path=f"{PATH}:/usr/sbin:/sbin")
        if path is None:
            fix = f"there is none, and model-written code runs in no other way: apt-get install {package}"
            raise ConfigError("sandbox", name, fix)
        found[name] = path
    python, binds = _interpreter()
    seen = tuple(folder for folder in _own_folders() if folder.startswith(("/usr/", *(f"{path}/" for path in binds))))
    return SandboxTools(found["bwrap"], found["prlimit"], found["setpriv"], found["sh"], python, binds, seen)


def _own_folders() -> tuple[str, ...]:
    """Of this package, whose tasks hold their answers: nobody in a sandbox is to read them where it is installed under a path
    that sandboxes see."""
    return (str(Path(__file__).resolve().parents[1]),)


def _interpreter() -> tuple[str, tuple[str, ...]]:
    """A Python that the sandbox may see: one under /usr, else this one where every user can reach it."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(path) and os.path.realpath(path).startswith("/usr/"):
            return path, ()
    prefix = Path(sys.base_prefix).resolve()
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in (prefix, *prefix.parents)):
        return str(prefix / "bin" / "python3"), (str(prefix),)
    fix = f"no Python that another user could run ({prefix} is private): apt-get install python3"
    raise ConfigError("sandbox", "python3", fix)


def command_line(
    tools: SandboxTools,
    limits: SandboxLimits,
    program: Sequence[str],
    *,
    user: int | None,
    files: Sequence[SandboxFile] = (),
    variables: int | None = None,
    cgroups: Sequence[str] = (),
    seccomp: int | None = None,
    status: int | None = None,
    shared: SharedPaths = NOTHING_SHARED,
) -> list[str]:
    """The command that runs ``program`` in a sandbox.

    ``user``: the user id to run as, when this process is root. ``cgroups``: ``cgroup.procs`` files to join first.
    ``seccomp``: descriptor of the filter. ``variables``: of :func:`packed_variables`. ``status``: of bubblewrap's status
    records. ``shared``: see there.
    """
    command = [tools.shell, "-c", _JOIN, "sh", *cgroups, "--"]
    if user is not None:
        command += [tools.setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    command += [tools.bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    command += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--hostname", "sandbox"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ("bin", "lib", "lib64", "sbin"):
        command += _like_the_host(name)
    for path in tools.binds:
        command += ["--ro-bind", path, path]
    for path in tools.closed:
        command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += [
        "--ro-bind",
        "/dev/null",
        "/dev/zero",
    ]  # shared mappings of it are memory that no file holds; it cannot be opened
    for folder in SCRATCH:
        command += ["--perms", "0700", "--size", str(limits.scratch_bytes), "--tmpfs", folder]
    for inside, path in (*((path, path) for path in shared.readable), *shared.sockets):
        command += ["--ro-bind", path, inside]  # to connect to a socket needs no more
    for file in files:
        mode = ["--perms", "0644", "--file"] if file.writable else ["--perms", "0444", "--ro-bind-data"]
        command += [*mode, str(file.fd), file.path]
    # Both are tmpfs without a size.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    command += ["--clearenv", "--setenv", "PATH", PATH, "--setenv", "HOME", WORK, "--setenv", "LANG", "C.UTF-8"]
    if variables is not None:
        command += ["--args", str(variables)]
    command += ["--chdir", WORK]
    if seccomp is not None:
        command += ["--seccomp", str(seccomp)]
    if status is not None:
        command += ["--json-status-fd", str(status)]
    return [*command, "--", "/bin/sh", "-c", _FIRST, "sh", tools.prlimit, *_rlimits(limits), "--", *program]


def packed_variables(environment: Mapping[str, str]) -> bytes:
    """What the program finds in its environment besides, for bubblewrap to read: every user can read a command line."""
    words = (word for name, value in environment.items() for word in ("--setenv", name, value))
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _rlimits(limits: SandboxLimits) -> list[str]:
    return [
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",  # a signal that can be caught, then one that cannot
        f"--as={limits.memory_bytes}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        "--core=0",
        "--memlock=0",
        "--msgqueue=0",
        "--rtprio=0",
        "--sigpending=256",  # and timers, which are counted so
    ]


def _like_the_host(name: str) -> list[str]:
    """``/bin`` and its like: links into ``/usr`` nearly everywhere, folders on old systems."""
    path = f"/{name}"
    if os.path.islink(path):
        return ["--symlink", os.readlink(path).lstrip("/"), path]
    return ["--ro-bind", path, path] if os.path.isdir(path) else []
