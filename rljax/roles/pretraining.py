"""Pretraining: the examples of a step whose loss is added to that of the actor (PPO-ptx, CHORD)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.config import OptimizerConfig
from rljax.learn import Beside, Objective, Steps, token_mean
from rljax.learn.optimizers import learning_rate
from rljax.losses.policy import PolicyOutputs, negative_log_likelihood
from rljax.metric import Metric
from rljax.roles.balance import balanced
from rljax.roles.layout import replicas_of
from rljax.roles.role import Role, static_field

METRICS = {
    "pretraining_loss": Metric(
        "negative log-likelihood of the pre-training examples, before its coefficient",
        "nats per token",
        "steady or falling; a rise: the policy forgets",
    ),
    "pretraining_coef": Metric(
        "coefficient of the loss of the pre-training examples", "x", "as pretraining.schedule says"
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pretraining(Role):
    """The examples that come with a step's batch, for `Actor.update`, whose objective then has the
    term coef x loss: PPO-ptx of InstructGPT with the NLL (arXiv 2203.02155). `steps.rows` of them
    belong to one optimizer step, and `steps` says how they are packed. The run draws others before
    every step.

    With `mixed` the objective is (1 - mu) x that of the batch + mu x loss, mu being the coefficient
    (CHORD, arXiv 2508.11408, whose token weights are the loss `chord_phi`). The coefficient rises
    from 0 to `coef` over `warmup_steps` optimizer steps, and `schedule` (of
    rljax.learn.schedules) is laid out over `schedule_steps` behind them. The optimizer steps of a
    batch have the coefficient of its first one.
    """

    trained = False

    state: Batch
    coef: float = static_field()
    steps: Steps = static_field()
    loss: Callable = static_field(negative_log_likelihood)
    mixed: bool = static_field(False)
    schedule: str = static_field("constant")
    warmup_steps: int = static_field(0)
    schedule_steps: int = static_field(1)

    def coefficient(self, step: jax.Array) -> jax.Array:
        """Returns the coefficient of the examples' loss at an optimizer step [], from 0."""
        peak = OptimizerConfig(lr=self.coef, schedule=self.schedule, warmup_steps=self.warmup_steps)
        total_steps = self.warmup_steps + self.schedule_steps
        return jnp.asarray(learning_rate(peak, total_steps)(step))

    def beside(self, actor) -> Beside:
        """Returns the coefficient times the mean of the loss over the target tokens, as a second
        objective of the actor's update."""
        replica_actor = actor.per_replica
        coefficient = self.coefficient(actor.state.step)

        def terms(policy, batch):
            loss, _ = self.loss(policy, batch)
            nll, _ = negative_log_likelihood(policy, batch)
            return [coefficient * loss], {"loss": nll}

        def policy(params, microbatch, hidden):
            return PolicyOutputs(
                *replica_actor.model.logprobs(params, microbatch, replica_actor.temperature, hidden)
            )

        objective = Objective(
            terms=terms,
            reductions=(token_mean,),
            corrected=(False,),
            replicas=replicas_of(actor.model, actor.state),
            **balanced(replica_actor.model, policy),
        )
        batch_share = 1 - coefficient if self.mixed else 1.0
        return Beside(self.state, objective, self.steps, "pretraining_loss", batch_share)
