"""Programs that try to get out of a sandbox. Each prints ESCAPED when it got what it wanted.

``@NAME@`` in a source stands for something of the host that the test made: see ``Host`` in ``test_escapes.py``. Every
attempt is also run outside, where it must succeed: so none is stopped by being wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Attempt:
    """``sources`` run one after the other, each in a sandbox of its own; the last may find what the first left."""

    name: str
    sources: tuple[str, ...]
    root: bool = False  # outside, it takes root
    outside: tuple[str, ...] = ()  # put before the command outside, so that it does no harm there


def _a(name: str, *sources: str, root: bool = False, outside: tuple[str, ...] = ()) -> Attempt:
    return Attempt(name, sources, root, outside)


ATTEMPTS = [
    # ------------------------------------------------------------------------------------------------------ network
    _a(
        "connect to a server of the host",
        "import socket; socket.create_connection(('127.0.0.1', @TCP@), 2); print('ESCAPED')",
    ),
    _a(
        "ask a name server of the host",
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n"
        "s.sendto(b'?', ('127.0.0.1', @UDP@)); print(s.recv(99).decode())",
    ),
    _a("abstract socket of the host", "import socket; socket.socket(1).connect('\\0@ABSTRACT@'); print('ESCAPED')"),
    _a("socket file of the host", "import socket; socket.socket(1).connect('@FOLDER@/s'); print('ESCAPED')"),
    _a("raw packets", "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')", root=True),
    _a("raw IP", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('ESCAPED')", root=True),
    _a(
        "socket families that no namespace confines",
        "import socket\nfor family in (16, 38, 40):\n"  # NETLINK, ALG, VSOCK
        "    try: socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM); print('ESCAPED')\n"
        "    except OSError as error: print(error)",
    ),
    # -------------------------------------------------------------------------------------------- files of the host
    _a("read the password hashes", "open('/etc/shadow').read(); print('ESCAPED')", root=True),
    _a("look into home", "import os; os.listdir('@HOME@'); print('ESCAPED')"),
    _a("read the repository", "open('@REPOSITORY@/pyproject.toml').read(); print('ESCAPED')"),
    _a("read a file of the host", "print(open('@FOLDER@/secret').read())"),
    _a(
        "a symbolic link out",
        "import os\nos.symlink('@FOLDER@/secret', 'link')\nprint(open('link').read())",
    ),
    _a(
        "out through /proc",
        "import os\nfor pid in ('self', '1', str(os.getppid())):\n    for way in ('root', 'cwd/../../../../../..'):\n"
        "        try: print(open(f'/proc/{pid}/{way}@FOLDER@/secret').read())\n"
        "        except OSError as error: print(error)",
    ),
    _a("a hard link", "import os; os.link('@FOLDER@/secret', '@FOLDER@/second'); print('ESCAPED')"),
    _a(
        "files by handle",
        CTYPES + "handle = (ctypes.c_uint * 40)(128); mount = ctypes.c_int()\n"
        "call(303, 264, -100, b'/usr', handle, ctypes.byref(mount), 0); print('ESCAPED')",
    ),
    _a("write into the root", "open('/@UNIQUE@', 'w'); print('ESCAPED')", root=True),
    _a("change a program of the host", "open('/usr/bin/yes', 'r+b'); print('ESCAPED')", root=True),
    _a(
        "change a file that was given read-only",
        "import os\nfor way in (lambda: open('given', 'a').write('x'), lambda: os.remove('given'),\n"
        "            lambda: os.rename('given', 'other'), lambda: os.truncate('given', 0)):\n"
        "    try: way(); print('ESCAPED')\n    except OSError as error: print(error)",
    ),
    # ---------------------------------------------------------------------------------- secrets of who started it
    _a(
        "read the environment of who started it",
        "import os\nfor name in ['self', '1', str(os.getppid())]:\n"
        "    try: text = open(f'/proc/{name}/environ').read()\n    except OSError: text = ''\n"
        "    if 'SECRET' in text: print('ESCAPED')",
    ),
    _a(
        "read inherited descriptors",
        "import os\nfor fd in range(3, 256):\n    try: print(os.pread(fd, 99, 0).decode())\n    except OSError: pass",
    ),
    # ---------------------------------------------------------------------------------------- processes of the host
    _a("see processes of the host", "print('ESCAPED' if 'sleep' in open('/proc/@VICTIM@/cmdline').read() else '')"),
    _a("signal a process of the host", "import os; os.kill(@VICTIM@, 18); print('ESCAPED')"),
    _a(
        "kill the parent",
        "import os, time\nparent = os.getppid()\nos.kill(parent, 9)\ntime.sleep(0.2)\n"
        "print('ESCAPED' if os.getppid() != parent else 'still there')",
        outside=("sh", "-c", '"$@" & wait', "sh"),
    ),
    _a(
        "trace a process",
        CTYPES + "import time\nchild = os.fork()\nif not child: time.sleep(5); os._exit(0)\n"
        "try: call(101, 117, 16, child, 0, 0); print('ESCAPED')\nfinally: os.kill(child, 9)",
    ),
    _a(
        "read another process's memory",
        CTYPES + "text = ctypes.create_string_buffer(b'ESCAPED'); into = ctypes.create_string_buffer(8)\n"
        "here = (ctypes.c_size_t * 2)(ctypes.addressof(into), 7); there = (ctypes.c_size_t * 2)(ctypes.addressof(text), 7)\n"
        "call(310, 270, os.getpid(), here, 1, there, 1, 0); print(into.value.decode())",
    ),
    _a(
        "outlive the run as a daemon",
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 3)\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '@UNIQUE@'])\n"
        "    os._exit(0)\nimport time; time.sleep(0.3)",
    ),
    # ------------------------------------------------------------------------------------------------------- limits
    _a(
        "fork bomb",
        "import os, time, signal\nchildren = []\ntry:\n    while len(children) < 100:\n        child = os.fork()\n"
        "        if not child: time.sleep(9); os._exit(0)\n        children.append(child)\n    print('ESCAPED')\n"
        "finally:\n    for child in children: os.kill(child, signal.SIGKILL)",
    ),
    _a(
        "thread bomb",
        "import threading\nhold = threading.Event()\nthreading.stack_size(1 << 16)\ntry:\n    for _ in range(100):\n"
        "        threading.Thread(target=hold.wait).start()\n    print('ESCAPED')\nfinally: hold.set()",
    ),
    _a("memory bomb", "block = b'x' * (300 << 20); print('ESCAPED')"),
    _a(
        "memory bomb of many processes",
        "import os, time\nchildren = []\nfor _ in range(6):\n    child = os.fork()\n    if not child:\n"
        "        block = b'x' * (90 << 20); time.sleep(0.7); os._exit(0)\n    children.append(child)\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
    ),
    _a(
        "memory bomb of files",
        "import os\nwritten = 0\nfor folder in ('/tmp', '/dev/shm', '/dev', '/run', '/', os.getcwd(), '/var/tmp'):\n"
        "    for n in range(6):\n        path = f'{folder}/@UNIQUE@{n}'\n        try:\n"
        "            with open(path, 'wb') as file: written += file.write(b'x' * (4 << 20))\n        except OSError: pass\n"
        "print(written, 'ESCAPED' if written > 40 << 20 else '')",
    ),
    _a(
        "memory that no mapping holds",
        "import os\nkept = []\nfor n in range(30):\n    fd = os.memfd_create(str(n))\n"
        "    os.write(fd, b'x' * (4 << 20)); kept.append(fd)\nprint('ESCAPED')",
    ),
    _a(
        "shared memory that outlives its process",
        CTYPES + "call(29, 194, 4711, 1 << 20, 0o1600); print('left')",
        CTYPES + "i = call(29, 194, 4711, 0, 0); call(31, 195, i, 0, 0); print('ESCAPED')",
    ),
    _a(
        "slots of asynchronous I/O, which all users share",
        CTYPES + "slot = ctypes.c_ulong(0); call(206, 0, 64, ctypes.byref(slot)); print('ESCAPED')",
    ),
    _a(
        "a queue of messages that outlives its process",
        CTYPES + "call(68, 186, 4712, 0o1600); print('left')",
        CTYPES + "i = call(68, 186, 4712, 0); call(71, 187, i, 0, 0); print('ESCAPED')",
    ),
    _a(
        "another way to do I/O unseen", CTYPES + "call(425, 425, 1, ctypes.create_string_buffer(256)); print('ESCAPED')"
    ),
    _a("a ring of keys", CTYPES + "call(250, 219, 1, b'@UNIQUE@'); print('ESCAPED')"),  # KEYCTL_JOIN_SESSION_KEYRING
    _a(
        "a queue by name",
        CTYPES + "call(240, 180, b'@UNIQUE@', 0o102, 0o600, 0); call(241, 181, b'@UNIQUE@'); print('ESCAPED')",
    ),
    _a(
        "larger buffers of sockets",
        "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 400_000); print('ESCAPED')",
    ),
    _a(
        "memory that is in sockets",
        # 20 processes with 28 pairs, every one filled: 200 MB and more, which no mapping shows.
        "import os, socket, time\nchildren = []\nfor _ in range(20):\n    child = os.fork()\n    if not child:\n"
        "        kept = [socket.socketpair() for _ in range(28)]\n        for pair in kept:\n            for end in pair:\n"
        "                end.setblocking(False)\n                try:\n                    while True: end.send(b'x' * 65536)\n"
        "                except BlockingIOError: pass\n        time.sleep(1.5); os._exit(0)\n    children.append(child)\n"
        "if not any(os.waitpid(child, 0)[1] for child in children): print('ESCAPED')",
    ),
    _a(
        "spin on a processor",
        "import time\nwhile time.process_time() < 1.4: pass\nprint('ESCAPED')",
    ),
    _a("sleep past the limit", "import time; time.sleep(2.5); print('ESCAPED')"),
    _a(
        "refuse to end",
        "import signal, time\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(2.5); print('ESCAPED')",
    ),
    _a("huge output", "import sys; sys.stdout.write('x' * (2 << 20) + 'ESCAPED')"),
    _a("huge file", "with open('@SCRATCH@/big', 'wb') as file: file.write(b'x' * (9 << 20)); print('ESCAPED')"),
    _a(
        "huge file with a hole",
        "import os; open('@SCRATCH@/b', 'w'); os.truncate('@SCRATCH@/b', 1 << 40); print('ESCAPED')",
    ),
    _a("many open files", "kept = [open('/dev/null') for _ in range(100)]; print('ESCAPED')"),
    # --------------------------------------------------------------------------------------------- what it may become
    _a("become root", "import os; os.setresuid(0, 0, 0); print('ESCAPED')", root=True),
    _a(
        "gain by set-user-id programs",
        CTYPES + "print('ESCAPED' if libc.prctl(39, 0, 0, 0, 0) == 0 else 'no new privileges')",
    ),
    _a(
        "keep a capability",
        "fields = dict(l.split(':', 1) for l in open('/proc/self/status').read().splitlines())\n"
        "print('ESCAPED' if any(int(fields[c], 16) for c in ('CapEff', 'CapPrm', 'CapBnd', 'CapAmb')) else '')",
    ),
    _a("change the root", "import os; os.chroot('.'); print('ESCAPED')", root=True),
    _a(
        "mount",
        CTYPES + "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')",
        root=True,
        outside=("unshare", "-m"),
    ),
    _a("a user namespace of its own", CTYPES + "call(272, 97, 0x10000000); print('ESCAPED')"),
    _a(
        "a namespace by clone",
        CTYPES + "child = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\nif child == 0: os._exit(0)\nprint('ESCAPED')",
    ),
    _a(
        "enter a namespace",
        CTYPES + "call(308, 268, os.open('/proc/self/ns/net', 0), 0); print('ESCAPED')",
        root=True,
    ),
    _a("make a device", "import os; os.mknod('@SCRATCH@/d', 0o20600, os.makedev(1, 1)); print('ESCAPED')", root=True),
    _a(
        "open a device of the host",
        "import os\nfor name in set(os.listdir('/dev')) - set('null zero full random urandom tty ptmx'.split()):\n"
        "    path = '/dev/' + name\n    try:\n        if not os.path.isdir(path) and not os.path.islink(path):\n"
        "            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)); print('ESCAPED')\n    except OSError: pass",
        root=True,
    ),
    # ------------------------------------------------------------------------------------------------- the kernel
    _a("kernel memory", "open('/proc/kpagecount', 'rb').read(8); print('ESCAPED')", root=True),
    _a("kernel log", CTYPES + "call(103, 116, 10, 0, 0); print('ESCAPED')", root=True),
    _a(
        "write a kernel setting",
        "f = open('/proc/sys/vm/swappiness', 'r+'); f.write(f.read()); print('ESCAPED')",
        root=True,
    ),
    _a(
        "write to /sys",
        "import glob, os\nfor path in ['/sys/kernel/uevent_seqnum', *glob.glob('/sys/module/*/parameters/*')]:\n"
        "    try: os.close(os.open(path, os.O_WRONLY)); print('ESCAPED'); break\n    except OSError: pass",
        root=True,
    ),
    _a(
        "set the clock",
        # A frequency set to what it is.
        CTYPES + "now = (ctypes.c_long * 32)(); call(159, 171, now); now[0] = 2; call(159, 171, now); print('ESCAPED')",
        root=True,
    ),
    _a(
        "rename the machine",
        "import socket; socket.sethostname('x'); print('ESCAPED')",
        root=True,
        outside=("unshare", "-u"),
    ),
    _a(
        "leave a key for the next run",
        CTYPES + "print(call(248, 217, b'user', b'@UNIQUE@', b'x', 1, -4))",
        CTYPES + "key = call(250, 219, 10, -4, b'user', b'@UNIQUE@', 0); call(250, 219, 21, key, 0); print('ESCAPED')",
    ),
    _a(
        "leave a file for the next run",
        "for folder in ('/dev/shm', '/tmp', '.'):\n    open(f'{folder}/@UNIQUE@', 'w').write('ESCAPED')",
        "import os\nfor folder in ('/dev/shm', '/tmp', '.'):\n    path = f'{folder}/@UNIQUE@'\n"
        "    if os.path.exists(path): print(open(path).read()); os.remove(path)",
    ),
    _a(
        "load a program into the kernel",
        CTYPES + "map = (ctypes.c_uint * 32)(2, 4, 4, 1); call(321, 280, 0, map, 64); print('ESCAPED')",
        root=True,
    ),
    _a(
        "an I/O ring",
        CTYPES + "ring = (ctypes.c_uint * 30)(); call(425, 425, 4, ring); print('ESCAPED')",
    ),
]
