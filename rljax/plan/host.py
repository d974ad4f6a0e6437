"""Measures bytes and seconds of programs on this host's own processors: its matrix products at the
shapes of the program, and its memory.

There are published figures of chips, but for the machine at hand only a measurement tells. A
processor runs the operations of a program one after another, so their times add up.
"""

import functools
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.plan.flops import Product

LEAST_SHARE = 0.005  # of a program's FLOPs: below it a product counts at the rate of the others
REPEATS, LONG_S = 3, 0.2  # a measurement is repeated, one that takes long is not
COPIED = 2**25  # float32 numbers, 128 MiB: more than processors keep in their own memory


def process_bytes() -> int:
    """Returns the bytes of this process: the interpreter, libraries, and what compiling left."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        kilobyte = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
    return pages * resource.getpagesize()


class WallAndCpuSeconds(NamedTuple):
    """Seconds by the clock, and those of processors, which other work changes least."""

    wall: float
    cpu: float

    def times(self, count: float) -> "WallAndCpuSeconds":
        """Returns the seconds of `count` such pieces of work."""
        return WallAndCpuSeconds(self.wall * count, self.cpu * count)


def expected_seconds(
    products: Mapping[Product, float], moved_bytes: float
) -> dict[str, WallAndCpuSeconds]:
    """Returns {"products", "memory"}: the seconds of all matrix products (`products`: how often
    each is made), and of moving all other bytes that a program touches."""
    flops = {product: product.flops * count for product, count in products.items()}
    total = sum(flops.values())
    large = {product: size for product, size in flops.items() if size >= LEAST_SHARE * total}
    durations = [product_seconds(product).times(products[product]) for product in large]
    of_products = WallAndCpuSeconds(
        sum(duration.wall for duration in durations), sum(duration.cpu for duration in durations)
    )
    other_bytes = moved_bytes - sum(product.bytes * count for product, count in products.items())
    return {
        "products": of_products.times(total / max(sum(large.values()), 1.0)),
        "memory": byte_seconds().times(max(other_bytes, 0.0)),
    }


@functools.cache
def product_seconds(product: Product) -> WallAndCpuSeconds:
    """Returns the seconds of one matrix product on this host."""
    left, right = (jnp.ones(shape, product.dtype) for shape in (product.left, product.right))
    options = dict(dimension_numbers=product.numbers, preferred_element_type=product.out_dtype)
    run = jax.jit(functools.partial(jax.lax.dot_general, **options))
    return _least_seconds(run, left, right)


@functools.cache
def byte_seconds() -> WallAndCpuSeconds:
    """Returns the seconds of a byte read or written, by arrays that fit no cache."""
    x = jnp.ones(COPIED, jnp.float32)
    return _least_seconds(jax.jit(lambda x: x * 1.5), x).times(0.5 / x.nbytes)


def _least_seconds(run, *arguments) -> WallAndCpuSeconds:
    jax.block_until_ready(run(*arguments))
    walls, cpus = [], []
    for _ in range(REPEATS):
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(run(*arguments))
        walls.append(time.perf_counter() - start[0])
        cpus.append(time.process_time() - start[1])
        if walls[-1] > LONG_S:
            break
    return WallAndCpuSeconds(min(walls), min(cpus))
