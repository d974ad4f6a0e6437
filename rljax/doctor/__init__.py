"""`rljax doctor`: faults of a machine, an installation, a shell or a run folder, each with one line
that mends it.

A check is a generator of findings, and reads what it is about itself: variables, folders, metadata.
Only `probe`, `network`, and the model and checkpoints of a run folder import JAX.
"""

import os
from collections.abc import Iterator

from rljax.config.run_options import DoctorOptions
from rljax.doctor.environment import environment
from rljax.doctor.finding import Finding
from rljax.doctor.network import hosts_network
from rljax.doctor.packages import packages
from rljax.doctor.probe import probe
from rljax.doctor.run_folder import run_folder

__all__ = ["Finding", "examine"]


def examine(options: DoctorOptions) -> Iterator[Finding]:
    """Yields the findings of all checks that the options ask for."""
    yield from packages(os.environ)
    yield from environment(os.environ, options.disk_gb, options.run)
    if options.run:
        yield from run_folder(options.run)
    if options.jax:
        yield from probe(os.environ, options.timeout_s)
    if options.hosts:
        yield from hosts_network(os.environ, options.ports, options.timeout_s)
