"""Replicas: gradients that are summed over data once per optimizer step are the same gradients,
and nothing but the sum goes from slice to slice."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from conftest import lanes
from test_packed_learning import groups

from rljax.arrays import place
from rljax.learn import Steps, token_mean
from rljax.learn.packing import Packing
from rljax.learn.state import DataParallel
from rljax.losses import policy, preference, value
from rljax.losses import reward_model as reward_losses
from rljax.mesh import make_mesh, row_shards
from rljax.models.builtin import decoder
from rljax.models.config import LoraConfig
from rljax.models.model import Model
from rljax.plan.hlo import traffic
from rljax.roles import Actor, Critic, RewardModel, start_training

DENSE = decoder(12, layers=2, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.3)
ADAPTED = dataclasses.replace(DENSE, lora=LoraConfig(2, 4.0, ("q_proj", "v_proj"), "float32"))
CASES = {
    "microbatches": (DENSE, Actor, policy.ppo_clip, 8, False),
    "packed": (DENSE, Actor, policy.ppo_clip, 16, True),
    "whole step": (DENSE, Actor, policy.clip_cov, 8, False),
    "whole step, packed": (DENSE, Actor, policy.clip_cov, 16, True),
    "pairs": (DENSE, Actor, preference.dpo, 8, False),
    "critic": (DENSE, Critic, value.squared_error, 8, False),
    "reward model": (DENSE, RewardModel, reward_losses.bradley_terry, 8, True),
    "adapters": (ADAPTED, Actor, policy.ppo_clip, 8, False),
}


def role_on(mesh, config, kind, spread):
    one = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    one = dataclasses.replace(one, head="lm" if kind is Actor else "scalar")
    params = jax.device_get(one.init(jax.random.key(3)))
    model, optimizer = dataclasses.replace(one, mesh=mesh), optax.sgd(0.1)
    params = jax.device_put(params, model.shardings())
    return kind(start_training(model, params, optimizer, spread=spread), model, optimizer)


def updated(mesh, case, spread=None):
    """(the role after one update, its metrics, the text of the program)."""
    config, kind, loss, microbatch, packed = CASES[case]
    batch = groups(0, prompts=4, samples=4, dtype=np.float32)
    packing = Packing(16, 4, row_shards(mesh), 4, False, mesh) if packed else None
    steps = Steps(batch.rows, microbatch, packing=packing)
    role = role_on(mesh, config, kind, spread or DataParallel())
    batch = place(jax.device_get(batch), mesh)
    step = jax.jit(lambda role, batch: role.update(batch, loss, steps=steps, reduction=token_mean))
    program = step.lower(role, batch).compile()
    role, metrics = program(role, batch)
    return role.state.params, jax.device_get(metrics), program.as_text()


def per_device(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(["microbatches"], [c for c in CASES if c != "microbatches"]))
def test_a_sum_after_all_microbatches_is_the_sum_of_each(case):
    want, want_metrics, _ = updated(make_mesh(1, 1, 1, devices=jax.devices()[:1]), case)
    mesh = make_mesh(2, 4)
    got, metrics, text = updated(mesh, case, DataParallel(sum_once=True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    for name in set(want_metrics) - {"positions", "positions_filled"}:
        np.testing.assert_allclose(
            metrics[name], want_metrics[name], rtol=1e-3, atol=1e-5, err_msg=name
        )
    crossing = [one for one in traffic(text, mesh, slices=2).collectives if one.dcn_bytes]
    assert not [one for one in crossing if one.trips > 1 or one.in_open_loop]
    # What crosses are a device's gradients, float32, and a few numbers for every token.
    weights = per_device(got)
    summed = sum(one.dcn_bytes for one in crossing if one.axes == ("data",))
    assert weights <= summed < weights + 200
    assert sum(one.dcn_bytes for one in crossing) - summed < 16 * 16 * 4 * 2
