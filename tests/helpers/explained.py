"""Whether every metric that is logged is declared in the module that makes it."""

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping

import rljax
from rljax.metric import Metric, declared_metrics, find_metric
from rljax.setup.role_table import ROLES

# Of roles; the last ones are names of `config.roles`.
PREFIXES = {*ROLES, "multiplier", "implicit", "student"}
NO_METRICS = {"step", "phase"}  # beside the metrics in a row of metrics.jsonl


@functools.cache
def declared() -> dict[str, Metric]:
    """The metrics of all modules of rljax."""
    for module in pkgutil.walk_packages(rljax.__path__, "rljax."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return declared_metrics()


def meaning(name: str) -> Metric | None:
    """The declaration of a logged name; None where no module has one."""
    return find_metric(name, declared(), PREFIXES)


def unexplained(*rows: Mapping | Iterable[str]) -> set[str]:
    """The names in the rows that no module declares."""
    names = {name for row in rows for name in row} - NO_METRICS
    return {name for name in names if meaning(name) is None}
