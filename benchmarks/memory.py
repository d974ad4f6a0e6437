"""Bytes that rematerialisation and host memory save, and the seconds they cost: prints JSON.

python benchmarks/memory.py [--devices=8] [--repeats=3] [--model=small] [--rows=16] [--columns=256]
python benchmarks/memory.py --topology=v5e:2x4 --model=qwen2.5-0.5b --rows=8 --columns=4096

The program is the learning phase of GRPO with a reference: old and reference log-probs, advantages,
one AdamW step. Bytes are those of one device, from the compiler's own memory analysis; arguments
are told apart by the memory that their shardings name. Without --topology the program also runs, on
virtual CPU devices, and seconds are the median of interleaved repeats relative to remat="none".
With it, the program is compiled for TPUs that need not be there (`pip install "jax[tpu]"`).
On CPU both kinds of memory are the same RAM: the analysis there counts host buffers as temporary.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.learn import Steps
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import make_mesh, on_host, row_sharding, row_shards
from rljax.models.builtin import decoder
from rljax.models.config import ModelConfig
from rljax.models.model import Model
from rljax.models.remat import POLICIES
from rljax.roles import Actor, Reference, start_training, training_layout

MODELS = {
    "small": decoder(
        4096, layers=8, embed=256, mlp=768, heads=8, kv_heads=4, head_dim=32, max_tokens=8192
    ),
    "qwen2.5-0.5b": ModelConfig(
        "qwen2",
        151936,
        896,
        4864,
        24,
        14,
        2,
        64,
        max_tokens=32768,
        qkv_bias=True,
        tie_embeddings=True,
        dtype="bfloat16",
    ),
    # Eight of its 32 layers: what does not grow with depth is all there.
    "llama3-8b-8-layers": ModelConfig(
        "llama", 128256, 4096, 14336, 8, 32, 8, 128, max_tokens=8192, dtype="bfloat16"
    ),
}
# (remat, the optimizer's moments on the host, the reference's weights on the host)
CASES = (
    *((remat, False, False) for remat in POLICIES),
    ("full", True, False),
    ("full", False, True),
    ("full", True, True),
    ("offload", True, True),
)
OPTIMIZER = make_optimizer(OptimizerConfig(lr=1e-5), 0)


def recipe(rows: int, microbatch_rows: int) -> Algorithm:
    return Algorithm(
        samples_per_prompt=8,
        advantage=resolve("group_relative", NAMESPACES["advantage"]),
        policy_loss=resolve("ppo_clip", NAMESPACES["policy_loss"]),
        value_loss=resolve("squared_error", NAMESPACES["value_loss"]),
        reduction=resolve("token_mean", NAMESPACES["reduction"]),
        kl_in_loss=0.01,
        steps=Steps(rows=rows, microbatch_rows=microbatch_rows),
    )


def host_batch(rows: int, columns: int, vocab: int):
    """Rows of full length in groups of eight, the first eighth of each its prompt."""
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(columns) >= columns // 8, (rows, columns)).astype(np.float32)
    rewards = np.zeros((rows, columns), np.float32)
    rewards[:, -1] = rng.integers(0, 2, rows)
    return batch_from_rows(
        jnp.asarray(rng.integers(0, vocab, (rows, columns)), jnp.int32),
        jnp.full(rows, columns, jnp.int32),
        jnp.asarray(mask),
        rewards=jnp.asarray(rewards),
        group=jnp.asarray(np.arange(rows) // 8, jnp.int32),
        finish_reason=jnp.zeros(rows, jnp.int32),
        sampler_logprobs=jnp.asarray(mask * -2.0),
    )


def abstract_roles(model: Model, optimizer_on_host: bool, reference_on_host: bool):
    """Actor and reference as shapes and layouts; the reference in the dtype of the matmuls, but for
    what a float32 head multiplies with (as rljax.setup makes it)."""
    state = training_layout(model, OPTIMIZER, optimizer_on_host=optimizer_on_host)
    wide = model.config.head_in_float32 and not model.config.head_dtype
    exact = ("head", "embedding") if wide else ()

    def weights(name, x):
        layout = on_host(x.sharding) if reference_on_host else x.sharding
        dtype = x.dtype if name in exact else model.config.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout)

    params = {
        name: jax.tree.map(lambda x, n=name: weights(n, x), part)
        for name, part in model.abstract().items()
    }
    return Actor(state, model, OPTIMIZER, 1.0), Reference(params, model, 1.0)


def argument_bytes(tree) -> dict[str, int]:
    """Bytes on one device, by the memory that holds them."""
    sizes = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(tree):
        bytes_of_array = int(np.prod(x.sharding.shard_shape(x.shape))) * jnp.dtype(x.dtype).itemsize
        sizes[x.sharding.memory_kind or "device"] += bytes_of_array
    return sizes


def compiled(model: Model, batch, cfg, optimizer_on_host: bool, reference_on_host: bool):
    """The learning phase, compiled for shapes and layouts alone, and what it holds."""
    actor, reference = abstract_roles(model, optimizer_on_host, reference_on_host)
    start = time.perf_counter()
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments, static = grpo.arguments(batch, key, cfg, actor=actor, reference=reference)
    program = grpo.run.lower(*arguments, **static).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    # A donated argument and the output that takes its place are counted once.
    new_output_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return program, {
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": argument_bytes((actor.state, reference.params, batch)),
        "device_bytes": memory.argument_size_in_bytes
        + new_output_bytes
        + memory.temp_size_in_bytes,
        "host_argument_bytes": memory.host_argument_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        "compile_s": seconds,
    }


def concrete_roles(model: Model, params, optimizer_on_host: bool, reference_on_host: bool):
    layout = abstract_roles(model, optimizer_on_host, reference_on_host)[1].params

    def copy(x, target):
        return jax.device_put(jnp.copy(x).astype(target.dtype), target.sharding)

    copied = jax.tree.map(jnp.copy, params)  # donated
    state = start_training(model, copied, OPTIMIZER, optimizer_on_host=optimizer_on_host)
    reference_params = jax.tree.map(copy, params, layout)
    return Actor(state, model, OPTIMIZER, 1.0), Reference(reference_params, model, 1.0)


def measure_steps(cases: dict, batch, repeats: int) -> dict[str, list[float]]:
    """Seconds of the learning phase of every case, in turn, after one round of warming up.
    cases: name -> (program, actor, reference)."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeats + 1):
        for name, (program, actor, reference) in cases.items():
            start = time.perf_counter()
            arguments, _ = grpo.arguments(
                batch, jax.random.key(i), None, actor=actor, reference=reference
            )
            roles, _ = program(*arguments)
            jax.block_until_ready(roles)
            shared = arguments[3]["actor"]
            cases[name] = (program, roles["actor"].joined(shared), reference)
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="", help="such as v5e:2x4; default: CPU devices")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--tensor", type=int, default=1, help="the rest is mesh.fsdp")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", type=int, default=16, help="of the batch, and of the step")
    parser.add_argument("--microbatch_rows", type=int, default=0, help="0: one per device")
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--layers", type=int, default=0, help="0: those of the model")
    parser.add_argument("--remat", default="", help="policies, with commas; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def devices_of(args) -> list:
    if not args.topology:
        return jax.devices()
    from jax.experimental import topologies

    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    return topologies.get_topology_desc(args.topology, platform="tpu").devices


def main() -> None:
    args = parse()
    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.topology:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        jax.config.update("jax_platforms", "cpu")
    mesh = make_mesh(tensor=args.tensor, devices=devices_of(args))
    cfg = recipe(args.rows, args.microbatch_rows or row_shards(mesh))
    batch = host_batch(args.rows, args.columns, MODELS[args.model].vocab_size)
    rows = row_sharding(mesh)
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
    )
    cases, programs, params = {}, {}, None
    for remat, *moved_to_host in CASES:
        if args.remat and remat not in args.remat.split(","):
            continue
        config = dataclasses.replace(
            MODELS[args.model],
            remat=remat,
            layers=args.layers or MODELS[args.model].layers,
            kinds=(),
        )
        model = Model(config, mesh)
        suffixes = (" optimizer_on_host", " reference_on_host")
        name = remat + "".join(w for w, on in zip(suffixes, moved_to_host, strict=True) if on)
        program, cases[name] = compiled(model, abstract_batch, cfg, *moved_to_host)
        print(name, cases[name], file=sys.stderr, flush=True)  # a compile may take minutes
        if not args.topology:
            params = params or model.init(jax.random.key(0))
            programs[name] = (program, *concrete_roles(model, params, *moved_to_host))
    if programs:
        seconds = measure_steps(programs, jax.device_put(batch, rows), args.repeats)
        base = next(iter(seconds.values()))  # of remat="none", unless --remat leaves it out
        for name, values in seconds.items():
            ratios = [a / b for a, b in zip(values, base, strict=True)]
            cases[name]["step_s"] = statistics.median(values)
            cases[name]["step_over_first"] = statistics.median(ratios)
            cases[name]["step_over_first_spread"] = [min(ratios), max(ratios)]
    machine = {
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "mesh": {k: v for k, v in mesh.shape.items() if v > 1},
        "jax": jax.__version__,
        **{k: getattr(args, k) for k in ("model", "rows", "columns", "repeats")},
        "microbatch_rows": cfg.steps.microbatch_rows,
        "cases": cases,
    }
    print(json.dumps(machine, indent=2))


if __name__ == "__main__":
    main()
