"""Pods: their sizes, and how one command is started on all of their hosts. No JAX here; the hosts
find each other in rljax.hosts."""

from rljax.pods.pod import VERSIONS, Pod, read_pod

__all__ = ["VERSIONS", "Pod", "read_pod"]
