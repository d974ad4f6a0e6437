"""GRPO and PPO on a user's checkpoint folder and a verl-style parquet, from the command line on."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import REPO, one_device_environment
from tiny_gsm8k import gsm8k_flags, write_model
from tiny_run import checkpoint_bytes, flat_bytes, metrics_rows

from rljax.batch import batch_from_rows
from rljax.config import from_dict
from rljax.config.flags import load_config_file
from rljax.config.policy_options import EvaluateOptions
from rljax.evaluation.saved import evaluate_saved
from rljax.models.huggingface import load_params
from rljax.policies import load_policy
from rljax.validation import validate

FAST = [("grpo", "qwen3")]
OTHERS = [
    pytest.param(pair, marks=pytest.mark.slow)
    for pair in (("grpo", "qwen2"), ("ppo", "qwen2"), ("ppo", "qwen3"))
]


@dataclasses.dataclass
class Run:
    dataflow: str
    folder: object
    model_folder: object
    output: str


@pytest.fixture(scope="module", params=[*FAST, *OTHERS], ids=lambda pair: "-".join(pair))
def run(request, tmp_path_factory):
    dataflow, family = request.param
    folder = tmp_path_factory.mktemp(f"{dataflow}-{family}")
    cache = jax.config.jax_compilation_cache_dir
    flags = gsm8k_flags(f"{dataflow}_gsm8k", family, folder, compilation_cache=cache)
    command = [sys.executable, f"{REPO}/launchers/train.py", *flags]
    env = one_device_environment()  # other tests cover eight
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return Run(dataflow, folder / "run", folder / family, done.stdout)


@pytest.mark.slow
def test_the_metrics_of_a_run(run):
    assert "finished: 2 steps" in run.output
    rows = metrics_rows(run.folder)
    assert [row["step"] for row in rows] == [1, 2]
    wanted = {"ppo_kl", "pg_clipfrac", "entropy", "ref_kl/k1", "ref_kl/k3", "grad_norm", "lr"}
    wanted |= {"mismatch/mismatch_kl", "mismatch/mismatch_k3_kl", "reward/mean", "loss"}
    if run.dataflow == "ppo":
        wanted |= {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "explained_variance"}
        wanted |= {"value/mean", "return/mean"}
    else:
        wanted |= {"kl_loss", "group/zero_advantage_fraction"}
    for row in rows:
        assert wanted <= row.keys()
        assert all(np.isfinite(row[name]) for name in wanted)
        # One model definition on both sides: in float32 nothing but rounding is left.
        assert row["mismatch/abs_logprob_diff_max"] < 1e-3
        assert row["optimizer_steps"] == 2 and row["skipped_steps"] == 0
        # algorithm.correction="": the mismatch is measured, and nothing is weighted or rejected.
        assert not [name for name in row if "rollout_is" in name or "rejected" in name]
    assert rows[0]["reward/std"] > 0 and rows[0]["reward/errors"] == 0
    # The reference is the policy of the start: no distance before the first update, some after it.
    assert abs(rows[0]["ref_kl/k1"]) < 1e-6 < abs(rows[1]["ref_kl/k1"])
    if run.dataflow == "ppo":  # the critic starts at zero and learns
        assert rows[0]["value/mean"] == 0 != rows[1]["value/mean"]


@pytest.mark.slow
def test_the_actor_moves_and_the_reference_does_not(run):
    policy = load_policy(run.folder)
    start = flat_bytes(load_params(run.model_folder, policy.model))
    saved = checkpoint_bytes(run.folder, 2)
    reference = {k.removeprefix("['reference']"): v for k, v in saved.items() if "reference" in k}
    assert reference == start
    actor = {path: saved[f"['actor']['params']{path}"] for path in start}
    moved = {path for path in start if actor[path] != start[path]}
    assert len(moved) >= len(start) - 1
    assert flat_bytes(policy.params) == actor


@pytest.mark.slow
def test_the_export_is_the_trained_policy(run):
    trained, exported = load_policy(run.folder), load_policy(run.folder / "policy")
    plain = dataclasses.replace(trained.model.config, remat="full")  # of the run, not the model
    assert exported.model.config == plain
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 320, (2, 9)).astype(np.int32)
    lengths = np.array([9, 5])
    batch = batch_from_rows(tokens, lengths, np.ones((2, 9), np.float32))
    logits = jax.jit(trained.model.logits)  # op by op, every operation would compile by itself
    first = logits(trained.params, batch)
    second = jax.jit(exported.model.logits)(exported.params, batch)
    assert np.array_equal(first, second)
    start = logits(load_params(run.model_folder, trained.model), batch)
    assert not np.array_equal(first, start)
    assert trained.tokenizer.fingerprint() == exported.tokenizer.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("run", FAST[:1], indirect=True, ids="-".join)
def test_evaluate_gives_the_same_for_a_run_and_its_export(run):
    shared = dict(samples=1, ks=(1,), prompts=4)
    of_run = evaluate_saved(EvaluateOptions(str(run.folder), **shared))
    config = from_dict(json.loads((run.folder / "config.json").read_text()), "config.json")
    assert of_run["step"] == 2 and of_run["temperature"] == 4.0
    of_export = evaluate_saved(
        EvaluateOptions(
            str(run.folder / "policy"),
            data=config.data.test,
            reward=config.reward.function,
            temperature=4.0,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.sampler.max_response_tokens,
            **shared,
        )
    )
    assert of_run["metrics"] == of_export["metrics"]
    assert {"greedy_accuracy", "mean@1", "pass@1", "best_of@1", "maj@1"} <= of_run["metrics"].keys()
    assert of_run["metrics"]["best_of@1"]["n"] == 4


@pytest.mark.parametrize("name", ["grpo_gsm8k", "ppo_gsm8k"])
def test_the_usual_numbers_are_the_defaults(name, tmp_path):
    config = load_config_file(f"{REPO}/configs/{name}.py")
    config.model = str(write_model(tmp_path / "model", "qwen3"))
    config.data.train = str(tmp_path / "train.parquet")
    (tmp_path / "train.parquet").write_bytes(b"")
    assert validate(config)[0].startswith(
        "neither data.test nor data.test_fraction"
    )  # a warning, no error
    algorithm = config.algorithm
    assert config.actor_optimizer.lr == 1e-6 and config.critic_optimizer.lr == 1e-5
    assert algorithm.policy_loss == "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"
    kl = (algorithm.kl_in_reward, algorithm.kl_in_loss, algorithm.kl_estimator)
    assert kl == ((0.001, 0.0, "k3") if name == "ppo_gsm8k" else (0.0, 0.001, "k3"))
    assert "gae(gamma=1.0, lam=1.0)" == algorithm.advantage or name == "grpo_gsm8k"
