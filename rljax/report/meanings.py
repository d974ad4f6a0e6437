"""Meanings of metrics by name, and warnings about those outside their healthy range: the data of
rljax.report.glossary, looked up. A metric that is the user's own has no meaning here."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from rljax.config import Config
from rljax.report.glossary import METRICS, UPDATE
from rljax.report.mismatch_glossary import LARGEST_DIFFERENCE, MISMATCH, OTHER_POLICY

# Ranges for a sampler that has the trainer's weights. Of older ones on purpose the effective sample
# size says whether too little is left to learn from.
OF_ONE_POLICY = ("mismatch_kl", "mismatch_k3_kl", "probability_correlation")
SLACK = 1e-6  # a correlation of 1 may be rounded to a little more
_NUMBER = r"-?\d+(?:\.\d+)?"
# How a text begins that names a range: "below 0.1", "0.3 to 0.7", "0", before a comma or its end.
_RANGE = re.compile(
    rf"(?:(?P<word>below|above|at most|at least) (?P<bound>{_NUMBER})|"
    rf"(?P<low>{_NUMBER})(?: to (?P<high>{_NUMBER}))?)(?=$|[,;:])"
)


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a metric says, its unit, and what is healthy, in words; `limits` are the healthy range
    where a run warns outside of it, and `advice` says where to look then."""

    text: str
    unit: str = ""
    healthy: str = ""
    limits: tuple[float, float] | None = None
    advice: str = ""

    def is_healthy(self, value: float) -> bool:
        """False outside of the limits, and for NaN; True where there are none."""
        if self.limits is None:
            return True
        low, high = self.limits
        return low - SLACK <= value <= high + SLACK

    def outside(self, value: float) -> bool:
        """Returns whether a value is outside of the range that `healthy` begins with, such as
        "below 0.1; more: ..."; False where it names none. Of such a range no run warns."""
        if self.limits is not None:
            return not self.is_healthy(value)
        found = _RANGE.match(self.healthy)
        if found is None or math.isnan(value):
            return False
        if found["word"] in ("below", "at most"):
            return value > float(found["bound"]) + SLACK
        if found["word"]:
            bound = float(found["bound"])
            return value < bound - SLACK or found["word"] == "above" and value <= bound + SLACK
        low, high = float(found["low"]), float(found["high"] or found["low"])
        return not low - SLACK <= value <= high + SLACK

    def line(self) -> str:
        """One line: meaning, unit, what is healthy."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.text}{unit}" + (f". Healthy: {self.healthy}" if self.healthy else "")


@functools.cache
def meaning(name: str) -> Meaning | None:
    """The meaning of a metric, None for one that rljax does not log."""
    if name in METRICS:
        return _made(METRICS[name])
    for pattern, stars in _PATTERNS:
        found = stars.fullmatch(name)
        if found:
            return _made(METRICS[pattern], found[1])
    prefix, _, rest = name.partition("/")
    known = meaning(rest) if prefix == "eval" or rest in UPDATE else None
    if known is None:
        return None
    where = "of held-out rows" if prefix == "eval" else f"of {prefix}"
    return dataclasses.replace(known, text=f"{where}: {known.text}")


_PATTERNS = [
    (name, re.compile(re.escape(name).replace(r"\*", "(.+)"), re.DOTALL))
    for name in METRICS
    if "*" in name
]


def _made(entry: tuple, star: str = "") -> Meaning:
    text, unit, healthy = entry
    text = text.replace("{}", star.replace("_", " "))
    if isinstance(healthy, str):
        return Meaning(text, unit, healthy)
    low, high, advice = healthy
    return Meaning(text, unit, f"{low:g} to {high:g}", (low, high), advice)


def health_warnings(metrics: Mapping[str, float], numbers: str = "") -> list[str]:
    """One text per metric of the mismatch and the correction outside its healthy range: name,
    value, range and where to look. `numbers`: float32, float16, bfloat16 or int8, the narrowest
    that sampler and trainer compute with or hold; "" where they are not one policy (stored
    rollouts, old weights)."""
    warnings, of_age = [], ""
    if age := metrics.get("staleness/steps_mean"):
        of_age = f"; the tokens are {float(age):.2g} steps old, mean: lower rollouts.max_staleness "
        of_age += "or rollouts.ahead"
    for name in MISMATCH:
        known, value = meaning(f"mismatch/{name}"), metrics.get(f"mismatch/{name}")
        if value is None or known.is_healthy(float(value)) or of_age and name in OF_ONE_POLICY:
            continue
        text = f"mismatch/{name} is {float(value):.4g}, healthy is {known.healthy}: {known.advice}"
        warnings.append(text + of_age)
    for name, largest in LARGEST_DIFFERENCE.items() if numbers else ():
        value = metrics.get(f"mismatch/{name}")
        if value is not None and not value <= largest[numbers]:  # NaN, too
            warnings.append(
                f"mismatch/{name} is {float(value):.4g}, healthy is at most {largest[numbers]:g} "
                f"with {numbers}: {OTHER_POLICY}"
            )
    return warnings


def narrowest_numbers(config: Config, mesh) -> str:
    """The `numbers` of `health_warnings` for a run of this config. On accelerators products of
    float32 are coarser by default, about as those of bfloat16."""
    sampler, trainer = config.sampler, config.model_settings.dtype
    computed = (trainer, sampler.dtype or trainer)
    held = (*computed, sampler.kv_dtype, sampler.weight_dtype)
    if config.rollouts.replay or config.rollouts.max_staleness:
        return ""
    if "int8" in held:
        return "int8"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if "bfloat16" in held or "float32" in computed and not on_cpu:
        return "bfloat16"
    return "float16" if "float16" in held else "float32"
