"""Runs of Safe-RLHF: the constraint holds where the reward pulls the other way, a kill in the
middle changes nothing, and a trained cost model says what samples cost."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import REPO
from preset_runs import preset_config
from tiny_run import checkpoint_bytes, metrics_rows, tiny_config, train_on_one

from rljax import setup as build
from rljax.config.flags import load_config_file
from rljax.errors import InputError
from rljax.training import train
from rljax.training.run import Run
from rljax.training.sources import draw_pretraining
from rljax.validation import validate

PARTS = '''
import os
import signal
from pathlib import Path

from rljax.rewards import sequence_match


def prefers_a(response):
    """1 for "a", which is unsafe, 0.5 for "b"."""
    said = response.strip()
    return {"score": {"a": 1.0, "b": 0.5}.get(said, 0.0), "cost": 1.0 if "a" in said else -1.0}


def priced(response, ground_truth):
    """A cost of the first digit; ends the run at the call that the file `kill` names, once."""
    note = Path(__file__).with_name("kill")
    if note.exists():
        left = int(note.read_text()) - 1
        note.write_text(str(left)) if left else note.unlink()
        if not left:
            os.kill(os.getppid(), signal.SIGKILL)
    score = sequence_match(response, ground_truth, partial=0.5)
    return {"score": score, "cost": 1.0 if response[:1] in tuple("56789") else -1.0}
'''


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "safe_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "safe_parts", raising=False)
    return tmp_path


def toy(run_dir, seed: int, multiplier: str):
    config = preset_config("safe_rlhf", seed)
    config.roles = (config.roles[0], f"multiplier=lagrange_multiplier({multiplier})")
    config.reward.function = "safe_parts.prefers_a"
    config.data.test, config.evaluate.reward = "", "exact_match()"
    config.steps, config.export, config.trackers = 80, False, ()
    config.checkpoint.every_steps, config.run_dir = 0, str(run_dir)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_reward_prefers_what_is_unsafe(parts, tmp_path, seed):
    """Unsafe in at most 0.05 of the samples where lambda learns, in 0.8 or more where it is 0.
    Costs are 1 and -1: a mean of -0.95 allows 0.025."""
    learned, fixed = tmp_path / "learned", tmp_path / "fixed"
    train_on_one(toy(learned, seed, "threshold=-0.95"))
    train_on_one(toy(fixed, seed, "initial=0.0, lr=0.0"))
    last = {
        folder.name: [r for r in metrics_rows(folder) if r["phase"] == "rl"][-10:]
        for folder in (learned, fixed)
    }
    unsafe = {
        name: np.mean([row["cost/unsafe_fraction"] for row in rows]) for name, rows in last.items()
    }
    assert unsafe["learned"] <= 0.05 and unsafe["fixed"] >= 0.8, unsafe
    assert all(row["multiplier/lambda"] == 0 for row in last["fixed"])
    rewards = np.mean([row["reward/mean"] for row in last["learned"]])
    assert rewards > 0.4, rewards  # the best that is safe is 0.5


def tiny(run_dir, **fields):
    given = dict(
        dataflow="safe_rlhf()",
        steps=4,
        sft__steps=0,
        evaluate__every_steps=0,
        roles=("cost_critic=trained_values(lr=1e-3)", "multiplier=lagrange_multiplier(window=24)"),
        algorithm__advantage="gae(lam=0.95, whiten=False)",
        algorithm__kl_in_reward=0.05,
        checkpoint__every_steps=1,
        reward__function="safe_parts.priced",
        pretraining__data="sort_digits(digits=5)",
        pretraining__coef=0.5,
        pretraining__sequences_per_optimizer_step=8,
    )
    return tiny_config(run_dir, **{**given, **fields})


@pytest.mark.slow
def test_a_kill_in_the_middle_changes_nothing(parts, tmp_path):
    """Both critics, the window of the multiplier, the order of the pre-training examples."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(tiny(whole)).summary["status"] == "finished"
    rows = metrics_rows(whole)
    assert all(row["pretraining_loss"] > 0 and row["cost_critic/grad_norm"] > 0 for row in rows)
    lambdas = [row["multiplier/lambda"] for row in rows]
    assert lambdas[0] == 1 and len({*lambdas[1:]}) == 3  # 16 samples, then a full window
    (parts / "kill").write_text(str(16 + 16 * 3 - 4))  # evaluation, then in the reward of step 3
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import test_safe_rlhf_runs as t\n"
        "from rljax.training import train\n"
        "train(t.tiny(sys.argv[1]))\n"
    )
    paths = [
        str(parts),
        str(REPO),
        str(REPO / "tests"),
        str(REPO / "tests/helpers"),
        str(REPO / "tests/training"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(killed), *paths],
        cwd=parts,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert train(tiny(killed)).summary["status"] == "finished"
    assert metrics_rows(killed) == rows
    arrays = checkpoint_bytes(whole, 4)
    assert arrays == checkpoint_bytes(killed, 4)
    for name in ("actor", "critic", "cost_critic", "multiplier", "reference", "pretraining"):
        assert any(path.startswith(f"['{name}']") for path in arrays), name


@pytest.mark.slow
def test_the_folder_of_a_cost_model_says_what_samples_cost(tmp_path):
    """The wrong letter is unsafe: the trained model says so of the policy's own samples."""
    config = load_config_file(str(REPO / "configs" / "offline" / "cost_model.py") + ":tiny")
    config.run_dir, config.trackers, config.compilation_cache = str(tmp_path / "cm"), (), ""
    config.steps = 150
    found = train_on_one(config)["eval_after"]
    assert found["eval/accuracy"] > 0.9 and found["eval/sign_accuracy"] > 0.9, found
    config = preset_config("safe_rlhf")
    config.reward.function = "exact_match()"
    config.reward.cost_model = str(tmp_path / "cm" / "reward_model")
    config.data.train = "letter_feedback(letters=3, kinds=4)"  # one alphabet for both
    with Run(build.build(config, jax.devices()[:1]), tmp_path / "rl") as run:
        run.begin(run.phase, build.initial_params(config, run.setup.model))
        for _ in range(config.sft.steps):  # until most answers are one letter, as the labelled are
            run.step()
        run.begin(run.setup.main, run.roles["actor"].state.params)
        batch, metrics = run.source.next(0, run.roles)
    tokens, costs, scores = jax.device_get((batch.mask.sum(1), batch.costs.sum(1), batch.scores))
    letter = tokens == 2
    agree = (costs > 0) == (scores == 0)
    assert letter.sum() > 30 and agree[letter].mean() > 0.9, (letter.sum(), agree[letter].mean())
    assert metrics["reward/part/cost"] == pytest.approx(costs.mean(), rel=1e-4)


@pytest.mark.slow
def test_examples_go_on_where_they_were(parts, tmp_path):
    """A source of its own, whose position is in the checkpoint: nothing is drawn twice."""
    plain = dict(reward__function="sequence_match(partial=0.5)", dataflow="ppo()", roles=())
    config = tiny(tmp_path / "run", **plain)
    setup = build.build(config, jax.devices()[:1])
    assert setup.pretraining_rows == 16 and setup.pretraining.rows == 8  # two optimizer steps

    def drawn(run, count):
        roles = dict(run.roles)
        found = []
        for step in range(count):
            metrics = draw_pretraining(run.sources, step, roles)
            batch = jax.device_get(roles["pretraining"].state)
            assert batch.mask.any(axis=1).all() and metrics["pretraining/tokens"] > 8
            found.append(batch.tokens)
        return found

    with Run(setup, tmp_path / "run") as run:
        run.begin(run.setup.main, run.setup.model.init(jax.random.key(0)))
        assert run.roles["pretraining"].state.tokens.shape[0] == 16
        every = drawn(run, 2)
        state = json.loads(json.dumps(run.sources["pretraining"].get_state()))
        every += drawn(run, 2)
    with Run(setup, tmp_path / "run") as again:
        again.begin(again.setup.main, again.setup.model.init(jax.random.key(0)))
        again.sources["pretraining"].set_state(state)
        np.testing.assert_array_equal(drawn(again, 2), every[2:])
    texts = {tuple(row) for batch in every for row in batch}
    assert len(texts) == 64  # of an epoch


REFUSED = [
    (
        dict(
            dataflow="remax", roles=(), algorithm__advantage="remax()", algorithm__kl_in_reward=0.0
        ),
        "takes no `pretraining`",
    ),
    (dict(pretraining__coef=0.0), "pretraining.coef"),
    (dict(pretraining__coef=1.5, pretraining__mixed=True), "with pretraining.mixed it is a share"),
    (dict(pretraining__loss="ppo_clip()"), "the log-probs of its tokens"),
    (dict(pretraining__schedule="cosine(final=2.0)"), "pretraining.schedule"),
    (dict(pretraining__sequences_per_optimizer_step=0), "pretraining.sequences_per_optimizer_step"),
    (dict(pretraining__data="no_such_task()"), "no_such_task"),
    (dict(dataflow="ppo()", roles=(), reward__cost_model="."), "reads no costs"),
    (dict(reward__cost_model="/no/such/folder"), "is not a folder"),
    (dict(environment__function="tools()"), "the cost of every response"),
    (dict(roles=("cost_critic=trained_values()",)), "multiplier"),
    (dict(algorithm__advantage="reinforce()"), "gives no returns for the critic"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_does_not_fit_is_refused(parts, tmp_path, fields, says):
    with pytest.raises(InputError) as error:
        validate(tiny(tmp_path / "run", **fields))
    assert says in str(error.value), error.value


@pytest.mark.parametrize(
    "option", ["initial=-1.0", "initial=6.0", "lr=-0.1", "maximum=0.0", "window=0"]
)
def test_a_multiplier_that_cannot_be_is_refused(parts, tmp_path, option):
    config = tiny(
        tmp_path / "run",
        roles=("cost_critic=trained_values()", f"multiplier=lagrange_multiplier({option})"),
    )
    with pytest.raises(InputError, match=r"lagrange_multiplier\("):
        build.abstract_roles(build.build(config, jax.devices()[:1]))


@pytest.mark.slow
def test_a_reward_without_a_cost_is_named_before_the_first_step(parts, tmp_path):
    config = tiny(tmp_path / "run", reward__function="sequence_match()")
    with pytest.raises(InputError, match="no part 'cost'"):
        train(config, devices=jax.devices()[:1])


def test_settings_without_pretraining_data_are_warned_of(parts, tmp_path):
    config = tiny(tmp_path / "run", pretraining__data="")
    assert any("pretraining.coef" in warning for warning in validate(config))
