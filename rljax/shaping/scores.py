"""Reward shaping: batch -> new score of every row [B], from its score and its length in tokens.

Functions of numbers that the batch holds; rewards that read text are in rljax.rewards.
`batch.scores` keeps the reward's own value, by which groups are filtered.
"""

import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import NotNegative, contract
from rljax.errors import InputError


def apply_shaping(batch: Batch, rules) -> Batch:
    """Returns the batch after every rule in turn: the change of a row's score is added to the
    reward of its last policy token, or of the last one of its episode. A rule is a function of the
    batch that returns scores [B]."""
    for rule in rules:
        change = rule(batch) - batches.sequence_sum(batch.rewards, batch)
        rewards = batch.rewards + batches.last_token(batch) * change[:, None]
        batch = batch.replace(rewards=rewards)
    return batch


def response_tokens(batch: Batch):
    """Counts the tokens that the policy chose in each row, or in its episode, EOS included, also
    those that a row kept of another one and does not learn from: [B]."""
    tokens = batches.sequence_sum(batch.mask, batch)
    if batch.kept_tokens is None:
        return tokens
    return tokens + batches.over_rows(batch.kept_tokens, batch)


def _overlong(batch: Batch, name: str, max_tokens: int, cache_tokens: int):
    """Returns (max_tokens - cache_tokens - n) / cache_tokens where that is negative, else 0, n
    response tokens: [B]. A cache of 0 is a hard limit: -1 beyond max_tokens."""
    if not 0 <= cache_tokens <= max_tokens:
        raise InputError(
            f"{name}(cache_tokens)",
            value=cache_tokens,
            rule=f"0 <= cache_tokens <= max_tokens, which is {max_tokens}",
            fix="lower cache_tokens, or raise max_tokens",
        )
    shortfall = jnp.minimum(max_tokens - cache_tokens - response_tokens(batch), 0.0)
    return shortfall / cache_tokens if cache_tokens else jnp.maximum(shortfall, -1.0)


@contract(safe=True, reads=("rewards",))
def soft_overlong(
    batch: Batch,
    *,
    max_tokens: int,
    cache_tokens: int,
    penalty: NotNegative = 1.0,
    floor: bool = True,
):
    """score + penalty * clip((max_tokens - cache_tokens - n) / cache_tokens, -1, 0), n response
    tokens (DAPO, arXiv 2503.14476). Without `floor` it goes on falling beyond max_tokens.
    cache_tokens=0 is a hard limit: -penalty beyond max_tokens."""
    excess = _overlong(batch, "soft_overlong", max_tokens, cache_tokens)
    return batches.row_scores(batch) + penalty * (jnp.maximum(excess, -1.0) if floor else excess)


@contract(safe=True, reads=("rewards", "scores"))
def length_penalty_when_right(
    batch: Batch, *, max_tokens: int, cache_tokens: int, correct_at: float = 1.0
):
    """score + clip((max_tokens - n) / cache_tokens - 1, -1, 0) for correct rows only (ScaleRL's
    alternative, arXiv 2510.13786); cache_tokens=0: -1 beyond max_tokens."""
    excess = _overlong(batch, "length_penalty_when_right", max_tokens, cache_tokens)
    batch.require("scores", by="length_penalty_when_right")
    is_correct = batch.scores >= correct_at
    return batches.row_scores(batch) + jnp.where(is_correct, jnp.maximum(excess, -1.0), 0.0)


@contract(safe=True, reads=("rewards",))
def scaled(batch: Batch, *, scale: float = 1.0, shift: float = 0.0):
    """(score + shift) scale: rewards 0 and 1 become -1 and 1 by scale=2, shift=-0.5."""
    return (batches.row_scores(batch) + shift) * scale


@contract(safe=True, reads=("rewards",))
def clipped(batch: Batch, *, low: float, high: float):
    """The score held between low and high."""
    return jnp.clip(batches.row_scores(batch), low, high)


@contract(safe=True, reads=("rewards",), compares_batch=True)
def normalised(batch: Batch, *, eps: NotNegative = 1e-8):
    """(score - mean) / sqrt(variance + eps) over the rows with policy tokens of the batch, an
    episode counted once."""
    return _whitened(batches.row_scores(batch), _counted(batch), batch, eps)


def _counted(batch: Batch):
    """Returns whether a row counts: the first one of each sequence that has policy tokens."""
    return batches.first_of_sequence(batch) & jnp.any(batch.mask > 0, axis=1)


def _whitened(x, counted, batch: Batch, eps: float):
    """Returns x [B] whitened over the counted rows, the same on all rows of a sequence: [B]."""
    return batches.over_rows(batches.whiten(x, counted.astype(x.dtype), eps=eps), batch)


@contract(safe=True, reads=("reward_parts",), compares_batch=True)
def mixed_parts(batch: Batch, *, weights: tuple[float, ...] = (), eps: NotNegative = 1e-8):
    """sum_k w_k (part_k - mean) / sqrt(variance + eps) over the rows with policy tokens.

    Each of the K named parts of the reward, in the order of their names, is normalised over the
    batch by itself, so that weights compare parts of any scale. No weights = 1 each. A part that is
    NaN does not apply to its row and adds 0. Per group instead: `rljax.advantages.gdpo`. Raises
    InputError for another number of weights than K.
    """
    batch.require("reward_parts", by="mixed_parts")
    count = batch.reward_parts.shape[1]
    if weights and len(weights) != count:
        rule = f"one number for each of the {count} parts of the reward"
        raise InputError(
            "mixed_parts(weights)", value=weights, rule=rule, fix=f"weights={(1.0,) * count}"
        )
    counted = _counted(batch)
    total = jnp.zeros((batch.rows,), batch.reward_parts.dtype)
    for k in range(count):
        part = batch.reward_parts[:, k]
        applies = counted & ~jnp.isnan(part)
        part = jnp.where(applies, part, 0.0)
        weight = weights[k] if weights else 1.0
        total = total + weight * _whitened(part, applies, batch, eps)
    return total
