"""Dynamic loss scaling (arXiv 1710.03740): gradients that pass through float16 are computed of a
loss times a scale, so that the small ones are not rounded to 0.

The scale halves where the scaled gradient leaves float16's range, and that optimizer step is not
taken; it doubles after so many steps without that. Rules and numbers are those of
torch.amp.GradScaler.
"""

import dataclasses

import jax
import jax.numpy as jnp

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The scale of the next optimizer step. All are scalars on the device."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32: steps in a row with a finite gradient, since the scale changed
    overflows: jax.Array  # int32: steps not taken because of the scale, since the start

    def is_to_blame(self, loss, finite) -> jax.Array:
        """Returns whether a gradient that is not finite is an overflow of the scale, which the next
        one may cure: a bool scalar, true if the loss is finite and the scale can be lowered."""
        return ~finite & jnp.isfinite(loss) & (self.scale > 1)

    def after(
        self,
        loss,
        finite,
        take,
        *,
        growth: float = GROWTH,
        backoff: float = BACKOFF,
        interval: int = INTERVAL,
    ) -> "LossScale":
        """Returns the scale after a step whose loss and gradient were all `finite` (bool scalar),
        or not. Without `take` it was no step, and the scale stays."""
        good_steps = self.good_steps + 1
        grows = good_steps >= interval
        larger = jnp.where(jnp.isfinite(self.scale * growth), self.scale * growth, self.scale)
        scale = jnp.where(finite, jnp.where(grows, larger, self.scale), self.scale * backoff)
        good_steps = jnp.where(finite & ~grows, good_steps, 0)
        return LossScale(
            jnp.where(take, scale, self.scale),
            jnp.where(take, good_steps, self.good_steps),
            self.overflows + (take & self.is_to_blame(loss, finite)).astype(jnp.int32),
        )


def new_loss_scale() -> LossScale:
    """Returns the scale of the first step."""
    counters = (jnp.zeros((), jnp.int32) for _ in range(2))  # buffers of their own, for donation
    return LossScale(jnp.float32(INITIAL), *counters)


def scaled_objective(objective, scale: jax.Array):
    """Returns an Objective (rljax.learn.objective) with each loss multiplied by the scalar `scale`,
    and its metrics as they are."""

    def terms(outputs, batch):
        losses, metrics = objective.terms(outputs, batch)
        return [scale * loss for loss in losses], metrics

    auxiliary, loss = objective.auxiliary, objective.auxiliary.loss
    if loss is not None:
        auxiliary = dataclasses.replace(auxiliary, loss=lambda counted: scale * loss(counted))
    return dataclasses.replace(objective, terms=terms, auxiliary=auxiliary)
