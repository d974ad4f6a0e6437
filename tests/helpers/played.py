"""Environments that misbehave as they are told to, in a module that workers import, and a driver
that plays them with scripted replies."""

import time
import zlib
from pathlib import Path

from rljax.data.text.tokenizer import CharTokenizer
from rljax.environments.messages import EpisodeLimits, Step

CHARS = CharTokenizer("".join(map(chr, range(32, 127))) + "\n")
LIMITS = EpisodeLimits(calls="", max_tokens=1 << 20, max_reply_tokens=4096, turn_timeout_s=2.0)

SOURCE = '''
import asyncio, ctypes, os, pickle, random, signal, socket, struct, sys, time
from rljax.contracts import contract
from rljax.environments import Done, Turn

def write_to_streams(data):
    """Writes to every socket of this process, that of its parent among them."""
    for fd in range(3, 100):
        try:
            with socket.socket(fileno=os.dup(fd)) as stream:
                stream.sendall(data)
        except OSError:
            pass

def framed(payload):
    return struct.pack("!Q", len(payload)) + payload

def misbehave(what):
    """Does what it is told; what it is not is said."""
    if what == "raise":
        raise ValueError("no luck")
    if what == "hang":
        while True:
            pass
    if what == "hang in C":
        5 ** (5 ** (5 ** 5))
    if what == "sleep":
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit("bye")
    if what == "segfault":
        ctypes.string_at(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "recurse":
        return misbehave("recurse")
    if what == "allocate":
        return "x" * (1 << 40)
    if what == "close":
        os.closerange(3, 100)
    if what == "send garbage":
        write_to_streams(os.urandom(100))
    if what == "send no pickle":
        write_to_streams(framed(b"hello"))
    if what == "send a huge length":
        write_to_streams(struct.pack("!Q", 2**62))
    if what == "send other values":
        write_to_streams(framed(pickle.dumps(("steps", [(0, None, b"")]))))
    if what == "send a failed start":
        write_to_streams(framed(pickle.dumps(("failed", "on purpose"))))
    if what == "send half a message":
        write_to_streams(struct.pack("!Q", 1000) + b"half")
    if what == "fork" and os.fork() == 0:
        return "the child is here"
    if what == "fork and exit" and os.fork() == 0:
        sys.exit(0)
    if what == "print":
        print("printed")
        os.write(1, b"raw\\n")
        print("to stderr", file=sys.stderr)
    if what == "slow":
        time.sleep(0.3)
    if what == "flood":
        return "x" * 50_000_000
    if what.startswith("pid"):
        return str(os.getpid())
    return "did " + what

def act(plan):
    """One thing for each turn; then the outcome."""
    reply = yield "go"
    for what in plan:
        reply = yield misbehave(what)
    return 1.0

MEETINGS = {}

async def meet(count, turn):
    """Returns when so many have come."""
    come, all_here = MEETINGS.setdefault(turn, ([], asyncio.Event()))
    come.append(turn)
    if len(come) == count:
        all_here.set()
    await all_here.wait()

async def act_async(plan):
    reply = yield "go"
    for turn, what in enumerate(plan):
        if what.startswith("meet "):
            await meet(int(what.removeprefix("meet ")), turn)
        if what == "wait":
            await asyncio.sleep(600)
        if what == "stubborn":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        if what.startswith("nap "):
            await asyncio.sleep(float(what.removeprefix("nap ")))
        if what == "task":
            asyncio.get_running_loop().call_soon(misbehave, "hang")
            await asyncio.sleep(0.01)
        yield misbehave(what)
    yield Done(1.0)

def echo(salt, turns, guilty_at=-1, what="hang", once=""):
    """Says a hash of all it has heard; at a turn it misbehaves."""
    heard = salt
    for turn in range(turns):
        reply = yield Turn(heard[-40:], reward=0.5 * (turn > 0), state=(turn, len(heard)))
        heard = f"{heard}|{reply}"
        if turn == guilty_at and not (once and os.path.exists(once)):
            if once:
                open(once, "w").close()
            misbehave(what)
    return 1.0

async def storm(plan, seed, turns):
    """Waits, says much, and does at one turn what `plan` says."""
    draw = random.Random(seed)
    what, at = plan
    for turn in range(turns):
        reply = yield "x" * draw.randrange(3000)
        if turn == at:
            misbehave(what)
        await asyncio.sleep(draw.uniform(0.0, 2.0) * SCALE)
    yield Done(1.0)

SCALE = float(os.environ.get("STORM_SCALE", "1"))

@contract(repeatable=False)
def live(salt, turns, guilty_at=-1, what="hang", once=""):
    return echo(salt, turns, guilty_at, what, once)

def unsteady(what):
    """Says which process it is in, which no other says."""
    reply = yield "go"
    reply = yield str(os.getpid())
    misbehave(what)
    reply = yield "on"
    return 1.0

def closes(path):
    try:
        while True:
            yield "?"
    finally:
        with open(path, "a") as file:
            file.write("closed\\n")

def hangs_at_its_end(path):
    try:
        while True:
            yield "?"
    finally:
        time.sleep(600)

async def hangs_behind_its_outcome():
    try:
        yield "?"
        yield Done(1.0)
    finally:
        time.sleep(600)

def remembers(prompt, size=0):
    kept = bytearray(size)
    yield f"{len(kept)} {prompt}"
    return 1.0
'''


def write_environments(folder: Path) -> None:
    (folder / "users_played.py").write_text(SOURCE)


def script(number: int, turn: int, length: int = 8) -> list[int]:
    """A reply that depends on the episode and the turn alone."""
    digits = str(zlib.crc32(b"%d %d" % (number, turn))) * (1 + length // 8)
    return [*CHARS.encode(digits[:length]), CHARS.eos_ids[0]]


class Played:
    """What a driver has seen of one episode."""

    def __init__(self):
        self.steps: list[Step] = []
        self.log: list[int] = []
        self.restarts = self.turns = 0

    def add(self, step: Step) -> None:
        assert not (self.steps and self.steps[-1].ended), "a step after the end"
        if step.restart:
            self.steps, self.log, self.turns = [], [], 0
            self.restarts += 1
        assert step.ended or step.new_row == (not self.steps)
        self.steps.append(step)
        self.log += step.ids

    @property
    def end(self) -> Step:
        return self.steps[-1]


def play(crew, rows: dict[int, dict], *, seconds=300.0, turn=script) -> dict[int, Played]:
    """Plays all episodes to their ends: {number: Played}."""
    found = {number: Played() for number in rows}
    for number, fields in rows.items():
        crew.admit(number, fields, seed=1, sample_seed=number)
    deadline = time.monotonic() + seconds
    left = set(rows)
    while left:
        assert time.monotonic() < deadline, (
            f"{len(left)} episodes have not ended: {sorted(left)[:9]}"
        )
        for step in crew.news(0.2):
            played = found[step.episode]
            played.add(step)
            if step.ended:
                left.remove(step.episode)
                continue
            ids = turn(step.episode, played.turns)
            played.turns += 1
            played.log += ids
            crew.reply(step.episode, ids, "stop", 5, 1000)
    assert crew.pending == 0
    return found
