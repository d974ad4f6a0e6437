"""The form of a reward that runs on the device: what it is given, and functions of bytes for it.

A text is UTF-8: bytes [B, N] uint8 with zeros behind its end, and its length [B] int32.

Axes: B responses, N bytes of a text, S tokens of a response.
"""

import dataclasses
import string
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Characters beyond ASCII that str.strip() takes away, as UTF-8.
_WIDE_SPACES = tuple(
    chr(i).encode()
    for i in (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
)
_SPACES = tuple((string.whitespace + "\x1c\x1d\x1e\x1f").encode())


@dataclasses.dataclass(frozen=True)
class DeviceForm:
    """The form of a reward for programs; `@contract(on_device=DeviceForm(...))` declares it.

    Args:
      score: score(responses, fields, **options) -> scores [B], or {"score": [B], part: [B]}; pure
        and jittable. NaN says that the form cannot decide on a row: the row is masked and counted
        as an error of the reward.
      prepare: prepare(ground_truth, **options) -> {name: array or number}, on the host, once for
        each prompt. `fields` has the same names; numbers as [B], arrays [K] as [B, K] with zeros
        behind the shorter ones. It raises ValueError as the form of texts does.
    """

    score: Callable
    prepare: Callable = lambda ground_truth, **options: {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Responses:
    """Responses as the device form of a reward reads them."""

    text: jax.Array  # [B, N] uint8: UTF-8 without special tokens
    length: jax.Array  # [B] int32, bytes
    num_tokens: jax.Array  # [B] int32, the end token included
    finish_reason: jax.Array  # [B] int32, rljax.batch.FinishReason
    tokens: jax.Array  # [B, S] int32, with zeros behind the end


def bytes_of(text: str) -> np.ndarray:
    """Returns the UTF-8 of a text: [n] uint8."""
    return np.frombuffer(text.encode(), np.uint8)


def text_field(name: str, text: str) -> dict:
    """Returns the fields {name: bytes [n], name_length: n} of a text, for `prepare`."""
    return {name: bytes_of(text), f"{name}_length": np.int32(len(text.encode()))}


def inside(text: jax.Array, length: jax.Array) -> jax.Array:
    """Returns whether each byte of texts [B, N] lies before the end [B]: [B, N] bool."""
    return jnp.arange(text.shape[1])[None, :] < length[:, None]


def shifted(text: jax.Array, by: int) -> jax.Array:
    """Returns the texts [B, N] with byte i + by at column i, and zeros behind."""
    return jnp.pad(text[:, by:], [(0, 0), (0, min(by, text.shape[1]))])


def at_each(text: jax.Array, literal: bytes) -> jax.Array:
    """Returns whether `literal` stands at each column of texts [B, N]: [B, N] bool. Texts are
    followed by zeros, so that a literal does not reach beyond the end."""
    matches = jnp.ones(text.shape, bool)
    for i, byte in enumerate(literal):
        matches &= shifted(text, i) == byte
    return matches


def contains(text: jax.Array, literal: bytes) -> jax.Array:
    """Returns whether texts [B, N] contain `literal`: [B] bool."""
    return jnp.any(at_each(text, literal), axis=1)


def lower(text: jax.Array) -> jax.Array:
    """Returns texts [B, N] with A to Z in lower case."""
    return jnp.where((text >= 65) & (text <= 90), text + 32, text).astype(jnp.uint8)


def is_space(text: jax.Array) -> jax.Array:
    """Returns which bytes of texts [B, N] are ASCII white space: [B, N] bool."""
    return jnp.isin(text, jnp.array(_SPACES, jnp.uint8))


def part(text: jax.Array, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns bytes start [B] to end [B] of texts [B, N], moved to the front, and their
    length [B]."""
    column = jnp.arange(text.shape[1])[None, :]
    length = jnp.maximum(end - start, 0).astype(jnp.int32)
    moved = jnp.take_along_axis(
        text, jnp.minimum(column + start[:, None], text.shape[1] - 1), axis=1
    )
    return jnp.where(column < length[:, None], moved, 0).astype(jnp.uint8), length


def strip(text: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns texts [B, N] without white space around them, their length [B], and whether the
    result is that of str.strip() [B]: it is not where white space beyond ASCII stands at an end."""
    solid = inside(text, length) & ~is_space(text)
    any_solid, width = jnp.any(solid, axis=1), text.shape[1]
    start = jnp.where(any_solid, jnp.argmax(solid, axis=1), 0)
    end = jnp.where(any_solid, width - jnp.argmax(solid[:, ::-1], axis=1), 0)
    text, length = part(text, start, end)
    wide = jnp.zeros(length.shape, bool)
    for space in _WIDE_SPACES:
        matches = at_each(text, space)
        last = jnp.maximum(length - len(space), 0)[:, None]
        wide |= matches[:, 0] | jnp.take_along_axis(matches, last, axis=1)[:, 0]
    return text, length, ~wide


def equal(a: jax.Array, a_length: jax.Array, b: jax.Array, b_length: jax.Array) -> jax.Array:
    """Returns whether texts a [B, N] and b [B, M] are equal: [B] bool."""
    width = max(a.shape[1], b.shape[1])
    a, b = (jnp.pad(x, [(0, 0), (0, width - x.shape[1])]) for x in (a, b))
    return (a_length == b_length) & jnp.all(a == b, axis=1)
