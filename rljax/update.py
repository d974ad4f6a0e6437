"""The only place that masks, weights and averages a loss; microbatches; the optimizer step.

What lives here: reductions (batch -> token weights), the loop over epochs, minibatches and
microbatches,
and the guard against non-finite steps. What does not: any formula of a loss.

A reduction gives weights [B, S], computed once over the rows of one optimizer step (all devices,
before
microbatching); the step's loss is sum(weights * loss), linear in the rows, so that microbatches,
packing and
sharding give the same gradient by construction (ALGORITHMS 0.3).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax import batch as batches
from rljax.batch import Batch
from rljax.errors import InputError

# -- reductions: B+ = segments with a policy token, n = policy tokens of a segment, N = all policy
# tokens ----


def token_mean(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/N."""
    return batch.mask / jnp.maximum(jnp.sum(batch.mask), 1)


def seq_mean_token_sum(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/B+."""
    return batch.mask / jnp.maximum(batches.segment_count(batch), 1)


def seq_mean_token_mean(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/(B+ n)."""
    return seq_mean_token_sum(batch) / jnp.maximum(batches.segment_tokens(batch), 1)


def seq_mean_token_sum_norm(batch: Batch, *, max_tokens: int) -> jax.Array:
    """Every policy token weighs 1/(B+ max_tokens): Dr. GRPO's constant."""
    return seq_mean_token_sum(batch) / max_tokens


def token_sum_norm(batch: Batch, *, max_tokens: int) -> jax.Array:
    """Every policy token weighs 1/max_tokens: grows with the batch."""
    return batch.mask / max_tokens


def prompt_mean(batch: Batch) -> jax.Array:
    """Mean over prompts of the token mean inside the prompt's group (ScaleRL). Rows must be
    unpacked."""
    batch.require("group", by="prompt_mean")
    tokens = jnp.sum(batch.mask, axis=1)
    same = (batch.group[:, None] == batch.group[None, :]).astype(batch.mask.dtype)
    group_tokens = same @ tokens
    # A row holds a share tokens / group_tokens of its group; the shares add up to the live groups.
    groups = jnp.sum(tokens / jnp.maximum(group_tokens, 1))
    return batch.mask / jnp.maximum(group_tokens, 1)[:, None] / jnp.maximum(groups, 1)


# -- the loop
# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Steps:
    """How one batch is walked: rows per optimizer step, rows per microbatch, passes over the
    batch."""

    rows: int
    microbatch_rows: int
    epochs: int = 1


def select_policy_tokens(batch: Batch) -> Batch:
    """Float fields with 0 wherever mask is 0: garbage there, NaN included, never meets exp, log or
    a sum."""
    selected = {}
    for field in dataclasses.fields(batch):
        value = batch.__dict__[field.name]
        if value is not None and field.metadata["axes"] == ("B", "S") and value.dtype.kind == "f":
            selected[field.name] = jnp.where(batch.mask > 0, value, 0.0)
    return batch.replace(**selected)


def _split(tree, parts: int):
    """[B, ...] -> [parts, B/parts, ...] for every array that has rows."""
    return jax.tree.map(lambda x: x.reshape((parts, -1) + x.shape[1:]), tree)


def split_microbatches(tree, rows: int, microbatch_rows: int):
    """[rows, ...] -> [parts, rows/parts, ...]: part i takes rows i, i + parts, ...

    Strided, so that every device, which holds a contiguous range of rows, has work in every part.
    """
    microbatch_rows = min(microbatch_rows, rows)
    if rows % microbatch_rows:
        raise InputError(
            "rows of a microbatch", value=microbatch_rows, rule=f"must divide the {rows} of a step"
        )
    parts = rows // microbatch_rows
    return jax.tree.map(
        lambda x: x.reshape((microbatch_rows, parts) + x.shape[1:]).swapaxes(0, 1), tree
    )


def map_microbatches(function: Callable, batch: Batch, rows: int):
    """function(microbatch) -> arrays [b, ...], over all rows in order: bounds the memory of a
    forward pass."""
    out = jax.lax.map(function, split_microbatches(batch, batch.rows, rows))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape((-1,) + x.shape[2:]), out)


def weighted_loss(loss, metrics, batch: Batch, weights: jax.Array):
    """(sum of weights * loss, numerators of the metrics). loss is [B, S], or [B] for one value per
    row."""
    if loss.ndim == 1:
        # A loss per row is averaged over the rows that have policy tokens; weights sum to 1 over
        # them.
        keep, weight = jnp.sum(batch.mask, axis=1) > 0, weights
    else:
        keep, weight = batch.mask > 0, weights
        if batch.weights is not None:
            weight = weight * jax.lax.stop_gradient(batch.weights)
    total = jnp.sum(jnp.where(keep, weight * loss, 0.0))
    sums = {name: _metric_sum(name, value, batch) for name, value in metrics.items()}
    return total, sums


def _row_weights(batch: Batch) -> jax.Array:
    live = (jnp.sum(batch.mask, axis=1) > 0).astype(batch.mask.dtype)
    return live / jnp.maximum(jnp.sum(live), 1)


def _metric_sum(name: str, value: jax.Array, batch: Batch):
    """(numerator, denominator) so that means never depend on the split; names ending in _max keep
    the max."""
    value = jax.lax.stop_gradient(value)
    keep = batch.mask > 0 if value.ndim == 2 else jnp.sum(batch.mask, axis=1) > 0
    if name.endswith("_max"):
        return jnp.max(jnp.where(keep, value, -jnp.inf)), jnp.zeros(())
    return jnp.sum(jnp.where(keep, value, 0.0)), jnp.sum(keep.astype(jnp.float32))


def _metric_value(name: str, numerator, denominator):
    """From per-microbatch parts, stacked on axis 0, to one number."""
    if name.endswith("_max"):
        return jnp.max(numerator)
    return jnp.sum(numerator) / jnp.maximum(jnp.sum(denominator), 1)


def loss_and_gradient(
    params, batch: Batch, forward: Callable, reduction: Callable, microbatch_rows: int
):
    """Loss, gradient and metrics of one optimizer step over all rows of `batch`, microbatch by
    microbatch.

    forward(params, microbatch) -> (unreduced loss, metrics of the same shape). A tuple of losses is
    summed, each reduced by its own shape: per token [B, S], or per row [B].
    """
    batch = select_policy_tokens(batch)
    token_weights, row_weights = reduction(batch), _row_weights(batch)

    def one(params, part):
        microbatch, token_w, row_w = part
        losses, metrics = forward(params, microbatch)
        losses = losses if isinstance(losses, tuple) else (losses,)
        total, sums = jnp.zeros(()), {}
        for loss in losses:
            weights = row_w if loss.ndim == 1 else token_w
            part, sums = weighted_loss(loss, metrics, microbatch, weights)
            total = total + part
        return total, sums

    gradient_of = jax.value_and_grad(one, has_aux=True)
    parts = split_microbatches((batch, token_weights, row_weights), batch.rows, microbatch_rows)
    count = parts[1].shape[0]
    if count == 1:
        (loss, sums), gradient = gradient_of(params, jax.tree.map(lambda x: x[0], parts))
        sums = jax.tree.map(lambda x: x[None], sums)
    else:

        def accumulate(carry, part):
            (loss, sums), gradient = gradient_of(params, part)
            return jax.tree.map(jnp.add, carry, (loss, gradient)), sums

        zeros = (jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
        (loss, gradient), sums = jax.lax.scan(accumulate, zeros, parts)
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    return loss, gradient, metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an optimizer step changes. Counters are int32 scalars on the device."""

    params: Any
    opt_state: Any
    step: jax.Array  # optimizer steps taken: the policy version
    skipped: jax.Array  # steps skipped since the start because loss or gradient was not finite
    skipped_in_a_row: jax.Array


def new_train_state(params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; rljax.roles places it on the mesh."""
    counters = (
        jnp.zeros((), jnp.int32) for _ in range(3)
    )  # three buffers: donation forbids sharing one
    return TrainState(params, optimizer.init(params), *counters)


def optimizer_step(state: TrainState, gradient, loss, optimizer: optax.GradientTransformation):
    """One optimizer step; a non-finite loss or gradient changes nothing but the counters."""
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    bad = 1 - finite.astype(jnp.int32)
    state = TrainState(
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        step=state.step + 1 - bad,
        skipped=state.skipped + bad,
        skipped_in_a_row=bad * (state.skipped_in_a_row + 1),
    )
    # A skipped step reports norm 0 and is counted, so that averages over steps stay finite.
    return state, {
        "grad_norm": jnp.where(finite, grad_norm, 0.0),
        "loss": jnp.where(finite, loss, 0.0),
    }


def fit(
    state: TrainState,
    batch: Batch,
    forward: Callable,
    *,
    optimizer: optax.GradientTransformation,
    reduction: Callable,
    steps: Steps,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """All epochs and minibatches of one batch: rows / steps.rows optimizer steps per epoch.

    Metrics are means over the optimizer steps (maxima for names ending in _max).
    """
    if batch.rows % steps.rows:
        raise InputError(
            "rows of an optimizer step", value=steps.rows, rule=f"must divide {batch.rows} rows"
        )

    def step(state, minibatch):
        loss, gradient, metrics = loss_and_gradient(
            state.params, minibatch, forward, reduction, steps.microbatch_rows
        )
        state, step_metrics = optimizer_step(state, gradient, loss, optimizer)
        streak = {"skipped_in_a_row_max": state.skipped_in_a_row.astype(jnp.float32)}
        return state, {**metrics, **step_metrics, **streak}

    count = batch.rows // steps.rows
    before = state.skipped
    if count * steps.epochs == 1:
        state, metrics = step(state, batch)
    else:
        minibatches = _split(batch, count)
        epoch = lambda state, _: jax.lax.scan(step, state, minibatches)  # noqa: E731
        state, metrics = jax.lax.scan(epoch, state, None, length=steps.epochs)
        metrics = {k: jnp.max(v) if k.endswith("_max") else jnp.mean(v) for k, v in metrics.items()}
    metrics["skipped_steps"] = (state.skipped - before).astype(jnp.float32)
    # The longest streak within this call, so that one good step at its end does not hide it.
    metrics["skipped_in_a_row"] = metrics.pop("skipped_in_a_row_max")
    metrics["optimizer_steps"] = jnp.float32(count * steps.epochs)
    return state, metrics
