"""A function of the user's own, in a module outside the package, at every stage; no registry.

Each module below is all that the user writes.
"""

import json

import pytest
from tiny_run import metrics_rows

from rljax.config import Config
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.setup import build
from rljax.setup.dry_run import check_fields_read
from rljax.training import train
from rljax.validation import validate

LOSS = '''
import jax.numpy as jnp

def my_loss(policy, batch, *, width: float = 0.2):
    """Pull log pi towards its old value, harder than `width` apart; push by the advantage."""
    distance = policy.logprobs - batch.old_logprobs
    loss = -batch.advantages * policy.logprobs + jnp.maximum(jnp.abs(distance) - width, 0.0)
    return loss, {"my_width": jnp.full_like(loss, width)}
'''
ADVANTAGE = '''
import jax.numpy as jnp

def my_advantage(batch, *, level=1.0):
    """The same for every token that the policy chose."""
    return jnp.where(batch.mask > 0, level, 0.0)
'''
REWARD = '''
def my_reward(response, num_tokens, *, weight=1.0):
    """Longer is better."""
    return {"score": weight * num_tokens, "digits": sum(c.isdigit() for c in response)}
'''
DATAFLOW = '''
from rljax.roles import program

@program
def my_flow(batch, key, cfg, *, actor, scale=1.0):
    """REINFORCE without a baseline."""
    batch = batch.replace(old_logprobs=actor.logprobs(batch), advantages=cfg.advantage(batch))
    actor, metrics = actor.update(batch, cfg.policy_loss, **cfg.update_options())
    mean = batch.rewards.sum() / batch.rows
    return {"actor": actor}, {**metrics, "my_scale": scale, "my_mean": mean}
'''


MODULES = {
    "users_loss": LOSS,
    "users_advantage": ADVANTAGE,
    "users_reward": REWARD,
    "users_flow": DATAFLOW,
}


def tiny(folder):
    """One step of a decoder of one layer; nothing is held out, so nothing else compiles."""
    rows = [{"prompt": f"{i}>", "ground_truth": str(i)} for i in range(8)]
    (folder / "digits.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    CharTokenizer("0123456789>").save(folder / "tokenizer")
    config = Config(steps=1, export=False, trackers=(), compilation_cache="")
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.tokenizer, config.run_dir = str(folder / "tokenizer"), str(folder / "run")
    config.data.train, config.data.max_prompt_tokens = str(folder / "digits.jsonl"), 4
    config.sampler.max_response_tokens, config.model_settings.remat = 4, "none"
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 4
    config.batch.sequences_per_optimizer_step, config.reward.workers = 16, 1
    config.reward.function = "sequence_match(partial=0.5)"
    return config


def put(config, field, text):
    node, _, name = field.rpartition(".")
    setattr(getattr(config, node) if node else config, name, text)
    return config


def lines(module):
    return len([line for line in module.splitlines() if line.strip()])


def run_with(folder, monkeypatch, **components) -> dict:
    """One training step with the user's modules on the path; its metrics."""
    for name, module in MODULES.items():
        assert lines(module) < 15
        (folder / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(folder)
    config = tiny(folder)
    for field, text in components.items():
        put(config, field.replace("__", "."), text)
    assert train(config)["status"] == "finished"
    (row,) = metrics_rows(folder / "run")
    assert row["grad_norm"] > 0
    return row


def test_a_policy_loss_and_an_advantage_of_the_users_own(tmp_path, monkeypatch):
    row = run_with(
        tmp_path,
        monkeypatch,
        algorithm__policy_loss="users_loss.my_loss(width=0.1)",
        algorithm__advantage="users_advantage.my_advantage(level=0.25)",
    )
    assert row["my_width"] == pytest.approx(0.1) and "pg_clipfrac" not in row
    assert row["advantage/mean"] == row["advantage/max"] == 0.25


def test_a_reward_and_a_dataflow_of_the_users_own(tmp_path, monkeypatch):
    row = run_with(
        tmp_path,
        monkeypatch,
        reward__function="users_reward.my_reward(weight=0.5)",
        dataflow="users_flow.my_flow(scale=3.0)",
    )
    assert row["my_scale"] == 3.0
    assert "mismatch/mismatch_kl" not in row  # nothing of the built-in dataflow has run
    assert row["my_mean"] == pytest.approx(row["reward/part/score"])
    assert 0.5 <= row["my_mean"] <= 2.0 and row["reward/part/digits"] >= 0


@pytest.mark.parametrize(
    ("module", "call", "says"),
    [
        ("def f(policy, batch, *, width): ...", "f", "missing a required argument: 'width'"),
        ("def f(policy, batch, *, width=1): ...", "f(witdh=2)", "did you mean 'width'"),
        ("def f(policy, batch, *, width: float = 1): ...", "f(width='a')", "must be float"),
        ("def f(batch): ...", "f", "it is called with (policy, batch)"),
        ("f = 3", "f", "has no function 'f'"),
        ("def f(:", "f", "SyntaxError"),
        ("x = 1 / 0\ndef f(policy, batch): ...", "f", "ZeroDivisionError: division by zero ("),
        ("import nothing_of_this_name", "f", "No module named 'nothing_of_this_name'"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_said_before_anything_runs(
    module, call, says, tmp_path, monkeypatch, request
):
    name = f"broken_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    config = put(tiny(tmp_path), "algorithm.policy_loss", f"{name}.{call}")
    with pytest.raises(InputError) as error:
        validate(config)
    assert says in str(error.value) and "algorithm.policy_loss=" in str(error.value)


FLOW = "from rljax.roles import program\n@program\ndef f(batch, key, cfg, *, actor"
UPDATE = """
    batch = batch.replace(old_logprobs=actor.logprobs(batch), advantages=cfg.advantage(batch))
    actor, metrics = actor.update(batch, cfg.policy_loss, **cfg.update_options())
    return {"actor": actor}, metrics
"""


@pytest.mark.parametrize(
    ("module", "call", "says"),
    [
        ("def f(prompts, key, cfg, *, actor): ...", "f", "def my_flow(batch, key, cfg, *, actor)"),
        (f"{FLOW}, scale): ...", "f", "missing a required argument: 'scale'"),
        (f"{FLOW}, scale=1.0): ...", "f(sclae=2.0)", "did you mean 'scale'"),
        (f"{FLOW}, critics): ...", "f", "the roles it names of actor, critic"),
    ],
)
def test_a_dataflow_that_cannot_be_called_is_refused_by_its_config(
    module, call, says, tmp_path, monkeypatch, request
):
    name = f"uncallable_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        validate(put(tiny(tmp_path), "dataflow", f"{name}.{call}"))
    assert says in str(error.value) and "dataflow=" in str(error.value)


# What a signature does not tell: (the module, its field, what the refusal says).
ON_SHAPES = {
    "raises": (f"{FLOW}):\n    raise KeyError('no such thing')", "dataflow",
               "fails on shapes; KeyError: 'no such thing'"),
    "asks for a field that nothing fills": (
        f"{FLOW}):\n    batch.require('values', by='f')", "dataflow", "f needs batch field values"),
    "misnames a field": (f"{FLOW}):\n    batch.replace(advantage=0)", "dataflow",
                         "did you mean 'advantages'"),
    "shape of a field": (
        f"{FLOW}):\n    batch = batch.replace(advantages=batch.scores){UPDATE}", "dataflow",
        "Batch.advantages has the wrong number of axes"),
    "shape of an advantage": ("def f(batch):\n    return batch.scores", "algorithm.advantage",
                              "returns the wrong shape: got (16,)"),
    "an advantage that raises": ("def f(batch):\n    return batch.scores / None",
                                 "algorithm.advantage", "fails when it is called; TypeError"),
    "shape of a loss": ("def f(policy, batch):\n    return policy.logprobs.mean(), {}",
                        "algorithm.policy_loss", "returns the wrong shape: got ()"),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_SHAPES)
def test_what_is_wrong_inside_a_users_function_is_said_before_weights_are_made(
    case, tmp_path, monkeypatch
):
    module, field, says = ON_SHAPES[case]
    name = f"wrong_inside_{case.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    config = put(tiny(tmp_path), field, f"{name}.f")
    assert validate(config) == []

    def heavy(*_, **__):
        raise AssertionError("weights were made, or a reward's processes started")

    for heavy_one in ("initial_params", "make_roles", "reward_role"):
        monkeypatch.setattr(f"rljax.setup.{heavy_one}", heavy)
    with pytest.raises(InputError) as error:
        train(config)
    assert says in str(error.value)
    if field != "dataflow":
        assert f"{field}='{name}.f'" in str(error.value)


def test_all_fields_that_a_dataflow_does_not_read_are_said_at_once(tmp_path, monkeypatch):
    (tmp_path / "reads_little.py").write_text(DATAFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    config = put(tiny(tmp_path), "dataflow", "reads_little.my_flow(scale=2.0)")
    check_fields_read(build(config))  # the defaults, and what it reads
    put(config, "algorithm.entropy_coef", 0.5)
    check_fields_read(build(config))
    put(config, "algorithm.filters", ("live_groups()",))
    put(config, "algorithm.correction", "rollout_correction()")
    put(config, "algorithm.policy_loss", "ppo_clip(clip_high=0.3)")
    with pytest.raises(InputError) as error:
        check_fields_read(build(config))
    assert "algorithm.correction='rollout_correction()', algorithm.filters=(" in str(error.value)
    assert "does not read them. Fix: algorithm.correction='', algorithm.filters=()" in str(
        error.value
    )
    put(config, "algorithm.filters", ())
    with pytest.raises(InputError, match="does not read it. Fix: algorithm.correction=''$"):
        check_fields_read(build(config))
