"""plan: what is counted from shapes, from traced programs and from compiled text, against numbers
by hand, the compiler's own, and arrays that are really there."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPO, lanes
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from rljax import dataflows
from rljax.config import Config, OptimizerConfig, with_overrides
from rljax.config.texts import with_texts
from rljax.errors import InputError
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.plan import memory, table
from rljax.plan.alternatives import candidates, fitting_candidates
from rljax.plan.chips import Chip, topology_devices
from rljax.plan.compiled import lost_donations, make_plan, needless_gathers, replicated_arrays
from rljax.plan.flops import flops_of, work
from rljax.plan.hlo import Collective, traffic
from rljax.plan.hlo_text import axes_of, groups_of
from rljax.plan.memory import FACTOR, check_fits, estimate, nearest_fit, split_bytes
from rljax.plan.programs import ProgramCall, programs_of
from rljax.roles import program, start_training
from rljax.setup import abstract_roles
from rljax.setup import build as build_setup
from rljax.setup.abstract import abstract_setup
from rljax.setup.held import KEPT_COPY, held_parts
from rljax.training import run
from rljax.validation import validate

QWEN = str(REPO / "configs/models/qwen2_5_0_5b")
CHIP = Chip("none", 2 * 2**30, 1e12, 1e11, 1e9)


def tiny(**changes) -> Config:
    config = Config(
        model="decoder(layers=2, embed=64, mlp=192, heads=4, kv_heads=2, head_dim=16)",
        dataflow="grpo",
        steps=2,
    )
    config.data.train = "letter_count(letters=8, kinds=7)"  # 20 words
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 10, 22
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 2
    config.batch.sequences_per_optimizer_step = 32
    config.batch.tokens_per_microbatch = 512
    config.mesh.fsdp, config.mesh.tensor = 4, 2
    config.algorithm.kl_in_loss = 0.01
    return with_overrides(config, {k.replace("__", "."): v for k, v in changes.items()}, "test")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=4, tensor=2)


def array(mesh, shape, *axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def zeros(model):
    return jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), model.abstract()
    )


def text_of(function, *arguments, **options) -> str:
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


# -- what a compiled program moves


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}, x", [[0, 2, 4, 6], [1, 3, 5, 7]], ("fsdp",)),
        ("replica_groups=[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]], ("tensor",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [[0, 2, 4, 6], [1, 3, 5, 7]], ("fsdp",)),
        ("replica_groups=[1,8]<=[8], x", [[*range(8)]], ("fsdp", "tensor")),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]], ("fsdp",)),
        ("replica_groups=mesh['a'=8] {'a':(4)2}, x", [[0, 1], [2, 3], [4, 5], [6, 7]], ("tensor",)),
        ("source_target_pairs={{0,2},{2,0},{1,1}}, x", [[0, 2], [2, 0], [1, 1]], ("fsdp",)),
        ("dimensions={0}", [], ()),
    ],
)
def test_groups_of_devices_are_read_in_every_spelling(mesh, attributes, groups, axes):
    assert groups_of(attributes) == groups
    assert axes_of(groups, mesh) == axes


def in_shards(mesh, function, spec, out):
    how = dict(mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    return jax.shard_map(function, **how)


def scanned(x):
    return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "tensor") * 0.5, None), x, None, length=5)[0]


def until_small(x):
    """A loop that ends when the data say so."""

    def halve(c):
        return (jax.lax.psum(c[0], "tensor") * 0.1, jnp.max(c[0]))

    return jax.lax.while_loop(lambda c: c[1] > 1e-3, halve, (x, jnp.float32(1)))[0]


SIZE = 64 * 128 * 4  # bytes of the part of x that a device holds
MOVES = {
    "gather": (lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), {"fsdp": 3 * SIZE}),
    "sum": (lambda x: jax.lax.psum(x, "tensor"), {"tensor": 2 * SIZE / 2}),
    "sum over both": (
        lambda x: jax.lax.psum(x, ("fsdp", "tensor")),
        {"fsdp x tensor": 2 * SIZE * 7 / 8},
    ),
    "exchange": (lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True), {"fsdp": SIZE * 3 / 4}),
    "ring": (lambda x: jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), {"tensor": SIZE}),
    "five turns": (scanned, {"tensor": 5 * SIZE}),
    "at most seven": (until_small, {"tensor": 7 * SIZE}),
}


@pytest.mark.parametrize("name", MOVES)
def test_bytes_between_devices_are_those_of_known_programs(mesh, name):
    function, expected = MOVES[name]
    both = PartitionSpec(("fsdp", "tensor"))
    text = text_of(in_shards(mesh, function, both, both), array(mesh, (512, 128), both[0]))
    found = traffic(text, mesh, 7).by_axis()
    assert found == pytest.approx(expected, rel=1e-3)


AS_A_TPU_WRITES = """HloModule x

%below (p: (s32[], f32[64])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  %p = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %end), direction=LT, metadata={op_name="lt"}
}

%piece (a: f32[16]) -> f32[64] {
  %a = f32[16]{0:T(128)} parameter(0)
  ROOT %all-gather.1 = f32[64]{0:T(128)S(1)} all-gather(%a), channel_id=7, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="one"}
}

%turn (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[64]{0:T(128)} get-tuple-element(%p), index=1
  %part = f32[16]{0:T(128)} slice(%x), slice={[0:16]}
  %begin = f32[64]{0:T(128)} fusion(%part), kind=kCustom, calls=%piece
  %end = f32[64]{0:T(128)} fusion(%part), kind=kCustom, calls=%piece
  ROOT %t = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%at, %end)
}

ENTRY %main (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  ROOT %while = (s32[]{:T(128)}, f32[64]{0:T(128)}) while(%p), condition=%below, body=%turn
}
"""  # noqa: E501


def test_the_turns_of_a_loop_and_a_gather_in_pieces_are_read_as_a_tpu_writes_them(mesh):
    # The condition alone says five; both pieces are of one gather, which is one channel.
    [found] = traffic(AS_A_TPU_WRITES, mesh, 99).collectives
    assert (found.op, found.axes, found.trips, found.of) == ("all-gather", ("fsdp",), 5, "one")
    assert found.bytes_sent == 4 * 64 * 3 / 4 and not found.in_open_loop
    add = "  %two = s32[] constant(2)\n  %on = s32[]{:T(128)} add(%at, %two)\n  ROOT %t"
    by_two = AS_A_TPU_WRITES.replace("  ROOT %t", add).replace(
        "tuple(%at, %end)", "tuple(%on, %end)"
    )
    [found] = traffic(by_two, mesh, 99).collectives
    assert found.trips == 3  # 0, 2, 4
    data_decides = AS_A_TPU_WRITES.replace("direction=LT", "direction=NE")
    [found] = traffic(data_decides, mesh, 99).collectives
    assert found.trips == 99 and found.in_open_loop


SUM_IN_PARTS = """HloModule x

%all-reduce-scatter.3 (input: bf16[64,8]) -> bf16[16,8] {
  %input = bf16[64,8]{1,0} parameter(0)
  %sum = bf16[64,8]{1,0} all-reduce(%input), channel_id=4, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %at = s32[] constant(0)
  ROOT %part = bf16[16,8]{1,0} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={16,8}
}

ENTRY %main (x: bf16[64,8]) -> bf16[16,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  ROOT %fusion = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""  # noqa: E501


def test_a_sum_of_which_each_keeps_a_part_is_sent_once_as_a_tpu_writes_it(mesh):
    moved = traffic(SUM_IN_PARTS, mesh)
    [found] = moved.collectives
    whole = 2 * 64 * 8
    assert (found.op, found.axes, found.result_bytes) == ("reduce-scatter", ("fsdp",), whole // 4)
    assert found.bytes_sent == whole * 3 / 4 and moved.hbm_bytes == whole * 5 / 4


def test_a_gather_that_goes_on_beside_the_turns_of_a_loop_is_one(mesh):
    named = 'dimensions={0}, frontend_attributes={chain_id="3"}, metadata'
    chained = AS_A_TPU_WRITES.replace("dimensions={0}, metadata", named)
    begun = chained.replace(
        "  ROOT %while",
        "  %part = f32[16]{0:T(128)} copy(%p)\n"
        "  %first = f32[64]{0:T(128)} fusion(%part), kind=kCustom, calls=%piece\n  ROOT %while",
    )
    assert [one.trips for one in traffic(begun, mesh, 99).collectives] == [1]
    assert [one.trips for one in traffic(chained, mesh, 99).collectives] == [5]  # begun within


OVER_SEVERAL_LINES = """HloModule x

%offloaded (table: f32[64,128], at: s32[16]) -> f32[16,128] {
  %table = f32[64,128]{1,0} parameter(0)
  %at = s32[16]{0} parameter(1)
  ROOT %gather.1 = f32[16,128]{1,0} gather(%table, %at), offset_dims={1}, slice_sizes={1,128}
}, execution_thread="sparsecore"

ENTRY %main (table: f32[64,128], at: s32[16]) -> f32[64,128] {
  %table = f32[64,128]{1,0} parameter(0)
  %at = s32[16]{0} parameter(1)
  %attend = f32[64,128]{1,0} custom-call(%table), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="attend"}
  %begun = ((f32[64,128]{1,0}, s32[16]{0}), f32[16,128]{1,0}, u32[]{:S(8)}) call-start(%table, %at), async_execution_thread="sparsecore", to_apply=%offloaded
  %taken = f32[16,128]{1,0} call-done(%begun)
  ROOT %after = f32[64,128]{1,0} all-gather(%taken), channel_id=7, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="after"}
}
"""  # noqa: E501


def test_what_follows_a_kernel_that_describes_itself_over_several_lines_is_counted(mesh):
    moved = traffic(OVER_SEVERAL_LINES, mesh)
    [found] = moved.collectives
    assert (found.of, found.bytes_sent) == ("after", 64 * 128 * 4 * 3 / 4)
    # The lookup on another core reads and writes its rows; the gather reads a part, writes a whole.
    assert moved.hbm_bytes == 2 * 16 * 128 * 4 + (16 + 64) * 128 * 4


def test_a_text_of_an_unknown_form_is_refused_and_not_half_counted(mesh):
    with pytest.raises(ValueError, match="cannot read main"):
        traffic(OVER_SEVERAL_LINES.replace("  ROOT %after", "  %after"), mesh)


def test_bytes_of_memory_are_those_that_a_program_must_touch():
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    n, layers = 256, 16
    x = jax.ShapeDtypeStruct((n, n), jnp.float32)
    one = traffic(text_of(lambda x: jnp.tanh(x) + 1, x), mesh).hbm_bytes
    assert one == 2 * 4 * n * n
    stack = jax.ShapeDtypeStruct((layers, n, n), jnp.float32)

    def add_all(x, stack):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c + w), None), x, stack)[0]

    # Of the stack a slice is read at each turn, and x is read and written: not the stack each time.
    found = traffic(text_of(add_all, x, stack), mesh).hbm_bytes
    assert 3 * layers * 4 * n * n <= found <= 1.5 * 3 * layers * 4 * n * n


SLICED_WITHIN = """HloModule x

%slice_of (stack: bf16[4,8,16]) -> bf16[8,16] {
  %stack = bf16[4,8,16]{2,1,0} parameter(0)
  %slice = bf16[1,8,16]{2,1,0} slice(%stack), slice={[2:3], [0:8], [0:16]}
  ROOT %squeezed = bf16[8,16]{1,0} bitcast(%slice)
}

%view_of (table: bf16[32,16]) -> bf16[32,16] {
  %table = bf16[32,16]{1,0} parameter(0)
  ROOT %view = bf16[32,16]{1,0} bitcast(%table)
}

%update (state: f32[64,16], part: f32[1,16], at: s32[]) -> f32[64,16] {
  %state = f32[64,16]{1,0} parameter(0)
  %part = f32[1,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %updated = f32[64,16]{1,0} dynamic-update-slice(%state, %part, %at, %at)
}

%products (x: bf16[4,8], stack: bf16[4,8,16], table: bf16[32,16]) -> bf16[4,32] {
  %x = bf16[4,8]{1,0} parameter(0)
  %stack = bf16[4,8,16]{2,1,0} parameter(1)
  %table = bf16[32,16]{1,0} parameter(2)
  %weight = bf16[8,16]{1,0} fusion(%stack), kind=kLoop, calls=%slice_of
  %head = bf16[32,16]{1,0} fusion(%table), kind=kLoop, calls=%view_of
  %inner = bf16[4,16]{1,0} convolution(%x, %weight), dim_labels=bf_io->bf
  ROOT %out = bf16[4,32]{1,0} convolution(%inner, %head), dim_labels=bf_oi->bf
}

%in_place (state: f32[64,16], part: f32[1,16], at: s32[]) -> f32[64,16] {
  %state = f32[64,16]{1,0} parameter(0)
  %part = f32[1,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %nested = f32[64,16]{1,0} fusion(%state, %part, %at), kind=kLoop, calls=%update
}

ENTRY %main (x: bf16[4,8], stack: bf16[4,8,16], table: bf16[32,16], state: f32[64,16], part: f32[1,16], at: s32[]) -> (bf16[4,32], f32[64,16]) {
  %x = bf16[4,8]{1,0} parameter(0)
  %stack = bf16[4,8,16]{2,1,0} parameter(1)
  %table = bf16[32,16]{1,0} parameter(2)
  %state = f32[64,16]{1,0} parameter(3)
  %part = f32[1,16]{1,0} parameter(4)
  %at = s32[] parameter(5)
  %product = bf16[4,32]{1,0} fusion(%x, %stack, %table), kind=kOutput, calls=%products
  %kept = f32[64,16]{1,0} fusion(%state, %part, %at), kind=kLoop, calls=%in_place
  ROOT %both = (bf16[4,32]{1,0}, f32[64,16]{1,0}) tuple(%product, %kept)
}
"""  # noqa: E501


def test_a_slice_or_an_update_in_a_fusion_within_a_fusion_is_all_that_is_touched(mesh):
    """As a TPU reads a layer of stacked weights: x, one of four layers, the whole table; of the
    state one row, and its number."""
    product = 4 * 8 * 2 + 8 * 16 * 2 + 32 * 16 * 2 + 4 * 32 * 2
    update = 16 * 4 + 16 * 4 + 4  # the part is read, and written in its place
    assert traffic(SLICED_WITHIN, mesh).hbm_bytes == product + update


# -- what a traced program computes


def test_flops_of_loops_branches_shards_and_kernels(mesh):
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 16)))
    once = 2 * 8 * 16 * 16

    def dot(x, y):
        return jnp.dot(x, y)

    assert flops_of(dot, a, b).flops == once
    exact = flops_of(functools.partial(jnp.dot, precision="highest"), a, b)
    assert (exact.flops, exact.passes) == (once, 6 * once)
    low = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (a, b)]
    assert flops_of(functools.partial(jnp.dot, precision="highest"), *low).passes == once

    def half(x, y):
        return jax.lax.dot(x, y, precision="highest", preferred_element_type=jnp.float32)

    assert flops_of(half, low[0], b).passes == 3 * once  # one input is split, in three

    def loss(x, w):
        step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    # Forward, the same again, and two products backward: of three turns.
    assert flops_of(jax.grad(loss, argnums=(0, 1)), a, b).flops == 3 * 4 * once

    def either(x, y):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x)

    assert flops_of(either, a, b).flops == 0  # of an option that is off
    rows = PartitionSpec(("fsdp", "tensor"))
    spread = in_shards(mesh, dot, (rows, PartitionSpec()), rows)
    assert flops_of(spread, array(mesh, (64, 16), rows[0]), b).flops == 8 * once

    def kernel(x, out):
        out[...] = x[...]

    def called(x):
        stated = pl.CostEstimate(flops=1000, bytes_accessed=77, transcendentals=0)
        copy = pl.pallas_call(
            kernel,
            out_shape=x,
            interpret=True,
            cost_estimate=stated,
            metadata={"mxu_flops": "3000"},
        )
        return jax.lax.scan(lambda c, _: (copy(c), None), x, None, length=4)[0]

    found = flops_of(called, a)
    assert (found.flops, found.kernel_flops, found.kernel_bytes) == (4000, 4000, 4 * 77)
    assert found.passes == 4 * 3000


def test_a_loop_inside_a_kernel_does_not_stop_the_one_around_it(mesh):
    """As ragged paged attention inside the steps of decoding."""
    a, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 16)))
    once = 2 * 8 * 16 * 16

    def kernel(x, out):
        out[...] = jax.lax.while_loop(lambda c: c[0, 0] > 1.0, lambda c: c * 0.5, x[...])

    def decode(x, w):
        halve = pl.pallas_call(kernel, out_shape=x, interpret=True)
        return jax.lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: halve(c @ w), x)

    found = work(jax.jit(decode).trace(a, w).jaxpr, trips=7)
    assert (found.flops, found.kernel_bytes) == (7 * once, 7 * 2 * 4 * 8 * 16)


# -- chips


@pytest.mark.parametrize("text", ["", "v5e", "v5e:2xa", "v5e:2xx4", "v5e:0x4", "v5e:\u00b2"])
def test_what_is_no_topology_is_refused_without_a_compiler(text):
    with pytest.raises(InputError, match="VERSION:AxB"):
        topology_devices(text)


# -- what is counted from shapes


def test_the_published_sizes_of_a_70b_model():
    assert split_bytes(70e9, 1, 0, weight_bytes=0, gradient_bytes=0) / 1e9 == 840
    assert split_bytes(70e9, 64, 0) / 1e9 == 1120
    found = [split_bytes(70e9, 64, stage) / 1e9 for stage in (1, 2, 3)]
    np.testing.assert_allclose(found, [293.125, 155.3125, 17.5], atol=5e-4)
    assert split_bytes(405e9, 1, 3, gradient_bytes=0, optimizer_bytes=0) / 1e9 == 810
    with pytest.raises(InputError, match="ZeRO stage"):
        split_bytes(1, 1, 4)


@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(data=8, fsdp=1), dict(data=2, fsdp=4)])
def test_arrays_on_the_devices_take_what_the_formula_says(sizes):
    model = Model(decoder(64, embed=64, mlp=192, heads=8, kv_heads=8), make_mesh(**sizes))
    count = sum(int(np.prod(shape)) for shape, _ in model.shapes().values())
    made = start_training(model, zeros(model), make_optimizer(OptimizerConfig(), 0))
    of = {d: 0 for d in jax.devices()}
    for x in jax.tree.leaves((made.params, made.opt_state)):
        for part in x.addressable_shards:
            of[part.device] += part.data.nbytes
    stage = 0 if sizes.get("fsdp") == 1 else 3
    expected = split_bytes(
        count, sizes["fsdp"], stage, weight_bytes=4, gradient_bytes=0, optimizer_bytes=8
    )
    assert max(of.values()) == pytest.approx(expected, rel=0.1)
    assert set(of.values()) == {max(of.values())}


def test_a_plan_compares_its_mesh_with_the_stages_of_zero():
    """A 70B model on eight devices: W bytes of 2 + 2 + 12, divided by 8 from stage 1, 2, 3 on."""
    sizes = "layers=80, embed=8192, mlp=28672, heads=64, kv_heads=8, head_dim=128"
    config = tiny(model=f"decoder({sizes})", mesh__fsdp=4, mesh__tensor=1, mesh__data=2)
    plan = make_plan(config, jax.devices(), CHIP, "8 x cpu", compile=False)
    w = plan.weights
    assert w == pytest.approx(68.5e9, rel=0.01)  # 70B without its vocabulary
    found = [[x.weights, x.gradients, x.optimizer] for x in plan.stages.values()]
    expected = [[2, 2, 12], [2, 2, 12 / 8], [2, 2 / 8, 12 / 8], [2 / 8, 2 / 8, 12 / 8]]
    np.testing.assert_allclose(found, w * np.array(expected))
    ours = plan.training
    assert [ours.weights, ours.gradients] == [plan.estimate.held["actor weights"]] * 2
    assert ours.optimizer == plan.estimate.held["actor optimizer"]
    # Float32 weights, gradients and two moments over fsdp, twice: data repeats them.
    assert ours.total == pytest.approx(split_bytes(w, 4, 3), rel=1e-3)
    rows = {}
    for line in table.plan_text(plan).splitlines():
        name, _, numbers = line.rpartition("  ") and line.partition("  ")
        rows[name] = numbers.split()

    def total(name):
        return float(rows[name][-1]) * 1e9

    assert total("stage 0") == pytest.approx(16 * w, rel=1e-3)
    assert float(rows["stage 0"][2]) * 1e9 == pytest.approx(12 * w, rel=1e-3)
    assert total("stage 3") == pytest.approx(2 * w, rel=1e-3)
    assert total("* this config, stage 3 on fsdp 4") == pytest.approx(4 * w, rel=1e-3)
    copies = make_plan(
        tiny(mesh__fsdp=1, mesh__tensor=1, mesh__data=8), jax.devices(), CHIP, "x", compile=False
    )
    assert "* this config, stage 0 " in table.plan_text(copies)
    assert table.plan_json(plan)["stages"][3]["optimizer"] == w * 12 / 8


def test_a_mixture_of_671b_weights_is_planned(tmp_path):
    facts = dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        first_k_dense_replace=3,
        moe_layer_freq=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        topk_method="noaux_tc",
    )
    (tmp_path / "config.json").write_text(json.dumps(facts))
    config = tiny(model=str(tmp_path), mesh__fsdp=1, mesh__expert=8, mesh__tensor=1)
    setup = abstract_setup(config)
    count = sum(int(np.prod(shape)) for shape, _ in setup.model.shapes().values())
    assert count == pytest.approx(671e9, rel=0.005)
    found = estimate(setup)
    # The experts, nearly all of it, are split eight ways; embeddings and attention are whole.
    assert 8 * count / 8 < found.held["actor optimizer"] < 8 * count / 8 * 1.25
    assert re.match(r"[\d.]+ TB per device at the peak \(weights [\d.]+ GB, ", found.line())


# -- the programs of a step

FLOWS = {
    "ppo": (dict(dataflow="ppo", algorithm__advantage="gae()"), "generate learn"),
    "remax": (dict(dataflow="remax", algorithm__advantage="remax()"), "generate generate learn"),
    "reinforce": (dict(dataflow="reinforce"), "generate learn"),
    "online_dpo": (dict(dataflow="online_dpo"), "generate learn"),
    "xpo": (dict(dataflow="xpo"), "generate learn"),
    "nash_md": (dict(dataflow="nash_md"), "generate generate learn"),
    "host": (dict(sampler__loop="host"), "prefill generate learn"),
    "sft": (dict(sft__steps=2), "sft generate learn"),
}


@pytest.mark.parametrize(
    "name", lanes([n for n in FLOWS if n not in ("xpo", "reinforce")], ("xpo", "reinforce"))
)
def test_the_programs_are_those_that_the_dataflow_calls(name):
    changes, names = FLOWS[name]
    setup = abstract_setup(tiny(**changes))
    roles = abstract_roles(setup)
    calls = programs_of(setup, roles)
    assert [call.name.split()[0] for call in calls] == names.split()
    learn = calls[-1]
    batch = jax.tree.leaves(learn.arguments[1])
    assert {x.shape[0] for x in batch if x.ndim == 2} == {32}  # 16 prompts, 2 samples each
    arrays = [x for x in jax.tree.leaves(learn.arguments) if hasattr(x, "shape")]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    read = {id(x) for x in jax.tree.leaves(learn.arguments)}
    for role in roles.values():  # the very arrays: what a program does not read is held beside it
        state = role.state if hasattr(role, "state") else role.params
        large = [x for x in jax.tree.leaves(state) if x.ndim > 1]
        assert all(id(x) in read for x in large)


# What each dataflow needs beside its name; its program reads the roles that follow.
PAGES = {
    "bco": (dict(algorithm__preference_loss="bco()"), "actor baseline reference"),
    "cost_model": (dict(algorithm__reward_loss="cost_preference()"), "reward_model"),
    "cgpo": (
        dict(reward__function="with_judges(reward='exact_match()', judges=('contains()',))"),
        "actor reference",
    ),
    "distil": (dict(teacher_model=QWEN, model=QWEN), "actor teacher"),
    "dqo": ({}, "actor critic reference"),
    "dro": (dict(dataflow="dro(tau=0.1)"), "actor critic reference"),
    "expert_iteration": (
        dict(algorithm__collect="search(method='mcts(simulations=2, width=2)')"),
        "actor reference",
    ),
    "grpo": ({}, "actor reference"),
    "kto": (dict(algorithm__preference_loss="kto()"), "actor reference"),
    "nash_md": (dict(algorithm__preference_loss="nash_md()"), "actor reference"),
    "on_policy_distil": (dict(teacher_model=QWEN, model=QWEN), "actor teacher"),
    "online_dpo": ({}, "actor reference"),
    "pf_ppo": (dict(algorithm__advantage="gae()"), "actor critic reference"),
    "ppo": (
        dict(algorithm__advantage="gae()", algorithm__kl_target=0.1),
        "actor critic kl_controller reference",
    ),
    "preference": ({}, "actor reference"),
    "prime": (
        dict(algorithm__advantage="prime()", roles=("implicit=trained_policy()",)),
        "actor implicit reference",
    ),
    "process_reward_model": (dict(algorithm__reward_loss="step_regression()"), "reward_model"),
    "raft": ({}, "actor reference"),
    "reinforce": ({}, "actor baseline reference"),
    "remax": (dict(algorithm__advantage="remax()"), "actor reference"),
    "reward_model": ({}, "reward_model"),
    "safe_rlhf": (
        dict(
            algorithm__advantage="gae()",
            algorithm__kl_in_reward=0.01,
            algorithm__kl_in_loss=0.0,
            roles=("cost_critic=trained_values()", "multiplier=lagrange_multiplier()"),
            pretraining__data="letter_count(letters=8, kinds=7)",
            pretraining__max_tokens=16,
        ),
        "actor cost_critic critic multiplier pretraining reference",
    ),
    "self_play": (dict(algorithm__advantage="reinforce()"), "actor reference seat_baseline"),
    "sft": ({}, "actor"),
    "sppo": (dict(algorithm__preference_loss="sppo()"), "actor reference"),
    "vapo": (dict(algorithm__advantage="vapo_gae()"), "actor critic reference"),
    "xpo": (dict(algorithm__preference_loss="xpo()"), "actor reference"),
}


def test_every_dataflow_is_planned():
    assert sorted(PAGES) == sorted(dataflows.__all__)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The folder of QWEN with one of its layers: decoding unrolls them."""
    folder = shutil.copytree(QWEN, tmp_path_factory.mktemp("qwen") / "qwen")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return str(folder)


ONE_LAYER = "decoder(layers=1, embed=64, mlp=192, heads=4, kv_heads=2, head_dim=16)"


# A search, no policy, a baseline of seats; of others test_the_programs_are_those_that_the_dataflow_
# calls makes the programs.
TRACED = ("expert_iteration", "process_reward_model", "self_play")


@pytest.mark.parametrize("name", lanes(TRACED, [name for name in PAGES if name not in TRACED]))
def test_the_programs_of_every_dataflow_are_traced_from_shapes(name, shallow):
    changes, read = PAGES[name]
    changes = {field: shallow if value == QWEN else value for field, value in changes.items()}
    short = dict(model=ONE_LAYER, model_settings__remat="none")
    setup = abstract_setup(tiny(**{"dataflow": name, **short, **changes}))
    roles = abstract_roles(setup)
    assert sorted(roles) == read.split()
    calls = programs_of(setup, roles)
    if name == "expert_iteration":  # a search has programs of its own
        assert len(calls) > 2
    else:
        assert len(calls) == 1 + setup.main.samples * (1 + (name in ("remax", "nash_md")))
    for call in calls:
        traced = call.function.trace(*call.arguments, **call.static)
        assert len(traced.jaxpr.eqns) > 0
    own, new = calls[-1].arguments[0], traced.out_info[0]  # the trained roles before and after
    assert own and sorted(new) == sorted(own)

    def shapes(tree):
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    assert shapes(new) == shapes(own)


@pytest.mark.slow
def test_a_rollout_that_asks_for_more_prompts_decodes_so_many():
    """dynamic(oversample=3): three times the prompts of a step in its first round."""

    def rows(collect):
        setup = abstract_setup(tiny(algorithm__collect=collect))
        generate, learn = programs_of(setup, abstract_roles(setup))
        assert learn.arguments[1].rows == 32
        return {x.shape[0] for x in jax.tree.leaves(generate.arguments) if np.shape(x)[1:] == (10,)}

    assert rows("once()") == rows("active()") == {16}
    assert rows("dynamic(oversample=3.0)") == {48}


@program
def two_policies(batch, key, cfg, *, actor, second):
    """Both learn from the samples of the first."""
    batch = batch.replace(advantages=cfg.advantage(batch))

    def updated(role):
        own = batch.replace(old_logprobs=role.logprobs(batch, cfg.steps.microbatch_rows))
        return role.update(own, cfg.policy_loss, **cfg.update_options())

    (actor, metrics), (second, more) = updated(actor), updated(second)
    return {"actor": actor, "second": second}, {**metrics, **more}


@pytest.mark.slow
def test_a_role_of_the_users_own_is_counted_and_compiled():
    config = tiny(
        dataflow="test_plan.two_policies",
        algorithm__kl_in_loss=0.0,
        roles=("second=trained_policy(lr=1e-5)",),
        batch__tokens_per_microbatch=1024,
    )
    plan = make_plan(config, jax.devices(), CHIP, "8 x cpu", only=("learn",))
    held, [learn] = plan.estimate.held, plan.reports
    assert set(held) == {f"{r} {p}" for r in ("actor", "second") for p in ("weights", "optimizer")}
    for part in ("weights", "optimizer"):
        assert held[f"second {part}"] == held[f"actor {part}"] > 0
    assert learn.parts == held and learn.beside == 0 and not learn.error
    assert learn.aliased >= sum(held.values())  # both are trained in place


@program
def another_alone(batch, key, cfg, *, second):
    return {"second": second}, {}


def test_a_dataflow_of_other_roles_alone_is_counted():
    """Neither actor nor reward model is trained: there is nothing to compare to ZeRO."""
    changes = dict(dataflow="test_plan.another_alone", roles=("second=trained_policy()",))
    plan = make_plan(tiny(**changes), jax.devices(), CHIP, "8 x cpu", compile=False)
    assert "second optimizer" in plan.estimate.held and "ZeRO" not in table.plan_text(plan)
    assert table.plan_json(plan)["training"] is None


def no_program(batch, key, cfg, *, actor):
    return {"actor": actor}, {}


def reads_the_records(prompts, key, cfg, *, actor, reward):
    raise ValueError(f"no answer in {prompts.records[0]}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(dataflow="test_plan.no_program", algorithm__kl_in_loss=0.0), "is no program"),
        (dict(algorithm__collect="test_plan.reads_the_records"), "samples of zeros.*no answer"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(changes, said):
    setup = abstract_setup(tiny(**changes))
    with pytest.raises(InputError, match=f"{said}.*--nocompile"):
        programs_of(setup, abstract_roles(setup))
    counted = make_plan(tiny(**changes), jax.devices(), CHIP, "8 x cpu", compile=False)
    assert "at the peak" in counted.estimate.line()


# -- against the compiler


@pytest.fixture(scope="module")
def planned():
    return make_plan(tiny(), jax.devices(), CHIP, "8 x cpu")


def test_the_programs_of_a_config_are_compiled_and_the_estimate_is_near(planned):
    names = [r.name for r in planned.reports]
    assert names == ["generate", "learn"] and planned.mesh == {"fsdp": 4, "tensor": 2}
    generate, learn = planned.reports
    held = planned.estimate.held
    assert {k: v for k, v in learn.parts.items()} == held
    # Decoding reads the actor's weights; its moments and the reference stay where they are.
    assert generate.parts == {"actor weights": held["actor weights"]}
    assert generate.beside == sum(held.values()) - held["actor weights"]
    assert learn.beside == 0 and generate.trips == 22
    batch = 32 * 32 * 4 // 4
    assert sum(held.values()) < learn.arguments < sum(held.values()) + 16 * batch
    assert learn.aliased >= held["actor weights"] + held["actor optimizer"]
    for report, parts in ((generate, planned.estimate.generate), (learn, planned.estimate.learn)):
        ratio = sum(parts.values()) / report.temporaries
        assert 1 / FACTOR < ratio < FACTOR, (report.name, ratio)
    assert planned.estimate.least < planned.total < FACTOR * planned.estimate.total


def test_flops_and_traffic_of_a_step_are_those_of_its_model(planned):
    generate, learn = planned.reports
    weights = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 192)  # of the layers' products
    rows, tokens = 32, 32
    attention = 2 * 2 * tokens * 64 * 2
    # Old and reference log-probs, forward, forward again (remat full), and twice backward.
    least = rows * tokens * (6 * 2 * weights + 6 * attention / 2 + 8 * 2 * 64 * 20)
    assert least * 0.95 < learn.flops * 8 < least * 1.4
    reads = 22 * rows * (2 * weights + 2 * 64 * 20) + 16 * 10 * 2 * weights
    assert reads < generate.flops * 8 < 1.6 * reads
    assert set(learn.sent_bytes) >= {"fsdp", "tensor"}
    # Twelve passes read every weight, of which a device has a fourth of its half, in two halves of
    # the batch: at least two gathers of each for the two forward passes.
    assert learn.sent_bytes["fsdp"] > 4 * (weights * 4 // 2) * 3 / 4
    for report in planned.reports:
        assert report.hbm_bytes > report.arguments > 0
        assert report.binding in report.seconds and report.least_s > 0


def test_a_plan_is_told_in_text_and_json(planned):
    text = table.plan_text(planned)
    for word in ("generate", "learn", "compute", "ICI fsdp", "reshard: none", "fits: "):
        assert word in text, word
    told = json.loads(json.dumps(table.plan_json(planned)))
    assert (
        told["programs"][1]["parts"]["actor optimizer"] == planned.estimate.held["actor optimizer"]
    )
    assert told["fits"] and told["total"] == planned.total
    small = Chip("none", planned.total - 1, 1e12, 1e11, 1e9)
    planned_there = make_plan(tiny(), jax.devices(), small, "8 x cpu", compile=False)
    planned_there.reports = planned.reports
    assert not planned_there.fits and "does not fit" in table.plan_text(planned_there)


def test_what_looks_wrong_is_said(mesh):
    whole, split = array(mesh, (2**14, 2**12)), array(mesh, (2**14, 2**12), "fsdp")
    [said] = replicated_arrays(ProgramCall("x", None, ({"a": whole, "b": split},)))
    assert "['a']" in said and "256 MiB" in said

    def kept(x):
        return x[:1]

    lowered = jax.jit(kept, donate_argnums=0).lower(split)
    assert "of 64 MiB" in lost_donations(lowered, lowered.compile())[0]

    # Beside an argument that every device holds whole, and one that nothing reads.
    def add(x, y, unread):
        return x + jnp.sum(y)

    lowered = jax.jit(add, donate_argnums=(0, 2)).lower(split, whole, whole)
    assert lost_donations(lowered, lowered.compile()) == []


# -- refusals


def test_a_run_that_cannot_fit_is_refused_before_any_weight(tmp_path, monkeypatch):
    config = tiny(run_dir=str(tmp_path), trackers=())
    setup = abstract_setup(config)
    needs = check_fits(setup)
    # So little memory that the activations of 16 rows at once are too much, and those of 4 are not.
    have = int(needs.resident + sum(needs.learn.values()) / 3)
    monkeypatch.setattr(memory, "available_bytes", lambda setup: have)
    monkeypatch.setattr(memory, "FACTOR", 1.0)
    with pytest.raises(InputError, match=r"this run needs .* [kM]B per device") as found:
        run.Run(build_setup(config), tmp_path)
    assert "--config.batch.tokens_per_microbatch=" in str(found.value)
    changes, _ = nearest_fit(setup, have)
    smaller = abstract_setup(with_overrides(config, changes, "test"))
    assert check_fits(smaller).total <= have
    # None of the changes is enough where the weights alone are too many.
    assert nearest_fit(setup, needs.resident // 2)[1] > needs.resident // 2
    monkeypatch.setattr(memory, "available_bytes", lambda setup: needs.resident // 2)
    with pytest.raises(InputError, match="it still needs .* such devices.*lora.rank=.*smaller"):
        check_fits(setup)


def bytes_of(text: str) -> list[float]:
    """The sizes in a text."""
    units = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    return [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) ([kMGT]B)", text)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(batch__prompts_per_step=4096, batch__sequences_per_optimizer_step=8192),
        dict(sampler__max_response_tokens=500),
        dict(batch__tokens_per_microbatch=4096),
        dict(rollouts__max_staleness=1, model_settings__dtype="bfloat16"),
    ],
)
def test_the_parts_of_the_estimate_that_are_printed_are_its_sum(changes):
    found = estimate(abstract_setup(tiny(**changes)))
    assert sum(found.parts.values()) == found.total
    total, said = re.match(r"([\d.]+ .B) per device at the peak \((.*)\)", found.line()).groups()
    held, *uses = said.split("; ")
    most = sum(bytes_of(held)) + max(sum(bytes_of(use)) for use in uses)
    assert most == pytest.approx(bytes_of(total)[0], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "share", "field"),
    [
        # The caches of the prompts: fewer of them, and no more slots than are left for.
        (
            dict(batch__prompts_per_step=8192, batch__sequences_per_optimizer_step=16384),
            0.05,
            "batch.prompts_per_step",
        ),
        # A single long row: shorter responses.
        (
            dict(
                sampler__max_response_tokens=2000,
                batch__prompts_per_step=8,
                batch__samples_per_prompt=1,
                batch__sequences_per_optimizer_step=8,
                batch__tokens_per_microbatch=0,
                mesh__fsdp=8,
                mesh__tensor=1,
                algorithm__advantage="reinforce_plus_plus()",
            ),
            0.1,
            "sampler.max_response_tokens",
        ),
    ],
)
def test_the_fix_of_a_run_that_cannot_fit_follows_its_largest_part(
    changes, share, field, monkeypatch
):
    config = tiny(**changes)
    setup = abstract_setup(config)
    needs = estimate(setup)
    have = needs.resident + int(share * (needs.total - needs.resident))
    monkeypatch.setattr(memory, "available_bytes", lambda setup: have)
    with pytest.raises(InputError) as error:
        check_fits(setup)
    fix = error.value.parts[1]
    assert f"--config.{field}=" in fix and "smaller model" not in fix
    assert "--config.sampler.slots=1 " not in fix
    flags = dict(re.findall(r"--config\.([\w.]+)=(\w+)", fix))
    smaller = with_texts(config, flags, "fix", "")
    validate(smaller)
    assert estimate(memory.fewest_microbatches(abstract_setup(smaller), have)).total <= have


def test_what_this_host_has_is_known_and_small_runs_fit():
    setup = abstract_setup(tiny())
    assert 0 < memory.available_bytes(setup) < 2**45
    assert check_fits(setup).total == estimate(setup).total


def test_memory_follows_what_the_config_asks_for():
    base = estimate(abstract_setup(tiny()))
    wide = estimate(abstract_setup(tiny(batch__tokens_per_microbatch=1024)))
    assert wide.learn["layers"] == 2 * base.learn["layers"] and wide.held == base.held
    none = estimate(abstract_setup(tiny(model_settings__remat="none")))
    assert none.learn["layers"] > 4 * base.learn["layers"]
    few = estimate(abstract_setup(tiny(sampler__slots=8)))
    assert 4 * few.generate["keys and values"] == base.generate["keys and values"]
    plain = estimate(abstract_setup(tiny(algorithm__kl_in_loss=0.0)))
    assert set(base.held) - set(plain.held) == {"reference weights"}
    ppo = tiny(dataflow="ppo", algorithm__advantage="gae()")
    assert {"critic weights", "critic optimizer"} <= set(estimate(abstract_setup(ppo)).held)
    lora = estimate(abstract_setup(tiny(lora__rank=4, mesh__tensor=1, mesh__fsdp=8))).held
    assert lora["reference weights"] == lora["actor weights"]  # adapters: the base is one, shared
    assert [name for name in lora if name.endswith("base")] == ["actor base"]


def test_the_base_in_the_layout_of_decoding_is_held_while_the_run_learns():
    """Whole on each device, and only the adapters are copied for a rollout."""
    lora = dict(lora__rank=4, mesh__tensor=1, mesh__fsdp=8)
    plain = estimate(abstract_setup(tiny(**lora)))
    setup = abstract_setup(tiny(**lora, sampler__layout="mesh(data=8)"))
    copied = estimate(setup)
    assert set(copied.held) - set(plain.held) == {KEPT_COPY}
    halves = setup.model.split(setup.model.abstract())
    few, most = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(x)) for x in halves)
    assert copied.held[KEPT_COPY] == most > 4 * copied.held["actor base"]
    assert copied.generate[memory.COPY] == few < copied.held[KEPT_COPY] / 3
    free = [
        make_plan(config, jax.devices(), CHIP, "8 x cpu", compile=False).free
        for config in (tiny(**lora), setup.config)
    ]
    assert free[0] == free[1] > 0  # of which the whole copy is taken
    apart = dict(lora, mesh__fsdp=4, rollouts__sampler_devices=4, rollouts__max_staleness=1)
    beside = estimate(abstract_setup(tiny(**apart)))
    assert KEPT_COPY not in beside.held and beside.groups["sampler"][memory.COPY] == few + most
    codes = tiny(**lora, sampler__layout="mesh(data=8)", sampler__weight_dtype="int8")
    assert estimate(abstract_setup(codes)).held[KEPT_COPY] < copied.held[KEPT_COPY]


@pytest.mark.slow
def test_the_base_in_the_layout_of_decoding_is_not_counted_beside_the_program_that_reads_it():
    config = tiny(lora__rank=4, mesh__tensor=1, mesh__fsdp=8, sampler__layout="mesh(data=8)")
    plan = make_plan(config, jax.devices(), None, "8 x cpu", only=("generate", "learn"))
    beside, kept = {one.name: one.beside for one in plan.run}, plan.estimate.held[KEPT_COPY]
    assert beside["learn"] >= kept > beside["generate"]


def test_gathers_that_a_better_layout_spares_are_said():
    setup = abstract_setup(tiny())
    held = held_parts(setup, abstract_roles(setup))
    matrix, stack = 2 * 64 * 192, 2 * 2 * 64 * 192  # bytes of an mlp's, and of both layers'

    def said(**facts):
        one = dict(
            op="all-gather",
            axes=("fsdp",),
            bytes_sent=1.0,
            result_bytes=matrix,
            trips=3.0,
            of="dot",
            in_open_loop=False,
        )
        return needless_gathers([Collective(**{**one, **facts})] * 2, held)

    [found] = said(in_open_loop=True)
    assert "every step of decoding gathers 2 x 0.0 MiB along fsdp (dot)" in found
    [found] = said(trips=1.0, result_bytes=stack)
    assert found.startswith("all layers are gathered at once: 2 x")
    # A layer at a time while training, sums, and the activations of a step are as they should be.
    assert said() == said(op="all-reduce", in_open_loop=True) == []
    assert said(result_bytes=64 * 4, in_open_loop=True) == []


def test_microbatches_left_to_the_plan_are_as_large_as_the_chip_surely_holds():
    config = tiny(batch__tokens_per_microbatch=0)
    rows, needs = [], []
    for hbm in (1e12, 0.0):
        chip = Chip("pretend", hbm, 1e12, 1e11, 1e10)
        plan = make_plan(config, jax.devices(), chip, "8 x cpu", compile=False)
        rows.append(plan.microbatch_tokens // 32)
        needs.append(plan.estimate.most)
        assert f"tokens_per_microbatch=0 comes to {plan.microbatch_tokens}" in table.plan_text(plan)
    assert rows == [32, 4]  # all of the optimizer step; the least, one for each row shard
    between = Chip("pretend", (needs[0] + needs[1]) / 2, 1e12, 1e11, 1e10)
    plan = make_plan(config, jax.devices(), between, "8 x cpu", compile=False)
    assert 4 <= plan.microbatch_tokens // 32 < 32 and plan.estimate.most <= between.hbm_bytes
    # Where the config says it, and where the chip is unknown (a CPU), the plan chooses nothing.
    said = make_plan(tiny(), jax.devices(), between, "8 x cpu", compile=False)
    assert said.microbatch_tokens == 0 and "comes to" not in table.plan_text(said)
    unknown = make_plan(config, jax.devices(), None, "8 x cpu", compile=False)
    assert unknown.microbatch_tokens == 32 * 32  # 16384 tokens or the whole step


@pytest.mark.slow
def test_a_packed_step_is_counted_at_full_length():
    """Its microbatches are as many as the rows at hand need; in a plan as many as full rows."""
    flops = []
    for prompts in (16, 32):
        config = tiny(
            sampler__max_response_tokens=246,
            batch__prompts_per_step=prompts,
            batch__sequences_per_optimizer_step=2 * prompts,
            batch__tokens_per_microbatch=4096,
        )
        setup = abstract_setup(config)
        learn = programs_of(setup, abstract_roles(setup))[-1]
        packing = learn.static["cfg"].steps.packing
        assert packing.full and not setup.algorithm.steps.packing.full
        jaxpr = learn.function.trace(*learn.arguments, **learn.static).jaxpr
        flops.append(work(jaxpr, platform="cpu").flops)
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.02)


@pytest.mark.slow
def test_search_skips_what_does_not_divide_and_puts_the_fastest_first(monkeypatch):
    tried = []

    def pretend(config, devices, chip, topology, *, only):  # as compiled, without the minutes
        plan = make_plan(config, devices, chip, topology, compile=False)
        tried.append(plan.mesh)
        return plan

    monkeypatch.setattr("rljax.plan.alternatives.make_plan", pretend)
    chip = Chip("none", 2**24, 1e12, 1e11, 1e9)
    found, count, left = fitting_candidates(
        tiny(), jax.devices(), chip, "8 x cpu", compiles=3, seconds=100.0
    )
    assert count == len(tried) == 3 and left > 0 and len(found) == 3
    # Four heads and two kv heads: a tensor axis of 8 cannot be.
    assert all(sizes.get("tensor", 1) <= 2 for sizes in tried)
    none, count, _ = fitting_candidates(
        tiny(mesh__fsdp=1),
        jax.devices()[:2],
        Chip("none", 2**10, 1, 1, 1),
        "x",
        compiles=6,
        seconds=100.0,
    )
    assert (none, count) == ([], 0)
    tried.clear()
    few = jax.devices()[:4]
    fitting_candidates(tiny(mesh__context=2), few, chip, "4 x cpu", compiles=2, seconds=100.0)
    assert [sizes["context"] for sizes in tried] == [2, 2]  # kept as the config has it
    # Rows of 2,048 tokens do not fit whole: the fewest devices that hold a row are found.
    tried.clear()
    rows = dict(batch__prompts_per_step=4, batch__sequences_per_optimizer_step=8)
    long = tiny(sampler__max_response_tokens=2038, **rows)
    whole = min(needs for *_, needs in candidates(long, few))
    split = with_overrides(long, {"mesh.context": 2}, "test")
    small = min(needs for *_, needs in candidates(split, few))
    assert small < 0.8 * whole
    room = Chip("none", (small + whole) / 2, 1e12, 1e11, 1e9)
    found, *_ = fitting_candidates(long, few, room, "4 x cpu", compiles=2, seconds=100.0)
    assert found and {one.changes["mesh.context"] for one in found} == {2}
    assert [sizes["context"] for sizes in tried] == [2, 2]
    with pytest.raises(InputError, match="divides the 8 devices"):
        fitting_candidates(
            tiny(mesh__context=3), jax.devices(), chip, "8 x cpu", compiles=1, seconds=1.0
        )


@pytest.mark.slow  # two learning programs by the compiler
def test_search_compiles_and_ranks_what_the_local_devices_hold():
    """No pretence: the compiler's own numbers of two configs, the learning phase alone."""
    found, count, left = fitting_candidates(
        tiny(), jax.devices(), CHIP, "8 x cpu", compiles=2, seconds=600.0, only=("learn",)
    )
    assert count == 2 and left > 0 and len(found) == 2
    assert all([report.name for report in one.plan.reports] == ["learn"] for one in found)
    assert all(one.plan.reports[0].temporaries > 0 for one in found)
    assert found[0].plan.least_s <= found[1].plan.least_s
    shown = table.candidates_text(found, count, left)
    assert "2 compiled, 2 fit" in shown and "learn: " in shown


@pytest.mark.slow
def test_the_launcher_counts_memory_without_compiling(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("from test_plan import tiny as get_config\n")
    out = tmp_path / "plan.json"
    command = [
        sys.executable,
        "launchers/plan.py",
        f"--config={file}",
        "--nocompile",
        f"--json={out}",
    ]
    env = {
        **os.environ,
        "PYTHONPATH": ":".join(
            str(REPO / folder) for folder in ("", "tests", "tests/helpers", "tests/plan")
        ),
    }
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "MB per device at the peak (weights " in done.stdout
    assert "* this config, stage 3 on fsdp 4 x tensor 2" in done.stdout
    assert json.loads(out.read_text())["estimate"]["held"]["actor weights"] > 0


def test_the_same_roles_are_made_as_a_run_makes():
    """Shapes, types and layouts of make_roles, by abstract_roles."""
    from rljax import setup as build

    config = tiny(
        dataflow="ppo",
        algorithm__advantage="gae()",
        model_settings__dtype="bfloat16",
        model="decoder(layers=1, embed=16, mlp=16, heads=2, kv_heads=2, head_dim=8)",
    )
    setup = abstract_setup(config)
    real = build.make_roles(setup, setup.main, zeros(setup.model))
    made = abstract_roles(setup)
    assert set(real) == set(made)
    for name in real:
        a, b = (jax.tree_util.tree_leaves_with_path(x[name]) for x in (real, made))
        assert [p for p, _ in a] == [p for p, _ in b]
        for (path, x), (_, y) in zip(a, b, strict=True):
            if isinstance(x, float):  # the temperature
                assert x == y
                continue
            assert (x.shape, x.dtype) == (y.shape, y.dtype), path
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path
