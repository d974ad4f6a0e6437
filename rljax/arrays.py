"""Host and device: the one place where host code reads device arrays and places its own.

`fetch` and `place` are the only two ways in and out: several hosts must agree on both, so that
`np.asarray` and `jax.device_put` of batches anywhere else would be a bug that one host never shows.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.mesh import replicated, row_sharding, row_shards


def fetch(tree):
    """Arrays of the devices as numpy arrays of this host. Waits until they are computed."""
    return jax.device_get(tree)


def place(tree, mesh: Mesh):
    """Host or device arrays [B, ...] as arrays with their rows split over the mesh; arrays whose
    rows do not divide, and scalars, are whole on every device."""

    def put(x):
        fits = np.ndim(x) > 0 and np.shape(x)[0] % row_shards(mesh) == 0
        return jax.device_put(x, row_sharding(mesh) if fits else replicated(mesh))

    return jax.tree.map(put, tree)
