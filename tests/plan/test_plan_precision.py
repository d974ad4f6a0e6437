"""What the plan counts of numbers of two bytes, from shapes alone; and products that TPUs lack."""

import dataclasses
import types

import jax
import pytest
from test_plan import ONE_LAYER, tiny

from rljax.errors import InputError
from rljax.mesh import check_products
from rljax.plan.memory import estimate
from rljax.setup import abstract_roles
from rljax.setup import build as build_setup


def counted(**settings):
    config = tiny(model=ONE_LAYER, mesh__fsdp=1, mesh__tensor=1)
    config.model_settings = dataclasses.replace(config.model_settings, **settings)
    setup = build_setup(config, jax.devices()[:1])
    roles = abstract_roles(setup)
    return estimate(setup, roles), roles["actor"].state.params


@pytest.mark.slow
def test_weights_of_two_bytes_are_counted_as_they_are_held_and_used():
    """Weights of 2 bytes, moments of 4 + 4, and no copy where products read them as they are; where
    they do not, a copy in the dtype of the products."""
    exact, params = counted()
    elements = sum(x.size for x in jax.tree.leaves(params))
    held, _ = counted(weight_dtype="bfloat16", dtype="bfloat16")
    for name, of_exact, of_held in (("actor weights", 4, 2), ("actor optimizer", 8, 8)):
        # The optimizer has a counter or two.
        assert 0 <= exact.held[name] - of_exact * elements <= 16, name
        assert 0 <= held.held[name] - of_held * elements <= 16, name
    several = held.learn["gradients"] / elements
    assert several in (4, 6) and exact.learn["gradients"] / elements in (4, 8)
    assert held.learn["weights as used"] == exact.learn["weights as used"] == 0
    half, _ = counted(weight_dtype="bfloat16", dtype="float16")
    assert half.learn["weights as used"] >= 2 * elements * 0.99
    wide, _ = counted(weight_dtype="bfloat16")
    assert wide.learn["weights as used"] >= 4 * elements * 0.99
    masters, _ = counted(dtype="float16")
    assert masters.held["actor weights"] == exact.held["actor weights"]
    assert masters.learn["layers"] == exact.learn["layers"] / 2


def test_float16_is_refused_on_a_tpu():
    """A device says its platform, as one of a topology that is compiled for does."""
    mesh = types.SimpleNamespace(
        devices=types.SimpleNamespace(flat=[types.SimpleNamespace(platform="tpu")])
    )
    with pytest.raises(InputError, match="bfloat16 or float32: model_settings.dtype"):
        check_products("float16", mesh)
    check_products("bfloat16", mesh)
