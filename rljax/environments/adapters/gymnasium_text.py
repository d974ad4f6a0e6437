"""Gymnasium's observations and actions as text."""

import math
import re
import sys
from collections.abc import Callable, Mapping

import numpy as np

from rljax.components import resolve
from rljax.environments.adapters.shared import library
from rljax.reasoning import answer_of

_COLOURED = re.compile(r"\x1b\[(?!0?m)[\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")


def gym():
    """The module gymnasium. Raises InputError if it is not installed."""
    return library("gymnasium", "gymnasium", "'gymnasium>=1.1'")


def written(render: str, act: str) -> tuple[Callable, Callable]:
    """Returns (a function (env, observation) -> text, a function (reply, space) -> action) that
    `render` and `act` name. Raises InputError for a name that cannot be resolved."""
    home = "rljax.environments.adapters"
    show = resolve(render, home) if render else shown
    return show, resolve(act, home) if act else action_in


def shown(env, observation) -> str:
    """Returns the text that the environment renders, with coloured parts in brackets; without a
    text the observation."""
    if env.render_mode != "ansi":
        return observation_text(env, observation)
    return _CODE.sub("", _COLOURED.sub(r"[\1]", env.render())).strip("\n")


def observation_text(env, observation) -> str:
    """Returns the observation as NumPy writes it, with all of its numbers; in tuples and dicts
    numbers of NumPy's are written as Python's, arrays as NumPy prints them."""
    return _written(observation, str)


def _written(value: object, convert: Callable = repr) -> str:
    if isinstance(value, np.generic):
        return convert(value.item()) if isinstance(value, str | bytes) else str(value)
    if hasattr(value, "__array__"):  # arrays of JAX and of torch as well
        return np.array2string(np.asarray(value), threshold=sys.maxsize)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(k)}: {_written(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{n}={_written(v)}' for n, v in items)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return convert(value)


def action_in(reply: str, space) -> object:
    """The action that the last numbers of a reply's answer name; those in its reasoning are
    thoughts. Raises ValueError for a reply without one and for one outside of the space, and
    TypeError for a kind of space that needs a function `act`."""
    spaces = gym().spaces
    reply = answer_of(reply)
    if isinstance(space, spaces.Text):
        action = str(reply)
    elif isinstance(space, spaces.Discrete):
        numbers = _numbers(reply, 1)
        action = int(numbers[0]) if numbers[0].is_integer() else None
    elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        numbers = _numbers(reply, math.prod(space.shape))
        action = np.asarray(numbers, space.dtype).reshape(space.shape)
    else:
        raise TypeError(f"{space} is written by a function of your own: act='my_module.act'")
    if action is None or not space.contains(action):
        raise ValueError(f"it is none of {space}")
    return action


def _numbers(reply: str, count: int) -> list[float]:
    matches = _NUMBER.findall(reply)
    if len(matches) < count:
        raise ValueError(f"{len(matches)} of the {count} numbers that it takes")
    return [float(number) for number in matches[-count:]]
