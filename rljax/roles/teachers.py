"""Teachers that are no single frozen policy: several ones, each of which teaches its own rows of a
batch, and the policy itself, which is shown more."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.learn import Steps
from rljax.roles.models import Actor, Reference
from rljax.roles.role import Role, static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teachers(Role):
    """Frozen policies of several folders: member i teaches the rows at which batch.teacher is i + 1
    (multi-teacher on-policy distillation). `names`: those of the members, in metrics."""

    trained: ClassVar[bool] = False
    checkpointed: ClassVar[bool] = False  # each comes from its folder

    members: tuple[Reference, ...]
    names: tuple[str, ...] = static_field()

    def arrays(self):
        """Returns the weights of all members."""
        return tuple(member.arrays() for member in self.members)

    def parts(self) -> dict:
        """Returns {"weights of NAME": the weights of this member}."""
        named = zip(self.names, self.members, strict=True)
        return {f"weights of {name}": member.params for name, member in named}

    def teaching(self, batch: Batch) -> tuple:
        """Returns (member, mask [B, S] of the tokens that it teaches) for every member. Raises
        InputError where the batch has no `teacher`."""
        batch.require("teacher", by="several teachers")
        return tuple(
            (member, jnp.where(batch.teacher == i, batch.mask, 0.0))
            for i, member in enumerate(self.members, 1)
        )

    def logprobs(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns log pi_teacher(tokens) of each row's own teacher, at the sampling temperature:
        [B, S], in nats; 0 where none teaches. Packed passes compute a member on its rows alone."""
        total = jnp.zeros(batch.mask.shape, jnp.float32)
        for member, mask in self.teaching(batch):
            logprobs = member.logprobs(batch.replace(mask=mask), steps)
            total = jnp.where(mask > 0, logprobs, total)
        return total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelfTeacher(Reference):
    """The policy as its own teacher, which a rollout shows a hint: as it was when the phase began,
    and after each step with the share `rate` of the weights of the policy (1: the policy itself;
    between 0 and 1 a moving mean)."""

    trained: ClassVar[bool] = True  # a step renews it

    rate: float = static_field(0.0)

    def after_program(self, new: "SelfTeacher", roles: dict) -> "SelfTeacher":
        """Returns the teacher after a step of the policy among the new `roles`."""
        if not self.rate:
            return new
        own, shared = new.split()
        return _renewed(own, shared, roles["actor"]).joined(shared)


@functools.partial(jax.jit, donate_argnames="own")
def _renewed(own: SelfTeacher, shared, actor: Actor) -> SelfTeacher:
    teacher = own.joined(shared)
    new = teacher.renewed(actor, lambda new, old: (1 - own.rate) * old + own.rate * new)
    return new.split()[0].pinned()
