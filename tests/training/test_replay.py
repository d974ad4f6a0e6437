"""A step that is not finite keeps its batch, and `rljax replay` names the operation that began
it."""

import logging
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import metrics_rows, tiny_config, train_on_one

from rljax.command import main
from rljax.errors import InputError
from rljax.training import bad_batch
from rljax.training.nonfinite import INF, NAN, trace
from rljax.training.replay import replay

LOSS = '''
import jax.numpy as jnp
from rljax.losses.policy import ppo_clip

def over_distance(policy, batch, *, version):
    """ppo_clip over the distance to an update count: it divides by zero for one batch."""
    loss, metrics = ppo_clip(policy, batch)
    distance = jnp.float32(version) - batch.policy_version.max()
    masked = jnp.where(batch.mask > 0, 0.0, jnp.log(batch.mask - 1.0))  # NaN that no row keeps
    return loss / distance + jnp.where(batch.mask > 0, masked, 0.0), metrics
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of 3 steps, of which the second, at version 1, is not finite."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "distance_loss.py").write_text(LOSS)
    sys.path.insert(0, str(folder))
    config = tiny_config(
        folder / "run",
        steps=3,
        sft__steps=0,
        evaluate__prompts=4,
        evaluate__every_steps=0,
        model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
        batch__sequences_per_optimizer_step=16,
        batch__packing=False,
        algorithm__policy_loss="distance_loss.over_distance(version=1)",
        export=False,
        profile_steps=(3, 3),
    )
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(logging.getLogger("rljax"), "warning", lambda text, *a: said.append(text % a))
        train_on_one(config)
    yield folder / "run", said
    sys.path.remove(str(folder))


@pytest.mark.slow  # test_faults.py has it of a run that ends
def test_the_first_bad_batch_is_kept_and_the_run_goes_on(run):
    folder, said = run
    rows = metrics_rows(folder)
    assert [row.get("skipped_steps", 0.0) for row in rows] == [0.0, 1.0, 1.0]  # version stays 1
    assert bad_batch.kept_steps(folder) == [2]
    with np.load(folder / "bad" / "00000002.npz") as file:
        assert file["tokens"].shape == (16, 13) and file["policy_version"].max() == 1
    told = [text for text in said if "rljax replay" in text]
    assert len(told) == 1 and f"replay {folder} --step=2" in told[0]
    report = (folder / "report.html").read_text()
    assert 'href="bad/"' in report and 'href="profile/"' in report


@pytest.mark.slow  # each operation is a program of its own: a thousand of them
def test_replay_names_the_line_that_divided_by_zero(run, capsys):
    folder, _ = run
    found = replay(folder, trust_code=True, devices=jax.devices()[:1])
    out = "\n".join(found.lines())
    line = next(i for i, text in enumerate(LOSS.splitlines(), 1) if "loss / distance" in text)
    assert out.startswith("step 2, phase rl, on the weights of step 2")
    assert "\nactor: div made infinity" in out and f"distance_loss.py:{line}" in out
    assert "operand 2: float32[] 0.0" in out and "reduce_sum made NaN" in out
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder), "--step=3", "--trust_code", "--compilation_cache="])
    assert ended.value.code == 2 and "no batch of step 3" in capsys.readouterr().err


@pytest.mark.slow
def test_code_that_is_not_trusted_is_refused(run, tmp_path):
    folder, _ = run
    with pytest.raises(InputError, match="distance_loss"):
        replay(shutil.copytree(folder, tmp_path / "moved"))  # no run that began here


def test_what_is_no_run_is_refused_as_that(tmp_path):
    with pytest.raises(InputError, match="no such run folder"):
        replay(tmp_path / "none")
    with pytest.raises(InputError, match="no run has begun in this folder"):
        replay(tmp_path)


@pytest.mark.slow
def test_a_file_that_is_no_batch_is_refused(run, tmp_path):
    folder, _ = run
    path = bad_batch.path_of(tmp_path / "bad", 2)
    path.parent.mkdir()
    whole = (folder / "bad" / "00000002.npz").read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"PK" * 40):
        path.write_bytes(data)
        with pytest.raises(InputError, match="cannot be read as a batch"):
            bad_batch.read(tmp_path, 2, None)
    np.savez(path, tokens=np.zeros((2, 3), np.int32), colour=np.zeros(2))
    with pytest.raises(InputError, match="colour"):
        bad_batch.read(tmp_path, 2, None)


# -- which operation --


def guarded(x, weights):
    """A loss behind masks, a scan and remat, and the counter of a step that is not finite."""

    def loss(weights):
        def layer(carry, row):
            carry = jnp.tanh(carry * weights)
            return carry, jnp.sum(carry) / row

        _, rows = jax.lax.scan(jax.checkpoint(layer), jnp.ones(3), x)
        masked = jnp.where(x > 0, jnp.log(x), 0.0)
        attention = jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))
        return jnp.sum(rows) + jnp.sum(masked) + jnp.sum(attention)

    value, gradient = jax.value_and_grad(loss)(weights)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    return {"loss": jnp.where(finite, value, 0.0), "skipped": (~finite).astype(jnp.int32)}


def marks_of(function, *arguments, names=()):
    return trace(jax.jit(function), *arguments, names=names)


def test_masked_numbers_are_no_fault_and_loops_are_entered():
    weights = jnp.full(3, 0.5)
    good = jnp.array([1.0, 2.0, -1.0, -4.0])  # log of -1, softmax of -inf: behind masks
    out, marks = marks_of(guarded, good, weights)
    assert out["skipped"] == 0 and marks == {"loss": {}, "skipped": {}}
    np.testing.assert_allclose(out["loss"], jax.jit(guarded)(good, weights)["loss"], rtol=1e-5)
    out, marks = marks_of(guarded, good.at[2].set(0.0), weights)
    assert out["skipped"] == 1 and marks["loss"] == {}  # the step reports 0
    (origin,) = marks["skipped"].values()
    assert (origin.kind, origin.operation) == (INF, "div")
    assert "test_replay.py" in origin.location and "layer" in origin.location
    assert "iteration 3 of 4" in origin.loops and origin.operands[1].endswith(" 0.0")


def test_a_nan_made_of_an_infinity_names_both_and_inputs_are_told_apart():
    def difference(batch, weights):
        large = batch["x"] * 1e30 * weights
        return jnp.sum(large - large)

    _, marks = marks_of(difference, {"x": jnp.float32([1.0, 1e20])}, jnp.ones(2))
    origin = marks[NAN]
    assert origin.operation == "sub" and "1 of 2 numbers, the first at [1]" in origin.count
    assert origin.cause.kind == INF and origin.cause.operation == "mul"
    _, marks = marks_of(
        difference, {"x": jnp.float32([1.0, np.nan])}, jnp.ones(2), names=("batch", "weights")
    )
    assert marks[NAN].operation == "the input batch['x']"


@pytest.mark.parametrize("start, turns", [(3.0, 3), (0.0, 0)])
def test_while_and_cond_are_entered(start, turns):
    def counted(x):
        def turn(carry):
            left, total = carry

            def bad():
                return jnp.log(left - 1.0)

            return left - 1.0, total + jax.lax.cond(left <= 1.0, bad, lambda: 1.0)

        left, total = jax.lax.while_loop(lambda carry: carry[0] > 0, turn, (x, jnp.float32(0.0)))
        return total, ~jnp.isfinite(total)

    (total, flag), (mark, of_flag) = marks_of(counted, jnp.float32(start))
    assert bool(flag) == bool(turns) and np.isinf(total) == bool(turns)
    if turns:
        assert mark[INF].operation == "log" and "iteration 3" in mark[INF].loops
        assert of_flag[INF] == mark[INF]
    else:
        assert mark == {} and of_flag == {}
