"""The fused log-prob against the plain form: memory, declared FLOPs, time. Prints JSON.

python benchmarks/logprob.py [--repeats=5] [--tpu=v5e,v5p,v6e]

Forward and backward, through log-prob and entropy, of N rows, D embed, V vocabulary. "plain" builds
the logits [N, V], "fused" is what `token_logprobs` does on that platform.

--tpu compiles ahead of time for one chip of each generation, on a host that has libtpu and no chip:
seconds of the compile, temporary MB beyond inputs, values and gradients, and the FLOPs that the
kernels declare over N D V. Where a compile is refused, the beginning of the compiler's message.

Without --tpu it runs on the local backend. The two forms alternate; the ratio is that of each
pair's times: median, smallest and largest of the repeats. On CPU at (4096, 512, 32768) in float32;
on a GPU at the first two sizes in bfloat16, with the rate of a plain product of the same size and
the share of it that the forward pass reaches.
"""

import argparse
import functools
import json
import os
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from stopwatch import seconds_of

from rljax.kernels.logprob import token_logprobs

# N, D, V, soft cap: Qwen3 8B, Llama 3.2 1B, and the widest with a cap
SIZES = ((8192, 4096, 151936, 0.0), (4096, 2048, 128256, 0.0), (8192, 8192, 256000, 30.0))
CPU_SIZE = (4096, 512, 32768, 0.0)
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def fused(hidden, head, targets, soft_cap):
    return token_logprobs(hidden, head, targets, temperature=0.7, soft_cap=soft_cap)[:2]


def plain(hidden, head, targets, soft_cap):
    z = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
    z = (soft_cap * jnp.tanh(z / soft_cap) if soft_cap else z) / 0.7
    logp = jax.nn.log_softmax(z)
    target = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
    return target, -jnp.sum(jnp.exp(logp) * logp, axis=1)


FORMS = {"plain": plain, "fused": fused}


def with_gradients(form, soft_cap):
    def run(hidden, head, targets, g_logprob, g_entropy):
        outputs, backward = jax.vjp(lambda h, w: form(h, w, targets, soft_cap), hidden, head)
        return outputs, backward((g_logprob, g_entropy))

    return jax.jit(run)


def shapes(n, d, v, dtype, sharding=None):
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    rows = array((n,), jnp.float32)
    return array((n, d), dtype), array((d, v), dtype), array((n,), jnp.int32), rows, rows


def megabytes(program) -> float:
    return round(program.memory_analysis().temp_size_in_bytes / 1e6, 1)


# -- TPU, ahead of time


def tpu_sharding(generation: str):
    """The sharding of an array on one chip of a generation."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("chip",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_one(form, size, sharding) -> dict:
    n, d, v, soft_cap = size
    lowered = with_gradients(form, soft_cap).lower(*shapes(n, d, v, jnp.bfloat16, sharding))
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"refused": str(error).split("\n")[0][:200]}
    lines = [x for x in program.as_text().splitlines() if 'custom_call_target="tpu_custom' in x]
    flops = [int(re.search(r'"flops":"(\d+)"', line)[1]) for line in lines]
    return {
        "compile_s": round(time.perf_counter() - start, 1),
        "temporary_mb": megabytes(program),
        "kernels": len(flops),
        "declared_flops_over_ndv": round(sum(flops) / (n * d * v), 3),
    }


def ahead_of_time(generations) -> list:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for generation in generations:
        sharding = tpu_sharding(generation)
        for size in SIZES:
            row = dict(zip(("N", "D", "V", "soft_cap"), size, strict=True), chip=generation)
            row |= {name: compile_one(form, size, sharding) for name, form in FORMS.items()}
            rows.append(row)
    return rows


# -- the local backend


def alternate(programs: dict, arrays, repeats: int) -> dict:
    """name -> its times; one of each in turn, after one of each that does not count."""
    for program in programs.values():
        jax.block_until_ready(program(*arrays))
    times = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            times[name].append(seconds_of(program, *arrays))
    return times


def spread(values) -> dict:
    values = sorted(values)
    named = ("median", statistics.median(values)), ("min", values[0]), ("max", values[-1])
    return {name: float(f"{value:.4g}") for name, value in named}


def random_arrays(structs, seed=0):
    rng = np.random.default_rng(seed)
    (n, d), (_, v) = structs[0].shape, structs[1].shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    arrays = normal(n, d), normal(d, v) / d**0.5, rng.integers(0, v, n), normal(n), normal(n)
    return [jnp.asarray(x, s.dtype) for x, s in zip(arrays, structs, strict=True)]


def compare(size, dtype, repeats: int) -> dict:
    n, d, v, soft_cap = size
    structs = shapes(n, d, v, dtype)
    arrays = random_arrays(structs)
    row = {"N": n, "D": d, "V": v, "dtype": jnp.dtype(dtype).name}
    programs = {k: with_gradients(f, soft_cap).lower(*structs).compile() for k, f in FORMS.items()}
    times = alternate(programs, arrays, repeats)
    for name, program in programs.items():
        row[name] = {"s": spread(times[name]), "temporary_mb": megabytes(program)}
    row["time_ratio"] = spread(f / p for f, p in zip(times["fused"], times["plain"], strict=True))
    row["memory_ratio"] = round(row["fused"]["temporary_mb"] / row["plain"]["temporary_mb"], 4)
    return row


def against_products(size, dtype, repeats: int) -> dict:
    """The forward pass and a product of its size, hidden head: 2 N D V FLOP each."""
    n, d, v, soft_cap = size
    structs = shapes(n, d, v, dtype)
    arrays = random_arrays(structs)[:3]

    def product(h, w, _):
        return jnp.dot(h, w, preferred_element_type=h.dtype)

    forward = functools.partial(fused, soft_cap=soft_cap)
    programs = {"product": jax.jit(product), "forward": jax.jit(forward)}
    times = alternate(programs, arrays, repeats)
    shares = (p / f for p, f in zip(times["product"], times["forward"], strict=True))
    return {
        "product_tflop_per_s": spread(2e-12 * n * d * v / t for t in times["product"]),
        "forward_tflop_per_s": spread(2e-12 * n * d * v / t for t in times["forward"]),
        "forward_over_product_rate": spread(shares),
    }


def on_this_host(repeats: int) -> list:
    if jax.default_backend() == "cpu":
        return [compare(CPU_SIZE, jnp.float32, repeats)]
    return [
        compare(size, jnp.bfloat16, repeats) | against_products(size, jnp.bfloat16, repeats)
        for size in SIZES[:2]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tpu", default="", help="generations, such as v5e,v5p,v6e")
    args = parser.parse_args()
    row = {"jax": jax.__version__, "load": os.getloadavg()[0]}
    if args.tpu:
        row["ahead_of_time"] = ahead_of_time(args.tpu.split(","))
    else:
        row["device"] = jax.devices()[0].device_kind
        row["sizes"] = on_this_host(args.repeats)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
