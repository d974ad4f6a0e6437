"""The key of a request, [2] uint32, which alone decides its draws, wherever it is decoded."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.sampler.requests import Sampling

_BLOCK, _BLOCKS = 256, 64  # keys that are made together, and how many such blocks are remembered
_BUDGETS, _BRANCHES = 2**31 - 1, 2**31 - 2  # numbers of a key's stream that are no place of a token


def budgets(keys, sampling: Sampling) -> np.ndarray | jax.Array:
    """Returns how many tokens each row may think, a function of its key [R, 2] alone; -1: no
    limit."""
    if not sampling.thinking_tokens:
        return np.full(len(keys), -1, np.int32)
    return _budgets(keys, *sampling.thinking_tokens)


@jax.jit
def _budgets(keys, low, high):
    # Places use the small numbers of each key's stream; this draw must not meet them.
    def draw(key):
        return jax.random.randint(
            jax.random.fold_in(jax.random.wrap_key_data(key), _BUDGETS),
            (),
            low,
            high + 1,
            jnp.int32,
        )

    return jax.vmap(draw)(keys)


@functools.partial(jax.jit, static_argnums=2)
def branch_keys(keys, at, n: int):
    """The keys of continuations 0 to n - 1 behind the first at [M] tokens of the responses with
    keys [M, 2]: [M, n, 2] uint32."""

    def one(key, at):
        # (Not a place's own number: its draw would be of the bits that are keys here.)
        key = jax.random.fold_in(jax.random.wrap_key_data(key), _BRANCHES)
        at = jax.random.fold_in(key, at)

        def child(i):
            return jax.random.key_data(jax.random.fold_in(at, i))

        return jax.vmap(child)(jnp.arange(n))

    return jax.vmap(one)(jnp.asarray(keys), jnp.asarray(at))


@functools.partial(jax.jit, static_argnums=1)
def request_keys(key, count: int):
    """The keys of requests 0 to count - 1: [count, 2] uint32."""

    def one(i):
        return jax.random.key_data(jax.random.fold_in(key, i))

    return jax.vmap(one)(jnp.arange(count))


class Keys:
    """The keys of a root key's requests, made many at a time: requests are numbered on."""

    def __init__(self, root: jax.Array):
        self.root = root
        self._known: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def of(self, request_id: int) -> np.ndarray:
        """The key of one request: [2] uint32."""
        block, at = divmod(request_id, _BLOCK)
        if block not in self._known:
            self._known[block] = fetch(_block_keys(self.root, block * _BLOCK))
            if len(self._known) > _BLOCKS:
                self._known.popitem(last=False)
        return self._known[block][at]


@jax.jit
def _block_keys(key, first):
    def one(i):
        return jax.random.key_data(jax.random.fold_in(key, i))

    return jax.vmap(one)(first + jnp.arange(_BLOCK))


@jax.jit
def request_key(key, request_id):
    """The key of one request: [2] uint32."""
    return jax.random.key_data(jax.random.fold_in(key, request_id))
