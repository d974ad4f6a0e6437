"""Pretraining: the examples of a step whose loss is added to that of the actor (PPO-ptx)."""

import dataclasses

import jax

from rljax.batch import Batch
from rljax.learn import Beside, Objective, Steps, token_mean
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
    )
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pretraining(Role):
    """The examples that come with a step's batch, for `Actor.update`, whose objective then has the
    term coef x NLL (PPO-ptx of InstructGPT, arXiv 2203.02155). `steps.rows` of them belong to one
    optimizer step, and `steps` says how they are packed. The run draws others before every step."""

    trained = False

    state: Batch
    coef: float = static_field()
    steps: Steps = static_field()

    def beside(self, actor) -> Beside:
        """Returns coef x the mean over the target tokens of -log pi, as a second objective of the
        actor's update."""
        replica_actor = actor.per_replica

        def terms(policy, batch):
            loss, _ = negative_log_likelihood(policy, batch)
            return [self.coef * loss], {"loss": loss}

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
        return Beside(self.state, objective, self.steps, "pretraining_loss")
