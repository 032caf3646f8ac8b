"""Programs that try to get out of a sandbox. Each prints ESCAPED when it got what it wanted.

``@NAME@`` in a source stands for something of the host that the test made: see ``Host`` in ``test_escapes.py``. Every
attempt is also run outside, where it must succeed: so none is stopped by being wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CTYPES = """
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(x86_64, aarch64, *arguments):
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""

REACH = """
def reach(x86_64, aarch64, *arguments):
    try:
        call(x86_64, aarch64, *arguments)
    except OSError as error:
        if error.errno in (1, 38):  # EPERM, ENOSYS: the filter's; anything else is said by the call itself
            print(error)
            return
    print('ESCAPED')
"""

# Name -> numbers on both processors, and arguments with which it does nothing, whoever calls it. Those above 450 are newer than
# the list; 470 and 1000 are not there yet.
CALLS = {
    "personality": (135, 92, "0xffffffff"), "umount2": (166, 39, "0, 0"), "pivot_root": (155, 41, "0, 0"),
    "swapon": (167, 224, "0, 0"), "swapoff": (168, 225, "0"), "reboot": (169, 142, "0, 0, 0, 0"),
    "init_module": (175, 105, "0, 0, 0"), "finit_module": (313, 273, "-1, 0, 0"), "delete_module": (176, 106, "0, 0"),
    "kexec_load": (246, 104, "0, 0, 0, -1"), "acct": (163, 89, "1"), "settimeofday": (164, 170, "1, 0"),
    "clock_settime": (227, 112, "0, 0"), "clock_adjtime": (305, 266, "0, 0"), "setdomainname": (171, 162, "0, -1"),
    "quotactl": (179, 60, "-1, 0, 0, 0"), "iopl": (172, 9999, "4"), "ioperm": (173, 9999, "0, 0, 0"),
    "modify_ldt": (154, 9999, "0, 0, 0"), "fanotify_init": (300, 262, "-1, 0"),
    "open_by_handle_at": (304, 265, "-1, 0, 0"), "mbind": (237, 235, "0, 0, 99, 0, 0, 0"),
    "set_mempolicy": (238, 237, "99, 0, 0"), "migrate_pages": (256, 238, "-1, 0, 0, 0"),
    "move_pages": (279, 239, "-1, 0, 0, 0, 0, 0"), "remap_file_pages": (216, 234, "0, 0, 0, 0, 0"),
    "io_submit": (209, 2, "0, 0, 0"), "io_getevents": (208, 4, "0, 0, 0, 0, 0"), "io_cancel": (210, 3, "0, 0, 0"),
    "io_destroy": (207, 1, "0"), "io_pgetevents": (333, 292, "0, 0, 0, 0, 0, 0"), "request_key": (249, 218, "0, 0, 0, 0"),
    "semctl": (66, 191, "-1, 0, 0, 0"), "shmat": (30, 196, "-1, 0, 0"), "msgsnd": (69, 189, "-1, 0, 0, 0"),
    "mq_timedsend": (242, 182, "-1, 0, 0, 0, 0"), "userfaultfd": (323, 282, "-1"),
    "perf_event_open": (298, 241, "0, 0, -1, -1, 0"), "kcmp": (312, 272, "os.getpid(), os.getpid(), 0, 0, 0"),
    "process_vm_writev": (311, 271, "os.getpid(), 0, 0, 0, 1, 0"), "vmsplice": (278, 75, "-1, 0, 0, 0"),
    "inotify_init1": (294, 26, "-1"),
    "io_uring_enter": (426, 426, "-1, 0, 0, 0, 0, 0"), "io_uring_register": (427, 427, "-1, 0, 0, 0"),
    "open_tree": (428, 428, "-1, 0, 0"), "move_mount": (429, 429, "-1, 0, -1, 0, -1"), "fsopen": (430, 430, "0, 0"),
    "fsconfig": (431, 431, "-1, 999, 0, 0, 0"), "fsmount": (432, 432, "-1, 0, 0"), "fspick": (433, 433, "-1, 0, 0"),
    "clone3": (435, 435, "0, 0"), "pidfd_getfd": (438, 438, "-1, 0, 0"), "process_madvise": (440, 440, "-1, 0, 0, -1, 0"),
    "mount_setattr": (442, 442, "-1, 0, 0, 0, 0"), "quotactl_fd": (443, 443, "-1, 0, 0, 0"),
    "memfd_secret": (447, 447, "-1"), "process_mrelease": (448, 448, "-1, 0"),
    "set_mempolicy_home_node": (450, 450, "0, 0, -1, 1"), "cachestat": (451, 451, "-1, 0, 0, 0"),
    "fchmodat2": (452, 452, "-1, 0, 0, -1"), "map_shadow_stack": (453, 453, "0, 0, -1"),
    "futex_wake": (454, 454, "0, 0, 0, -1"), "futex_wait": (455, 455, "0, 0, 0, -1, 0, 0"),
    "futex_requeue": (456, 456, "0, -1, 0, 0"), "statmount": (457, 457, "0, 0, 0, -1"),
    "listmount": (458, 458, "0, 0, 0, -1"), "lsm_get_self_attr": (459, 459, "0, 0, 0, -1"),
    "lsm_set_self_attr": (460, 460, "0, 0, 0, -1"), "lsm_list_modules": (461, 461, "0, 0, -1"),
    "mseal": (462, 462, "1, 1, -1"), "setxattrat": (463, 463, "-1, 0, -1, 0, 0, 0"),
    "getxattrat": (464, 464, "-1, 0, -1, 0, 0, 0"), "listxattrat": (465, 465, "-1, 0, -1, 0, 0"),
    "removexattrat": (466, 466, "-1, 0, -1, 0"), "open_tree_attr": (467, 467, "-1, 0, 0, 0, 1"),
    "file_getattr": (468, 468, "-1, 0, 0, 0, -1"), "file_setattr": (469, 469, "-1, 0, 0, 0, -1"),
    "470": (470, 470, "0, 0, 0, 0"), "1000": (1000, 1000, "0, 0, 0, 0"),
}  # fmt: skip
MAYBE = {"root": True, "kernel": True, "together": True}
KERNEL_FILES = {
    "/proc/sys/kernel/core_pattern": "O_WRONLY", "/proc/sys/kernel/modprobe": "O_WRONLY",
    "/proc/sys/kernel/randomize_va_space": "O_WRONLY",
    "/proc/sys/user/max_user_namespaces": "O_WRONLY", "/proc/sys/vm/overcommit_memory": "O_WRONLY",
    "/proc/sys/fs/binfmt_misc/register": "O_WRONLY", "/proc/sysrq-trigger": "O_WRONLY",
    "/proc/irq/default_smp_affinity": "O_WRONLY", "/proc/kcore": "O_RDONLY", "/proc/kmsg": "O_RDONLY",
    "/proc/vmallocinfo": "O_RDONLY", "/proc/slabinfo": "O_RDONLY", "/proc/timer_list": "O_RDONLY",
    "/sys/kernel/mm/transparent_hugepage/enabled": "O_WRONLY", "/sys/fs/cgroup/memory/cgroup.procs": "O_WRONLY",
    "/dev/mem": "O_RDONLY", "/dev/kmsg": "O_WRONLY", "/dev/vda": "O_RDONLY", "/dev/zero": "O_RDONLY",
}  # fmt: skip
NAMESPACES = "(0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000)"


@dataclass(frozen=True)
class Attempt:
    """``stopped``: by what. ``sources`` run one after the other, each in a sandbox of its own; the last may find what the first
    left."""

    name: str
    stopped: str
    sources: tuple[str, ...]
    root: bool = False  # outside, it takes root
    outside: (
        tuple[str, ...] | None
    ) = ()  # put before the command outside, so that it does no harm there; None: not run there
    kernel: bool = False  # not every kernel, or root, has it: where it fails outside, too, nothing is shown
    together: bool = False  # disturbs no other: all of these are run in one sandbox


def _a(
    name: str,
    stopped: str,
    *sources: str,
    root: bool = False,
    outside: tuple[str, ...] | None = (),
    kernel: bool = False,
    together: bool = False,
) -> Attempt:
    return Attempt(name, stopped, sources, root, outside, kernel, together)


# Runs attempts of one sandbox after one another, each in a process of its own; what each said is a field of what is printed.
TOGETHER = """
import ctypes, json, os, signal, socket, sys
found = {}
for name, source in json.load(open("attempts.json")):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        for number in (1, 2):
            os.dup2(write, number)
        os.close(write)
        signal.alarm(5)
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__", "os": os, "socket": socket})
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        found[name] = said.read().decode(errors="replace")
    os.waitpid(child, 0)
print(json.dumps(found))
"""

ATTEMPTS = [
    # ------------------------------------------------------------------------------------------------------ network
    _a(
        "connect to a server of the host",
        "a network of its own",
        "import socket; socket.create_connection(('127.0.0.1', @TCP@), 2); print('ESCAPED')",
    ),
    _a(
        "ask a name server of the host",
        "a network of its own",
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n"
        "s.sendto(b'?', ('127.0.0.1', @UDP@)); print(s.recv(99).decode())",
    ),
    _a(
        "abstract socket of the host",
        "a network of its own",
        "import socket; socket.socket(1).connect('\\0@ABSTRACT@'); print('ESCAPED')",
    ),
    _a(
        "socket file of the host",
        "a root of its own",
        "import socket; socket.socket(1).connect('@FOLDER@/s'); print('ESCAPED')",
    ),
    _a(
        "raw packets",
        "families of sockets",
        "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')",
        root=True,
    ),
    _a(
        "raw IP",
        "no capabilities",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('ESCAPED')",
        root=True,
    ),
    _a(
        "socket families that no namespace confines",
        "families of sockets",
        "import socket\nfor family in (16, 38, 40):\n"  # NETLINK, ALG, VSOCK
        "    try: socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM); print('ESCAPED')\n"
        "    except OSError as error: print(error)",
    ),
    # -------------------------------------------------------------------------------------------- files of the host
    _a("read the password hashes", "a root of its own", "open('/etc/shadow').read(); print('ESCAPED')", root=True),
    _a("look into home", "a root of its own", "import os; os.listdir('@HOME@'); print('ESCAPED')"),
    _a("read the repository", "a root of its own", "open('@REPOSITORY@/pyproject.toml').read(); print('ESCAPED')"),
    _a("read a file of the host", "a root of its own", "print(open('@FOLDER@/secret').read())"),
    _a(
        "a symbolic link out",
        "a root of its own",
        "import os\nos.symlink('@FOLDER@/secret', 'link')\nprint(open('link').read())",
    ),
    _a(
        "out through /proc",
        "a /proc of its own",
        "import os\nfor pid in ('self', '1', str(os.getppid())):\n    for way in ('root', 'cwd/../../../../../..'):\n"
        "        try: print(open(f'/proc/{pid}/{way}@FOLDER@/secret').read())\n"
        "        except OSError as error: print(error)",
    ),
    _a(
        "a hard link", "a root of its own", "import os; os.link('@FOLDER@/secret', '@FOLDER@/second'); print('ESCAPED')"
    ),
    _a(
        "files by handle",
        "the list of calls",
        CTYPES + "handle = (ctypes.c_uint * 40)(128); mount = ctypes.c_int()\n"
        "call(303, 264, -100, b'/usr', handle, ctypes.byref(mount), 0); print('ESCAPED')",
    ),
    _a("write into the root", "read-only mounts", "open('/@UNIQUE@', 'w'); print('ESCAPED')", root=True),
    _a("change a program of the host", "read-only mounts", "open('/usr/bin/yes', 'r+b'); print('ESCAPED')", root=True),
    _a(
        "change a file that was given read-only",
        "read-only mounts",
        "import os\nfor way in (lambda: open('given', 'a').write('x'), lambda: os.remove('given'),\n"
        "            lambda: os.rename('given', 'other'), lambda: os.truncate('given', 0)):\n"
        "    try: way(); print('ESCAPED')\n    except OSError as error: print(error)",
    ),
    # ---------------------------------------------------------------------------------- secrets of who started it
    _a(
        "read the environment of who started it",
        "an empty environment, a /proc of its own",
        "import os\nfor name in ['self', '1', str(os.getppid())]:\n"
        "    try: text = open(f'/proc/{name}/environ').read()\n    except OSError: text = ''\n"
        "    if 'SECRET' in text: print('ESCAPED')",
    ),
    _a(
        "read inherited descriptors",
        "three descriptors alone",
        "import os\nfor fd in range(3, 4096):\n    try: print(os.pread(fd, 99, 0).decode(errors='replace'))\n"
        "    except OSError: pass",
    ),
    # ---------------------------------------------------------------------------------------- processes of the host
    _a(
        "see processes of the host",
        "process ids of its own",
        "print('ESCAPED' if 'sleep' in open('/proc/@VICTIM@/cmdline').read() else '')",
    ),
    _a("signal a process of the host", "process ids of its own", "import os; os.kill(@VICTIM@, 18); print('ESCAPED')"),
    _a(
        "kill the parent",
        "the kernel shields the first process",
        "import os, time\nparent = os.getppid()\nos.kill(parent, 9)\ntime.sleep(0.2)\n"
        "print('ESCAPED' if os.getppid() != parent else 'still there')",
        outside=("sh", "-c", '"$@" & wait', "sh"),
    ),
    _a(
        "trace a process",
        "the list of calls",
        CTYPES + "import time\nchild = os.fork()\nif not child: time.sleep(5); os._exit(0)\n"
        "try: call(101, 117, 16, child, 0, 0); print('ESCAPED')\nfinally: os.kill(child, 9)",
    ),
    _a(
        "read another process's memory",
        "the list of calls",
        CTYPES + "text = ctypes.create_string_buffer(b'ESCAPED'); into = ctypes.create_string_buffer(8)\n"
        "here = (ctypes.c_size_t * 2)(ctypes.addressof(into), 7); there = (ctypes.c_size_t * 2)(ctypes.addressof(text), 7)\n"
        "call(310, 270, os.getpid(), here, 1, there, 1, 0); print(into.value.decode())",
    ),
    _a(
        "outlive the run as a daemon",
        "the first process ends, and all with it",
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 3)\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '@UNIQUE@'])\n"
        "    os._exit(0)\nimport time; time.sleep(0.3)",
    ),
    # ------------------------------------------------------------------------------------------------------- limits
    _a(
        "fork bomb",
        "limit of processes",
        "import os, time, signal\nchildren = []\ntry:\n    while len(children) < 100:\n        child = os.fork()\n"
        "        if not child: time.sleep(9); os._exit(0)\n        children.append(child)\n    print('ESCAPED')\n"
        "finally:\n    for child in children: os.kill(child, signal.SIGKILL)",
    ),
    _a(
        "thread bomb",
        "limit of processes",
        "import threading\nhold = threading.Event()\nthreading.stack_size(1 << 16)\ntry:\n    for _ in range(100):\n"
        "        threading.Thread(target=hold.wait).start()\n    print('ESCAPED')\nfinally: hold.set()",
    ),
    _a("memory bomb", "limit of memory", "block = b'x' * (300 << 20); print('ESCAPED')"),
    _a(
        "memory bomb of many processes",
        "limit of memory of all",
        "import os, time\nchildren = []\nfor _ in range(6):\n    child = os.fork()\n    if not child:\n"
        "        block = b'x' * (90 << 20); time.sleep(0.7); os._exit(0)\n    children.append(child)\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
    ),
    _a(
        "memory bomb of files",
        "size of each folder",
        "import os\nwritten = 0\nfor folder in ('/tmp', '/dev/shm', '/dev', '/run', '/', os.getcwd(), '/var/tmp'):\n"
        "    for n in range(6):\n        path = f'{folder}/@UNIQUE@{n}'\n        try:\n"
        "            with open(path, 'wb') as file: written += file.write(b'x' * (4 << 20))\n        except OSError: pass\n"
        "print(written, 'ESCAPED' if written > 40 << 20 else '')",
    ),
    _a(
        "memory that no mapping holds",
        "the list of calls",
        "import os\nkept = []\nfor n in range(30):\n    fd = os.memfd_create(str(n))\n"
        "    os.write(fd, b'x' * (4 << 20)); kept.append(fd)\nprint('ESCAPED')",
    ),
    _a(
        "shared memory that outlives its process",
        "the list of calls",
        CTYPES + "call(29, 194, 4711, 1 << 20, 0o1600); print('left')",
        CTYPES + "i = call(29, 194, 4711, 0, 0); call(31, 195, i, 0, 0); print('ESCAPED')",
    ),
    _a(
        "slots of asynchronous I/O, which all users share",
        "the list of calls",
        CTYPES + "slot = ctypes.c_ulong(0); call(206, 0, 64, ctypes.byref(slot)); print('ESCAPED')",
    ),
    _a(
        "a queue of messages that outlives its process",
        "the list of calls",
        CTYPES + "call(68, 186, 4712, 0o1600); print('left')",
        CTYPES + "i = call(68, 186, 4712, 0); call(71, 187, i, 0, 0); print('ESCAPED')",
    ),
    _a(
        "another way to do I/O unseen",
        "the list of calls",
        CTYPES + "call(425, 425, 1, ctypes.create_string_buffer(256)); print('ESCAPED')",
    ),
    _a(
        "a ring of keys", "the list of calls", CTYPES + "call(250, 219, 1, b'@UNIQUE@'); print('ESCAPED')"
    ),  # KEYCTL_JOIN_SESSION_KEYRING
    _a(
        "a queue by name",
        "the list of calls",
        CTYPES + "call(240, 180, b'@UNIQUE@', 0o102, 0o600, 0); call(241, 181, b'@UNIQUE@'); print('ESCAPED')",
    ),
    _a(
        "larger buffers of sockets",
        "options of sockets",
        "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 400_000); print('ESCAPED')",
    ),
    _a(
        "memory that is in sockets",
        "sockets are counted",
        # 20 processes with 28 pairs, every one filled: 200 MB and more, which no mapping shows.
        "import os, socket, time\nchildren = []\nfor _ in range(20):\n    child = os.fork()\n    if not child:\n"
        "        kept = [socket.socketpair() for _ in range(28)]\n        for pair in kept:\n            for end in pair:\n"
        "                end.setblocking(False)\n                try:\n                    while True: end.send(b'x' * 65536)\n"
        "                except BlockingIOError: pass\n        time.sleep(1.5); os._exit(0)\n    children.append(child)\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
    ),
    _a(
        "spin on a processor",
        "limit of processor time",
        "import time\nwhile time.process_time() < 1.4: pass\nprint('ESCAPED')",
    ),
    _a("sleep past the limit", "limit of time", "import time; time.sleep(@NAP@); print('ESCAPED')"),
    _a(
        "refuse to end",
        "limit of time",
        "import signal, time\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(@NAP@); print('ESCAPED')",
    ),
    _a("huge output", "limit of output", "import sys; sys.stdout.write('x' * (2 << 20) + 'ESCAPED')"),
    _a(
        "huge file",
        "limit of a file",
        "with open('@SCRATCH@/big', 'wb') as file: file.write(b'x' * (9 << 20)); print('ESCAPED')",
    ),
    _a(
        "huge file with a hole",
        "limit of a file",
        "import os; open('@SCRATCH@/b', 'w'); os.truncate('@SCRATCH@/b', 1 << 40); print('ESCAPED')",
    ),
    _a("many open files", "limit of open files", "kept = [open('/dev/null') for _ in range(100)]; print('ESCAPED')"),
    # --------------------------------------------------------------------------------------------- what it may become
    _a("become root", "a user namespace of its own", "import os; os.setresuid(0, 0, 0); print('ESCAPED')", root=True),
    _a(
        "gain by set-user-id programs",
        "no new privileges",
        CTYPES + "print('ESCAPED' if libc.prctl(39, 0, 0, 0, 0) == 0 else 'no new privileges')",
    ),
    _a(
        "keep a capability",
        "no capabilities",
        "fields = dict(l.split(':', 1) for l in open('/proc/self/status').read().splitlines())\n"
        "print('ESCAPED' if any(int(fields[c], 16) for c in ('CapEff', 'CapPrm', 'CapBnd', 'CapAmb')) else '')",
    ),
    _a(
        "change the root",
        "no capabilities, the list of calls",
        "import os; os.chroot('.'); print('ESCAPED')",
        root=True,
    ),
    _a(
        "mount",
        "the list of calls",
        CTYPES + "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')",
        root=True,
        outside=("unshare", "-m"),
    ),
    _a("a user namespace of its own", "the list of calls", CTYPES + "call(272, 97, 0x10000000); print('ESCAPED')"),
    _a(
        "a namespace by clone",
        "flags of clone",
        CTYPES + "child = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\nif child == 0: os._exit(0)\nprint('ESCAPED')",
    ),
    _a(
        "enter a namespace",
        "the list of calls",
        CTYPES + "call(308, 268, os.open('/proc/self/ns/net', 0), 0); print('ESCAPED')",
        root=True,
    ),
    _a(
        "make a device",
        "the list of calls",
        "import os; os.mknod('@SCRATCH@/d', 0o20600, os.makedev(1, 1)); print('ESCAPED')",
        root=True,
    ),
    _a(
        "open a device of the host",
        "a /dev of its own",
        "import os\nfor name in set(os.listdir('/dev')) - set('null zero full random urandom tty ptmx'.split()):\n"
        "    path = '/dev/' + name\n    try:\n        if not os.path.isdir(path) and not os.path.islink(path):\n"
        "            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)); print('ESCAPED')\n    except OSError: pass",
        root=True,
    ),
    # ------------------------------------------------------------------------------------------------- the kernel
    _a("kernel memory", "owner of the file", "open('/proc/kpagecount', 'rb').read(8); print('ESCAPED')", root=True),
    _a("kernel log", "the list of calls", CTYPES + "call(103, 116, 10, 0, 0); print('ESCAPED')", root=True),
    _a(
        "write a kernel setting",
        "owner of the file",
        "f = open('/proc/sys/vm/swappiness', 'r+'); f.write(f.read()); print('ESCAPED')",
        root=True,
    ),
    _a(
        "write to /sys",
        "no /sys",
        "import glob, os\nfor path in ['/sys/kernel/uevent_seqnum', *glob.glob('/sys/module/*/parameters/*')]:\n"
        "    try: os.close(os.open(path, os.O_WRONLY)); print('ESCAPED'); break\n    except OSError: pass",
        root=True,
    ),
    _a(
        "set the clock",
        "the list of calls",
        # A frequency set to what it is.
        CTYPES + "now = (ctypes.c_long * 32)(); call(159, 171, now); now[0] = 2; call(159, 171, now); print('ESCAPED')",
        root=True,
    ),
    _a(
        "rename the machine",
        "the list of calls",
        "import socket; socket.sethostname('x'); print('ESCAPED')",
        root=True,
        outside=("unshare", "-u"),
    ),
    _a(
        "leave a key for the next run",
        "the list of calls",
        CTYPES + "print(call(248, 217, b'user', b'@UNIQUE@', b'x', 1, -4))",
        CTYPES + "key = call(250, 219, 10, -4, b'user', b'@UNIQUE@', 0); call(250, 219, 21, key, 0); print('ESCAPED')",
    ),
    _a(
        "leave a file for the next run",
        "folders that go with the run",
        "for folder in ('/dev/shm', '/tmp', '.'):\n    open(f'{folder}/@UNIQUE@', 'w').write('ESCAPED')",
        "import os\nfor folder in ('/dev/shm', '/tmp', '.'):\n    path = f'{folder}/@UNIQUE@'\n"
        "    if os.path.exists(path): print(open(path).read()); os.remove(path)",
    ),
    _a(
        "load a program into the kernel",
        "the list of calls",
        CTYPES + "map = (ctypes.c_uint * 32)(2, 4, 4, 1); call(321, 280, 0, map, 64); print('ESCAPED')",
        root=True,
    ),
    _a(
        "an I/O ring",
        "the list of calls",
        CTYPES + "ring = (ctypes.c_uint * 30)(); call(425, 425, 4, ring); print('ESCAPED')",
    ),
    # ------------------------------------------------------------------------------------------------- more of the same
    _a(
        "connect to a server of the host over IPv6",
        "a network of its own",
        "import socket; socket.create_connection(('::1', @TCP6@), 2); print('ESCAPED')",
        kernel=True,
        together=True,
    ),
    _a(
        "see network devices of the host",
        "a network of its own",
        "print('ESCAPED' if len(open('/proc/net/dev').readlines()) > 3 else '')",
        kernel=True,
        together=True,
    ),
    _a("raw IPv6", "no capabilities", "socket.socket(10, 3, 58); print('ESCAPED')", root=True, together=True),
    _a(
        "every other family of sockets",
        "families of sockets",
        "for family in range(50):\n    for kind in (1, 2, 3, 5):\n        if family not in (1, 2, 10):\n"
        "            try: socket.socket(family, kind); print('ESCAPED')\n            except OSError: pass",
        together=True,
    ),
    _a(
        "pairs of sockets of every other family",
        "families of sockets",
        "for family in range(3, 50):\n    if family != 10:\n        try: socket.socketpair(family, 1, 0); print('ESCAPED')\n"
        "        except OSError as error:\n            if error.errno not in (1, 97): print('ESCAPED', error)",
        together=True,
    ),
    _a(
        "larger buffers of sockets by force",
        "options of sockets",
        "a, b = socket.socketpair()\na.setsockopt(1, 33, 400_000); print('ESCAPED')",
        root=True,
        together=True,
    ),
    _a(
        "descriptors of who started it",
        "a /proc of its own",
        "import glob, os\nfor path in glob.glob(f'/proc/{os.getppid()}/fd/*') + glob.glob('/proc/1/fd/*'):\n"
        "    try:\n        if '@FOLDER@/secret' == os.readlink(path): print(open(path).read())\n    except OSError: pass",
    ),
    _a(
        "hold a process of the host",
        "process ids of its own",
        "os.pidfd_open(@VICTIM@); print('ESCAPED')",
        together=True,
    ),
    _a(
        "queue a signal for a process of the host",
        "process ids of its own",
        CTYPES
        + "call(129, 138, @VICTIM@, 0, ctypes.create_string_buffer(b'\\0' * 8 + b'\\xff' * 4, 128)); print('ESCAPED')",
        together=True,
    ),
    _a(
        "the priority of a process of the host",
        "process ids of its own",
        "os.setpriority(os.PRIO_PROCESS, @VICTIM@, 3); print('ESCAPED')",
        together=True,
    ),
    _a(
        "the processors of a process of the host",
        "process ids of its own",
        "os.sched_setaffinity(@VICTIM@, os.sched_getaffinity(@VICTIM@)); print('ESCAPED')",
        together=True,
    ),
    _a(
        "the limits of a process of the host",
        "process ids of its own",
        "import resource; resource.prlimit(@VICTIM@, resource.RLIMIT_CORE); print('ESCAPED')",
        together=True,
    ),
    _a("a better priority", "no capabilities", "os.setpriority(0, 0, -5); print('ESCAPED')", root=True, together=True),
    _a(
        "the priority of real time",
        "limit of real-time priority",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('ESCAPED')",
        root=True,
        together=True,
    ),
    _a(
        "the first place at the disk",
        "no capabilities",
        CTYPES + "call(251, 30, 1, 0, 1 << 13); print('ESCAPED')",
        root=True,
        together=True,
    ),
    _a(
        "raise a limit",
        "hard limits",
        "import resource\nfor size in (1, 2): resource.setrlimit(resource.RLIMIT_CORE, (size, size))\nprint('ESCAPED')",
        root=True,
        kernel=True,
        together=True,
    ),
    _a(
        "dump core",
        "limit of core dumps",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\nexcept ValueError: pass\n"
        "child = os.fork()\nif not child: os.abort()\nprint('ESCAPED' if os.WCOREDUMP(os.waitpid(child, 0)[1]) else '')",
        root=True,
        kernel=True,
        together=True,
    ),
    _a(
        "lock memory",
        "limit of locked memory",
        CTYPES + "page = ctypes.create_string_buffer(4096)\nif libc.mlock(page, 4096) == 0: print('ESCAPED')",
        root=True,
        together=True,
    ),
    _a(
        "be spared when memory runs out",
        "no capabilities",
        "fd = os.open('/proc/self/oom_score_adj', os.O_WRONLY); os.write(fd, b'-500'); print('ESCAPED')",
        root=True,
        kernel=True,
        together=True,
    ),
    _a(
        "timers without end",
        "limit of pending signals",
        CTYPES
        + "timer = ctypes.c_int()\nfor _ in range(3000): call(222, 107, 1, 0, ctypes.byref(timer))\nprint('ESCAPED')",
        together=True,
    ),
    _a(
        "set-user-id bits that count",
        "mounts without them",
        "print('ESCAPED' if not os.statvfs('/usr').f_flag & os.ST_NOSUID else '')",
        together=True,
    ),
    _a(
        "devices that count",
        "mounts without them",
        "print('ESCAPED' if not os.statvfs('@SCRATCH@').f_flag & os.ST_NODEV else '')",
        together=True,
    ),
    _a(
        "a namespace of each kind",
        "the list of calls",
        CTYPES + f"for flag in {NAMESPACES}:\n    try: call(272, 97, flag); print('ESCAPED')\n"
        "    except OSError as error: print(error)",
        root=True,
        together=True,
    ),
    _a(
        "a namespace of each kind by clone",
        "flags of clone",
        CTYPES + f"for flag in {NAMESPACES}:\n    try:\n        child = call(56, 220, flag | 17, 0, 0, 0, 0)\n"
        "        if child == 0: os._exit(0)\n        print('ESCAPED')\n    except OSError as error: print(error)",
        root=True,
        together=True,
    ),
    _a(
        "a namespace by clone3",
        "the list of calls",
        CTYPES + "child = call(435, 435, (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17), 64)\n"
        "if child == 0: os._exit(0)\nprint('ESCAPED')",
        kernel=True,
        together=True,
    ),
    _a(
        "a call of the x32 ABI",
        "the filter kills",
        CTYPES + "call(0x40000000 | 39, 172); print('ESCAPED')",
        kernel=True,
        together=True,
    ),
    _a(
        "a call of 32 bits",
        "the filter kills",
        CTYPES + "import mmap\ncode = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid by its number there
        "run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "print('ESCAPED' if platform.machine() == 'x86_64' and run() == os.getpid() else '')",
        kernel=True,
        together=True,
    ),
    _a(
        "type into a terminal",
        "requests of ioctl",
        "import fcntl\n_, end = os.openpty()\nfcntl.ioctl(end, 0x5412, b'x'); print('ESCAPED')",
        **MAYBE,
    ),
    _a(
        "type into a terminal, the number in disguise",
        "requests of ioctl",
        CTYPES + "_, end = os.openpty()\ncall(16, 29, end, 0x700005412, b'x'); print('ESCAPED')",
        **MAYBE,
    ),
    _a(
        "addresses of the kernel",
        "the kernel hides them",
        "print('ESCAPED' if any(int(line.split()[0], 16) for line in open('/proc/kallsyms')) else '')",
        **MAYBE,
    ),
    _a(
        "fork bomb of sessions",
        "limit of processes",
        "import os, time\nmade = 0\nfor _ in range(60):\n    child = os.fork()\n    if not child:\n        os.setsid()\n"
        "        try:\n            if os.fork(): os._exit(0)\n        except OSError: os._exit(1)\n"
        "        time.sleep(4); os._exit(0)\n    made += os.waitpid(child, 0)[1] == 0\nprint('ESCAPED' if made >= 60 else made)",
    ),
    _a(
        "huge output of many processes",
        "limit of output",
        "import os\nchildren = []\nfor _ in range(5):\n    child = os.fork()\n    if not child:\n"
        "        os.write(1, b'x' * 100_000); os._exit(0)\n    children.append(child)\n"
        "for child in children: os.waitpid(child, 0)\nprint('ESCAPED')",
    ),
    _a(
        "memory that is shared and in no process",
        "kinds of mappings",
        "import mmap, os, time\nchildren = []\nfor _ in range(6):\n    child = os.fork()\n    if not child:\n        kept = []\n"
        "        for _ in range(9):\n            area = mmap.mmap(-1, 10 << 20); area[:] = b'x' * len(area)\n"
        "            area.madvise(mmap.MADV_DONTNEED); kept.append(area)\n        time.sleep(0.7); os._exit(0)\n"
        "    children.append(child)\nif not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
    ),
    _a(
        "huge pages of the host",
        "kinds of mappings",
        "import mmap\ntry: mmap.mmap(-1, 2 << 20, 0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); print('ESCAPED')\n"
        "except OSError as error: print('' if error.errno == 1 else 'ESCAPED')",  # none is left there: the kernel was asked
        together=True,
    ),
    _a(
        "memory of many small files",
        "inodes are counted",
        "import os, time\nchildren = []\nfor each in range(8):\n    child = os.fork()\n    if not child:\n"
        "        folder = '@SCRATCH@' if each % 2 else '/tmp'\n"
        "        for n in range(50_000): os.symlink('x' * 100, f'{folder}/@UNIQUE@{each}-{n}')\n"
        "        time.sleep(0.5); os._exit(0)\n    children.append(child)\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
        outside=None,  # 400,000 files
    ),
    *(
        _a(
            f"{'write to' if flag == 'O_WRONLY' else 'read'} {path}",
            "owners of files, no /sys, a /dev of its own",
            f"os.close(os.open({path!r}, os.{flag} | os.O_NONBLOCK)); print('ESCAPED')",
            **MAYBE,
        )
        for path, flag in KERNEL_FILES.items()
    ),
    # --------------------------------------------------------------------- by number: does the kernel see the call at all?
    *(
        _a(
            f"the call {name}",
            "the list of calls",
            CTYPES + REACH + f"reach({x86_64}, {aarch64}, {arguments})",
            **MAYBE,
        )
        for name, (x86_64, aarch64, arguments) in CALLS.items()
    ),
]

# What a turn may leave where its results are looked for: what stops it, and a program that leaves it (``result``, ``given``).
RESULTS = {
    "a symbolic link to a file of the host": (
        "links are left out; a root of its own",
        "import os; os.remove('result'); os.symlink('@FOLDER@/secret', 'result')",
    ),
    "a folder that is a link to one of the host": (
        "links are not followed",
        "import os; os.symlink('@FOLDER@', 'folder'); os.symlink('/proc/1/root', 'root')",
    ),
    "a hard link to a file of the host": (
        "a root of its own",
        "import os\nfor path in ('@FOLDER@/secret', '/etc/passwd', '/usr/bin/env'):\n"
        "    try: os.link(path, 'escaped')\n    except OSError: pass",
    ),
    "a FIFO, on which a reader would wait for ever": (
        "no device and no FIFO can be made",
        "import os\ntry: os.remove('result'); os.mkfifo('result')\nexcept OSError: pass",
    ),
    "a file in place of a protected one": (
        "mounted read-only, placed again",
        "import os\ntry: os.replace('result', 'given')\nexcept OSError: open('x', 'w')",
    ),
    "a list of files of its own making": (
        "names and contents are checked",
        "import base64, json, os, sys\nwords = open('/proc/1/cmdline').read().split('\\0')\n"
        "word = next((word for word in words if word.startswith('files-')), 'files-x:')\n"
        "data = base64.b64encode(b'ESCAPED').decode()\n"
        "print('\\n' + word + json.dumps({'code': 0, 'files': {'../escaped': data, 'given': data, '/etc/x': data}}))\n"
        "sys.stdout.flush(); os.kill(os.getppid(), 9)",
    ),
    "a file that is larger than the disk": (
        "limit of a file; sizes are added up before reading",
        "import os; os.truncate('result', 8 << 20)",
    ),
    "what it was given as input, changed": (
        "the input is sealed",
        "import os\nfd = os.open('/proc/self/fd/0', os.O_RDWR); os.pwrite(fd, b'ESCAPED', 0)",
    ),
}

PAGE = Path(__file__).parents[2] / "docs" / "sandbox_probes.md"
_HEAD = """\
# Sandbox probes

Programs that try to get out of the sandbox, to reach what is not theirs, or to use more than they may, and what stops
each (`tests/sandbox/test_escapes.py`, part of `make test`). The table is `tests/support/escape_attempts.py`, and
`python -m tests.support.escape_attempts` writes this page. Each runs twice inside, with cgroups and without; where a
process may not make cgroups, the first is skipped with that reason. Each also runs outside of the sandbox, where it
must succeed, so that none is stopped by being wrong; but for those that take root there, those that would do harm, and
what a machine does not have.

What stops it is the first of the walls that it meets; most would meet another one behind it.

"""


def written() -> str:
    """The page."""
    rows = [f"| {attempt.name} | {attempt.stopped} |" for attempt in ATTEMPTS]
    left = [f"| {name} | {stopped} |" for name, (stopped, _) in RESULTS.items()]
    return (
        _HEAD
        + f"## Attempts: {len(ATTEMPTS)}\n\n| it tries | stopped by |\n| --- | --- |\n"
        + "\n".join(rows)
        + "\n\n## What it leaves in its folder\n\n| it leaves | stopped by |\n| --- | --- |\n"
        + "\n".join(left)
        + _TAIL
    )


_TAIL = """

## What is bounded, and not counted

Without cgroups the memory of a run is watched from outside, every 50 ms: what is resident, the buffers of sockets, a
kibibyte for each file. Not counted are, of each process, the kernel's own records of its mappings (at most 65,530,
some 13 MB), its stack in the kernel, and what its pipes hold (64 MB of all processes of a user together). Where the
machine has swap, what was swapped out is not resident. With cgroups the kernel counts all of these.
"""


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
