"""The only place that masks, weights and averages a loss: microbatches, and the gradient of a
step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Steps:
    """How one batch is walked: rows per optimizer step, rows per microbatch, passes over the
    batch. Without `learn` losses and metrics are computed, and no step is taken (held-out data)."""

    rows: int
    microbatch_rows: int
    epochs: int = 1
    learn: bool = True


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


def split_microbatches(tree, rows: int, microbatch_rows: int, rows_per_example: int = 1):
    """[rows, ...] -> [parts, rows/parts, ...]: part i takes examples i, i + parts, ...

    Strided, so that every device, which holds a contiguous range of rows, has work in every part.
    The rows of an example (a pair) stay together; an array may have one entry per example instead.
    """
    microbatch_rows = min(microbatch_rows, rows)
    if rows % microbatch_rows or microbatch_rows % rows_per_example:
        raise InputError(
            "rows of a microbatch",
            value=microbatch_rows,
            rule=f"must divide the {rows} of a step, and hold whole examples of {rows_per_example}",
        )
    parts, examples = rows // microbatch_rows, microbatch_rows // rows_per_example

    def split(x):
        strided = x.reshape((examples, parts, -1) + x.shape[1:]).swapaxes(0, 1)
        return strided.reshape((parts, -1) + x.shape[1:])

    return jax.tree.map(split, tree)


def map_microbatches(function: Callable, batch: Batch, rows: int):
    """function(microbatch) -> arrays [b, ...], over all rows in order: bounds the memory of a
    forward pass."""
    return _joined(jax.lax.map(function, split_microbatches(batch, batch.rows, rows)))


def _joined(parts, rows_per_example: int = 1):
    """What split_microbatches split, in its order again: [parts, b, ...] -> [rows, ...]."""

    def join(x):
        examples = x.reshape((x.shape[0], -1, rows_per_example) + x.shape[2:])
        return examples.swapaxes(0, 1).reshape((-1,) + x.shape[2:])

    return jax.tree.map(join, parts)


def weighted_loss(loss, metrics, batch: Batch, weights: jax.Array, *, corrected: bool = True):
    """(sum of weights * loss, numerators of the metrics). loss is [B, S], or [B] for one value per
    row, or [B / K] for one per example of K rows.

    `corrected`: a loss per token is multiplied by the rollout correction, `batch.weights`.
    """
    if loss.ndim == 1:
        # A loss per row (or example) is averaged over those that have policy tokens; weights sum
        # to 1 over them.
        keep, weight = _live(batch, loss.shape[0]), weights
    else:
        keep, weight = batch.mask > 0, weights
        if corrected and batch.weights is not None:
            weight = weight * jax.lax.stop_gradient(batch.weights)
    # Selected before the product: what stands at weight 0 may be infinite.
    total = jnp.sum(jnp.where(keep & (weight != 0), weight * loss, 0.0))
    sums = {name: _metric_sum(name, value, batch) for name, value in metrics.items()}
    return total, sums


def _live(batch: Batch, examples: int) -> jax.Array:
    """Whether any row of an example has a policy token: [B] -> [examples]."""
    return jnp.any((batch.mask > 0).reshape(examples, -1), axis=1)


def _row_weights(batch: Batch, rows_per_example: int) -> jax.Array:
    live = _live(batch, batch.rows // rows_per_example).astype(batch.mask.dtype)
    return live / jnp.maximum(jnp.sum(live), 1)


def _metric_sum(name: str, value: jax.Array, batch: Batch):
    """(numerator, denominator) so that means never depend on the split; names ending in _max or
    _min keep the extreme."""
    value = jax.lax.stop_gradient(value)
    keep = batch.mask > 0 if value.ndim == 2 else _live(batch, value.shape[0])
    count = jnp.sum(keep.astype(jnp.float32))
    if name.endswith("_max"):
        return jnp.max(jnp.where(keep, value, -jnp.inf)), count
    if name.endswith("_min"):
        return jnp.min(jnp.where(keep, value, jnp.inf)), count
    return jnp.sum(jnp.where(keep, value, 0.0)), count


def _metric_value(name: str, numerator, denominator):
    """From per-microbatch parts, stacked on axis 0, to one number; 0 where nothing counted."""
    count = jnp.sum(denominator)
    if name.endswith("_max"):
        return jnp.where(count > 0, jnp.max(numerator), 0.0)
    if name.endswith("_min"):
        return jnp.where(count > 0, jnp.min(numerator), 0.0)
    return jnp.sum(numerator) / jnp.maximum(count, 1)


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: the sum of `terms` of the model's outputs, each with a reduction of its
    own.

    model(params, microbatch) -> outputs, a pytree of arrays with rows in front.
    terms(outputs, batch) -> (unreduced losses, one per reduction, metrics). A loss is [B, S], or
    [B] for one value per row, or [B / rows_per_example] for one per example (a pair is two rows
    that follow each other), which is averaged over those that have policy tokens.
    `corrected` names, term by term, whether the rollout correction weighs it. `whole_step`: the
    terms need all rows of an optimizer step at once (a quantile, a covariance), not a microbatch.
    `keep` picks of the outputs what `fit` returns of every row.
    """

    model: Callable
    terms: Callable
    reductions: tuple[Callable, ...]
    corrected: tuple[bool, ...]
    whole_step: bool = False
    rows_per_example: int = 1
    keep: Callable = lambda outputs: None

    def total(self, outputs, batch: Batch, token_weights, row_weights):
        """The weighted sum of all terms over the rows at hand, and the numerators of the
        metrics."""
        losses, metrics = self.terms(outputs, batch)
        total, sums = jnp.zeros(()), {}
        for loss, tokens, corrected in zip(losses, token_weights, self.corrected, strict=True):
            weights = row_weights if loss.ndim == 1 else tokens
            part, sums = weighted_loss(loss, metrics, batch, weights, corrected=corrected)
            total = total + part
        return total, sums


def _weights(batch: Batch, objective: Objective):
    """Of every token, term by term, and of every example."""
    weights = tuple(reduction(batch) for reduction in objective.reductions)
    return weights, _row_weights(batch, objective.rows_per_example)


def loss_alone(params, batch: Batch, objective: Objective, microbatch_rows: int):
    """The metrics of loss_and_gradient over all rows of `batch`, "loss" among them, without a
    backward pass."""
    batch = select_policy_tokens(batch)
    model = functools.partial(objective.model, params)
    outputs = map_microbatches(model, batch, microbatch_rows)
    loss, sums = objective.total(outputs, batch, *_weights(batch, objective))
    return {name: _metric_value(name, *pair) for name, pair in sums.items()} | {"loss": loss}


def loss_and_gradient(params, batch: Batch, objective: Objective, microbatch_rows: int):
    """Loss, gradient, metrics of one optimizer step over all rows of `batch`, microbatch by
    microbatch, and what the objective keeps of its outputs."""
    batch = select_policy_tokens(batch)
    weights, row_weights = _weights(batch, objective)
    if objective.whole_step and microbatch_rows < batch.rows:
        return _whole_step(params, batch, objective, weights, row_weights, microbatch_rows)

    def one(params, part):
        outputs = objective.model(params, part[0])
        total, sums = objective.total(outputs, *part)
        return total, (sums, jax.lax.stop_gradient(objective.keep(outputs)))

    gradient_of = jax.value_and_grad(one, has_aux=True)
    whole = (batch, weights, row_weights)
    parts = split_microbatches(whole, batch.rows, microbatch_rows, objective.rows_per_example)
    if parts[2].shape[0] == 1:
        (loss, aux), gradient = gradient_of(params, jax.tree.map(lambda x: x[0], parts))
        aux = jax.tree.map(lambda x: x[None], aux)
    else:

        def accumulate(carry, part):
            (loss, aux), gradient = gradient_of(params, part)
            return jax.tree.map(jnp.add, carry, (loss, gradient)), aux

        (loss, gradient), aux = jax.lax.scan(accumulate, (jnp.zeros(()), _zeros(params)), parts)
    sums, kept = aux
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    return loss, gradient, metrics, _joined(kept, objective.rows_per_example)


def _zeros(params):
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def _whole_step(params, batch, objective, weights, row_weights, microbatch_rows: int):
    """The terms see all rows: a forward pass over the microbatches, d total / d outputs, and the
    backward pass of each microbatch with its share of that. One forward pass more than otherwise.
    """
    model = functools.partial(objective.model, params)
    outputs = map_microbatches(model, batch, microbatch_rows)

    def whole(outputs):
        return objective.total(outputs, batch, weights, row_weights)

    (loss, sums), pull = jax.value_and_grad(whole, has_aux=True)(outputs)

    def accumulate(gradient, part):
        microbatch, pulled = part
        _, backward = jax.vjp(lambda p: objective.model(p, microbatch), params)
        return jax.tree.map(jnp.add, gradient, backward(pulled)[0]), None

    parts = split_microbatches((batch, pull), batch.rows, microbatch_rows)
    gradient, _ = jax.lax.scan(accumulate, _zeros(params), parts)
    sums = jax.tree.map(lambda x: x[None], sums)
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    return loss, gradient, metrics, objective.keep(outputs)
