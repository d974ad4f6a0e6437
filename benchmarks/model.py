"""Forward, and forward with backward, of the decoder of benchmarks/grpo_step.py: prints JSON.

python benchmarks/model.py [--repeats=7] [--rows=32] [--remat=none] [--depths=2,16,64]

The shape is that of grpo_step: embed 512, mlp 1536, 8 layers, 8 heads, 4 kv heads, head_dim 64,
vocabulary 4096, 160 tokens a row, float32, one device. "forward" is the log-probs of the batch,
"forward_backward" their sum's gradient for every weight.

FLOPs of a forward pass are counted from the sizes alone, 2 per multiply and add:
rows x tokens x (2 x weights of the layers and the head + 4 x layers x heads x head_dim x tokens)
where the second term is attention's two products, with every column counted, as XLA computes them.
The backward pass counts twice as much; what remat or the chunked head compute again is not counted.

The machine's own rate is that of a float32 product [rows x tokens, embed] x [embed, mlp], timed in
the same process between the passes; a share is a median of the ratios of neighbours, so that a
machine that slows down slows down both. Compile seconds are those of forward_backward, fresh (no
cache), at each depth; shape and FLOPs but the depth are the same.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from stopwatch import seconds_of

from rljax.batch import batch_from_rows
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.models.remat import POLICIES

COLUMNS = 160
CONFIG = decoder(
    4096, layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64, max_tokens=COLUMNS
)


def make_batch(rows: int, config):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, COLUMNS))
    lengths = jnp.full(rows, COLUMNS, jnp.int32)
    return batch_from_rows(jnp.asarray(tokens, jnp.int32), lengths, jnp.ones((rows, COLUMNS)))


def forward_flops(model: Model, rows: int) -> float:
    """The formula of the docstring; norms and biases are among the weights, and negligible."""
    config = model.config
    weights = sum(int(np.prod(shape)) for shape, _ in model.shapes().values())
    weights -= config.vocab_size * config.embed  # the embedding is read, not multiplied
    scores = 4 * config.layers * config.heads * config.head_dim * COLUMNS
    return rows * COLUMNS * (2 * weights + scores)


def passes(model: Model) -> dict:
    """The two jitted functions of (params, batch)."""

    def total(params, batch):
        return jnp.sum(model.logprobs(params, batch)[0])

    return {"forward": jax.jit(model.logprobs), "forward_backward": jax.jit(jax.grad(total))}


def matmul_seconds(product, x, w, repeats: int = 5) -> float:
    return statistics.median(seconds_of(product, x, w) for _ in range(repeats))


def measure(model: Model, rows: int, repeats: int) -> dict:
    """Seconds, FLOP/s and shares of the matmul rate of both passes, in interleaved repeats."""
    config, params = model.config, model.init(jax.random.key(0))
    batch = make_batch(rows, config)
    functions = passes(model)
    x, w = jnp.ones((rows * COLUMNS, config.embed)), jnp.ones((config.embed, config.mlp))
    product, product_flops = jax.jit(jnp.matmul), 2 * rows * COLUMNS * config.embed * config.mlp
    for function in functions.values():
        seconds_of(function, params, batch)  # compiles
    seconds_of(product, x, w)
    flops = forward_flops(model, rows)
    flops_of_pass = {"forward": flops, "forward_backward": 3 * flops}
    rates = {name: [] for name in ("matmul", *functions)}
    shares = {name: [] for name in functions}
    for _ in range(repeats):
        before = matmul_seconds(product, x, w)
        for name, function in functions.items():
            rate = flops_of_pass[name] / seconds_of(function, params, batch)
            after = matmul_seconds(product, x, w)
            matmul_rate = product_flops / ((before + after) / 2)
            rates["matmul"].append(matmul_rate)
            rates[name].append(rate)
            shares[name].append(rate / matmul_rate)
            before = after

    def spread(values):
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    return {
        "forward_gflop": flops / 1e9,
        "gflop_per_s": {k: spread([r / 1e9 for r in v]) for k, v in rates.items()},
        "share_of_matmul": {k: spread(v) for k, v in shares.items()},
    }


def compile_seconds(model: Model, rows: int, layers: int) -> dict:
    """Tracing, lowering and compiling forward and backward at one depth, from shapes alone."""
    config = dataclasses.replace(model.config, layers=layers, kinds=())
    deep = dataclasses.replace(model, config=config)
    abstract_batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(rows, config)
    )
    start = time.perf_counter()
    lowered = passes(deep)["forward_backward"].lower(deep.abstract(), abstract_batch)
    traced = time.perf_counter()
    lowered.compile()
    return {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--remat", choices=POLICIES, default="none")
    parser.add_argument("--depths", default="2,16,64", help="layers, with commas")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    model = Model(dataclasses.replace(CONFIG, remat=args.remat), mesh)
    depths = [int(d) for d in args.depths.split(",")]
    # The first compile of a process also starts the compiler: it is not one of those reported.
    compile_seconds(model, args.rows, 1)
    machine = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "remat": args.remat,
        "rows": args.rows,
        "repeats": args.repeats,
        **measure(model, args.rows, args.repeats),
        "compile": {str(n): compile_seconds(model, args.rows, n) for n in depths},
    }
    print(json.dumps(machine, indent=2))


if __name__ == "__main__":
    main()
