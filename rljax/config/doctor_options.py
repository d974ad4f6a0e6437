"""Options of `rljax doctor`."""

import dataclasses

from rljax.config.declare import Options, option


@dataclasses.dataclass(frozen=True)
class DoctorOptions(Options):
    """rljax doctor."""

    run: str = option("", "A run folder, and its checkpoints; or where one will be", first=True)
    jax: bool = option(True, "Start JAX and the sandbox, in a process of their own; --nojax: not")
    hosts: bool = option(False, "Meet the other hosts of a pod; run it on all of them at once")
    ports: tuple[int, ...] = option(
        (8471,), "Of --hosts: looked at beside the coordinator's, both ways"
    )
    timeout_s: float = option(120.0, "Until JAX has started, or all hosts have come", above=0)
    disk_gb: float = option(10.0, "The least that is free for runs and caches, in GB", low=0)
    json: bool = option(False, "Print the findings as JSON")

    def conflicts(self):
        if not all(0 < port < 65_536 for port in self.ports):
            yield "ports", self.ports, "each between 1 and 65535"
