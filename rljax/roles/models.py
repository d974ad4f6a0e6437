"""Roles that are models: Actor, Critic, RewardModel, Reference, with traceable verbs.

What lives here: parameters and optimizer state as leaves, the model and the optimizer as static
fields, and what each can be asked. What does not: who calls whom (dataflows).

A verb runs the same op by op or inside a program. `update` returns a new role; a program donates
the old one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax.batch import Batch
from rljax.components import Component
from rljax.learn import Objective, Steps, fit, map_microbatches, positive_token_mean
from rljax.learn.state import TrainState
from rljax.losses.distillation import Readout, distillation
from rljax.losses.kl import importance_corrected_kl, kl_estimate
from rljax.losses.policy import Policy, log_ratio
from rljax.mesh import in_device_memory
from rljax.models.experts import load_metrics
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.sampler import Decoding, Sampling, generate
from rljax.tracking.timing import timed


def _policy_objective(actor, loss: Callable, reduction: Callable, terms, shown) -> Objective:
    """The policy loss, which the rollout correction weighs, and further terms (reduction,
    function), which it does not. `shown` are functions whose values are metrics."""

    def values(policy, batch):
        value, metrics = loss(policy, batch)
        metrics = {**metrics, "entropy": policy.entropy}
        if batch.old_logprobs is not None:
            d = log_ratio(policy, batch, by="update")
            # To the policy that the batch began with, whatever ratio the loss itself uses.
            metrics |= {"ppo_kl": -d, "ppo_k3": jnp.exp(d) - 1 - d}
        metrics |= {name: function(policy, batch) for name, function in shown.items()}
        return [value, *(function(policy, batch) for _, function in terms)], metrics

    read = actor.model.greedy if trait(loss, "reads_greedy") else actor.model.logprobs
    return Objective(
        model=lambda p, b: Policy(*read(p, b, actor.temperature)),
        terms=values,
        reductions=(reduction, *(r for r, _ in terms)),
        corrected=(not trait(loss, "applies_weights"), *(False for _ in terms)),
        whole_step=trait(loss, "whole_step"),
        rows_per_example=rows_per_example(loss),
    )


def _attributes(loss: Callable) -> dict:
    """Of a loss; a component's and a partial's are those of its function."""
    if isinstance(loss, functools.partial):
        return _attributes(loss.func)
    return vars(loss.function if isinstance(loss, Component) else loss)


def trait(loss: Callable, name: str) -> bool:
    """Whether a loss carries this attribute."""
    return bool(_attributes(loss).get(name, False))


def rows_per_example(loss: Callable) -> int:
    """How many rows that follow each other are one example of this loss: 2 for pairs."""
    return _attributes(loss).get("rows_per_example", 1)


def labels(loss: Callable) -> int:
    """How many labels of a reward model's head this loss reads."""
    return _attributes(loss).get("labels", 1)


def _static(default=dataclasses.MISSING):
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Actor:
    """The policy that is trained and sampled from. `temperature` is that of both sides."""

    state: TrainState
    model: Model = _static()
    optimizer: optax.GradientTransformation = _static()
    temperature: float = _static()
    decoding: Decoding = _static(Decoding())

    def generate(
        self, prompts, key, sampling: Sampling, *, n: int = 1, finished: Callable | None = None
    ) -> Batch:
        """n trajectories per prompt, with the very parameter arrays that training updates (host
        verb). `finished` hears of rows as they end (rljax.sampler.generate)."""
        with timed("generate"):
            batch = generate(
                self.model,
                self.state.weights,
                prompts.tokens,
                prompts.lengths,
                key,
                sampling,
                n=n,
                version=self.state.step,
                decoding=self.decoding,
                images=prompts.images,
                finished=finished,
            )
            return jax.block_until_ready(batch)

    def logprobs(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """log pi(tokens) at the sampling temperature: [B, S]; `rows` bounds the rows computed at
        once."""
        one = lambda b: self.model.logprobs(self.state.weights, b, self.temperature)[0]  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def logprobs_and_entropy(self, batch: Batch, rows: int | None = None):
        """log pi(tokens) and the entropy of each choice: two [B, S]."""
        one = lambda b: self.model.logprobs(self.state.weights, b, self.temperature)  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def logprobs_and_load(self, batch: Batch, rows: int | None = None):
        """`logprobs`, and the load of the experts over all tokens of the batch: {} without any."""

        def one(part):
            logprobs, _, load = self.model.read(self.state.weights, part, self.temperature)
            # map_microbatches joins rows: every row carries the totals of its microbatch.
            spread = lambda x: jnp.broadcast_to(x / part.rows, (part.rows, *x.shape))  # noqa: E731
            return logprobs, jax.tree.map(spread, load)

        logprobs, load = map_microbatches(one, batch, rows or batch.rows)
        load = jax.tree.map(lambda x: jnp.sum(x, axis=0), load)
        return logprobs, load_metrics(load) if load else {}

    def sum_pi_squared(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """sum over words of pi^2 at the sampling temperature: [B, S]."""
        one = lambda b: self.model.sum_pi_squared(self.state.weights, b, self.temperature)  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def update(
        self,
        batch: Batch,
        loss: Callable,
        *,
        steps: Steps,
        reduction: Callable,
        kl_in_loss: float | jax.Array = 0.0,
        kl_estimator: str = "k3",
        kl_importance: bool = False,
        entropy_coef: float = 0.0,
        positive_nll: float = 0.0,
        correct_at: float = 1.0,
        trust_region: float = 0.0,
    ):
        """All optimizer steps of this batch: loss + kl_in_loss KL(pi || ref) - entropy_coef H +
        positive_nll NLL(correct rows) -> (Actor, metrics)."""
        if not isinstance(kl_in_loss, (int, float)) or kl_in_loss > 0:
            batch.require("ref_logprobs", by="kl_in_loss")

            def kl(policy, b):
                if kl_importance:
                    return importance_corrected_kl(
                        policy.logprobs, b.ref_logprobs, b.old_logprobs, kl_estimator
                    )
                return kl_estimate(policy.logprobs, b.ref_logprobs, kl_estimator)

            terms = [(reduction, lambda policy, b: kl_in_loss * kl(policy, b))]
            shown = {"kl_loss": kl}
        else:
            terms, shown = [], {}
        if entropy_coef:
            terms.append((reduction, lambda policy, b: -entropy_coef * policy.entropy))
        if positive_nll:
            right = functools.partial(positive_token_mean, correct_at=correct_at)
            terms.append((right, lambda policy, b: -positive_nll * policy.logprobs))
        objective = _policy_objective(self, loss, reduction, terms, shown)
        state, metrics = fit(
            self.state,
            batch,
            objective,
            optimizer=self.optimizer,
            steps=steps,
            trust_region=trust_region,
        )
        return dataclasses.replace(self, state=state), metrics

    def imitate(
        self,
        batch: Batch,
        teacher: "Reference",
        *,
        steps: Steps,
        reduction: Callable,
        beta: float,
        temperature: float,
    ):
        """All optimizer steps of this batch towards the teacher's next-word distributions, by
        rljax.losses.distillation.distillation at mask 1 -> (Actor, metrics)."""
        fixed = in_device_memory(teacher.params)

        def divergence(params, part):
            ours = _readout(self.model, params, part)
            theirs = _readout(teacher.model, fixed, part)
            return distillation(ours, theirs, part.mask, beta=beta, temperature=temperature)

        objective = Objective(divergence, lambda found, _: ([found[0]], found[1]),
                              (reduction,), (False,))  # fmt: skip
        state, metrics = fit(self.state, batch, objective, optimizer=self.optimizer, steps=steps)
        return dataclasses.replace(self, state=state), metrics


def _readout(model: Model, params, batch: Batch) -> Readout:
    facts = model.config
    return Readout(
        *model.readout(params, batch),
        soft_cap=facts.final_soft_cap,
        float32_head=facts.head_in_float32,
        vocab_first=facts.tie_embeddings,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Critic:
    """V(state) per token, trained beside the actor."""

    state: TrainState
    model: Model = _static()
    optimizer: optax.GradientTransformation = _static()

    def values(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """V(state before each token): [B, S]."""
        one = lambda b: self.model.values(self.state.weights, b)  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def update(self, batch: Batch, loss: Callable, *, steps: Steps, reduction: Callable):
        """All optimizer steps of this batch -> (Critic, metrics named critic/...)."""

        def terms(values, batch):
            value, metrics = loss(values, batch)
            return [value], metrics

        objective = Objective(self.model.values, terms, (reduction,), (False,))
        state, metrics = fit(self.state, batch, objective, optimizer=self.optimizer, steps=steps)
        metrics["vf_loss"] = metrics.pop("loss")
        return dataclasses.replace(self, state=state), {
            f"critic/{k}": v for k, v in metrics.items()
        }


def _one_number(scores: jax.Array) -> jax.Array:
    """[..., labels] -> [...]: the score, or of two labels (wrong, right) the log-odds of right."""
    return scores[..., -1] if scores.shape[-1] == 1 else scores[..., 1] - scores[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A scalar head that says how good a text is: after its last token (outcome) or after each of
    its steps (process). Without an optimizer it is only asked."""

    state: TrainState
    model: Model = _static()
    optimizer: optax.GradientTransformation = _static()

    def scores(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """r(text): [B], read after the last token of each row, EOS as a rule."""
        one = lambda b: _one_number(self.model.scores(self.state.weights, b))  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def step_scores(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """r(text up to and with each token): [B, S]."""
        one = lambda b: _one_number(self.model.token_scores(self.state.weights, b))  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)

    def update(self, batch: Batch, loss: Callable, *, steps: Steps, reduction: Callable):
        """All optimizer steps of this batch -> (RewardModel, metrics).

        A loss marked `per_token` is called with scores [B, S] (`step_scores`), else with [B]; one
        marked `labels` with that many logits.
        """
        read = self.model.token_scores if trait(loss, "per_token") else self.model.scores

        def terms(scores, batch):
            value, metrics = loss(scores, batch)
            return [value], metrics

        objective = Objective(
            lambda p, b: read(p, b) if labels(loss) > 1 else _one_number(read(p, b)),
            terms,
            (reduction,),
            (False,),
            whole_step=trait(loss, "whole_step"),
            rows_per_example=rows_per_example(loss),
        )
        state, metrics = fit(self.state, batch, objective, optimizer=self.optimizer, steps=steps)
        return dataclasses.replace(self, state=state), metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """The frozen policy that KL is measured to."""

    params: Any
    model: Model = _static()
    temperature: float = _static()
    decoding: Decoding = _static(Decoding())

    def generate(
        self, prompts, key, sampling: Sampling, *, n: int = 1, finished: Callable | None = None
    ) -> Batch:
        """n trajectories per prompt (host verb). Their policy_version is -1: no step of the actor
        wrote them."""
        with timed("generate"):
            batch = generate(
                self.model, in_device_memory(self.params), prompts.tokens, prompts.lengths, key,
                sampling, n=n, version=-1, decoding=self.decoding, images=prompts.images,
                finished=finished,
            )  # fmt: skip
            return jax.block_until_ready(batch)

    def follow(self, actor: Actor) -> "Reference":
        """A copy of the actor as it is now, where and in the dtype that the old one was held; a
        frozen base under adapters stays shared (host verb)."""
        old, base = self.model.split(self.params)
        now, _ = self.model.split(actor.state.weights)

        def copy(old, now):
            return jax.device_put(jnp.array(now, old.dtype, copy=True), old.sharding)

        return dataclasses.replace(self, params=merged(jax.tree.map(copy, old, now), base))

    def logprobs(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """log pi_ref(tokens) at the sampling temperature: [B, S]."""
        params = in_device_memory(self.params)  # once, and only until the last microbatch
        one = lambda b: self.model.logprobs(params, b, self.temperature)[0]  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)
