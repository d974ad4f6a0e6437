"""What goes into slots beside the caches, as the arrays of an Entry: keys, limits, rules, forcing.

Axes: M pairs of a slot and a sample; rows behind the samples are padding.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.sampler.engine import Engine
from rljax.sampler.keys import budgets
from rljax.sampler.requests import Sampling
from rljax.sampler.sample import Sample
from rljax.sampler.slots import Entry, Forcing


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
    key = np.zeros((rows, 2), np.uint32)
    for i, sample in enumerate(samples):
        key[i] = sample.key
    return Entry(
        _column(length, rows), _column(token, rows), _column(limit, rows),
        np.zeros(rows, np.int32), key, engine.rules(requests), _forcing(engine, requests, samples),
    )  # fmt: skip


def _column(values: Sequence[int], rows: int) -> np.ndarray:
    column = np.zeros(rows, np.int32)
    column[: len(values)] = values
    return column


def _forcing(engine: Engine, requests: list[Sampling], samples: Sequence[Sample]) -> Forcing | None:
    """The state of each sample's interruption; None where this engine has none."""
    if not engine.forcing_tokens:
        return None
    spent, start = np.full(len(requests), -1, np.int32), np.zeros(len(requests), np.int32)
    for i, sample in enumerate(samples):
        start[i] = len(sample.prompt) + sample.begun
        if sample.sampling.thinking_tokens:
            spent[i] = budgets(sample.key[None], sample.sampling)[0]
    forcing = engine.forcing(requests, spent, start)
    thinking, recent = np.array(forcing.thinking), forcing.recent
    for i, sample in enumerate(samples):
        newest = sample.tokens[sample.begun :][: -recent.shape[1] - 1 : -1]
        recent[i, : len(newest)] = newest
        forcing.forced[i] = sample.interrupted
        ended = sample.contains(sample.sampling.end_of_thinking_ids)
        thinking[i] &= not (sample.interrupted or ended)
    return dataclasses.replace(forcing, thinking=thinking)
