"""A run compiles few programs before its second step, and none after it."""

import jax
import numpy as np
import pytest
from tiny_run import tiny_config, train_on_one

from rljax.keys import fold_in, root_key, stream
from rljax.setup import build, initial_params
from rljax.tracking import compiles
from rljax.training.run import Run

BEFORE = {"fold_in", "create", "new_train_state"}  # weights, optimizer
STEP = {"_begin", "_dispatch", "_batch", "with_rewards", "grpo"}
SIZES = dict(
    model="decoder(layers=1, embed=24, mlp=40, heads=2, kv_heads=1, head_dim=12)",
    sampler__max_response_tokens=33,
)
CONSTANT = dict(actor_optimizer__warmup_steps=0)
LINEAR_KL = dict(algorithm__kl_in_loss=0.1, actor_optimizer__schedule="linear")
COUNTED = """
from pathlib import Path
from rljax.contracts import contract
from rljax.losses.policy import ppo_clip


@contract(reads=("advantages", "old_logprobs"))
def counted(policy, batch):
    with (Path(__file__).parent / "traced").open("a") as file:
        file.write("once ")
    return ppo_clip(policy, batch)
"""
MORE = {"_copy", "lr"}  # the reference, and a learning rate that changes


@pytest.mark.parametrize(
    "fields, more, most",
    [
        pytest.param(CONSTANT, set(), 8, id="constant", marks=pytest.mark.smoke),
        pytest.param(LINEAR_KL, MORE, 10, id="linear, with a reference", marks=pytest.mark.slow),
    ],
)
def test_a_run_compiles_eight_programs_and_none_after_its_first_step(tmp_path, fields, more, most):
    """Scored while it decodes. An operation of jax.numpy in host code would be one more. The first
    step takes the trace of the dry run; an equal run, with a tokenizer of its own, takes it all."""
    (tmp_path / "own.py").write_text(COUNTED)
    fields = {**SIZES, **fields, "algorithm__policy_loss": f"{tmp_path}/own.py:counted"}
    config = tiny_config(tmp_path, **fields, sft__steps=0, evaluate__prompts=0)
    counts = []

    def begun_run(name):
        run = Run(build(config, jax.devices()[:1]), tmp_path / name)
        run.begin(run.phase, initial_params(config, run.setup.model))
        return run

    compiles.watch()
    start = compiles.count()
    with begun_run("run") as run:
        begun = compiles.names(start)
        traced = (tmp_path / "traced").read_text()
        for _ in range(3):
            counts.append(compiles.count())
            metrics = run.step()
        assert metrics["lr"] == pytest.approx(5e-4)  # also at the first step after a warm-up of 5
        assert run.roles["actor"].decoding is run.setup.decoding  # which no program gives back

    with begun_run("equal") as run:
        run.step()
    assert compiles.names(counts[1]) == []
    assert traced and (tmp_path / "traced").read_text() == traced

    def bare(names):
        return [name.removeprefix("jit(").removesuffix(")") for name in names]

    first = bare(compiles.names(counts[0])[: counts[1] - counts[0]])
    assert {*bare(begun), *first} <= BEFORE | STEP | more
    assert {"create", "grpo"} <= {*bare(begun), *first} and len(begun) + len(first) <= most


@pytest.mark.slow
def test_an_equal_run_of_this_process_compiles_nothing(tmp_path):
    """Also with a tokenizer of its own, and a learning rate over another number of steps is the
    only other program of a run that goes on longer."""

    def programs(name, steps):
        start = compiles.count()
        config = tiny_config(
            tmp_path / name, **SIZES, steps=steps, sft__steps=0, evaluate__prompts=4
        )
        train_on_one(config)
        return compiles.names(start)

    compiles.watch()
    assert "jit(grpo)" in programs("first", 2)
    assert programs("second", 2) == []
    assert set(programs("third", 3)) <= {"jit(lr)"}


def test_keys_of_one_program_are_those_of_jax_random():
    def same(a, b):
        return np.array_equal(*map(jax.random.key_data, (a, b)))

    for seed in (0, 7, 2**31 - 1, 2**31, 2**32 - 1):
        key = jax.random.key(seed)
        assert same(root_key(seed), key)
        for number in (0, 5, 2**32 - 1):
            assert same(fold_in(key, number), jax.random.fold_in(key, number))
            assert same(jax.jit(fold_in)(key, np.uint32(number)), fold_in(key, number))
    assert same(stream(key, "a", 3), stream(key, "a", jax.numpy.int32(3)))
    assert not same(stream(key, "a", 3), stream(key, "b", 3))
