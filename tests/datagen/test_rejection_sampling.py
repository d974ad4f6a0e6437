"""Rejection sampling: selection against worked examples, files against what training reads of them,
process scores against rewards whose pass rates are known, and RAFT's mean reward."""

import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import worked_example
from tiny_run import train_on_one

from rljax.batch import Batch
from rljax.config import Config
from rljax.config.declare import check_options
from rljax.config.policy_options import RejectionOptions
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.default_rewards import reads_reference
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen import rejection
from rljax.datagen.rejection import (
    best_and_worst,
    best_of_n_kl,
    meta_path,
    raft,
    rejection_sample,
    select,
    selection_metrics,
)
from rljax.datagen.trajectories import centred_scores, lines_of, trajectories_of
from rljax.errors import InputError
from rljax.policies import load_policy
from rljax.policies.sampling import Completion
from rljax.rewards import last_line
from rljax.tasks import running_sum

# -- selection --


@pytest.mark.smoke
def test_selection_worked_example():
    example = worked_example("raft.select")
    rewards, want = example["inputs"]["rewards"], example["outputs"]
    bound, texts = example["params"]["min_reward"], list("abcd")
    assert [select(row, texts)[0] for row in rewards] == want["best_index"]
    best = [row[select(row, texts)[0]] for row in rewards]
    np.testing.assert_allclose(best, want["best_reward"])
    strict = [select(row, texts, min_reward=bound) for row in rewards]
    assert [bool(picks) for picks in strict] == want["keep_strict"]
    pairs = [best_and_worst(row) for row in rewards]
    assert [p and list(p) for p in pairs] == want["pairs_best_worst"]
    kept = [select(row, texts) for row in rewards]
    falses = [[False] * 4] * 3
    found = selection_metrics(rewards, [texts] * 3, kept, falses, method="best")
    assert found["mean_reward_selected"] == pytest.approx(want["mean_best"], abs=1e-6)
    assert found["mean_reward_all"] == pytest.approx(want["mean_all"], abs=1e-6)
    assert found["kl_bound"] == pytest.approx(best_of_n_kl(4))


def test_best_of_n_kl_worked_example():
    example = worked_example("raft.bon_kl")
    found = [best_of_n_kl(n) for n in example["inputs"]["n"]]
    np.testing.assert_allclose(found, example["outputs"]["kl"], rtol=1e-5)


def test_what_each_method_keeps():
    rewards, texts = [0.5, 1.0, 0.5, 1.0, 0.0, math.nan], ["a", "b", "a", "b", "c", "d"]
    assert select(rewards, texts) == [1]
    assert select(rewards, texts, method="top_k", top_k=3) == [1, 0, 4]
    assert select(rewards, texts, method="top_k", top_k=3, dedup=False) == [1, 3, 0]
    assert select(rewards, texts, method="threshold", min_reward=0.0) == [1, 0]
    every = dict(method="threshold", min_reward=0.0, dedup=False)
    assert select(rewards, texts, **every) == [1, 3, 0, 2]
    assert select(rewards, texts, **every, per_prompt=3) == [1, 3, 0]
    assert select(rewards, texts, min_reward=1.0) == []  # strict
    whole = [True, False, True, False, True, True]
    assert select(rewards, texts, eligible=whole) == [0]
    assert best_and_worst(rewards, whole) == (0, 4)
    assert best_and_worst([0.5, math.nan, 0.5]) is None and best_and_worst([math.nan]) is None
    found = selection_metrics([rewards], [texts], [[1]], [[False] * 5 + [True]], method="top_k")
    assert found["acceptance_rate"] == pytest.approx(1 / 6) and "kl_bound" not in found
    assert found["unique_fraction"] == pytest.approx(4 / 6) and found["failed_rewards"] == 1
    assert found["mean_reward_all"] == pytest.approx(3.0 / 5)
    with pytest.raises(InputError, match="min_reward is the bound"):
        select(rewards, texts, method="threshold")


def test_of_samples_without_a_text_the_next_best_is_taken():
    """SFT cannot learn an empty answer, and a prompt that has no other is counted."""

    def sample(prompt, text, reward, finish="stop"):
        return Completion(prompt, text, (), (), finish, reward)

    groups = [
        [sample(0, " ", 1.0), sample(0, "b", 0.5), sample(0, "c", 0.7, "length")],
        [sample(1, "", 1.0), sample(1, "\n", 0.5), sample(1, "d", 0.1, "length")],
    ]
    selected, metrics = rejection._select(groups, RejectionOptions("run", "out.jsonl", samples=3))
    assert selected == [[1], []] and metrics["prompts_without_any"] == 0.5
    assert metrics["acceptance_rate"] == 1 / 6


def test_samples_that_are_no_trajectories_are_counted_with_the_reason(caplog):
    tokenizer = CharTokenizer("ab>")
    ids = np.array(tokenizer.encode("a>"), np.int32)
    policy, prompt = SimpleNamespace(tokenizer=tokenizer), PromptRecord("a>", ids, "", "", {}, 0)

    def sample(text, reward=1.0, more=()):
        answer = (*tokenizer.encode(text), *more, tokenizer.eos_ids[0])
        return Completion(0, text, answer, (-0.5,) * len(answer), "stop", reward)

    whole, other = sample("ab"), sample("a", more=(tokenizer.encode("b")[0],))
    samples = [whole, other, other, sample(""), sample("b", math.nan)]
    with caplog.at_level("WARNING", "rljax"):
        rows, _ = trajectories_of(policy, [prompt], None, [whole], jax.random.key(0))
        assert len(rows) == 1 and not caplog.messages
        rows, counts = trajectories_of(policy, [prompt], None, samples, jax.random.key(0))
        trajectories_of(policy, [prompt], None, [other], jax.random.key(0))
    assert len(rows) == counts["kept"] == 1 and counts["encoded_otherwise"] == 2
    some, none = caplog.messages
    assert some.startswith("4 of 5 samples are left out of the trajectories: 2 whose text does not")
    assert some.endswith(", 1 without a text, 1 whose reward failed")
    assert none.startswith("1 of 1 samples are left out of the trajectories, of which there are no")


def test_prompts_alone_are_enough_for_a_reward_that_reads_no_answer(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for reward in ("light_rewards.begins_even", "reward_model()", "", "gsm8k()"):
        need = reads_reference([reward])
        assert need is (reward == "gsm8k()"), reward
        if need:
            with pytest.raises(InputError, match="lacks the column 'ground_truth'"):
                load_prompts(str(path), "train", need_ground_truth=need)
        else:
            assert len(load_prompts(str(path), "train", need_ground_truth=need)) == 2


def test_every_flag_that_is_wrong_is_named():
    with pytest.raises(InputError) as error:
        check_options(
            RejectionOptions(
                "",
                "a.txt",
                samples=0,
                select="threshold",
                top_k=0,
                process_samples=2,
                temperature=0.0,
                pairs="b",
                seed=-1,
            )
        )
    for flag in (
        "checkpoint",
        "out",
        "samples",
        "min_reward",
        "top_k",
        "process_samples",
        "temperature",
        "pairs",
        "seed",
    ):
        assert f"--{flag}=" in str(error.value), flag


@pytest.mark.parametrize("text", ["1\n2\n3", "\n1\n\n2\n", "1", "", "\n\n", " \n1", "1\n \n2"])
def test_steps_joined_are_the_text(text):
    steps = lines_of(text)
    assert "\n".join(steps) == text
    assert all(step.strip() for step in steps) or not text.strip()
    assert len(steps) == max(sum(bool(line.strip()) for line in text.split("\n")), 1)


# -- the task --


def test_running_sum():
    task = running_sum(terms=3, modulus=7, prompts=200, test=40, worked_examples=20)
    prompts = {r["prompt"] for r in task.train}
    assert len(task.test) == 40 and not prompts & {r["prompt"] for r in task.test}
    for example in task.worked_examples:
        a, b, c = map(int, example["prompt"].rstrip(">"))
        assert example["completion"] == f"{(a + b) % 7}\n{(a + b + c) % 7}"
    truth = {r["prompt"]: r["ground_truth"] for r in task.train}
    for example in task.worked_examples:
        answer = truth[example["prompt"]]
        assert last_line(example["completion"], answer) == 1.0
        assert last_line(example["completion"] + "\n9", answer) == 0.0
    assert last_line("", "1") == last_line("\n \n", "1") == 0.0
    assert last_line("0\n1\n\n", "1") == 1.0


# -- files --


def base_config(folder) -> Config:
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)",
        dataflow="sft",
        steps=30,
        run_dir=str(folder),
        trackers=(),
        compilation_cache="~/.cache/rljax/tests",
    )
    config.mesh.data = config.mesh.fsdp = 1
    config.data.train = "running_sum(terms=3, modulus=4, prompts=64, test=16, worked_examples=48)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 5, 5
    config.offline.examples_per_step, config.offline.max_tokens = 16, 12
    config.actor_optimizer.lr = 1e-2
    config.reward.function, config.reward.workers = "last_line()", 1
    config.checkpoint.every_steps = 0
    return config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rejection") / "base"
    config = base_config(folder)
    assert train_on_one(config)["status"] == "finished"
    return folder


@pytest.fixture(scope="module")
def drawn(base):
    """A pass with every file, and its meta."""
    folder = base.parent / "files"
    options = RejectionOptions(
        str(base),
        str(folder / "best.jsonl"),
        samples=4,
        min_reward=0.0,
        keep_truncated=False,
        pairs=str(folder / "pairs.jsonl"),
        trajectories=str(folder / "all.jsonl"),
        process_samples=3,
        reward="light_rewards.begins_even",
        seed=3,
    )
    return options, rejection_sample(options)


def rows_of(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


@pytest.mark.slow
def test_sft_reads_the_file_unchanged(drawn):
    options, meta = drawn
    rows = rows_of(options.out)
    read = load_demonstrations(options.out, "train")
    assert [(r["prompt"], r["completion"]) for r in rows] == [
        (r["prompt"], r["completion"]) for r in read
    ]
    assert all(r["reward"] == 1.0 for r in rows) and 10 < len(rows) <= 48
    metrics = meta["metrics"]
    assert metrics["mean_reward_selected"] == 1.0 > metrics["mean_reward_all"] > 0.1
    assert metrics["acceptance_rate"] == len(rows) / (48 * 4)
    assert metrics["prompts_without_any"] == pytest.approx(1 - len(rows) / 48)
    saved = json.loads(meta_path(options.out).read_text())
    assert saved == json.loads(json.dumps(meta))
    assert (saved["model"], saved["step"], saved["seed"]) == (options.checkpoint, 30, 3)


@pytest.mark.slow
def test_pairs_are_best_and_worst_without_ties(drawn):
    options, _ = drawn
    pairs = load_rows(options.pairs, "train", "pairs")
    assert len(pairs) > 5 and all(p["margin"] == 1.0 for p in pairs)


@pytest.mark.slow
def test_trajectories_hold_the_ids_and_logprobs_that_were_sampled(drawn, base):
    """The trainer's log-probs of the rows, read back, are the sampler's."""
    options, meta = drawn
    policy = load_policy(base)
    rows = load_rows(options.trajectories, "train", "trajectories")
    items, _ = encode_rows(rows, policy.tokenizer, "trajectories", max_tokens=12)
    assert len(items) == meta["trajectories"]["kept"] > 150
    arrays = batch_arrays("trajectories", items[:64], length=12, rows_per_example=1)
    batch = jax.tree.map(jax.numpy.asarray, Batch(**arrays))
    logprobs = jax.jit(lambda actor, b: actor.logprobs(b))(policy.actor(), batch)
    at = arrays["mask"] > 0
    np.testing.assert_allclose(np.asarray(logprobs)[at], arrays["sampler_logprobs"][at], atol=2e-4)
    assert (arrays["sampler_logprobs"][at] < -0.1).any()


def test_process_scores_are_centred_pass_rates_of_prefixes(drawn):
    """The reward looks at the first character alone: the pass rate of every prefix is the reward of
    the row itself, so that a prefix left out of what is scored would be seen."""
    options, _ = drawn
    rows = rows_of(options.trajectories)
    several = [row for row in rows if len(row["steps"]) > 1]
    assert len(several) > 50
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["reward"])
    for row in rows:
        assert row["pass_rates"] == [row["reward"]] * len(row["steps"]), row
        centre = np.mean(groups[row["group"]])
        np.testing.assert_allclose(row["process_scores"], np.subtract(row["pass_rates"], centre))
    assert {r["reward"] for r in several} == {0.0, 1.0}


def test_scores_of_the_policy_that_sampled_have_mean_zero():
    """On all paths of a tree with exact pass rates, weighted as they are drawn."""
    rows = [dict(group=0, reward=r) for r in (1.0, 1.0, 0.0, 0.0)]
    scores = centred_scores(rows, [[0.75, 1.0], [0.75, 1.0], [0.75, 0.0], [-0.25 + 0.0, 0.0]])
    assert np.sum(scores) == pytest.approx(0.0)
    assert scores[0] == [0.25, 0.5]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_file(drawn, tmp_path):
    options, meta = drawn
    again = dataclasses.replace(
        options, out=str(tmp_path / "a.jsonl"), pairs="", trajectories="", process_samples=0
    )
    digest = meta["files"]["examples"]["sha256"]
    assert rejection_sample(again)["files"]["examples"]["sha256"] == digest
    other = dataclasses.replace(again, seed=4)
    assert rejection_sample(other)["files"]["examples"]["sha256"] != digest


@pytest.mark.slow
def test_nothing_selected_is_said(drawn, tmp_path):
    options, _ = drawn
    hopeless = dataclasses.replace(
        options,
        out=str(tmp_path / "a.jsonl"),
        pairs="",
        trajectories="",
        process_samples=0,
        min_reward=1.0,
        prompts=4,
    )
    with pytest.raises(InputError, match="none of 16 samples was selected.*lower --min_reward"):
        rejection_sample(hopeless)
    assert not (tmp_path / "a.jsonl").exists()
    cut = dataclasses.replace(hopeless, min_reward=-1.0, max_response_tokens=1)
    match = r"got '16 without an end .*'. Fix: a larger --max_response_tokens, or --keep_truncated$"
    with pytest.raises(InputError, match=match):
        rejection_sample(cut)
    assert rejection_sample(dataclasses.replace(cut, keep_truncated=True))["files"]


@pytest.mark.slow
def test_a_model_folder_needs_data_and_reward(base, tmp_path):
    options = RejectionOptions(str(base / "policy"), str(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match="Fix: set --data and --reward"):
        rejection_sample(options)


# -- learning --


@pytest.mark.slow
def test_three_iterations_of_raft_raise_the_mean_reward(tmp_path):
    config = base_config(tmp_path / "base")
    config.data.train, config.steps = "first_letter()", 5
    config.sampler.max_response_tokens, config.actor_optimizer.lr = 2, 5e-3
    train_on_one(config)
    config.mesh.data = -1  # on all of them from here
    options = RejectionOptions(
        str(tmp_path / "base"),
        "",
        samples=8,
        select="threshold",
        min_reward=0.0,
        reward="exact_match()",
        iterations=3,
        epochs=3,
    )
    metas = raft(config, options, tmp_path)
    means = [meta["metrics"]["mean_reward_all"] for meta in metas]
    of_policies = [meta["model"] for meta in metas[1:]]
    assert of_policies == [str(tmp_path / str(i) / "policy") for i in range(2)]
    print(means)
    assert means[0] < 0.5 and means[1] > means[0] + 0.1 and means[2] > means[1] + 0.1, means


def test_raft_does_not_train_an_older_policy_than_it_samples_from(base, tmp_path):
    run = shutil.copytree(base, tmp_path / "base")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exported"] == {"policy": 30}
    (run / "summary.json").write_text(json.dumps(summary | {"exported": {"policy": 9}}))
    settings = dict(iterations=1, epochs=1, trust_code=True)
    options = RejectionOptions(str(run), str(tmp_path / "raft"), **settings)
    with pytest.raises(InputError, match="step 9, and the checkpoint of step 30.*base/policy, w"):
        raft(base_config(tmp_path), options, tmp_path / "raft")
    assert not (tmp_path / "raft").exists()


@pytest.mark.slow
def test_every_iteration_samples_as_the_run_says(tmp_path):
    """The folder of an iteration is a model's, which knows no top_k: all samples are the same."""
    config = base_config(tmp_path / "base")
    config.data.train, config.steps = "first_letter()", 3
    config.sampler.max_response_tokens, config.sampler.top_k = 2, 1
    train_on_one(config)
    config.mesh.data = -1  # on all of them from here
    texts = [f"{a}{b}>" for a in "abcd" for b in "ab"]
    prompts = tmp_path / "prompts.jsonl"  # without answers, which the reward does not read
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = dict(samples=4, prompts=8, keep_truncated=True, iterations=2, pairs="p.jsonl")
    settings |= dict(data=str(prompts), reward="light_rewards.begins_even")
    options = RejectionOptions(str(tmp_path / "base"), "", **settings)
    metas = raft(config, options, tmp_path / "raft")
    assert all((tmp_path / "raft" / str(i) / "p.jsonl").is_file() for i in range(2))
    assert [meta["metrics"]["unique_fraction"] for meta in metas] == [0.25, 0.25]


@pytest.mark.slow
def test_the_same_call_of_raft_goes_on_where_it_stopped(tmp_path):
    config = base_config(tmp_path / "base")
    config.data.train, config.steps = "first_letter()", 1
    config.sampler.max_response_tokens = 2
    train_on_one(config)
    config.mesh.data = -1  # on all of them from here
    prompts = tmp_path / "prompts.jsonl"
    weights_of_base = shutil.copy(tmp_path / "base/policy/model.safetensors", tmp_path / "whole")
    prompts.write_text("".join(json.dumps({"prompt": f"{a}b>"}) + "\n" for a in "abcd"))
    settings = dict(samples=2, keep_truncated=True, iterations=1, pairs="p.jsonl")
    settings |= dict(data=str(prompts), reward="light_rewards.begins_even")
    options = RejectionOptions(str(tmp_path / "base"), str(tmp_path / "raft"), **settings)
    metas, first = raft(config, options, options.out), tmp_path / "raft" / "0"
    samples = first / "selected.jsonl"
    assert len(samples.read_text().splitlines()) == metas[0]["files"]["examples"]["rows"] > 0
    weights = (first / "policy" / "model.safetensors").read_bytes()
    times = samples.stat().st_mtime_ns, (first / "report.html").stat().st_mtime_ns
    assert raft(config, options, options.out) == metas  # all done: neither sampled nor trained
    assert times == (samples.stat().st_mtime_ns, (first / "report.html").stat().st_mtime_ns)
    for path in first.iterdir():  # as if it had been killed in its first step
        if not path.name.startswith(("selected.", "p.jsonl")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert raft(config, options, options.out) == metas
    assert samples.stat().st_mtime_ns == times[0]
    samples.write_text(samples.read_text()[:-5])  # cut off: it is made again
    (first / "report.html").unlink()
    assert raft(config, options, options.out) == metas
    assert (first / "policy" / "model.safetensors").read_bytes() == weights
    with pytest.raises(InputError, match="other settings.*--samples=3, which was 2"):
        raft(config, dataclasses.replace(options, samples=3), options.out)
    text = prompts.read_text()
    prompts.write_text(text.replace("ab>", "bb>"))
    with pytest.raises(InputError, match="other settings.*what --data names has changed"):
        raft(config, options, options.out)
    prompts.write_text(text)
    with (tmp_path / "base/policy/model.safetensors").open("ab") as file:
        file.write(b" ")
    with pytest.raises(InputError, match="other settings.*what --checkpoint names has changed"):
        raft(config, options, options.out)
    shutil.copy(weights_of_base, tmp_path / "base/policy/model.safetensors")
    config.actor_optimizer.lr = 0.5
    with pytest.raises(InputError, match="other settings.*'actor_optimizer.lr'"):
        raft(config, options, options.out)


def test_files_of_raft_are_not_those_that_its_runs_write():
    options = RejectionOptions("base", "raft", iterations=1, pairs="a/metrics.jsonl")
    with pytest.raises(InputError, match="--pairs=a/metrics.jsonl: the folder of every iteration"):
        check_options(options)
    options = dataclasses.replace(options, pairs="a/p.jsonl", trajectories="b/p.jsonl")
    with pytest.raises(InputError, match="--trajectories=b/p.jsonl: the folder of every iteration"):
        check_options(options)
