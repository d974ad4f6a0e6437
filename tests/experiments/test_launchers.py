"""Launchers as a user runs them, from one tiny run: samples, step labels, scores of lines, and the
offline comparison."""

import json
import shutil

import jax
import pytest
from launching import launch

from rljax.config import Config
from rljax.data.offline.rows import load_rows
from rljax.data.rows.read import make_task
from rljax.data.rows.sources import load_demonstrations
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import load_policy
from rljax.training import train

TASK = "running_sum(terms=3, modulus=4, prompts=64, test=16, worked_examples=48)"
CACHE = f"--compilation_cache={jax.config.jax_compilation_cache_dir}"


def tiny_config(folder) -> Config:
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)",
        dataflow="sft",
        steps=40,
        run_dir=str(folder),
        trackers=(),
        compilation_cache=jax.config.jax_compilation_cache_dir,
    )
    config.mesh.data, config.mesh.fsdp = 8, 1
    config.data.train = TASK
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 5, 5
    config.offline.examples_per_step, config.offline.max_tokens = 16, 12
    config.actor_optimizer.lr = 1e-2
    config.reward.function, config.reward.workers = "last_line()", 1
    config.checkpoint.every_steps = 0
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a finished run: SFT on a task, measured on the prompts of a file."""
    folder = tmp_path_factory.mktemp("launchers")
    _, task = make_task(TASK)
    rows = [{"prompt": r["prompt"], "ground_truth": r["ground_truth"]} for r in task.test]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(folder / "run")
    config.evaluate.prompts_from, config.evaluate.prompts = str(folder / "held_out.jsonl"), 12
    config.evaluate.every_steps = 20
    assert train(config).summary["status"] == "finished"
    return folder


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_prompts_from_measures_a_run_that_learns_from_a_file(folder):
    logged = {
        r["step"]: r["eval/accuracy"]
        for r in rows_of(folder / "run" / "metrics.jsonl")
        if "eval/accuracy" in r
    }
    assert list(logged) == [20, 40]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["accuracy_before"]["n"] == summary["accuracy_after"]["n"] == 12
    assert summary["accuracy_after"]["value"] == logged[40] > summary["accuracy_before"]["value"]


@pytest.mark.slow
def test_rejection_sample(folder):
    out = folder / "samples"
    done = launch(
        "rejection_sample",
        f"--checkpoint={folder / 'run'}",
        f"--out={out / 'best.jsonl'}",
        "--samples=4",
        "--prompts=10",
        f"--pairs={out / 'pairs.jsonl'}",
        "--temperature=2.0",
        f"--trajectories={out / 'all.jsonl'}",
        "--process_samples=2",
        CACHE,
    )
    assert done.returncode == 0, done.stderr
    meta = json.loads((out / "best.meta.json").read_text())
    assert meta["step"] == 40 and meta["temperature"] == 2.0 and meta["reward"] == "last_line()"
    best, pairs = rows_of(out / "best.jsonl"), rows_of(out / "pairs.jsonl")
    assert 0 < len(best) <= 10 and meta["files"]["examples"]["rows"] == len(best)
    assert len(load_demonstrations(str(out / "best.jsonl"), "train")) == len(best)
    assert all(row["score_chosen"] > row["score_rejected"] for row in pairs)
    trajectories = load_rows(str(out / "all.jsonl"), "train", "trajectories")
    assert 10 < len(trajectories) == meta["trajectories"]["kept"] <= 40
    for shown in ("mean_reward_selected", "kl_bound", "rows of trajectories"):
        assert shown in done.stdout
    done = launch("rejection_sample", "--out=x.txt", "--select=threshold", "run", "more")
    assert done.returncode == 2 and "unknown arguments" in done.stderr
    done = launch("rejection_sample", "--out=x.txt", "--select=threshold")
    for flag in ("--checkpoint=", "--out=x.txt", "--min_reward="):
        assert flag in done.stderr and done.returncode == 2


@pytest.fixture(scope="module")
def labels(folder):
    """(the finished launcher, the folder that it wrote)."""
    out = folder / "steps"
    done = launch(
        "label_steps",
        f"--checkpoints={folder / 'run'}@latest",
        f"--out={out}",
        "--prompts=8",
        "--programs_per_prompt=2",
        "--completions=2",
        "--held_out=0.5",
        "--rows_at_once=16",
        "--temperature=1.5",
        "--replay",
        CACHE,
    )
    return done, out


@pytest.mark.slow
def test_label_steps(labels):
    done, out = labels
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "labels.json").read_text())
    (name,) = result["checkpoints"]
    metrics = result["checkpoints"][name]
    assert name.endswith("@latest") and metrics["programs/sampled"] == 16
    parts = {split: load_rows(str(out), split, "stepwise") for split in ("train", "test")}
    assert {split: len(rows) for split, rows in parts.items()} == result["rows"]
    assert sum(result["rows"].values()) == metrics["programs/kept"] > 4
    rows = rows_of(out / "train.jsonl") + rows_of(out / "test.jsonl")
    assert {row["source_step"] for row in rows} == {40}
    assert {x for row in rows for x in row["labels"]} <= {-1.0, 0.0, 1.0}
    assert "replay/flips" in done.stdout and "rows in train.jsonl" in done.stdout


@pytest.mark.slow
def test_score_steps(folder, labels):
    policy = load_policy(folder / "run" / "policy")
    scorer = folder / "scorer"
    shutil.copytree(folder / "run" / "policy", scorer, ignore=shutil.ignore_patterns("*.safe*"))
    model = Model(policy.model.config, make_mesh(), "scalar")
    save_params(
        scorer,
        model,
        model.init(jax.random.key(0)),
        bos_id=None,
        eos_ids=tuple(policy.tokenizer.eos_ids),
        pad_id=0,
    )
    out = folder / "scores.json"
    done = launch(
        "score_steps",
        f"--reward_model={scorer}",
        f"--data={labels[1]}",
        "--show=1",
        "--split=train",
        f"--out={out}",
        CACHE,
    )
    assert done.returncode == 0, done.stderr
    result, rows = json.loads(out.read_text()), rows_of(labels[1] / "train.jsonl")
    assert [row["lines"] for row in result["rows"]] == [row["completions"] for row in rows]
    assert [row["labels"] for row in result["rows"]] == [row["labels"] for row in rows]
    assert result["metrics"]["lines"] == sum(len(row["labels"]) for row in rows)
    assert f"mse: {result['metrics']['mse']:.4g}" in done.stdout
    assert done.stdout.count("score") == 1 and rows[0]["prompt"] in done.stdout


COMPARISON = """
from rljax.config import Config


def get_config():
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)",
        dataflow="sft", steps=20, trackers=(),
    )
    config.data.train = "first_letter()"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 5, 3
    config.offline.examples_per_step, config.offline.max_tokens = 16, 8
    config.actor_optimizer.lr = 5e-3
    config.reward.function, config.reward.workers = "last_line()", 1
    config.checkpoint.every_steps = 0
    return config


def methods():
    yield {"name": "SFT", "rows": "correct", "dataflow": "sft"}
"""


@pytest.mark.slow
def test_compare_offline(tmp_path):
    (tmp_path / "own.py").write_text(COMPARISON)
    out = tmp_path / "out"
    flags = [f"--config={tmp_path / 'own.py'}", f"--out={out}", "--seeds=0", "--prompts=24"]
    flags += ["--samples=4", "--process_samples=1", "--steps=3", "--test_prompts=8"]
    done = launch("compare_offline", *flags, "--test_samples=2", CACHE)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "results.json").read_text())
    assert [row["method"] for row in result["table"]] == ["base", "SFT"]
    assert "seed 0: base:" in done.stdout and "greedy - base" in done.stdout
    again = launch("compare_offline", *flags, "--test_samples=2", CACHE)
    assert again.returncode == 0 and json.loads((out / "results.json").read_text()) == result
    other = launch("compare_offline", *flags, "--test_samples=3", CACHE)
    assert other.returncode == 2 and "of other settings" in other.stderr


@pytest.mark.slow
def test_compare_offline_prints_capabilities_and_names_bad_flags():
    done = launch("compare_offline", "--capabilities")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0::2] for line in done.stdout.splitlines() if "yes" in line]
    assert len(rows) == 4
    done = launch("compare_offline", "--samples=1", "--seeds=0,x")
    assert done.returncode == 2 and "--seeds: got '0,x'" in done.stderr
    done = launch("compare_offline", "--samples=1", "--steps=0")
    assert done.returncode == 2
    assert all(flag in done.stderr for flag in ("--out=", "--samples=1", "--steps=0"))
