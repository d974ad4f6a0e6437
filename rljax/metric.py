"""The declaration of a metric: its meaning, its unit and its healthy range, beside what makes it.

A module that makes metrics has a table of them by the names that are logged, and a function of your
own names its metrics in its contract (rljax.contracts):

    METRICS = {"ppo_k3": Metric("KL of the update", "nats per token", "below 0.05")}

    @contract(metrics={"my_ratio": Metric("chosen over rejected tokens", "ratio", "near 1")})
    def my_loss(policy, batch): ...

`*` in a name stands for any text, and {} in a meaning for that text.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Container, Mapping
from typing import NamedTuple

SLACK = 1e-6  # a correlation of 1 may be rounded to a little more
_NUMBER = r"-?\d+(?:\.\d+)?"
# The range that a text begins with: "below 0.1", "0.3 to 0.7", "0", before a comma or its end.
_RANGE = re.compile(
    rf"(?:(?P<word>below|above|at most|at least) (?P<bound>{_NUMBER})|"
    rf"(?P<low>{_NUMBER})(?: to (?P<high>{_NUMBER}))?)(?=$|[,;:])"
)


@dataclasses.dataclass(frozen=True)
class Metric:
    """The declaration of a metric. `healthy` is a rule of thumb in words.

    With `limits`, (lowest, highest), a run warns outside of them, `advice` says where to look then,
    and `healthy` is the range in words.
    """

    meaning: str
    unit: str = ""
    healthy: str = ""
    limits: tuple[float, float] | None = None
    advice: str = ""

    def __post_init__(self):
        if self.limits is not None:
            low, high = self.limits
            object.__setattr__(self, "limits", (low, high))
            range_ = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
            object.__setattr__(self, "healthy", range_)

    def is_healthy(self, value: float) -> bool:
        """Returns False outside of the limits, and for NaN; True where there are none."""
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
        """Returns one line: meaning, unit, healthy range."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.meaning}{unit}" + (f". Healthy: {self.healthy}" if self.healthy else "")


class MetricAt(NamedTuple):
    """The value [B, S] of a metric that counts other tokens than those with mask 1: only where
    `counted` [B, S], bool."""

    value: object
    counted: object


def declared_metrics(packages: tuple[str, ...] = ("rljax.",)) -> dict[str, Metric]:
    """Returns the metrics that the loaded modules of rljax declare, or those of them whose names
    begin so. A metric that was logged is one of a loaded module."""
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    tables = [vars(module).get("METRICS", {}) for module in modules]
    return {name: metric for table in tables for name, metric in table.items()}


def find_metric(
    name: str, declared: Mapping[str, Metric], roles: Container[str] = ()
) -> Metric | None:
    """Returns the declaration of a logged name, None where there is none. A metric of held-out rows
    has "eval/" in front of its name, one of another role than the actor that role's name, which is
    one of `roles`."""
    if name in declared:
        return declared[name]
    fitting = [key for key in declared if "*" in key and _stands_for(key, name)]
    if fitting:
        pattern = max(fitting, key=len)  # the most specific
        start, end = pattern.split("*")
        text = name[len(start) : len(name) - len(end)].replace("_", " ")
        metric = declared[pattern]
        return dataclasses.replace(metric, meaning=metric.meaning.replace("{}", text))
    prefix, _, rest = name.partition("/")
    metric = None
    if prefix == "eval":
        metric = find_metric(rest, declared, roles)
    elif prefix in roles:
        metric = declared.get(rest)
    if metric is None:
        return None
    where = "of held-out rows" if prefix == "eval" else f"of {prefix}"
    return dataclasses.replace(metric, meaning=f"{where}: {metric.meaning}")


def _stands_for(pattern: str, name: str) -> bool:
    start, end = pattern.split("*")
    long_enough = len(name) > len(start) + len(end)
    return long_enough and name.startswith(start) and name.endswith(end)
