"""Makes the inputs of a decode step beside the caches: keys, rules, limits and interruptions of
requests.

A request's key, [2] uint32, alone decides its draws, wherever it is decoded.

Axes: R requests, M pairs of a slot and a sample; rows behind the samples are padding.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.errors import InputError
from rljax.sampler import speculation
from rljax.sampler.engine import Engine
from rljax.sampler.requests import Sampling, alike
from rljax.sampler.sample import Sample
from rljax.sampler.slots import Forcing, SlotInputs, forcing_of

_SHARED_RULES = 8  # rows of rules, where no more requests differ
_BLOCK, _BLOCKS = 256, 64  # keys that are made together, and how many such blocks are remembered
# Numbers of a key's stream that are no position of a token.
_BUDGETS, _BRANCHES = 2**31 - 1, 2**31 - 2


# -- keys


def budgets(keys, sampling: Sampling) -> np.ndarray | jax.Array:
    """Returns how many tokens each request may think [R] int32, a function of its key [R, 2] alone;
    -1: no limit."""
    if not sampling.thinking_tokens:
        return np.full(len(keys), -1, np.int32)
    return _budgets(keys, *sampling.thinking_tokens)


@jax.jit
def _budgets(keys, low, high):
    # Positions use the small numbers of each key's stream; this draw must not meet them.
    def draw(key):
        key = jax.random.fold_in(jax.random.wrap_key_data(key), _BUDGETS)
        return jax.random.randint(key, (), low, high + 1, jnp.int32)

    return jax.vmap(draw)(keys)


@functools.partial(jax.jit, static_argnums=2)
def branch_keys(keys, at, n: int):
    """Returns the keys [M, n, 2] uint32 of continuations 0 to n - 1 behind the first at [M] tokens
    of the responses with keys [M, 2]."""

    def one(key, branch):
        # (Not a number that is a position: its draw would use the bits that are keys here.)
        key = jax.random.fold_in(jax.random.wrap_key_data(key), _BRANCHES)
        branch = jax.random.fold_in(key, branch)

        def child(i):
            return jax.random.key_data(jax.random.fold_in(branch, i))

        return jax.vmap(child)(jnp.arange(n))

    return jax.vmap(one)(jnp.asarray(keys), jnp.asarray(at))


@functools.partial(jax.jit, static_argnums=1)
def request_keys(key, count: int, first=0):
    """Returns the keys [count, 2] uint32 of `count` requests, from `first` on."""
    return jax.vmap(functools.partial(request_key, key))(first + jnp.arange(count))


class RequestKeys:
    """Keys of requests under one root key, made many at a time, as requests are numbered on."""

    def __init__(self, root: jax.Array):
        self.root = root
        self._known: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def of(self, request_id: int) -> np.ndarray:
        """Returns the key [2] uint32 of one request."""
        block, index = divmod(request_id, _BLOCK)
        if block not in self._known:
            self._known[block] = fetch(request_keys(self.root, _BLOCK, block * _BLOCK))
            if len(self._known) > _BLOCKS:
                self._known.popitem(last=False)
        return self._known[block][index]


@jax.jit
def request_key(key, request_id):
    """Returns the key [2] uint32 of one request."""
    return jax.random.key_data(jax.random.fold_in(key, request_id))


# -- slots


def check_request(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, n: int, decode: Callable | None
) -> np.ndarray:
    """Returns the token ids [S] int32 of a prompt. Raises InputError unless the engine can serve n
    samples of it; `decode`: ids -> text, without which there are no stop strings."""
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise InputError(
            "prompt",
            value=type(prompt),
            rule="one list of token ids",
            fix="give one prompt at a time: [1, 2, 3]",
        ) from None
    vocab_size, room = engine.model.config.vocab_size, engine.tokens
    if n < 1:
        raise InputError("samples per prompt", value=n, fix="give n=1 or more")
    if ids.shape == (0,):
        rule = "at least one token, behind which the first one is drawn"
        raise InputError("a prompt without a token", rule=rule, fix="write a text that has one")
    if ids.ndim != 1:
        fix = "give a prompt of one token or more, without further axes"
        raise InputError("prompt", value=ids.shape, rule="one list of token ids", fix=fix)
    if not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            "prompt",
            value=ids.dtype,
            rule="token ids, which are integers",
            fix="encode the text by the tokenizer of the model",
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad_id = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InputError(
            "prompt",
            value=int(bad_id),
            rule=f"ids from 0 to {vocab_size - 1}",
            fix="encode the text by the tokenizer of the model",
        )
    if len(ids) + sampling.max_response_tokens > room:
        raise InputError(
            "a prompt and its response do not fit a slot",
            value=f"{len(ids)} + {sampling.max_response_tokens} tokens",
            rule=f"at most the {room} of a slot",
            fix="a shorter prompt, a lower max_response_tokens (a request's max_tokens), or longer "
            "slots",
        )
    if sampling.stop_strings and decode is None:
        raise InputError("sampler stop_strings need a tokenizer", fix="pass decode=")
    engine.check(sampling)
    return ids.astype(np.int32)


def slot_inputs(
    engine: Engine,
    samples: Sequence[Sample],
    length: Sequence[int],
    token: Sequence[int],
    rows: int,
) -> SlotInputs:
    """Returns the inputs [rows] of slots with these samples: length[i] tokens of sample i are read,
    and token[i] is the next one to be."""
    requests = [sample.sampling for sample in samples]
    requests += [Sampling()] * (rows - len(samples))
    limit = [s.size + s.sampling.max_response_tokens - s.drawn for s in samples]
    shift = [0 if s.images is None else s.images.shift for s in samples]
    key = np.zeros((rows, 2), np.uint32)
    for i, sample in enumerate(samples):
        key[i] = sample.key
    rules, rule_rows = _rules(engine, requests)
    forcing = history = None
    if engine.forcing_tokens:
        forcing = forcing_now(engine.forcing_tokens, requests, samples)
    if engine.draft_tokens:
        history = speculation.histories(rows, engine.tokens, [sample.ids for sample in samples])
    columns = (_column(values, rows) for values in (length, token, limit, shift))
    return SlotInputs(*columns, key, rules, forcing, rule_rows, history)


def _rules(engine: Engine, requests: list[Sampling]):
    """Returns (rules, the row in them of each request [M]): a few rows where requests share them,
    as a row is as long as the vocabulary."""
    row_of: dict[tuple, int] = {}
    rule_rows = np.zeros(len(requests), np.int32)
    distinct: list[Sampling] = []
    for i, request in enumerate(requests):
        rule_rows[i] = row = row_of.setdefault(alike(request), len(row_of))
        if row == len(distinct):
            distinct.append(request)
    rows = _SHARED_RULES if len(distinct) <= _SHARED_RULES else len(requests)
    return engine.rules(distinct + [Sampling()] * (rows - len(distinct))), rule_rows


def _column(values: Sequence[int], rows: int) -> np.ndarray:
    column = np.zeros(rows, np.int32)
    column[: len(values)] = values
    return column


def forcing_now(room: int, requests: list[Sampling], samples: Sequence[Sample]) -> Forcing:
    """Returns the interruptions of requests [M], with room for F = `room` tokens of a phrase. The
    first requests are those of `samples`, at the point where each stands."""
    thinking_budgets, start = (
        np.full(len(requests), -1, np.int32),
        np.zeros(len(requests), np.int32),
    )
    for i, sample in enumerate(samples):
        start[i] = len(sample.prompt) + sample.begun
        if sample.sampling.thinking_tokens:
            key = sample.key if sample.budget_key is None else sample.budget_key
            thinking_budgets[i] = budgets(key[None], sample.sampling)[0]
    forcing = forcing_of(requests, room, thinking_budgets, start)
    thinking, recent = np.array(forcing.thinking), forcing.recent
    for i, sample in enumerate(samples):
        newest = sample.tokens[sample.begun :][: -recent.shape[1] - 1 : -1]
        recent[i, : len(newest)] = newest
        forcing.forced[i] = sample.interrupted
        ended = sample.contains(sample.sampling.end_of_thinking_ids)
        thinking[i] &= not (sample.interrupted or ended)
    return dataclasses.replace(forcing, thinking=thinking)
