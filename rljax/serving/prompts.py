"""Log-probs of a prompt's own tokens, which the sampler reads without scoring them."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.models.model import Model

SHORTEST = 128  # columns of a pass; a longer one has a power of two of them, so few are compiled


def prompt_logprobs(
    model: Model, params, ids: Sequence[int], temperature: float, room: int
) -> list[float]:
    """log softmax(logits / temperature)[ids[t]] after ids[:t], full vocabulary; 0 for the first."""
    if not len(ids):
        raise InputError("prompt", value=list(ids), rule="at least one token id")
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        rule = f"ids from 0 to {model.config.vocab_size - 1}"
        raise InputError("prompt", value=max(ids), rule=rule)
    columns = SHORTEST
    while columns < len(ids):
        columns *= 2
    columns = min(columns, max(room, len(ids)))
    place = np.arange(columns, dtype=np.int32)[None]
    real = place < len(ids)
    tokens = np.zeros((1, columns), np.int32)
    tokens[0, : len(ids)] = ids
    batch = Batch(
        tokens, real.astype(np.int32), np.where(real, place, 0), np.zeros((1, columns), np.float32)
    )
    return fetch(_logprobs(model, params, batch, np.float32(temperature)))[0, : len(ids)].tolist()


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(model: Model, params, batch: Batch, temperature):
    return model.logprobs(params, batch, temperature)[0]
