"""Seconds of calls that return arrays, for the other files here."""

import time

import jax


def seconds_of(function, *args) -> float:
    """Seconds of a call, until its arrays are there."""
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def best_seconds(function, *args, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one that compiles."""
    jax.block_until_ready(function(*args))
    return min(seconds_of(function, *args) for _ in range(repeats))
