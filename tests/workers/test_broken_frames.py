"""What a worker sends may be anything: its parent goes on, and whose code ran has failed."""

import dataclasses
import os
import pickle
import struct
import tempfile
import time

import pytest

from rljax.environments.messages import Step, is_step
from rljax.rewards.pool.jobs import Job, RewardCall
from rljax.rewards.pool.supervisor import _is_result
from rljax.workers.progress import PROGRESS_BYTES, WorkerProgress
from rljax.workers.wire import LARGEST_FRAME, BrokenFrame, frame, take_frame


class Runs:
    """Unpickled as it is, it would run a command."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def framed(payload: bytes) -> bytes:
    return struct.pack("!Q", len(payload)) + payload


WHOLE = pickle.dumps(("steps", [(0, Step(0), b"mark")]), protocol=5)
BROKEN = {
    "no pickle": framed(b"\x00\xffhello"),
    "nothing": framed(b""),
    "cut": framed(WHOLE[:-3]),
    "a byte changed": framed(WHOLE[:4] + b"\xff" + WHOLE[5:]),
    "a huge length": struct.pack("!Q", 2**63) + WHOLE,
    "a length just too large": struct.pack("!Q", LARGEST_FRAME + 1),
    "runs code": frame(Runs()),
    "a function of numpy that runs code": framed(
        b"cnumpy.testing._private.utils\nrunstring\n(Vopen('ran', 'w')\n}tR."
    ),
    "a class of others": frame(tempfile.SpooledTemporaryFile),
    "nested": framed(b"\x80\x05" + b"]" * 200_000 + b"a" * 100_000),
    "a huge memo": framed(b"\x80\x05r\xff\xff\xff\x7f."),
    "a huge text": framed(b"\x80\x05\x8d" + struct.pack("<Q", 2**62)),
    "a number of ten thousand digits": framed(b"I" + b"9" * 10_000 + b"\n."),
    "no text": framed(b"\x80\x05\x8c\x02\xff\xff."),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bytes_are_a_broken_frame(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenFrame):
        take_frame(bytearray(BROKEN[name]), (Step,))
    assert not (tmp_path / "ran").exists()


@pytest.mark.smoke
def test_a_whole_message_comes_through_with_what_is_behind_it():
    buffer = bytearray(framed(WHOLE) + b"next")
    assert take_frame(buffer, (Step,)) == ("steps", [(0, Step(0), b"mark")])
    assert buffer == b"next" and take_frame(buffer) is None


STEPS = [
    None,
    {},
    Step,
    dataclasses.asdict(Step(0)),
    *(
        dataclasses.replace(Step(0), **{field: value})
        for field, value in [
            ("episode", "0"),
            ("seat", 3),
            ("ids", [1]),
            ("ids", ("a",)),
            ("ids", (-1,)),
            ("ids", (2**40,)),
            ("reward", "1"),
            ("parts", None),
            ("parts", {"a": "b"}),
            ("parts", {1: 2.0}),
            ("state", "text"),
            ("ended", 1),
            ("outcome", [1.0]),
            ("outcome", {"": None}),
            ("failure", None),
            ("seconds", "1"),
            ("messages", ("a",)),
            ("messages", None),
            ("mark", "text"),
            ("calls", 1.5),
        ]
    ),
]


def test_only_a_step_of_the_right_kinds_is_a_step():
    whole = dataclasses.replace(
        Step(3), ids=(1, 2), parts={"a": 1.0}, outcome={"": 0.5}, messages=({"role": "user"},)
    )
    assert is_step(whole) and is_step(Step(0, reward=1))
    assert not any(map(is_step, STEPS))
    bare = object.__new__(Step)  # as a pickle may make it, with no field at all
    assert not is_step(bare)


def test_only_what_is_a_result_of_the_task_is_a_result():
    call = RewardCall(Job(1), (0,), b"", number=7)
    good = (7, [("ok", 1.0, {"score": 1.0}, "")], 0.1, (0.1, False))
    assert _is_result(good, call)
    wrong = [
        None,
        good[:3],
        (8, *good[1:]),
        (7, [], *good[2:]),
        (7, None, *good[2:]),
        (7, [("fine", 1.0, {}, "")], *good[2:]),
        (7, [("ok", "1", {}, "")], *good[2:]),
        (7, [("ok", 1.0, [], "")], *good[2:]),
        (7, [("ok", 1.0, {1: 1.0}, "")], *good[2:]),
        (*good[:2], "x", good[3]),
        (*good[:3], None),
        (*good[:3], (None, False)),
    ]
    assert not any(_is_result(one, call) for one in wrong)


@pytest.mark.parametrize("clock", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_clock_that_cannot_be_is_a_deadline_long_past(clock, tmp_path):
    with open(tmp_path / "progress", "w+b") as file:
        file.write(bytes(PROGRESS_BYTES))
        file.flush()
        progress = WorkerProgress(file.fileno())
    progress.write(3, clock)
    assert progress.read() == (3, 0.0, False)
    now = time.monotonic()
    progress.write(3, now, True)
    assert progress.read() == (3, now, True)
