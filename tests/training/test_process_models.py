"""Process reward models: learning, evaluation, dense rewards in PPO, and the whole pipeline."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPO
from rich.console import Console
from tiny_run import train_on_one

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.config.flags import config_module, load_config_file
from rljax.config.policy_options import LabelOptions
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.saved_labels import label_saved
from rljax.errors import InputError
from rljax.evaluation.process_models import (
    SavedScorer,
    evaluate_scorer,
    load_scorer,
    score_lines,
    score_table,
    step_metrics,
)
from rljax.rewards.pool.pool import Score
from rljax.roles import RewardModel
from rljax.rollout import ProcessScorer, Reward
from rljax.setup import RoleInputs, initial_params, step_separator_of
from rljax.setup import build as build_setup
from rljax.setup.rewards import _process_lines
from rljax.setup.role_table import scalar_start
from rljax.training.run import Run
from rljax.validation import validate

TINY = "decoder(layers=2, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
CHARS = CharTokenizer("abcd:#\n")
HOME = NAMESPACES["process_reward"]


def stepwise_rows(n, seed):
    """A line is wrong that holds another letter than the prompt, and so is all after it; comments
    say nothing."""
    rng = random.Random(seed)
    for index in range(n):
        letter, lines, labels, good = rng.choice("abcd"), [], [], True
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.2:
                lines.append("#" + rng.choice("abcd")), labels.append(0.0)
                continue
            good = good and rng.random() < 0.75
            other = rng.choice("abcd".replace(letter, ""))
            lines.append(letter + (letter if good else other))
            labels.append(1.0 if good else -1.0)
        yield dict(prompt=f"{letter}:", completions=lines, labels=labels, ended=True, index=index)


def write_rows(folder, **sizes):
    for seed, (split, n) in enumerate(sizes.items()):
        rows = stepwise_rows(n, seed)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def scorer_config(folder, seed=0) -> Config:
    config = Config(dataflow="process_reward_model", steps=150, model=TINY, seed=seed)
    config.tokenizer, config.run_dir = str(folder / "tokenizer"), str(folder / f"run{seed}")
    config.data.train = config.data.test = str(folder)
    config.model_settings.remat = "none"
    config.offline.examples_per_step, config.offline.max_tokens = 64, 24
    config.algorithm.reward_loss = "step_regression()"
    config.critic_optimizer.lr, config.critic_optimizer.beta2 = 5e-3, 0.99
    config.trackers, config.compilation_cache, config.checkpoint.every_steps = (), "", 0
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a process reward model, summary of its run, folder of its data)."""
    folder = tmp_path_factory.mktemp("scorer")
    CHARS.save(folder / "tokenizer")
    write_rows(folder, train=800, test=200)
    summary = train_on_one(scorer_config(folder))
    return folder / "run0" / "reward_model", summary, folder


@pytest.mark.slow
def test_a_process_reward_model_learns_labelled_lines(trained):
    folder, summary, data = trained
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["eval/mse"] > 0.5 and after["eval/mse"] < 0.1
    assert before["eval/sign_accuracy"] < 0.8 and after["eval/sign_accuracy"] > 0.9
    found = evaluate_scorer(folder, str(data))
    # The exported model, read alone, is the trained one.
    assert found["metrics"]["mse"] == pytest.approx(after["eval/mse"], abs=1e-4)
    assert found["metrics"]["sign_accuracy"] == pytest.approx(after["eval/sign_accuracy"], abs=1e-4)
    assert found["metrics"]["neutral_size"] < 0.3  # comments earn nothing
    assert len(found["rows"]) == 200


def test_a_run_of_step_classification_counts_no_neutral_step(tmp_path):
    """The zero head calls every step wrong, as one of the two lines with a sign is."""
    CHARS.save(tmp_path / "tokenizer")
    rows = [dict(prompt="a:", completions=["aa", "#b", "#c", "ab"], labels=[1, 0, 0, -1])] * 2
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = scorer_config(tmp_path)
    config.algorithm.reward_loss = "step_classification()"
    config.data.test, config.steps, config.offline.examples_per_step = "", 1, 2
    train_on_one(config)
    line = json.loads((tmp_path / "run0" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["accuracy"] == 0.5 and line["loss"] == pytest.approx(np.log(2))


@pytest.mark.slow
def test_a_model_fitted_through_tanh_scores_with_tanh(trained, tmp_path):
    """In evaluation, from its folder, and as the start of a critic: never with the raw s."""
    config = scorer_config(trained[2], seed=1)
    config.algorithm.reward_loss = "step_regression(squash='tanh')"
    config.run_dir, config.steps = str(tmp_path / "run"), 40
    after = train_on_one(config)["eval_after"]
    folder = tmp_path / "run" / "reward_model"
    assert json.loads((folder / "config.json").read_text())["score_squash"] == "tanh"
    found = evaluate_scorer(folder, str(trained[2]))
    scores = np.concatenate([row["scores"] for row in found["rows"]])
    assert 0.5 < np.abs(scores).max() < 1
    assert found["metrics"]["mse"] == pytest.approx(after["eval/mse"], abs=1e-4)
    scorer = load_scorer(folder)
    raw = dataclasses.replace(
        scorer.model, config=dataclasses.replace(scorer.model.config, squash="none")
    )
    tokens = jnp.asarray([CHARS.encode("a:aa\nab\n")] * 8)
    batch = batch_from_rows(tokens, jnp.full(8, 8), jnp.ones(tokens.shape))
    before = raw.token_scores(scorer.params, batch)
    assert float(jnp.abs(before).max()) > 1
    role = RewardModel(SimpleNamespace(weights=scorer.params), scorer.model, None)
    np.testing.assert_allclose(role.step_scores(batch), jnp.tanh(before[..., 0]), atol=1e-6)
    np.testing.assert_allclose(role.scores(batch), jnp.tanh(before[:, -1, 0]), atol=1e-6)
    critic = Config(model=TINY, critic_model=str(folder))
    policy = dataclasses.replace(scorer.model, head="lm")
    inputs = RoleInputs(
        "critic", SimpleNamespace(config=critic, model=policy, tokenizer=CHARS), None, {}
    )
    model, params = scalar_start(inputs)
    np.testing.assert_allclose(
        model.values(params, batch)[:, 1:], jnp.tanh(before[:, :-1, 0]), atol=1e-6
    )


@pytest.mark.slow
def test_scores_of_a_growing_prefix_are_those_of_the_final_text(trained):
    scorer = load_scorer(trained[0])
    lines = ["aa", "#b", "aa", "ab", "ad"]
    whole = score_lines(scorer, "a:", lines)
    assert len(whole) == 5
    for n in range(1, 5):
        np.testing.assert_allclose(score_lines(scorer, "a:", lines[:n]), whole[:n], atol=1e-5)
    assert min(whole[0], whole[2]) > 0.5 and max(whole[3:]) < -0.5 and abs(whole[1]) < 0.4
    # The end token is read in place of the last newline; the lines before it stay what they are.
    ended = score_lines(scorer, "a:", lines, ended=True)
    np.testing.assert_allclose(ended[:-1], whole[:-1], atol=1e-5)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(score_table(lines, whole, [1, 0, 1, -1, -1]))
    shown = [line.split() for line in console.export_text().splitlines()]
    for line, score in zip(lines, whole, strict=True):
        assert any(line in cells and f"{score:+.2f}" in cells for cells in shown)


def test_step_metrics():
    labels = [np.array([1.0, 0.0, -1.0]), np.array([1.0])]
    scores = [np.array([0.5, 0.2, 0.1]), np.array([2.0])]
    found = step_metrics(scores, labels)
    assert found["mse"] == pytest.approx((0.25 + 0.04 + 1.21 + 1.0) / 4)
    assert found["mse_clipped"] == pytest.approx((0.25 + 0.04 + 1.21) / 4)
    assert found["sign_accuracy"] == pytest.approx(2 / 3) and found["neutral_size"] == 0.2
    assert found["lines"] == 4 and found["positive_fraction"] == pytest.approx(2 / 3)


# -- the dense reward --


class Fixed:
    """A pool whose scores are given; None = the reward failed."""

    def __init__(self, values):
        self.values = values

    def score(self, samples):
        assert len(samples) == len(self.values)
        return [
            Score(np.nan, {}, "error", 0.0, "no") if v is None else Score(v, {}, "ok", 0.0)
            for v in self.values
        ]

    def close(self):
        pass


def sampled(texts, finish, mesh):
    """Prompts "a:" and responses, as the sampler hands them over."""
    ids = [[*CHARS.encode(t), *([] if f else [1])] for t, f in zip(texts, finish, strict=True)]
    width, prompt = 2 + max(map(len, ids)) + 1, CHARS.encode("a:")
    tokens, mask = np.zeros((len(ids), width), np.int32), np.zeros((len(ids), width), np.float32)
    for row, of in enumerate(ids):
        tokens[row, : 2 + len(of)] = [*prompt, *of]
        mask[row, 2 : 2 + len(of)] = 1
    lengths = np.array([2 + len(of) for of in ids], np.int32)
    batch = batch_from_rows(
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jnp.asarray(mask),
        group=jnp.zeros(len(ids), jnp.int32),
        finish_reason=jnp.asarray(finish, jnp.int32),
    )
    record = PromptRecord(
        token_ids=np.array(prompt),
        prompt_text="a:",
        ground_truth="",
        data_source="toy",
        extra_info={},
        index=0,
    )
    return batch, Prompts.from_records([record], length=2)


def scoring(scorer: SavedScorer, values, lines="line_ids()", reward="dense_step_rewards()"):
    parts = dict(lines=resolve(lines, HOME), reward=resolve(reward, HOME))
    process = ProcessScorer(scorer.model, scorer.params, 2, CHARS, **parts)
    return Reward(Fixed(values), CHARS, scorer.model.mesh, process)


@pytest.mark.slow
def test_lines_of_sampled_tokens_are_scored_and_rewarded(trained):
    scorer = load_scorer(trained[0])
    texts = ["aa\nab\naa", "aa\n#b\naa", "aa\naa", "bb\n"]
    batch, prompts = sampled(texts, [0, 0, 1, 0], scorer.model.mesh)
    reward = scoring(scorer, [-1.0, 1.0, -1.0, None])
    got, report = reward(batch, prompts)
    got = jax.device_get(got)
    want = np.zeros_like(got.rewards)
    for row, (ends, ended, weight) in enumerate(
        [((4, 7, 10), True, 0.25), ((4, 7, 10), True, 0.025), ((4,), False, 0.25)]
    ):
        scores = score_lines(scorer, "a:", texts[row].split("\n")[: len(ends)], ended=ended)
        for end, score in zip(ends, scores, strict=True):
            want[row, end] += weight * np.clip(score, -1, 1) / len(ends)
            assert got.process_rewards[row, end] == pytest.approx(score, abs=1e-5)
    outcome = [-1.0, 1.0, -1.0, 0.0]
    for row, last in enumerate([10, 10, 6]):
        want[row, last] += outcome[row]
    np.testing.assert_allclose(got.rewards, want, atol=1e-5)
    assert got.scores.tolist() == outcome  # the outcome's alone
    assert not got.mask[3].any() and not got.step_ids[3].any()  # its reward failed
    assert (got.process_rewards != 0).sum() == 7
    counts = report.metrics()
    assert counts["process/lines"] == pytest.approx(7 / 4) and counts["process/finite"] == 1.0
    assert counts["process/dense_sum"] == pytest.approx(
        float((want.sum(axis=1) - outcome).mean()), abs=1e-5
    )
    assert counts["reward/source/toy"] == pytest.approx(-1 / 3)
    plain = reward.outcome_alone()
    assert plain(batch, prompts)[0].step_ids is None and reward.process is not None


@pytest.mark.slow
def test_coefficients_and_rules_of_lines_are_the_configs(trained):
    scorer = load_scorer(trained[0])
    batch, prompts = sampled(["aa\naa"], [1], scorer.model.mesh)
    text = "dense_step_rewards(lambda_fail=0.5, lambda_pass=0.0)"
    lines = "line_ids(score_partial_line=True)"
    got = scoring(scorer, [-1.0], lines, text)(batch, prompts)[0]
    added = float(jnp.sum(got.rewards)) + 1.0
    scores = np.asarray(got.process_rewards[0, [4, 6]])
    assert added == pytest.approx(0.5 * np.clip(scores, -1, 1).mean(), abs=1e-5) and added > 0.1
    got = scoring(scorer, [1.0], lines, text)(batch, prompts)[0]
    assert float(jnp.sum(got.rewards)) == 1.0
    with pytest.raises(InputError, match="lambda_fail"):
        scoring(scorer, [1.0], lines, "dense_step_rewards(lambda_fail=-1.0)")(batch, prompts)


def test_a_learner_that_reads_no_token_rewards_is_refused(tmp_path):
    config = load_config_file(str(REPO / "configs" / "presets" / "grpo.py") + ":tiny")
    config.reward.process_model = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="reads no rewards of single tokens"):
        validate(config)
    config.algorithm.advantage = "group_process()"
    validate(config)
    config = load_config_file(str(REPO / "configs" / "presets" / "ppo.py") + ":tiny")
    config.reward.process_model = str(tmp_path)
    validate(config)
    config.reward.process_reward = "dense_step_rewards(lambda=1)"
    config.reward.process_lines = "line_end()"
    with pytest.raises(InputError) as error:
        validate(config)
    assert "reward.process_reward" in str(error.value)
    assert "reward.process_lines" in str(error.value)
    config = scorer_config(tmp_path)
    config.reward.process_model = str(tmp_path)
    with pytest.raises(InputError, match="nothing for it to do"):
        validate(config)


# -- the whole pipeline --


def small(config: Config, run_dir, task) -> Config:
    """The experiment of configs/prm_programs.py, in seconds."""
    config.run_dir, config.trackers, config.compilation_cache = str(run_dir), (), ""
    config.data.train = task if config.dataflow == "ppo" else config.data.train
    config.reward.workers, config.samples_every_steps = 1, 1
    config.evaluate.prompts, config.evaluate.every_steps = 8, 0
    config.batch.prompts_per_step = 8
    config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 2, 16
    return config


@pytest.mark.slow
def test_from_a_policy_to_ppo_with_its_process_reward_model(tmp_path):
    """SFT -> labels of two checkpoints -> reward model -> PPO with both switches."""
    file = str(REPO / "configs" / "prm_programs.py")
    module = config_module(file)
    task = (
        "program_synthesis(lines=3, max_constant=5, operations='+-', prompts=2000, "
        "worked_examples=64, test=8)"
    )

    def config(variant, name):
        return small(module.get_config(variant, str(tmp_path)), tmp_path / name, task)

    start = config("start", "start")
    start.model, start.sft.steps, start.sft.optimizer.lr = TINY, 25, 5e-3
    train_on_one(start)
    baseline = config("", "baseline")
    baseline.steps, baseline.checkpoint.every_steps = 4, 2
    train_on_one(baseline)
    names = (f"{tmp_path}/baseline@2", f"{tmp_path}/baseline@4")
    result = label_saved(
        LabelOptions(
            names,
            f"{tmp_path}/steps",
            prompts=24,
            programs_per_prompt=2,
            completions=2,
            held_out=0.25,
            replay=True,
            rows_at_once=64,
        )
    )
    rows = [
        json.loads(line)
        for split in ("train", "test")
        for line in (tmp_path / "steps" / f"{split}.jsonl").read_text().splitlines()
    ]
    assert {row["source"] for row in rows} == set(names)
    assert {row["source_step"] for row in rows} == {2, 4}
    assert len(rows) == sum(result["rows"].values()) > 20 and min(result["rows"].values()) > 0
    parts = [{r["index"] for r in rows[: result["rows"]["train"]]}]
    parts += [{r["index"] for r in rows[result["rows"]["train"] :]}]
    assert not parts[0] & parts[1]  # prompts that are held out are held out of both checkpoints
    for found in result["checkpoints"].values():
        assert found["labels/probes_per_program"] <= 2  # log2(3 lines + 1)
        assert {"replay/flips", "labels/never_rejected", "cost/completions_per_s"} <= found.keys()
    scorer = config("scorer", "scorer")
    scorer.steps, scorer.offline.examples_per_step = 4, 16
    scorer.model = f"{tmp_path}/start/policy"
    train_on_one(scorer)
    folder = str(tmp_path / "scorer" / "reward_model")

    both = config("", "both")
    both.steps, both.reward.process_model, both.critic_model = 2, folder, folder
    loaded = load_scorer(Path(folder))
    validate(both)
    with Run(build_setup(both, jax.devices()[:1]), tmp_path / "probe") as run:
        run.begin(run.setup.main, initial_params(both, run.setup.model))
        critic = run.roles["critic"].state.params
        assert jax.tree.structure(critic) == jax.tree.structure(loaded.params)
        for a, b in zip(jax.tree.leaves(critic), jax.tree.leaves(loaded.params), strict=True):
            assert np.array_equal(a, b)
        assert float(jnp.abs(critic["head"]).max()) > 0  # not a fresh head
    assert train_on_one(both)["status"] == "finished"
    last = json.loads((tmp_path / "both" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["process/lines"] > 0 and last["process/finite"] == 1.0
    assert last["process/dense_sum"] != 0 and 0 < last["process/share_of_return"] < 0.25
    # One switch says nothing of the other.
    both.reward.process_model = ""
    with Run(build_setup(both, jax.devices()[:1]), tmp_path / "values") as run:
        assert run.reward.process is None
    both.reward.process_model, both.critic_model = folder, ""
    with Run(build_setup(both, jax.devices()[:1]), tmp_path / "dense") as run:
        run.begin(run.setup.main, initial_params(both, run.setup.model))
        assert run.reward.process is not None and run.eval_player.reward.process is None
        assert not np.any(run.roles["critic"].state.params["head"])


def test_the_separator_is_that_of_the_folder_or_of_the_run_beside(tmp_path):
    (tmp_path / "reward_model").mkdir()
    model_config = tmp_path / "reward_model" / "config.json"
    model_config.write_text("{}")
    for text, separator in (
        ("{}", "\n"),
        ('{"offline": {"step_separator": " ki "}}', " ki "),
        ('{"model_type": "llama", "offline": {"step_separator": ">"}}', "\n"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert step_separator_of(tmp_path / "reward_model") == separator
    model_config.write_text('{"step_separator": ";"}')
    assert step_separator_of(tmp_path / "reward_model") == ";"


def test_lines_end_where_the_steps_of_the_process_model_did(tmp_path):
    config, texts = Config(), [["a", ";", " b", "\n", "c", "; "]]
    config.reward.process_model = str(tmp_path)
    for separator, steps in (("\n", [1, 1, 1, 1, 2, 2]), (";", [1, 1, 2, 2, 2, 2])):
        (tmp_path / "config.json").write_text(json.dumps({"step_separator": separator}))
        lines = _process_lines(config)
        assert lines(texts, np.ones((1, 6)), [False])[0].tolist() == steps
    (tmp_path / "config.json").write_text('{"step_separator": ""}')
    with pytest.raises(InputError, match="no text tells where a step ends"):
        _process_lines(config)
    config.reward.process_lines = "line_ids(separator='\\n')"  # the user's own word
    assert _process_lines(config).options["separator"] == "\n"
