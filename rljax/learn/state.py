"""TrainState, and the optimizer step that guards it against non-finite losses and gradients.

A state holds parameters, optimizer state and counters of a trained role. Gradients come from
rljax.learn.objective; rljax.roles.layout places the arrays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax.mesh import in_device_memory, in_memory_of, is_on_host
from rljax.models.trees import merged


@dataclasses.dataclass(frozen=True)
class Spread:
    """What an optimizer step does with the data axis, along which weights are whole. `moments`: the
    optimizer's state is split over it, too (ZeRO stage 1). `sum_once`: gradients are summed over it
    after all microbatches (rljax.learn.replicas), and not in each."""

    moments: bool = False
    sum_once: bool = False


AS_WEIGHTS = Spread()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an optimizer step changes. Counters are int32 scalars on the device.

    `frozen` are the weights that no optimizer moves (the base under adapters, which other roles may
    share), {} where all of them are trained. `spread` is no array.
    """

    params: Any
    opt_state: Any
    step: jax.Array  # optimizer steps taken: the policy version
    skipped: jax.Array  # steps skipped since the start because loss or gradient was not finite
    skipped_in_a_row: jax.Array
    frozen: Any = dataclasses.field(default_factory=dict)
    spread: Spread = dataclasses.field(default=AS_WEIGHTS, metadata={"static": True})

    @property
    def weights(self):
        """All weights of the model."""
        return merged(self.params, self.frozen)


def new_train_state(
    params,
    optimizer: optax.GradientTransformation,
    frozen: dict | None = None,
    spread: Spread = AS_WEIGHTS,
) -> TrainState:
    """The state before the first step; rljax.roles places it on the mesh."""
    counters = (
        jnp.zeros((), jnp.int32) for _ in range(3)
    )  # three buffers: donation forbids sharing one
    return TrainState(params, optimizer.init(params), *counters, frozen or {}, spread)


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Where an optimizer step computes: gradients and weights as the moments lie, so that a device
    updates the weights of its own moments, and then the weights as they are held."""

    moments: Any
    weights: Any


def _changed(optimizer, gradient, params, opt_state, take, layout: StepLayout | None):
    """(parameters, optimizer state) after the optimizer's update where `take`, else as they were.

    A state that waits on the host is fetched and sent back in a loop of one turn or none: in a
    straight program XLA fetches it at the start, and holds it through the backward pass.
    """

    def turn(carry):
        _, params, waiting = carry
        held, mine = in_device_memory(waiting), gradient
        if layout is not None:
            params, mine = (constrain(x, layout.moments) for x in (params, gradient))
        updates, new = optimizer.update(mine, held, params)
        keep = lambda new, old: jnp.where(take, new, old)  # noqa: E731
        params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        if layout is not None:
            params = constrain(params, layout.weights)
        return jnp.zeros((), bool), params, in_memory_of(waiting, jax.tree.map(keep, new, held))

    constrain = jax.lax.with_sharding_constraint
    carry = (take, params, opt_state)
    if any(is_on_host(x) for x in jax.tree.leaves(opt_state)):
        return jax.lax.while_loop(lambda carry: carry[0], turn, carry)[1:]
    return turn(carry)[1:]


def optimizer_step(
    state: TrainState,
    gradient,
    loss,
    optimizer: optax.GradientTransformation,
    take=True,
    layout: StepLayout | None = None,
):
    """One optimizer step; a non-finite loss or gradient changes nothing but the counters, and
    without `take` (nothing to learn from, or outside the trust region) nothing changes at all.

    An optimizer state that waits on the host is fetched for the step, and sent back. `layout` is
    that of a state whose moments are split further than its weights."""
    grad_norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    take = jnp.asarray(take)
    params, opt_state = _changed(
        optimizer, gradient, state.params, state.opt_state, finite & take, layout
    )
    bad, taken = (take & ~finite).astype(jnp.int32), (take & finite).astype(jnp.int32)
    state = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        step=state.step + taken,
        skipped=state.skipped + bad,
        skipped_in_a_row=jnp.where(
            take, bad * (state.skipped_in_a_row + 1), state.skipped_in_a_row
        ),
    )
    # A skipped step reports norm 0 and is counted, so that averages over steps stay finite.
    return state, {
        "grad_norm": jnp.where(finite, grad_norm, 0.0),
        "loss": jnp.where(finite, loss, 0.0),
    }
