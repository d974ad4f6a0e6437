"""GAE and discounted sums: time on a CPU, and the TPU compiler's figures. Prints JSON.

python benchmarks/gae.py [--repeats=7] [--rows=512] [--tokens=8192]
python benchmarks/gae.py --chips=v5e:2x4,v5p:2x2x1,v6e:2x4 [--rows=512] [--tokens=8192]

The first runs here, float32, 60 % of the tokens chosen, four segments to a row of `gae`. `plain`: a
lax.scan over the tokens of every input; against it ours, what a CPU gets; ours unrolled by 8; the
doublings, what an accelerator gets without a kernel; and for `discounted_sum` of whole rows
jax.lax.associative_scan. All take turns; each number is the median, least and greatest of the
ratios to `plain` in the same turn, and plain's own time in milliseconds.

The second compiles for one chip of each topology ahead of time (`pip install "jax[tpu]"`, nothing
runs): seconds to compile, MB of inputs and outputs, MB beside them, and MB that the program moves
over MB of inputs and outputs; a kernel's part of that is what it declares.
"""

import argparse
import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from stopwatch import seconds_of

from rljax.kernels.gae import discounted_sum, gae, xla
from rljax.mesh import make_mesh

GAMMA, LAM = 0.99, 0.95


def associative_sum(x, decay, mask, ids):
    """jax.lax.associative_scan of the maps y -> b + c y; ids is None."""
    is_counted = mask > 0
    maps = jnp.where(is_counted, x, 0.0), jnp.where(is_counted, decay, 1.0)

    def compose(later, earlier):
        return (earlier[0] + earlier[1] * later[0], earlier[1] * later[1])

    sums = jax.lax.associative_scan(compose, maps, reverse=True, axis=1)
    return jnp.where(is_counted, sums[0], 0.0)


def plain_gae(rewards, values, mask, ids, gamma, lam):
    """One column of all inputs at a time, from the right."""

    def column(later, inputs):
        value, advantage, segment = later
        r, v, m, id_t = inputs
        ahead = jnp.where(segment == id_t, gamma[:, 0] * (value + lam[:, 0] * advantage), 0.0)
        advantage = jnp.where(m > 0, r - v + ahead, advantage)
        value, segment = jnp.where(m > 0, v, value), jnp.where(m > 0, id_t, segment)
        outputs = jnp.where(m > 0, advantage, 0.0), jnp.where(m > 0, advantage + v, 0.0)
        return (value, advantage, segment), outputs

    start = (jnp.zeros_like(rewards[:, 0]), jnp.zeros_like(rewards[:, 0]), ids[:, 0])
    columns = (rewards.T, values.T, mask.T, ids.T)
    advantages, returns = jax.lax.scan(column, start, columns, reverse=True)[1]
    return advantages.T, returns.T


def plain_sum(x, decay, mask, ids):
    """As `plain_gae`; ids is None."""

    def column(total, inputs):
        x_t, m = inputs
        total = jnp.where(m > 0, x_t + decay[:, 0] * total, total)
        return total, jnp.where(m > 0, total, 0.0)

    return jax.lax.scan(column, jnp.zeros_like(x[:, 0]), (x.T, mask.T), reverse=True)[1].T


ON_CPU = {
    "gae": {
        "plain": plain_gae,
        "ours": xla.scan_gae,
        "unrolled": functools.partial(xla.scan_gae, unroll=8),
        "doubled": xla.doubled_gae,
    },
    "discounted_sum": {
        "plain": plain_sum,
        "ours": xla.scan_sum,
        "unrolled": functools.partial(xla.scan_sum, unroll=8),
        "doubled": xla.doubled_sum,
        "associative": associative_sum,
    },
}


def arguments(name, rows, tokens):
    random = np.random.default_rng(0)
    x, values = random.normal(size=(2, rows, tokens)).astype(np.float32)
    mask = (random.random((rows, tokens)) < 0.6).astype(np.float32)
    ids = np.broadcast_to(np.arange(tokens, dtype=np.int32) * 4 // tokens, mask.shape)
    gamma, lam = (np.full((rows, 1), number, np.float32) for number in (GAMMA, LAM))
    arrays = (x, values, mask, ids, gamma, lam) if name == "gae" else (x, lam, mask, None)
    return jax.device_put(arrays)


def milliseconds(program, arrays) -> float:
    return 1000 * seconds_of(program, *arrays)


def on_this_machine(rows, tokens, repeats) -> dict:
    report = {}
    for name, forms in ON_CPU.items():
        arrays = arguments(name, rows, tokens)
        programs = {form: jax.jit(function) for form, function in forms.items()}
        for program in programs.values():
            milliseconds(program, arrays)
        turns = [{k: milliseconds(p, arrays) for k, p in programs.items()} for _ in range(repeats)]
        report[name] = {"plain_ms": spread([turn["plain"] for turn in turns])}
        for form in list(programs)[1:]:
            report[name][form] = spread([turn[form] / turn["plain"] for turn in turns])
    return report


def spread(numbers) -> dict:
    values = statistics.median(numbers), min(numbers), max(numbers)
    return dict(zip(("median", "least", "greatest"), (round(x, 3) for x in values), strict=True))


def on_chip(chip, rows, tokens) -> dict:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(chip, platform="tpu").devices
    replicated = NamedSharding(make_mesh(1, 1, 1, devices=devices[:1]), PartitionSpec())
    x, ids = (
        jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=replicated)
        for dtype in (jnp.float32, jnp.int32)
    )

    def packed(rewards, values, mask, ids, impl="auto"):
        return gae(rewards, values, mask, gamma=GAMMA, lam=LAM, segment_ids=ids, impl=impl)

    def total(x, mask, ids):
        return discounted_sum(x, GAMMA, mask, ids)

    report = {}
    for name, function, shapes in (
        ("gae", packed, (x, x, x, ids)),
        ("discounted_sum", total, (x, x, ids)),
        ("gae_xla", functools.partial(packed, impl="xla"), (x, x, x, ids)),
    ):
        start = time.perf_counter()
        program = jax.jit(function).lower(*shapes).compile()
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        necessary = memory.argument_size_in_bytes + memory.output_size_in_bytes
        report[name] = {
            "compile_seconds": round(seconds, 1),
            "inputs_and_outputs_mb": round(necessary / 1e6, 1),
            "temporary_mb": round(memory.temp_size_in_bytes / 1e6, 1),
            # A loop's body is counted once.
            "moved": round(program.cost_analysis()["bytes accessed"] / necessary, 3),
        }
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chips", default="", help="topologies with commas between them")
    options = parser.parse_args()
    shape = dict(rows=options.rows, tokens=options.tokens)
    report = {**shape, "load": [round(x, 1) for x in os.getloadavg()]}
    if options.chips:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        jax.config.update("jax_enable_compilation_cache", False)
        report |= {chip: on_chip(chip, **shape) for chip in options.chips.split(",")}
    else:
        report |= on_this_machine(**shape, repeats=options.repeats)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
