"""Algorithm: the `cfg` of a dataflow, the config's algorithm with its components resolved.

Hashable and static in jit, so it holds what learning reads and nothing else: what only sampling
reads (temperature, response length, collect rule, reward) is rljax.rollout.RolloutConfig.
"""

import dataclasses

from rljax.components import Component
from rljax.config.learn_settings import AlgorithmConfig
from rljax.config.schema import EvaluateConfig
from rljax.contracts import is_zero
from rljax.learn import Steps


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The fields of the config that learning reads, and the steps of a batch."""

    advantage: Component
    policy_loss: Component
    value_loss: Component
    reduction: Component
    steps: Steps
    samples_per_prompt: int = 1
    preference_loss: Component | None = None
    reward_loss: Component | None = None
    kl_in_reward: float = AlgorithmConfig.kl_in_reward
    kl_in_loss: float = AlgorithmConfig.kl_in_loss
    kl_estimator: str = AlgorithmConfig.kl_estimator
    kl_reward_estimator: str = AlgorithmConfig.kl_reward_estimator
    kl_importance: bool = AlgorithmConfig.kl_importance
    entropy_coef: float = AlgorithmConfig.entropy_coef
    observation_coef: float = AlgorithmConfig.observation_coef
    teacher_coef: float = AlgorithmConfig.teacher_coef
    positive_nll: float = 0.0
    correct_at: float = EvaluateConfig.correct_at
    trust_region: float = AlgorithmConfig.trust_region
    correction: Component | None = None
    old_logprobs: str = AlgorithmConfig.old_logprobs
    reward_shaping: tuple[Component, ...] = ()
    baseline_filters: tuple[Component, ...] = ()
    filters: tuple[Component, ...] = ()

    def replace(self, **fields) -> "Algorithm":
        """Returns a copy with these fields."""
        return dataclasses.replace(self, **fields)

    def update_options(self, kl_controller=None) -> dict:
        """Returns the keyword arguments of Actor.update that the config sets. `kl_controller`
        scales the KL coefficient of the loss."""
        scale = 1.0 if kl_controller is None or is_zero(self.kl_in_loss) else kl_controller.state
        return {
            "steps": self.steps,
            "reduction": self.reduction,
            "kl_in_loss": self.kl_in_loss * scale,
            "kl_estimator": self.kl_estimator,
            "kl_importance": self.kl_importance,
            "entropy_coef": self.entropy_coef,
            "observation_coef": self.observation_coef,
            "positive_nll": self.positive_nll,
            "correct_at": self.correct_at,
            "trust_region": self.trust_region,
        }

    @property
    def critic_options(self) -> dict:
        """Keyword arguments of Critic.update that the config sets."""
        return {"steps": self.steps, "reduction": self.reduction}


FIELDS = frozenset(field.name for field in dataclasses.fields(Algorithm))
