"""A reference on devices of its own: its log-probs are a program of those devices, which runs
before the program of the dataflow and fills batch.ref_logprobs."""

import dataclasses
import functools
import time

import jax
from jax.sharding import Mesh

from rljax.arrays import fetch, moved, moved_rows, weights_of
from rljax.batch import Batch
from rljax.learn import Steps
from rljax.models.trees import merged
from rljax.roles.models import Reference
from rljax.roles.role import Role, static_field
from rljax.tracking import timing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filled(Role):
    """Stands for a reference on other devices inside a program: the batch has its log-probs
    already. `renewed`: whether the reference is to become the actor after the program."""

    trained = False

    renewed: jax.Array | None = None

    def logprobs(self, batch: Batch, steps: Steps | int | None = None) -> jax.Array:
        """Returns log pi_ref(tokens), which were computed before: [B, S]. Raises InputError if the
        batch has none."""
        return batch.require("ref_logprobs", by="a reference on other devices").ref_logprobs

    def follow(self, actor, when) -> "Filled":
        """Returns the actor as it is now, where `when` is true; it is copied after the program."""
        return dataclasses.replace(self, renewed=when)

    def arrays(self):
        """Returns {}: the weights are elsewhere."""
        return {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedReference(Reference):
    """A reference on the devices of its model's mesh. `home` is the mesh of the batches and of the
    actor, `steps` say how rows are packed here."""

    home: Mesh | None = static_field(None)
    steps: Steps | None = static_field(None)

    def start(self, batch: Batch) -> jax.Array:
        """Begins the log-probs [B, S] of a batch and does not wait for them (host verb): what the
        other devices and the host do meanwhile costs no time."""
        fields = {field: getattr(batch, field) for field in _READ}
        rows = moved_rows(Batch(**fields), self.model.mesh, "reference")
        role = dataclasses.replace(self, params=weights_of(self.params, "reference"))
        return _logprobs(role, rows, steps=self.steps)

    def finish(self, batch: Batch, logprobs: jax.Array) -> Batch:
        """Returns the batch with the log-probs [B, S] that `start` began (host verb)."""
        begun = time.monotonic()
        jax.block_until_ready(logprobs)
        timing.moved("reference", waited_s=time.monotonic() - begun)
        return batch.replace(ref_logprobs=moved_rows(logprobs, self.home, "reference"))

    def filled(self, batch: Batch) -> Batch:
        """Returns the batch with ref_logprobs, which it may have already (host verb)."""
        return batch if batch.ref_logprobs is not None else self.finish(batch, self.start(batch))

    def in_program(self) -> Filled:
        """Returns the stand-in that the program of the actor's devices gets."""
        return Filled()

    def after_program(self, new: Filled, roles: dict) -> "PlacedReference":
        """Returns this reference; where the program says so, with the actor's weights as they are
        now, which are moved here."""
        if new.renewed is None or not fetch(new.renewed):
            return self
        begun = time.monotonic()
        old_params, base = self.model.split(self.params)
        actor_params, _ = roles["actor"].model.split(roles["actor"].state.weights)
        copies = jax.tree.map(
            lambda x, like: moved(x.astype(like.dtype), like.sharding), actor_params, old_params
        )
        jax.block_until_ready(copies)
        size = sum(x.nbytes for x in jax.tree.leaves(copies))
        timing.moved("reference", weights_bytes=size, weights_s=time.monotonic() - begun)
        return dataclasses.replace(self, params=merged(copies, base))

    def parts(self) -> dict:
        """Returns {"weights": all that it holds}: a base under adapters is its own here."""
        return {"weights": self.params}


_READ = ("tokens", "segment_ids", "positions", "mask", "pixels", "patch_coords", "rope_positions")


@functools.partial(jax.jit, static_argnames="steps")
def _logprobs(role: Reference, batch: Batch, *, steps: Steps) -> jax.Array:
    return role.logprobs(batch, steps)


def run_dataflow(dataflow, batch: Batch, key: jax.Array, cfg, roles: dict) -> tuple[dict, dict]:
    """Calls a dataflow once, with a scalar `key` -> (the roles that it renewed, metrics on the
    devices). Roles on devices of their own fill the batch before it (host verb)."""
    for role in roles.values():
        batch = role.filled(batch)
    program_roles = {name: role.in_program() for name, role in roles.items()}
    returned, metrics = dataflow(batch, key, cfg, **program_roles)
    # A dataflow that is no program need not return a role that it did not change.
    trained = {name: role for name, role in program_roles.items() if role.trained}
    new_roles = {**trained, **returned}
    renewed = {name: roles[name].after_program(role, new_roles) for name, role in new_roles.items()}
    return renewed, metrics
