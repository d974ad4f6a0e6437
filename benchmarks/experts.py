"""The grouped product of the experts on this host against its FLOPs floor: prints JSON.

python benchmarks/experts.py [--repeats=10]

float32, N tokens, k of X experts each, embed D, hidden size F, choices uniform at random. For every
size and lowering: milliseconds of one grouped product and of one with its gradients, and of a whole
layer of experts (router, sort, three products, sum) forward and with gradients; the best of the
repeats. The floor is the same number of rows times one matrix of the same shape, x @ w, in the same
process. "loop" is what the experts use on CPU, "ragged_dot" what they use elsewhere. Temporary
memory is what the compiler reports for the product with its gradients.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from stopwatch import best_seconds

from rljax.kernels.grouped_matmul import grouped_matmul
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.experts import Experts

# N, D, F, X, k: a learning step, a small one, a decode step, and many small experts.
SIZES = ((1024, 512, 512, 8, 2), (64, 512, 512, 8, 2), (4, 512, 512, 8, 2), (1024, 512, 256, 64, 4))
# name -> the platform whose product it is
LOWERINGS = {"loop": "cpu", "ragged_dot": "other"}


def best_ms(function, *args, repeats: int) -> float:
    return round(1e3 * best_seconds(function, *args, repeats=repeats), 3)


def with_gradients(product):
    """Both gradients of `product`, from a gradient that costs nothing to compute."""

    def run(x, w, g):
        y, backward = jax.vjp(product, x, w)
        return y, *backward(g)

    return run


def measure(product, x, w, g, repeats: int) -> dict:
    gradient_program = jax.jit(with_gradients(product)).lower(x, w, g).compile()
    return {
        "forward_ms": best_ms(jax.jit(product), x, w, repeats=repeats),
        "forward_backward_ms": best_ms(gradient_program, x, w, g, repeats=repeats),
        "temporary_mb": round(gradient_program.memory_analysis().temp_size_in_bytes / 2**20, 1),
    }


def layer(n: int, d: int, f: int, x: int, k: int, repeats: int) -> dict:
    """The whole module at one size."""
    config = decoder(1, embed=d, mlp=f, experts=x, experts_per_token=k)
    graph, state = nnx.split(Experts(nnx.Rngs(0), config))
    params, mesh = nnx.to_pure_dict(state), make_mesh(1, 1, 1, devices=jax.devices()[:1])

    def forward(params, x):
        return nnx.merge(graph, params)(x, mesh)[0]

    rows = jnp.asarray(np.random.default_rng(0).standard_normal((1, n, d)), jnp.float32)
    gradient_program = jax.jit(with_gradients(forward))
    return {
        "forward_ms": best_ms(jax.jit(forward), params, rows, repeats=repeats),
        "forward_backward_ms": best_ms(gradient_program, params, rows, rows, repeats=repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    results = []
    for n, d, f, experts, k in SIZES:
        m = n * k
        x, g = (jnp.asarray(rng.standard_normal((m, size)), jnp.float32) for size in (d, f))
        w = jnp.asarray(rng.standard_normal((experts, d, f)), jnp.float32)
        sizes = jnp.asarray(np.bincount(rng.integers(0, experts, m), minlength=experts), jnp.int32)
        row = {"N": n, "D": d, "F": f, "X": experts, "k": k, "gflop_forward": 2e-9 * m * d * f}
        row["floor"] = measure(jnp.matmul, x, w[0], g, repeats)
        for name, platform in LOWERINGS.items():

            def product(x, w, s=sizes, p=platform):
                return grouped_matmul(x, w, s, platform=p)

            row[name] = measure(product, x, w, g, repeats)
        row["layer"] = layer(n, d, f, experts, k, repeats)
        results.append(row)
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "jax": jax.__version__, "sizes": results}, indent=1))


if __name__ == "__main__":
    main()
