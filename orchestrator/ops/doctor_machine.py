"""The machine, for ``rl-coserve doctor``: devices, memory, disks, open files, ports. Everything is read, nothing is changed.

Without a config the bounds are those of the demo. What a config adds is in :mod:`orchestrator.ops.doctor_config`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.child_process import port_taken
from orchestrator.ops.check import Finding
from orchestrator.ops.nvidia_driver import NvmlUnavailable, nvml_handles, start_nvml

# The demo's processes together took 2.5 GB (proportional set size, peak, on two cores): Ray, one vLLM engine, one
# Megatron-Core rank, mooncake_master, reward host, orchestrator.
MEMORY_TIGHT_MB = 4_000
MEMORY_MIN_MB = 2_500
DISK_TIGHT_MB = 2_000
DISK_MIN_MB = 200  # what a run refuses to start below
SHARED_MEMORY_MB = 256  # Ray's object store and a margin; a container has 64 by default
# the demo's processes had 125 at most (an engine's actor; the orchestrator 75): a margin for wider ones
OPEN_FILES = 1_024
DEVICE_FREE = 0.9  # of a GPU's memory: vLLM asks for 0.9 of it by default


def check_devices() -> Finding:
    """NVIDIA GPUs through NVML; a machine without one is told so, and is no failure: the engines then run on the CPU."""
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    try:
        library = start_nvml()
    except NvmlUnavailable as error:
        if not error.installed and nodes:
            detail = f"{', '.join(nodes)} in /dev, but NVML cannot be used: {error}"
            return Finding("warn", detail, "pip install 'rl-coserve[nvml]'")
        if not error.installed:
            return Finding("ok", "none (no /dev/nvidia*): engines run on the CPU")
        if nodes:
            fix = "check the driver (nvidia-smi, dmesg); in a container: the NVIDIA container toolkit"
            return Finding("fail", f"{', '.join(nodes)} in /dev, but NVML says: {error}", fix)
        return Finding("ok", "none (NVML finds no driver): engines run on the CPU")
    try:
        return _devices(library)
    finally:
        library.nvmlShutdown()


def _devices(library: Any) -> Finding:
    driver = _text(library.nvmlSystemGetDriverVersion())
    said, taken = [], []
    for index, handle in enumerate(nvml_handles(library)):
        memory, name = library.nvmlDeviceGetMemoryInfo(handle), _text(library.nvmlDeviceGetName(handle))
        said.append(f"{index}: {name}, {memory.free >> 20} of {memory.total >> 20} MB free")
        if memory.free < DEVICE_FREE * memory.total:
            taken.append(str(index))
    if not said:
        return Finding("ok", f"none (driver {driver}, no GPU): engines run on the CPU")
    detail = f"driver {driver}; {'; '.join(said)}"
    if taken:
        who = f"below {DEVICE_FREE:.0%} free: {', '.join(taken)}"
        fix = f"{who}; see `nvidia-smi` for what uses it, or lower --gpu-memory-utilization"
        return Finding("warn", detail, fix)
    return Finding("ok", detail)


def _text(found: str | bytes) -> str:
    """Older pynvml answers bytes."""
    return found.decode() if isinstance(found, bytes) else found


def check_libraries() -> Finding:
    """The shared libraries that Mooncake's client loads."""
    from orchestrator.transfer.mooncake_relay import APT_PACKAGES

    missing = []
    for library, package in APT_PACKAGES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    if missing:
        fix = f"apt-get install {' '.join(missing)}"
        return Finding("fail", f"missing, and Mooncake needs them: {' '.join(missing)} (Debian's names)", fix)
    return Finding("ok", ", ".join(APT_PACKAGES))


def check_disk(folder: Path | None = None, field: str = "run.folder") -> Finding:
    """Room where ``folder`` is or would be made (default: here)."""
    wanted = Path.cwd() if folder is None else folder.absolute()
    here = next(path for path in (wanted, *wanted.parents) if path.exists())
    usage = shutil.disk_usage(here)
    free = usage.free >> 20
    if not usage.total or not os.access(here, os.W_OK) or not here.is_dir():  # /proc and its like are of no size
        return Finding(
            "fail", f"{here} cannot be written", f"start runs in a folder where you may write, or set {field}"
        )
    detail = f"{free} MB free in {here}"
    if free < DISK_MIN_MB:
        return Finding("fail", detail, f"free at least {DISK_TIGHT_MB} MB, or set {field} to another disk")
    if free < DISK_TIGHT_MB:
        return Finding("warn", detail, f"a long run needs more than {DISK_TIGHT_MB} MB; see checkpoint.keep")
    return Finding("ok", detail)


def check_temporary_disk() -> Finding:
    """Ray's sessions and spilled objects, and what sandboxes work in."""
    found = check_disk(Path(tempfile.gettempdir()), "TMPDIR")
    return Finding(
        found.status, found.detail, found.fix.replace("; see checkpoint.keep", ": set TMPDIR to another disk")
    )


def check_memory() -> Finding:
    """What this machine, or the container's limit, leaves."""
    free = min(meminfo_mb(), cgroup_free_mb())
    cores = len(os.sched_getaffinity(0))
    detail = f"{free} MB available, {cores} core{'s' if cores > 1 else ''}"
    fix = (
        f"close other programs; the demo needs {MEMORY_TIGHT_MB} MB (depends on model, rollout.environments and ray.*)"
    )
    if free < MEMORY_MIN_MB:
        return Finding("fail", detail, fix)
    if free < MEMORY_TIGHT_MB:
        return Finding("warn", detail, fix)
    return Finding("ok", detail)


def check_shared_memory(needed: int = SHARED_MEMORY_MB) -> Finding:
    """``needed``: MB."""
    free = shutil.disk_usage("/dev/shm").free >> 20
    if free < needed:
        size = max(1, -(-needed // 1024))
        fix = f"in a container: `--shm-size={size}g`, in a pod an emptyDir of medium Memory; else clear /dev/shm"
        return Finding("warn", f"{free} MB free in /dev/shm, {needed} needed: Ray falls back to files", fix)
    return Finding("ok", f"{free} MB free in /dev/shm")


def check_open_files(needed: int = OPEN_FILES) -> Finding:
    """``needed``: of one process (``ulimit -n``)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    said = f"{'unlimited' if soft == unlimited else soft} (ulimit -n), {needed} needed"
    if soft == unlimited or soft >= needed:
        return Finding("ok", said)
    if hard == unlimited or hard >= needed:
        return Finding("warn", said, f"ulimit -n {needed}")
    where = "LimitNOFILE= of the service, /etc/security/limits.conf, or `docker run --ulimit`"
    fix = f"raise the hard limit, which is {hard}: {where}"
    return Finding("fail", said, fix)


def check_free_port(number: int, address: str, field: str) -> Finding:
    """Whether ``number`` can be listened on. One that is taken is told with who has it, where that can be seen."""
    if error := port_taken(number, address):
        who = next(listening_processes(number), "")
        detail = f"{field} = {number} is not available on {address} ({error.strerror}){f': {who}' if who else ''}"
        return Finding("fail", detail, f"end that process, or set {field} to another port (0: a free one)")
    return Finding("ok", f"{field} = {number} is free on {address}")


def listening_processes(number: int) -> Iterator[str]:
    """Processes that listen on a TCP port, of those that this user may look into."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == number:  # 0A: LISTEN
                inodes.add(f"socket:[{fields[9]}]")
    for process in sorted(Path("/proc").glob("[0-9]*")):
        try:
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                yield f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # another user's, or gone meanwhile
            continue


def meminfo_mb() -> int:
    """What the kernel says is available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    raise OSError("/proc/meminfo has no MemAvailable")


def cgroup_free_mb() -> int:
    """What the container's limit leaves; huge where there is none."""
    names = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in names:
        try:
            text = (Path("/sys/fs/cgroup") / limit).read_text().strip()
            if text != "max":
                return (int(text) - int((Path("/sys/fs/cgroup") / used).read_text())) >> 20
        except (OSError, ValueError):
            continue
    return 1 << 40
