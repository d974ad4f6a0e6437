"""Speculative decoding by prompt lookup: what may come next is copied from what the slot holds.

A decode step reads a slot's newest token and, behind it, a draft: the tokens that followed the
latest earlier occurrence of its newest n-gram, in its own prompt and response (arXiv 2304.04487;
J. Saxena, prompt lookup decoding, 2023). Each position's token is drawn as without drafts, from the
model's distribution there and with the position's own uniform; a draft is kept while it is what was
drawn. So samples, and their distribution, are those of plain decoding (of exact speculative
sampling, arXiv 2211.17192, the case of a draft that is certain, with the draws coupled).

The step itself is in `slots`. Axes: B slots, C columns of a slot, D tokens of a draft.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import InputError
from rljax.models.config import ModelConfig

N_GRAMS = (3, 2)  # sizes that are looked up, the first that occurs decides
MOST_TOKENS = 64  # of a draft; logits of all of them are held at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """State of decoding with drafts beside the caches."""

    history: jax.Array  # [B, C] int32: the tokens of each slot, prompt and response
    counts: jax.Array  # [B, 3] uint32: steps that gave a token, tokens drafted, drafts kept
    tokens: int = dataclasses.field(metadata={"static": True})  # D


def check(config: ModelConfig, draft_tokens: int) -> None:
    """Raises InputError if a draft of `draft_tokens` tokens cannot be read at once."""
    if not isinstance(draft_tokens, (int, np.integer)) or not 0 <= draft_tokens <= MOST_TOKENS:
        raise InputError(
            "sampler draft_tokens",
            value=draft_tokens,
            rule=f"from 0 (off) to {MOST_TOKENS}",
            fix="--config.sampler.draft_tokens=0, or a number of this range",
        )
    if draft_tokens and config.recurrent:
        raise InputError(
            "sampler draft_tokens",
            value=draft_tokens,
            rule="0 with recurrent layers, whose states cannot go back behind a wrong draft",
            fix="--config.sampler.draft_tokens=0",
        )
    windows = [kind.window for kind in config.kinds if kind.window]
    if draft_tokens and draft_tokens >= min(windows, default=draft_tokens + 1):
        raise InputError(
            "sampler draft_tokens",
            value=draft_tokens,
            rule=f"below the model's smallest sliding window, {min(windows)}",
            fix=f"--config.sampler.draft_tokens={min(windows) - 1}, or fewer",
        )


def empty(slots: int, columns: int, draft_tokens: int) -> Drafts | None:
    """Makes the state of empty slots (inside a program); None where nothing is drafted."""
    if not draft_tokens:
        return None
    history = jnp.zeros((slots, columns), jnp.int32)
    return Drafts(history, jnp.zeros((slots, 3), jnp.uint32), draft_tokens)


def look_up(drafts: Drafts, total: jax.Array, room: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the draft of each slot of total [B] tokens, of at most room [B]: (ids [B, D], how
    many [B], 0 where its newest tokens have not occurred before).

    A draft that reaches the newest token goes on with its own beginning, as the text then repeats.
    """
    history = drafts.history
    column = jnp.arange(history.shape[1])[None, :]
    end, matches = jnp.full(total.shape, -1), column <= (total - 2)[:, None]
    for lag in range(max(N_GRAMS)):
        token = jnp.take_along_axis(history, jnp.maximum(total - 1 - lag, 0)[:, None], axis=1)
        matches &= (jnp.roll(history, lag, axis=1) == token) & (column >= lag)
        if lag + 1 in N_GRAMS:  # longer ones come later, and decide
            latest = jnp.max(jnp.where(matches, column, -1), axis=1)
            end = jnp.where(latest >= 0, latest, end)
    distance = total - 1 - end
    offset = jnp.arange(drafts.tokens)[None, :] % jnp.maximum(distance, 1)[:, None]
    ids = jnp.take_along_axis(history, end[:, None] + 1 + offset, axis=1)
    return ids, jnp.where(end >= 0, jnp.clip(room, 0, drafts.tokens), 0)


def recorded(drafts: Drafts, total, drafted, ids, valid) -> Drafts:
    """Returns the drafts with the new tokens ids [S, B] behind total [B] of each slot, of which the
    valid ones [S, B] come first; drafted [B] of them were guessed."""
    added = jnp.sum(valid, axis=0)
    stepped = (added > 0).astype(jnp.int32)
    increments = jnp.stack([stepped, drafted, added - stepped], axis=1)
    counts = drafts.counts + increments.astype(jnp.uint32)
    history = _appended(drafts.history, total, ids.T, added)
    return dataclasses.replace(drafts, history=history, counts=counts)


def _appended(history, total, ids, added):
    """Returns history [B, C] with the first added [B] of ids [B, S] behind its first total [B]."""
    index = jnp.arange(history.shape[1])[None, :] - total[:, None]
    values = jnp.take_along_axis(ids, jnp.clip(index, 0, ids.shape[1] - 1), axis=1)
    return jnp.where((index >= 0) & (index < added[:, None]), values, history)


def entered(drafts: Drafts | None, slots, history) -> Drafts | None:
    """Returns the drafts of slots [M] that hold the tokens history [M, C] from here on; one out of
    range is dropped. Raises InputError without a history."""
    if drafts is None:
        return None
    if history is None:
        raise InputError(
            "slot inputs without their tokens", fix="SlotInputs(history=) where slots draft"
        )
    updated = drafts.history.at[slots].set(history, mode="drop")
    return dataclasses.replace(drafts, history=updated)


def extended(drafts: Drafts | None, slots, length, tokens, counts) -> Drafts | None:
    """Returns the drafts with tokens [M, S], of which counts [M] are real, behind the next token of
    slots [M], of which length [B] are read."""
    if drafts is None:
        return None
    rows = jnp.take(drafts.history, slots, axis=0, mode="clip")
    total = jnp.take(length, slots, mode="clip") + 1
    return entered(drafts, slots, _appended(rows, total, tokens, counts))


def uncounted(drafts: Drafts | None) -> Drafts | None:
    """Returns the drafts with counts that begin anew."""
    return drafts and dataclasses.replace(drafts, counts=jnp.zeros_like(drafts.counts))


def put(old: jax.Array, new: jax.Array, valid, given) -> jax.Array:
    """Writes the valid ones of new [S, B] into the tokens of a dispatch, old [k, B], behind the
    first given [B] of each slot."""
    row = given[None, :] + jnp.arange(new.shape[0])[:, None]
    row = jnp.where(valid, row, old.shape[0])

    def write(old, row, new):
        return old.at[row].set(new, mode="drop")

    return jax.vmap(write, in_axes=1, out_axes=1)(old, row, new)


def histories(rows: int, columns: int, ids) -> np.ndarray:
    """Returns sequences of ids as host rows [rows, C]; what is behind them is blank."""
    table = np.zeros((rows, columns), np.int32)
    for row, sequence in enumerate(ids):
        table[row, : len(sequence)] = sequence
    return table


def totals(drafts: Drafts | None) -> jax.Array | None:
    """Returns the counts of all slots [3]; None if nothing is drafted."""
    return None if drafts is None else jnp.sum(drafts.counts, axis=0)
