"""Log-probs that the sampler does not record: of a prompt's own tokens, and of the likeliest tokens
at each position of a prompt and its response."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.models.model import Model

SHORTEST = 128  # columns of a pass; a longer one has a power of two of them, so few are compiled
MOST_LIKELIEST = 20  # tokens at a position, the most that OpenAI's API allows
LOGITS_COLUMNS = 64  # whose logits are held at a time


def prompt_logprobs(model: Model, params, ids: Sequence[int], room: int) -> list[float]:
    """Returns log softmax(logits)[ids[t]] after ids[:t], in nats, over the full vocabulary; 0
    for the first. Raises InputError for no ids, and for ids that the model does not have."""
    batch = _one_row(model, ids, room)
    return fetch(_logprobs(model, params, batch))[0, : len(ids)].tolist()


def likeliest(
    model: Model, params, ids: Sequence[int], room: int, count: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Returns (`prompt_logprobs`, the `count` likeliest (token, log-prob) at each position in
    descending order), of one forward pass: if a token is the likeliest one, both numbers are the
    same. Raises InputError as `prompt_logprobs`."""
    batch = _one_row(model, ids, room)
    ids_of_best, best_logprobs, token_logprobs = fetch(_likeliest(model, params, batch))
    length = len(ids)
    pairs = zip(
        ids_of_best[0, :length, :count].tolist(),
        best_logprobs[0, :length, :count].tolist(),
        strict=True,
    )
    tops = [list(zip(tokens, values, strict=True)) for tokens, values in pairs]
    return [0.0, *token_logprobs[0, 1:length].tolist()], tops


def _one_row(model: Model, ids: Sequence[int], room: int) -> Batch:
    if not len(ids):
        fix = "send a text or ids of one token or more"
        raise InputError("prompt", value=list(ids), rule="at least one token id", fix=fix)
    if min(ids) < 0 or max(ids) >= model.config.ids:
        rule = f"ids from 0 to {model.config.ids - 1}"
        fix = "encode the text by the tokenizer of the served model"
        raise InputError("prompt", value=max(ids), rule=rule, fix=fix)
    columns = SHORTEST
    while columns < len(ids):
        columns *= 2
    columns = min(columns, max(room, len(ids)))
    column = np.arange(columns, dtype=np.int32)[None]
    real = column < len(ids)
    tokens = np.zeros((1, columns), np.int32)
    tokens[0, : len(ids)] = ids
    return Batch(
        tokens, real.astype(np.int32), np.where(real, column, 0), np.zeros((1, columns), np.float32)
    )


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(model: Model, params, batch: Batch):
    return model.logprobs(params, batch)[0]


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(model: Model, params, batch: Batch):
    """Returns the likeliest choices after tokens[b, :t] in descending order: ids and their
    log-probs [B, S, MOST_LIKELIEST], and the log-prob of tokens[b, t] itself [B, S], of one
    log-softmax. Column 0 means nothing."""
    hidden, head = model.readout(params, batch)
    b, s = batch.tokens.shape
    size = min(LOGITS_COLUMNS, s)
    padded = -(-s // size) * size
    hidden = jnp.pad(hidden, ((0, 0), (0, padded - s), (0, 0)))
    tokens = jnp.pad(batch.tokens, ((0, 0), (0, padded - s)))

    def columns(x):
        return x.reshape(b, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def likeliest_of_part(part):
        hidden, tokens = part
        logp = jax.nn.log_softmax(model.head_logits(head, hidden))
        best, ids = jax.lax.top_k(logp, min(MOST_LIKELIEST, model.config.ids))
        return ids, best, jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]

    parts = jax.lax.map(likeliest_of_part, (columns(hidden), columns(tokens)))
    return tuple(x.swapaxes(0, 1).reshape(b, padded, *x.shape[3:])[:, :s] for x in parts)
