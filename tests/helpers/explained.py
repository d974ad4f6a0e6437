"""Whether every metric that is logged has a meaning in the glossary."""

from collections.abc import Iterable, Mapping

from rljax.report.meanings import meaning

NO_METRICS = {"step", "phase"}  # beside the metrics in a row of metrics.jsonl


def unexplained(*rows: Mapping | Iterable[str]) -> set[str]:
    """The names in the rows that the glossary does not know."""
    names = {name for row in rows for name in row} - NO_METRICS
    return {name for name in names if meaning(name) is None}
