"""fit: all optimizer steps of a batch, over epochs and minibatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax.batch import Batch
from rljax.contracts import is_zero
from rljax.errors import InputError
from rljax.learn.objective import Objective, Steps, _split, loss_alone, loss_and_gradient
from rljax.learn.state import StepLayout, TrainState, optimizer_step
from rljax.metric import Metric
from rljax.models.trees import merged

METRICS = {
    "optimizer_steps": Metric("optimizer steps of this step", "steps", "1 is fully on-policy"),
    "skipped_steps": Metric(
        "optimizer steps left out because loss or gradient was not finite", "steps", "0"
    ),
    "skipped_in_a_row": Metric(
        "longest streak of steps that were not finite",
        "steps",
        "0; a run stops at max_skipped_in_a_row",
    ),
    "overflow_steps": Metric(
        "optimizer steps not taken because the gradient, times the loss scale, left the range of "
        "float16: the scale halves",
        "steps",
        "a few at the start; no fault, unless they come in most steps",
    ),
    "loss_scale": Metric(
        "what the loss is multiplied by before its float16 gradient is computed",
        "x",
        "above 1; doubles after 2,000 optimizer steps without an overflow",
    ),
    "empty_steps": Metric(
        "optimizer steps without a token to learn from",
        "steps",
        "0; more: filters or failed rewards leave nothing",
    ),
    "trust_region_stopped_steps": Metric(
        "optimizer steps not taken, as the policy had moved further than algorithm.trust_region",
        "steps",
        "few",
    ),
}


def fit(
    state: TrainState,
    batch: Batch,
    objective: Objective,
    *,
    optimizer: optax.GradientTransformation,
    steps: Steps,
    trust_region: float = 0.0,
    layout: StepLayout | None = None,
    beside: "Beside | None" = None,
) -> tuple[TrainState, dict[str, jax.Array], Any]:
    """Learns from all epochs and minibatches of a batch, rows / steps.rows steps each epoch.

    Args:
      state: the trained weights and their optimizer state.
      batch: B rows of S tokens.
      objective: the model, the losses and their reductions.
      optimizer: the transformation that `state` was made for.
      steps: rows of an optimizer step and of a microbatch, epochs, packing.
      trust_region: above 0, once the metric ppo_k3 (KL of the policy to the one that the batch
        began with) of a minibatch exceeds it, that step and the rest are not taken (TRPO's
        constraint as a monitor, arXiv 1502.05477).
      layout: see `optimizer_step`.
      beside: a second objective, whose gradient on an equal part of its rows every step adds.

    Returns (the state after all steps, metrics as scalars, (what the objective keeps of the
    outputs, the model's sums) of a batch's only step). Metrics are means over the optimizer steps,
    and extremes for names ending in _max or _min.

    A minibatch without policy tokens is not taken (momentum would still move), unless there
    are rows of `beside` to learn from. Raises InputError if steps.rows does not divide the
    rows of the batch.
    """
    if batch.rows % steps.rows:
        raise InputError(
            "rows of a step",
            value=steps.rows,
            rule=f"must divide {batch.rows} rows",
            fix=f"--config.batch.sequences_per_optimizer_step={batch.rows}, or a divisor of it",
        )
    frozen, count = state.frozen, batch.rows // steps.rows  # not in the carry of the loop below
    objective = _with_frozen(objective, frozen)
    beside = beside and beside.of_steps(count, frozen)
    microbatches = steps.microbatch_rows, steps.packing
    if not steps.learn:
        return state, loss_alone(state.params, batch, objective, *microbatches), None
    state = dataclasses.replace(state, frozen={})

    def step(carry, rows):
        (state, stopped), (minibatch, examples) = carry, rows
        scale = state.loss_scale and state.loss_scale.scale
        *results, extras = loss_and_gradient(
            state.params, minibatch, objective, *microbatches, scale
        )
        results = *results, ~jnp.any(minibatch.mask > 0), extras[1]
        if beside is not None:
            results = beside.added(state.params, examples, *results, scale)
        loss, gradient, metrics, empty, counted = results
        if not is_zero(trust_region):
            stopped = stopped | (metrics["ppo_k3"] > trust_region)
        take = ~(stopped | empty)
        new_state, step_metrics = optimizer_step(state, gradient, loss, optimizer, take, layout)
        metrics |= objective.auxiliary.metrics(counted)
        state = _moved_by_sums(objective, state, new_state, counted)
        counts = dict(skipped_in_a_row_max=state.skipped_in_a_row, stopped_fraction=stopped)
        counts = jax.tree.map(jnp.float32, {**counts, "empty_fraction": empty})
        return (state, stopped), ({**metrics, **step_metrics, **counts}, extras)

    initial, carry = state, (state, jnp.zeros((), bool))
    rows = batch, beside and beside.batch
    if count * steps.epochs == 1:
        (state, _), (metrics, extras) = step(carry, rows)
    else:

        def epoch(carry, _):
            return jax.lax.scan(step, carry, _split(rows, count))

        (state, _), (metrics, _) = jax.lax.scan(epoch, carry, None, length=steps.epochs)
        reducers = {"_max": jnp.max, "_min": jnp.min}
        metrics, extras = {k: reducers.get(k[-4:], jnp.mean)(v) for k, v in metrics.items()}, None
    _count_steps(metrics, initial, state, count * steps.epochs, trust_region)
    return dataclasses.replace(state, frozen=frozen), metrics, extras


def _moved_by_sums(objective: Objective, old: TrainState, new: TrainState, counted) -> TrainState:
    """Returns the state `new` after an optimizer step, with the changes that the model's sums make
    to its weights if the step was taken."""
    if objective.auxiliary.after is None:
        return new
    moved, was_taken = (
        objective.auxiliary.after(old.params, new.params, counted),
        new.step > old.step,
    )
    params = jax.tree.map(lambda moved, x: jnp.where(was_taken, moved, x), moved, new.params)
    return dataclasses.replace(new, params=params)


@dataclasses.dataclass(frozen=True)
class Beside:
    """An objective on rows of its own, whose gradient every optimizer step of a batch adds to that
    of the batch times `batch_share` (a pre-training loss beside the policy's). `steps.rows` of them
    are an optimizer step's; further epochs take the same rows again."""

    batch: Batch
    objective: Objective
    steps: Steps
    name: str  # of its metric: the loss as the objective's metric "loss" has it
    batch_share: float | jax.Array = 1.0

    def of_steps(self, count: int, frozen: dict) -> "Beside":
        """Returns the objective of the trained weights alone, beside the weights `frozen`. Raises
        InputError unless the rows are those of `count` optimizer steps."""
        if self.batch.rows != count * self.steps.rows:
            raise InputError(
                f"rows of {self.name}",
                value=self.batch.rows,
                rule=f"{count} optimizer steps of {self.steps.rows} rows",
                fix=f"give {self.name} {count * self.steps.rows} rows",
            )
        return dataclasses.replace(self, objective=_with_frozen(self.objective, frozen))

    def added(self, params, examples: Batch, loss, gradient, metrics: dict, empty, counted, scale):
        """Adds the examples of an optimizer step. Returns (loss, gradient, metrics, whether there
        is nothing to learn from, the model's sums) with theirs included; their gradient has the
        same loss scale."""
        # Without policy tokens a load-balancing loss, for one, would still have a gradient.
        share = self.batch_share
        loss, gradient = jax.tree.map(
            lambda x: jnp.where(empty, 0, (share * x).astype(x.dtype)), (loss, gradient)
        )
        options = self.steps.microbatch_rows, self.steps.packing, scale
        extra_loss, extra_gradient, extra_metrics, (_, extra_sums) = loss_and_gradient(
            params, examples, self.objective, *options
        )
        gradient = jax.tree.map(jnp.add, gradient, extra_gradient)
        empty &= ~jnp.any(examples.mask > 0)
        if extra_sums:  # a model that counts for the one objective does so for the other
            counted = jax.tree.map(jnp.add, counted, extra_sums)
        return (
            loss + extra_loss,
            gradient,
            {**metrics, self.name: extra_metrics["loss"]},
            empty,
            counted,
        )


def _count_steps(
    metrics: dict, initial: TrainState, state: TrainState, total: int, trust_region: float
) -> None:
    """Replaces fractions in the metrics by counts of the `total` optimizer steps between two
    states."""
    metrics["skipped_steps"] = (state.skipped - initial.skipped).astype(jnp.float32)
    if state.loss_scale is not None:
        overflows = state.loss_scale.overflows - initial.loss_scale.overflows
        metrics["overflow_steps"] = overflows.astype(jnp.float32)
        metrics["loss_scale"] = state.loss_scale.scale
    # The longest streak within this call, so that one good step at its end does not hide it.
    metrics["skipped_in_a_row"] = metrics.pop("skipped_in_a_row_max")
    stopped, empty = metrics.pop("stopped_fraction"), metrics.pop("empty_fraction")
    if not is_zero(trust_region):
        metrics["trust_region_stopped_steps"] = total * stopped
    metrics["empty_steps"] = total * empty
    metrics["optimizer_steps"] = jnp.float32(total)


def _with_frozen(objective: Objective, frozen: dict) -> Objective:
    """Returns the objective as a function of the trained weights alone."""
    model = objective.model
    if not frozen:
        return objective
    return dataclasses.replace(
        objective, model=lambda params, microbatch: model(merged(params, frozen), microbatch)
    )
