"""TrainState, and the optimizer step that guards it against non-finite losses and gradients.

A state holds parameters, optimizer state and counters of a trained role, and what its precision
needs: the loss scale of float16, the key that rounds bfloat16 weights. Gradients come from
rljax.learn.objective; rljax.roles.layout places the arrays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax.learn.loss_scale import LossScale, new_loss_scale
from rljax.learn.rounding import rounded_like, rounds, widened
from rljax.mesh import in_device_memory, in_memory_of, is_on_host
from rljax.metric import Metric
from rljax.models.trees import merged

METRICS = {
    "loss": Metric(
        "what the optimizer minimises, mean over its tokens or examples",
        "",
        "falls in supervised, preference and reward-model training; with a policy loss its level "
        "says nothing, look at reward and evaluation",
    ),
    "grad_norm": Metric(
        "norm of the gradient before clipping",
        "",
        "steady; spikes that keep coming back: a lower learning rate",
    ),
}


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Data parallelism of an optimizer step over the data axis, along which weights are whole.
    `moments`: the optimizer's state is split over it, too (ZeRO stage 1). `sum_once`: gradients are
    summed over it after all microbatches (rljax.learn.replicas), and not in each."""

    moments: bool = False
    sum_once: bool = False


AS_WEIGHTS = DataParallel()


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State that an optimizer step changes. Counters are int32 scalars on the device.

    `frozen` are the weights that no optimizer moves (the base under adapters, which other roles may
    share), {} where all of them are trained. `spread` is no array. `precision` is {} of float32
    weights and products, and then no part of the pytree: checkpoints from before it stay whole.
    """

    params: Any
    opt_state: Any
    step: jax.Array  # optimizer steps taken: the policy version
    skipped: jax.Array  # steps skipped since the start because loss or gradient was not finite
    skipped_in_a_row: jax.Array
    frozen: Any = dataclasses.field(default_factory=dict)
    spread: DataParallel = AS_WEIGHTS
    # "loss_scale" of a model that computes in float16; "rounding", the data of a key, where trained
    # weights are bfloat16.
    precision: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def weights(self):
        """All weights of the model."""
        return merged(self.params, self.frozen)

    @property
    def loss_scale(self) -> LossScale | None:
        """Scale of a float16 loss; None if the loss has none."""
        return self.precision.get("loss_scale")

    def tree_flatten_with_keys(self):
        """Returns the arrays with their names, and what is static, as JAX's pytree
        registry wants them."""
        absent = ("spread", *(("precision",) if self.precision == {} else ()))
        names = tuple(name for name in vars(self) if name not in absent)
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return children, (names, self.spread)

    @classmethod
    def tree_unflatten(cls, static, children):
        """Returns the state of what `tree_flatten_with_keys` returned."""
        names, spread = static
        return cls(**dict(zip(names, children, strict=True)), spread=spread)


def new_train_state(
    params,
    optimizer: optax.GradientTransformation,
    frozen: dict | None = None,
    spread: DataParallel = AS_WEIGHTS,
    *,
    scaled: bool = False,
    rounding: jax.Array | None = None,
) -> TrainState:
    """Returns the state before the first step; rljax.roles places it on the mesh.

    Args:
      params: the trained weights.
      optimizer: the transformation whose state is made. Moments of weights that are held in
        bfloat16 are float32.
      frozen: weights that no optimizer moves.
      spread: data parallelism of the optimizer step.
      scaled: the loss is scaled, as the model computes in float16.
      rounding: the random key by which weights that are held in bfloat16 are rounded; None: that of
        seed 0.
    """
    counters = (jnp.zeros((), jnp.int32) for _ in range(3))  # donation forbids to share a buffer
    precision: dict[str, Any] = {"loss_scale": new_loss_scale()} if scaled else {}
    if rounds(params):
        key = jax.random.key(0) if rounding is None else rounding
        precision["rounding"] = jax.random.key_data(key)
    moments = optimizer.init(widened(params))
    return TrainState(params, moments, *counters, frozen or {}, spread, precision)


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Layout in which an optimizer step computes: gradients and weights as the moments lie, so that
    a device updates the weights of its own moments, and then the weights as they are held."""

    moments: Any
    weights: Any


def _changed(optimizer, gradient, state: TrainState, take, layout: StepLayout | None):
    """Returns (parameters, optimizer state): updated where `take`, else as they were.

    A state that waits on the host is fetched and sent back in a loop of one iteration or none: in a
    straight program XLA fetches it at the start, and holds it through the backward pass.
    """

    def body(carry):
        _, params, waiting = carry
        opt_state, step_gradient = in_device_memory(waiting), gradient
        if layout is not None:
            params, step_gradient = (constrain(x, layout.moments) for x in (params, gradient))
        wide_params = widened(params)
        updates, new_opt_state = optimizer.update(step_gradient, opt_state, wide_params)

        def keep(new, old):
            return jnp.where(take, new, old)

        moved = optax.apply_updates(wide_params, updates)
        if "rounding" in state.precision:
            moved = rounded_like(moved, params, state.precision["rounding"], state.step)
        params = jax.tree.map(keep, moved, params)
        if layout is not None:
            params = constrain(params, layout.weights)
        return (
            jnp.zeros((), bool),
            params,
            in_memory_of(waiting, jax.tree.map(keep, new_opt_state, opt_state)),
        )

    constrain = jax.lax.with_sharding_constraint
    carry = (take, state.params, state.opt_state)
    if any(is_on_host(x) for x in jax.tree.leaves(state.opt_state)):
        return jax.lax.while_loop(lambda carry: carry[0], body, carry)[1:]
    return body(carry)[1:]


def optimizer_step(
    state: TrainState,
    gradient,
    loss,
    optimizer: optax.GradientTransformation,
    take=True,
    layout: StepLayout | None = None,
):
    """Takes one optimizer step. A non-finite loss or gradient changes nothing but the counters, and
    without `take` (nothing to learn from, or outside the trust region) nothing changes at all.

    Args:
      state: weights, optimizer state and counters.
      gradient: like state.params, without the loss scale.
      loss: a scalar, without the loss scale.
      optimizer: the transformation that `state` was made for.
      take: bool scalar.
      layout: that of a state whose moments are split further than its weights.

    An overflow that a lower loss scale may cure is counted with the scale, and not as a step that
    went wrong. An optimizer state that waits on the host is fetched for the step, and sent back.
    """
    gradient = widened(gradient)
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    take, scale = jnp.asarray(take), state.loss_scale
    params, opt_state = _changed(optimizer, gradient, state, finite & take, layout)
    overflow, precision = jnp.zeros((), bool), state.precision
    if scale is not None:
        overflow = scale.is_to_blame(loss, finite)
        precision = {**precision, "loss_scale": scale.after(loss, finite, take)}
    failed, taken = take & ~finite & ~overflow, take & finite
    in_a_row = jnp.where(failed, state.skipped_in_a_row + 1, state.skipped_in_a_row)
    state = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        step=state.step + taken.astype(jnp.int32),
        skipped=state.skipped + failed.astype(jnp.int32),
        skipped_in_a_row=jnp.where(taken, 0, in_a_row),
        precision=precision,
    )
    # A skipped step reports norm 0 and is counted, so that averages over steps stay finite.
    return state, {
        "grad_norm": jnp.where(finite, grad_norm, 0.0),
        "loss": jnp.where(finite | overflow, loss, 0.0),
    }
