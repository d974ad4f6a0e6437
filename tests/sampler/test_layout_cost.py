"""What decoding costs in a layout: the counts of a study whose figures equalled those of compiled
programs, the choice, and the memory that bounds it."""

import dataclasses
import math

import jax
import pytest
from conftest import REPO

from rljax.chips import TPUS
from rljax.config import with_overrides
from rljax.config.flags import load_config_file
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.plan.chips import stand_ins
from rljax.plan.memory import COPY, estimate
from rljax.sampler.layout import Layout
from rljax.sampler.layout_cost import Workload, decode_layout, layout_cost, layout_costs
from rljax.sampler.requests import Decoding
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.decode_layout import free_bytes, with_decode_layout

QWEN, LLAMA, LARGE = (
    f"configs/{name}.py" for name in ("grpo_qwen2_5_0_5b", "ppo_llama3_8b", "grpo_llama3_70b")
)
AUTO = {"sampler.layout": "auto", "sampler.weight_dtype": "bfloat16"}


def planned(config: str, topology: str, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    made = with_overrides(load_config_file(str(REPO / config)), changes, "test")
    devices, chip = stand_ins(topology)
    return abstract_setup(made, devices), chip


def cost_of(setup, chip, layout, weight_dtype="bfloat16"):
    decoding = dataclasses.replace(setup.decoding, layout=layout, weight_dtype=weight_dtype)
    sizes, batch = setup.data, setup.config.batch
    response = setup.config.sampler.max_response_tokens
    work = Workload(batch.prompts_per_step, batch.samples_per_prompt, sizes.prompt_tokens, response)
    return layout_cost(setup.model, setup.model.abstract(), decoding, work, chip)


# Milliseconds of HBM and ICI of a step, seconds of a rollout without latency. Where a device has
# both of Qwen's kv heads, which share 128 lanes since, it reads half of the study's cache.
STUDY = [
    (QWEN, "v5e:2x4", 64, None, "", 0.44, 1.29, 7.1),
    (QWEN, "v5e:2x4", 64, Layout(4, 2, 1), "bfloat16", 0.74, 0.18, 3.8),
    (QWEN, "v5e:2x4", 64, Layout(4, 1, 2), "bfloat16", 0.85, 0.01, 3.5),
    (QWEN, "v5e:2x4", 256, Layout(8, 1, 1), "bfloat16", 1.75, 0.0, 1.8),
    (LLAMA, "v5p:4x4x4", 0, Layout(8, 1, 8), "bfloat16", 1.26, 0.29, 1.6),
    (LLAMA, "v5p:4x4x4", 0, Layout(8, 2, 4), "bfloat16", 1.26, 0.32, 1.6),
    (LLAMA, "v5p:4x4x4", 0, Layout(64, 1, 1), "bfloat16", 6.0, 0.0, 6.2),
    (LARGE, "v5p:8x8x8", 0, None, "", 0.80, 14.1, 46),
    (LARGE, "v5p:8x8x8", 0, Layout(8, 8, 8), "bfloat16", 1.39, 1.89, 10.1),
    (LARGE, "v5p:8x8x8", 0, Layout(16, 4, 8), "bfloat16", 2.18, 1.02, 9.8),
]


@pytest.mark.parametrize("case", STUDY, ids=lambda case: f"{case[0][8:-3]} {case[3]}")
def test_a_step_takes_what_the_compiled_programs_were_counted_to(case):
    config, topology, slots, layout, weight_dtype, hbm_ms, ici_ms, rollout_s = case
    setup, chip = planned(config, topology, sampler__slots=slots)
    cost = cost_of(setup, chip, layout, weight_dtype)
    assert cost.hbm_s * 1e3 == pytest.approx(hbm_ms, rel=0.06)
    assert sum(cost.ici_s.values()) * 1e3 == pytest.approx(ici_ms, rel=0.03, abs=0.005)
    assert cost.steps * cost.step_s == pytest.approx(rollout_s, rel=0.06)


@pytest.mark.parametrize(
    ("config", "topology", "slots", "chosen"),
    [
        (QWEN, "v5e:2x4", 64, Layout(4, 1, 2)),
        (QWEN, "v5e:2x4", 256, Layout(8, 1, 1)),
        (LLAMA, "v5p:4x4x4", 0, Layout(8, 1, 8)),
        (LARGE, "v5p:8x8x8", 0, Layout(16, 4, 8)),
    ],
)
def test_auto_takes_the_fastest_mesh_and_its_copy_is_counted(config, topology, slots, chosen):
    setup, chip = planned(config, topology, sampler__slots=slots, **AUTO)
    assert setup.decoding.layout == chosen
    cost = cost_of(setup, chip, chosen)
    assert cost.binding == "HBM"
    weights = sum(math.prod(shape) for shape, _ in setup.model.shapes().values())
    parts = chosen.fsdp * chosen.tensor
    # The norms are whole on every device, biases split over tensor alone.
    assert cost.copy_bytes == pytest.approx(2 * weights / parts, rel=0.001)
    counted, roles = estimate(setup), abstract_roles(setup)
    assert counted.generate[COPY] == cost.copy_bytes
    assert cost.most_bytes <= free_bytes(setup, chip, roles) <= chip.hbm_bytes - counted.resident


def model_of(devices, **sizes):
    made = decoder(512, layers=3, embed=256, mlp=512, heads=8, kv_heads=4, head_dim=64)
    made = dataclasses.replace(made, dtype="bfloat16")
    return Model(made, make_mesh(**sizes or dict(fsdp=8), devices=devices))


WORK = Workload(prompts=16, samples=2, prompt_tokens=32, response_tokens=64)


NARROW = Decoding(weight_dtype="bfloat16")


def costs(model, decoding=NARROW, work=WORK, **options):
    return layout_costs(model, model.abstract(), decoding, work, TPUS["v5e"], **options)


def test_every_mesh_that_divides_the_model_is_compared_and_no_other():
    every = costs(model_of(stand_ins("v5e:2x4")[0]))
    layouts = [one.layout for one in every]
    wanted = {
        (8, 1, 1),
        (4, 2, 1),
        (4, 1, 2),
        (2, 4, 1),
        (2, 2, 2),
        (2, 1, 4),
        (1, 4, 2),
        (1, 2, 4),
    }
    # Four kv heads: no tensor of 8. fsdp of 8 is training's own.
    assert {(x.data, x.fsdp, x.tensor) for x in layouts if x} == wanted
    assert layouts.count(None) == 1 and len(layouts) == 9
    assert [x.rollout_s for x in every] == sorted(x.rollout_s for x in every)
    for one in every:  # no more is chosen than there is room for
        at_most = decode_layout(every, one.most_bytes)
        [taken] = [x for x in every if x.layout == at_most]
        assert taken.most_bytes <= one.most_bytes and taken.rollout_s <= one.rollout_s
    assert decode_layout(every, 0) is None


def test_slices_hold_whole_weights_each():
    every = costs(model_of(stand_ins("2xv5e:2x2")[0], data=2, fsdp=4), slices=2)
    assert all(one.layout.data % 2 == 0 for one in every if one.layout)


def test_bytes_of_weights_follow_their_type():
    setup = model_of(stand_ins("v5e:2x4")[0])
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8"):
        [one] = [x for x in costs(setup, Decoding(weight_dtype=dtype)) if x.layout == Layout(8)]
        sizes[dtype] = one
    wide, narrow = sizes["float32"], sizes["bfloat16"]
    assert wide.copy_bytes == 2 * narrow.copy_bytes
    table = 2 * 512 * 256 * 2  # embedding and head stay as they are computed in
    layers = narrow.copy_bytes - table
    # One byte a weight, and a float32 scale for each block of 64.
    assert sizes["int8"].copy_bytes == pytest.approx(table + layers * (1 + 4 / 64) / 2, rel=0.01)
    assert wide.hbm_s > narrow.hbm_s > sizes["int8"].hbm_s


def test_rows_that_do_not_divide_cost_every_device_all_of_them():
    model = model_of(stand_ins("v5e:2x4")[0])
    even, odd = (
        next(x for x in costs(model, work=Workload(n, 2, 32, 64)) if x.layout == Layout(8))
        for n in (16, 15)
    )
    assert odd.hbm_s > even.hbm_s and odd.compute_s < even.compute_s


def test_of_experts_those_are_read_that_a_row_goes_to():
    from rljax.models.experts import ExpertsConfig

    model = model_of(stand_ins("v5e:2x4")[0])
    kinds = tuple(dataclasses.replace(kind, experts=True) for kind in model.config.kinds)
    mixed = dataclasses.replace(model.config, experts=ExpertsConfig(64, 2, 512), kinds=kinds)
    mixed = dataclasses.replace(model, config=mixed)
    few, many = (
        next(x for x in costs(mixed, work=Workload(n, 1, 8, 8)) if x.layout and x.layout.data == 8)
        for n in (8, 800)
    )
    experts = 3 * 3 * 64 * 256 * 512 * 2 / TPUS["v5e"].hbm_bytes_per_s
    assert few.hbm_s < 0.35 * experts and many.hbm_s > experts


def test_where_the_chip_is_not_known_auto_is_trainings_own():
    made = with_overrides(load_config_file(str(REPO / QWEN)), AUTO, "test")
    setup = abstract_setup(made, jax.devices())
    assert setup.decoding.layout is None and with_decode_layout(setup) is setup
