"""One key for a compiled program on all hosts, so that programs of the first host are read by
the others."""

import hashlib

import jax
from jax._src import cache_key
from jax._src.lib import xla_client

from rljax import hosts


def same_keys() -> None:
    """Makes the keys of JAX's persistent cache equal on all hosts. All of them call it; with one
    process it does nothing.

    A part of a key is the fingerprint of the devices as the runtime knows them. That of CPUs has
    the number of the process in it, so that no host but the first would ever find a program. If
    fingerprints differ, those of all hosts together take its place.
    """
    if hosts.count() == 1:
        return
    fingerprints = hosts.gather(_fingerprint())
    if len(set(fingerprints)) > 1:
        combined = hashlib.sha256(" ".join(fingerprints).encode()).digest()
        cache_key._hash_accelerator_config = lambda hashed, devices: hashed.update(combined)


def _fingerprint() -> str:
    try:
        return str(xla_client.get_topology_for_devices(jax.devices()).fingerprint())
    except jax.errors.JaxRuntimeError:  # a runtime without: JAX hashes the kinds of the devices
        return ""
