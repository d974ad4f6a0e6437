"""Devices of a topology ("v5p:4x4x4") that need not be there, and what each of them has."""

import dataclasses
import itertools
import math
import os
import re

import jax

from rljax.chips import TPUS, Chip, chip_of
from rljax.errors import InputError
from rljax.pods import VERSIONS

# Chips of a whole pod, and devices of a chip as JAX counts them.
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
        """The client, of which JAX asks for the devices at hand."""
        return NoClient()

    def addressable_memories(self) -> list["Memory"]:
        """Returns the memories that a TPU has."""
        return [Memory("device"), Memory("pinned_host")]

    def default_memory(self) -> "Memory":
        """Returns the memory of the device."""
        return Memory("device")


@dataclasses.dataclass(frozen=True)
class NoClient:
    """The client of stand-ins: no device of theirs is at hand."""

    platform = "tpu"

    def local_devices(self) -> list:
        """Returns no device."""
        return []

    def process_index(self) -> int:
        """Returns 0, the one process."""
        return 0


class Memory(str):
    """A memory of a StandIn. It is a str, because JAX looks for the kind of a memory in a list
    of them."""

    @property
    def kind(self) -> str:
        """Name of the memory, as JAX spells it."""
        return str(self)


def _parsed(topology: str) -> tuple[int, str, list[int]]:
    """ "2xv5p:4x4x4" -> (2, "v5p", [4, 4, 4])."""
    match = re.match(r"([1-9][0-9]{0,2})x(?=\D)", topology)
    name, _, sizes = topology[match.end() if match else 0 :].partition(":")
    name = {"v7x": "tpu7x"}.get(name, name)
    shape = [int(n) for n in sizes.split("x") if re.fullmatch("[1-9][0-9]{0,4}", n)]
    # A size of 0 would end the process inside of libtpu.
    if name not in TPUS or len(shape) != len(sizes.split("x")):
        rule = f"VERSION:AxB or AxBxC, of {', '.join(TPUS)}; Nx before it are N such slices"
        fix = "such as v5e:2x4, v5p:4x4x4 or 2xv5e:16x16"
        raise InputError("topology", value=topology, rule=rule, fix=fix)
    shape += [1] * (3 - len(shape) if name in ("v4", "v5p", "tpu7x") else 0)
    return int(match[1]) if match else 1, name, shape


def stand_ins(topology: str) -> tuple[list[StandIn], Chip]:
    """Returns stand-ins for the devices of a TPU topology, and the published figures of each,
    which is enough to count memory without libtpu. Raises InputError for a chip or a shape that
    does not exist."""
    slices, name, shape = _parsed(topology)
    chips, per_chip = math.prod(shape), _DEVICES_PER_CHIP.get(name, 1)
    valid = all(size in (1, 2) or size % 4 == 0 for size in shape)
    if not valid or len(shape) != (2 if name in _FLAT else 3) or chips > _MOST_CHIPS[name]:
        rule = f"sizes of 1, 2, 4 or multiples of 4, at most {_MOST_CHIPS[name]} chips"
        rule = f"{'two' if name in _FLAT else 'three'} {rule}"
        raise InputError(
            f"{name} has no such slice",
            value=topology,
            rule=rule,
            fix=f"--topology={name}:{'4x4' if name in _FLAT else '4x4x4'}, or other sizes of this "
            "form",
        )
    # z, y, x, core from the outermost on, as JAX lists them.
    indices = itertools.product(range(slices), *map(range, (shape + [1])[2::-1]), range(per_chip))
    devices = [
        StandIn(i, f"TPU {name}", (x, y, z), core, index)
        for i, (index, z, y, x, core) in enumerate(indices)
    ]
    return devices, TPUS[name].part(per_chip)


def topology_devices(topology: str) -> tuple[list, Chip]:
    """Returns the devices of a TPU topology such as "v5e:2x4", or of several such slices
    ("2xv5e:16x16"), and the published figures of each. Programs can be compiled for them on this
    machine, with libtpu and without a TPU. Raises InputError for a topology that libtpu does not
    have, and without libtpu."""
    slices, name, shape = _parsed(topology)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
    # Nothing runs on a chip, so there is nothing to lock against a second process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    try:
        text = f"{name}:{'x'.join(map(str, shape))}"
        devices = topologies.get_topology_desc(text, platform="tpu", **options).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"no topology {topology}: {str(error).splitlines()[0]}",
            fix='pip install "jax[tpu]", and a shape that this version has; without it --nocompile '
            "counts memory",
        ) from error
    return list(devices), TPUS[name].part(len(devices) // slices // math.prod(shape))


def local_devices() -> tuple[list, Chip | None]:
    """Returns the devices of this process, and the published figures of each if they are known."""
    devices = jax.devices()
    return devices, chip_of(devices)
