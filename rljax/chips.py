"""Published figures of TPU chips, per device as JAX counts devices."""

import dataclasses

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

    def part(self, devices: int) -> "Chip":
        """One of the devices of a chip that JAX sees as so many."""
        if devices <= 1:
            return self
        each = {
            field.name: getattr(self, field.name) / devices
            for field in dataclasses.fields(self)
            if field.name != "name"
        }
        return dataclasses.replace(self, **each)


# HBM is what the compiler lets the programs of a chip have (libtpu 0.0.50 says it of one that is
# too large): of 32, 16, 95, 32 and 192 published GiB. The rest is of the Cloud TPU documentation,
# "System architecture" page of each version, read for 2026-11: peak bfloat16 FLOP/s, HBM bandwidth,
# and the interconnect's bandwidth of a chip, half of it each way, over its links (4 of a 2D torus,
# 6 of a 3D one): 600, 400, 1200, 800 and 1200 GB/s. The data center's network is published per chip
# of v5p, v6e and TPU7x (50, 100 and 100 Gbit/s), per pod of v5e (6.4 Tbit/s for 256 chips), and not
# at all of v4, which is counted as v5p is.
TPUS = {
    "v4": Chip("v4", 30.5 * GIB, 275e12, 1228e9, 50e9, 6.25e9),
    "v5e": Chip("v5e", 15.75 * GIB, 197e12, 819e9, 50e9, 3.125e9),
    "v5p": Chip("v5p", 95.73 * GIB, 459e12, 2765e9, 100e9, 6.25e9),
    "v6e": Chip("v6e", 31.24 * GIB, 918e12, 1638e9, 100e9, 12.5e9),
    "tpu7x": Chip("tpu7x", 189.48 * GIB, 2307e12, 7380e9, 100e9, 12.5e9),
}
# What a device calls itself, of a chip or of a stand-in for one.
_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
_KINDS |= {f"TPU {name}": name for name in TPUS}


def chip_of(devices) -> Chip | None:
    """Returns the figures of one of these devices; None where that is not known."""
    chip = TPUS.get(_KINDS.get(devices[0].device_kind, ""))
    return chip and chip.part(1 + max(device.core_on_chip for device in devices))
