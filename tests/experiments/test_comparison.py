"""The offline comparison: what each method reads of the one file, intervals, the capability table,
and a small comparison that learns, goes on where it stopped, and refuses to mix experiments."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import REPO
from tiny_gsm8k import write_model

from rljax.config import Config
from rljax.config.declare import check_options
from rljax.config.flags import config_module
from rljax.config.policy_options import ComparisonOptions
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.experiments.capabilities import PROPERTIES, capabilities, capability_table
from rljax.experiments.comparison import (
    BASE,
    ROWS,
    Method,
    compare,
    interval,
    read_methods,
    summarise,
)

DQO = {"actor_optimizer.lr": 5e-3, "critic_optimizer.lr": 1e-2}


# -- capabilities --


def test_the_capability_table_is_the_published_one():
    names = {"PPO": "ppo", "DPO": "preference", "KTO": "kto", "DQO": "dqo"}
    found = {row["method"]: [row[p] for p in PROPERTIES] for row in capability_table(names)}
    assert found == {
        "PPO": [False, False, True, True],
        "DPO": [True, True, False, False],
        "KTO": [True, True, True, False],
        "DQO": [True, True, True, True],
    }


@contract(data="trajectories", token_rewards=True)
def offline_with_a_judge(batch, key, cfg, *, actor, reward_model):
    """A dataflow of one's own, never run."""


def test_capabilities_follow_from_the_signature():
    assert not capabilities("dro(tau=1.0)")["process supervision"]  # one value, one reward
    assert capabilities("dro(tau=1.0)")["unbalanced samples"]
    assert not capabilities("sft")["unbalanced samples"]  # what is bad teaches it nothing
    assert capabilities("process_reward_model")["process supervision"]
    assert not capabilities("reward_model")["no reward model"]
    own = capabilities("test_comparison.offline_with_a_judge")
    assert list(own.values()) == [False, True, True, True]


# -- rows --


def sampled(group, reward, text, truncated=False):
    steps = text.split("\n")
    return {
        "prompt": f"p{group}>",
        "group": group,
        "completion": text,
        "reward": reward,
        "truncated": truncated,
        "steps": steps,
        "process_scores": [0.5] * len(steps),
        "pass_rates": [1.0] * len(steps),
        "logprobs": [-0.5] * (len(text) + 1),
    }


FILE = [
    sampled(0, 1.0, "b\na"),
    sampled(0, 0.0, "c"),
    sampled(0, 1.0, "b\na"),
    sampled(0, 1.0, "a"),
    sampled(1, 0.0, "x"),
    sampled(1, 0.0, "y"),
    sampled(2, 1.0, "z", truncated=True),
    sampled(2, 0.0, "w"),
]


def test_what_each_method_reads_of_the_file():
    found = {name: read(FILE, 1.0) for name, read in ROWS.items()}
    texts = {name: [r.get("completion") for r in rows] for name, rows in found.items()}
    assert texts["correct"] == ["b\na", "b\na", "a"]  # z has no end
    assert found["selected"] == [{"prompt": "p0>", "completion": "b\na"}]  # z has no end
    assert [(p["prompt"], p["chosen"], p["rejected"]) for p in found["pairs"]] == [
        ("p0>", "b\na", "c")
    ]
    assert [r["label"] for r in found["labelled"]] == [
        r["reward"] == 1.0 for r in FILE if not r["truncated"]
    ]
    assert len(found["outcome"]) == len(found["process"]) == 8
    assert not any("process_scores" in r or "steps" in r for r in found["outcome"])
    assert all(len(r["process_scores"]) == len(r["steps"]) for r in found["process"])
    assert all("logprobs" in r for r in found["outcome"] + found["process"])


def test_methods_that_cannot_be_compared_are_all_named():
    wrong = [
        {"name": "base", "rows": "pairs", "dataflow": "preference"},
        {"name": "A b", "rows": "pears", "dataflow": "dqo"},
        {"name": "a-B", "rows": "pairs"},
    ]
    with pytest.raises(InputError) as error:
        read_methods(wrong, "x.py")
    for said in ("not 'base'", "rows='pears'", "'a-B': needs a dataflow", "'a_b' names two"):
        assert said in str(error.value)
    module = config_module(f"{REPO}/configs/compare_offline.py")
    methods = read_methods(module.methods(), "compare_offline.py")
    assert len(methods) == 7 and {m.rows for m in methods} == set(ROWS)
    real = config_module(f"{REPO}/configs/real/compare_offline.py")
    known = {(m.name, m.rows) for m in read_methods(real.methods(), "real/compare_offline.py")}
    assert known == {(m.name, m.rows) for m in methods if m.rows != "process"}
    with pytest.raises(InputError, match="--seeds") as error:
        check_options(ComparisonOptions("", seeds=(0, 0), samples=1, steps=0))
    assert all(f"--{f}" in str(error.value) for f in ("out", "samples", "steps"))


# -- the table --


def test_the_interval_widens_with_the_spread_of_seeds():
    rng = np.random.default_rng(0)
    alike = (rng.random((3, 200)) < 0.5).astype(float)
    apart = np.stack([rng.random(200) < p for p in (0.2, 0.5, 0.8)]).astype(float)
    near, far = interval(alike), interval(apart)
    assert far["high"] - far["low"] > 2.5 * (near["high"] - near["low"])
    assert near["low"] < alike.mean() < near["high"]
    known = np.where(rng.random((3, 200)) < 0.1, np.nan, alike)
    assert interval(known)["value"] == pytest.approx(np.nanmean(known))
    with pytest.raises(InputError, match="some known"):
        interval(np.full((2, 3), np.nan))


def test_gains_are_to_the_base_of_the_same_seed():
    def cell(method, seed, values):
        return {"method": method, "seed": seed, "greedy": values, "sampled": values}

    cells = [
        cell(BASE, 0, [0.0, 1.0, None]),
        cell("A", 0, [1.0, 1.0, 1.0]),
        cell(BASE, 1, [0.0, 0.0, 1.0]),
        cell("A", 1, [1.0, 0.0, 1.0]),
    ]
    base, a = summarise(cells)
    assert [row["method"] for row in (base, a)] == [BASE, "A"] and "greedy_gain" not in base
    assert a["greedy"]["value"] == pytest.approx(5 / 6)
    assert a["greedy_gain"]["value"] == pytest.approx(2 / 5)
    assert a["sampled_of_seeds"] == pytest.approx([1.0, 2 / 3])


# -- a comparison --


def base_config() -> Config:
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)",
        dataflow="sft",
        steps=8,
        trackers=(),
        compilation_cache="~/.cache/rljax/tests",
    )
    config.mesh.data, config.mesh.fsdp = 8, 1
    config.data.train = "first_letter()"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 5, 3
    config.offline.examples_per_step, config.offline.max_tokens = 32, 8
    config.actor_optimizer.lr = 5e-3
    config.reward.function, config.reward.workers = "last_line()", 1
    config.checkpoint.every_steps = 0
    return config


def options(folder, **changes) -> ComparisonOptions:
    made = ComparisonOptions(
        str(folder),
        seeds=(0,),
        prompts=48,
        samples=8,
        process_samples=2,
        steps=60,
        test_prompts=16,
        test_samples=4,
    )
    return dataclasses.replace(made, **changes)


def accuracy(result, method, column="sampled"):
    row = next(row for row in result["table"] if row["method"] == method)
    return row[column]["value"]


@pytest.mark.slow
def test_dqo_learns_from_the_file_and_finished_cells_stay(tmp_path):
    methods = [Method("DQO", "outcome", {"dataflow": "dqo(beta=0.1)", **DQO})]
    seen = []
    result = compare(
        base_config(), methods, options(tmp_path), on_cell=lambda cell: seen.append(cell["method"])
    )
    assert seen == [BASE, "DQO"] and accuracy(result, BASE) < 0.6
    assert accuracy(result, "DQO") > accuracy(result, BASE) + 0.15, result["table"]
    assert json.loads((tmp_path / "results.json").read_text())["table"] == result["table"]

    # Finished: nothing is trained or sampled again, and files that are gone are not missed.
    files = [tmp_path / "seed0" / "samples.jsonl", tmp_path / "seed0" / "dqo" / "summary.json"]
    before = [file.stat().st_mtime_ns for file in files]
    again = compare(base_config(), methods, options(tmp_path))
    assert again == result and [file.stat().st_mtime_ns for file in files] == before

    # A run that ended before its result was written is measured, not trained again.
    saved = tmp_path / "seed0" / "dqo" / "result.json"
    saved.unlink()
    assert compare(base_config(), methods, options(tmp_path))["table"] == result["table"]

    with pytest.raises(InputError, match="of other settings"):
        compare(base_config(), methods, options(tmp_path, steps=61))
    with pytest.raises(InputError, match="of other settings"):
        compare(base_config(), methods, options(tmp_path, samples=4))


def test_a_method_that_does_not_fit_is_refused_before_anything_is_trained(tmp_path):
    methods = [Method("KTO", "labelled", {"dataflow": "kto", "algorithm.preference_loss": "dpo()"})]
    with pytest.raises(InputError, match="preference_loss"):
        compare(base_config(), methods, options(tmp_path))
    assert not list(tmp_path.iterdir())


REWARDS = """
def odd_length(response, num_tokens):
    return float(num_tokens % 2)

def never(response):
    return 0.0
"""


@pytest.mark.slow
def test_a_model_as_it_is_can_be_the_base(tmp_path):
    model = write_model(tmp_path / "qwen3", "qwen3")
    config = Config(dataflow="sft", steps=0, trackers=(), model=str(model))
    config.compilation_cache = "~/.cache/rljax/tests"
    config.mesh.data, config.mesh.fsdp = 1, 8
    config.model_settings.remat = "none"
    config.data.train = config.evaluate.prompts_from = "arithmetic(prompts=40, test=8)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 96, 4
    config.sampler.temperature = 4.0
    config.offline.examples_per_step, config.offline.max_tokens = 8, 100
    own = tmp_path / "own.py"  # a worker that imports this file would import JAX
    own.write_text(REWARDS)
    config.reward.function, config.reward.workers = f"{own}:odd_length", 1
    config.checkpoint.every_steps = 0
    methods = [Method("DRO", "outcome", {"dataflow": "dro(tau=0.1)"})]
    few = options(tmp_path / "out", prompts=4, samples=2, steps=1, test_prompts=8, test_samples=1)
    result = compare(config, methods, few)
    assert [row["method"] for row in result["table"]] == [BASE, "DRO"]
    base, dro = result["cells"]
    assert base["wall_s"] == 0 and base["rows"] == 0 and dro["rows"] > 0 and dro["wall_s"] > 0
    seed = tmp_path / "out" / "seed0"
    # Nothing was trained for the base, and the samples are those of the model itself.
    assert not (seed / BASE / "policy").exists() and (seed / "dro" / "policy").is_dir()
    assert not (seed / "dro" / "checkpoints").exists()
    saved = json.loads((seed / "dro" / "config.json").read_text())
    assert saved["model"] == str(model) and saved["steps"] == 1
    row = json.loads((seed / "samples.jsonl").read_text().splitlines()[0])
    assert "process_scores" not in row  # no method reads them
    before = (seed / "samples.jsonl").stat().st_mtime_ns
    assert compare(config, methods, few)["table"] == result["table"]
    assert (seed / "samples.jsonl").stat().st_mtime_ns == before

    def refused(match, **changes):
        made = dataclasses.replace(config, **changes)
        with pytest.raises(InputError, match=match):
            compare(made, methods, dataclasses.replace(few, out=str(tmp_path / "refused")))

    refused("steps: got 0; .*has random weights.*--config.steps", model=base_config().model)
    # No response is right, so there is nothing to imitate: said before a run begins.
    methods = [Method("SFT", "correct", {"dataflow": "sft"})]
    config.reward.function = f"{own}:never"
    refused("'SFT' has nothing to learn from.*'correct'.*more --prompts")


@pytest.mark.slow
def test_every_method_of_the_config_file(tmp_path):
    module = config_module(f"{REPO}/configs/compare_offline.py")
    methods = read_methods(module.methods(), "compare_offline.py")
    faster = {"actor_optimizer.lr": 3e-3, "critic_optimizer.lr": 1e-2}
    methods = [dataclasses.replace(m, fields={**m.fields, **faster}) for m in methods]
    result = compare(base_config(), methods, options(tmp_path))
    assert [row["method"] for row in result["table"]] == [BASE, *(m.name for m in methods)]
    for row in result["table"]:
        assert all(0 <= row[c]["low"] <= row[c]["high"] <= 1 for c in ("greedy", "sampled"))
    for name in ("SFT", "Reject Sampling", "DQO", "DQO w/ process scores"):
        assert accuracy(result, name) > accuracy(result, BASE), name
