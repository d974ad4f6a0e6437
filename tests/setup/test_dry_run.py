"""The dry run's rule: a field of config.algorithm that is set and that nothing reads is refused."""

import jax
import pytest
from tiny_offline import offline_config
from tiny_run import tiny_config

from rljax.errors import InputError
from rljax.setup import build
from rljax.setup.dry_run import check_fields_read

ONE = jax.devices()[:1]
PAGE = """
import jax.numpy as jnp
from rljax.roles import program

@program
def reads_nothing(batch, key, cfg, *, actor):
    return {"actor": actor}, {"rows": jnp.float32(batch.rows)}
"""


def refused(config) -> str:
    with pytest.raises(InputError, match="does not read") as error:
        check_fields_read(build(config, ONE))
    return str(error.value)


@pytest.mark.slow
def test_offline_runs_read_no_rollout_and_no_advantage(tmp_path):
    config = offline_config(tmp_path, "pairs", "preference", "run")
    # The default said in other words is nothing that was set.
    config.algorithm.advantage = "group_relative(std='sample')"
    config.algorithm.preference_loss = "dpo(beta=0.2)"
    check_fields_read(build(config, ONE))
    config.algorithm.collect = "active(max_rounds=2)"
    said = refused(config)
    assert "algorithm.collect='active(max_rounds=2)'" in said
    assert said.endswith("Fix: algorithm.collect='once'")
    config.algorithm.collect, config.algorithm.advantage = "once", "group_relative(std='none')"
    assert "algorithm.advantage=\"group_relative(std='none')\"" in refused(config)


@pytest.mark.parametrize(
    ("field", "value", "dataflow"),
    [
        ("preference_loss", "kto", "kto"),
        ("value_loss", "squared_error(clip=0.9)", "ppo"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("preference_loss", "bco()", "bco"),
                ("preference_loss", "simpo()", "preference"),
                ("reward_loss", "cost_preference()", "reward_model"),
            )
        ),
    ],
)
def test_a_formula_of_another_method_names_that_method(field, value, dataflow, tmp_path):
    config = tiny_config(tmp_path / "run", sft__steps=0, **{f"algorithm__{field}": value})
    said = refused(config)
    assert f"Fix: dataflow='{dataflow}', which reads algorithm.{field}, or algorithm." in said


def test_a_formula_whose_fields_nothing_fills_is_named(tmp_path):
    config = offline_config(tmp_path, "examples", "sft", "run")
    config.algorithm.reduction = "prompt_mean"
    with pytest.raises(InputError) as error:
        check_fields_read(build(config, ONE))
    text = str(error.value)
    assert text.startswith("algorithm.reduction='prompt_mean'; it needs batch field group, which")
    assert text.endswith("algorithm.reduction='token_mean', or a dataflow whose batches have it")


@pytest.mark.slow
def test_what_the_supervised_steps_read_is_not_read_by_the_dataflow(tmp_path):
    (tmp_path / "page.py").write_text(PAGE)
    config = tiny_config(tmp_path / "run", dataflow=f"{tmp_path / 'page.py'}:reads_nothing")
    assert config.sft.steps and "algorithm.policy_loss='ppo_clip" in refused(config)
    config.algorithm.policy_loss = "ppo_clip()"
    config.algorithm.collect = "active(max_rounds=2)"  # the rollout is its reader
    check_fields_read(build(config, ONE))
    config.algorithm.reduction = "seq_mean_token_mean"
    assert "algorithm.reduction='seq_mean_token_mean'" in refused(config)


@pytest.mark.slow
def test_the_bounds_of_an_adapted_coefficient_are_read_where_there_is_one(tmp_path):
    config = tiny_config(tmp_path / "run", sft__steps=0, algorithm__kl_in_loss=0.1)
    config.algorithm.kl_target, config.algorithm.kl_horizon = 0.5, 100.0
    check_fields_read(build(config, ONE))
    config.algorithm.kl_target = 0.0
    assert "algorithm.kl_horizon=100.0" in refused(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mismatch_metrics()", "bypass_old_logprobs()"])
def test_a_correction_returns_a_batch_and_metrics(name, tmp_path):
    config = tiny_config(tmp_path / "run", sft__steps=0)
    config.algorithm.correction = "rollout_correction(mode='off')"
    check_fields_read(build(config, ONE))
    config.algorithm.correction = name
    with pytest.raises(InputError, match=r"\(batch, metrics\).* Fix: algorithm.correction="):
        check_fields_read(build(config, ONE))
