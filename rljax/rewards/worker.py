"""One worker process of a `RewardPool`, and the call of one reward on one sample.

What lives here: which fields a reward is handed (`wanted_fields`, `call_reward`) and the loop that
a worker runs. What does not: starting, timing and killing workers (`pool.py`). Imports nothing
heavy.

The wire, both ways, is frames of an 8-byte length and a pickle.
  pool -> worker   a chunk: [(index, pickled sample), ...]
  worker -> pool   ("ready", "") or ("failed", message) once; then
                   ("scored", [(index, status, value, parts, seconds, message), ...]) until the
                   chunk is done
Which sample is running, and since when, stands in 16 bytes of shared memory (`Progress`): that
costs no system call per sample, and the pool can read it even while the worker is stuck.
"""

import fcntl
import inspect
import json
import math
import mmap
import numbers
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args, get_origin

from rljax.components import Component, resolve
from rljax.errors import InputError

HOME = "rljax.rewards"
FIELDS = (
    "response",
    "ground_truth",
    "prompt",
    "data_source",
    "extra_info",
    "num_tokens",
    "finish_reason",
)
_HEADER = struct.Struct("!Q")
_ORPHAN_POLL_S = 5.0
OWN_LIMIT_MARGIN_S = 1.5
_FLUSH_S = 0.001  # results are sent together if they took less: one wake-up of the pool, not many
_MESSAGE_CHARS = 500


# (the fields that a reward declares, None for all of them: `**kwargs`; those without a default)
Fields = tuple[tuple[str, ...] | None, tuple[str, ...]]


def wanted_fields(component: Component) -> Fields:
    """Which fields of a sample the reward is handed, and which of them it cannot do without.

    Raises InputError for a reward that no sample can satisfy, and for an option outside a
    `Literal[...]`.
    """
    if inspect.iscoroutinefunction(component.function):
        raise InputError(
            f"reward {component.name!r} is async",
            rule="a reward is a plain function; the pool runs many at once",
            fix="wrap it: def reward(...): return asyncio.run(async_reward(...))",
        )
    names, required, takes_all = [], [], False
    for name, parameter in inspect.signature(component.function).parameters.items():
        takes_all |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in component.options:
            _check_literal(component, name, parameter.annotation)
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(
                f"reward {component.name!r} takes {name!r} by position only",
                rule="a reward is called with keywords",
                fix="remove the '/' from its signature",
            )
        names.append(name)
        if parameter.default is parameter.empty:
            required.append(name)
    unknown = [name for name in required if name not in FIELDS]
    if unknown:
        raise InputError(
            f"reward {component.name!r} needs {unknown[0]!r}, which no sample has",
            rule=f"the fields of a sample are {', '.join(FIELDS)}",
            fix=f"rename it, give it a default, or bind it: '{component.name}({unknown[0]}=...)'",
        )
    return (None if takes_all else tuple(names)), tuple(required)


def _check_literal(component: Component, name: str, annotation: object) -> None:
    value = component.options[name]
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        raise InputError(
            f"option {name!r} of reward {component.name!r}",
            value=value,
            rule=f"it is one of {', '.join(map(repr, get_args(annotation)))}",
        )


def check_own_limit(component: Component, timeout_s: float) -> None:
    """A reward with a limit of its own, total_timeout_s, must end before the pool ends it.

    Raises InputError: a program that uses up its time is a score, a sample that the pool kills is
    not one.
    """
    parameter = inspect.signature(component.function).parameters.get("total_timeout_s")
    if parameter is None:
        return
    own = component.options.get("total_timeout_s", parameter.default)
    if isinstance(own, int | float) and own + OWN_LIMIT_MARGIN_S > timeout_s:
        raise InputError(
            f"reward {component.name!r}: total_timeout_s",
            value=own,
            rule=f"the pool kills a sample after reward.timeout_s={timeout_s}, and starting and "
            f"ending programs takes up to {OWN_LIMIT_MARGIN_S} s of that",
            fix=f"set reward.timeout_s to {own + OWN_LIMIT_MARGIN_S} or more, or lower "
            "total_timeout_s",
        )


def call_reward(
    component: Component, sample: Mapping, fields: Fields | None = None
) -> tuple[float, dict[str, float]]:
    """The reward of one sample -> (value, named parts); `parts["score"] == value` always.

    Raises InputError if the sample lacks a field, TypeError or ValueError if the reward returned
    anything but a finite number or a dict of finite numbers that contains "score", and whatever the
    reward raises. `fields`: what `wanted_fields` said, to save the inspection on every call.
    """
    names, required = fields or wanted_fields(component)
    for name in required:
        if name not in sample:
            raise missing_field(component, name, sample)
    if names is None:
        chosen = {name: value for name, value in sample.items() if name not in component.options}
    else:
        chosen = {name: sample[name] for name in names if name in sample}
    returned = component(**chosen)
    parts = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in parts:
        raise ValueError(f"the reward returned a dict without 'score': {_shown(list(parts))}")
    checked = {str(name): _finite(name, value) for name, value in parts.items()}
    return checked["score"], checked


def missing_field(component: Component, name: str, sample: Mapping) -> InputError:
    """The error for a sample that lacks a field which its reward requires."""
    return InputError(
        f"reward {component.name!r} needs {name!r}, which this sample lacks",
        value=sorted(map(str, sample)),
        fix=f"add {name!r} to the data, or give the parameter a default",
    )


def _finite(name: object, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"the reward returned {_shown(value)} ({type(value).__name__}) as {name!r}: no number"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {number} as {name!r}, not a finite number")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


class Progress:
    """(index, clock) of the sample that a worker is on, in a file that both processes map.

    `clock` is `time.monotonic()`, one clock for all processes of a machine. Index -1: none of the
    chunk yet.
    """

    def __init__(self, descriptor: int):
        self._map = mmap.mmap(descriptor, 16)

    def write(self, index: int, clock: float):
        struct.pack_into("d", self._map, 8, clock)
        struct.pack_into("q", self._map, 0, index)

    def read(self) -> tuple[int, float]:
        while True:  # until two reads agree: the other side may be half-way through a write
            first, second = (struct.unpack_from("qd", self._map) for _ in range(2))
            if first == second:
                return first


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame's bytes; None at the end of the stream."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _HEADER.unpack(header)[0])


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return data


def frame(message: object) -> bytes:
    """A message as it goes on the wire."""
    payload = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(payload)) + payload


def take_frame(buffer: bytearray) -> object | None:
    """Remove the first whole frame from the buffer and return its message; None if none yet."""
    if len(buffer) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    message = pickle.loads(memoryview(buffer)[_HEADER.size : end].tobytes())
    del buffer[:end]
    return message


def main(spec_text: str) -> None:
    """Run as a worker. `spec_text`: JSON of the reward's text, descriptors, parent's pid."""
    # The pool stops its workers. A Ctrl-C or a scheduler's SIGTERM is the launcher's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = json.loads(spec_text)
    _die_with(spec["lifeline"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes must not fill the disk
    sys.stdout.reconfigure(line_buffering=True)  # what a reward prints survives the kill
    sock = socket.socket(fileno=spec["socket"])
    sock.set_inheritable(False)  # a process that the reward starts must not keep the stream open
    progress = Progress(spec["progress"])
    os.close(spec["progress"])
    try:
        component = resolve(spec["reward"], HOME)
        fields = wanted_fields(component)
        _prepare_sandbox(component)
    except BaseException as error:
        sock.sendall(frame(("failed", _describe(error))))
        return
    sock.sendall(frame(("ready", "")))
    try:
        _serve(
            sock, lambda sample: call_reward(component, sample, fields), progress, spec["parent"]
        )
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool was closed while a sample ran


def _prepare_sandbox(component: Component) -> None:
    """Try the sandbox of a reward that runs programs: without one nothing is scored (InputError)
    and the pool says so when it is made, not sample by sample."""
    parameter = inspect.signature(component.function).parameters.get("allow_unsafe_execution")
    if parameter is not None:
        from rljax.rewards.sandbox import sandbox_tier

        tier = sandbox_tier(component.options.get(parameter.name, parameter.default))
        print(f"reward {component.name!r}: sandbox tier {tier!r}", file=sys.stderr)


def _die_with(lifeline: int) -> None:
    """End this process when the parent ends, even inside a C call that holds the interpreter lock.

    The lifeline is a pipe on which nothing is ever written. When its other end closes, the kernel
    sends SIGIO, whose default action ends the process. (PR_SET_PDEATHSIG would fire when the
    parent's *thread* ends.)
    """
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _readable(lifeline, 0.0):
        sys.exit()  # it closed before we listened


def _readable(descriptor: int, seconds: float) -> bool:
    # select() refuses descriptors above 1023, and ours have the numbers that the parent gave them.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _serve(sock: socket.socket, score: Callable, progress: Progress, parent: int) -> None:
    """Score chunks until the pool closes the stream."""
    me = os.getpid()
    while True:
        # A fork of the parent may hold the stream open after the parent's death: look ourselves.
        while not _readable(sock.fileno(), _ORPHAN_POLL_S):
            if os.getppid() != parent:
                return
        data = read_frame(sock)
        if data is None:
            return
        chunk = pickle.loads(data)
        clock = flushed = time.monotonic()
        found = []
        for index, blob in chunk:
            progress.write(index, clock)
            status, value, parts, message = _score_one(score, blob)
            if os.getpid() != me:  # the reward forked and its child came back to our stream
                os._exit(1)
            began, clock = clock, time.monotonic()
            found.append((index, status, value, parts, clock - began, message))
            if clock - flushed > _FLUSH_S:
                sock.sendall(frame(("scored", found)))
                found, clock = [], time.monotonic()
                flushed = clock
        if found:
            sock.sendall(frame(("scored", found)))


def _score_one(score: Callable, blob: bytes) -> tuple[str, float, dict[str, float], str]:
    """(status, value, parts, message) of one sample, whatever the reward raises."""
    try:
        value, parts = score(pickle.loads(blob))
    except BaseException as error:  # a reward's SystemExit and KeyboardInterrupt are errors too
        return "error", math.nan, {}, _describe(error)
    return "ok", value, parts, ""


def _describe(error: BaseException) -> str:
    """An exception as one short line, even if its own text raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS]
    except BaseException:
        return type(error).__name__
