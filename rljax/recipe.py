"""Recipe: what a dataflow reads as `cfg`.

What lives here: the config's algorithm with its components resolved. Hashable: static in jit, so
that a change of any option is another program.
"""

import dataclasses
from collections.abc import Callable

from rljax.collect import once
from rljax.components import Component
from rljax.sampler import Sampling
from rljax.update import Steps


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a dataflow reads: the config's algorithm with its components resolved. Hashable: static
    in jit."""

    samples_per_prompt: int
    sampling: Sampling
    advantage: Component
    policy_loss: Component
    value_loss: Component
    reduction: Component
    steps: Steps
    kl_in_reward: float = 0.0
    kl_in_loss: float = 0.0
    kl_estimator: str = "k3"
    kl_reward_estimator: str = "k1"
    kl_importance: bool = False
    entropy_coef: float = 0.0
    positive_nll: float = 0.0
    correct_at: float = 1.0
    trust_region: float = 0.0
    correction: Component | None = None
    old_logprobs: str = "recomputed"
    collect: Callable = once
    reward_shaping: tuple[Component, ...] = ()
    baseline_filters: tuple[Component, ...] = ()
    filters: tuple[Component, ...] = ()

    def replace(self, **fields) -> "Recipe":
        return dataclasses.replace(self, **fields)

    @property
    def update_options(self) -> dict:
        """The keyword arguments of Actor.update that the config sets."""
        return {
            "steps": self.steps,
            "reduction": self.reduction,
            "kl_in_loss": self.kl_in_loss,
            "kl_estimator": self.kl_estimator,
            "kl_importance": self.kl_importance,
            "entropy_coef": self.entropy_coef,
            "positive_nll": self.positive_nll,
            "correct_at": self.correct_at,
            "trust_region": self.trust_region,
        }

    @property
    def critic_options(self) -> dict:
        """The keyword arguments of Critic.update that the config sets."""
        return {"steps": self.steps, "reduction": self.reduction}
