"""Inputs of slots beside the caches, as the arrays of an Entry: keys, limits, rules, forcing.

Axes: M pairs of a slot and a sample; rows behind the samples are padding.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.errors import InputError
from rljax.sampler import speculation
from rljax.sampler.engine import Engine
from rljax.sampler.keys import budgets
from rljax.sampler.requests import Sampling, alike
from rljax.sampler.sample import Sample
from rljax.sampler.slots import Entry, Forcing, forcing_of

_SHARED_RULES = 8  # rows of rules, where no more requests differ


def checked(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, n: int, decode: Callable | None
) -> np.ndarray:
    """The ids of a request that the engine can serve; else InputError."""
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
    if ids.ndim != 1 or not len(ids):
        raise InputError(
            "prompt",
            value=ids.shape,
            rule="at least one token id",
            fix="give a prompt of one token or more, without further axes",
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            "prompt",
            value=ids.dtype,
            rule="token ids, which are integers",
            fix="encode the text by the tokenizer of the model",
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InputError(
            "prompt",
            value=int(bad),
            rule=f"ids from 0 to {vocab_size - 1}",
            fix="encode the text by the tokenizer of the model",
        )
    if len(ids) + sampling.max_response_tokens > room:
        raise InputError(
            "a prompt and its response do not fit a slot",
            value=f"{len(ids)} + {sampling.max_response_tokens} tokens",
            rule=f"at most the {room} of a slot",
            fix="a shorter prompt, a lower max_response_tokens, or longer slots",
        )
    if sampling.stop_strings and decode is None:
        raise InputError("sampler stop_strings need a tokenizer", fix="pass decode=")
    engine.check(sampling)
    return ids.astype(np.int32)


def entry_of(
    engine: Engine,
    samples: Sequence[Sample],
    length: Sequence[int],
    token: Sequence[int],
    rows: int,
) -> Entry:
    """The entry [rows] of samples of which `length` tokens are read, `token` the next one to be."""
    requests = [sample.sampling for sample in samples]
    requests += [Sampling()] * (rows - len(samples))
    limit = [s.size + s.sampling.max_response_tokens - s.drawn for s in samples]
    shift = [0 if s.images is None else s.images.shift for s in samples]
    key = np.zeros((rows, 2), np.uint32)
    for i, sample in enumerate(samples):
        key[i] = sample.key
    rules, which = _rules(engine, requests)
    history = None
    if engine.draft_tokens:
        history = speculation.histories(rows, engine.tokens, [sample.ids for sample in samples])
    return Entry(
        _column(length, rows),
        _column(token, rows),
        _column(limit, rows),
        _column(shift, rows),
        key,
        rules,
        _forcing(engine, requests, samples),
        which,
        history,
    )


def _rules(engine: Engine, requests: list[Sampling]):
    """(rules, the row in them of each request): a few rows where requests share them, for a row is
    as long as the vocabulary."""
    numbers: dict[tuple, int] = {}
    which = np.zeros(len(requests), np.int32)
    firsts: list[Sampling] = []
    for i, one in enumerate(requests):
        which[i] = number = numbers.setdefault(alike(one), len(numbers))
        if number == len(firsts):
            firsts.append(one)
    rows = _SHARED_RULES if len(firsts) <= _SHARED_RULES else len(requests)
    return engine.rules(firsts + [Sampling()] * (rows - len(firsts))), which


def _column(values: Sequence[int], rows: int) -> np.ndarray:
    column = np.zeros(rows, np.int32)
    column[: len(values)] = values
    return column


def _forcing(engine: Engine, requests: list[Sampling], samples: Sequence[Sample]) -> Forcing | None:
    """The state of each sample's interruption; None where this engine has none."""
    return forcing_now(engine.forcing_tokens, requests, samples) if engine.forcing_tokens else None


def forcing_now(room: int, requests: list[Sampling], samples: Sequence[Sample]) -> Forcing:
    """The interruptions of requests with room for so many tokens, the first of them those of
    `samples` at the point where each stands."""
    spent, start = np.full(len(requests), -1, np.int32), np.zeros(len(requests), np.int32)
    for i, sample in enumerate(samples):
        start[i] = len(sample.prompt) + sample.begun
        if sample.sampling.thinking_tokens:
            key = sample.key if sample.budget_key is None else sample.budget_key
            spent[i] = budgets(key[None], sample.sampling)[0]
    forcing = forcing_of(requests, room, spent, start)
    thinking, recent = np.array(forcing.thinking), forcing.recent
    for i, sample in enumerate(samples):
        newest = sample.tokens[sample.begun :][: -recent.shape[1] - 1 : -1]
        recent[i, : len(newest)] = newest
        forcing.forced[i] = sample.interrupted
        ended = sample.contains(sample.sampling.end_of_thinking_ids)
        thinking[i] &= not (sample.interrupted or ended)
    return dataclasses.replace(forcing, thinking=thinking)
