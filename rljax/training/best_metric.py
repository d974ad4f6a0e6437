"""Compares checkpoint.best_metric with the metrics of a run: at its start, after its first step,
and at its end."""

import dataclasses
from collections.abc import Container, Mapping

from rljax.config.trust import own_components
from rljax.errors import InputError
from rljax.evaluation import in_training, reward_models
from rljax.evaluation.in_training import counts_of
from rljax.metric import Metric, declared_metrics, find_metric
from rljax.setup import Setup
from rljax.setup.dry_run import dry_run
from rljax.setup.role_table import abstract_roles
from rljax.suggest import near_names

_EVALUATION = "eval/"  # beginning of the names of an evaluation's metrics


def check_best_metric(setup: Setup, user_metrics: Mapping[str, Metric]) -> None:
    """Raises InputError for a checkpoint.best_metric that no step of the run can measure: the best
    step would not be kept. `user_metrics` are the metrics that the user's functions declare. Such
    a function may return others, too: `not_measured` warns of those."""
    text = setup.config.checkpoint.best_metric
    name = text.removeprefix("-")
    if not text:
        return
    evaluation_metrics = _evaluation_metrics(setup)
    metrics, rule = evaluation_metrics, "no evaluation of this run measures it"
    if not name.startswith(_EVALUATION):
        rule = "no metric of this run has that name"
        if own_components(setup.config) and name:
            return
        metrics = {
            **declared_metrics(),
            **user_metrics,
            **dict.fromkeys(dry_run(setup, setup.main)[0]),
        }
    if _declares(name, metrics, _prefixes(setup)):
        return
    raise InputError(
        "checkpoint.best_metric", value=text, rule=rule, fix=_fix(text, metrics, evaluation_metrics)
    )


def _fix(text: str, metrics: Mapping[str, object], evaluation_metrics: Mapping[str, object]) -> str:
    name = text.removeprefix("-")
    if name.startswith(("eval/", "eval_")) and not evaluation_metrics:
        return (
            "hold rows out by data.test or data.test_fraction, whose metrics begin with eval/, or "
            "checkpoint.best_metric='' (off)"
        )
    names = [other for other in {**metrics, **evaluation_metrics} if "*" not in other]
    our_name = name.replace("eval_", _EVALUATION, 1)  # as the trainers of transformers write it
    near_metrics = [our_name] if our_name in names else near_names(name, names, 2)
    sign = text[: len(text) - len(name)]
    fixes = [f"checkpoint.best_metric={sign + other!r}" for other in near_metrics]
    return " or ".join(fixes) or "a metric of metrics.jsonl, or checkpoint.best_metric='' (off)"


def _evaluation_metrics(setup: Setup) -> dict[str, Metric | None]:
    """Returns the metrics of the run's evaluations by their names, some with a `*`."""
    metrics: dict[str, Metric | None] = {}
    if setup.data.held_out:
        steps = dataclasses.replace(setup.algorithm.steps, learn=False)
        algorithm = setup.algorithm.replace(steps=steps)
        step_metrics, _ = dry_run(setup, dataclasses.replace(setup.main, algorithm=algorithm))
        metrics |= {f"{_EVALUATION}{name}": None for name in step_metrics}
        if setup.main.data == "pairs" and "reward_model" in setup.dataflow.parameters:
            metrics |= reward_models.METRICS
    if setup.data.test_prompts:
        pass_at = "eval/pass@"
        metrics |= {k: v for k, v in in_training.METRICS.items() if not k.startswith(pass_at)}
        samples = setup.config.evaluate.samples
        for k in counts_of(samples) if samples else ():
            metrics |= dict.fromkeys(f"{pass_at}{k}{end}" for end in ("", "_low", "_high"))
    return metrics


def _declares(name: str, metrics: Mapping[str, Metric | None], roles: Container[str]) -> bool:
    patterns = {key: metric for key, metric in metrics.items() if metric is not None}
    if name.startswith(_EVALUATION):  # find_metric accepts any metric behind the prefix
        patterns = {key: metric for key, metric in patterns.items() if key.startswith(_EVALUATION)}
    return name in metrics or find_metric(name, patterns, roles) is not None


def _prefixes(setup: Setup) -> Container[str]:
    roles = abstract_roles(setup)
    return {*roles, *(getattr(role, "prefix", "").removesuffix("/") for role in roles.values())}


def not_measured(best_metric: str, metrics: Container[str]) -> str:
    """Returns a warning if the first step of the last phase did not measure `best_metric`, else "".
    Metrics of evaluations come later."""
    name = best_metric.removeprefix("-")
    if not name or name.startswith(_EVALUATION) or name in metrics:
        return ""
    return (
        f"checkpoint.best_metric={best_metric!r}: the first step did not measure it; a step that "
        "does not is never the best. metrics.jsonl lists what is measured"
    )


def none_was_best(best_metric: str, best: int | None) -> str:
    """Returns a warning if a finished run has no checkpoint that is the best, else ""."""
    if not best_metric or best is not None:
        return ""
    return (
        f"checkpoint.best_metric={best_metric!r}: no saved step has a finite value of it, so that "
        "none was kept as the best"
    )
