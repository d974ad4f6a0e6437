"""The only place that masks, weights and averages a loss: microbatches, and the gradient of a
step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.learn.loss_scale import scaled_objective
from rljax.learn.packing import Packed, Packing, each_microbatch, map_packed, pack
from rljax.learn.replicas import Replicas
from rljax.learn.rounding import widened
from rljax.metric import MetricAt


@dataclasses.dataclass(frozen=True)
class Steps:
    """Division of a batch: rows per optimizer step, rows per microbatch, passes over the batch.
    Without `learn` losses and metrics are computed, and no step is taken (held-out data). With
    `packing` the models see packed rows (rljax.learn.packing), and its shape is that of the
    microbatches."""

    rows: int
    microbatch_rows: int
    epochs: int = 1
    learn: bool = True
    packing: Packing | None = None


def select_policy_tokens(batch: Batch) -> Batch:
    """Returns the batch with 0 in its float fields [B, S] wherever the mask is 0: what stands
    there, NaN included, never meets exp, log or a sum."""
    selected = {}
    for field in dataclasses.fields(batch):
        value = batch.__dict__[field.name]
        of_tokens = value is not None and field.metadata["axes"] == ("B", "S")
        if of_tokens and value.dtype.kind == "f" and field.name != "mask":
            selected[field.name] = jnp.where(batch.mask > 0, value, 0.0)
    return batch.replace(**selected)


def _split(tree, parts: int):
    """Splits every array that has rows into parts: [B, ...] -> [parts, B/parts, ...]."""
    return jax.tree.map(lambda x: x.reshape((parts, -1) + x.shape[1:]), tree)


def split_microbatches(tree, rows: int, microbatch_rows: int, rows_per_example: int = 1):
    """Splits arrays [rows, ...] into [parts, rows / parts, ...]: part i takes every parts-th
    example from example i on.

    Strided, so that every device, which holds a contiguous range of rows, has work in every part.
    The rows of an example (a pair) stay together; an array may have one entry per example instead.
    Raises InputError if `microbatch_rows` does not divide `rows`, or cuts an example.
    """
    microbatch_rows = min(microbatch_rows, rows)
    if rows % microbatch_rows or microbatch_rows % rows_per_example:
        raise InputError(
            "rows of a microbatch",
            value=microbatch_rows,
            rule=f"must divide the {rows} of a step, and hold whole examples of {rows_per_example}",
            fix=f"microbatch_rows={rows}, or a divisor of it that is a multiple of "
            f"{rows_per_example}",
        )
    parts, examples = rows // microbatch_rows, microbatch_rows // rows_per_example

    def split(x):
        strided = x.reshape((examples, parts, -1) + x.shape[1:]).swapaxes(0, 1)
        return strided.reshape((parts, -1) + x.shape[1:])

    return jax.tree.map(split, tree)


def map_microbatches(function: Callable, batch: Batch, rows: int):
    """Applies function(microbatch) -> arrays [b, ...] to all rows, `rows` at a time, in order ->
    arrays [B, ...]. Bounds the memory of a forward pass."""
    return _joined(jax.lax.map(function, split_microbatches(batch, batch.rows, rows)))


def _joined(parts, rows_per_example: int = 1):
    """Undoes split_microbatches: [parts, b, ...] -> [rows, ...]."""

    def join(x):
        examples = x.reshape((x.shape[0], -1, rows_per_example) + x.shape[2:])
        return examples.swapaxes(0, 1).reshape((-1,) + x.shape[2:])

    return jax.tree.map(join, parts)


def map_tokens(function: Callable, batch: Batch, steps: Steps | int | None = None, live=None):
    """Applies function(rows) -> (a tree of numbers per token, a tree of sums over the rows) to all
    rows. Returns (the numbers [B, S, ...], the sums). No gradient.

    Packed where `steps` says so, and then of rows that are `live` [B] alone (default: those with
    policy tokens); otherwise at most `steps` rows at once.
    """
    if not isinstance(steps, Steps):
        steps = Steps(batch.rows, steps or batch.rows)
    if steps.packing is not None and batch.pixels is None:
        return map_packed(function, pack(batch, steps.packing, live=live))

    def one(microbatch):
        numbers, sums = function(microbatch)
        # map_microbatches joins rows: every row carries a share of its microbatch's sums.
        rows = microbatch.rows
        return numbers, jax.tree.map(lambda x: jnp.broadcast_to(x / rows, (rows, *x.shape)), sums)

    numbers, sums = map_microbatches(one, batch, steps.microbatch_rows)
    return numbers, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def weighted_loss(
    loss,
    metrics,
    batch: Batch,
    weights: jax.Array,
    *,
    corrected: bool = True,
    tokens: Callable | None = None,
):
    """Returns (sum of weights * loss, numerators of the metrics).

    Args:
      loss: [B, S], or [B] for one value per row, or [B / K] for one per example of K rows.
      metrics: {name: array as one of these}.
      batch: the B rows.
      weights: of the loss, as the reduction gives them, in the shape of `loss`.
      corrected: multiplies a loss per token by the rollout correction, `batch.weights`.
      tokens: batch -> bool [B, S], the tokens that a loss per token is of; None: the policy's.
    """
    if loss.ndim == 1:
        # A loss per row (or example) is averaged over those that have policy tokens; weights sum
        # to 1 over them.
        counted, weight = _live(batch, loss.shape[0]), weights
    else:
        counted, weight = batch.mask > 0 if tokens is None else tokens(batch), weights
        if corrected and batch.weights is not None:
            weight = weight * jax.lax.stop_gradient(batch.weights)
    # Selected before the product: what stands at weight 0 may be infinite.
    total = jnp.sum(jnp.where(counted & (weight != 0), weight * loss, 0.0))
    sums = {name: _metric_sum(name, value, batch) for name, value in metrics.items()}
    return total, sums


def _live(batch: Batch, examples: int) -> jax.Array:
    """Returns whether any row of an example has a policy token: [B] -> [examples]."""
    return jnp.any((batch.mask > 0).reshape(examples, -1), axis=1)


def _row_weights(batch: Batch, rows_per_example: int) -> jax.Array:
    live = _live(batch, batch.rows // rows_per_example).astype(batch.mask.dtype)
    return live / jnp.maximum(jnp.sum(live), 1)


def _metric_sum(name: str, value: jax.Array, batch: Batch):
    """Returns (numerator, denominator) so that means never depend on the split; names ending in
    _max or _min keep the extreme."""
    value = jax.lax.stop_gradient(value)
    if isinstance(value, MetricAt):
        value, counted = value
    else:
        counted = batch.mask > 0 if value.ndim == 2 else _live(batch, value.shape[0])
    count = jnp.sum(counted.astype(jnp.float32))
    if name.endswith("_max"):
        return jnp.max(jnp.where(counted, value, -jnp.inf)), count
    if name.endswith("_min"):
        return jnp.min(jnp.where(counted, value, jnp.inf)), count
    return jnp.sum(jnp.where(counted, value, 0.0)), count


def _metric_value(name: str, numerator, denominator):
    """Returns a metric from its parts by microbatch, stacked on axis 0; 0 where nothing counted."""
    count = jnp.sum(denominator)
    if name.endswith("_max"):
        return jnp.where(count > 0, jnp.max(numerator), 0.0)
    if name.endswith("_min"):
        return jnp.where(count > 0, jnp.min(numerator), 0.0)
    return jnp.sum(numerator) / jnp.maximum(count, 1)


@dataclasses.dataclass(frozen=True)
class AuxiliaryObjective:
    """Terms made of the model's sums over all rows of an optimizer step: a loss, which is added to
    that of the terms (None: none), metrics, and the weights after the step from (the parameters
    before it, those that the optimizer makes, sums) (None: the optimizer's)."""

    loss: Callable | None = None
    metrics: Callable = lambda sums: {}
    after: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """The function that is minimised: the sum of `terms` of the model's outputs, each with a
    reduction of its own.

    model(params, microbatch) -> outputs, a pytree of arrays [B, S, ...]; with `sums`, (those, a
    pytree of sums over the rows).
    terms(outputs, batch) -> (unreduced losses, one per reduction, metrics). A loss is [B, S], or
    [B] for one value per row, or [B / rows_per_example] for one per example (a pair is two rows
    that follow each other), which is averaged over those that have policy tokens.
    `corrected` names, term by term, whether the rollout correction weighs it, and `tokens` the
    function of the batch that says at which tokens a loss per token counts (None, and () for all
    terms: at the policy's). `whole_step`: the
    terms need all rows of an optimizer step at once (a quantile, a covariance), not a microbatch.
    `keep` picks of the outputs what `fit` returns of every row, beside the sums, and `auxiliary`
    says what else is made of them. With several `replicas` the model is on the mesh of one.
    """

    model: Callable
    terms: Callable
    reductions: tuple[Callable, ...]
    corrected: tuple[bool, ...]
    tokens: tuple[Callable | None, ...] = ()
    whole_step: bool = False
    rows_per_example: int = 1
    sums: bool = False
    keep: Callable = lambda outputs: None
    replicas: Replicas = Replicas()
    auxiliary: AuxiliaryObjective = AuxiliaryObjective()

    @property
    def at_once(self) -> bool:
        """Returns whether the loss is a function of all rows of an optimizer step at once."""
        return self.whole_step or self.auxiliary.loss is not None

    def whole_total(self, read, batch: Batch, token_weights, row_weights):
        """Returns `total` of all rows of an optimizer step, the loss of the model's sums included.
        `read` is what `differentiated` returns."""
        outputs, counted = read
        total, sums = self.total(outputs, batch, token_weights, row_weights)
        return total if self.auxiliary.loss is None else total + self.auxiliary.loss(counted), sums

    def differentiated(self, params, rows: Batch):
        """Returns what `whole_total` reads of the rows of one replica: (outputs, sums or ())."""
        outputs, counted = self.read(params, rows)
        return outputs, () if self.auxiliary.loss is None else counted

    def read(self, params, rows: Batch):
        """Returns (outputs [B, S, ...], sums) of the model for the rows of one replica."""
        return self.model(params, rows) if self.sums else (self.model(params, rows), ())

    def read_all(self, params, rows: Batch):
        """Returns (outputs [B, S, ...], sums) of the model for the rows of all replicas."""
        read_each = self.replicas.each(self.read, (None, 0))
        outputs, sums = read_each(params, self.replicas.split(rows))
        return self.replicas.merged(outputs), self.replicas.total(sums)

    def total(self, outputs, batch: Batch, token_weights, row_weights):
        """Returns (the weighted sum of all terms over the rows at hand, the numerators of
        the metrics). token_weights: one [B, S] per term; row_weights: one [B] or
        [examples] per term."""
        losses, metrics = self.terms(outputs, batch)
        total, sums = jnp.zeros(()), {}
        counted_tokens = self.tokens or (None,) * len(losses)
        parts = zip(losses, token_weights, self.corrected, counted_tokens, strict=True)
        for loss, per_token, corrected, tokens in parts:
            weights = row_weights if loss.ndim == 1 else per_token
            options = dict(corrected=corrected, tokens=tokens)
            term, sums = weighted_loss(loss, metrics, batch, weights, **options)
            total = total + term
        return total, sums


def _weights(batch: Batch, objective: Objective):
    """Returns the weights of every token, term by term, and of every example."""
    weights = tuple(reduction(batch) for reduction in objective.reductions)
    return weights, _row_weights(batch, objective.rows_per_example)


def loss_alone(
    params, batch: Batch, objective: Objective, microbatch_rows: int, packing: Packing | None = None
):
    """Returns the metrics of `loss_and_gradient` over all rows of `batch` [B, S], "loss" among
    them, without a backward pass."""
    batch = select_policy_tokens(batch)
    forward = functools.partial(objective.read_all, params)
    if packed := _packs(batch, packing, objective, 1):
        outputs, _ = map_packed(forward, packed)
    else:
        outputs, _ = map_tokens(forward, batch, microbatch_rows)
    loss, sums = objective.total(outputs, batch, *_weights(batch, objective))
    return {name: _metric_value(name, *pair) for name, pair in sums.items()} | {"loss": loss}


def loss_and_gradient(
    params,
    batch: Batch,
    objective: Objective,
    microbatch_rows: int,
    packing: Packing | None = None,
    scale: jax.Array | None = None,
):
    """Computes one optimizer step over all rows of `batch` [B, S], microbatch by microbatch: of
    `microbatch_rows` rows, or packed.

    Args:
      params: the trained weights.
      batch: B rows of S tokens.
      objective: the model, the losses and their reductions.
      microbatch_rows: rows of a forward and backward pass without `packing`.
      packing: sizes of packed rows.
      scale: the gradient is computed of the loss times this scalar, and divided by it when all
        microbatches are added up.

    Returns (loss, gradient like `params`, metrics as scalars, (what the objective keeps of its
    outputs, the model's sums)). Raises InputError if `microbatch_rows` does not divide the rows.
    """
    if scale is None:
        return _loss_and_gradient(params, batch, objective, microbatch_rows, packing)
    scaled = scaled_objective(objective, scale)
    loss, gradient, *rest = _loss_and_gradient(params, batch, scaled, microbatch_rows, packing)
    loss, gradient = jax.tree.map(lambda x: x / scale, (loss, widened(gradient)))
    return loss, gradient, *rest


def _loss_and_gradient(
    params, batch: Batch, objective: Objective, microbatch_rows: int, packing: Packing | None
):
    batch = select_policy_tokens(batch)
    weights, row_weights = _weights(batch, objective)
    if packed := _packs(batch, packing, objective, objective.rows_per_example):
        whole = _packed_whole_step if objective.at_once else _packed
        loss, gradient, metrics, kept_outputs = whole(
            params, batch, objective, weights, row_weights, packed
        )
        return loss, gradient, {**metrics, **packed.metrics()}, kept_outputs
    if objective.at_once and microbatch_rows < batch.rows:
        return _whole_step(params, batch, objective, weights, row_weights, microbatch_rows)

    replicas = objective.replicas

    def one(params, microbatch):
        outputs, counted = objective.read(params, microbatch[0])
        total, sums = objective.whole_total((outputs, counted), *microbatch)
        return total, (sums, jax.lax.stop_gradient((objective.keep(outputs), counted)))

    def gradient_of(params, microbatch):
        of_each = replicas.each(jax.value_and_grad(one, has_aux=True))
        (loss, (sums, (kept_outputs, counted))), gradient = of_each(
            params, replicas.split(microbatch)
        )
        return (loss, (sums, (replicas.merged(kept_outputs), counted))), gradient

    params, whole = replicas.copies(params), (batch, weights, row_weights)
    microbatches = split_microbatches(
        whole, batch.rows, microbatch_rows, objective.rows_per_example
    )
    if microbatches[2].shape[0] == 1:
        (loss, aux), gradient = gradient_of(params, jax.tree.map(lambda x: x[0], microbatches))
        aux = jax.tree.map(lambda x: x[None], aux)
    else:

        def accumulate(carry, microbatch):
            (loss, aux), gradient = gradient_of(params, microbatch)
            return jax.tree.map(jnp.add, carry, (loss, gradient)), aux

        start = jnp.zeros(replicas.shape), replicas.zeros(params)
        (loss, gradient), aux = jax.lax.scan(accumulate, start, microbatches)
    sums, (kept_outputs, counted) = aux
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    counted = jax.tree.map(lambda x: jnp.sum(x, axis=0), counted)
    loss, gradient, counted = replicas.total((loss, gradient, counted))
    return loss, gradient, metrics, (_joined(kept_outputs, objective.rows_per_example), counted)


def _packs(batch: Batch, packing: Packing | None, objective: Objective, together: int):
    """Returns the packed rows of all examples that have policy tokens, `together` rows of one in a
    microbatch unless the terms see all rows at once; None where rows stay as they are."""
    if packing is None or batch.pixels is not None:
        return None
    rows = objective.rows_per_example
    live = jnp.repeat(_live(batch, batch.rows // rows), rows)
    together = 1 if objective.at_once else together
    return pack(batch, packing, live=live, rows_per_example=together)


def _packed(params, batch: Batch, objective: Objective, weights, row_weights, packed: Packed):
    """Computes loss and gradient where the models read packed rows, and the terms the sequences in
    these, one to a row."""
    rows = objective.rows_per_example

    replicas = objective.replicas
    batch, weights, row_weights = replicas.whole((batch, weights, row_weights))

    def one(params, replica_packed: Packed, index):
        outputs, counted = objective.read(params, replica_packed.microbatch(index))
        (sequences, token_weights), present = replica_packed.taken((batch, weights), index)
        sequences = sequences.replace(mask=sequences.mask * present[:, None])
        examples = replica_packed.sequences[index].reshape(-1, rows)[:, 0] // rows
        example_weights = jnp.take(row_weights, examples, mode="clip") * present[::rows]
        row_outputs = replica_packed.outputs(outputs, index)
        total, sums = objective.total(row_outputs, sequences, token_weights, example_weights)
        return total, (sums, *jax.lax.stop_gradient((objective.keep(outputs), counted)))

    def gradient_of(params, index):
        gradient_of_each = jax.value_and_grad(one, has_aux=True)
        (loss, (sums, kept_outputs, counted)), gradient = packed.each(replicas, gradient_of_each)(
            params, index
        )
        return (loss, (sums, replicas.merged(kept_outputs), counted)), gradient

    def accumulate(index, carry):
        loss, gradient, sums, kept_outputs, counted = carry
        (part_loss, (part_sums, part_kept, part_counted)), part_gradient = gradient_of(
            params, index
        )
        sums = {name: _both_parts(name, sums[name], part_sums[name]) for name in part_sums}
        kept_outputs = jax.tree.map(
            lambda stored, values: stored.at[index].set(values), kept_outputs, part_kept
        )
        gradient, counted = jax.tree.map(
            jnp.add, (gradient, counted), (part_gradient, part_counted)
        )
        return loss + part_loss, gradient, sums, kept_outputs, counted

    params = replicas.copies(params)
    (loss, (sums, kept_shapes, count)), _ = jax.eval_shape(gradient_of, params, 0)
    no_sums = {name: _no_part(name, *pair) for name, pair in sums.items()}

    kept_outputs = jax.tree.map(lambda x: jnp.zeros((packed.parts, *x.shape), x.dtype), kept_shapes)
    loss, count = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, count))
    start = loss, replicas.zeros(params), no_sums, kept_outputs, count
    loss, gradient, sums, kept_outputs, counted = each_microbatch(packed, accumulate, start)
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    loss, gradient, counted = replicas.total((loss, gradient, counted))
    return loss, gradient, metrics, (packed.gathered(kept_outputs), counted)


def _no_part(name: str, numerator, denominator):
    """Returns the numerator and denominator of a metric before any microbatch."""
    start = {"_max": -jnp.inf, "_min": jnp.inf}.get(name[-4:], 0.0)
    zeros = jnp.zeros(denominator.shape, denominator.dtype)
    return jnp.full(numerator.shape, start, numerator.dtype), zeros


def _both_parts(name: str, running, part):
    """Returns the numerator and denominator of a metric over two microbatches."""
    join = {"_max": jnp.maximum, "_min": jnp.minimum}.get(name[-4:], jnp.add)
    return join(running[0], part[0]), running[1] + part[1]


def _packed_whole_step(params, batch, objective, weights, row_weights, packed: Packed):
    """`_whole_step` over packed rows."""
    replicas = objective.replicas
    outputs, counted = map_packed(functools.partial(objective.read_all, params), packed)
    (loss, sums), (pulled, auxiliary) = jax.value_and_grad(
        lambda results: objective.whole_total(results, batch, weights, row_weights), has_aux=True
    )((outputs, counted if objective.auxiliary.loss else ()))
    pulled, copies = replicas.whole(pulled), replicas.copies(params)

    def gradient_of(params, replica_packed: Packed, index):
        def read(params):
            outputs, counted = objective.differentiated(params, replica_packed.microbatch(index))
            return replica_packed.outputs(outputs, index), counted

        _, backward = jax.vjp(read, params)
        return backward((replica_packed.taken(pulled, index)[0], auxiliary))[0]

    def accumulate(index, gradient):
        part_gradient = packed.each(replicas, gradient_of)(copies, index)
        return jax.tree.map(jnp.add, gradient, part_gradient)

    gradient = replicas.total(each_microbatch(packed, accumulate, replicas.zeros(copies)))
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    return loss, gradient, metrics, (objective.keep(outputs), counted)


def _whole_step(params, batch, objective, weights, row_weights, microbatch_rows: int):
    """Computes loss and gradient of terms that read all rows: a forward pass over the microbatches,
    d total / d outputs, and the backward pass of each microbatch from its share of that. It takes
    one forward pass more than a loss that is a sum over microbatches.
    """
    replicas, forward = objective.replicas, functools.partial(objective.read_all, params)
    outputs, counted = map_tokens(forward, batch, microbatch_rows)

    def whole(results):
        return objective.whole_total(results, batch, weights, row_weights)

    results = outputs, counted if objective.auxiliary.loss else ()
    (loss, sums), (pull, auxiliary) = jax.value_and_grad(whole, has_aux=True)(results)

    def gradient_of(params, part):
        microbatch, pulled = part
        _, backward = jax.vjp(lambda p: objective.differentiated(p, microbatch), params)
        return backward((pulled, auxiliary))[0]

    def accumulate(gradient, part):
        part = replicas.each(gradient_of)(copies, replicas.split(part))
        return jax.tree.map(jnp.add, gradient, part), None

    copies, parts = replicas.copies(params), (batch, pull)
    parts = split_microbatches(parts, batch.rows, microbatch_rows)
    gradient = replicas.total(jax.lax.scan(accumulate, replicas.zeros(copies), parts)[0])
    sums = jax.tree.map(lambda x: x[None], sums)
    metrics = {name: _metric_value(name, *pair) for name, pair in sums.items()}
    return loss, gradient, metrics, (objective.keep(outputs), counted)
