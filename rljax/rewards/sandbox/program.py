"""Runs in a forked and confined process: a program, its functions on request, or tests.

The three modes of such a process, and the stand-ins through which tests call a program that lives
in another one.

The first frame on the channel is the mode:
  script  {"source"}                run it as __main__; stdin and stdout are its own
  calls   {"source", "names"}       run it, then answer requests; what it prints is dropped
  check   {"units", "names", ...}   trusted tests, unit by unit; a call in them is a request
With "judge" a program finds what sites with judges import above every program.
Whatever a program does to this process, it has no expected output to read: in `script` and `calls`
those are compared outside, in `check` they are in another process than the program.
"""

import atexit
import builtins
import collections
import functools
import importlib
import io
import os
import site
import sys
import threading
import time
import traceback
import types
import typing
from collections.abc import Iterable

from rljax.rewards.sandbox.cases import run_case
from rljax.rewards.sandbox.values import (
    ObjectReference,
    WireError,
    decode,
    encode,
    frame,
    take_frame,
)

# Imported before the fork: what programs import most, so that they need not.
for _name in (
    "array bisect cmath copy dataclasses datetime decimal enum fractions functools "
    "heapq itertools json math operator queue random re statistics string struct typing"
).split():
    importlib.import_module(_name)

# Modules that judges import above a program, by name and by *, as LiveCodeBench's and verl's do. Of
# two modules with a name the first one counts: as there, operator's sub comes before that of re,
# and against their order Counter is that of collections, which typing's only stands for.
_OF_JUDGES = (
    "json sys io operator functools itertools statistics random math copy bisect heapq collections "
    "datetime re string typing"
).split()
_RECURSION_OF_JUDGES = 50_000  # LiveCodeBench's
site.setquit()  # exit() and quit(), which -S leaves out
_MESSAGE_CHARS = 500
_MOST_FRAMES = 1_000  # frames of a traceback: as many as an endless recursion has by default
MODULE = "__program__"


class Channel:
    """Frames over one descriptor, read and written with blocking calls."""

    def __init__(self, descriptor: int):
        self.descriptor, self.buffer = descriptor, bytearray()

    def receive(self) -> dict:
        """Waits for the next message. Exits the process if the other side has closed
        the channel."""
        while (message := take_frame(self.buffer)) is None:
            data = os.read(self.descriptor, 1 << 16)
            if not data:
                os._exit(0)  # it is not called any more
            self.buffer += data
        return message

    def send(self, message: dict) -> None:
        """Sends a message. Raises WireError if it cannot be sent."""
        data = memoryview(frame(message))
        while data:
            data = data[os.write(self.descriptor, data) :]


def describe(error: BaseException) -> str:
    """Describes an exception in one short line, even if its own text raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS]
    except BaseException:
        return type(error).__name__


def failure(error: BaseException) -> bytes:
    """The frame of a process that could not be confined: the sandbox's failure, not
    the program's."""
    return frame({"broken": describe(error)})


def main(descriptor: int) -> None:
    """Runs as a program's process. Never returns."""
    try:
        channel = Channel(descriptor)
        channel.send({"confined": True})
        header = channel.receive()
        stdin = io.BufferedReader(io.FileIO(0, "r", closefd=False), 1 << 16)
        sys.stdin = io.TextIOWrapper(stdin, encoding="utf-8")
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False), 1 << 16)
            text = io.TextIOWrapper(raw, encoding="utf-8", line_buffering=number == 2)
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)
        sys.__stdin__ = sys.stdin
        sys.argv = [header.get("name", "program.py")]
    except BaseException as error:
        os.write(descriptor, failure(error))
        os._exit(1)
    modes = {"script": _run_script, "calls": _answer_calls, "check": _check}
    try:
        modes[header["mode"]](channel, header)
    except BaseException as error:  # a value that is too large to send, a channel that was closed
        os._exit(_exit_code(error) or 1)
    os._exit(0)


# -- script


def _run_script(channel: Channel, header: dict) -> None:
    os.close(channel.descriptor)
    code = 0
    try:
        if header.get("judge"):
            _import_as_judges()
        _run_source(header["source"], "__main__")
    except BaseException as error:
        code = _exit_code(error)
    try:
        threading._shutdown()  # as at the end of any program: threads, then atexit, then flush
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        code = code or _exit_code(error)
    os._exit(code)


def _import_as_judges() -> None:
    """Gives this process the names that judges import. They stand behind Python's own, not among
    the program's: a test of `add` must not find operator's in a program that defines none."""
    modules = {name: sys.modules[name] for name in _OF_JUDGES}
    for name, module in modules.items():
        vars(builtins).setdefault(name, module)
    for module in modules.values():
        _name(module, getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"])
    sys.setrecursionlimit(_RECURSION_OF_JUDGES)


def _name(module: types.ModuleType, names: Iterable[str]) -> None:
    """Gives this process names of a module, behind Python's own: functions, and tests, are often
    written with List and Optional in mid-air."""
    for name in names:
        vars(builtins).setdefault(name, getattr(module, name))


def _run_source(source: str, name: str) -> dict:
    """Returns the program's names after it ran. Raises the exception that it raises."""
    module = types.ModuleType(name)
    module.__file__ = "program.py"
    sys.modules[name] = module
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _exit_code(error: BaseException) -> int:
    """Returns the code that the interpreter would exit with, and writes the traceback to stderr."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    try:
        # Our own frames do not help a reader.
        frames = error.__traceback__.tb_next
        traceback.print_exception(type(error), error, frames, limit=-_MOST_FRAMES)
        sys.stderr.flush()
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode())
    return 1


# -- calls


def _answer_calls(channel: Channel, header: dict) -> None:
    objects: list[object] = []

    def refer(value: object) -> ObjectReference:
        objects.append(value)
        kind = "function" if callable(value) else "object"  # a cached function is one, too
        return ObjectReference(len(objects) - 1, "class" if isinstance(value, type) else kind)

    def resolve(reference: ObjectReference) -> object:
        return objects[reference.number]

    try:
        if header.get("judge"):
            _import_as_judges()
        _name(typing, typing.__all__)
        names = _run_source(header["source"], MODULE)
        results = {}
        for name in header["names"]:
            if name in names:
                value = names[name]
            elif hasattr(names.get("Solution"), name):  # a method, as sites with judges ask for
                value = getattr(names["Solution"](), name)
            else:
                continue
            module = isinstance(value, types.ModuleType)
            results[name] = {"module": value.__name__} if module else encode(value, refer)
    except BaseException as error:
        channel.send({"raised": type(error).__name__, "text": describe(error)})
        os._exit(1)
    channel.send({"loaded": results})
    while True:
        request = channel.receive()
        try:
            target = resolve(ObjectReference(request["target"], ""))
            arguments = [decode(a, resolve) for a in request["args"]]
            keywords = {k: decode(a, resolve) for k, a in request["kwargs"].items()}
            value = _apply(request["do"], target, arguments, keywords)
            answer = {"value": encode(value, refer)}
            new_arguments = [encode(a, refer) for a in arguments]
            if new_arguments != request["args"]:  # a function that works in place
                answer["args"] = new_arguments
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": describe(error)}
        channel.send(answer)


def _apply(do: str, target: object, arguments: list, keywords: dict) -> object:
    if do == "call":
        return target(*arguments, **keywords)
    if do == "attribute":
        return getattr(target, *arguments)
    if do == "set":
        return setattr(target, *arguments)
    unary = dict(length=len, iterate=iter, next=next, text=str, show=repr, truth=bool)
    functions = {**unary, "equal": lambda a, b: bool(a == b), "item": lambda a, b: a[b]}
    return functions[do](target, *arguments)


# -- check


class ProgramError(Exception):
    """The error that stands for an exception of the program that has no class here, or
    for its end."""


class _Program:
    """The channel to the program, as tests see it."""

    def __init__(self, channel: Channel):
        self.channel = channel

    def ask(self, do: str, target: int, args: tuple = (), kwargs: dict | None = None, made=False):
        kwargs = kwargs or {}
        positional = [encode(a, _own_reference) for a in args]
        keywords = {k: encode(a, _own_reference) for k, a in kwargs.items()}
        self.channel.send({"do": do, "target": target, "args": positional, "kwargs": keywords})
        answer = self.channel.receive()
        if "raised" in answer:
            raise _exception(answer, do)
        for argument, changed in zip(args, answer.get("args") or (), strict=False):
            _copy_into(argument, decode(changed, self.resolve))
        return decode(answer.get("value"), lambda reference: self.resolve(reference, made))

    def resolve(self, reference: ObjectReference, made: bool = False) -> "Remote":
        # The program may call anything a class, and what a class makes answers for itself.
        kind = "function" if reference.kind == "class" else reference.kind
        return Remote(self, ObjectReference(reference.number, kind), made)

    def resolve_name(self, name: str, reference: ObjectReference) -> "Remote":
        """The object that the tests call by name: a class if they write it with a capital, as
        `Stack`."""
        is_class = reference.kind == "class" and name.lstrip("_")[:1].isupper()
        kind = "class" if is_class else "function"
        return Remote(self, ObjectReference(reference.number, kind), False)


def _own_reference(value: object) -> ObjectReference:
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_reference")
    raise WireError(f"a test hands the program a {type(value).__name__}, which cannot be sent")


def _exception(answer: dict, do: str) -> BaseException:
    """Returns the exception as one of Python's own classes if it is one, but never as one with
    which a program could end the tests."""
    kind = getattr(builtins, str(answer["raised"]), None)
    fits = isinstance(kind, type) and issubclass(kind, Exception)
    # Out of a call, StopIteration would end the loop of a test early: all(map(...)) of nothing.
    fits = fits and (do == "next" or not issubclass(kind, StopIteration | StopAsyncIteration))
    text = str(answer.get("text"))[:_MESSAGE_CHARS]
    if not fits or kind in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError):
        return ProgramError(text)
    try:
        return kind(text.partition(": ")[2])
    except Exception:  # exception groups
        return ProgramError(text)


def _copy_into(argument: object, changed: object) -> None:
    """Copies into our argument what a function that works in place did to its own."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set | collections.deque):
        argument.clear()
        (argument.extend if isinstance(argument, collections.deque) else argument.update)(changed)


class Remote:
    """An object of the program, as the tests see it.

    The program answers for it, so a test may use only operations that reveal no expected value:
    calls, attributes, items, iteration, length, text. `==` with a value of the test's own is False,
    and so is `in`; there is no arithmetic and no order. Methods are callable on instances that the
    test made itself of a class that it names with a capital, `Solution().f(2)`, not on what a
    function returned: that one could define `startswith` to be always true.
    """

    __slots__ = ("_program", "_reference", "_made", "_callable")

    def __init__(
        self, program: _Program, reference: ObjectReference, made: bool, callable_: bool = True
    ):
        self._program, self._reference = program, reference
        self._made, self._callable = made, callable_ and reference.kind != "object"

    def __call__(self, *args, **kwargs):
        if not self._callable:
            raise TypeError("a method of what a program returned is not called by its tests")
        made = self._reference.kind == "class"
        return self._program.ask("call", self._reference.number, args, kwargs, made)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._program.ask("attribute", self._reference.number, (name,))
        if isinstance(value, Remote):
            allowed = self._made or self._reference.kind == "class"
            return Remote(self._program, value._reference, False, allowed)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if name in Remote.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._program.ask("set", self._reference.number, (name, value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        return bool(self._program.ask("equal", self._reference.number, (other,)))

    def __hash__(self) -> int:
        return self._reference.number

    def __len__(self) -> int:
        return self._program.ask("length", self._reference.number)

    def __getitem__(self, key: object):
        return self._program.ask("item", self._reference.number, (key,))

    def __iter__(self):
        return self._program.ask("iterate", self._reference.number)

    def __next__(self):
        return self._program.ask("next", self._reference.number)

    def __bool__(self) -> bool:
        return bool(self._program.ask("truth", self._reference.number))

    def __str__(self) -> str:
        return str(self._program.ask("text", self._reference.number))

    def __repr__(self) -> str:
        return str(self._program.ask("show", self._reference.number))


def _stand_in(paths: list[str], names: dict[str, object]) -> None:
    """Makes modules of these dotted paths, and of the packages that they name, with `names`."""
    modules: dict[str, types.ModuleType] = {}
    for path in paths:
        parent, name = None, ""
        for part in path.split("."):
            name = f"{name}.{part}" if name else part
            module = modules.setdefault(name, types.ModuleType(name))
            vars(module).update(names)
            if parent:
                setattr(parent, part, module)
            parent = sys.modules[name] = module


def _check(channel: Channel, header: dict) -> None:
    """Runs the units of a test one after another; each sends its verdict. Modules that stand for
    the program have its names."""
    _name(typing, [name for name in typing.__all__ if name[0].isupper()])  # types, no functions
    program = _Program(channel)
    module = sys.modules["__test__"] = types.ModuleType("__test__")
    names = module.__dict__
    for name, data in header["names"].items():
        if isinstance(data, dict) and "module" in data:
            names[name] = importlib.import_module(data["module"])
        else:
            names[name] = decode(data, functools.partial(program.resolve_name, name))
    _stand_in(header["modules"], {name: names[name] for name in header["names"]})
    names["__run_case__"] = functools.partial(run_case, names)
    for unit in header["units"]:
        status, text, began = "passed", "", time.monotonic()
        try:
            exec(compile(unit["source"], "tests.py", "exec", dont_inherit=True), names)
        except AssertionError as error:
            status, text = "failed", describe(error)
        except BaseException as error:
            status, text = "error", describe(error)
        seconds = time.monotonic() - began
        channel.send({"verdict": status, "text": text, "seconds": seconds})
