"""Golden vectors of another folder ($RLJAX_GOLDEN) are read, under the hyper-parameters that their
own files name: runs made by PyTorch, formulas by numpy, and some that are wrong on purpose."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import test_golden
from conftest import GOLDEN, REPO
from golden_io import read_cases
from trl_runs import read_run, replay

from rljax.mesh import make_mesh

pytest.importorskip("torch", reason="torch makes the further runs")
pytest.importorskip("transformers", reason="transformers has the model of the further runs")

OPTIMIZER = {
    "lr": 0.002,
    "betas": [0.8, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.4,
    "warmup_steps": 1,
}
TWO = {"gradient_accumulation_steps": 2, "max_steps": 3}
ALTERED = {  # name -> (what it is made from, what is other there)
    "dpo": ("dpo", OPTIMIZER | TWO | {"loss_type": "ipo", "beta": 0.3, "scheduler": "COSINE"}),
    "dpo_hinge": ("dpo", {"loss_type": "hinge", "beta": 0.5, "warmup_steps": 0}),
    "kto": (
        "kto",
        {
            "beta": 0.3,
            "desirable_weight": 1.4,
            "undesirable_weight": 0.7,
            "scheduler": "CONSTANT_WITH_WARMUP",
        },
    ),
    "reward": ("reward", OPTIMIZER | TWO | {"center_rewards_coefficient": 0.2}),
    "sft": ("sft", OPTIMIZER | {"loss_type": "dft", "scheduler": "SchedulerType.CONSTANT"}),
    "grpo": (
        "grpo",
        TWO
        | {
            "loss_type": "dr_grpo",
            "beta": 0.0,
            "epsilon": 0.1,
            "epsilon_high": 0.4,
            "max_completion_length": 17,
        },
    ),
    "grpo_rows": ("grpo", OPTIMIZER | {"loss_type": "grpo", "beta": 0.2, "epsilon": 0.05}),
    "grpo_cispo": ("grpo", {"loss_type": "cispo", "beta": 0.1, "epsilon_high": 1.2}),
    "rloo": ("rloo", OPTIMIZER | {"epsilon": 0.05}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes an altered run into the folder of all of them, by name."""
    from trl_replay import write_run

    folder = tmp_path_factory.mktemp("further")
    source = GOLDEN / "trl_traj"

    def write(name, changes=()):
        path = folder / "trl_traj" / f"{name}.npz"
        base, others = ALTERED[name]
        write_run(source / f"{base}.npz", source, path, others | dict(changes))
        return path

    return write


def test_the_replay_itself_gives_what_trl_recorded(written):
    """PyTorch's run under the public hyper-parameters is TRL's."""
    public = read_run(GOLDEN / "trl_traj" / "dpo.npz")
    again = read_run(written("dpo", public.meta))
    for ours, theirs in zip(again.steps, public.steps, strict=True):
        np.testing.assert_allclose(ours[0].outputs["loss"], theirs[0].outputs["loss"], rtol=1e-5)
    np.testing.assert_allclose(again.final["grad_norms"], public.final["grad_norms"], rtol=1e-5)


@pytest.mark.slow
def test_a_run_under_other_hyper_parameters_is_replayed_under_them(written):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    path = written("dpo")
    replay(read_run(path), mesh)
    with np.load(path) as file:
        arrays = dict(file)
    meta = json.loads(arrays["__meta__"].item())
    np.savez(path, **{**arrays, "__meta__": np.asarray(json.dumps(meta | {"beta": 0.1}))})
    with pytest.raises(AssertionError):
        replay(read_run(path), mesh)


def run_golden(folder, *arguments: str) -> str:
    """Returns what pytest prints of the tests that read golden vectors, with RLJAX_GOLDEN."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"RLJAX_GOLDEN": str(folder), "PYTHONPATH": str(REPO)},
    )
    return done.stdout + done.stderr


def reward_cases(path, *kinds: str):
    """trl/reward_model with other coefficients, by numpy: "right", "wrong", or "edge", which is
    wrong on a degenerate input."""
    rng = np.random.default_rng(3)
    arrays = {"__meta__": np.asarray(json.dumps({"library": "numpy"}))}
    for i, kind in enumerate(kinds):
        center = rng.uniform(0.1, 0.9)
        chosen, rejected = rng.normal(size=(2, 5)).astype(np.float32).astype(np.float64)
        loss = np.mean(np.logaddexp(0, rejected - chosen) + center * (chosen + rejected) ** 2)
        pull = -1 / (1 + np.exp(chosen - rejected))
        push = 2 * center * (chosen + rejected)
        arrays |= {
            f"case{i}/label": np.asarray(kind),
            f"case{i}/input/rewards_chosen": chosen.astype(np.float32),
            f"case{i}/input/rewards_rejected": rejected.astype(np.float32),
            f"case{i}/param/center_rewards_coefficient": np.asarray(center),
            f"case{i}/output/loss": np.asarray(loss + 0.1 * (kind != "right")),
            f"case{i}/grad/rewards_chosen": (pull + push) / 5,
            f"case{i}/grad/rewards_rejected": (push - pull) / 5,
            **metrics_of(i, chosen, rejected),
        }
        arrays[f"case{i}/edge"] = np.asarray(kind == "edge")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def metrics_of(i, chosen, rejected) -> dict:
    both = np.concatenate([chosen, rejected])
    names = ["min_reward", "max_reward", "mean_reward", "accuracy", "margin"]
    values = [both.min(), both.max(), both.mean(), np.mean(chosen > rejected)]
    values.append(np.mean(chosen - rejected))
    return {
        f"case{i}/metric_names": np.asarray(names),
        f"case{i}/metric_values": np.asarray(values),
    }


COMPARED = ("trl/reward_model", "float64", "covering")


@pytest.mark.slow
def test_formulas_of_another_folder_are_compared(tmp_path, monkeypatch):
    """A wrong number fails, but for a degenerate input, where agreement is optional: read from
    RLJAX_GOLDEN by a process of its own, and the right ones alone, in this one."""
    reward_cases(tmp_path / "trl" / "reward_model.npz", "right", "edge", "wrong")
    said = run_golden(tmp_path, "-rA", f"tests/test_golden.py::test_golden[{'-'.join(COMPARED)}]")
    assert "PASSED" not in said and "FAILED" in said, said[-2000:]
    assert "1 differences" in said and "wrong: output/loss: off by 0.1" in said
    reward_cases(tmp_path / "trl" / "reward_model.npz", "right", "edge", "right")
    monkeypatch.setenv("RLJAX_GOLDEN", str(tmp_path))
    monkeypatch.setattr(test_golden, "FURTHER", tmp_path)
    assert len(test_golden.cases_of(COMPARED[0])) > len(read_cases(tmp_path / f"{COMPARED[0]}.npz"))
    test_golden.test_golden(*COMPARED)


@pytest.mark.slow
def test_all_trainers_of_another_folder_are_replayed(written):
    """Nine runs of six trainers, and none of tests/golden in their place."""
    for name in ALTERED:
        path = written(name)
    said = run_golden(path.parent.parent, "-rA", "tests/dataflows/test_trl_runs.py")
    for name in ALTERED:
        assert (
            f"PASSED tests/dataflows/test_trl_runs.py::test_six_steps_equal_trl[further/{name}]"
            in said
        ), said[-3000:]
