"""What a run says of samples without a score: when it stops, and whom a time limit hits."""

import logging

from rljax.errors import InputError
from rljax.rollout import ScoredRow
from rljax.training.run import Run

LOG = logging.getLogger("rljax")
_UNSCORED_STEPS = 3  # in a row: then the run stops
_LATE_SAMPLES = 8  # before length is blamed,
_LONGER = 0.75  # and the share of pairs in which the late response is the longer one
_SHOWN_CHARACTERS = 200


def shown_sample(row: ScoredRow) -> str:
    """One line: why a sample has no score, and its prompt, response and ground truth."""
    fields = ("prompt", "response", "ground_truth")
    texts = [f"{name} {_shortened(row.sample[name])}" for name in fields if name in row.sample]
    return "; ".join([f"{row.score.status}: {row.score.message}", *texts])


def _shortened(value: object) -> str:
    text = repr(value)
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def check_scores(run: Run, metrics: dict) -> None:
    """After a step: raises InputError where several steps in a row had no score, because none of
    them taught anything; warns where the samples over a time limit are the long ones."""
    failed = sum(metrics.get(f"reward/{kind}", 0.0) for kind in ("errors", "timeouts"))
    if "reward/errors" not in metrics:
        return
    unscored = 0 < metrics.get("batch/completions", 0.0) <= failed
    run.unscored_steps = run.unscored_steps + 1 if unscored else 0
    if run.unscored_steps >= _UNSCORED_STEPS:
        raise _no_scores(
            run, f"stopped at step {run.progress.step}: no reward of {run.unscored_steps} steps in "
            f"a row was a score, and nothing was learned from them",
        )  # fmt: skip
    _warn_of_long_ones(run, metrics)


def require_scores(run: Run) -> None:
    """Raises InputError for a run that ends without one score: it has learned nothing."""
    failed = sum(run.progress.faults.get(f"reward/{k}", 0.0) for k in ("errors", "timeouts"))
    if run.setup.needs_reward and 0 < run.progress.completions <= failed:
        raise _no_scores(
            run,
            f"no reward of this run was a score: all {failed:.0f} failed, and nothing was learned",
        )


def _no_scores(run: Run, what: str) -> InputError:
    report = run.source.report  # None right after a resume
    row = next((row for row in (report.rows if report else ()) if row.score.status != "ok"), None)
    return InputError(
        what,
        rule=f"the first one of the last step: {shown_sample(row)}" if row else "",
        fix="look at the reward, its options, or the server that it asks",
    )


def _warn_of_long_ones(run: Run, metrics: dict) -> None:
    longer = metrics.get("reward/timeout_longer_fraction")
    if longer is None:
        return
    masked, scored = (metrics.get(f"reward/{k}", 0.0) for k in ("timeouts", "timeouts_scored"))
    before, late = run.late_samples, masked + scored
    run.late_samples += late
    run.late_and_longer += late * longer
    share = run.late_and_longer / run.late_samples
    if before < _LATE_SAMPLES <= run.late_samples and share >= _LONGER:
        what = (
            "they are masked, so a policy can avoid a bad score by writing more. If the reward "
            "asks no server, declare what it is worth then: @rljax.contracts.contract("
            "on_timeout=0.0)"
            if masked
            else "they have the score that the reward declares for that"
        )
        LOG.warning(
            "step %d: %d responses were over the limits of the reward, and %.0f %% of the time the "
            "late response is the longer one: %s",
            run.progress.step, run.late_samples, 100 * share, what,
        )  # fmt: skip
