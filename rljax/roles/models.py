"""Roles that are models: Actor, Critic, RewardModel, Reference, with traceable verbs.

Parameters and optimizer state are leaves; the model and the optimizer are static fields. A verb
runs the same op by op or inside a program. `update` returns a new role; a program donates the old
one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from rljax.batch import Batch, at_last_token
from rljax.contracts import is_zero, spec
from rljax.errors import InputError
from rljax.learn import Objective, Steps, fit, map_tokens, positive_token_mean
from rljax.learn.state import TrainState
from rljax.losses.distillation import Readout, distillation
from rljax.losses.kl import importance_corrected_kl, kl_estimate
from rljax.mesh import constrain_rows, in_device_memory, in_memory_of, is_on_host, row_shards
from rljax.metric import Metric
from rljax.models.experts import load_metrics
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.roles.balance import balanced
from rljax.roles.layout import replicas_of, role_shardings, step_layout
from rljax.roles.objectives import on_policy_objective, policy_objective
from rljax.roles.pretraining import Pretraining
from rljax.roles.role import Role, static_field
from rljax.sampler import Decoding, Sampling, SecondModel, branch, generate
from rljax.tracking.timing import timed

METRICS = {
    "kl_loss": Metric(
        "KL to the reference in the loss, before its coefficient",
        "nats per token",
        "small and rising slowly",
    ),
    "vf_loss": Metric("squared error of the critic", "score squared", "falls, then steady"),
}


class _Trained(Role):
    """A role with an optimizer: `state` is a TrainState whose frozen half, the base under adapters,
    may be shared with other roles."""

    def arrays(self) -> TrainState:
        """Parameters, optimizer state, counters; a base under adapters comes from where it came
        from, not from a checkpoint."""
        return dataclasses.replace(self.state, frozen={})

    def with_arrays(self, arrays: TrainState):
        state = dataclasses.replace(arrays, frozen=self.state.frozen)
        return dataclasses.replace(self, state=state)

    def split(self):
        return dataclasses.replace(self, state=self.arrays()), self.state.frozen

    def joined(self, shared):
        return dataclasses.replace(self, state=dataclasses.replace(self.state, frozen=shared))

    def pinned(self):
        shardings = role_shardings(self.model, self.state)
        state = jax.lax.with_sharding_constraint(self.state, shardings)
        return dataclasses.replace(self, state=state)

    def parts(self) -> dict:
        base = {"base": self.state.frozen} if self.state.frozen else {}
        return {"weights": self.state.params, **base, "optimizer": self.state.opt_state}

    @property
    def row_unit(self) -> int:
        """Returns the number that the rows of a microbatch should be a multiple of: so many parts
        are computed at once."""
        return row_shards(self.model.mesh)

    def balanced(self, batch: Batch) -> Batch:
        """Returns the same batch, its rows spread evenly over what computes the role. A dataflow
        calls it inside a program, for rows that it picked out of others."""
        return jax.tree.map(lambda x: constrain_rows(x, self.model.mesh), batch)

    @property
    def per_replica(self):
        """The role as an objective reads it: its model on the mesh of a replica."""
        return dataclasses.replace(self, model=replicas_of(self.model, self.state).model)

    def _fit(self, batch: Batch, objective: Objective, steps: Steps, **options):
        """Calls `fit` with an objective of `per_replica`."""
        objective = dataclasses.replace(objective, replicas=replicas_of(self.model, self.state))
        options |= dict(steps=steps, layout=step_layout(self.model, self.state))
        return fit(self.state, batch, objective, optimizer=self.optimizer, **options)

    def _after(self, state: TrainState, metrics: dict):
        """Returns the role after an update, and its metrics under the role's own names."""
        named = {f"{self.prefix}{name}": value for name, value in metrics.items()}
        return dataclasses.replace(self, state=state), named


class _Decodes(Role):
    """A role that samples. How the host decodes is no part of a program, and it holds a tokenizer,
    which is another object in each run: equal runs would share no program."""

    def in_program(self):
        """Returns the role without its way of decoding."""
        return dataclasses.replace(self, decoding=Decoding())

    def after_program(self, new, roles: dict):
        """Returns the role that the program returned, `new`, with this one's way of decoding."""
        return dataclasses.replace(new, decoding=self.decoding)


def _of_tokens(function: Callable, batch: Batch, steps: Steps | int | None, live=None):
    """Applies function(rows) -> numbers per token to all rows, as `map_tokens` says."""
    return map_tokens(lambda rows: (function(rows), ()), batch, steps, live)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Actor(_Decodes, _Trained):
    """The policy that is trained and sampled from. `temperature` is that of its log-probs, a leaf:
    another one is no other program. `prefix` is put before the names of its metrics."""

    state: TrainState
    model: Model = static_field()
    optimizer: optax.GradientTransformation = static_field()
    temperature: float | jax.Array = 1.0
    decoding: Decoding = static_field(Decoding())
    prefix: str = static_field("")

    def split(self):
        """Returns the actor without its frozen base and temperature, and these two."""
        stripped = dataclasses.replace(self, state=self.arrays(), temperature=None)
        return stripped, (self.state.frozen, self.temperature)

    def joined(self, shared):
        """Returns the actor with the frozen base and the temperature of `split`."""
        frozen, temperature = shared
        state = dataclasses.replace(self.state, frozen=frozen)
        return dataclasses.replace(self, state=state, temperature=temperature)

    def generate(
        self,
        prompts,
        key,
        sampling: Sampling,
        *,
        n: int = 1,
        finished: Callable | None = None,
        stop: Callable[[], bool] | None = None,
        second: SecondModel | None = None,
        search=None,
    ) -> Batch:
        """Samples n trajectories per prompt, with the very parameter arrays that training updates
        (host verb). `finished` is called with rows as they end, `stop` ends the others, and
        `search` chooses the tokens (rljax.sampler.generate). `second` is a second model to draw
        from together: no step of the actor wrote such rows (version -1)."""
        with timed("generate"):
            batch = generate(
                self.model,
                self.state.weights,
                prompts.tokens,
                prompts.lengths,
                key,
                sampling,
                n=n,
                version=self.state.step if second is None else -1,
                decoding=self.decoding,
                images=prompts.images,
                second=second,
                finished=finished,
                stop=stop,
                search=search,
            )
            return jax.block_until_ready(batch)

    def branch(
        self, batch: Batch, rows, at, starts, key, sampling: Sampling, *, n: int = 1
    ) -> Batch:
        """Samples n continuations of rows [M] of `batch` [B, S] behind the first at [M] tokens of
        their responses, which begin at columns starts [B] (host verb; rljax.sampler.branch)."""
        with timed("generate"):
            continuations = branch(
                self.model,
                self.state.weights,
                batch,
                rows,
                at,
                starts,
                key,
                sampling,
                n=n,
                version=self.state.step,
                decoding=self.decoding,
            )
            return jax.block_until_ready(continuations)

    def logprobs(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns log pi(tokens) at the sampling temperature: [B, S], in nats; `steps` says how
        rows are packed, or how many are computed at once."""
        weights, temperature = self.state.weights, self.temperature
        forward = self.model.logprobs
        return _of_tokens(lambda b: forward(weights, b, temperature)[0], batch, steps)

    def logprobs_and_entropy(self, batch: Batch, steps: Steps | int | None = None):
        """Returns log pi(tokens) and the entropy of each choice: two [B, S], in nats."""
        weights, temperature = self.state.weights, self.temperature
        return _of_tokens(lambda b: self.model.logprobs(weights, b, temperature), batch, steps)

    def logprobs_and_load(self, batch: Batch, steps: Steps | int | None = None):
        """Returns `logprobs`, and the load of the experts over the tokens that are computed
        (packed: a shared prompt once, and no row without policy tokens): {} without any."""

        def one(microbatch):
            logprobs, _, load = self.model.read(self.state.weights, microbatch, self.temperature)
            return logprobs, load

        logprobs, load = map_tokens(one, batch, steps)
        return logprobs, load_metrics(load) if load else {}

    def sum_pi_squared(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns the sum over the vocabulary of pi^2 at the sampling temperature: [B, S]."""
        weights, temperature = self.state.weights, self.temperature
        squared = self.model.sum_pi_squared
        return _of_tokens(lambda b: squared(weights, b, temperature), batch, steps)

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
        entropy_coef: float | jax.Array = 0.0,
        observation_coef: float | jax.Array = 0.0,
        positive_nll: float = 0.0,
        correct_at: float = 1.0,
        trust_region: float = 0.0,
        on_policy: Callable[[Batch], dict] | None = None,
        pretraining: Pretraining | None = None,
    ):
        """Takes all optimizer steps of this batch: loss [B, S] or [B] + kl_in_loss KL(pi || ref) -
        entropy_coef H + observation_coef NLL(observations) + positive_nll NLL(correct rows), and
        beside them the loss of the examples in `pretraining` -> (Actor, metrics). Raises InputError
        if it penalises the KL and the batch has no ref_logprobs, or learns observations and the
        batch has no step_ids.

        `on_policy` says that old log-probs are those of the actor as it is, so that the only
        optimizer step of a batch has them from its own forward pass; what it makes of the batch
        with them are metrics, too, and so is the load of experts.
        """
        if not is_zero(kl_in_loss):
            batch.require("ref_logprobs", by="kl_in_loss")

            def kl(policy, b):
                if kl_importance:
                    return importance_corrected_kl(
                        policy.logprobs, b.ref_logprobs, b.old_logprobs, kl_estimator
                    )
                return kl_estimate(policy.logprobs, b.ref_logprobs, kl_estimator)

            terms = [(reduction, lambda policy, b: kl_in_loss * kl(policy, b))]
            extra_metrics = {"kl_loss": kl}
        else:
            terms, extra_metrics = [], {}
        if not is_zero(entropy_coef):
            terms.append((reduction, lambda policy, b: -entropy_coef * policy.entropy))
        if not is_zero(positive_nll):
            correct_token_mean = functools.partial(positive_token_mean, correct_at=correct_at)
            terms.append((correct_token_mean, lambda policy, b: -positive_nll * policy.logprobs))
        observed = None if is_zero(observation_coef) else observation_coef
        objective = policy_objective(
            self.per_replica, loss, reduction, terms, extra_metrics, observed
        )
        if on_policy is not None:
            objective = on_policy_objective(self.per_replica, loss, objective, batch.old_logprobs)
            batch = batch.replace(old_logprobs=None)
        options = dict(trust_region=trust_region, beside=pretraining and pretraining.beside(self))
        state, metrics, extras = self._fit(batch, objective, steps, **options)
        if pretraining is not None:
            metrics["pretraining_coef"] = pretraining.coefficient(self.state.step)
        if on_policy is not None:
            old_logprobs, load = extras
            load = load_metrics(load) if load else {}
            metrics = {**metrics, **load, **on_policy(batch.replace(old_logprobs=old_logprobs))}
        return self._after(state, metrics)

    def imitate(self, batch: Batch, teacher, *, steps: Steps, reduction: Callable, **options):
        """Takes all optimizer steps of this batch towards the next-token distributions of the
        `teacher`, a Reference or Teachers, by rljax.losses.distillation.distillation(**options)
        at mask 1 -> (Actor, metrics). Raises InputError where a rollout showed the teacher another
        prompt: it would be read without that one here."""
        if batch.teacher_logprobs is not None:
            raise InputError(
                "whole distributions of a teacher that is shown a hint",
                value="teacher_logprobs",
                rule="the rollout filled them at the sampled tokens alone, by another prompt",
                fix="dataflow=\"on_policy_distil(match='sampled')\"",
            )
        model = self.per_replica.model
        fixed = [in_device_memory(member.params) for member, _ in teacher.teaching(batch)]

        def divergence(params, microbatch, hidden):
            student_readout = _readout(model, params, microbatch, hidden)
            result = None
            for (member, mask), weights in zip(teacher.teaching(microbatch), fixed, strict=True):
                taught = dataclasses.replace(member.model, mesh=model.mesh)
                teacher_readout = _readout(taught, weights, microbatch.replace(routes=None))
                own = distillation(student_readout, teacher_readout, mask, **options)
                chosen = functools.partial(jnp.where, mask > 0)
                result = own if result is None else jax.tree.map(chosen, own, result)
            return result

        objective = Objective(
            terms=lambda results, _: ([results[0]], results[1]),
            reductions=(reduction,),
            corrected=(False,),
            **balanced(model, divergence),
        )
        state, metrics, _ = self._fit(batch, objective, steps)
        return self._after(state, metrics)


def _readout(model: Model, params, batch: Batch, hidden=None) -> Readout:
    config = model.config
    return Readout(
        *model.readout(params, batch, hidden),
        soft_cap=config.final_soft_cap,
        float32_head=config.head_in_float32,
        vocab_first=config.tie_embeddings,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Critic(_Trained):
    """The value function V(state) per token, trained beside the actor."""

    state: TrainState
    model: Model = static_field()
    optimizer: optax.GradientTransformation = static_field()
    prefix: str = static_field("critic/")

    def values(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns V(state before each token): [B, S]."""
        return _of_tokens(lambda b: self.model.values(self.state.weights, b), batch, steps)

    def valued(self, batch: Batch, rows: int = 0) -> Batch:
        """Returns the batch with `values`, at most `rows` rows at once where these divide it (0:
        all), by a program of its own (host verb: rollouts may read them)."""
        return batch.replace(values=values_of(self, batch, rows=rows))

    def update(self, batch: Batch, loss: Callable, *, steps: Steps, reduction: Callable):
        """Takes all optimizer steps of this batch -> (Critic, metrics)."""

        def terms(values, batch):
            value, metrics = loss(values, batch)
            return [value], metrics

        model = self.per_replica.model
        objective = Objective(
            terms=terms,
            reductions=(reduction,),
            corrected=(False,),
            **balanced(model, model.values),
        )
        state, metrics, _ = self._fit(batch, objective, steps)
        metrics["vf_loss"] = metrics.pop("loss")
        return self._after(state, metrics)


@functools.partial(jax.jit, static_argnames="rows")
def values_of(critic: Critic, batch: Batch, *, rows: int) -> jax.Array:
    """Returns `Critic.values` [B, S], as a program."""
    return critic.values(batch, math.gcd(batch.rows, rows) or None)


def _one_number(scores: jax.Array) -> jax.Array:
    """Returns one number [...] of scores [..., labels]: the score, or the log-odds of the second of
    two labels (wrong, right)."""
    return scores[..., -1] if scores.shape[-1] == 1 else scores[..., 1] - scores[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RewardModel(_Trained):
    """A scalar head that says how good a text is: after its last token (outcome) or after each of
    its steps (process). Without an optimizer it only scores."""

    state: TrainState
    model: Model = static_field()
    optimizer: optax.GradientTransformation = static_field()
    prefix: str = static_field("")

    def scores(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns r(text): [B], read after the last token of each row, EOS as a rule."""
        return at_last_token(self.step_scores(batch, steps), batch)

    def step_scores(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns r(text up to and with each token): [B, S]."""
        weights, live = self.state.weights, jnp.any(batch.segment_ids > 0, axis=1)
        scores = self.model.token_scores
        return _of_tokens(lambda b: _one_number(scores(weights, b)), batch, steps, live)

    def update(self, batch: Batch, loss: Callable, *, steps: Steps, reduction: Callable):
        """Takes all optimizer steps of this batch -> (RewardModel, metrics).

        The loss reads the head's output as it is, [B], or [B, S] if its contract has `per_token`;
        all logits of the head if it has `labels` above 1. What it squashes, it squashes itself.
        """
        declared = spec(loss)
        config = dataclasses.replace(self.model.config, squash="none")
        raw = dataclasses.replace(self.per_replica.model, config=config)

        def scores(params, batch, hidden):
            scores = raw.token_scores(params, batch, hidden)
            return scores if declared.labels > 1 else _one_number(scores)

        def terms(scores, batch):
            outputs = scores if declared.per_token else at_last_token(scores, batch)
            value, metrics = loss(outputs, batch)
            return [value], metrics

        objective = Objective(
            terms=terms,
            reductions=(reduction,),
            corrected=(False,),
            whole_step=declared.whole_step,
            rows_per_example=declared.rows,
            **balanced(raw, scores),
        )
        state, metrics, _ = self._fit(batch, objective, steps)
        return self._after(state, metrics)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference(_Decodes):
    """A frozen policy: the one that KL is measured to, or a teacher, which a checkpoint leaves out
    because it comes from its folder."""

    trained: ClassVar[bool] = False

    params: Any
    model: Model = static_field()
    temperature: float | jax.Array = 1.0
    decoding: Decoding = static_field(Decoding())
    checkpointed: bool = static_field(True)

    def arrays(self):
        """Returns the reference's own weights: a base under adapters is the actor's."""
        return self.model.split(self.params)[0]

    def with_arrays(self, arrays) -> "Reference":
        """Returns the reference with these weights, as `arrays` gives them."""
        return dataclasses.replace(self, params=merged(arrays, self.model.split(self.params)[1]))

    def split(self):
        """Returns the reference without the base under its adapters and its
        temperature, and these two."""
        own_params, base = self.model.split(self.params)
        return dataclasses.replace(self, params=own_params, temperature=None), (
            base,
            self.temperature,
        )

    def joined(self, shared):
        """Returns the reference with the base and the temperature of `split`."""
        base, temperature = shared
        return dataclasses.replace(self, params=merged(self.params, base), temperature=temperature)

    def pinned(self):
        """Keeps the weights on the layout of the model, inside a program."""
        layout = self.model.split(self.model.shardings())[0]

        def pin(x, s):
            return x if is_on_host(x) else jax.lax.with_sharding_constraint(x, s)

        return dataclasses.replace(self, params=jax.tree.map(pin, self.params, layout))

    def parts(self) -> dict:
        """Returns {"weights": the weights that it holds itself}, all of them without adapters."""
        return {"weights": self.arrays() if self.model.config.lora else self.params}

    def generate(
        self,
        prompts,
        key,
        sampling: Sampling,
        *,
        n: int = 1,
        finished: Callable | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Batch:
        """Samples n trajectories per prompt (host verb). Their policy_version is -1: no step of the
        actor wrote them."""
        with timed("generate"):
            batch = generate(
                self.model,
                self.sampling_params(),
                prompts.tokens,
                prompts.lengths,
                key,
                sampling,
                n=n,
                version=-1,
                decoding=self.decoding,
                images=prompts.images,
                finished=finished,
                stop=stop,
            )
            return jax.block_until_ready(batch)

    def sampling_params(self):
        """Returns the weights in the memory of the devices."""
        return in_device_memory(self.params)

    def follow(self, actor: Actor, when) -> "Reference":
        """Returns the actor as it is now where `when` is true, else this one; in the dtype and the
        memory that the old one was held in. A frozen base under adapters stays shared."""
        return self.renewed(actor, lambda new, old: jnp.where(when, new, old))

    def renewed(self, actor: Actor, combine: Callable) -> "Reference":
        """Returns the role with the weights combine(those of the actor, its own), as `follow`
        does."""
        old, base = self.model.split(self.params)
        actor_params, _ = self.model.split(actor.state.weights)
        combined = jax.tree.map(
            lambda new, old: combine(new.astype(old.dtype), old),
            actor_params,
            in_device_memory(old),
        )
        return dataclasses.replace(self, params=merged(in_memory_of(old, combined), base))

    def teaching(self, batch: Batch) -> tuple:
        """Returns ((model, mask [B, S] of the tokens that it teaches),): itself, and all."""
        return ((self, batch.mask),)

    def logprobs(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns log pi_ref(tokens) at the sampling temperature: [B, S], in nats."""
        params = in_device_memory(self.params)  # once, and only until the last microbatch
        forward = self.model.logprobs
        return _of_tokens(lambda b: forward(params, b, self.temperature)[0], batch, steps)
