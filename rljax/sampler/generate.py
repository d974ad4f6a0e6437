"""Whole-batch rollouts as one jitted program: prefill each prompt once, fan out, decode until all
end.

What lives here: the program, and its runtime parameters. It holds no weights: parameters are an
argument
of every call. Axes: P prompts, L prompt columns, n samples per prompt, B = P n rows, S = L +
response
columns. Token t of a row lives in column t of the row and of the cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.errors import InputError
from rljax.mesh import constrain_rows, shard_rows
from rljax.models.model import Model
from rljax.sampler.sampling import sample


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. All but `max_response_tokens` are runtime values; that one sizes the
    buffers."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    max_response_tokens: int = 256
    stop_ids: tuple[int, ...] = ()  # empty: only the length ends a response

    def __post_init__(self):
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError("sampler temperature", value=self.temperature, rule="finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise InputError("sampler top_p", value=self.top_p, rule="0 < top_p <= 1")
        if self.top_k < 0:
            raise InputError("sampler top_k", value=self.top_k, rule=">= 0 (0 = off)")
        if self.max_response_tokens < 1:
            raise InputError(
                "sampler max_response_tokens", value=self.max_response_tokens, rule=">= 1"
            )


@functools.partial(jax.jit, static_argnames=("model", "n", "response_tokens"))
def _rollout(
    model: Model, n, response_tokens, params, prompts, lengths, keys, limits, stop_ids, version
):
    """The program. prompts [P, L], lengths [P], keys [B], limits: temperature, top_k, top_p [B]
    each."""
    total = prompts.shape[1] + response_tokens
    rows = prompts.shape[0] * n
    caches = model.prefill(params, prompts, total)
    caches = jax.tree.map(lambda c: constrain_rows(jnp.repeat(c, n, axis=0), model.mesh), caches)
    tokens = jnp.pad(jnp.repeat(prompts, n, axis=0), ((0, 0), (0, response_tokens)))
    start = jnp.repeat(lengths, n, axis=0)
    unstacked = model.unstack(params)
    row = jnp.arange(rows)

    def step(state):
        tokens, logps, column, live, reason, caches = state
        logits, caches = model.decode_step(unstacked, tokens[row, column], column, caches)
        ids, logp = sample(logits, keys, column + 1, *limits)
        # Rows that have ended write at column S, which is out of range and so dropped.
        at = jnp.where(live, column + 1, total)
        tokens = tokens.at[row, at].set(ids, mode="drop")
        logps = logps.at[row, at].set(logp, mode="drop")
        column = column + live
        stopped = live & jnp.any(ids[:, None] == stop_ids[None, :], axis=1)
        full = live & ~stopped & (column + 1 - start >= response_tokens)
        reason = jnp.where(stopped, FinishReason.STOP, reason)
        reason = jnp.where(full, FinishReason.LENGTH, reason)
        return tokens, logps, column, live & ~stopped & ~full, reason, caches

    first = (
        tokens,
        jnp.zeros((rows, total), jnp.float32),
        start - 1,
        jnp.ones((rows,), bool),
        jnp.full((rows,), FinishReason.ABORT, jnp.int32),
        caches,
    )
    tokens, logps, column, _, reason, _ = jax.lax.while_loop(lambda s: jnp.any(s[3]), step, first)
    index = jnp.arange(total)[None, :]
    mask = ((index >= start[:, None]) & (index <= column[:, None])).astype(jnp.float32)
    return batch_from_rows(
        jnp.where(index <= column[:, None], tokens, 0),
        column + 1,
        mask,
        sampler_logprobs=logps,
        policy_version=jnp.where(mask > 0, version, 0).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(prompts.shape[0], dtype=jnp.int32), n),
        finish_reason=reason,
    )


def rollout(
    model: Model, params, prompts, lengths, key, sampling: Sampling, *, n: int = 1, version=0
) -> Batch:
    """Sample n responses to each prompt: prompts [P, L] int32 right-padded, lengths [P] -> Batch of
    P n rows.

    Row p n + s is sample s of prompt p; `group` is p. EOS is part of the response. A draw depends
    on
    (key, row, column) alone.
    """
    prompts, lengths = np.asarray(prompts, np.int32), np.asarray(lengths, np.int32)
    if lengths.min(initial=1) < 1 or lengths.max(initial=1) > prompts.shape[1]:
        raise InputError(
            "prompt lengths",
            value=lengths.tolist(),
            rule=f"between 1 and the {prompts.shape[1]} columns",
        )
    rows = prompts.shape[0] * n
    request_keys = _request_keys(key, rows)
    limits = (
        np.full(rows, sampling.temperature, np.float32),
        np.full(rows, sampling.top_k, np.int32),
        np.full(rows, sampling.top_p, np.float32),
    )
    # -1 matches no id. A few sizes of stop set only, so that another set does not recompile.
    room = max(4, len(sampling.stop_ids) + (-len(sampling.stop_ids)) % 4)
    stop_ids = np.full(room, -1, np.int32)
    stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
    placed = shard_rows((prompts, lengths, request_keys, limits), model.mesh)
    return _rollout(
        model,
        n,
        sampling.max_response_tokens,
        params,
        *placed,
        stop_ids,
        jnp.asarray(version, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=1)
def _request_keys(key, rows):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))
