"""Agents learn: configs of configs/agents pass their marks, and do not with the reward's sign
flipped or where what they read is learned from in place of what they write."""

import json
import os
import runpy
import subprocess
import sys

import jax
import pytest
from conftest import REPO
from tiny_run import train_on_one

from rljax.config.flags import load_config_file
from rljax.data.online.encoded import load_data
from rljax.environments.kuhn import exploitability
from rljax.policies import load_policy, sample_all


@pytest.mark.slow
def test_self_play_learns_what_a_move_is(tmp_path):
    """Kuhn poker from random weights: most first moves are none, and lose the game."""
    config = load_config_file(str(REPO / "configs/agents/kuhn.py"))
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.sft.steps, config.steps = 0, 14
    config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 32, 192
    config.actor_optimizer.lr, config.actor_optimizer.schedule = 2e-2, "constant"
    config.algorithm.entropy_coef = 0.0
    config.evaluate.prompts = config.environment.workers = 1
    config.run_dir, config.trackers, config.export = str(tmp_path / "run"), (), False
    config.compilation_cache = "~/.cache/rljax/tests"
    train_on_one(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    turns = [row["episode/turns"] for row in rows if row["phase"] == "rl"]
    assert turns[0] < 1.6 < 1.95 < min(turns[-3:]), turns  # a game of two legal moves at least


# -- the examples, as a new user runs them


def trained(folder, name: str, *flags: str) -> tuple[dict, list[dict]]:
    """(the summary, the metrics of the last ten steps) of a run of configs/agents/NAME.py, or of
    its variant for NAME:VARIANT."""
    name, colon, variant = name.partition(":")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    path = os.pathsep.join([str(REPO), str(REPO / "tests/helpers")])
    subprocess.run(
        [
            sys.executable,
            "launchers/train.py",
            f"--config=configs/agents/{name}.py{colon}{variant}",
            f"--config.run_dir={folder}",
            "--config.export=False",
            *flags,
        ],
        check=True,
        timeout=1800,
        cwd=REPO,
        env=environment | {"PYTHONPATH": path},
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    last = [row for row in rows if row["phase"] == "rl" and "reward/mean" in row][-10:]
    return json.loads((folder / "summary.json").read_text()), last


def mean(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def accuracy(folder, environment: str) -> float:
    """The greedy success of a run's policy with another environment."""
    policy = load_policy(folder)  # begun here: it needs no trust_code
    policy.config.environment.function = environment
    prompts = load_data(policy.config, policy.tokenizer).test_prompts
    reward = policy.player("exact_match()")
    try:
        ready = policy.ready(prompts).greedy()
        samples = sample_all(ready, prompts, 1, reward, key=jax.random.key(0))
    finally:
        reward.close()
    right = policy.config.evaluate.correct_at
    return sum(sample.reward >= right for sample in samples) / len(samples)


MARKS = {  # (at most before, at least after)
    "calculator": (0.8, 0.95),  # greedy: a fifth of what it was shown are calls
    "calculator:tree": (0.8, 0.95),
    "python": (0.4, 0.9),
    "search": (0.1, 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MARKS)
def test_an_example_passes_its_mark(tmp_path, name, seed):
    summary, last = trained(tmp_path, name, f"--config.seed={seed}")
    before, after = MARKS[name]
    assert summary["accuracy_before"]["value"] <= before
    assert summary["accuracy_after"]["value"] >= after
    assert mean(last, "env/failed") == 0
    if name == "calculator:tree":  # 4 roots, each of which goes on twice where it calls
        assert mean(last, "turn_tree/leaves") > 7.5
    if name in ("calculator", "search"):
        assert 0.95 <= mean(last, "calls/per_episode") <= 1.3
    if name == "calculator":
        assert accuracy(tmp_path, "tools(functions=('agent_parts.calc',))") <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_self_play_of_kuhn_poker_comes_near_an_equilibrium(tmp_path, seed):
    """What the best answers win of the policy, from its own probabilities: 0.458 where both moves
    are equally likely, and above 0.7 after SFT."""
    trained(tmp_path, "kuhn", f"--config.seed={seed}")
    example = runpy.run_path(str(REPO / "examples" / "kuhn_exploitability.py"))
    policy = load_policy(tmp_path, trust_code=True)
    assert exploitability(example["probabilities"](policy.actor(), policy.tokenizer)) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag",
    [
        "--config.algorithm.policy_loss=toy.upside_down",
        "--config.algorithm.collect=agent_parts.inverted",
    ],
    ids=["sign", "mask"],
)
@pytest.mark.parametrize("name", [name for name in MARKS if ":" not in name])
def test_an_example_does_not_learn_the_wrong_way_round(tmp_path, name, flag):
    summary, _ = trained(tmp_path, name, flag)
    assert summary["accuracy_after"]["value"] < MARKS[name][1]
