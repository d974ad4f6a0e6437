"""The line after the first step: what was compiled, and which programs took longest."""

import jax
import jax.numpy as jnp

from rljax.tracking import compiles
from rljax.training.program_cache import said


def test_the_longest_programs_are_named_with_their_seconds():
    done = [compiles.Compiled(9, 0, 412.0, 300.0)]
    line = said(done, ["here"], [("learn rl", 300.2), ("generate", 99.0)])
    assert line == "compiled 9 programs in 412 s (learn rl 300 s, generate 99 s), 0 from the cache"
    assert said(done, ["here"]) == "compiled 9 programs in 412 s, 0 from the cache"


def test_programs_of_one_name_are_added_up_and_called_by_their_use():
    compiles.watch()
    compiles.expect([("of_this_test", "the work")])
    before = compiles.count()

    def of_this_test(x):
        return jnp.sin(x)

    for size in (3, 4):
        jax.jit(of_this_test)(jnp.ones(size))
    longest = dict(compiles.longest(before, least_s=0.0))
    assert longest["the work"] > 0 and "of_this_test" not in longest
    assert compiles.longest(before, least_s=1e9) == []
    compiles.expect([])
