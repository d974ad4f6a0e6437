"""Parts that the preference losses share: rows of an example, log-ratios, and their metrics.

An example is K consecutive rows: a pair is rows 2i (chosen) and 2i + 1 (rejected). Rows are
unpacked. Everything selects policy tokens before it computes, so that garbage at mask 0, NaN
included, meets neither exp nor a gradient. Axes: B rows, S tokens, K rows per example, N = B/K
examples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs
from rljax.metric import Metric
from rljax.suggest import near_names

METRICS = {
    "rewards/chosen": Metric("implicit reward of the better completion", "nats x beta", "rises"),
    "rewards/rejected": Metric("implicit reward of the worse completion", "nats x beta", "falls"),
    "rewards/accuracies": Metric(
        "pairs whose better completion has the higher implicit reward",
        "share",
        "rises above 0.5; near 1 on few pairs: overfitting",
    ),
    "rewards/margins": Metric(
        "lead of the better completion in implicit reward", "nats x beta", "rises"
    ),
    "logps/chosen": Metric(
        "log-probability of the better completion",
        "nats",
        "a fall along with rewards/margins is common; a collapse is not",
    ),
    "logps/rejected": Metric("log-probability of the worse completion", "nats", "falls"),
    "rewards": Metric("implicit reward of the completions, mean", "nats x beta"),
    "rewards/desirable_part": Metric(
        "implicit rewards of good completions, divided by all rows", "nats x beta", "rises"
    ),
    "rewards/undesirable_part": Metric(
        "implicit rewards of bad completions, divided by all rows", "nats x beta", "falls"
    ),
    "desirable": Metric(
        "rows that are good completions", "share", "0.3 to 0.7, or weigh the kinds"
    ),
    "kl": Metric("KL to the reference", "nats", "rises slowly"),
}


def positive(name: str, value, *, by: str):
    """Returns the value. Raises InputError for a number that is not above 0."""
    if isinstance(value, int | float) and not value > 0:
        raise InputError(
            f"{by}({name})",
            value=value,
            rule="> 0",
            fix=f"{by}({name}=0.1), or another positive number",
        )
    return value


def label_noise(value: float, *, by: str, below: float = 0.5) -> float:
    """Returns the value, the probability that a label is wrong. Raises InputError unless
    0 <= value <= below."""
    if not 0 <= value <= below:
        raise InputError(
            f"{by}(label_smoothing)",
            value=value,
            rule=f"0 to {below}",
            fix=f"{by}(label_smoothing=0.1), or another number of this range",
        )
    return value


def one_of(name: str, value: str, known, *, by: str) -> str:
    """Returns the value. Raises InputError, with the nearest name, unless it is known."""
    if value not in known:
        close = near_names(str(value), known, 1)
        raise InputError(
            f"{by}({name})",
            value=value,
            rule=f"one of {', '.join(known)}",
            fix=f"did you mean {close[0]!r}?" if close else f"such as {next(iter(known))!r}",
        )
    return value


def rows_of(x: jax.Array, rows_per_example: int, *, by: str) -> tuple[jax.Array, ...]:
    """Returns K arrays [N, ...] of x [B, ...]: the first rows of all examples, the second ones, ...
    Raises InputError unless K divides B."""
    if x.shape[0] % rows_per_example:
        raise InputError(
            f"rows of the batch of {by}",
            value=x.shape[0],
            rule=f"a multiple of {rows_per_example}: the rows of an example stand side by side",
            fix=f"--config.batch.tokens_per_microbatch with room for {rows_per_example} rows, or "
            "keep the rows of an example together in filters of your own",
        )
    return tuple(x[i::rows_per_example] for i in range(rows_per_example))


def sequence_logprobs(policy: PolicyOutputs, batch: Batch) -> jax.Array:
    """Returns log pi(y|x), the sum over a row's policy tokens: [B]; 0 for an empty response."""
    return batches.row_sum(policy.logprobs, batch)


def reference_logprobs(batch: Batch, *, by: str) -> jax.Array:
    """Returns log ref(y|x) of each row, without gradient: [B]. Raises InputError where the batch
    has none."""
    batch.require("ref_logprobs", by=by)
    return jax.lax.stop_gradient(batches.row_sum(batch.ref_logprobs, batch))


def log_ratios(policy: PolicyOutputs, batch: Batch, *, by: str) -> jax.Array:
    """Returns Delta = log pi(y|x) - log ref(y|x) of each row: [B]. Raises InputError where the
    batch has no ref_logprobs."""
    return sequence_logprobs(policy, batch) - reference_logprobs(batch, by=by)


def row_tokens(batch: Batch) -> jax.Array:
    """Returns the number of policy tokens of each row, at least 1 so that it can divide: [B]."""
    return jnp.maximum(jnp.sum(batch.mask > 0, axis=1), 1).astype(batch.mask.dtype)


def constant_scores(batch: Batch, *, by: str) -> jax.Array:
    """Returns batch.scores, the label or the reward of each row, without gradient: [B]. Raises
    InputError where the batch has none."""
    batch.require("scores", by=by)
    return jax.lax.stop_gradient(batch.scores)


def step_token_mean(x: jax.Array, keep: jax.Array, batch: Batch, rows_per_example: int, *, by: str):
    """Returns [N] whose mean over the examples is the mean of x over all tokens where
    keep [n, S] is true.

    x [n, S] and keep are those of one row of each example (n = N); the mean needs the whole step.
    An example counts where any of its rows has policy tokens, as in the mean that update takes.
    """
    counted = jnp.any(batch.mask > 0, axis=1)
    counted = sum(rows_of(counted.astype(x.dtype), rows_per_example, by=by)) > 0
    keep = keep & counted[:, None]
    examples, tokens = (jnp.sum(counts.astype(x.dtype)) for counts in (counted, keep))
    return jnp.sum(jnp.where(keep, x, 0.0), axis=1) * (examples / jnp.maximum(tokens, 1))


def log_sigmoid_smoothed(logit: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """-(1 - eps) log sigmoid(z) - eps log sigmoid(-z), cross-entropy with eps wrong labels, in the
    shape of z."""
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(logit)
    if label_smoothing:
        loss = loss - label_smoothing * jax.nn.log_sigmoid(-logit)
    return loss


def pair_metrics(rewards: tuple, logps: tuple) -> dict[str, jax.Array]:
    """Returns implicit rewards and log-probs of (chosen, rejected) [N], apart: a falling log-prob
    of the chosen answers hides in their difference."""
    chosen, rejected = rewards
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(chosen.dtype),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
    }


class LabelledRewards(NamedTuple):
    """Rows with a label each: their implicit rewards [B] and where they are desirable [B]."""

    rewards: jax.Array
    desirable: jax.Array


def labelled_metrics(rows: LabelledRewards) -> dict[str, jax.Array]:
    """Returns rewards of desirable and of undesirable rows as parts of all rows, [B] each. For the
    mean over one kind alone divide their means by the mean of `desirable`, or of one minus it."""
    return {
        "rewards": rows.rewards,
        "rewards/desirable_part": jnp.where(rows.desirable, rows.rewards, 0.0),
        "rewards/undesirable_part": jnp.where(rows.desirable, 0.0, rows.rewards),
        "desirable": rows.desirable.astype(rows.rewards.dtype),
    }
