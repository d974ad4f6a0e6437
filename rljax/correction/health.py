"""Warnings of a run about metrics outside of their healthy range: those of sampler against trainer,
and those of a user's own functions that declare limits."""

from collections.abc import Mapping

from rljax.correction import metrics as of_mismatch
from rljax.correction import rejection, weights
from rljax.correction.metrics import OTHER_POLICY
from rljax.metric import Metric

LIMITED = {
    name: metric
    for table in (of_mismatch.METRICS, weights.METRICS, rejection.METRICS)
    for name, metric in table.items()
    if metric.limits is not None
}
# The largest healthy values, by the narrowest numbers that a run computes with or holds.
LARGEST_DIFFERENCE = {
    "abs_logprob_diff_mean": {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.05, "int8": 0.1},
    "abs_logprob_diff_p99": {"float32": 1e-2, "float16": 0.05, "bfloat16": 0.3, "int8": 0.6},
}
# These ranges hold for a sampler that has the trainer's weights. Where it has older ones on
# purpose, the effective sample size says whether too little is left to learn from.
_OF_ONE_POLICY = (
    "mismatch/mismatch_kl",
    "mismatch/mismatch_k3_kl",
    "mismatch/probability_correlation",
)


def health_warnings(
    metrics: Mapping[str, float], numbers: str = "", own: Mapping[str, Metric] | None = None
) -> list[str]:
    """Returns a text for each metric outside of its limits: name, value, range and where to look.

    `numbers`: float32, float16, bfloat16 or int8, the narrowest that sampler and trainer compute
    with or hold; "" where they are not one policy (stored rollouts, old weights). `own`: the
    metrics of the user's functions.
    """
    warnings, age_note = [], ""
    if age := metrics.get("staleness/steps_mean"):
        age_note = (
            f"; the tokens are {float(age):.2g} steps old, mean: lower rollouts.max_staleness "
        )
        age_note += "or rollouts.ahead"
    for name, metric in {**LIMITED, **(own or {})}.items():
        value = metrics.get(name)
        if value is None or metric.is_healthy(float(value)) or age_note and name in _OF_ONE_POLICY:
            continue
        text = f"{name} is {float(value):.4g}, healthy is {metric.healthy}: {metric.advice}"
        warnings.append(text + (age_note if name in LIMITED else ""))
    for name, largest in LARGEST_DIFFERENCE.items() if numbers else ():
        value = metrics.get(f"mismatch/{name}")
        if value is not None and not value <= largest[numbers]:  # NaN, too
            warnings.append(
                f"mismatch/{name} is {float(value):.4g}, healthy is at most {largest[numbers]:g} "
                f"with {numbers}: {OTHER_POLICY}"
            )
    return warnings
