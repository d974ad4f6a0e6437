"""Roles of the user's own: PRIME's implicit reward model, trained beside the policy by a dataflow
of a user's file alone, is made, planned, killed and resumed bitwise like every other role."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import REPO
from tiny_run import checkpoint_bytes, metrics_rows, tiny_config

from rljax.batch import batch_from_rows
from rljax.errors import InputError
from rljax.plan.programs import programs_of
from rljax.setup import RoleInputs, abstract_roles, build, initial_params, make_roles, role_arrays
from rljax.setup.dry_run import check_fields_read
from rljax.setup.held import held_parts
from rljax.setup.role_makers import frozen_policy, trained_values
from rljax.training import train
from rljax.validation import validate

PRIME = '''
import functools
import os
import signal
from pathlib import Path

import jax.numpy as jnp

from rljax.contracts import contract
from rljax.dataflows import grpo
from rljax.losses.implicit_reward import implicit_reward_classification
from rljax.rewards import sequence_match
from rljax.roles import program


@contract(fills=("process_rewards",))
@program
def prime(batch, key, cfg, *, actor, implicit, reference, multiplier, beta: float = 0.05):
    """PRIME (arXiv 2502.01456): beta (log pi_implicit - log ref) is the reward of each token."""
    batch = batch.replace(ref_logprobs=reference.logprobs(batch))
    loss = functools.partial(implicit_reward_classification, beta=beta)
    implicit, learned = implicit.update(batch, loss, steps=cfg.steps, reduction=cfg.reduction)
    gap = implicit.logprobs(batch) - batch.ref_logprobs
    batch = batch.replace(process_rewards=jnp.where(batch.mask > 0, beta * gap, 0.0))
    new, metrics = grpo.page(batch, key, cfg, actor=actor)
    multiplier = multiplier.replace(multiplier.state + jnp.mean(batch.scores))
    metrics |= {**learned, "multiplier": multiplier.state}
    return {**new, "implicit": implicit, "multiplier": multiplier}, metrics


def score(response, ground_truth):
    """Ends the run at the call that the file `kill` names, once."""
    note = Path(__file__).with_name("kill")
    if note.exists():
        left = int(note.read_text()) - 1
        note.write_text(str(left)) if left else note.unlink()
        if not left:
            os.kill(os.getppid(), signal.SIGKILL)
    return sequence_match(response, ground_truth, partial=0.5)
'''
ROLES = ("implicit=trained_policy(lr=1e-3)", "multiplier=number(initial=0.5)")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "my_prime.py").write_text(PRIME)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_prime", raising=False)
    return tmp_path


def prime_config(run_dir, **fields):
    given = dict(
        dataflow="my_prime.prime(beta=0.1)",
        roles=ROLES,
        algorithm__advantage="prime()",
        sft__steps=0,
        steps=4,
        evaluate__every_steps=0,
        checkpoint__every_steps=1,
        reward__function="my_prime.score",
    )
    return tiny_config(run_dir, **{**given, **fields})


@pytest.mark.slow
def test_a_third_trained_model_is_killed_and_resumed_bitwise(parts, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(prime_config(whole)).summary["status"] == "finished"
    rows = metrics_rows(whole)
    assert rows[0]["multiplier"] == pytest.approx(0.5 + rows[0]["reward/mean"], abs=1e-6)
    assert all(row["implicit/grad_norm"] > 0 for row in rows)
    assert rows[-1]["implicit/loss"] != rows[0]["implicit/loss"]

    (parts / "kill").write_text(str(16 + 16 * 3 - 4))  # evaluation, then in the reward of step 3
    flags = [
        f"--config.{name}={value}"
        for name, value in {
            "run_dir": killed,
            "dataflow": "my_prime.prime(beta=0.1)",
            "roles": repr(ROLES),
            "algorithm.advantage": "prime()",
            "sft.steps": 0,
            "steps": 4,
            "evaluate.every_steps": 0,
            "checkpoint.every_steps": 1,
            "reward.function": "my_prime.score",
            "compilation_cache": "~/.cache/rljax/tests",
        }.items()
    ]
    command = [sys.executable, f"{REPO}/launchers/train.py"]
    command += [f"--config={REPO}/tests/helpers/tiny_run.py", "--config.trackers=()", *flags]
    paths = os.pathsep.join([str(parts), str(REPO)])
    done = subprocess.run(
        command, cwd=parts, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert train(prime_config(killed)).summary["status"] == "finished"
    assert metrics_rows(killed) == rows
    arrays = checkpoint_bytes(whole, 4)
    assert arrays == checkpoint_bytes(killed, 4)
    for name in ("actor", "implicit", "reference", "multiplier"):
        assert any(path.startswith(f"['{name}']") for path in arrays), name


@pytest.mark.slow
def test_it_is_planned_with_its_own_weights_and_optimizer(parts, tmp_path):
    setup = build(prime_config(tmp_path / "run"), jax.devices()[:1])
    roles = abstract_roles(setup)
    held = held_parts(setup, roles)
    assert {"implicit weights", "implicit optimizer", "multiplier"} <= held.keys()
    calls = programs_of(setup, roles)
    assert [call.name for call in calls] == ["generate", "learn"]
    learn = calls[-1]
    learn.function.lower(*learn.arguments, **learn.static)
    real = make_roles(setup, setup.main, setup.model.init(jax.random.key(0)))
    for name, role in real.items():
        shapes, wanted = (
            [(x.shape, x.dtype) for x in jax.tree.leaves(r.arrays())] for r in (role, roles[name])
        )
        assert shapes == wanted
    arrays = role_arrays(real)["implicit"].params
    assert jax.tree.leaves(arrays)[0] is not jax.tree.leaves(real["actor"].state.params)[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(roles=ROLES[:1]), "multiplier"),
        (dict(roles=(*ROLES, "second=trained_policy()")), "names no role 'second'"),
        (dict(roles=("actor=trained_policy()",)), "a name of its own"),
        (dict(roles=("trained_policy()",)), "name=maker"),
        (dict(roles=("implicit=traned_policy()", ROLES[1])), "did you mean trained_policy"),
        (dict(roles=("implicit=trained_policy(learning=1)", ROLES[1])), "no option 'learning'"),
    ],
)
def test_what_is_wrong_with_a_role_is_said(parts, tmp_path, fields, says):
    with pytest.raises(InputError) as error:
        validate(prime_config(tmp_path / "run", **fields))
    assert says in str(error.value), error.value


@pytest.mark.slow
def test_a_field_that_no_stage_fills_is_named_before_a_weight_is_made(parts, tmp_path):
    text = PRIME.replace('fills=("process_rewards",)', 'fills=("values",)')
    (parts / "my_prime.py").write_text(text.replace("process_rewards=jnp", "values=jnp"))
    setup = build(prime_config(tmp_path / "run"), jax.devices()[:1])
    with pytest.raises(InputError, match="process_rewards"):
        check_fields_read(setup)


@pytest.mark.slow
def test_metrics_are_json(parts, tmp_path):
    train(prime_config(tmp_path / "run", steps=1))
    (row,) = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite([v for v in row.values() if isinstance(v, float)]).all()


@pytest.mark.slow
def test_a_second_critic_and_a_frozen_policy_start_as_they_say(tmp_path):
    setup = build(tiny_config(tmp_path))
    params = initial_params(setup.config, setup.model)
    inputs = RoleInputs("costs", setup, setup.main, params)
    costs, frozen = trained_values(inputs, lr=1e-4), frozen_policy(inputs)
    batch = batch_from_rows(np.full((8, 6), 3), np.full(8, 6), np.ones((8, 6)))
    assert costs.prefix == "costs/" and not np.any(jax.device_get(costs.values(batch)))
    weights = jax.tree.leaves(costs.state.params)
    assert len(weights) > 3 and int(costs.state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, frozen.params, params)
