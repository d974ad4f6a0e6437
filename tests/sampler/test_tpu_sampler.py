"""The sampler's programs, compiled ahead of time for a TPU v5e of eight chips on a host that has
none: what moves between chips, what is copied, what is written in place.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/sampler/test_tpu_sampler.py
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from rljax.mesh import constrain_rows, make_mesh, replicated, row_sharding
from rljax.models import cache, decoder
from rljax.models.builtin import decoder as dense
from rljax.models.config import LatentConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.model import Model
from rljax.sampler import Sampling, whole_batch
from rljax.sampler import engine as engines
from rljax.sampler.engine import Engine
from rljax.sampler.requests import rules_of

pytestmark = pytest.mark.tpu_aot
VOCAB, LAYERS, SLOTS, TOKENS = 8192, 2, 64, 8192
MESHES = {
    "data=2 x tensor=4": dict(data=2, fsdp=1, tensor=4),
    "fsdp=2 x tensor=4": dict(fsdp=2, tensor=4),
    "fsdp=8": dict(fsdp=8),
}


def config(family: str = "dense"):
    made = dense(VOCAB, layers=LAYERS, embed=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128)
    made = dataclasses.replace(made, dtype="bfloat16", weight_dtype="bfloat16", max_tokens=TOKENS)
    if family == "latent":
        latent = LatentConfig(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
        return dataclasses.replace(made, latent=latent, head_dim=64, qk_norm=False)
    if family == "small heads":
        return dataclasses.replace(made, kv_heads=16, head_dim=64)
    if family == "experts":
        kinds = tuple(dataclasses.replace(kind, experts=True) for kind in made.kinds)
        return dataclasses.replace(made, experts=ExpertsConfig(8, 2, 768), kinds=kinds)
    return made


def engine(chips, mesh: str, family: str = "dense", **options) -> Engine:
    model = Model(config(family), make_mesh(**MESHES[mesh], devices=chips))
    return Engine(model, SLOTS, TOKENS, steps=8, **options)


def held_bytes(tree) -> int:
    """Of abstract arrays, on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def least_weight(model: Model) -> int:
    """Bytes of the smallest matrix of a layer that a chip multiplies by once it is gathered. (The
    router is smaller, and read whole so that no mesh changes a choice.)"""
    tensor, sizes = model.mesh.shape["tensor"], []
    for path, (shape, axes) in model.shapes().items():
        if "embed" in axes and "router" not in path[-1]:
            layers = shape[0] if axes[0] == "layers" else 1
            sizes.append(2 * math.prod(shape) // layers // tensor)
    return min(sizes)


# -- what stands in a compiled program

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
# Results of these are another's memory, or were never written.
FREE = "parameter get-tuple-element tuple while conditional bitcast".split()
IN_PLACE = ("scatter", "dynamic-update-slice")


def largest(types: str) -> int:
    """Bytes of the largest array among the results of an instruction, a tuple's members too."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", types)
    return max(
        (ITEM_BYTES.get(t, 4) * math.prod(int(n) for n in s.split(",") if n) for t, s in found),
        default=0,
    )


def instructions(text: str):
    """{computation: [(its result types, opcode, line, whether it is the root)]}."""
    found, current = {}, None
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            current = found.setdefault(head[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            parts = re.match(r"\s+(ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
            if parts:
                current.append((parts[2], parts[3], line.strip(), bool(parts[1])))
    return found


def moved(text: str, least: int) -> list[str]:
    """What chips send to each other in pieces of `least` bytes or more, but sums; asynchronous
    forms and those inside of fusions too."""
    kinds = r"(all-gather|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)"
    return [
        f"{types} {op}"
        for body in instructions(text).values()
        for types, op, _, _ in body
        if re.fullmatch(kinds + "(-start)?", op) and largest(types) >= least
    ]


def results(body) -> list[str]:
    """The opcodes that a fusion's results come from, through the tuple of several."""
    named = {re.match(r"(?:ROOT )?%([\w.\-]+) =", line)[1]: op for _, op, line, _ in body}
    [(op, line)] = [(op, line) for _, op, line, root in body if root]
    if op != "tuple":
        return [op]
    made = re.findall(r"%([\w.\-]+)", line.split(" tuple(")[1].split(")")[0])
    return [named[name] for name in made]


def written(text: str, least: int) -> list[str]:
    """Arrays of `least` bytes or more that a program writes anew, at its start or in a loop. What
    stays inside of a fusion is not written; a fusion that ends in an update is in place."""
    bodies = instructions(text)
    inside = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", text))
    found = []
    for name, body in bodies.items():
        for types, op, line, _ in body if name not in inside else ():
            if op in FREE or largest(types) < least:
                continue
            called = re.search(r"calls=%([\w.\-]+)", line)
            roots = results(bodies[called[1]]) if called else [op]
            if not set(roots) <= set(IN_PLACE):
                found.append(f"{types} {op} {roots}")
    return found


def cache_bytes(caches) -> int:
    """Of the smallest part of the caches, on one chip."""
    return min(held_bytes(x) for x in jax.tree.leaves(caches))


def exchanged(program, model: Model) -> list[str]:
    """How weights, or caches, are moved: what is bfloat16. (Logits are float32.)"""
    found = moved(program.as_text(), least_weight(model))
    return [one.split()[-1] for one in found if "f32[" not in one]


def check_in_place(program, state, model: Model, writes=(), exchanges: int = 0) -> None:
    """What a program that is handed the decode state may do. `exchanges`: of the head, once."""
    assert exchanged(program, model) == ["all-to-all"] * exchanges
    text, memory = program.as_text(), program.memory_analysis()
    held, each = held_bytes(state.caches), cache_bytes(state.caches)
    assert held >= 512 * 2**20
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 0.05 * held, (memory.temp_size_in_bytes, held)
    assert written(text, each // 2) == list(writes)


# -- the programs


def kernels(program, name: str) -> int:
    """Calls of a kernel whose name has `name` in it."""
    calls = r"%([\w.\-]+) = [^\n]* custom-call\([^\n]*tpu_custom_call"
    return sum(name in called for called in re.findall(calls, program.as_text()))


@functools.cache
def generate(one: Engine):
    """The compiled program of a dispatch."""
    return one.lower_generate().compile()


@pytest.mark.parametrize("mesh", MESHES)
def test_generate_gathers_no_weight_and_writes_its_cache_in_place(chips, mesh):
    one = engine(chips, mesh)
    head = int(one.model.mesh.shape["fsdp"] > 1)
    check_in_place(generate(one), one.abstract_state(), one.model, exchanges=head)
    assert kernels(generate(one), "ragged_paged_attention") == LAYERS


@pytest.mark.parametrize("family", ["latent", "experts", "small heads"])
def test_so_do_the_families(chips, family):
    one = engine(chips, "fsdp=2 x tensor=4", family)
    check_in_place(generate(one), one.abstract_state(), one.model, exchanges=1)
    experts = family == "experts"
    assert kernels(generate(one), "ragged_paged_attention") == (0 if family == "latent" else LAYERS)
    # gate, up and down, and the order of the blocks of all three
    assert kernels(generate(one), "ragged-dot") == (4 * LAYERS if experts else 0)


def test_the_kernel_reads_no_more_than_the_plain_path(chips, monkeypatch):
    """The compiler counts the bytes of a step without those of the kernel, which reads what is held
    once: the whole cache at most."""
    one = engine(chips, "fsdp=2 x tensor=4")
    held = held_bytes(one.abstract_state().caches)
    paged = generate(one)
    jax.clear_caches()
    monkeypatch.setattr(cache, "pairs_for", lambda *asked: False)
    plain = one.lower_generate().compile()
    jax.clear_caches()
    assert kernels(plain, "ragged_paged_attention") == 0
    counted = [x.cost_analysis()["bytes accessed"] for x in (paged, plain)]
    assert counted[0] + held < counted[1], (counted, held)


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x1", "v6e:2x4"])
def test_qwen2_5_0_5bs_heads_of_64_and_its_draw(devices_of, topology):
    """Its kv heads stand side by side, so the kernel reads what they hold and no zeros; logits are
    not summed over fsdp; and nothing looks for the most likely token where no row is greedy."""
    made = dense(151936, layers=1, embed=896, mlp=4864, heads=14, kv_heads=2, head_dim=64)
    made = dataclasses.replace(made, dtype="bfloat16", max_tokens=1024, tie_embeddings=True)
    one = Engine(Model(made, make_mesh(devices=devices_of(topology))), SLOTS, 1024, steps=8)
    program = one.lower_generate().compile()
    held = held_bytes(one.abstract_state().caches) * one.model.mesh.size
    assert held == SLOTS * cache.slot_bytes(made, 1024)
    assert kernels(program, "ragged_paged_attention") == 1
    logits = 4 * SLOTS * made.vocab_size
    found = [x for body in instructions(program.as_text()).values() for x in body]
    sums = [types for types, op, *_ in found if re.match("all-(reduce|gather)", op)]
    assert max(map(largest, sums)) < logits // 16  # they are exchanged, not summed
    looks = re.findall(r'op_name="([^"]*)/(?:reduce_min|argmax)', program.as_text())
    assert {name.split("/")[-1] for name in looks} == {"branch_1_fun", "branch_2_fun"}


def prefix(one: Engine, rows: int, tokens: int):
    """Of abstract prompts, as prefill gives it: nothing is said of how it is split."""
    made = jax.eval_shape(
        one.prefill,
        one.model.abstract(),
        jax.ShapeDtypeStruct((rows, tokens), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    mesh = one.model.mesh

    def place(x, s):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    whole = jax.tree.map(lambda x: place(x, replicated(mesh)), made)
    caches = jax.tree.map(place, made.caches, cache.shardings(made.caches, mesh))
    return dataclasses.replace(whole, caches=caches)


def entry(one: Engine, rows: int):
    state = one.abstract_state()
    names = [f.name for f in dataclasses.fields(engines.SlotInputs) if f.name != "which"]

    def pick(x):
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    return engines.SlotInputs(**{name: jax.tree.map(pick, getattr(state, name)) for name in names})


@pytest.mark.parametrize("mesh", MESHES)
def test_insert_writes_in_place_and_extract_moves_the_rows_alone(chips, mesh):
    one, slots = engine(chips, mesh), jax.ShapeDtypeStruct((8,), jnp.int32)
    state = one.abstract_state()
    args = (prefix(one, 8, 512), state, slots, slots, entry(one, 8))
    check_in_place(engines._insert.lower(one, *args).compile(), state, one.model)
    taken = engines._extract.lower(one, state, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    # One slot of every layer, and no more, from whoever has it.
    row = held_bytes(state.caches) * one.model.mesh.size // SLOTS
    assert moved(taken.as_text(), cache_bytes(state.caches) // 8) == []
    assert taken.memory_analysis().temp_size_in_bytes < 2 * row
    assert taken.memory_analysis().alias_size_in_bytes == 0


PAGED = {"v5e:2x4": "fsdp=2 x tensor=4", "v5p:2x2x1": "data=2 x tensor=2", "v6e:2x4": "fsdp=8"}


@pytest.mark.parametrize("kind", PAGED)
def test_pages_are_written_in_place_and_read_by_the_kernel_as_they_are(devices_of, kind):
    """No chip holds another's pages, or sends any."""
    sizes = MESHES | {"data=2 x tensor=2": dict(data=2, fsdp=1, tensor=2)}
    model = Model(config(), make_mesh(**sizes[PAGED[kind]], devices=devices_of(kind)))
    one = Engine(model, SLOTS, TOKENS, steps=8, page_tokens=128)
    state = one.abstract_state()
    check_in_place(generate(one), state, model, exchanges=int(model.mesh.shape["fsdp"] > 1))
    assert kernels(generate(one), "ragged_paged_attention") == LAYERS


def test_insert_writes_whole_pages_in_place(chips):
    """The rows of prompts go to all chips, as each has slots of its own; no page does."""
    one, slots = engine(chips, "fsdp=8", page_tokens=128), jax.ShapeDtypeStruct((8,), jnp.int32)
    state = one.abstract_state()
    args = (prefix(one, 8, 512), state, slots, slots, entry(one, 8), slots)
    program = engines._insert.lower(one, *args).compile()
    held, each = held_bytes(state.caches), cache_bytes(state.caches)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 0.2 * held, (memory.temp_size_in_bytes, held)
    assert moved(program.as_text(), each // 8) == []
    assert written(program.as_text(), each // 2) == []


@pytest.mark.parametrize("how", [dict(family="latent"), dict(kv_dtype="int8")])
def test_without_a_kernel_pages_are_gathered_and_still_aliased(chips, how):
    """The kernel has neither sinks (it returns no sums of its softmax, into which they could go),
    nor scales, nor one array for keys and values: these layers gather what their slots hold."""
    one = engine(chips, "fsdp=2 x tensor=4", page_tokens=128, **how)
    memory = generate(one).memory_analysis()
    held = held_bytes(one.abstract_state().caches)
    assert memory.alias_size_in_bytes >= held
    assert kernels(generate(one), "ragged_paged_attention") == 0
    assert moved(generate(one).as_text(), held // 16) == []


def test_a_whole_batch_holds_its_cache_once(chips):
    model = Model(config(), make_mesh(**MESHES["fsdp=2 x tensor=4"], devices=chips))
    prompts, length = 32, 512
    asked = rules_of([Sampling(max_response_tokens=TOKENS - length)], VOCAB)
    rows = row_sharding(model.mesh)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    rules = jax.tree.map(lambda x: array((4 * prompts, *x.shape[1:]), x.dtype), asked)
    shape = whole_batch.Shape(4, SLOTS, TOKENS - length, "")
    program = whole_batch.rollout.lower(
        model,
        shape,
        model.abstract(),
        array((prompts, length), jnp.int32),
        array((prompts,), jnp.int32),
        array((4 * prompts, 2), jnp.uint32),
        rules,
        jax.ShapeDtypeStruct((), jnp.int32),
        None,
        None,
        None,
    ).compile()
    caches = Engine(model, SLOTS, TOKENS).abstract_state().caches
    held, each = held_bytes(caches), cache_bytes(caches)
    text = program.as_text()
    assert [x for x in written(text, each // 2) if "broadcast" not in x] == []  # the empty slots
    assert program.memory_analysis().temp_size_in_bytes < 1.25 * held
    assert kernels(program, "ragged_paged_attention") == LAYERS


# -- each check can fail


def test_without_the_split_of_the_residual_every_weight_is_gathered(chips, monkeypatch):
    one = engine(chips, "fsdp=8")
    jax.clear_caches()
    monkeypatch.setattr(decoder, "constrain_step", constrain_rows)
    gathered = moved(one.lower_generate().compile().as_text(), least_weight(one.model))
    jax.clear_caches()
    assert len(gathered) >= 7 * LAYERS  # q, k, v, o, gate, up, down


def test_the_other_order_of_the_cache_is_copied(chips, monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(cache, "order_for", lambda mesh: "heads")
    one = engine(chips, "fsdp=2 x tensor=4")
    state = one.abstract_state()
    program = one.lower_generate().compile()
    jax.clear_caches()
    each, held = cache_bytes(state.caches), held_bytes(state.caches)
    assert len(written(program.as_text(), each // 2)) >= 2 * LAYERS
    assert program.memory_analysis().temp_size_in_bytes > 0.9 * held


def test_plain_indexing_gathers_the_cache(chips):
    state = engine(chips, "fsdp=8").abstract_state()
    take = jax.jit(lambda caches, at: jax.tree.map(lambda x: x[at], caches))
    program = take.lower(state.caches, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert moved(program.as_text(), cache_bytes(state.caches) // 8) != []
