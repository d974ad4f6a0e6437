"""Who else samples: a mixture of the policy and its reference, and two samplers side by side.

What lives here: what `generate` is called on in place of the actor. What does not: the draw
(rljax.sampler), who learns what from it (dataflows). Axes: B = P n rows, n samples of each of P
prompts; where two sample, rows 2i are the actor's and rows 2i + 1 the opponent's.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.mesh import constrain_rows, in_device_memory
from rljax.models.model import Model
from rljax.recording import calls
from rljax.roles.models import Actor, Reference
from rljax.sampler import Sampling, SecondModel, generate
from rljax.tracking.timing import timed


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The geometric mixture pi^(1 - weight) ref^weight / Z, word by word (Nash-MD, arXiv
    2312.00886)."""

    actor: Actor
    reference: Reference
    weight: float

    def generate(
        self, prompts, key, sampling: Sampling, *, n: int = 1, finished: Callable | None = None
    ) -> Batch:
        """n trajectories per prompt; their log-probs are the mixture's (host verb)."""
        second = SecondModel(
            self.reference.model, in_device_memory(self.reference.params), float(self.weight)
        )
        with timed("generate"):
            batch = generate(
                self.actor.model, self.actor.state.weights, prompts.tokens, prompts.lengths, key,
                sampling, n=n, version=-1, decoding=self.actor.decoding, images=prompts.images,
                second=second, finished=finished,
            )  # fmt: skip
            return jax.block_until_ready(batch)


@dataclasses.dataclass(frozen=True)
class Versus:
    """The actor against an opponent: half of the samples of a prompt are each one's, in turns.
    Samples that are not the actor's have policy_version -1 at mask 1 (`wrote_itself`)."""

    actor: Actor
    opponent: Reference | Mixture

    @property
    def model(self) -> Model:
        return self.actor.model

    def generate(
        self, prompts, key, sampling: Sampling, *, n: int = 1, finished: Callable | None = None
    ) -> Batch:
        """n trajectories per prompt, n even (host verb)."""
        if n % 2:
            raise InputError("samples per prompt against an opponent", value=n, rule="even")

        def turn(first: int) -> Callable | None:
            """Rows of one of the two, by the place that they will have."""
            if finished is None:
                return None
            return lambda row, ids, reason: finished(2 * row + first, ids, reason)

        ours = self.actor.generate(prompts, key, sampling, n=n // 2, finished=turn(0))
        # Another stream: equal draws from near-equal models are near-equal texts.
        key = jax.random.fold_in(key, 2**21)
        theirs = self.opponent.generate(prompts, key, sampling, n=n // 2, finished=turn(1))
        if calls() is not None:  # a plan's rows lie on this host, not on the planned mesh
            return _in_turns(ours, theirs)
        return _placed_in_turns(ours, theirs, self.model)


def _in_turns(ours: Batch, theirs: Batch) -> Batch:
    def woven(one, other):
        return jnp.stack([one, other], axis=1).reshape((-1, *one.shape[1:]))

    return jax.tree.map(woven, ours, theirs)


@jax.jit(static_argnames="model")
def _placed_in_turns(ours: Batch, theirs: Batch, model: Model) -> Batch:
    place = lambda x: constrain_rows(x, model.mesh)  # noqa: E731
    return jax.tree.map(place, _in_turns(ours, theirs))


def wrote_itself(batch: Batch) -> jax.Array:
    """Whether the actor, at whatever step, sampled a row: [B] bool."""
    batch.require("policy_version", by="wrote_itself")
    return ~jnp.any((batch.mask > 0) & (batch.policy_version < 0), axis=1)
