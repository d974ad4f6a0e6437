"""A rollout against an opponent, which draws half of each prompt's samples.

Axes: B = P n rows, n samples of each of P prompts; rows 2i are the actor's and rows 2i + 1 the
opponent's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import Share, contract
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import constrain_rows
from rljax.models.model import Model
from rljax.roles.models import Actor, Reference
from rljax.rollout.rollout import RolloutText, run_rollout
from rljax.rollout.sample import TrajectorySampler
from rljax.sampler import Sampling, SecondModel


@contract(safe=True, rows=2, opponent=True)
def against(
    prompts,
    key,
    cfg,
    *,
    actor,
    reference,
    reward,
    sample,
    draw,
    opponent: Literal["reference", "mixture"] = "reference",
    mixture: Share = 0.5,
    inner: RolloutText = "once()",
):
    """The rollout `inner` with samples of the policy and of its opponent in turn: the reference
    (XPO, arXiv 2405.21046), or the geometric mixture pi^(1 - mixture) ref^mixture (Nash-MD).

    Raises InputError unless 0 <= mixture <= 1, and for an odd number of samples per prompt.
    """
    if not 0 <= mixture <= 1:
        raise InputError(
            "against(mixture)",
            value=mixture,
            rule="0 (the policy) to 1",
            fix="mixture=0.125, or another number of this range",
        )
    other_actor = (
        reference if opponent == "reference" else GeometricMixture(actor, reference, mixture)
    )
    actors = AgainstOpponent(actor, other_actor)
    inner = resolve(inner, NAMESPACES["collect"])
    sample_both = functools.partial(sample, actor=actors)
    if isinstance(sample, TrajectorySampler):
        sample_both = sample.wrapped(sample_both)
    arguments = dict(actor=actors, reward=reward, sample=sample_both, draw=draw)
    return run_rollout(inner, prompts, key, cfg, **arguments)


@dataclasses.dataclass(frozen=True)
class GeometricMixture:
    """The geometric mixture pi^(1 - weight) ref^weight / Z, token by token (Nash-MD, arXiv
    2312.00886)."""

    actor: Actor
    reference: Reference
    weight: float

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
        """Samples n trajectories per prompt -> Batch of P n rows; their log-probs are the
        mixture's (host verb)."""
        weights, weight = self.reference.sampling_params(), float(self.weight)
        second = SecondModel(self.reference.model, weights, weight)
        options = dict(finished=finished, stop=stop, second=second)
        return self.actor.generate(prompts, key, sampling, n=n, **options)


@dataclasses.dataclass(frozen=True)
class AgainstOpponent:
    """An actor and its opponent, which draw the samples of a prompt in turn. The opponent's samples
    have policy_version -1 where the mask is 1 (`sampled_by_actor`)."""

    actor: Actor
    opponent: Reference | GeometricMixture

    @property
    def model(self) -> Model:
        """The actor's model."""
        return self.actor.model

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
        """Samples n trajectories per prompt -> Batch of P n rows (host verb). Raises InputError if
        n is odd."""
        if n % 2:
            raise InputError(
                "samples per prompt against an opponent",
                value=n,
                rule="even",
                fix=f"--config.batch.samples_per_prompt={n + 1}, or another even number",
            )

        def finished_of(first: int) -> Callable | None:
            """Returns `finished`, called with the rows' indices in the joint batch."""
            if finished is None:
                return None
            return lambda row, ids, reason: finished(2 * row + first, ids, reason)

        options = dict(n=n // 2, stop=stop)
        actor_batch = self.actor.generate(
            prompts, key, sampling, finished=finished_of(0), **options
        )
        # With the same key, two similar models would draw almost the same texts.
        key = stream(key, "opponent")
        opponent_batch = self.opponent.generate(
            prompts, key, sampling, finished=finished_of(1), **options
        )
        return _interleaved(actor_batch, opponent_batch, self.model.mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def _interleaved(actor_batch: Batch, opponent_batch: Batch, mesh) -> Batch:
    def rows(actor_rows, opponent_rows):
        pairs = jnp.stack([actor_rows, opponent_rows], axis=1).reshape((-1, *actor_rows.shape[1:]))
        return constrain_rows(pairs, mesh)

    return jax.tree.map(rows, actor_batch, opponent_batch)


def sampled_by_actor(batch: Batch) -> jax.Array:
    """Returns whether the actor sampled a row, at this step or an earlier one: [B] bool."""
    batch.require("policy_version", by="sampled_by_actor")
    return ~jnp.any((batch.mask > 0) & (batch.policy_version < 0), axis=1)
