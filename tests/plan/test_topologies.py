"""Memory for chips that are not there, without libtpu: the table says what libtpu would."""

import pytest

from rljax.command import main
from rljax.config.flags import load_config_file
from rljax.errors import InputError
from rljax.plan.chips import stand_ins, topology_devices
from rljax.plan.compiled import make_plan

SLICES = {
    "v4:2x2x1": 8,
    "v4:4x4x4": 128,
    "v5e:1x1": 1,
    "v5e:2x4": 8,
    "v5e:16x16": 256,
    "v5p:2x2": 4,
    "v5p:4x4x8": 128,
    "v6e:4x2": 8,
    "v7x:2x2x1": 8,
    "tpu7x:4x4x4": 128,
}
CONFIGS = {
    "ppo_llama3_8b": "v5p:4x4x4",
    "grpo_qwen2_5_0_5b": "v5e:2x4",
    "grpo_llama3_70b": "v6e:8x8",  # too large: the plan tries changes, with the hosts' memory
}


@pytest.mark.parametrize("topology", SLICES)
def test_devices_of_a_slice(topology):
    devices, chip = stand_ins(topology)
    assert len(set(devices)) == SLICES[topology] and chip.hbm_bytes > 10e9


@pytest.mark.parametrize(
    "topology",
    [
        "",
        "v5e",
        "v5e:",
        "v5e:3x3",
        "v5e:2x4x1",
        "v5e:16x32",
        "v5e:0x4",
        "v5e:-1x4",
        "v5p:4x4x6",
        "v9:2x2",
        "v5p:4x4x4x4",
        "v5e:2×4",
        "v5p:99999999x4x4",
    ],
)
def test_slices_that_are_not(topology):
    with pytest.raises(InputError, match="topology|no such slice"):
        stand_ins(topology)


@pytest.mark.slow
def test_plans_without_libtpu(capsys):
    plans = {}
    for config, topology in CONFIGS.items():
        devices, chip = stand_ins(topology)
        plans[config] = make_plan(load_config_file(config), devices, chip, topology, compile=False)
    assert [plan.fits for plan in plans.values()] == [True, True, False]
    # Microbatches are as small as they go by themselves (tokens_per_microbatch=0): caches remain.
    assert plans["grpo_llama3_70b"].nearest == {"sampler.slots": 512}
    # 8.03e9 weights in float32 over 64 devices, by hand.
    weights = plans["ppo_llama3_8b"].estimate.held["actor weights"]
    assert weights == pytest.approx(8.03e9 * 4 / 64, rel=0.01)
    with pytest.raises(SystemExit) as end:
        main(["plan", "grpo_qwen2_5_0_5b", "--topology=v5e:2x4", "--nocompile"])
    assert end.value.code == 0 and "fits: " in capsys.readouterr().out


@pytest.mark.tpu_aot
def test_the_table_says_what_libtpu_says(devices_of):
    for topology in SLICES:
        there, chip = topology_devices(topology)
        assert (len(there), chip) == (SLICES[topology], stand_ins(topology)[1])
    for config, topology in CONFIGS.items():
        both = [
            make_plan(load_config_file(config), *devices, topology, compile=False)
            for devices in (topology_devices(topology), stand_ins(topology))
        ]
        assert both[0].estimate == both[1].estimate and both[0].nearest == both[1].nearest
