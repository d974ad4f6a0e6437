"""Learning: every dataflow raises what it is meant to raise past a mark, and a flipped sign does
not."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPO
from tiny_run import train_on, train_on_one

from rljax.config import Config

DEVICES = 1  # tests/dataflows has what eight learn


def config(tmp_path, **changes) -> Config:
    made = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)",
        steps=40,
        run_dir=str(tmp_path / "run"),
        trackers=(),
        export=False,
        compilation_cache="~/.cache/rljax/tests",
    )
    made.mesh.data, made.mesh.fsdp = DEVICES, 1
    made.data.train = "first_letter()"
    made.data.max_prompt_tokens = 4
    made.sampler.max_response_tokens = 1
    made.batch.prompts_per_step, made.batch.samples_per_prompt = 16, 8
    made.batch.sequences_per_optimizer_step = 128
    made.batch.tokens_per_microbatch = 1024
    made.reward.function, made.reward.workers = "exact_match", 1
    made.actor_optimizer.lr = 1e-2
    made.critic_optimizer.lr = 1e-2
    made.checkpoint.every_steps = 0
    for name, value in changes.items():
        target = made
        *path, last = name.split("__")
        for part in path:
            target = vars(target)[part]
        setattr(target, last, value)
    return made


def rewards(tmp_path) -> list[float]:
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    return [r["reward/mean"] for r in rows if r["phase"] == "rl"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"dataflow": "ppo", "algorithm__advantage": "gae", "algorithm__kl_in_reward": 0.01},
        pytest.param(
            {
                "algorithm__policy_loss": "policy_gradient",
                "algorithm__advantage": "group_relative(std='none')",
                "actor_optimizer__lr": 5e-3,
                "steps": 60,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "ppo", "policy_gradient"],
)
def test_reward_rises_past_the_mark(tmp_path, changes):
    summary = train_on(DEVICES, config(tmp_path, **changes))
    found = rewards(tmp_path)
    assert sum(found[:2]) / 2 < 0.4
    assert sum(found[-5:]) / 5 > 0.85, found
    assert summary["accuracy_after"]["value"] > 0.85  # held-out prompts
    assert summary["difference"]["low"] > 0
    meanings = json.loads((tmp_path / "run" / "meanings.json").read_text())
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    of_roles = {name for name in logged if name.startswith("critic/")}
    assert of_roles <= meanings.keys() and bool(of_roles) == ("critic/grad_norm" in meanings)


@pytest.mark.slow
def test_a_flipped_sign_does_not_learn(tmp_path):
    summary = train_on(DEVICES, config(tmp_path, algorithm__policy_loss="toy.upside_down"))
    assert sum(rewards(tmp_path)[-5:]) / 5 < 0.2
    assert summary["accuracy_after"]["value"] < 0.3


def test_sft_learns_its_examples_and_generalises(tmp_path):
    fields = dict(sft__steps=60, sft__sequences_per_step=32, sft__optimizer__lr=1e-2)
    summary = train_on(DEVICES, config(tmp_path, steps=0, **fields))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert rows[-1]["loss"] < 0.1 < rows[0]["loss"]
    assert summary["accuracy_before"]["value"] > 0.85


@pytest.mark.slow
def test_sft_on_one_record_reproduces_it_greedily(tmp_path):
    """000-03: an instruction in the form of FLAN is answered, letter by letter, as the record
    says."""
    changes = dict(
        mesh__data=1,
        data__train="toy.restaurant()",
        data__max_prompt_tokens=160,
        sampler__max_response_tokens=40,
        batch__prompts_per_step=1,
        batch__samples_per_prompt=2,
        batch__sequences_per_optimizer_step=2,
        sft__steps=60,
        sft__sequences_per_step=1,
        sft__optimizer__lr=1e-2,
        steps=0,
    )
    summary = train_on_one(config(tmp_path, **changes))
    assert summary["accuracy_before"]["value"] == 1.0  # exact_match of the greedy response
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert rows[0]["loss"] > 3 and rows[-1]["loss"] < 0.01
    assert rows[-1]["target_tokens"] == 30  # the answer and its end, nothing of the prompt


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_quickstart_keeps_its_marks(tmp_path, seed):
    """SFT leaves accuracy in [0.1, 0.5] and GRPO ends at 0.9 or more, as a new user runs it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    subprocess.run(
        [
            sys.executable,
            "launchers/train.py",
            "--config=configs/quickstart.py",
            f"--config.seed={seed}",
            f"--config.run_dir={tmp_path}",
            "--config.compilation_cache=",
        ],
        check=True,
        timeout=900,
        cwd=REPO,
        env=environment | {"PYTHONPATH": str(REPO)},
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.1 <= summary["accuracy_before"]["value"] <= 0.5
    assert summary["accuracy_after"]["value"] >= 0.9
