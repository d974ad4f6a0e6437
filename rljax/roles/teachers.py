"""Several frozen policies, each of which teaches its own rows of a batch."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.learn import Steps
from rljax.roles.models import Reference
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
