"""Chips that this host does not have: what tests of the lane `tpu_aot` compile for."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@pytest.fixture(scope="module")
def one_chip():
    """generation -> the sharding of an array on one chip of it."""
    pytest.importorskip("libtpu", reason='libtpu is absent: pip install "jax[tpu]"')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
    # Nothing runs on a chip, so there is nothing to lock against a second process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    def sharding(generation: str) -> NamedSharding:
        name = TOPOLOGIES[generation]
        devices = topologies.get_topology_desc(name, platform="tpu").devices
        return NamedSharding(Mesh(np.array(devices[:1]), ("chip",)), PartitionSpec())

    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    yield sharding
    jax.config.update("jax_enable_compilation_cache", True)
