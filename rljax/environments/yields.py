"""Reads and checks what an environment yields and returns: turns, states, outcomes.

Anything that contract.py does not allow raises BadYield: it is the environment's fault.
"""

import dataclasses
import enum
import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.contracts import MOST_REWARD
from rljax.data.text.messages import validate_messages
from rljax.environments.contract import Done, Opening, Turn
from rljax.errors import InputError

OWN_PARTS = ("outcome", "turn_rewards")  # parts that the rows of every episode have


class BadYield(Exception):
    """The error for a yield, or a return value, that the contract of environments does
    not allow."""


def turn_of(yielded: object) -> Turn:
    """A yield as a `Turn`; a bare one belongs to the seat "". Its observation is None or a list of
    messages; a text becomes a message of the user. Raises BadYield for an observation that is no
    text, message or list of messages, and for a seat, a reward, parts or limits of another
    type."""
    if isinstance(yielded, Opening):
        limits = dict(stop=yielded.stop, max_tokens=yielded.max_tokens)
        fields = dict(reward=yielded.reward, state=yielded.state, seat=yielded.seat)
        turn = Turn(yielded.messages, **fields, **limits)
    elif isinstance(yielded, Turn):
        turn = yielded
    else:
        turn = Turn(yielded)
    if not isinstance(turn.seat, str):
        raise BadYield(f"a seat is a text, not {shown(turn.seat)}")
    parts = turn.parts
    if not isinstance(parts, Mapping):
        raise BadYield(f"the parts of a turn are named numbers, not {shown(parts)}")
    max_tokens = turn.max_tokens
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise BadYield(f"max_tokens of a turn is a whole number from 0, not {shown(max_tokens)}")
    return dataclasses.replace(
        turn,
        seat=str(turn.seat),
        observation=_messages(turn.observation),
        reward=finite(turn.reward, "the reward of a turn"),
        parts=_parts(parts),
        stop=_stops(turn.stop),
        max_tokens=int(max_tokens),
    )


def refuse_early_reward(turn: Turn) -> None:
    """Raises BadYield for a first turn with a reward or parts, which no reply has earned."""
    if turn.reward or any(turn.parts.values()):
        parts = f"the parts {shown(turn.parts)}"
        given = f"the reward {turn.reward:g}" if turn.reward else parts
        raise BadYield(
            f"its first yield has {given}: reward and parts of a turn belong to the reply before "
            "it, and there is none. Yield them with the turn after the reply, or return them"
        )


def _stops(stops: object) -> tuple[str, ...]:
    if not isinstance(stops, list | tuple) or not all(
        isinstance(text, str) and text for text in stops
    ):
        raise BadYield(f"stop of a turn is a list of texts, none of them empty, not {shown(stops)}")
    return tuple(map(str.__str__, stops))


def _messages(observation: object) -> list[dict] | None:
    if observation is None:
        return None
    if isinstance(observation, str):
        observation = [{"role": "user", "content": str(observation)}]
    elif isinstance(observation, Mapping):
        observation = [observation]
    if not isinstance(observation, list | tuple):
        raise BadYield(
            f"it yielded {shown(observation)} ({type(observation).__name__}): neither a text, a "
            "message, a list of messages, nor a Turn"
        )
    if not observation:
        raise BadYield("it yielded an empty list of messages; Turn(None) is: nothing new to read")
    try:
        return _plain(validate_messages(list(observation), where="what it yielded"))
    except InputError as error:
        raise BadYield(str(error)) from None


def _plain(value: object) -> object:
    """Returns a copy of plain values, the only ones that can be sent to another process. Texts of a
    subclass of str, such as members of an enumeration, become texts."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | np.ndarray | np.generic):
        return value
    if type(value) in (int, float, bytes):
        return value
    raise BadYield(f"a message holds {shown(value)} ({type(value).__name__}): no plain value")


def outcome_of(returned: object, seats: Sequence[str]) -> tuple[dict | None, dict[str, float]]:
    """Returns ({seat: score}, or None if `reward.function` scores; named parts). Raises BadYield
    unless the outcome is a finite number, parts with "score", or a score for each seat."""
    if isinstance(returned, Done):
        returned = returned.outcome
    if returned is None:
        return None, {}
    if not isinstance(returned, Mapping):
        return dict.fromkeys(seats, finite(returned, "the outcome")), {}
    if "score" in returned and "score" not in seats:
        score, parts = _with_parts(returned)
        return dict.fromkeys(seats, score), parts
    if set(returned) != set(seats):
        raise BadYield(
            f"the outcome has the names {shown(list(returned))}: either parts with 'score', or a "
            f"number for each seat, {list(seats)}"
        )
    scores, parts = {}, {}
    for seat in seats:
        scores[seat], seat_parts = _with_parts(returned[seat])
        parts |= {f"{seat}/{name}": value for name, value in seat_parts.items()}
    return scores, parts


def _with_parts(returned: object) -> tuple[float, dict[str, float]]:
    parts = returned if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in parts:
        raise BadYield(f"an outcome of parts without 'score': {shown(list(parts))}")
    checked = _parts(parts)
    return checked.pop("score"), checked


def _parts(parts: Mapping) -> dict[str, float]:
    """Named parts as floats."""
    if reserved := [name for name in parts if name in OWN_PARTS]:
        raise BadYield(
            f"a part is called {reserved[0]!r}, as one that every episode has: rename it"
        )
    return {str(name): finite(value, name) for name, value in parts.items()}


def finite(value: object, name: object) -> float:
    """The value as a float. Raises BadYield, with `name`, if it is no number or not finite."""
    if getattr(value, "shape", None) == ():  # an array of one number, of JAX or of torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise BadYield(f"{name} is {shown(value)} ({type(value).__name__}): not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MOST_REWARD:
        raise BadYield(f"{name} is {shown(value)}: not a finite number of at most {MOST_REWARD:g}")
    return number


def state_hash(state: object) -> bytes:
    """A digest of 16 bytes, equal in all processes for equal states; b"" for None.

    States are plain values, containers of them, dataclasses, enums and NumPy arrays; 1, 1.0 and
    True are equal, as they are in Python. Raises BadYield for anything else.
    """
    return b"" if state is None else _digest(state)


def _digest(value: object) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for piece in _pieces(value):
        hashed.update(len(piece).to_bytes(8, "little") + piece)
    return hashed.digest()


def _pieces(value: object) -> list[bytes]:
    if value is None:
        return [b"none"]
    if isinstance(value, enum.Enum) and not isinstance(value, int | float | str):
        return [b"enum", type(value).__qualname__.encode(), value.name.encode()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return [b"text", value.encode("utf-8", "surrogatepass")]
    if isinstance(value, bytes | bytearray):
        return [b"bytes", bytes(value)]
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return [b"number", b"%d" % int(value)]
    if isinstance(value, complex) and not value.imag:
        return _pieces(value.real)
    if isinstance(value, float | complex):
        return [b"number", repr(value).encode()]
    if isinstance(value, list | tuple):
        return [b"list" if type(value) is list else b"tuple", *map(_digest, value)]
    if isinstance(value, Mapping):
        return [b"map", *sorted(_digest(k) + _digest(v) for k, v in value.items())]
    if isinstance(value, set | frozenset):
        return [b"set", *sorted(map(_digest, value))]
    if isinstance(value, np.ndarray) and value.dtype != object:
        array = value + 0 if value.dtype.kind in "fc" else value  # -0.0 is 0.0
        return [b"array", str(value.dtype).encode(), str(value.shape).encode(), array.tobytes()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        return [type(value).__qualname__.encode(), *(_digest(getattr(value, n)) for n in names)]
    raise BadYield(
        f"a state holds {shown(value)} ({type(value).__name__}), which has no stable hash: use "
        "numbers, texts, tuples, dicts, sets, dataclasses or arrays"
    )


def shown(value: object) -> str:
    """The beginning of a value's repr, even if that raises."""
    if isinstance(value, str | bytes):
        value = value[:200]
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"  # an int of 5,000 digits has no repr
    return text if len(text) <= 100 else text[:100] + "..."
