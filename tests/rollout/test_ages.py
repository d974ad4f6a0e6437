"""Ages: how many steps, and how many optimizer steps, the weights that drew a token are behind."""

import numpy as np
from conftest import worked_example
from golden_checks.common import response_batch

from rljax.batch import FinishReason
from rljax.learn.metrics import sample_metrics
from rljax.rollout.flight.ages import ages


def test_worked_example():
    example = worked_example("async.staleness")
    x, want = example["inputs"], example["outputs"]
    versions = np.array([x["token_version"]], np.int32)
    mask, now = np.ones(versions.shape, np.float32), x["trainer_version"]
    # A step of one optimizer step each: both counts are the same.
    older, metrics = ages(mask, versions, {v: v for v in range(now + 1)}, now)
    assert metrics["staleness/steps_max"] == want["lag_max"]
    assert np.isclose(metrics["staleness/steps_mean"], want["lag_mean"])
    assert metrics["staleness/span_max"] == want["versions_spanned"] - 1
    assert metrics["staleness/partial_fraction"] == 1
    np.testing.assert_array_equal(older, versions < 6)
    assert (metrics["staleness/steps_max"] <= example["params"]["max_lag"]) == want["keep"]
    batch = response_batch(mask, np.float32, policy_version=versions)
    batch = batch.replace(finish_reason=np.array([int(FinishReason.STOP)], np.int32))
    logged = sample_metrics(batch, now)
    assert float(logged["staleness/max"]) == want["lag_max"]
    assert np.isclose(float(logged["staleness/mean"]), want["lag_mean"])


def test_steps_are_not_optimizer_steps():
    """Steps of 4 optimizer steps each; step 2 was skipped, so that step 3 had the same weights."""
    step_of = {0: 0, 4: 1, 8: 3}
    versions = np.array([[0, 4, 4, 8], [8, 8, 0, 0], [4, 4, 4, 4]], np.int32)
    mask = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    older, metrics = ages(mask, versions, step_of, 4)
    # Ages of the policy's tokens: 4, 3, 1 and 1, 1.
    assert metrics == {
        "staleness/steps_mean": 2.0,
        "staleness/steps_max": 4.0,
        "staleness/span_max": 3.0,
        "staleness/partial_fraction": 1 / 3,
    }
    np.testing.assert_array_equal(older, [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
