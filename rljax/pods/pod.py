"""Pod: how many chips, hosts and slices a TPU type has, and what each cloud calls it."""

import dataclasses
import functools
import itertools
import math
import re

from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Version:
    """Figures of a TPU version, and its names, from the documentation of Cloud TPU and of GKE ("TPU
    versions", "Plan TPUs in GKE"), read for 2026-11."""

    most_chips: int  # of a whole pod
    dimensions: int  # of its torus
    machine: str  # of Compute Engine and GKE, with {} for the chips of a host
    gke: str  # label cloud.google.com/gke-tpu-accelerator
    runtime: str = ""  # --runtime-version of the Cloud TPU API; "" = that API has it not
    api_name: str = ""  # in names of that API, where it is not the version's
    devices_per_chip: int = 1  # as JAX counts them
    counts: str = "chips"  # what the number in a type such as v4-32 counts
    image: str = ""  # image family of Compute Engine; "" = not there


_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
VERSIONS = {
    "v4": Version(
        4096,
        3,
        "ct4p-hightpu-{}t",
        "tpu-v4-podslice",
        "tpu-ubuntu2204-base",
        devices_per_chip=2,
        counts="cores",
    ),
    "v5e": Version(
        256, 2, "ct5lp-hightpu-{}t", "tpu-v5-lite-podslice", "v2-alpha-tpuv5-lite", "v5litepod"
    ),
    "v5p": Version(
        8960, 3, "ct5p-hightpu-{}t", "tpu-v5p-slice", "v2-alpha-tpuv5", counts="cores", image=_IMAGE
    ),
    "v6e": Version(256, 2, "ct6e-standard-{}t", "tpu-v6e-slice", "v2-alpha-tpuv6e", image=_IMAGE),
    "tpu7x": Version(
        9216,
        3,
        "tpu7x-standard-{}t",
        "tpu7x",
        devices_per_chip=2,
        counts="cores",
        image="ubuntu-accel-2404-amd64-tpu-tpu7x",
    ),
}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x"}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # of three dimensions, below a cube of 64 chips


@dataclasses.dataclass(frozen=True)
class Pod:
    """Slices of one shape: `version` such as v5e, `topology` in chips such as (4, 4)."""

    version: str
    topology: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Number of chips of one slice."""
        return math.prod(self.topology)

    @property
    def chips_per_host(self) -> int:
        """Number of chips of a host: all of a slice of v5e and v6e of up to 8 chips, else 4."""
        return self.chips if self.figures.dimensions == 2 and self.chips <= 8 else 4

    @property
    def hosts_per_slice(self) -> int:
        """Number of hosts of one slice."""
        return self.chips // self.chips_per_host

    @property
    def hosts(self) -> int:
        """Number of hosts of all slices."""
        return self.slices * self.hosts_per_slice

    @property
    def devices(self) -> int:
        """Number of devices of all slices, as JAX counts them."""
        return self.slices * self.chips * self.figures.devices_per_chip

    @property
    def figures(self) -> Version:
        """Figures of its TPU version."""
        return VERSIONS[self.version]

    @property
    def type(self) -> str:
        """Accelerator type of one slice, as the Cloud TPU API writes it: v5litepod-16, v4-32."""
        number = self.chips * (2 if self.figures.counts == "cores" else 1)
        return f"{self.figures.api_name or self.version}-{number}"

    @property
    def topology_text(self) -> str:
        """Topology as text: "4x4"."""
        return "x".join(map(str, self.topology))

    @property
    def machine_type(self) -> str:
        """Machine type of its hosts on Compute Engine and GKE."""
        return self.figures.machine.format(self.chips_per_host)

    def __str__(self) -> str:
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        chips = self.slices * self.chips
        return f"{slices}{self.type} ({self.version}:{self.topology_text}), {hosts}, {chips} chips"


def read_pod(text: str, slices: int = 1) -> Pod:
    """Returns the pod of "v5litepod-16", "v5e-16", "v4-32" (two cores a chip, as the Cloud TPU API
    counts) or "v5p:4x4x4", with so many slices; "2xv5e:16x16" says their number itself. Raises
    InputError for a version or a shape that does not exist, and for two numbers of slices."""
    if match := re.fullmatch(r"([1-9]\d{0,2})x(?=[a-z])(.*)", text):
        if slices != 1 and slices != int(match[1]):
            rule = f"--type={text} says {match[1]}"
            raise InputError("--slices", value=slices, rule=rule, fix="leave --slices out")
        text, slices = match[2], int(match[1])
    name, _, rest = text.partition(":") if ":" in text else text.partition("-")
    version = _ALIASES.get(name, name)
    if version not in VERSIONS or not re.fullmatch(r"[1-9][0-9x]*", rest):
        rule = f"VERSION-NUMBER or VERSION:AxB(xC), of {', '.join(VERSIONS)}"
        fix = "such as v5litepod-16, v4-32, v6e-256 or v5p:4x4x4"
        raise InputError("type", value=text, rule=rule, fix=fix)
    figures = VERSIONS[version]
    shapes = topologies(version)
    if ":" in text:
        shape = tuple(int(n) for n in rest.split("x") if n)
        if shape not in shapes:
            nearest = [s for s in shapes if math.prod(s) >= math.prod(shape)] or [shapes[-1]]
            fix = f"such as {version}:{_text(nearest[0])}"
            raise InputError(f"{version} has no such slice", value=text, fix=fix)
        return Pod(version, shape, slices)
    per_chip = 2 if figures.counts == "cores" else 1
    fitting = [s for s in shapes if math.prod(s) * per_chip == int(rest)] if rest.isdigit() else []
    if not fitting:
        numbers = sorted({math.prod(s) * per_chip for s in shapes})
        nearest = sorted(numbers, key=lambda n: abs(n - int(rest)) if rest.isdigit() else n)[:4]
        rule = f"the number counts {figures.counts}"
        fix = f"of {', '.join(f'{name}-{n}' for n in sorted(nearest))}, for example"
        raise InputError(f"{version} has no such type", value=text, rule=rule, fix=fix)
    return Pod(version, min(fitting, key=lambda s: s[::-1]), slices)  # the most cube-like one


@functools.cache
def topologies(version: str) -> tuple[tuple[int, ...], ...]:
    """Returns every shape of a slice of a version, in the order of its chips."""
    if VERSIONS[version].dimensions == 2:
        return tuple(_shape(text) for text in _FLAT)
    max_chips = VERSIONS[version].most_chips
    sides = range(4, max_chips // 16 + 1, 4)
    cubes = []
    for a, b in itertools.combinations_with_replacement(sides, 2):
        if a * b * b > max_chips:
            continue
        cubes += [(a, b, c) for c in range(b, max_chips // (a * b) + 1, 4)]
    return (*(_shape(text) for text in _SMALL), *sorted(cubes, key=lambda s: (math.prod(s), s)))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
