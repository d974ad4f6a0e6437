"""Roles: pytrees with traceable verbs, the `program` that jits a dataflow's learning phase.

What lives here: Actor, Critic, Reference (parameters and optimizer state are leaves, the model and
the optimizer are static), small roles that hold what outlives a step (KLController, Baseline), and
Reward (host: text in, numbers out). What does not: who calls whom (dataflows).

A verb runs the same op by op or inside a program. `update` returns a new role; a program donates
the old one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.batch import Batch, last_token
from rljax.components import Component
from rljax.controllers import Baseline, KLController
from rljax.losses.kl import importance_corrected_kl, kl_estimate
from rljax.losses.policy import Policy, log_ratio
from rljax.mesh import in_device_memory, on_host, replicated, shard_rows
from rljax.models.experts import load_metrics
from rljax.models.model import Model
from rljax.rewards.pool import RewardPool, Score
from rljax.sampler import Sampling, rollout
from rljax.timing import timed
from rljax.update import (
    Objective,
    Steps,
    TrainState,
    fit,
    map_microbatches,
    new_train_state,
    positive_token_mean,
)


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

    return Objective(
        model=lambda p, b: Policy(*actor.model.logprobs(p, b, actor.temperature)),
        terms=values,
        reductions=(reduction, *(r for r, _ in terms)),
        corrected=(not trait(loss, "applies_weights"), *(False for _ in terms)),
        whole_step=trait(loss, "whole_step"),
    )


def trait(loss: Callable, name: str) -> bool:
    """Whether a loss carries this attribute; a component's is that of its function."""
    function = loss.function if isinstance(loss, Component) else loss
    return bool(vars(function).get(name, False))


def _static():
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Actor:
    """The policy that is trained and sampled from. `temperature` is that of both sides."""

    state: TrainState
    model: Model = _static()
    optimizer: optax.GradientTransformation = _static()
    temperature: float = _static()

    def generate(self, prompts, key, sampling: Sampling, *, n: int = 1) -> Batch:
        """n trajectories per prompt, with the very parameter arrays that training updates (host
        verb)."""
        with timed("generate"):
            batch = rollout(
                self.model,
                self.state.weights,
                prompts.tokens,
                prompts.lengths,
                key,
                sampling,
                n=n,
                version=self.state.step,
                images=prompts.images,
            )
            return jax.block_until_ready(batch)

    def logprobs(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """log pi(tokens) at the sampling temperature: [B, S]; `rows` bounds the rows computed at
        once."""
        one = lambda b: self.model.logprobs(self.state.weights, b, self.temperature)[0]  # noqa: E731
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reference:
    """The frozen policy that KL is measured to."""

    params: Any
    model: Model = _static()
    temperature: float = _static()

    def logprobs(self, batch: Batch, rows: int | None = None) -> jax.Array:
        """log pi_ref(tokens) at the sampling temperature: [B, S]."""
        params = in_device_memory(self.params)  # once, and only until the last microbatch
        one = lambda b: self.model.logprobs(params, b, self.temperature)[0]  # noqa: E731
        return map_microbatches(one, batch, rows or batch.rows)


WITH_OPTIMIZER = (Actor, Critic)
TRAINED = (*WITH_OPTIMIZER, KLController, Baseline)  # what a program may return anew


class Reward:
    """Trajectories -> rewards, by a function of text, in a pool of killable processes (host verb).

    A sample whose reward failed (raised, hung, not finite) is never scored 0: its mask becomes 0
    and it
    leaves its group, so that neither the loss nor a baseline sees it. `rows`, `counts` and
    `outcomes` describe all calls since `forget`, but for those made with remember=False.
    """

    def __init__(self, pool: RewardPool, tokenizer, mesh):
        self.pool, self.tokenizer, self.mesh = pool, tokenizer, mesh
        self._seen: list[tuple[dict, Score, dict]] = []  # sample, score, prompt record

    def forget(self) -> None:
        """Start anew: a step may call the reward several times."""
        self._seen = []

    def __call__(self, batch: Batch, prompts, *, remember: bool = True) -> Batch:
        """`prompts.records[group]` holds the ground truth of a row. Fills rewards, scores and the
        reward's parts; masks failed rows."""
        with timed("reward"):
            host = jax.device_get(
                (batch.tokens, batch.mask, batch.segment_ids, batch.group, batch.finish_reason)
            )
            tokens, mask, segments, group, finish = (np.asarray(x) for x in host)
            starts = np.asarray(prompts.lengths)[group]
            samples = [
                self._sample(prompts.records[g], row[start : int(np.sum(seg > 0))], reason)
                for g, row, seg, start, reason in zip(
                    group, tokens, segments, starts, finish, strict=True
                )
            ]
            scores = self.pool.score(samples)
            if remember:
                records = [prompts.records[g] for g in group]
                self._seen += zip(samples, scores, records, strict=True)
            ok = np.array([s.status == "ok" for s in scores])
            values = np.array([s.value if s.status == "ok" else 0.0 for s in scores], np.float32)
            # A failed row gets a group of its own: its siblings' baseline is taken without it.
            alone = len(prompts.records) + np.arange(len(samples), dtype=np.int32)
            host = (values, _parts(scores), mask * ok[:, None], np.where(ok, group, alone))
            return _place_rewards(batch, *shard_rows(host, self.mesh))

    def _sample(self, record: dict, ids: Sequence[int], finish: int) -> dict:
        return {
            "prompt": record["prompt_text"],
            "response": self.tokenizer.decode([int(i) for i in ids]),
            "ground_truth": record["ground_truth"],
            "data_source": record["data_source"],
            "extra_info": record["extra_info"],
            "num_tokens": len(ids),
            "finish_reason": ("stop", "length", "interrupt", "abort")[int(finish)],
        }

    @property
    def rows(self) -> list[dict]:
        """Text, reward and status of every sample."""
        keep = ("prompt", "response", "ground_truth", "finish_reason")
        return [
            {**{k: s[k] for k in keep}, "reward": x.value, "status": x.status, "message": x.message}
            for s, x, _ in self._seen
        ]

    @property
    def outcomes(self) -> list[tuple[int, float]]:
        """(prompt_id, score) of every scored sample of a training prompt."""
        return [
            (record["prompt_id"], score.value)
            for _, score, record in self._seen
            if score.status == "ok" and record.get("prompt_id") is not None
        ]

    @property
    def counts(self) -> dict[str, float]:
        """Failures; mean score and share of the samples of every source; means of the parts."""
        out = {f"reward/{k}": 0.0 for k in ("errors", "timeouts")}
        means: dict[str, list[float]] = {}
        shares: dict[str, float] = {}
        for sample, score, record in self._seen:
            source = record.get("source") or sample["data_source"]
            shares[source] = shares.get(source, 0.0) + 1 / len(self._seen)
            if score.status != "ok":
                out[f"reward/{score.status}s"] += 1.0
                continue
            means.setdefault(f"reward/source/{source}", []).append(score.value)
            for name, value in score.parts.items():
                means.setdefault(f"reward/part/{name}", []).append(value)
        out |= {name: float(np.mean(values)) for name, values in sorted(means.items())}
        if len(shares) > 1:
            out |= {f"data/share/{name}": share for name, share in sorted(shares.items())}
        return out

    def close(self) -> None:
        self.pool.close()


def _parts(scores: list[Score]) -> np.ndarray | None:
    """The named parts of every score, in the order of their names: [B, K]; None if there are none
    but the score itself."""
    names = sorted({name for score in scores for name in score.parts} - {"score"})
    if not names:
        return None
    # A part that a score lacks does not apply to it (rljax.advantages.gdpo); a failed row is
    # masked.
    lack = [0.0 if score.status != "ok" else np.nan for score in scores]
    rows = [[s.parts.get(name, x) for name in names] for s, x in zip(scores, lack, strict=True)]
    return np.array(rows, np.float32)


@jax.jit
def _place_rewards(batch: Batch, values, parts, mask, group) -> Batch:
    """An outcome reward sits on the last policy token."""
    batch = batch.replace(mask=mask.astype(jnp.float32), group=group.astype(jnp.int32))
    rewards = last_token(batch) * values[:, None]
    return batch.replace(rewards=rewards, scores=values, reward_parts=parts)


def _state_shardings(model: Model, state: TrainState) -> TrainState:
    """Parameters and every optimizer moment shaped like them on the layout of the weights; the rest
    whole."""
    layout, whole = model.split(model.shardings()), replicated(model.mesh)
    structures = [jax.tree.structure(part) for part in (state.params, state.frozen)]

    def is_params(node):
        return jax.tree.structure(node) in structures

    def place(node):
        if not is_params(node):
            return whole
        # {}: frozen weights that are not part of the state at hand.
        return layout[structures.index(jax.tree.structure(node))] if node else {}

    return jax.tree.map(place, state, is_leaf=is_params)


def training_layout(model: Model, optimizer, *, optimizer_on_host: bool = False) -> TrainState:
    """Shape, dtype and sharding of all that training holds of `model`: what a program is compiled
    for ahead of time, and what `start_training` makes."""
    trained, frozen = model.split(model.abstract())
    like = jax.eval_shape(functools.partial(new_train_state, optimizer=optimizer), trained)
    layout = _state_shardings(model, like)
    if optimizer_on_host:  # counters stay: every device reads them
        waits = lambda sharding, x: on_host(sharding) if x.ndim else sharding  # noqa: E731
        moments = jax.tree.map(waits, layout.opt_state, like.opt_state)
        layout = dataclasses.replace(layout, opt_state=moments)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return dataclasses.replace(jax.tree.map(place, like, layout), frozen=frozen)


def start_training(model: Model, params, optimizer, *, optimizer_on_host=False) -> TrainState:
    """A fresh optimizer state around all weights `params`, placed as `program` will hand it back:
    one compile, not two. Of a model with adapters only they are trained."""
    trained, frozen = model.split(params)
    layout = training_layout(model, optimizer, optimizer_on_host=optimizer_on_host)
    shardings = jax.tree.map(lambda x: x.sharding, dataclasses.replace(layout, frozen={}))
    create = functools.partial(new_train_state, optimizer=optimizer)
    made = jax.jit(create, out_shardings=shardings)(trained)
    return dataclasses.replace(made, params=trained, frozen=frozen)


def _pin(role):
    """Inside a program: keep a trained role on the layout it came with, so that no step re-lays it
    out."""
    if not isinstance(role, WITH_OPTIMIZER):
        return role
    shardings = _state_shardings(role.model, role.state)
    return dataclasses.replace(role, state=jax.lax.with_sharding_constraint(role.state, shardings))


def _with_frozen(role, frozen: dict | None):
    """The role with these frozen weights; a role without an optimizer has none."""
    if not isinstance(role, WITH_OPTIMIZER):
        return role
    return dataclasses.replace(role, state=dataclasses.replace(role.state, frozen=frozen))


def program(function: Callable) -> Callable:
    """jit of a learning phase: (batch, cfg, *, roles...) -> ({role: new role}, metrics).

    `cfg` is static. Trained roles are donated and keep their shardings; frozen ones are only read,
    and so are the frozen weights of a trained role, which roles may share.
    """

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
    def run(batch, cfg, trained, held, frozen):
        trained = {name: _with_frozen(role, held.get(name)) for name, role in trained.items()}
        new, metrics = function(batch, cfg, **trained, **frozen)
        # A trained role that the dataflow did not return is handed back as it was: it was donated
        # too.
        new = {name: _with_frozen(role, {}) for name, role in {**trained, **new}.items()}
        return {name: _pin(role) for name, role in new.items()}, metrics

    @functools.wraps(function)
    def call(batch, cfg, **roles):
        trained = {k: r for k, r in roles.items() if isinstance(r, TRAINED)}
        frozen = {k: r for k, r in roles.items() if k not in trained}
        held = {k: r.state.frozen for k, r in trained.items() if isinstance(r, WITH_OPTIMIZER)}
        bare = {k: _with_frozen(r, {}) for k, r in trained.items()}
        with timed("learn"):
            new, metrics = run(batch, cfg, bare, held, frozen)
            new = {k: _with_frozen(r, held.get(k)) for k, r in new.items()}
            return new, jax.device_get(metrics)

    call.run = run
    return call
