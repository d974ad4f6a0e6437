"""Pairs out of groups: which two samples of a prompt are compared, and who would win.

Functions of scores, without gradient. The losses of pairs: rljax.losses.preference. A preference is
a function (first, second) -> P(first wins) of two arrays of scores, which config text names:
"bradley_terry(scale=2.0)", or one of your own. Axes: P prompts, K samples of each.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from rljax.contracts import AboveZero, NotNegative, contract
from rljax.errors import InputError


@contract(safe=True)
def bradley_terry(first: jax.Array, second: jax.Array, *, scale: AboveZero = 1.0) -> jax.Array:
    """sigmoid(scale (first - second)), elementwise, shapes broadcast: P(first wins) by a reward
    model that was trained on pairs.

    Raises InputError unless scale > 0.
    """
    if not scale > 0:
        raise InputError(
            "bradley_terry(scale)",
            value=scale,
            fix="bradley_terry(scale=1.0), or another number above 0",
        )
    return jax.nn.sigmoid(scale * (first - second))


@contract(safe=True)
def higher_wins(first: jax.Array, second: jax.Array) -> jax.Array:
    """1 where the first score is higher, 1/2 where both are equal, else 0, elementwise,
    shapes broadcast."""
    return 0.5 * (1 + jnp.sign(first - second))


def win_probabilities(scores: jax.Array, live: jax.Array, preference) -> jax.Array:
    """Returns the mean over the live samples j of the prompt, i among them with 1/2, of P(i beats
    j): [P, K].

    SPPO calls this the probability of winning against the policy (arXiv 2405.00675). `live` [P, K]
    is false where a reward failed; there the result is 0.
    """
    scores = jnp.where(live, scores, 0.0)
    wins = preference(scores[:, :, None], scores[:, None, :])
    both_live = live[:, None, :] & live[:, :, None]
    itself = jnp.eye(scores.shape[1], dtype=bool)[None]
    wins = jnp.where(itself, 0.5, wins)
    count = jnp.maximum(jnp.sum(live, axis=1), 1)[:, None]
    return jnp.sum(jnp.where(both_live, wins, 0.0), axis=2) / count


def of_prompts(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the sample `index` of each prompt: [P, K], [P] -> [P]."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


class Pairs(NamedTuple):
    """The samples of each prompt that are compared [P] int, how much better the chosen one is [P],
    and whether there is anything to learn [P] bool."""

    chosen: jax.Array
    rejected: jax.Array
    margin: jax.Array
    keep: jax.Array


def choose_pairs(
    scores: jax.Array,
    live: jax.Array,
    key: jax.Array,
    *,
    rejected: Literal["worst", "random"] = "worst",
    min_margin: NotNegative = 0.0,
) -> Pairs:
    """Pairs the best sample of each prompt with its worst, or with another one at random.

    Ties, margins below `min_margin` and prompts with fewer than two live samples are not kept.
    scores and live [P, K]; `key` is read by "random" alone. Raises InputError for another
    `rejected` and a min_margin below 0.
    """
    if rejected not in ("worst", "random"):
        raise InputError("choose_pairs(rejected)", value=rejected, fix="write worst or random")
    if min_margin < 0:
        raise InputError(
            "choose_pairs(min_margin)", value=min_margin, fix="set min_margin to 0 or more"
        )
    best_sample = jnp.argmax(jnp.where(live, scores, -jnp.inf), axis=1)
    if rejected == "worst":
        rejected_sample = jnp.argmin(jnp.where(live, scores, jnp.inf), axis=1)
    else:
        candidates = live & (jnp.arange(scores.shape[1])[None, :] != best_sample[:, None])
        rejected_sample = jax.random.categorical(key, jnp.where(candidates, 0.0, -jnp.inf), axis=1)

    comparable = jnp.sum(live, axis=1) > 1
    margin = jnp.where(
        comparable, of_prompts(scores, best_sample) - of_prompts(scores, rejected_sample), 0.0
    )
    return Pairs(
        best_sample, rejected_sample, margin, comparable & (margin > 0) & (margin >= min_margin)
    )
