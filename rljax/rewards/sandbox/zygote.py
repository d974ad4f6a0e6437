"""The process inside the sandbox that forks a fresh process for every program.

Enters the namespaces and the private root, then loops: receive descriptors and limits, fork,
confine, watch, clean. System calls are in `kernel`, what a program's process runs in `program`.

It never sees a program or a test: those go to the forked process over a channel of its own, so
that nothing of one program is in the memory which the next one inherits. It ends when the control
socket does, and with it its program, wherever the other side died.

A program is one process: its filter refuses fork, so ending it ends everything that it is.
"""

import contextlib
import fcntl
import gc
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time

from rljax.rewards.sandbox import kernel, program

_UNPRIVILEGED = 65534  # user that root becomes before it enters the namespaces
_WATCH_S = 0.02
MAX_FILES = 256
# Location of a program's files by tier: the argument of kernel.filter_template.
_FILES = {"namespaces": "private", "bubblewrap": "private", "seccomp": "shared", "closed": "none"}
# Processes of the same user in the namespace: the zygote, and the one that waits for it.
_SPARE_PROCESSES = 3


def main(spec_text: str) -> None:
    """Runs as a zygote. `spec_text` is JSON of tier, control descriptor, readable paths and limits.
    An error in confining itself is sent to the parent."""
    spec = json.loads(spec_text)
    control = socket.socket(fileno=spec["control"])
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        scratch = _enter(spec)
        rules = None
        if spec["tier"] != "unsafe":
            kernel.drop_capabilities()
            kernel.filter_template(_FILES[spec["tier"]])
            kernel.prctl(4, 0)  # PR_SET_DUMPABLE: nobody of the same user reads or traces it
            if spec["tier"] == "seccomp" and not kernel.landlock_version():
                raise OSError("the kernel has no Landlock")
            if spec["tier"] != "closed" and kernel.landlock_version():
                rules = kernel.landlock_rules([*spec["readable"], *spec["devices"]], scratch)
    except Exception as error:
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    sys.path[:] = spec["path"]
    gc.collect()
    gc.freeze()  # a fork does not copy pages only because its collector touched them
    to_remove = scratch if spec["tier"] not in ("namespaces", "bubblewrap") else None
    control.send(json.dumps({"ready": True, "scratch": to_remove}).encode())
    try:
        _serve(control, spec, scratch, rules)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the other side ended in the middle of a program
    finally:
        if to_remove:
            shutil.rmtree(scratch, ignore_errors=True)


def _enter(spec: dict) -> str:
    """Enters the folder where programs run; returns the folder that they may write in."""
    os.umask(0o077)
    if spec["tier"] == "namespaces":
        _enter_namespaces(spec)
    if spec["tier"] in ("namespaces", "bubblewrap"):
        os.chdir("/tmp")
        return "/tmp"
    scratch = tempfile.mkdtemp(prefix="sandbox-", dir=spec["temporary"])
    os.chdir(scratch)
    return scratch


def _enter_namespaces(spec: dict) -> None:
    """Enters user, mount, pid, network, ipc, uts and cgroup namespaces, with
    a root of their own."""
    user, group = os.getuid(), os.getgid()
    # Opened now: the new root has no /proc, and the maps are written after the change of user.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if user == 0:
        # Root first builds the root, unreadable for an unmapped user, and then becomes nobody.
        kernel.unshare(kernel.CLONE_NEWNS)
        _private_root(spec)
        os.setgroups([])
        user = group = _UNPRIVILEGED
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        kernel.prctl(4, 1)  # the change of user made /proc/self root's
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    kernel.unshare(flags | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP)
    maps = {"uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in {"setgroups": "deny", **maps}.items():
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    os.close(proc)
    if os.path.exists("/proc/self"):  # not root: only now it may mount
        _private_root(spec)
    init = os.fork()  # the first process of the pid namespace: its end ends all others there
    if init:
        os.close(spec["control"])
        os.waitpid(init, 0)
        os._exit(0)
    kernel.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _private_root(spec: dict) -> None:
    """Makes a root that holds the interpreter's libraries, read-only, a few
    devices and an empty /tmp."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in [*spec["readable"], *spec["devices"]]}
    # Over a folder that every system has; what that hides is open already.
    root, flags = "/tmp", kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", root, "tmpfs", flags, "size=1m,nr_inodes=4096,mode=0755")
    os.mkdir(f"{root}/tmp", 0o755)
    size = f"size={spec['max_scratch_bytes']},nr_inodes={2 * MAX_FILES},mode=1777"
    kernel.mount("tmpfs", f"{root}/tmp", "tmpfs", flags | kernel.MS_NOEXEC, size)
    old_mask = os.umask(0o022)
    for path, descriptor in sources.items():
        target = root + path
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.bind_read_only(f"/proc/self/fd/{descriptor}", target)
        os.close(descriptor)
    os.umask(old_mask)
    kernel.change_root(root)
    kernel.mount("", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def _serve(control: socket.socket, spec: dict, scratch: str, rules: int | None) -> None:
    """Runs one program after another until the other side closes or a scratch folder stays
    dirty."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 4)
        if not data:
            return
        if data == b"kill":  # it crossed with the message that the program had ended
            continue
        limits = json.loads(data)
        began = time.monotonic()
        zygote = os.getpid()
        child = os.fork()
        if child == 0:
            _become_program(zygote, descriptors, limits, spec, scratch, rules)
        for descriptor in descriptors:
            os.close(descriptor)
        reason = _watch(control, child, scratch, limits, spec["max_scratch_bytes"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # not reaped yet: the number is still its own
        _, status, usage = os.wait4(child, 0)
        _wipe(scratch)
        end = {
            "exit": os.waitstatus_to_exitcode(status),
            "reason": reason,
            "seconds": time.monotonic() - began,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "max_rss_bytes": usage.ru_maxrss * 1024,
        }
        control.send(json.dumps(end).encode())


def _watch(control: socket.socket, child: int, scratch: str, limits: dict, space: int) -> str:
    """Waits for the program's end, or ends it; returns why it was ended. It is not reaped yet."""
    process = os.pidfd_open(child)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(control, select.POLLIN)
    reason = ""
    while True:
        events = dict(poll.poll(1000 * _WATCH_S))
        if process in events:
            os.close(process)
            return reason
        if control.fileno() in events:
            reason = "killed"
            if not control.recv(1 << 10):
                poll.unregister(control)  # the other side is gone: this one is the last
        if not reason:
            reason = _excess(child, scratch, limits, space)
        if reason:
            os.kill(child, signal.SIGKILL)


def _excess(child: int, scratch: str, limits: dict, space: int) -> str:
    """Returns the limit that was passed, of those that the kernel does not
    enforce; "" if none was."""
    try:
        files = [entry for entry in os.scandir(scratch) if not entry.is_dir()]
        size = sum(entry.stat(follow_symlinks=False).st_blocks for entry in files) * 512
    except OSError:
        return ""  # a file was removed meanwhile
    if len(files) > MAX_FILES or size > space:
        return "files"
    try:
        with open(f"/proc/{child}/stat") as stat_file:
            threads = int(stat_file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError):
        return ""  # no /proc: there RLIMIT_NPROC holds in the user namespace
    return "threads" if threads > limits["max_threads"] else ""


def _wipe(scratch: str) -> None:
    """Empties the folder. It is flat: a program can make no folder and no link; those that are
    there hold read-only libraries."""
    for entry in os.scandir(scratch):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)


def _become_program(
    zygote: int, descriptors: list[int], limits: dict, spec: dict, scratch: str, rules: int | None
) -> None:
    """Confines the forked process, then runs what comes over the channel. Never returns."""
    try:
        os.setsid()
        kernel.prctl(1, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)
        # Through high numbers: what arrived may have the numbers that it is to get.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
        rules = rules if rules is None else fcntl.fcntl(rules, fcntl.F_DUPFD, 100)
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number)
        if rules is not None:
            kernel.landlock_restrict(rules)
        os.closerange(len(high), 4096)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.umask(0o022)
        os.chdir(scratch)
        _limit(limits, spec["tier"])
        if spec["tier"] != "unsafe":
            kernel.filter_system_calls(_FILES[spec["tier"]])
    except BaseException as error:
        os.write(3, program.failure(error))
        os._exit(1)
    program.main(3)


def _limit(limits: dict, tier: str) -> None:
    memory = limits["memory_bytes"]
    cpu = max(1, math.ceil(limits["cpu_s"]))
    hard = {resource.RLIMIT_CPU: cpu, resource.RLIMIT_AS: memory, resource.RLIMIT_NOFILE: 64}
    hard[resource.RLIMIT_FSIZE] = limits["max_file_bytes"]
    hard[resource.RLIMIT_STACK] = min(memory // 4, 64 << 20)
    zeroed = (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)
    hard |= dict.fromkeys(zeroed, 0)
    if tier in ("namespaces", "bubblewrap"):  # elsewhere it counts all processes of the user
        hard[resource.RLIMIT_NPROC] = limits["max_threads"] + _SPARE_PROCESSES
    for name, value in hard.items():
        top = resource.getrlimit(name)[1]
        value = value if top == resource.RLIM_INFINITY else min(value, top)
        resource.setrlimit(name, (value, value))
