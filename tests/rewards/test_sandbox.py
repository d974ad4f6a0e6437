"""The sandbox under programs that attack it, in every tier that this machine has."""

import contextlib
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hostile_programs as hostile
import pytest
from hostile_programs import EXHAUST, HOLD, problem, run
from processes import wait_until

from rljax.errors import InputError
from rljax.rewards.sandbox import kernel, tiers
from rljax.rewards.sandbox import process as zygotes
from rljax.rewards.sandbox.tiers import (
    Process,
    ProcessLimits,
    SandboxError,
    run_program,
    sandbox_tier,
)

REPO = Path(__file__).resolve().parents[2]
QUICK = [
    "reads the canary file",
    "deletes the canary file",
    "reads /etc/passwd",
    "writes to /etc",
    "walks /proc",
    "opens its parent's memory",
    "inherits descriptors",
    "forks",
    "spawns a shell",
    "connects out",
    "opens a unix socket",
    "signals its parent",
    "kills everyone",
    "traces its parent",
    "enters namespaces",
    "loads bpf",
    "hides memory in a memfd",
    "allocates 100 GB",
    "allocates 1 GB",
    "writes 1 GB to stdout",
    "writes a 1 GB file",
    "asks for its parent's group",
    "asks for its parent's session",
    "reads its parent's clock",
    "asks for its parent's processors",
    "asks for its parent's robust list",
    "opens 1000 descriptors",
    "starts 2000 threads",
    "loops",
]


@pytest.fixture(autouse=True)
def fresh_zygotes(tmp_path, monkeypatch):
    """No zygote of another test; what one writes outside of its own root lies in tmp_path."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    drop_zygotes()


def drop_zygotes():
    while zygotes._idle:
        zygotes._idle.pop().close()


def start(source: str, tier: str, stdin="", warm=True, **limits):
    header = {"mode": "script", "source": source}
    limits = ProcessLimits(**{"timeout_s": 60.0, **limits})
    with Process(header, limits, tier, stdin=stdin, warm=warm) as process:
        return process.wait()


@pytest.fixture(params=tiers.TIERS)
def tier(request):
    try:
        start("pass", request.param)
    except SandboxError as error:
        pytest.skip(f"this machine has no tier {request.param}: {error}")
    return request.param


@pytest.fixture
def best():
    try:
        return sandbox_tier()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    path.write_text("alive")
    before = state(path)
    yield str(path)
    assert path.read_text() == "alive" and state(path) == before
    assert {p.name for p in tmp_path.iterdir()} <= {"canary", "tmp"}


def state(path: Path) -> tuple:
    found = path.stat()
    return found.st_mode, found.st_mtime_ns, found.st_size, found.st_nlink, found.st_uid


def descendants() -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(stat.parent.name)] = int(fields[1])
    found, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grew = found | more, bool(more)
    return found


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hostile_programs_in_the_best_tier(best, canary):
    problems = [problem(run(name, best, canary)) for name in QUICK]
    assert [p for p in problems if p] == []


def host_is_unchanged_by(names, tier, tmp_path, canary):
    drop_zygotes()
    others = descendants()  # of other tests in this process
    start("pass", tier)  # the zygote is there
    before, memory = descendants(), resident_bytes()
    problems = [problem(run(name, tier, canary)) for name in names]
    assert [p for p in problems if p] == []
    gc.collect()
    assert resident_bytes() - memory < 100 << 20
    assert len(descendants()) <= len(before)  # the zygote, perhaps another one
    for folder in (tmp_path / "tmp").iterdir():  # its own, empty
        assert folder.name.startswith("sandbox-") and list(folder.iterdir()) == []
    assert not Path("/etc/rljax-was-here").exists()
    drop_zygotes()
    assert list((tmp_path / "tmp").iterdir()) == []
    wait_until(lambda: not descendants() & (before - others), "the end of the zygote")


@pytest.mark.slow
def test_all_hostile_programs_in_every_tier(tier, tmp_path, canary):
    assert len(HOLD) + len(EXHAUST) >= 60
    host_is_unchanged_by([*HOLD, *EXHAUST], tier, tmp_path, canary)


def python_of_everybody() -> str | None:
    """An interpreter that a user without rights can start."""
    for path in (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/bin")):
        test = "import sys; sys.exit(sys.version_info < (3, 11))"
        with contextlib.suppress(PermissionError):
            if path and subprocess.run([path, "-c", test], **as_nobody()).returncode == 0:
                return path
    return None


def as_nobody(**environment) -> dict:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return {
        "user": 65534,
        "group": 65534,
        "extra_groups": [],
        "cwd": "/",
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }


@pytest.fixture
def nobody(tmp_path):
    """(interpreter, folder that nobody owns with a copy of the package in it)."""
    if os.getuid() != 0:
        pytest.skip("only root can become nobody")
    folder = Path(tempfile.mkdtemp(prefix="rljax-nobody-", dir="/tmp"))
    try:
        python = python_of_everybody()
        if python is None:
            pytest.skip("no Python 3.11 that every user may start")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / "rljax" / "rewards", folder / "rljax" / "rewards", ignore=ignore)
        for path in (REPO / "rljax").glob("*.py"):  # rooms of one file
            shutil.copy(path, folder / "rljax")
        shutil.copy(hostile.__file__, folder)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "tmp").mkdir()
        os.chown(folder / "tmp", 65534, 65534)
        yield python, folder
    finally:
        shutil.rmtree(folder)


def run_as_nobody(nobody, names, tiers):
    python, folder = nobody
    (folder / "tmp" / "canary").write_text("alive")
    os.chown(folder / "tmp" / "canary", 65534, 65534)
    done = subprocess.run(
        [
            python,
            folder / "hostile_programs.py",
            folder / "tmp" / "canary",
            ",".join(names),
            *tiers,
        ],
        **as_nobody(PYTHONPATH=str(folder), TMPDIR=str(folder / "tmp")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "tmp" / "canary").read_text() == "alive"
    wait_until(lambda: len(list((folder / "tmp").iterdir())) == 1, "the end of the folders")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_user_without_rights_has_the_sandbox_too(nobody):
    names = ["reads the canary file", "forks", "opens a unix socket", "signals its parent"]
    found = run_as_nobody(nobody, names, ["seccomp", "closed"])
    namespaces = run_as_nobody(nobody, names, ["namespaces"])
    assert [problem(one) for one in found + namespaces if problem(one)] == []
    assert len(found) == 8 and len(namespaces) == 4


@pytest.mark.slow
def test_all_hostile_programs_as_a_user_without_rights(tier, nobody):
    found = run_as_nobody(nobody, [*HOLD, *EXHAUST], [tier])
    assert [problem(one) for one in found if problem(one)] == []
    assert len(found) == len(HOLD) + len(EXHAUST)


def test_the_attempts_are_real(canary):
    """Where nothing is confined they get through: the tables do not pass by being wrong."""
    names = [
        "reads the canary file",
        "reads /etc/passwd",
        "walks /proc",
        "opens a unix socket",
        "sends datagrams",
        "signals its parent",
        "signals by pidfd",
        "limits its parent",
        "hides memory in a memfd",
        "makes folders",
        "uses os.system",
    ]
    for name in names:
        assert "BREACH" in run(name, "unsafe", canary)["stdout"], name


# -- what a program may do


@pytest.mark.parametrize("warm", [True, False])
def test_a_program_reads_stdin_and_writes_both_outputs(best, warm):
    source = "import sys\nprint(sum(map(int, sys.stdin)))\nprint('note', file=sys.stderr)"
    result = start(source, best, stdin="1\n" * 100_000, warm=warm)
    assert (result.status, result.stdout, result.stderr) == ("ok", b"100000\n", b"note\n")
    assert result.exit_code == 0 and result.tier == best and result.max_rss_bytes > 1 << 20
    assert bool(zygotes._idle) == warm


def test_a_program_may_use_threads_files_asyncio_and_packages(best):
    source = """
import asyncio, json, os, sys, tempfile, threading
found = []
thread = threading.Thread(target=lambda: found.append(1))
thread.start(); thread.join()
with tempfile.TemporaryFile("w+") as file:
    file.write("2"); file.seek(0); found.append(int(file.read()))
open("x", "w").write("3")
found.append(int(open("x").read())); os.remove("x")
async def four(): await asyncio.sleep(0.001); return 4
found.append(asyncio.run(four()))
import numpy
found.append(int(numpy.arange(5) @ numpy.ones(5)) // 2)
threading.Thread(target=lambda: print(json.dumps(found))).start()  # ends after the main thread
"""
    result = start(source, best, timeout_s=120.0, cpu_s=60.0)
    assert (result.stdout, result.status) == (b"[1, 2, 3, 4, 5]\n", "ok"), result


@pytest.mark.parametrize(
    "source, status, message, code",
    [
        ("1 / 0", "error", "ZeroDivisionError: division by zero", 1),
        ("import sys; sys.exit(3)", "error", "exit code 3", 3),
        ("import sys; sys.exit('no')", "error", "no", 1),
        ("import os; os._exit(0)", "ok", "", 0),
        ("def f(:", "error", "SyntaxError", 1),
        ("'\\0'\0", "error", "source code string cannot contain null bytes", 1),
        ("import os; os.abort()", "killed", "signal 6", -6),
        ("raise MemoryError", "memory", "MemoryError", 1),
        ("while True: pass", "timeout", "over the limit of 0.3 s", -9),
        ("print('x' * 99)", "output", "more than 50 bytes of stdout", None),
    ],
)
def test_an_end_is_named(best, source, status, message, code):
    result = start(
        source,
        best,
        timeout_s=0.3 if status == "timeout" else 60.0,
        max_output_bytes=50 if status == "output" else 10_000,
    )
    assert result.status == status and message in result.message, result
    assert code is None or result.exit_code == code


def test_processor_time_has_its_own_limit(best):
    source = "import threading\ndef f():\n    while True: pass\nf()"
    result = start(source, best, timeout_s=3600.0, cpu_s=1.0)
    assert result.status == "timeout" and "processor" in result.message, result


def test_a_file_has_its_limit(best):
    source = "f = open('x', 'wb', 0)\nf.write(bytes(1000))\nf.write(bytes(1000))"
    assert start(source, best, max_file_bytes=2000).status == "ok"
    assert start(source, best, max_file_bytes=1500).status == "ok"  # the second write is short
    source += "\nf.write(b'1')"
    found = start(source, best, max_file_bytes=1500)
    assert found.status == "error" and "File too large" in found.message, found


def test_output_is_cut_while_it_streams(best):
    before = resident_bytes()
    result = start("while True: print('x' * 10**6)", best, timeout_s=60.0, max_output_bytes=1 << 20)
    assert result.status == "output" and len(result.stdout) == 1 << 20
    assert resident_bytes() - before < 64 << 20


def test_a_program_that_does_not_read_its_input_is_no_problem(best):
    assert start("print(1)", best, stdin=b"x" * 5_000_000).stdout == b"1\n"


# -- from one program to the next


def test_nothing_of_a_program_reaches_the_next(tier):
    secret = "5f3e"
    first = f"""
import builtins, json, os, random, sys
builtins.SECRET = json.SECRET = sys.SECRET = "{secret}"
json.dumps = print
os.umask(0); os.environ["SECRET"] = "{secret}"; sys.setrecursionlimit(123)
try: open("left.txt", "w").write("{secret}"); open("/tmp/left.txt", "w").write("{secret}")
except OSError: pass
print(os.getpid())
"""
    second = """
import builtins, gc, json, os, sys
print(os.getpid())
def has(x): return hasattr(x, "SECRET")
print(any(map(has, (builtins, json, sys))), os.environ.get("SECRET"), sys.getrecursionlimit())
print(json.dumps([1]))
try: print([n for n in os.listdir(".") if os.path.isfile(n)])
except OSError: print([])
print(any(isinstance(o, str) and o == "5f" + "3e" for o in gc.get_objects()))
"""
    one, two = start(first, tier), start(second, tier)
    assert len(zygotes._idle) == 1  # both in one zygote
    pid, *rest = two.stdout.decode().splitlines()
    assert rest == ["False None 1000", "[1]", "[]", "False"], two
    assert one.stdout.decode().strip() != pid


def test_a_program_cannot_write_into_its_zygote(tier):
    start("import os\nprint(os.getppid())", tier)
    (zygote,) = zygotes._idle
    source = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for n in (101, 310, 311, 434, 438):\n"
        "    print(libc.syscall(n, os.getppid(), 0, 0, 0, 0, 0), end=' ')\n"
        "try: open(f'/proc/{os.getppid()}/mem', 'r+b')\nexcept OSError as e: print('held')\n"
    )
    assert start(source, tier).stdout.split() == [b"-1"] * 5 + [b"held"]
    assert zygotes._idle == [zygote]


def test_a_dead_zygote_is_replaced(best):
    start("pass", best)
    (zygote,) = zygotes._idle
    os.killpg(zygote.process.pid, signal.SIGKILL)
    zygote.process.wait()
    assert start("print(1)", best).stdout == b"1\n"


FORKS = """
import contextlib, os
from rljax.rewards.sandbox.tiers import Process, ProcessLimits
def start(source):
    limits = ProcessLimits(timeout_s=60)
    with Process({{"mode": "script", "source": source}}, limits, {tier!r}) as p:
        return p.wait().stdout
start("pass")
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    found = b"no"
    with contextlib.suppress(BaseException):
        found = start("print('from the fork')")
    os.write(write_end, found)
    os._exit(0)
os.waitpid(child, 0)
assert os.read(read_end, 100) == b"from the fork\\n"
assert start("print('still here')") == b"still here\\n"
"""


def test_a_fork_of_the_caller_has_zygotes_of_its_own(best):
    # In a process of its own: this one has JAX's threads, which a fork would leave behind.
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", FORKS.format(tier=best)]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()


VICTIM = """
import sys, tempfile
tempfile.tempdir = {folder!r}
from rljax.rewards.sandbox.tiers import Process, ProcessLimits
endless = {{"mode": "script", "source": "while True: pass"}}
with Process(endless, ProcessLimits(timeout_s=3600, cpu_s=3600), {tier!r}) as p:
    print("ready", flush=True)
    p.wait()
"""


def test_a_program_ends_with_the_caller_that_is_killed(tier, tmp_path):
    drop_zygotes()  # that of the fixture has a folder too
    code = VICTIM.format(folder=str(tmp_path / "tmp"), tier=tier)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    before = descendants()
    victim = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    with victim:
        assert victim.stdout.readline() == b"ready\n"
        started = descendants() - before
        assert len(started) >= 3  # caller, zygote, program
        victim.kill()

    def alive(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    wait_until(lambda: not any(map(alive, started)), "the end of the program")
    wait_until(lambda: list((tmp_path / "tmp").iterdir()) == [], "the end of its folder")


# -- choosing


def test_without_a_sandbox_it_refuses_until_it_is_told(monkeypatch):
    monkeypatch.setattr(tiers, "TIERS", ("bubblewrap",))
    monkeypatch.setenv("PATH", "")
    tiers._choose_tier.cache_clear()
    try:
        with pytest.raises(InputError, match="no bwrap on PATH.*allow_unsafe_execution=True"):
            run_program("print(1)")
        found = run_program("print(1)", allow_unsafe_execution=True)
        assert (found.stdout, found.tier) == (b"1\n", "unsafe")
    finally:
        tiers._choose_tier.cache_clear()


def test_allowing_the_unsafe_does_not_choose_it(best):
    assert sandbox_tier(allow_unsafe_execution=True) == best


def test_a_failure_of_the_sandbox_is_no_result(best, monkeypatch):
    monkeypatch.setattr(zygotes, "_BOOT", "raise SystemExit('broken')")
    with pytest.raises(SandboxError, match="broken"):
        start("print(1)", best)


@pytest.mark.parametrize(
    "limits",
    [
        {"timeout_s": 0},
        {"timeout_s": math.nan},
        {"memory_bytes": 1.5},
        {"max_threads": True},
        {"cpu_s": "1"},
        {"max_output_bytes": -1},
    ],
)
def test_limits_are_checked(limits):
    with pytest.raises(InputError, match=next(iter(limits))):
        ProcessLimits(**limits)


NUMBERS = json.loads((Path(hostile.__file__).parent / "system_calls.json").read_text())
HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]


def system_calls() -> dict[str, tuple[int, int]]:
    """All system calls that the filter names -> their numbers on x86_64 and aarch64."""
    tables = kernel._ALLOWED | kernel._PATHS | kernel._REMOVING | kernel._CLOCKS
    tables |= {name: pair for name, (pair, _, _) in kernel._ONLY.items()}
    tables |= {name: pair for name, (pair, _) in kernel._OPEN.items()}
    return tables | {
        "socketpair": kernel._SOCKETPAIR,
        "clone": kernel._CLONE,
        "clone3": kernel._CLONE3,
    }


def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers():
    """tests/helpers/system_calls.json is an excerpt of linux-libc-dev; -1: the machine has none."""
    tables = system_calls()
    assert {name: list(pair) for name, pair in tables.items()} == {
        name: pair for name, pair in NUMBERS.items() if name != "pivot_root"
    }
    for machine in (0, 1):
        numbers = [pair[machine] for pair in tables.values() if pair[machine] >= 0]
        assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("machine", [0, 1], ids=["x86_64", "generic, as aarch64"])
def test_the_excerpt_is_that_of_the_headers_on_this_machine(machine):
    path = Path(HEADERS[machine])
    if not path.exists():
        pytest.skip("linux-libc-dev is not installed")
    defined = dict(re.findall(r"#\s*define __NR(3264_\w+|_\w+)\s+(\w+)", path.read_text()))
    for name, pair in NUMBERS.items():
        found = defined.get(f"_{name}", "-1")
        found = defined.get(found.removeprefix("__NR"), found)  # one of 32 and 64 bits
        number = int(found) if found.isdecimal() else -1
        assert number == pair[machine], name


def test_a_program_sees_nothing_of_the_host_by_its_names(tier, canary):
    """Where Landlock alone confines, stat sees it: that tier has a warning."""
    found = [run(name, tier, canary) for name in hostile.SEES]
    if tier == "seccomp":
        assert "stat" in tiers.LEFT_OPEN[tier]
        assert any("BREACH" in one["stdout"] for one in found)
    else:
        assert tier in ("namespaces", "bubblewrap") or tier in tiers.LEFT_OPEN
        assert [one for one in found if not one["stdout"].startswith("held")] == []


NAMELESS = """
import ctypes, mmap, os
held = []
def keep(path, how):
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if path != "." else os.O_TMPFILE))
    for _ in range(15):
        os.write(descriptor, bytes(1 << 20))
    held.append(mmap.mmap(descriptor, 4096, mmap.MAP_PRIVATE))
    how()
    os.close(descriptor)
def replaced():
    os.open("y", os.O_RDWR | os.O_CREAT)
    os.rename("y", "x")
WAYS = [
    lambda: keep("x", lambda: os.unlink("x")),
    lambda: keep("x", replaced),
    lambda: keep(".", lambda: None),
]
for way in WAYS:
    try:
        for _ in range(40):
            way()
        print("BREACH", len(held))
    except OSError as error:
        print("held", error)
"""


def test_no_program_fills_the_disk_with_files_that_have_no_name(tier):
    """600 MB are tried in each way, one after the other; all files of a program have 64 MB."""
    result = start(NAMELESS, tier, timeout_s=120.0, cpu_s=60.0, memory_bytes=2 << 30)
    said = result.stdout.decode()
    assert "BREACH" not in said, said
    if tier in ("namespaces", "seccomp"):  # in closed it has no file to begin with
        assert said.count("held") == 3 or result.status == "killed", result
