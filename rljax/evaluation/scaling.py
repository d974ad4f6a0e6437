"""Scaling-law fit of performance against compute: a sigmoid (ScaleRL, arXiv 2510.13786), its fit to
points and to the metrics of a run folder, and its prediction for more compute."""

from collections.abc import Sequence

import numpy as np

from rljax.config.declare import check_options
from rljax.config.run_options import ScalingOptions
from rljax.errors import InputError
from rljax.report.head import check_is_run
from rljax.report.run_folder import RecordedRun, read_run
from rljax.runs.mirror import local_copy
from rljax.runs.store import is_folder


def sigmoid_curve(compute, *, start: float, asymptote: float, midpoint: float, steepness: float):
    """R(C) = start + (asymptote - start) / (1 + (midpoint / C)^steepness), for C of any shape."""
    compute = np.asarray(compute, np.float64)
    return start + (asymptote - start) / (1 + (midpoint / compute) ** steepness)


def fit_sigmoid(
    compute: Sequence[float], performance: Sequence[float], *, start: float, skip: int = 0
) -> dict[str, float]:
    """Least squares of `sigmoid_curve` over asymptote, midpoint and steepness; returns them and r2.

    `start` is the performance before training; the first `skip` points, where the curve is not yet
    a sigmoid, are left out. Compute in any unit: midpoint is in the same. Raises InputError unless
    at least 4 pairs are left, all finite and with compute above 0.
    """
    from scipy.optimize import least_squares

    x, y = (np.asarray(v, np.float64)[skip:] for v in (compute, performance))
    if x.shape != y.shape or x.size < 4 or (x <= 0).any() or not np.isfinite([x, y]).all():
        rule = "at least 4 pairs after `skip`, compute > 0, all finite"
        fix = "fit more evaluations, or lower --skip"
        raise InputError("fit_sigmoid", value=f"{x.size} and {y.size} points", rule=rule, fix=fix)

    def unpack(p):  # logarithms keep midpoint and steepness positive
        return dict(asymptote=p[0], midpoint=np.exp(p[1]), steepness=np.exp(p[2]))

    def residual(p):
        return sigmoid_curve(x, start=start, **unpack(p)) - y

    tries = [
        least_squares(residual, [max(y.max(), start + 1e-3), np.log(np.quantile(x, q)), np.log(b)])
        for q in (0.2, 0.5, 0.8)
        for b in (0.5, 1.0, 2.0, 4.0)
    ]
    best = min(tries, key=lambda fit: fit.cost)
    spread = float(np.sum((y - y.mean()) ** 2))
    r2 = 1 - 2 * best.cost / spread if spread > 0 else 0.0
    return {**{k: float(v) for k, v in unpack(best.x).items()}, "r2": float(r2)}


# -- run folders --


def points(run: RecordedRun, metric: str, compute: str) -> tuple[np.ndarray, np.ndarray]:
    """(compute [n], performance [n]) of the last phase of a run, at every step that logged
    `metric`. Compute is the number of steps of that phase, or another metric of metrics.jsonl
    summed over them."""
    phase = run.phases()[-1] if run.phases() else None
    rows = [row for row in run.rows if phase in (None, row["phase"])]
    offset = max((row["x"] for row in run.rows if row["phase"] != phase), default=0) if phase else 0
    total, out = 0.0, []
    for row in rows:
        if compute == "step":
            total = row["x"] - offset
        else:
            total += float(row.get(compute) or 0.0)
        if isinstance(row.get(metric), int | float) and total > 0:
            out.append((total, float(row[metric])))
    x, y = np.array(out, np.float64).reshape(-1, 2).T
    return x, y


def starting_value(run: RecordedRun, metric: str) -> float:
    """The performance before the last phase: the last value of the phase before, else the summary's
    evaluation at the start. Raises InputError where the run folder does not hold it."""
    phases = run.phases()
    if len(phases) > 1:
        _, values = run.columns(metric, phases[-2])
        if values.size:
            return float(values[-1])
    evaluation = run.summary.get("accuracy_before") if metric == "eval/accuracy" else None
    value = (evaluation or {}).get("value", (run.summary.get("eval_before") or {}).get(metric))
    if value is None:
        raise InputError(
            f"{run.folder} does not hold {metric} from before the training", fix="set --start"
        )
    return float(value)


def fit_runs(options: ScalingOptions) -> dict[str, dict[str, float]]:
    """The fit of every run folder: points, start, asymptote, midpoint, steepness, r2; with `until`
    the mean distance of the later points from the prediction, with `to` the value there. Raises
    InputError for a folder that is no run, and for too few points of the two metrics."""
    check_options(options)
    out = {}
    for folder in options.runs:
        if not is_folder(folder):
            raise InputError("no such run folder", value=folder, fix="name a folder of a run")
        with local_copy(folder) as path:
            check_is_run(path, folder)
            run = read_run(path)
        x, y = points(run, options.metric, options.compute)
        if not x.size:
            if not run.rows:
                rule, fix = "its metrics.jsonl has no rows", "name a run that has taken steps"
                raise InputError(f"{folder} has no steps to fit", rule=rule, fix=fix)
            raise InputError(
                f"{folder}/metrics.jsonl has no points of {options.metric} over {options.compute}",
                fix=f"--metric and --compute name two of {', '.join(run.keys())[:300]}",
            )
        start = starting_value(run, options.metric) if options.start is None else options.start
        used = x <= (options.until or np.inf)
        fit = fit_sigmoid(x[used], y[used], start=start, skip=options.skip)
        curve = {"start": start} | {k: fit[k] for k in ("asymptote", "midpoint", "steepness")}
        out[folder] = {"points": float(used.sum()), "start": start, **fit}
        if not used.all():
            error = np.abs(sigmoid_curve(x[~used], **curve) - y[~used])
            out[folder] |= {"later_points": float(error.size), "later_error": float(error.mean())}
        if options.to is not None:
            out[folder][f"predicted at {options.to:g}"] = float(sigmoid_curve(options.to, **curve))
    return out
