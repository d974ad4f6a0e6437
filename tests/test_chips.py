"""Published figures of chips, per device: what a device says of itself, and the cores of a chip."""

import types

import pytest

from rljax.chips import TPUS, chip_of


def devices(kind: str, cores: int = 1) -> list:
    return [types.SimpleNamespace(device_kind=kind, core_on_chip=i % cores) for i in range(4)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
    ],
)
def test_a_device_is_known_by_what_it_calls_itself(kind, name):
    assert chip_of(devices(kind)) is TPUS[name]


def test_a_core_has_its_part_of_a_chip():
    core, chip = chip_of(devices("TPU7x", cores=2)), TPUS["tpu7x"]
    assert core.name == "tpu7x" and core.hbm_bytes == chip.hbm_bytes / 2
    assert core.flops_per_s == chip.flops_per_s / 2
    assert core.dcn_bytes_per_s == chip.dcn_bytes_per_s / 2


def test_what_is_no_tpu_is_not_known():
    assert chip_of(devices("cpu")) is None


def test_memory_is_nearly_what_is_published():
    """The compiler keeps up to 5 % of it to itself."""
    published = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
    for name, gib in published.items():
        assert 0.95 <= TPUS[name].hbm_bytes / 2**30 / gib <= 1.01
