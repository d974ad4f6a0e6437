"""Random streams: the same keys in every process, and another one for each purpose and step."""

import zlib

import jax
import numpy as np
import pytest

from rljax.keys import fold_in, root_key, stream


def numbers(key) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


@pytest.mark.parametrize("seed", [0, 1, 70_000, 2**31 + 5, 2**32 - 1, -1])
def test_the_key_of_a_seed_is_that_of_jax(seed):
    assert numbers(root_key(seed)) == numbers(jax.random.key(seed))


@pytest.mark.smoke
def test_a_stream_is_a_function_of_its_name_and_step_alone():
    """By the checksum of the name: `hash` of a text differs between processes, and a run resumes
    in another one."""
    root = root_key(3)
    of_name = jax.random.fold_in(root, zlib.crc32(b"samples"))
    assert numbers(stream(root, "samples")) == numbers(of_name)
    for step in (0, 1, 70_000):
        want = numbers(jax.random.fold_in(of_name, step))
        assert numbers(stream(root, "samples", step)) == want
        assert numbers(jax.jit(stream, static_argnums=1)(root, "samples", step)) == want
        assert numbers(fold_in(of_name, step)) == want


def test_no_two_purposes_and_steps_have_the_same_key():
    root = root_key(0)
    keys = [stream(root, name, step) for name in ("samples", "noise") for step in (None, 0, 1, 2)]
    assert len({numbers(key) for key in (root, *keys)}) == 9
