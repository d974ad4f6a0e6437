"""Replicas: gradients that meet once per optimizer step.

Between slices there is only the data center's network, a hundredth of what chips of one slice have
between them. So each replica of the weights (an index on the data axis) adds up the gradients of
its own rows, microbatch after microbatch, and the sum over replicas is taken at the end. In the
program that is a leading axis N of parameters and gradients, one entry to a replica, over which the
loss and its gradient are mapped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rljax.errors import InputError
from rljax.mesh import BATCH_AXES, REPLICA, replicated, row_shards
from rljax.models.model import Model


@dataclasses.dataclass(frozen=True)
class Replicas:
    """N replicas. One is the usual case: XLA sums over the data axis in every microbatch, and every
    function here is the identity. `model` is on the mesh of a replica (rljax.mesh.replica_mesh)."""

    count: int = 1
    model: Model | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a number that every replica has: () or (N,)."""
        return () if self.count == 1 else (self.count,)

    def copies(self, params):
        """Returns the trained weights as every replica has them, [N, ...] each."""
        if self.count == 1:
            return params

        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.count, *x.shape)), params)
        return self._laid_out(copies)

    def zeros(self, like):
        """Returns the sum of no gradient yet: zeros [N, ...] like the weights."""
        zeros = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), like
        )
        return zeros if self.count == 1 else self._laid_out(zeros)

    def _laid_out(self, copies):
        layout, _ = self.model.split(self.model.shardings())

        def keep(x, s):
            return jax.lax.with_sharding_constraint(
                x, NamedSharding(s.mesh, PartitionSpec(REPLICA, *s.spec))
            )

        return jax.tree.map(keep, copies, layout)

    def each(self, function: Callable, in_axes: Any = 0) -> Callable:
        """Maps a function over the leading axis N of its arguments: every replica calls
        it by itself."""
        if self.count == 1:
            return function
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name=REPLICA)

    def split(self, tree):
        """Splits arrays [B, ...] -> [N, B / N, ...]: the rows of each replica. Raises InputError if
        N does not divide B."""
        if self.count == 1:
            return tree

        def one(x):
            if x.shape[0] % self.count:
                raise InputError(
                    "rows of a microbatch",
                    value=x.shape[0],
                    rule=f"must divide by mesh.data={self.count}",
                    fix="more rows per optimizer step and microbatch",
                )
            x = x.reshape(self.count, -1, *x.shape[1:])
            return self._rows(x, PartitionSpec(REPLICA, self._inner(x.shape[1])))

        return jax.tree.map(one, tree)

    def merged(self, tree):
        """Joins arrays [N, B / N, ...] -> [B, ...]."""
        if self.count == 1:
            return tree

        def one(x):
            axes = (REPLICA, *self._inner(x.shape[1]))
            return self._rows(x.reshape(-1, *x.shape[2:]), PartitionSpec(axes))

        return jax.tree.map(one, tree)

    def _inner(self, rows: int) -> tuple[str, ...]:
        """Returns the axes over which a replica splits so many rows."""
        return BATCH_AXES if rows % row_shards(self.model.mesh) == 0 else ()

    def _rows(self, x, spec: PartitionSpec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.model.mesh, spec))

    def whole(self, tree):
        """Returns arrays of which any replica reads any row, whole on every device."""
        if self.count == 1:
            return tree

        def keep(x):
            return jax.lax.with_sharding_constraint(x, replicated(self.model.mesh))

        # Without a barrier XLA gathers them again in every iteration of a loop that reads them.
        return jax.lax.optimization_barrier(jax.tree.map(keep, tree))

    def total(self, tree):
        """Sums arrays [N, ...] over all replicas: what crosses from slice to slice."""
        return tree if self.count == 1 else jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)
