"""The key of a request, [2] uint32, which alone decides its draws, wherever it is decoded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.sampler.requests import Sampling


def budgets(keys, sampling: Sampling) -> np.ndarray | jax.Array:
    """How many tokens each row may think, a function of its key [R, 2] alone; -1: no limit."""
    if not sampling.thinking_tokens:
        return np.full(len(keys), -1, np.int32)
    return _budgets(keys, *sampling.thinking_tokens)


@jax.jit
def _budgets(keys, low, high):
    # Places use the small numbers of each key's stream; this draw must not meet them.
    draw = lambda key: jax.random.randint(  # noqa: E731
        jax.random.fold_in(jax.random.wrap_key_data(key), 2**31 - 1), (), low, high + 1, jnp.int32
    )
    return jax.vmap(draw)(keys)


@functools.partial(jax.jit, static_argnums=1)
def request_keys(key, count: int):
    """The keys of requests 0 to count - 1: [count, 2] uint32."""
    one = lambda i: jax.random.key_data(jax.random.fold_in(key, i))  # noqa: E731
    return jax.vmap(one)(jnp.arange(count))


@jax.jit
def request_key(key, request_id):
    """The key of one request: [2] uint32."""
    return jax.random.key_data(jax.random.fold_in(key, request_id))
