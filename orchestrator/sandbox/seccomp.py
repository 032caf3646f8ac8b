"""The system-call filter of the sandbox: a classic BPF program, built here, loaded by bubblewrap (``--seccomp FD``).

Guarantees: what the namespaces cannot take away is refused with EPERM: tracing, mounting, keyrings, BPF, io_uring, clocks,
modules, new namespaces, and memory that no other limit counts (memfd, System V shared memory). Sockets are of the
families UNIX, IPv4 and IPv6 (which end at the sandbox's own loopback); above all not VSOCK, which no namespace confines.
A call through another ABI of the same processor (32-bit, x32) kills the process. It is a second wall behind the
namespaces, the dropped capabilities and the limits: where the processor is none of :data:`ARCHITECTURES`, the sandbox
works without it.
"""

from __future__ import annotations

import functools
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h: AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64

# Numbers on x86_64 and on aarch64 (asm/unistd_64.h, asm-generic/unistd.h); -1: there is no such call.
_REFUSED: dict[str, tuple[int, int]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # file systems and device nodes
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "fanotify_init": (300, 262),
    # namespaces
    "setns": (308, 268),
    "unshare": (272, 97),
    # keyrings
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # large surfaces of the kernel that no program here needs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "uselib": (134, -1),
    "vhangup": (153, 58),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    # memory that outlives its mapping, and so escapes the limit of address space
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}; linux/sched.h
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_INJECTING = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into a terminal
_X32 = 0x40000000  # bit of the call numbers of the x32 ABI
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes, low half first


@functools.cache
def program(machine: str = "") -> bytes | None:
    """The filter as an array of ``struct sock_filter``, or None for a processor whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        if numbers[column] >= 0:
            code += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | _EPERM)]
    # The C library falls back to clone, whose flags can be looked at.
    code += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    code += _if_call(_CLONE[column], 0, [_step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _step(_RETURN, _ERRNO | _EPERM)])
    families = [_step(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
    code += _if_call(_SOCKET[column], 0, [*families, _step(_RETURN, _ERRNO | _EAFNOSUPPORT)])
    requests = [step for r in _INJECTING for step in (_step(_EQUAL, r, 0, 1), _step(_RETURN, _ERRNO | _EPERM))]
    code += _if_call(_IOCTL[column], 1, requests)
    code.append(_step(_RETURN, _ALLOW))
    return b"".join(code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the jumps are numbers of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _if_call(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """``then`` sees the low half of that argument of that call; what falls out of its end is allowed."""
    inside = [_step(_LOAD, _ARGUMENT + 8 * argument), *then, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inside)), *inside]
