"""System calls of the sandbox: seccomp, Landlock, namespaces, mounts, capabilities.

Calls through ctypes, each raising OSError, and the list of the system calls that a program may
make. Needs no package: a BPF filter is a few hundred 8-byte instructions, so a binding to
libseccomp would only add a dependency. Tables for x86_64 and aarch64; another machine has no filter
and is refused.

The filter is an allow-list: a system call that it does not name fails with EPERM, new ones
included. It leaves one process that may read, write, map memory and start threads. Never: fork,
exec, sockets (but a connected pair, which asyncio needs), ptrace, reading another process, mount,
namespaces, bpf, keyctl, userfaultfd, io_uring, memfd, shared memory, signals, limits or clocks of
other processes, links, chmod, chown, mkdir.
"""

import ctypes
import errno
import functools
import os
import platform
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER = 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = {
    os.ST_NOSUID: MS_NOSUID,
    os.ST_NODEV: MS_NODEV,
    os.ST_NOEXEC: MS_NOEXEC,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 1 << 21,
}


def _table(text: str) -> dict[str, tuple[int, int]]:
    rows = (row.split() for row in text.split(","))
    return {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in rows}


# Name, number on x86_64, number on aarch64; -1 = does not exist there. Without conditions on
# their arguments.
_ALLOWED = _table("""
    read 0 63, write 1 64, close 3 57, fstat 5 80, poll 7 -1, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, pipe 22 -1,
    select 23 -1, sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23, dup2 33 -1,
    pause 34 -1, nanosleep 35 101, getitimer 36 102, alarm 37 -1, setitimer 38 103,
    getpid 39 172, sendto 44 206, recvfrom 45 207, shutdown 48 210, exit 60 93, wait4 61 260,
    uname 63 160, flock 73 32, fsync 74 82, fdatasync 75 83, umask 95 166, gettimeofday 96 169,
    getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
    getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -1,
    getgroups 115 158, getresuid 118 148, getresgid 120 150, rt_sigpending 127 136,
    rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, gettid 186 178,
    time 201 -1, futex 202 98, epoll_create 213 -1, set_tid_address 218 96,
    restart_syscall 219 128, fadvise64 221 223, exit_group 231 94, epoll_wait 232 -1,
    epoll_ctl 233 21, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, epoll_pwait 281 22,
    eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59, getcpu 309 168,
    getrandom 318 278, membarrier 324 283, rseq 334 293, close_range 436 436, arch_prctl 158 -1
""")
# The same, where Landlock or a root of its own says which files there are.
_PATHS = _table("""
    stat 4 -1, lstat 6 -1, access 21 -1, readlink 89 -1, readlinkat 267 78, newfstatat 262 79,
    faccessat 269 48, statx 332 291, faccessat2 439 439, chdir 80 49, fchdir 81 50,
    getcwd 79 17, ftruncate 77 46, getdents 78 -1, getdents64 217 61
""")
# name: numbers, index of the flags. What they open can be seen by its name, without O_TMPFILE.
_OPEN = {"open": ((2, -1), 1), "openat": ((257, 56), 2)}
# And where the files are counted by their file system: a file that is open, or mapped, and has lost
# its name takes space that nobody sees.
_REMOVING = _table("""
    rename 82 -1, renameat 264 38, renameat2 316 276, unlink 87 -1, unlinkat 263 35
""")
_CLONE3, _CLONE = (435, 435), (56, 220)
# name: numbers, index of the argument, allowed low words of it ("self" = the process's own id)
_ONLY = {
    "kill": ((62, 129), 0, ("self",)),
    "tgkill": ((234, 131), 0, ("self",)),
    "prlimit64": ((302, 261), 0, (0, "self")),
    # Its own id alone: for another process the answer would say whether there is one.
    "getpgid": ((121, 155), 0, (0, "self")),
    "getsid": ((124, 156), 0, (0, "self")),
    "sched_getaffinity": ((204, 123), 0, (0, "self")),
    "get_robust_list": ((274, 100), 0, (0, "self")),
    # FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TCGETS, TIOCGWINSZ: not TIOCSTI, not FIOSETOWN
    "ioctl": ((16, 29), 1, (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x5413)),
    # F_DUPFD to F_GETLK, F_DUPFD_CLOEXEC, pipe sizes, seals: not F_SETOWN, which sends signals
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
}
# The clocks of the system, whose numbers are small: a negative one is the clock of some process.
_CLOCKS = {"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)}
_SOCKETPAIR = (53, 199)
_TMPFILE = 0x400000  # a flag of open
_OWN_ID = 0x5A5AA5A5  # no process has this id, and no instruction these bytes
_THREAD_FLAGS = 0x00010100  # CLONE_THREAD | CLONE_VM
_NEW_FLAGS = 0x7E020000  # CLONE_NEW*
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06


def _checked(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def prctl(option: int, *values: int) -> int:
    """Calls prctl(2)."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _checked(_LIBC.prctl(option, *padded), f"prctl({option})")


def unshare(flags: int) -> None:
    """Calls unshare(2)."""
    _checked(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Calls mount(2)."""
    texts = [text.encode() for text in (source, target, kind)]
    result = _LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode())
    _checked(result, f"mount {kind or source} at {target}")


def bind_read_only(source: str, target: str) -> None:
    """Mounts `source` at `target`, read-only, with the flags that its own mount may not lose."""
    mount(source, target, "", MS_BIND | MS_REC)
    old_flags = os.statvfs(target).f_flag
    kept_flags = sum(flag for bit, flag in _KEPT_FLAGS.items() if old_flags & bit)
    mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept_flags)


def change_root(folder: str) -> None:
    """Makes `folder`, a mount point, the root; nothing of the old root stays reachable."""
    number = _numbers((155, 41))
    os.chdir(folder)
    _checked(_LIBC.syscall(number, b".", b"."), "pivot_root")
    _checked(_LIBC.umount2(b".", 2), "umount of the old root")  # 2 = MNT_DETACH
    os.chdir("/")


def drop_capabilities() -> None:
    """Drops all capabilities, also those that exec could give."""
    for capability in range(64):
        if _LIBC.prctl(24, ctypes.c_ulong(capability), 0, 0, 0) < 0:  # PR_CAPBSET_DROP
            break  # past the last one, or no right to: then there is none to drop either
    _LIBC.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = struct.pack("=Ii", 0x20080522, 0)
    _checked(_LIBC.capset(header, bytes(24)), "capset")
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS


def _numbers(pair: tuple[int, int]) -> int:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    return pair[_MACHINES[machine][0]]


@functools.cache
def filter_template(files: str) -> bytes:
    """The BPF program, with a mark where the id of the process belongs: a zygote makes it once.
    Raises OSError for a machine without a table of system calls.

    `files`: "none", no path can be used; "shared", files lie among those of the host; "private", in
    a file system of the program's own, which bounds them.
    """
    allow, refuse = _step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _step(_LOAD, 4),
        _step(_JUMP_EQUAL, _MACHINES[platform.machine()][1], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, 0),
        _step(_JUMP_ABOVE, 0x40000000, 0, 1),  # the x32 numbers of x86_64
        _step(_RETURN, _KILL),
    ]
    unconditional = [*_ALLOWED.values(), *(_PATHS.values() if files != "none" else ())]
    if files == "private":
        unconditional += [*_REMOVING.values(), *(pair for pair, _ in _OPEN.values())]
    for pair in unconditional:
        program += _case(pair, allow)
    for pair, index in _OPEN.values() if files == "shared" else ():
        masked = [_argument(index), _step(_AND, _TMPFILE)]
        program += _case(pair, *masked, _step(_JUMP_EQUAL, 0, 0, 1), allow, refuse)
    for pair in _CLOCKS.values():
        program += _case(pair, _argument(0), _step(_JUMP_ABOVE, 1 << 31, 1, 0), allow, refuse)
    for pair, index, values in _ONLY.values():
        numbers = [_OWN_ID if value == "self" else value for value in values]
        allowed = [step for n in numbers for step in (_step(_JUMP_EQUAL, n, 0, 1), allow)]
        program += _case(pair, _argument(index), *allowed, refuse)
    threads = [_argument(0), _step(_AND, _THREAD_FLAGS | _NEW_FLAGS)]
    program += _case(_CLONE, *threads, _step(_JUMP_EQUAL, _THREAD_FLAGS, 0, 1), allow, refuse)
    # AF_UNIX, SOCK_STREAM: goes nowhere else
    pair = [_argument(0), _step(_JUMP_EQUAL, 1, 0, 4), _argument(1), _step(_AND, 0xF)]
    program += _case(_SOCKETPAIR, *pair, _step(_JUMP_EQUAL, 1, 0, 1), allow, refuse)
    # clone3: its flags lie in memory, and libc falls back to clone.
    program += [*_case(_CLONE3, _step(_RETURN, _ERRNO | errno.ENOSYS)), refuse]
    return b"".join(program)


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    """Returns one instruction; `true` and `false` are the numbers of
    instructions that a jump skips."""
    return struct.pack("=HBBI", code, true, false, value)


def _argument(index: int) -> bytes:
    """Loads the low word of an argument: what is asked of it are ints in the kernel."""
    return _step(_LOAD, 16 + 8 * index)


def _case(pair: tuple[int, int], *steps: bytes) -> list[bytes]:
    """Builds the filter's steps for one system call, where this machine has it; the last step
    returns."""
    number = _numbers(pair)
    return [] if number < 0 else [_step(_JUMP_EQUAL, number, 0, len(steps)), *steps]


def filter_system_calls(files: str) -> None:
    """Permanently allows only what this file's docstring lists, by `filter_template(files)`."""
    own_id, mark = (struct.pack("=I", number) for number in (os.getpid(), _OWN_ID))
    code = ctypes.create_string_buffer(filter_template(files).replace(mark, own_id))
    count = (len(code) - 1) // 8
    program = struct.pack("=HxxxxxxQ", count, ctypes.addressof(code))
    # The buffer has a name so that it lives while the kernel reads it.
    program_buffer = ctypes.create_string_buffer(program)
    prctl(38, 1)
    prctl(22, 2, ctypes.addressof(program_buffer))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# -- Landlock: the same numbers on every machine
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_SCRATCH = 1 << 1 | _READ_FILE | _READ_DIR | 1 << 5 | 1 << 8  # write, read, list, remove, create


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0 if it has none."""
    return max(0, _LIBC.syscall(444, None, 0, 1))


def landlock_rules(readable: list[str], scratch: str) -> int:
    """The descriptor of rules by which `readable` may be read, flat files in `scratch` written, and
    nothing else."""
    version = landlock_version()
    handled = (1 << 13) - 1
    for bit, since in ((13, 2), (14, 3), (15, 5)):  # refer, truncate, ioctl on devices
        handled |= (1 << bit) * (version >= since)
    attribute = struct.pack("=Q", handled)
    rules = _checked(_LIBC.syscall(444, attribute, len(attribute), 0), "landlock_create_ruleset")
    truncate = (1 << 14) & handled
    accesses = [(path, _READ_FILE | _READ_DIR) for path in readable]
    accesses += [(scratch, _SCRATCH | truncate), ("/dev/null", _READ_FILE | 1 << 1 | truncate)]
    for path, access in accesses:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access &= ~_READ_DIR if not os.path.isdir(path) else -1
        rule = struct.pack("=Qi", access, descriptor)
        _checked(_LIBC.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    return rules


def landlock_restrict(rules: int) -> None:
    """Permanently restricts this process to the rules."""
    prctl(38, 1)
    _checked(_LIBC.syscall(446, rules, 0), "landlock_restrict_self")
