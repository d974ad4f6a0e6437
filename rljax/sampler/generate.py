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
    # (low, high): where end_of_thinking_ids has not come after a number of tokens drawn from this
    # range, interrupt_ids are forced. Forced tokens have mask 0 and no log-prob. () = off.
    thinking_tokens: tuple[int, ...] = ()
    end_of_thinking_ids: tuple[int, ...] = ()
    interrupt_ids: tuple[int, ...] = ()

    def greedy(self) -> "Sampling":
        """The same limits, the likeliest word each time."""
        return dataclasses.replace(self, temperature=0.0, top_k=0, top_p=1.0)

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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "weight"], meta_fields=["model"]
)
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A second model that decodes along. The next word is drawn from the geometric mixture of both,
    softmax(((1 - weight) z + weight z_second) / temperature), and so is its log-prob. One
    vocabulary."""

    model: Model
    params: dict
    weight: float | jax.Array


_IMAGE_FIELDS = ("pixels", "patch_coords", "rope_positions")


@dataclasses.dataclass
class _Rows:
    """The state of every row while decoding: the record so far, and where the row stands."""

    tokens: jax.Array  # [B, S]
    logps: jax.Array  # [B, S]
    chosen: jax.Array  # [B, S] bool: the policy chose the token
    column: jax.Array  # [B] of the last token
    live: jax.Array  # [B] bool
    reason: jax.Array  # [B]
    thinking: jax.Array  # [B] bool: may still be interrupted
    forced: jax.Array  # [B] tokens of the interruption that were forced so far
    caches: list


jax.tree_util.register_dataclass(_Rows)


def _force(rows: _Rows, ids, generated, interrupt: dict):
    """The next tokens, with those of an interruption in place of the sampled ones: ids [B], forced
    [B] bool, and the rows."""
    phrase, length = interrupt["phrase"], interrupt["phrase_tokens"]
    begins = rows.thinking & (generated >= interrupt["budgets"])
    inside = (rows.forced > 0) & (rows.forced < length)
    forced = rows.live & (begins | inside)
    at = jnp.where(begins, 0, rows.forced)
    ids = jnp.where(forced, phrase[jnp.minimum(at, phrase.shape[0] - 1)], ids)
    rows = dataclasses.replace(
        rows,
        thinking=rows.thinking & ~begins,
        forced=jnp.where(forced, at + 1, rows.forced),
    )
    return ids, forced, rows


def _ends_thinking(tokens, column, start, interrupt: dict):
    """Whether the row's last tokens are the marker that ends thinking: [B] bool."""
    marker, length = interrupt["marker"], interrupt["marker_tokens"]
    back = jnp.arange(marker.shape[0])
    # The marker is stored backwards: offset k counts from the row's last token.
    at = column[:, None] - back[None, :]
    seen = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1)
    same = (seen == marker[None, :]) & (at >= start[:, None])
    return jnp.all(same | (back >= length)[None, :], axis=1)


def _first_rows(prompts, start, n: int, response_tokens: int, interrupts: bool, caches) -> _Rows:
    """Every row before its first token: start [B] is the length of its prompt."""
    count, total = start.shape[0], prompts.shape[1] + response_tokens
    return _Rows(
        tokens=jnp.pad(jnp.repeat(prompts, n, axis=0), ((0, 0), (0, response_tokens))),
        logps=jnp.zeros((count, total), jnp.float32),
        chosen=jnp.zeros((count, total), bool),
        column=start - 1,
        live=jnp.ones((count,), bool),
        reason=jnp.full((count,), FinishReason.ABORT, jnp.int32),
        thinking=jnp.full((count,), interrupts),
        forced=jnp.zeros((count,), jnp.int32),
        caches=caches,
    )


@functools.partial(jax.jit, static_argnames=("model", "n", "response_tokens"))
def _rollout(
    model: Model, n, response_tokens, params, prompts, lengths, keys, limits, stop_ids, version,
    interrupt, images, mixed,
):  # fmt: skip
    """The program. prompts [P, L], lengths [P], keys [B], limits: temperature, top_k, top_p [B]
    each; `interrupt`, `images` and `mixed` are None, or arrays."""
    total = prompts.shape[1] + response_tokens
    count = prompts.shape[0] * n
    seen, shift = _prompts(prompts, lengths, images, n)
    models = [(model, params)] + ([(mixed.model, mixed.params)] if mixed else [])
    caches = [one.prefill(weights, seen, total) for one, weights in models]
    caches = jax.tree.map(lambda c: constrain_rows(jnp.repeat(c, n, axis=0), model.mesh), caches)
    start = jnp.repeat(lengths, n, axis=0)
    unstacked = [(one, one.unstack(weights)) for one, weights in models]
    row = jnp.arange(count)

    def step(rows: _Rows):
        last = rows.tokens[row, rows.column], rows.column
        logits, caches = _next_logits(unstacked, *last, rows.caches, shift, mixed)
        ids, logp = sample(logits, keys, rows.column + 1, *limits)
        forced = jnp.zeros((count,), bool)
        if interrupt is not None:
            ids, forced, rows = _force(rows, ids, rows.column + 1 - start, interrupt)
        # Rows that have ended write at column S, which is out of range and so dropped.
        at = jnp.where(rows.live, rows.column + 1, total)
        tokens = rows.tokens.at[row, at].set(ids, mode="drop")
        column = rows.column + rows.live
        stopped = rows.live & ~forced & jnp.any(ids[:, None] == stop_ids[None, :], axis=1)
        full = rows.live & ~stopped & (column + 1 - start >= response_tokens)
        thinking, ended = rows.thinking, FinishReason.STOP
        if interrupt is not None:
            thinking = thinking & ~_ends_thinking(tokens, column, start, interrupt)
            ended = jnp.where(rows.forced > 0, FinishReason.INTERRUPT, FinishReason.STOP)
        reason = jnp.where(stopped, ended, rows.reason)
        return _Rows(
            tokens=tokens,
            logps=rows.logps.at[row, at].set(jnp.where(forced, 0.0, logp), mode="drop"),
            chosen=rows.chosen.at[row, at].set(~forced, mode="drop"),
            column=column,
            live=rows.live & ~stopped & ~full,
            reason=jnp.where(full, FinishReason.LENGTH, reason),
            thinking=thinking,
            forced=rows.forced,
            caches=caches,
        )

    first = _first_rows(prompts, start, n, response_tokens, interrupt is not None, caches)
    rows = jax.lax.while_loop(lambda r: jnp.any(r.live), step, first)
    index = jnp.arange(total)[None, :]
    mask = rows.chosen.astype(jnp.float32)
    batch = batch_from_rows(
        jnp.where(index <= rows.column[:, None], rows.tokens, 0),
        rows.column + 1,
        mask,
        sampler_logprobs=rows.logps,
        policy_version=jnp.where(mask > 0, version, 0).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(prompts.shape[0], dtype=jnp.int32), n),
        finish_reason=rows.reason,
    )
    return batch if images is None else _with_images(batch, seen, start, shift, n)


def _next_logits(unstacked, tokens, columns, caches, shift, mixed: Mixed | None):
    """Of the one model, or of the mixture: [B, V], and the new caches of each."""
    found = [
        model.decode_step(weights, tokens, columns, cache, shift)
        for (model, weights), cache in zip(unstacked, caches, strict=True)
    ]
    logits = found[0][0]
    if mixed is not None:
        logits = (1 - mixed.weight) * logits + mixed.weight * found[1][0]
    return logits, [cache for _, cache in found]


def _prompts(tokens, lengths, images, n: int):
    """(the prompts as a batch, by how much a sample's positions differ from its columns)."""
    seen = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
    if images is None:
        return seen, 0
    seen = seen.replace(**{name: images[name] for name in _IMAGE_FIELDS})
    return seen, jnp.repeat(images["shift"], n, axis=0)


def _with_images(batch: Batch, seen: Batch, start, shift, n: int) -> Batch:
    """Every sample with the images of its prompt, and positions that go on after it."""
    of_prompt = {name: jnp.repeat(getattr(seen, name), n, axis=0) for name in _IMAGE_FIELDS}
    after = (batch.positions + shift[:, None])[..., None]
    room = [(0, 0), (0, batch.tokens.shape[1] - seen.tokens.shape[1]), (0, 0)]
    prompt = jnp.pad(of_prompt["rope_positions"], room)
    inside = jnp.arange(batch.tokens.shape[1])[None, :, None] < start[:, None, None]
    of_prompt["rope_positions"] = jnp.where(inside, prompt, after).astype(jnp.int32)
    return batch.replace(**of_prompt)


def _interruption(sampling: Sampling, keys):
    """The arrays of a forced interruption, or None. The budget of a row is a function of its key
    alone."""
    if not sampling.thinking_tokens:
        return None
    low, high = sampling.thinking_tokens

    def padded(ids):  # a few sizes only, so that another phrase does not recompile
        out = np.full(max(8, len(ids) + (-len(ids)) % 8), -1, np.int32)
        out[: len(ids)] = ids
        return out

    return {
        "budgets": _budgets(keys, low, high),
        "phrase": padded(sampling.interrupt_ids),
        "phrase_tokens": np.int32(len(sampling.interrupt_ids)),
        "marker": padded(sampling.end_of_thinking_ids[::-1]),
        "marker_tokens": np.int32(len(sampling.end_of_thinking_ids)),
    }


@jax.jit
def _budgets(keys, low, high):
    # Columns use the small numbers of each key's stream; this draw must not meet them.
    draw = lambda key: jax.random.randint(  # noqa: E731
        jax.random.fold_in(key, 2**31 - 1), (), low, high + 1, jnp.int32
    )
    return jax.vmap(draw)(keys)


def rollout(
    model: Model,
    params,
    prompts,
    lengths,
    key,
    sampling: Sampling,
    *,
    n: int = 1,
    version=0,
    images: dict | None = None,
    mixed: Mixed | None = None,
) -> Batch:
    """Sample n responses to each prompt: prompts [P, L] int32 right-padded, lengths [P] -> Batch of
    P n rows.

    Row p n + s is sample s of prompt p; `group` is p. EOS is part of the response. A draw depends
    on
    (key, row, column) alone. `images` are those of the prompts (rljax.data.prompts). `mixed`: a
    second model to draw from together.
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
    images = images and shard_rows(images, model.mesh)
    return _rollout(
        model,
        n,
        sampling.max_response_tokens,
        params,
        *placed,
        stop_ids,
        jnp.asarray(version, jnp.int32),
        _interruption(sampling, placed[2]),
        images,
        mixed,
    )


@functools.partial(jax.jit, static_argnums=1)
def _request_keys(key, rows):
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))
