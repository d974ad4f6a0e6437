"""Published figures of chips, and devices of a topology ("v5p:4x4x4") that need not be there."""

import dataclasses
import itertools
import math
import os
import re

import jax

from rljax.errors import InputError
from rljax.pods import VERSIONS

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one device, as JAX counts devices. `link_bytes_per_s` is one link's, one way;
    `dcn_bytes_per_s` its share of its host's way to the data center's network."""

    name: str
    hbm_bytes: float
    flops_per_s: float  # of bfloat16 products
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    dcn_bytes_per_s: float = 0.0  # 0 = not known


# HBM is what the compiler lets the programs of a chip have (libtpu 0.0.50 says it of one that is
# too large): of 32, 16, 95, 32 and 192 published GiB. The rest is of the Cloud TPU documentation,
# "System architecture" page of each version, read for 2026-11: peak bfloat16 FLOP/s, HBM bandwidth,
# and the interconnect's bandwidth of a chip, half of it each way, over its links (4 of a 2D torus,
# 6 of a 3D one): 600, 400, 1200, 800 and 1200 GB/s. The data center's network is published per chip
# of v5p, v6e and TPU7x (50, 100 and 100 Gbit/s), per pod of v5e (6.4 Tbit/s for 256 chips), and not
# at all of v4, which is counted as v5p is.
_TPUS = {
    "v4": Chip("v4", 30.5 * GIB, 275e12, 1228e9, 50e9, 6.25e9),
    "v5e": Chip("v5e", 15.75 * GIB, 197e12, 819e9, 50e9, 3.125e9),
    "v5p": Chip("v5p", 95.73 * GIB, 459e12, 2765e9, 100e9, 6.25e9),
    "v6e": Chip("v6e", 31.24 * GIB, 918e12, 1638e9, 100e9, 12.5e9),
    "tpu7x": Chip("tpu7x", 189.48 * GIB, 2307e12, 7380e9, 100e9, 12.5e9),
}


# Of a whole pod, and of a chip, as JAX counts devices.
_MOST_CHIPS = {name: version.most_chips for name, version in VERSIONS.items()}
_DEVICES_PER_CHIP = {name: version.devices_per_chip for name, version in VERSIONS.items()}
_FLAT = [name for name, version in VERSIONS.items() if version.dimensions == 2]


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device of a chip that is not there: what layouts and the estimate of memory read of one.
    Nothing can be compiled for it."""

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int
    platform = "tpu"
    process_index = 0

    @property
    def client(self) -> "NoClient":
        return NoClient()

    def addressable_memories(self) -> list["Memory"]:
        return [Memory("device"), Memory("pinned_host")]

    def default_memory(self) -> "Memory":
        return Memory("device")


@dataclasses.dataclass(frozen=True)
class NoClient:
    """The client of stand-ins: no device of theirs is at hand."""

    platform = "tpu"

    def local_devices(self) -> list:
        return []

    def process_index(self) -> int:
        return 0


class Memory(str):
    """A memory of a StandIn: JAX looks for its kind among them as for a text."""

    @property
    def kind(self) -> str:
        return str(self)


def _parsed(topology: str) -> tuple[int, str, list[int]]:
    """ "2xv5p:4x4x4" -> (2, "v5p", [4, 4, 4])."""
    several = re.match(r"([1-9][0-9]{0,2})x(?=\D)", topology)
    name, _, sizes = topology[several.end() if several else 0 :].partition(":")
    name = {"v7x": "tpu7x"}.get(name, name)
    shape = [int(n) for n in sizes.split("x") if re.fullmatch("[1-9][0-9]{0,4}", n)]
    # A size of 0 would end the process inside of libtpu.
    if name not in _TPUS or len(shape) != len(sizes.split("x")):
        raise InputError(
            "topology", value=topology,
            rule=f"VERSION:AxB or AxBxC, of {', '.join(_TPUS)}; Nx before it are N such slices",
            fix="such as v5e:2x4, v5p:4x4x4 or 2xv5e:16x16",
        )  # fmt: skip
    shape += [1] * (3 - len(shape) if name in ("v4", "v5p", "tpu7x") else 0)
    return int(several[1]) if several else 1, name, shape


def stand_ins(topology: str) -> tuple[list[StandIn], Chip]:
    """The devices of a TPU topology, and what each has, of tables: enough to count memory, without
    libtpu."""
    slices, name, shape = _parsed(topology)
    chips, each = math.prod(shape), _DEVICES_PER_CHIP.get(name, 1)
    known = all(size in (1, 2) or size % 4 == 0 for size in shape)
    if not known or len(shape) != (2 if name in _FLAT else 3) or chips > _MOST_CHIPS[name]:
        rule = f"sizes of 1, 2, 4 or multiples of 4, at most {_MOST_CHIPS[name]} chips"
        rule = f"{'two' if name in _FLAT else 'three'} {rule}"
        raise InputError(f"{name} has no such slice", value=topology, rule=rule)
    # z, y, x, core from the outermost on, as JAX lists them.
    places = itertools.product(range(slices), *map(range, (shape + [1])[2::-1]), range(each))
    devices = [
        StandIn(i, f"TPU {name}", (x, y, z), core, index)
        for i, (index, z, y, x, core) in enumerate(places)
    ]
    return devices, _part(_TPUS[name], each)


def topology_devices(topology: str) -> tuple[list, Chip]:
    """The devices of a TPU topology such as "v5e:2x4", or of several such slices ("2xv5e:16x16"),
    for which programs can be compiled here, and what each has. Needs libtpu, and no TPU."""
    slices, name, shape = _parsed(topology)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
    # Nothing runs on a chip, so there is nothing to lock against a second process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    several = {"num_slices": slices} if slices > 1 else {}
    try:
        text = f"{name}:{'x'.join(map(str, shape))}"
        devices = topologies.get_topology_desc(text, platform="tpu", **several).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"no topology {topology}: {str(error).splitlines()[0]}",
            fix='pip install "jax[tpu]", and a shape that this version has; without it --nocompile '
            "counts memory",
        ) from error
    return list(devices), _part(_TPUS[name], len(devices) // slices // math.prod(shape))


def _part(chip: Chip, devices: int) -> Chip:
    """One of the devices of a chip that JAX sees as several."""
    if devices <= 1:
        return chip
    return dataclasses.replace(
        chip, hbm_bytes=chip.hbm_bytes / devices, flops_per_s=chip.flops_per_s / devices,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / devices,
        link_bytes_per_s=chip.link_bytes_per_s / devices,
        dcn_bytes_per_s=chip.dcn_bytes_per_s / devices,
    )  # fmt: skip


def local_devices() -> tuple[list, Chip | None]:
    """The devices of this process, and what each has where that is known."""
    devices = jax.devices()
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    return devices, _TPUS.get(kinds.get(devices[0].device_kind, ""))
