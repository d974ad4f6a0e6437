"""Every dataflow that samples learns from samples in flight, without a line of its own."""

import jax
import numpy as np
import pytest
from conftest import lanes
from explained import unexplained
from tiny_run import tiny_config

from rljax.arrays import fetch
from rljax.models.huggingface import save_params
from rljax.setup import build
from rljax.training.run import Run
from rljax.validation import validate

FLOWS = {
    "grpo": {},
    "ppo": dict(algorithm__advantage="gae()"),
    "pf_ppo(scope='batch')": dict(algorithm__advantage="gae()"),
    "vapo(value_pretraining_steps=1)": dict(algorithm__advantage="vapo_gae()"),
    "reinforce": dict(algorithm__advantage="reinforce()"),
    "remax": dict(algorithm__advantage="remax()"),
    "self_play": dict(algorithm__advantage="reinforce()"),
    "online_dpo": dict(algorithm__preference_loss="dpo()"),
    "sppo": dict(algorithm__preference_loss="sppo()"),
    "raft": {},
    "on_policy_distil": {},
    # Not a dataflow, but a rollout of each kind.
    "grpo()": dict(algorithm__collect="dynamic(if_short='fill')"),
    "remax()": dict(algorithm__advantage="remax()", algorithm__collect="active()"),
    "ppo()": dict(algorithm__advantage="gae()", algorithm__collect="first_live()"),
}
QUICK = ("remax",)
STEPS = 3


def a_run(tmp_path, dataflow: str, **fields) -> Run:
    weighs = dict(algorithm__correction="rollout_correction(upper=2.0)")
    if dataflow in ("online_dpo", "sppo", "raft", "on_policy_distil"):  # which read no correction
        weighs = dict(algorithm__policy_loss="ppo_clip()")
    config = tiny_config(
        tmp_path,
        dataflow=dataflow,
        steps=STEPS,
        sft__steps=0,
        evaluate__every_steps=0,
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)",
        batch__sequences_per_optimizer_step=16,
        rollouts__max_staleness=1,
        sampler__slots=12,
        **{**weighs, **fields},
    )
    if dataflow == "on_policy_distil":
        config.dataflow, config.teacher_model = "grpo", str(tmp_path / "teacher")
        model = build(config, devices=jax.devices()[:1]).model
        params, ids = model.init(jax.random.key(5)), dict(bos_id=None, eos_ids=(1,), pad_id=0)
        save_params(tmp_path / "teacher", model, params, **ids)
        config.dataflow, config.reward.function = dataflow, ""
    assert validate(config) == []
    return Run(build(config, devices=jax.devices()[:1]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dataflow", lanes(QUICK, [name for name in FLOWS if name not in QUICK]))
def test_it_learns_from_tokens_of_the_step_before(dataflow, tmp_path):
    with a_run(tmp_path, dataflow, **FLOWS[dataflow]) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        before = fetch(run.roles["actor"].state.params)
        rows = [run.step() for _ in range(STEPS)]
        after = fetch(run.roles["actor"].state.params)
    assert rows[0]["staleness/steps_max"] == 0
    assert max(row["staleness/steps_max"] for row in rows) == 1
    assert all(row["queue/open"] == 4 for row in rows)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row)
    assert unexplained(*rows) == set()
