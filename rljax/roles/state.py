"""Small roles that hold what outlives a step: adaptive coefficients of the KL and of the entropy,
running baselines, a Lagrange multiplier."""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.batch import Batch, row_sum
from rljax.config import OptimizerConfig
from rljax.learn.optimizers import learning_rate
from rljax.metric import Metric
from rljax.roles.role import Role, static_field

METRICS = {
    "cost/mean": Metric(
        "mean cost of the step's completions", "cost", "falls to the multiplier's threshold"
    ),
    "cost/unsafe_fraction": Metric("completions whose cost is above 0", "share", "falls"),
    "multiplier/lambda": Metric(
        "weight of the cost beside the reward",
        "x",
        "rises while costs are above the threshold; at its maximum for long: the constraint cannot "
        "be met",
    ),
    "multiplier/window_cost": Metric(
        "mean cost of the last episodes, which the multiplier learns from",
        "cost",
        "falls to the threshold",
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KLController(Role):
    """Scales the KL coefficients so that the KL stays near `target` (arXiv 1909.08593).

    scale <- scale (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), n sequences. The coefficient
    in use is the config's times `state`, which starts at 1.
    """

    state: jax.Array
    target: float = static_field()
    horizon: float = static_field()

    def update(self, kl: jax.Array, n) -> "KLController":
        """Returns the controller after a step of n sequences with this mean KL [], in nats."""
        error = jnp.clip(kl / self.target - 1, -0.2, 0.2)
        return dataclasses.replace(self, state=self.state * (1 + error * n / self.horizon))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntropyController(Role):
    """Adapts the coefficient of the entropy bonus to keep the entropy from falling below `target`
    (Skywork-OR1, arXiv 2505.22312).

    alpha_k = c_k where H_k <= target, else 0
    c_{k+1} = min(c_k + size, maximum) where H_k < target, else max(c_k - size, 0)

    H_k is the entropy of step k's own samples, and alpha_k the coefficient of its bonus. The
    published code, and TRL after it, applies alpha by the entropy of the step before; here it is as
    in the paper. The bounds of c are theirs. state: c [], which starts at algorithm.entropy_coef.
    """

    state: jax.Array
    target: float = static_field()
    size: float = static_field()
    maximum: float = static_field()

    def coefficient(self, entropy: jax.Array) -> jax.Array:
        """Returns alpha [] for samples of this mean entropy [], in nats per token."""
        return jnp.where(entropy <= self.target, self.state, 0.0)

    def update(self, entropy: jax.Array) -> "EntropyController":
        """Returns the controller after a step whose samples had this mean entropy []."""
        moved = self.state + jnp.where(entropy < self.target, self.size, -self.size)
        return dataclasses.replace(self, state=jnp.clip(moved, 0.0, self.maximum))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntropySchedule(Role):
    """Moves the coefficient of the entropy bonus by a schedule over the training steps, whatever
    the entropy is.

    state: [2], the coefficient of the first step, and the number of steps with samples so far.
    `schedule` is one of rljax.learn.schedules, laid out over `steps` of them.
    """

    state: jax.Array
    schedule: str = static_field()
    steps: int = static_field()

    def coefficient(self, entropy: jax.Array) -> jax.Array:
        """Returns the coefficient [] of the step."""
        shape = learning_rate(OptimizerConfig(lr=1.0, schedule=self.schedule), self.steps)
        return self.state[0] * shape(self.state[1])

    def update(self, entropy: jax.Array) -> "EntropySchedule":
        """Returns the schedule one step later, with state [2]; the entropy [] is not read."""
        return dataclasses.replace(self, state=self.state + jnp.array([0.0, 1.0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Multiplier(Role):
    """The Lagrange multiplier lambda of the constraint E[cost] <= threshold (Safe-RLHF, arXiv
    2310.12773).

    log lambda <- min(log lambda + lr lambda (J - threshold), log maximum), one step of SGD on
    -(J - threshold) lambda, where J is the mean cost of the last `window` episodes; lambda does not
    move before there were so many. state: {"log": log lambda, "costs" [window]: the costs of these
    episodes, the newest last, "seen": how many of them there are, at most `window`}.
    """

    state: dict[str, jax.Array]
    lr: float = static_field()
    threshold: float = static_field()
    maximum: float = static_field()
    prefix: str = static_field("multiplier/")

    @property
    def value(self) -> jax.Array:
        """The multiplier lambda: []."""
        return jnp.exp(self.state["log"])

    def update(self, batch: Batch) -> tuple["Multiplier", dict]:
        """Returns the multiplier after the episodes of a batch, and metrics: the episodes are
        the rows that have policy tokens, batch.costs being the costs. Raises InputError if the
        batch has none."""
        batch.require("costs", by="a Lagrange multiplier")
        costs, live = row_sum(batch.costs, batch), jnp.any(batch.mask > 0, axis=1)
        old_costs, window = self.state["costs"], self.state["costs"].shape[0]
        # The new ones behind the old ones, in their order: failed rows come first, and fall out.
        counted = jnp.concatenate([jnp.ones(window, bool), live])
        order = jnp.argsort(counted, stable=True)[-window:]
        costs = costs.astype(old_costs.dtype)
        recent = jnp.concatenate([old_costs, costs])[order]
        seen = jnp.minimum(self.state["seen"] + jnp.sum(live), window).astype(old_costs.dtype)
        filled = jnp.arange(window) >= window - seen
        mean = jnp.sum(jnp.where(filled, recent, 0.0)) / jnp.maximum(seen, 1)
        moved = self.state["log"] + self.lr * self.value * (mean - self.threshold)
        moved = jnp.minimum(moved, jnp.log(self.maximum))
        log = jnp.where(seen == window, moved, self.state["log"])
        rows = jnp.maximum(jnp.sum(live), 1)
        multiplier = dataclasses.replace(self, state={"log": log, "costs": recent, "seen": seen})
        return multiplier, {
            f"{self.prefix}lambda": multiplier.value,
            f"{self.prefix}window_cost": mean,
            "cost/mean": jnp.sum(jnp.where(live, costs, 0.0)) / rows,
            "cost/unsafe_fraction": jnp.sum(live & (costs > 0)) / rows,
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Baseline(Role):
    """The running mean of the batches' mean scores: REINFORCE's baseline. state: [2], the decayed
    sum and its decayed weight, so that the first steps are not biased towards 0."""

    state: jax.Array

    @property
    def value(self) -> jax.Array:
        """The running mean score: [], 0 before the first step."""
        return self.state[0] / jnp.maximum(self.state[1], 1e-8)

    def update(self, mean: jax.Array, decay: float) -> "Baseline":
        """Returns the baseline after a batch with this mean score []."""
        observed = jnp.stack([mean.astype(self.state.dtype), jnp.ones((), self.state.dtype)])
        return dataclasses.replace(self, state=decay * self.state + (1 - decay) * observed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeatBaseline(Role):
    """The running mean of the returns of each seat of the environment: the baseline of self-play
    (SPIRAL, arXiv 2506.24119), where siblings of a zero-sum game say nothing of each other. state:
    [seats, 2], the decayed sum and its decayed weight of each."""

    state: jax.Array

    @property
    def values(self) -> jax.Array:
        """Running mean return of each seat: [seats]; 0 for a seat that has not been scored yet."""
        return self.state[:, 0] / jnp.maximum(self.state[:, 1], 1e-8)

    def update(self, means: jax.Array, scored: jax.Array, decay: float) -> "SeatBaseline":
        """Returns the baseline after a step with these mean returns [seats]; a seat that was not
        `scored` [seats] keeps its."""
        observed = jnp.stack([means, jnp.ones_like(means)], axis=1).astype(self.state.dtype)
        moved = decay * self.state + (1 - decay) * observed
        return dataclasses.replace(self, state=jnp.where(scored[:, None], moved, self.state))
