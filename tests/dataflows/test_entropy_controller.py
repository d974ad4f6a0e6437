"""The entropy bonus whose coefficient adapts to a target (Skywork-OR1): its rule, what it sees of a
batch, and the bonus that it leads to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_checks.common import response_batch
from preset_runs import Shared, preset_config

from rljax import setup as build
from rljax.batch import NOT_SAMPLED
from rljax.dataflows.steps import adapt_entropy_coef
from rljax.errors import InputError
from rljax.roles import EntropyController, EntropySchedule
from rljax.validation import validate

TARGET, SIZE, MOST = 0.25, 0.005, 0.02


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("entropy"))
    yield runs
    runs.close()


def started(shared, name, **algorithm):
    config = preset_config(name)
    config.algorithm = dataclasses.replace(config.algorithm, **algorithm)
    run = shared.run(config)
    run.begin(run.setup.main, build.initial_params(config, run.setup.model))
    return run


@dataclasses.dataclass
class Cfg:
    entropy_coef: float = 0.5

    def replace(self, **fields):
        return dataclasses.replace(self, **fields)


def published(entropies, c: float, target: float, size: float, most: float):
    """(the coefficient of each step, c after it), as the paper has them, in Python's floats."""
    applied, after = [], []
    for entropy in entropies:
        applied.append(c if entropy <= target else 0.0)
        c = min(c + size, most) if entropy < target else max(c - size, 0.0)
        after.append(c)
    return applied, after


def sampled(entropies, dtype=jnp.float64) -> list:
    """Batches of those mean entropies, with NaN at what the policy did not choose, and a row
    without tokens."""
    mask = np.array([[0, 0, 1, 1, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], np.float64)
    random = np.random.default_rng(0)
    batches = []
    for entropy in entropies:
        spread = np.where(mask > 0, random.normal(size=mask.shape), 0.0)
        spread = np.where(mask > 0, spread - spread.sum() / mask.sum(), np.nan)
        logprobs = np.where(mask > 0, spread - entropy, np.nan)
        batches.append(response_batch(mask, dtype, sampler_logprobs=logprobs))
    return batches


def test_texts_of_the_data_are_no_samples():
    """The entropy is that of the samples, whatever a demonstration has for log-probs."""
    batch = response_batch(
        np.ones((2, 2)),
        jnp.float32,
        sampler_logprobs=[[-0.5, -0.5], [0.0, 0.0]],
        policy_version=[[4, 4], [NOT_SAMPLED, NOT_SAMPLED]],
    )
    controller = EntropyController(jnp.float32(0.01), TARGET, SIZE, MOST)
    metrics = adapt_entropy_coef(batch, Cfg(), controller)[2]
    assert float(metrics["entropy_controller/entropy"]) == 0.5


@pytest.mark.parametrize("start", [0.0, 0.013, MOST])
def test_the_coefficient_follows_the_published_rule(start):
    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        entropies = [*random.uniform(0, 0.5, 60), *[0.1] * 8, *[0.4] * 9, 0.1, 0.1]
        controller = EntropyController(jnp.float64(start), TARGET, SIZE, MOST)
        coefficients, states = published(entropies, start, TARGET, SIZE, MOST)
        batches = sampled(entropies)

        @jax.jit
        def adapted(batch, role):
            cfg, role, metrics = adapt_entropy_coef(batch, Cfg(), role)
            return cfg.entropy_coef, role, metrics

        for batch, entropy, alpha, after in zip(
            batches, entropies, coefficients, states, strict=True
        ):
            coefficient, controller, metrics = adapted(batch, controller)
            assert float(coefficient) == pytest.approx(alpha, abs=1e-12)
            assert float(metrics["entropy_controller/coef"]) == float(coefficient)
            assert float(metrics["entropy_controller/entropy"]) == pytest.approx(entropy)
            assert float(controller.state) == pytest.approx(after, abs=1e-12)
        assert {0.0, MOST} <= {round(x, 9) for x in states}  # both bounds were reached


def test_at_the_target_the_bonus_applies_and_the_coefficient_falls():
    controller = EntropyController(jnp.float32(0.01), TARGET, SIZE, MOST)
    exactly = jnp.float32(TARGET)
    assert float(controller.coefficient(exactly)) == pytest.approx(0.01)
    assert float(controller.update(exactly).state) == pytest.approx(0.005)
    assert float(controller.coefficient(exactly + 1e-3)) == 0


def test_a_step_without_tokens_moves_nothing():
    batch = sampled([0.0], jnp.float32)[0]
    none = batch.replace(mask=jnp.zeros_like(batch.mask))
    controller = EntropyController(jnp.float32(0.01), TARGET, SIZE, MOST)
    cfg, after, _ = adapt_entropy_coef(none, Cfg(), controller)
    assert float(cfg.entropy_coef) == 0 and float(after.state) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("linear(final=0.2)", [0.5 * (1 - 0.2 * k) for k in range(5)]),
        ("cosine()", [0.25 * (1 + np.cos(np.pi * k / 4)) for k in range(5)]),
    ],
)
def test_a_schedule_moves_the_coefficient_whatever_the_entropy_is(text, expected):
    role = EntropySchedule(jnp.array([0.5, 0.0]), text, 4)
    found = []
    for batch in sampled([0.1, 9.0, 0.0, 0.3, 0.3], jnp.float32):
        cfg, role, metrics = adapt_entropy_coef(batch, Cfg(), role)
        found.append(float(metrics["entropy_controller/coef"]))
        assert float(cfg.entropy_coef) == found[-1]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_a_run_follows_the_schedule_of_its_steps(shared):
    """The coefficient falls on a line over the run's steps; the step is in the checkpoint."""
    run = started(shared, "grpo", entropy_coef=0.04, entropy_schedule="linear()")
    steps = run.config.steps
    coefs = [run.step()["entropy_controller/coef"] for _ in range(2)]
    assert coefs == pytest.approx([0.04, 0.04 * (1 - 1 / steps)])
    assert build.role_arrays(run.roles)["entropy_controller"].tolist() == pytest.approx([0.04, 2])


def test_without_a_controller_the_config_is_as_it_was():
    cfg = Cfg()
    assert adapt_entropy_coef(sampled([0.1], jnp.float32)[0], cfg) == (cfg, None, {})
    bare = dataclasses.replace(sampled([0.1], jnp.float32)[0], sampler_logprobs=None)
    controller = EntropyController(jnp.float32(0.01), TARGET, SIZE, MOST)
    with pytest.raises(InputError, match="sampler_logprobs"):
        adapt_entropy_coef(bare, cfg, controller)


@pytest.mark.slow
def test_the_bonus_is_that_of_the_coefficient_and_is_checkpointed(shared):
    """A step at the adapted coefficient is a step at the same fixed one; both bounds of the entropy
    are seen."""
    high = dict(entropy_target=50.0, entropy_coef_step=0.01, entropy_coef=0.03)
    run, fixed = started(shared, "grpo", **high), started(shared, "grpo", entropy_coef=0.03)
    first = run.step()
    assert first["entropy_controller/coef"] == pytest.approx(0.03)
    assert 0 < first["entropy_controller/entropy"] < 50
    plain = fixed.step()
    assert first["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    weights = [jax.tree.leaves(jax.device_get(r.roles["actor"].state.params)) for r in (run, fixed)]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    arrays = build.role_arrays(run.roles)
    assert float(arrays["entropy_controller"]) == pytest.approx(0.04)
    second = run.step()
    assert second["entropy_controller/coef"] == pytest.approx(0.04)
    again = build.with_arrays(run.roles, {**arrays, "entropy_controller": jnp.float32(0.5)})
    assert float(again["entropy_controller"].state) == 0.5
    low = started(shared, "grpo", entropy_target=1e-6, entropy_coef=0.03)
    assert low.step()["entropy_controller/coef"] == 0
    assert float(build.role_arrays(low.roles)["entropy_controller"]) == pytest.approx(0.025)


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(entropy_coef=0.0), "that is 0"),
        (dict(entropy_target=0.2), "moves the coefficient already"),
        (dict(entropy_schedule="linear(last=0)"), "last"),
        (dict(entropy_schedule="line()"), "line"),
        (dict(dataflow="raft"), "takes no entropy_controller"),
    ],
)
def test_a_schedule_of_nothing_is_refused(changes, problem):
    config = preset_config("grpo")
    config.dataflow = changes.pop("dataflow", config.dataflow)
    changes = dict(entropy_coef=0.01, entropy_schedule="linear()") | changes
    config.algorithm = dataclasses.replace(config.algorithm, **changes)
    with pytest.raises(InputError, match=problem):
        validate(config)


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(dataflow="raft"), "takes no entropy_controller"),
        (dict(entropy_coef=2.0), "starts above entropy_coef_max"),
        (dict(observation_coef=0.1), "no environment whose words"),
    ],
)
def test_a_target_that_nothing_keeps_is_refused(changes, problem):
    config = preset_config("grpo")
    config.dataflow = changes.pop("dataflow", config.dataflow)
    config.algorithm = dataclasses.replace(config.algorithm, entropy_target=0.2, **changes)
    with pytest.raises(InputError, match=problem):
        validate(config)
