"""Role: what every part of a run that outlives a step answers, a user's own included.

A role is a frozen dataclass registered as a pytree: its arrays are leaves, everything else is
static. A small one needs its `state` alone:

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Multiplier(Role):
        state: jax.Array
"""

import dataclasses
from typing import ClassVar

import jax


class Role:
    """Base class of roles: how programs and checkpoints hold their arrays.

    The defaults are those of a role whose arrays are all in `state`, trained by a dataflow.
    """

    trained: ClassVar[bool] = True  # a program donates it, and may return it anew
    checkpointed: ClassVar[bool] = True  # a resume reads its arrays from the checkpoint

    def arrays(self):
        """Returns the arrays that a checkpoint keeps of the role."""
        return self.state

    def with_arrays(self, arrays) -> "Role":
        """Returns the role with the arrays of a checkpoint."""
        return dataclasses.replace(self, state=arrays)

    def split(self) -> tuple["Role", object]:
        """Returns the role without what it only reads or shares with others, and that: a program
        donates the first half and never the second."""
        return self, None

    def joined(self, shared) -> "Role":
        """Returns the role of both halves of `split`."""
        return self

    def pinned(self) -> "Role":
        """Returns the role with its arrays kept on the layout they came with (inside a program)."""
        return self

    # A role on devices of its own cannot be in the program of the others: it fills the batch
    # before, and something else stands for it inside (rljax.roles.placed).

    def filled(self, batch):
        """Returns the batch with what the role computes of it before the program (host verb)."""
        return batch

    def in_program(self) -> "Role":
        """Returns the role in the form that the program gets."""
        return self

    def after_program(self, new: "Role", roles: dict) -> "Role":
        """Returns the role that `new` stands for, which the program returned for it, among
        its new `roles`."""
        return new

    def parts(self) -> dict[str, object]:
        """Returns {name: arrays that are held on the devices all through a run}, for the plan."""
        return {"": self.arrays()}


def static_field(default=dataclasses.MISSING):
    """Returns a dataclass field that is no leaf of the pytree."""
    return dataclasses.field(default=default, metadata={"static": True})


def is_role(x) -> bool:
    """Returns whether an argument of a dataflow is a role or arrays, and not an option."""
    return isinstance(x, Role) or any(
        isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(leaf, "__array__")
        for leaf in jax.tree.leaves(x)
    )
