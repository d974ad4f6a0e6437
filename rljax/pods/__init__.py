"""Where runs on several hosts come from: what a pod is, and what starts one command on all of its
hosts. No JAX here; the hosts find each other in rljax.hosts."""

from rljax.pods.pod import VERSIONS, Pod, read_pod

__all__ = ["VERSIONS", "Pod", "read_pod"]
