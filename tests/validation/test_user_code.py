"""A function of the user's own, in a module outside the package, at every stage; no registry.

Each module below is all that the user writes.
"""

import json
import types

import jax.numpy as jnp
import pytest
from conftest import lanes
from tiny_run import metrics_rows, train_on_one

from rljax.batch import Batch
from rljax.components import resolve
from rljax.config import Config
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward, RolloutConfig, check_rows, player_of, run_rollout
from rljax.setup import build
from rljax.setup.dry_run import check_fields_read
from rljax.training import train
from rljax.training.scores import try_rewards
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
    mean, level = batch.rewards.sum() / batch.rows, batch.advantages
    own = {"my_scale": scale, "my_mean": mean, "my_most": level.max(), "my_all": level.sum()}
    return {"actor": actor}, {**metrics, **own, "my_tokens": batch.mask.sum()}
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
    assert train_on_one(config)["status"] == "finished"
    (row,) = metrics_rows(folder / "run")
    assert row["grad_norm"] > 0
    return row


def test_a_loss_an_advantage_a_reward_and_a_dataflow_of_the_users_own(tmp_path, monkeypatch):
    row = run_with(
        tmp_path,
        monkeypatch,
        algorithm__policy_loss="users_loss.my_loss(width=0.1)",
        algorithm__advantage="users_advantage.my_advantage(level=0.25)",
        reward__function="users_reward.my_reward(weight=0.5)",
        dataflow="users_flow.my_flow(scale=3.0)",
    )
    assert row["my_width"] == pytest.approx(0.1) and "pg_clipfrac" not in row
    assert row["my_most"] == 0.25 and row["my_all"] == pytest.approx(0.25 * row["my_tokens"])
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
        ("f = 3", "f", "'f' is no function: got 3"),
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


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ("reads='rewards'", "contract(reads='rewards') is a tuple of names: ('rewards',)"),
        ("reads=('advantagse',)", "got 'advantagse'; the fields of a batch are tokens, "),
        ("fills=('return',)", "Fix: did you mean 'returns'?"),
    ],
)
def test_a_contract_that_does_not_hold_is_a_problem_of_its_field(
    declared, says, tmp_path, monkeypatch
):
    name = f"miscontracted_{abs(hash(declared))}"
    module = f"from rljax.contracts import contract\n@contract({declared})\ndef f(batch): ...\n"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        validate(put(tiny(tmp_path), "algorithm.advantage", f"{name}.f"))
    message = str(error.value)
    assert f"1. algorithm.advantage='{name}.f': " in message and "  2. " not in message
    assert says in message and f"{name}.py:" in message


# What a signature does not tell: (the module, its field, what the refusal says).
ON_SHAPES = {
    "raises": (
        f"{FLOW}):\n    raise KeyError('no such thing')",
        "dataflow",
        "fails on shapes; KeyError: 'no such thing'",
    ),
    "asks for a field that nothing fills": (
        f"{FLOW}):\n    batch.require('values', by='f')",
        "dataflow",
        "f needs batch field values",
    ),
    "misnames a field": (
        f"{FLOW}):\n    batch.replace(advantage=0)",
        "dataflow",
        "did you mean 'advantages'",
    ),
    "shape of a field": (
        f"{FLOW}):\n    batch = batch.replace(advantages=batch.scores){UPDATE}",
        "dataflow",
        "Batch.advantages has the wrong number of axes",
    ),
    "shape of an advantage": (
        "def f(batch):\n    return batch.scores",
        "algorithm.advantage",
        "returns the wrong shape: got (16,)",
    ),
    "an advantage that raises": (
        "def f(batch):\n    return batch.scores / None",
        "algorithm.advantage",
        "fails when it is called; TypeError",
    ),
    "a loss alone": (
        "def f(policy, batch):\n    return policy.logprobs",
        "algorithm.policy_loss",
        "returns the wrong things: got 'float32[16, 6]'; (loss, metrics)",
    ),
    "a loss and more": (
        "def f(policy, batch):\n    return policy.logprobs, {}, 1",
        "algorithm.policy_loss",
        ", dict, int)'; (loss, metrics)",
    ),
    "a loss without metrics": (
        "def f(policy, batch):\n    return policy.logprobs, None",
        "algorithm.policy_loss",
        "metrics are a dict of arrays",
    ),
    "a metric of text": (
        "def f(policy, batch):\n    return policy.logprobs, {'a': 'b'}",
        "algorithm.policy_loss",
        "metrics are a dict of arrays",
    ),
    "a mean as a metric": (
        "def f(policy, batch):\n    return policy.logprobs, {'x': policy.logprobs.mean()}",
        "algorithm.policy_loss",
        "returns a metric 'x', of the wrong shape: got ()",
    ),
    "a field that nobody fills": (
        "def f(policy, batch):\n    return policy.logprobs - batch.ref_logprobs, {}",
        "algorithm.policy_loss",
        "Fix: no stage has filled batch.ref_logprobs: @contract(reads=('ref_logprobs',)) on it",
    ),
    "a metric named by a number": (
        "def f(policy, batch):\n    return policy.logprobs, {3: policy.logprobs}",
        "algorithm.policy_loss",
        "returns a metric: got 3; the name of a metric is a text",
    ),
    "metrics of names that are taken": (
        "def f(policy, batch):\n    x = policy.logprobs\n"
        "    return x, {'step': x, 'reward/mean': x, 'pg_clipfrac': x, 'my/entropy': x}",
        "algorithm.policy_loss",
        "names that are taken: got 'step, reward/mean'; the run itself logs them",
    ),
    "a name of a dataflow that is taken": (
        f"{FLOW}):\n    return {{}}, {{'loss': 1.0, 'batch/tokens': 1.0, 'time/mine_s': 2.0}}",
        "dataflow",
        "names that are taken: got 'batch/tokens, time/mine_s'",
    ),
    "a loss of integers": (
        "def f(policy, batch):\n    return batch.tokens, {}",
        "algorithm.policy_loss",
        "a loss has a gradient",
    ),
    "no advantage": ("def f(batch): pass", "algorithm.advantage", "got 'NoneType'; array or ("),
    "three advantages": (
        "def f(batch): return (batch.rewards,) * 3",
        "algorithm.advantage",
        "array or (advantages, returns)",
    ),
    "a reduction of text": (
        "def f(batch): return 'mean'",
        "algorithm.reduction",
        "returns the wrong things: got 'str'; array",
    ),
    "a dataflow without metrics": (
        f"{FLOW}):\n    return {{'actor': actor}}",
        "dataflow",
        "returns the wrong things: got 'dict'; (new roles by name",
    ),
    "another role": (f"{FLOW}):\n    return {{'actor': 3}}, {{}}", "dataflow", "role 'actor'"),
    "a metric of rows": (
        f"{FLOW}):\n    return {{}}, {{'a': batch.scores}}",
        "dataflow",
        "metric 'a': got 'float32[16]'; a metric is one number",
    ),
    "a field of the policy": (
        "def f(policy, batch):\n    return policy.log_probs, {}",
        "algorithm.policy_loss",
        "Fix: did you mean 'logprobs'? The fields are logprobs, entropy, greedy, targets",
    ),
    "a field of the batch": (
        "def f(policy, batch):\n    return batch.advantage, {}",
        "algorithm.policy_loss",
        "Fix: did you mean 'advantages'? The fields are tokens, segment_ids",
    ),
    "a method of an array": (
        "def f(policy, batch):\n    return policy.logprobs.summ(), {}",
        "algorithm.policy_loss",
        "in f: return policy.logprobs.summ(), {}). Fix: did you mean 'sum'",
    ),
    "if": (
        "def f(policy, batch):\n    return 1 if policy.logprobs[0, 0] > 0 else 2, {}",
        "algorithm.policy_loss",
        "Fix: choose by jnp.where(condition, a, b)",
    ),
    "if of an array": (
        "def f(policy, batch):\n    return (1 if policy.logprobs > 0 else 2), {}",
        "algorithm.policy_loss",
        "Fix: choose by jnp.where(condition, a, b)",
    ),
    "numpy": (
        "import numpy\ndef f(batch):\n    return numpy.exp(batch.rewards)",
        "algorithm.advantage",
        "Fix: use jax.numpy in place of numpy",
    ),
    "float": (
        "def f(batch):\n    return float(batch.rewards[0, 0])",
        "algorithm.advantage",
        "Fix: keep values in arrays",
    ),
    "a name": (
        "def f(batch):\n    return rewards",
        "algorithm.advantage",
        "Fix: import or define 'rewards'",
    ),
    "shape of a loss": (
        "def f(policy, batch):\n    return policy.logprobs.mean(), {}",
        "algorithm.policy_loss",
        "returns the wrong shape: got ()",
    ),
}


# Said by the same line as another case.
SLOW = ("a loss and more", "a metric of text", "if of an array", "three advantages")


@pytest.mark.parametrize("case", lanes([name for name in ON_SHAPES if name not in SLOW], SLOW))
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
    assert says in str(error.value) and "\n" not in str(error.value)
    if field != "dataflow":
        assert f"{field}='{name}.f'" in str(error.value)
        assert f"{name}.py:" in str(error.value) and " f" in str(error.value)  # the place


@pytest.mark.parametrize(
    ("collect", "says"),
    [
        (
            "return None",
            "returns the wrong thing: got 'NoneType'; it returns rljax.rollout.Rollout",
        ),
        ("x = {}['answer']", "fails when it is called; KeyError: 'answer'"),
    ],
)
def test_what_is_wrong_with_a_users_rollout_is_one_line(collect, says, tmp_path, monkeypatch):
    name = f"users_rollout_{len(collect)}"
    header = "def f(prompts, key, cfg, *, actor, reward):\n    "
    (tmp_path / f"{name}.py").write_text(f"{header}{collect}")
    monkeypatch.syspath_prepend(tmp_path)
    component = resolve(f"{name}.f", "rljax.rollout")
    with pytest.raises(InputError) as error:
        run_rollout(component, None, None, None, actor=None, reward=None)
    message = str(error.value)
    assert f"algorithm.collect='{name}.f' {says}" in message and f"{name}.py:" in message


EMPTY = Batch(*(jnp.zeros((2, 3), t) for t in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("batch, None, None, {'note': 'text'}", "returns a metric 'note': got 'text'; a metric"),
        ("batch, None, None, {'rows': [1.0]}", "returns a metric 'rows': got [1.0]; a metric"),
        ("batch, None, None, {'loss': 1.0}", "names that are taken: got 'loss'"),
        ("batch, None, None, {1: 1.0}", "returns a metric: got 1; the name of a metric is a text"),
        ("batch, None, None, None", "got 'Rollout(Batch, NoneType, NoneType, NoneType)'"),
        ("None, batch, None, {}", "got 'Rollout(NoneType, Batch, NoneType, dict)'"),
    ],
)
def test_metrics_of_a_users_rollout_are_numbers_of_names_of_their_own(
    returned, says, tmp_path, monkeypatch
):
    name = f"users_metrics_{abs(hash(returned))}"
    text = "from rljax.rollout import Rollout\ndef f(prompts, key, cfg, *, batch):\n"
    (tmp_path / f"{name}.py").write_text(f"{text}    return Rollout({returned})")
    monkeypatch.syspath_prepend(tmp_path)
    component = resolve(f"{name}.f", "rljax.rollout")
    with pytest.raises(InputError) as error:
        run_rollout(component, None, None, None, batch=EMPTY)
    message = str(error.value)
    assert f"algorithm.collect='{name}.f'" in message and says in message
    assert f"{name}.py:" in message


def test_metrics_of_names_of_their_own_and_of_the_rules_pass(tmp_path, monkeypatch):
    text = "from rljax.rollout import Rollout\ndef f(prompts, key, cfg, *, batch):\n    "
    text += "return Rollout(batch, None, None, {'mine': 1, 'f/loss': batch.mask[0, 0], "
    (tmp_path / "users_good_metrics.py").write_text(text + "'collect/rounds': 2.0})")
    monkeypatch.syspath_prepend(tmp_path)
    component = resolve("users_good_metrics.f", "rljax.rollout")
    assert run_rollout(component, None, None, None, batch=EMPTY).metrics["mine"] == 1


def test_a_rollout_of_other_rows_than_the_step_has_is_refused():
    cfg = RolloutConfig(prompts_per_step=2, samples_per_prompt=4, sampling=None)
    once = resolve("once", "rljax.rollout")
    with pytest.raises(InputError) as error:
        check_rows(once, EMPTY, cfg)
    says = "algorithm.collect='once' returns the wrong number of rows: got 2; a step has "
    assert says + "prompts_per_step x samples_per_prompt = 2 x 4 = 8 rows" in str(error.value)
    check_rows(once, EMPTY, cfg.replace(samples_per_prompt=1))


# -- a reward is tried on a row of the data before anything is compiled

REWARDS = """
import json

def lacks_a_field(response, extra_info):
    return float(extra_info["answer"] == response)

def deep(response, ground_truth):
    return json.loads("{" + response)["x"]

def none(response): pass
def text(response): return "yes"
def nan(response): return float("nan")
def array(response): return [1.0]
def whole(response, ground_truth):
    assert response == ground_truth  # a mistake for most responses, not for all
    return 0.0
def bad_score(response): return -7.0
def down(response): raise ConnectionRefusedError("try later")
def of_group(responses): return [None for _ in responses]
def misnamed(response): return len(respons)
def not_installed(response): import nothing_of_this_name
def of_jax(response): import jax.numpy as jnp; return {"score": jnp.float32(1), "x": jnp.ones(())}
"""


@pytest.fixture(scope="module")
def rewards_tried(tmp_path_factory):
    """What the trial of a reward by name says: None, or the refusal."""
    folder = tmp_path_factory.mktemp("tried")
    (folder / "tried_rewards.py").write_text(REWARDS)
    built = build(tiny(folder))

    def trial(name):
        text = name if "(" in name else f"{folder / 'tried_rewards.py'}:{name}"
        with RewardPool(text, workers=1, timeout_s=30.0) as pool:
            reward = Reward(pool, built.tokenizer, built.model.mesh)
            own = dict(player=player_of(reward), reward=reward, eval_player=None)
            run = types.SimpleNamespace(setup=built, **own)
            try:
                try_rewards(run)
            except InputError as error:
                return str(error)

    return trial


@pytest.mark.parametrize(
    ("name", "says", "place"),
    [
        (
            "lacks_a_field",
            "error: KeyError: 'answer'",
            'tried_rewards.py:5, in lacks_a_field: return float(extra_info["answer"] == response)',
        ),
        ("deep", "JSONDecodeError", "tried_rewards.py:8, in deep: return json.loads("),
        ("none", "abstained: the reward returned None", "tried_rewards.py:10, def none)"),
        ("text", "'yes' (str) as 'score': no number", "tried_rewards.py:11, def text)"),
        ("nan", "not a finite number", "tried_rewards.py:12, def nan)"),
        ("array", "no number", "tried_rewards.py:13, def array)"),
        ("of_group", "returned None for this response", "tried_rewards.py:19, def of_group)"),
    ],
)
def test_a_reward_that_has_no_score_is_refused_with_its_line_and_the_sample(
    name, says, place, rewards_tried
):
    message = rewards_tried(name)
    assert "was tried on 3 rows of the data and has no score for an ordinary response" in message
    assert says in message and place in message
    assert "prompt '0>'; response '0'; ground_truth '0'" in message


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        (
            "lacks_a_field",
            "add 'answer' to the rows, or read one of the fields of this one: "
            "response, ground_truth, prompt, ",
        ),
        ("text", "return float(...)"),
        ("array", "return float(...)"),
        ("misnamed", "import or define 'respons'"),
        ("not_installed", "pip install nothing_of_this_name"),
        ("deep", "correct it: it returns a number, or a dict of numbers with 'score'"),
    ],
)
def test_the_fix_of_a_reward_is_of_what_it_raised_or_returned(name, fix, rewards_tried):
    message = rewards_tried(name)
    assert message.count("Fix: ") == 1 and f"Fix: {fix}" in message


@pytest.mark.parametrize(
    "name", ["whole", "bad_score", "down", "of_jax", "gsm8k(format_score=0.1)"]
)
def test_a_bad_score_one_mistake_and_a_server_that_is_down_are_not_refused(name, rewards_tried):
    assert rewards_tried(name) is None


@pytest.mark.slow
def test_a_run_whose_reward_raises_ends_before_anything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "tried.py").write_text(REWARDS)
    config = put(tiny(tmp_path), "reward.function", f"{tmp_path / 'tried.py'}:lacks_a_field")

    def heavy(*_, **__):
        raise AssertionError("weights were made")

    monkeypatch.setattr("rljax.setup.initial_params", heavy)
    with pytest.raises(InputError, match="tried on 3 rows.*tried.py:5, in lacks_a_field"):
        train(config)


@pytest.mark.slow
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


PREFERENCE_LOSSES = """
from rljax.contracts import contract

@contract(reads=("ref_logprobs", "scores"))
def above_mean(policy, batch, delta, *, beta: float = 0.1): ...

@contract(reads=("ref_logprobs", "scores"))
def alone(policy, batch, *, beta: float = 0.1): ...

@contract(reads=("ref_logprobs",), rows=2)
def of_pairs(policy, batch, *, beta: float = 0.1): ...
"""


@pytest.mark.parametrize(
    ("loss", "reader"), [("above_mean", "bco"), ("alone", "kto"), ("of_pairs", "preference")]
)
def test_the_dataflow_that_reads_a_loss_of_ones_own_is_named(loss, reader, tmp_path, monkeypatch):
    """By what the loss is handed and how many rows it reads, not by its name."""
    (tmp_path / "own_losses.py").write_text(PREFERENCE_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    config = put(tiny(tmp_path), "algorithm.preference_loss", f"own_losses.{loss}()")
    with pytest.raises(InputError, match=f"dataflow='{reader}', which reads algorithm.pref"):
        check_fields_read(build(config))
