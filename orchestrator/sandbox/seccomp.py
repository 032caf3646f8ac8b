"""The system-call filter of the sandbox: a classic BPF program, built here, loaded by bubblewrap (``--seccomp FD``).

Guarantees: an allow list: any other call is refused, with EPERM, or ENOSYS where it is newer than the list, so that programs do
without. Sockets are of the families UNIX, IPv4 and IPv6 (which end at the sandbox's own loopback), above all not VSOCK, which no
namespace confines; their buffers cannot be made larger than the machine's default, which is what a sandbox is charged for each.
No memory is held that nobody sees from outside: shared mappings have a file behind them (one without may be resident in no
process), pages are not given to pipes, the host's huge pages are not had, and changes of files, which the kernel would queue,
are told to nobody.
A call through another ABI of the same processor (32-bit, x32) kills the process. It is a second wall behind the
namespaces, the dropped capabilities and the limits: where the processor is none of :data:`ARCHITECTURES`, the sandbox
works without it.
"""

from __future__ import annotations

import functools
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h: AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64

# What programs need, with its numbers on x86_64 and on aarch64 (asm/unistd_64.h, asm-generic/unistd.h); an empty one: there is no
# such call. What is in neither list is refused, above all: tracing, mounting, namespaces, keyrings, BPF, io_uring and other
# asynchronous I/O (whose slots all users of the machine share), message queues, inotify, vmsplice, System V
# memory, memfd, clocks, modules.
_ALLOWED = """
read:0:63 write:1:64 open:2: close:3:57 stat:4: fstat:5:80 lstat:6: poll:7: lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 ioctl:16:29 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21: pipe:22: select:23: sched_yield:24:124 mremap:25:216 msync:26:227
mincore:27:232 madvise:28:233 dup:32:23 dup2:33: pause:34: nanosleep:35:101 getitimer:36:102 alarm:37:
setitimer:38:103 getpid:39:172 sendfile:40:71 socket:41:198 connect:42:203 accept:43:202 sendto:44:206 recvfrom:45:207
sendmsg:46:211 recvmsg:47:212 shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205
socketpair:53:199 setsockopt:54:208 getsockopt:55:209 clone:56:220 fork:57: vfork:58: execve:59:221 exit:60:93
wait4:61:260 kill:62:129 uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45
ftruncate:77:46 getdents:78: getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82: mkdir:83: rmdir:84: creat:85: link:86:
unlink:87: symlink:88: readlink:89: chmod:90: fchmod:91:52 chown:92: fchown:93:55 lchown:94: umask:95:166
gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176
setuid:105:146 setgid:106:144 geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173 getpgrp:111:
setsid:112:157 setreuid:113:145 setregid:114:143 getgroups:115:158 setgroups:116:159 setresuid:117:147
getresuid:118:148 setresgid:119:149 getresgid:120:150 getpgid:121:155 setfsuid:122:151 setfsgid:123:152 getsid:124:156
capget:125:90 capset:126:91 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138
rt_sigsuspend:130:133 sigaltstack:131:132 utime:132: statfs:137:43 fstatfs:138:44 getpriority:140:141
setpriority:141:140 sched_setparam:142:118 sched_getparam:143:121 sched_setscheduler:144:119
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_rr_get_interval:148:127
mlock:149:228 munlock:150:229 mlockall:151:230 munlockall:152:231 prctl:157:167 arch_prctl:158: setrlimit:160:164
sync:162:81 gettid:186:178 readahead:187:213 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8
lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 removexattr:197:14
lremovexattr:198:15 fremovexattr:199:16 tkill:200:130 time:201: futex:202:98 sched_setaffinity:203:122
sched_getaffinity:204:123 epoll_create:213: getdents64:217:61 set_tid_address:218:96 restart_syscall:219:128
fadvise64:221:223 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94
epoll_wait:232: epoll_ctl:233:21 tgkill:234:131 utimes:235: waitid:247:95 ioprio_set:251:30 ioprio_get:252:31
openat:257:56 mkdirat:258:34 fchownat:260:54 futimesat:261: newfstatat:262:79 unlinkat:263:35 renameat:264:38
linkat:265:37 symlinkat:266:36 readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73
set_robust_list:273:99 get_robust_list:274:100 splice:275:76 tee:276:77 sync_file_range:277:84 utimensat:280:88
epoll_pwait:281:22 signalfd:282: timerfd_create:283:85 eventfd:284: fallocate:285:47 timerfd_settime:286:86
timerfd_gettime:287:87 accept4:288:242 signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59
preadv:295:69 pwritev:296:70 rt_tgsigqueueinfo:297:240 recvmmsg:299:243 prlimit64:302:261 syncfs:306:267
sendmmsg:307:269 getcpu:309:168 sched_setattr:314:274 sched_getattr:315:275 renameat2:316:276 seccomp:317:277
getrandom:318:278 execveat:322:281 membarrier:324:283 mlock2:325:284 copy_file_range:326:285 preadv2:327:286
pwritev2:328:287 pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290 statx:332:291 rseq:334:293
pidfd_send_signal:424:424 pidfd_open:434:434 close_range:436:436 openat2:437:437 faccessat2:439:439
epoll_pwait2:441:441 landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
futex_waitv:449:449
"""
_KNOWN = 450  # the newest call that was looked at (set_mempolicy_home_node, on both)
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL, _SETSOCKOPT = (
    (56, 220),
    (435, 435),
    (41, 198),
    (53, 199),
    (16, 29),
    (54, 208),
)
_MMAP, _MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = (9, 222), 0x01, 0x20, 0x40000  # asm-generic/mman-common.h
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}; linux/sched.h
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_INJECTING = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into a terminal
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and what forces them; asm-generic/socket.h
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
    # The C library falls back to clone, whose flags can be looked at.
    code += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    code += _if_call(_CLONE[column], 0, [_step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _step(_RETURN, _ERRNO | _EPERM)])
    families = [_step(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
    for call in (_SOCKET, _SOCKETPAIR):
        code += _if_call(call[column], 0, [*families, _step(_RETURN, _ERRNO | _EAFNOSUPPORT)])
    refused = _step(_RETURN, _ERRNO | _EPERM)
    shared = [_step(_ANY_BIT, _MAP_SHARED, 0, 2), _step(_ANY_BIT, _MAP_ANONYMOUS, 0, 1), refused]
    code += _if_call(_MMAP[column], 3, [_step(_ANY_BIT, _MAP_HUGETLB, 0, 1), refused, *shared])
    requests = [step for r in _INJECTING for step in (_step(_EQUAL, r, 0, 1), _step(_RETURN, _ERRNO | _EPERM))]
    code += _if_call(_IOCTL[column], 1, requests)
    sizes = [step for o in _BUFFER_SIZES for step in (_step(_EQUAL, o, 0, 1), _step(_RETURN, _ERRNO | _EPERM))]
    of_sockets = [_step(_EQUAL, _SOL_SOCKET, 0, 1 + len(sizes)), _step(_LOAD, _ARGUMENT + 8 * 2), *sizes]
    code += _if_call(_SETSOCKOPT[column], 1, of_sockets)
    for first, last in _ranges(column):
        code += [_step(_AT_LEAST, last + 1, 3, 0), _step(_AT_LEAST, first, 0, 1)]
        code += [_step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | _EPERM)]
    code += [_step(_AT_LEAST, _KNOWN + 1, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS), _step(_RETURN, _ERRNO | _EPERM)]
    return b"".join(code)


def _ranges(column: int) -> list[tuple[int, int]]:
    """Of allowed numbers, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(int(text) for word in _ALLOWED.split() if (text := word.split(":")[1 + column])):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the jumps are numbers of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _if_call(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """``then`` sees the low half of that argument of that call; what falls out of its end is allowed."""
    inside = [_step(_LOAD, _ARGUMENT + 8 * argument), *then, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inside)), *inside]
