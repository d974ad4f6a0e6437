"""Programs that try to harm the machine that scores them, or to be scored right for nothing.

What lives here: two tables, and a run of them as a script (for a user of its own):
`python tests/helpers/hostile_programs.py CANARY 'forks,loops' seccomp` prints a JSON object per
program.
Every attempt is bounded by itself as well: should the sandbox not hold, the machine survives.
"""

import json
import sys
from pathlib import Path

# attempt(f): "held" if f raises, else "BREACH". refused(number, ...): a raw system call that the
# sandbox must refuse: any other answer of the kernel, an error included, means that it got through.
PRELUDE = """
import ctypes, errno, os, platform, sys, time
libc = ctypes.CDLL(None, use_errno=True)
CANARY, HOST = {canary!r}, {host!r}
def attempt(what):
    try:
        found = what()
    except BaseException as error:
        print("held", type(error).__name__)
    else:
        print("BREACH", repr(found)[:80])
def refused(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    result = libc.syscall(number, *arguments)
    code = ctypes.get_errno() if result == -1 else 0
    if code in (errno.EPERM, errno.ENOSYS):
        raise PermissionError(code)
    return result, code
"""

# Files of the host that a program without a root of its own may see the names and sizes of.
SEES = {
    "sees the canary": "attempt(lambda: os.stat(CANARY))",
    "sees /etc/shadow": "attempt(lambda: os.lstat('/etc/shadow'))",
    "sees its parent": "attempt(lambda: os.stat('/proc/%d' % os.getppid()))",
    "sees access rights": "attempt(lambda: 1 / os.access('/etc/hosts', os.F_OK))",
    "reads a link": "attempt(lambda: os.readlink('/proc/self/exe'))",
    "sees the folder of its zygote": "attempt(lambda: 1 / ('sandbox-' in os.getcwd()))",
    "goes to a folder of the host": "attempt(lambda: os.chdir(HOST))",
}

# Containment: name, source. Those that end by themselves print "held" or "BREACH".
HOLD = {
    "reads the canary file": "attempt(lambda: open(CANARY).read())",
    "overwrites the canary file": "attempt(lambda: open(CANARY, 'w').write('x'))",
    "deletes the canary file": "attempt(lambda: os.unlink(CANARY))",
    "renames the canary file": "attempt(lambda: os.rename(CANARY, CANARY + '2'))",
    "changes the canary's mode": "attempt(lambda: os.chmod(CANARY, 0o777))",
    "changes the canary's times": "attempt(lambda: os.utime(CANARY, (1, 1)))",
    "truncates the canary file": "attempt(lambda: os.truncate(CANARY, 0))",
    "links to the canary": "attempt(lambda: (os.symlink(CANARY, 'x'), open('x').read()))",
    "hard-links the canary": "attempt(lambda: os.link(CANARY, 'x'))",
    "reads /etc/passwd": "attempt(lambda: open('/etc/passwd').read())",
    "reads homes": "attempt(lambda: [os.listdir(os.path.expanduser(u)) for u in ('~root',)])",
    "writes to /etc": "attempt(lambda: open('/etc/rljax-was-here', 'w'))",
    "writes beside the canary": "attempt(lambda: open(CANARY + '.new', 'w'))",
    "writes into the library": "attempt(lambda: open(os.path.join(os.path.dirname(os.__file__),"
    " 'rljax_was_here.py'), 'w'))",
    "walks /proc": "attempt(lambda: [open(f'/proc/{n}/cmdline', 'rb').read() for n in "
    "(os.getppid(), 1)])",
    "opens its parent's memory": "attempt(lambda: open('/proc/%d/mem' % os.getppid(), 'r+b'))",
    "asks for its parent's group": "attempt(lambda: os.getpgid(os.getppid()))",
    "asks for its parent's session": "attempt(lambda: os.getsid(os.getppid()))",
    "asks for its parent's processors": "attempt(lambda: os.sched_getaffinity(os.getppid()))",
    "reads its parent's clock": "attempt(lambda: time.clock_gettime(~os.getppid() << 3 | 2))",
    "asks for its parent's robust list": "attempt(lambda: refused(274, 100, os.getppid(),"
    " ctypes.byref(ctypes.c_long()), 0))",
    "opens devices": "attempt(lambda: [open(p, 'rb') for p in ('/dev/mem', '/dev/kmsg')])",
    "lists the root of a parent": "attempt(lambda: os.listdir('/proc/%d/root' % os.getppid()))",
    "inherits descriptors": "attempt(lambda: [os.fstat(n) for n in range(4, 400) if _open(n)][0])",
    "forks": "attempt(lambda: os.fork() or time.sleep(3))",
    "is a fork bomb": "attempt(lambda: [os.fork() or time.sleep(3) for _ in range(8)])",
    "vforks": "attempt(lambda: refused(57, 220, 17, 0, 0, 0, 0) if platform.machine() != 'x86_64'"
    " else refused(999, 999))",
    "clones by clone3": "attempt(lambda: refused(435, 435, 0, 0))",
    "clones a process by clone": "attempt(lambda: refused(56, 220, 17, 0, 0, 0, 0))",
    "spawns a shell": "import subprocess\nattempt(lambda: subprocess.run(['/bin/sh', '-c', ':']))",
    "executes": "attempt(lambda: os.execv(sys.executable, [sys.executable, '-c', '']))",
    "uses os.system": "attempt(lambda: 1 // (os.system('exit 0') == 0))",
    "uses multiprocessing": "import multiprocessing as m\n"
    "attempt(lambda: m.get_context('fork').Process(target=print).start())",
    "connects out": "import socket\n"
    "attempt(lambda: socket.create_connection(('127.0.0.1', 22), 1))",
    "listens": "import socket\nattempt(lambda: socket.create_server(('127.0.0.1', 0)))",
    "looks a name up": "import socket\nattempt(lambda: socket.getaddrinfo('example.org', 80))",
    "sends datagrams": "import socket\n"
    "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))",
    "opens a raw socket": "import socket\nattempt(lambda: socket.socket(17, socket.SOCK_RAW))",
    "opens a unix socket": "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX))",
    "pairs datagram sockets": "import socket\n"
    "attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))",
    "signals its parent": "attempt(lambda: os.kill(os.getppid(), 0))",
    "kills everyone": "attempt(lambda: os.kill(-1, 0))",
    "signals its group": "attempt(lambda: os.kill(0, 0))",
    "signals by fcntl": "import fcntl\nr, w = os.pipe()\n"
    "attempt(lambda: fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()))",
    "signals by pidfd": "attempt(lambda: os.pidfd_open(os.getppid()))",
    "limits its parent": "import resource\n"
    "attempt(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU))",
    "raises its own limits": "import resource\n"
    "attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)))",
    "traces its parent": "attempt(lambda: refused(101, 117, 16, os.getppid(), 0, 0))",
    "reads its parent's memory": "attempt(lambda: refused(310, 270, os.getppid(), 0, 0, 0, 0, 0))",
    "writes its parent's memory": "attempt(lambda: refused(311, 271, os.getppid(), 0, 0, 0, 0, 0))",
    "mounts": "attempt(lambda: refused(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0))",
    "enters namespaces": "attempt(lambda: refused(272, 97, 0x10000000))",
    "joins namespaces": "attempt(lambda: refused(308, 268, 0, 0))",
    "changes its root": "attempt(lambda: refused(161, 51, b'/tmp'))",
    "loads bpf": "attempt(lambda: refused(321, 280, 0, 0, 0))",
    "asks for keys": "attempt(lambda: refused(250, 219, 0, -3, 0, 0, 0))",
    "uses userfaultfd": "attempt(lambda: refused(323, 282, 1))",
    "uses io_uring": "attempt(lambda: refused(425, 425, 1, 0))",
    "opens perf events": "attempt(lambda: refused(298, 241, 0, 0, -1, -1, 0))",
    "loads a kernel": "attempt(lambda: refused(246, 104, 0, 0, 0, 0))",
    "loads a module": "attempt(lambda: refused(313, 273, -1, b'', 0))",
    "becomes root": "attempt(lambda: os.setuid(0))",
    "hides memory in a memfd": "attempt(lambda: os.memfd_create('x'))",
    "hides memory in shm": "attempt(lambda: refused(29, 194, 0, 1 << 20, 0o1600))",
    "makes folders": "attempt(lambda: os.mkdir('x'))",
    "makes a device": "attempt(lambda: os.mknod('x', 0o020600, os.makedev(1, 1)))",
    "types into the terminal": "import fcntl\nattempt(lambda: fcntl.ioctl(0, 0x5412, b'x'))",
    "sets the host's name": "attempt(lambda: refused(170, 161, b'x', 1))",
    "unblocks its filter": "attempt(lambda: refused(157, 167, 22, 0, 0))",
}
HOLD["inherits descriptors"] = """
def _open(number):
    try:
        return os.fstat(number) is not None
    except OSError:
        return False
""" + HOLD["inherits descriptors"]

# Exhaustion: name -> (statuses that it may end with, source). None may print "BREACH".
EXHAUST = {
    "loops": ({"timeout"}, "while True: pass"),
    "loops in C": ({"timeout", "memory"}, "5 ** (5 ** (5 ** 5))"),
    "sleeps": ({"timeout"}, "time.sleep(3600)"),
    "ignores signals": (
        {"timeout"},
        "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile 1: pass",
    ),
    "hangs in atexit": ({"timeout"}, "import atexit\natexit.register(time.sleep, 3600)"),
    "leaves a thread": (
        {"timeout"},
        "import threading\nthreading.Thread(target=time.sleep, args=(3600,)).start()",
    ),
    "backtracks": ({"timeout"}, "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"),
    "waits for input that never comes": ({"timeout"}, "r, w = os.pipe()\nos.read(r, 1)"),
    "allocates 100 GB": ({"memory"}, "x = bytearray(100 << 30)\nprint('BREACH')"),
    "allocates 1 GB": ({"memory"}, "x = bytearray(1 << 30)\nprint('BREACH')"),
    "allocates bit by bit": (
        {"memory", "timeout"},
        "x = []\nfor _ in range(1500): x.append(b'x' * (1 << 20))\nprint('BREACH')",
    ),
    "maps 64 GB": ({"error"}, "import mmap\nmmap.mmap(-1, 64 << 30)\nprint('BREACH')"),
    "unpacks a bomb": (
        {"memory", "timeout"},
        "import zlib\nc = zlib.compressobj(9)\n"
        "d = b''.join(c.compress(bytes(1 << 24)) for _ in range(96)) + c.flush()\n"
        "x = zlib.decompress(d)\nprint('BREACH')",
    ),
    "writes 1 GB to stdout": (
        {"output", "timeout"},
        "for _ in range(1024): sys.stdout.write('x' * (1 << 20))",
    ),
    "writes 1 GB to stderr": (
        {"output", "timeout"},
        "for _ in range(1024): os.write(2, b'x' * (1 << 20))",
    ),
    "writes a 1 GB file": (
        {"error", "killed"},
        "f = open('x', 'wb', 0)\nfor _ in range(1024): f.write(bytes(1 << 20))\nprint('BREACH')",
    ),
    "writes many files": (
        {"error", "killed", "timeout"},
        "for i in range(20_000):\n    open(f'{i}', 'w').close()\nprint('BREACH')",
    ),
    "starts 2000 threads": (
        {"error", "killed", "memory", "timeout"},
        "import threading\nthreading.stack_size(1 << 16)\n"
        "for i in range(2000):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "print('BREACH')",
    ),
    "opens 1000 descriptors": ({"error"}, "x = [os.pipe() for _ in range(500)]\nprint('BREACH')"),
    "recurses deeply": (
        {"error", "killed", "memory", "timeout"},
        "sys.setrecursionlimit(10**8)\ndef f(): return f() + 1\nf()\nprint('BREACH')",
    ),
    "recurses in C": (
        {"error", "killed", "memory", "timeout"},
        "sys.setrecursionlimit(10**8)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)\n"
        "print('BREACH')",
    ),
    "reads a null pointer": ({"killed"}, "ctypes.string_at(0)\nprint('BREACH')"),
    "aborts": ({"killed"}, "os.abort()"),
    "calls the kernel in another mode": (
        {"killed"},
        "import mmap\nif platform.machine() != 'x86_64': os.abort()\n"
        "code = b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3'  # mov eax, 20; int 0x80; ret: getpid\n"
        "room = mmap.mmap(-1, 4096, prot=7)\nroom.write(code)\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(room))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(start)()\nprint('BREACH')",
    ),
    "calls the kernel by x32": (
        {"killed"},
        "if platform.machine() != 'x86_64': os.abort()\n"
        "libc.syscall(0x40000000 | 39)\nprint('BREACH')",
    ),
}

# Cheating: each is scored with the tests of `square`, which it does not compute.
CHEATS = {
    "os._exit(0)": "import os\nos._exit(0)",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0) in the function": "import os\ndef square(x): os._exit(0)",
    "prints passed": "print('passed', 'OK', '1 passed', True)\ndef square(x): return None",
    "== that is always true": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def square(x): return Any()""",
    "a number whose == is always true": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    __hash__ = int.__hash__
def square(x): return Any(-1)""",
    "arithmetic that is always zero": """
class Any:
    def __getattr__(self, name): return lambda *a: 0
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __lt__(self, other): return True
    def __abs__(self): return 0.0
def square(x): return Any()""",
    "patches builtins": """
import builtins
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.abs = lambda x: 0
builtins.all = builtins.any = builtins.bool = lambda *a: True
builtins.isinstance = lambda *a: True
def square(x): return None""",
    "patches unittest, json and operator": """
import json, operator, sys, unittest
unittest.TestCase.assertEqual = lambda *a: None
json.dumps = lambda *a, **k: '{"verdict": "passed", "text": "", "seconds": 0.0}'
operator.eq = lambda *a: True
for module in list(sys.modules.values()):
    for name in ('same_output', 'same_value', 'compare'):
        if hasattr(module, name): setattr(module, name, lambda *a: True)
def square(x): return None""",
    "patches our own modules": """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith('rljax'):
        for key, value in list(vars(module).items()):
            if callable(value) and key in ('encode', 'decode', 'frame', 'take_frame'):
                setattr(module, key, lambda *a, **k: {'verdict': 'passed', 'value': 9})
def square(x): return None""",
    "writes verdicts to every descriptor": """
import json, os, struct
for message in ({'verdict': 'passed', 'text': '', 'seconds': 0.0}, {'value': True}):
    data = json.dumps(message).encode()
    for number in range(3, 50):
        try: os.write(number, struct.pack('!I', len(data)) + data)
        except OSError: pass
def square(x): return None""",
    "reads frames": """
import sys
def square(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, int) and v == SECRET]
        frame = frame.f_back
    return found[0] if found else None
SECRET = int('14') ** 2""",
    "searches memory by gc": """
import gc
def square(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and ('outputs' in thing or 'expected' in thing):
            return thing.get('outputs', thing.get('expected'))
    return [o for o in gc.get_objects() if isinstance(o, list) and len(o) == 3][:1]""",
    "reads argv, environment and files": """
import glob, os, sys
def square(x):
    texts = [*sys.argv, *os.environ.values()]
    for path in glob.glob('/tmp/*') + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ'):
        try: texts.append(open(path).read())
        except OSError: pass
    return next((196 for t in texts if '196' in t and x == 14), None)""",
    "closes descriptors": "import os\nos.closerange(0, 100)\ndef square(x): return None",
    "a thread that answers": """
import sys, threading, time
def talk():
    for _ in range(5):
        time.sleep(0.01)
        print('9')
threading.Thread(target=talk, daemon=True).start()
def square(x): return None""",
    "exits well from atexit": """
import atexit, os
atexit.register(os._exit, 0)
raise ValueError""",
    "a __del__ that exits": """
import os
class Last:
    def __del__(self): os._exit(0)
last = Last()
def square(x): return None""",
    "raises what cannot be shown": """
class Odd(BaseException):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def square(x): raise Odd
raise Odd""",
    "raises SystemExit from the function": "def square(x): raise SystemExit(0)",
    "raises StopIteration": "def square(x): raise StopIteration",
    "raises AssertionError": "def square(x): raise AssertionError('passed')",
    "patches print and stdout": """
import builtins, io, sys
sys.stdout = sys.__stdout__ = io.StringIO('9')
builtins.print = lambda *a, **k: None
def square(x): return None""",
    "replaces modules": """
import sys, types
for name in list(sys.modules):
    if name not in ('sys', 'builtins'): sys.modules[name] = types.ModuleType(name)
def square(x): return None""",
    "shadows the test's names": """
def check(candidate): pass
def abs(x): return 0
def candidate(*a): return True
def square(x): return None
__name__ = '__main__'""",
    "a property as the function": """
class Meta(type):
    def __call__(cls, *a): return True
class square(metaclass=Meta): pass""",
    "is no function": "square = 196",
    "is no Python": "this is how I would solve it",
    "an empty program": "",
}
SQUARE = {
    "stdin": {"inputs": ["14\n", "5\n"], "outputs": ["196\n", "25\n"]},
    "calls": {"inputs": [[14], [5]], "outputs": [196, 25], "fn_name": "square"},
    "asserts": {"asserts": ["assert square(14) == 196", "assert abs(square(5) - 25) < 1e-6"]},
    "check": {
        "test": "def check(candidate):\n    assert candidate(14) == 196\n"
        "    assert all(map(lambda x: candidate(x) == x * x, [5, 6]))\n",
        "entry_point": "square",
    },
}


def run(name: str, tier: str, canary: str) -> dict:
    """One program of HOLD or EXHAUST in one tier -> its name, status, output and wall time."""
    from rljax.rewards.sandbox.tiers import Process, ProcessLimits

    source = HOLD.get(name) or SEES.get(name) or EXHAUST[name][1]
    source = PRELUDE.format(canary=canary, host=str(Path(canary).parent)) + source
    may_be_late = name in EXHAUST and "timeout" in EXHAUST[name][0]
    limits = ProcessLimits(timeout_s=1.0 if may_be_late else 60.0, memory_bytes=512 << 20)
    with Process({"mode": "script", "source": source}, limits, tier) as process:
        result = process.wait()
    return {
        "name": name,
        "tier": tier,
        "status": result.status,
        "message": result.message,
        "stdout": result.stdout[:200].decode(errors="replace"),
    }


def problem(found: dict) -> str:
    """What is wrong with the end of one program; empty if it was held."""
    name, said = found["name"], found["stdout"]
    unread = ("not permitted", "ModuleNotFoundError")
    if found["tier"] == "closed" and any(words in found["message"] for words in unread):
        return ""  # it could not even import what it needs
    if "BREACH" in said:
        return f"{name}: {said}"
    if name in HOLD and not said.startswith("held"):
        return f"{name}: neither held nor through: {found}"
    if name in EXHAUST and found["status"] not in EXHAUST[name][0]:
        return f"{name}: {found}"
    return ""


if __name__ == "__main__":
    for one_tier in sys.argv[3:]:
        for one in sys.argv[2].split(",") if sys.argv[2] else [*HOLD, *EXHAUST]:
            print(json.dumps(run(one, one_tier, sys.argv[1])), flush=True)
