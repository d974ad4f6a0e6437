"""Names of metrics that a function of the user's returns: none may be one that the run itself logs,
which would be lost, or replaced by another number."""

from collections.abc import Callable, Container, Iterable

from rljax.errors import InputError, location_of
from rljax.metric import declared_metrics, find_metric

OF_A_ROW = ("step", "phase")  # of every row of metrics.jsonl
OF_A_RUN = ("time/", "eval/")  # beginnings of names that a run measures


def check_metric_names(
    label: str,
    names: Iterable[object],
    function: Callable,
    *,
    like: tuple[str, ...] = (),
    roles: Container[str] = (),
) -> None:
    """Raises InputError for names that are no texts, and for those that are taken: by a row, and by
    the modules of rljax that declare them. Functions of rljax itself are not checked.

    Args:
      label: the field of the config, and its text.
      names: of the metrics that `function` returned.
      function: whose file and name the message says.
      like: beginnings of modules in whose place the function stands, and whose names are free.
      roles: names that the run's roles put in front of those of their metrics.
    """
    location = location_of(function)
    if not location:
        return
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            fix = f"call it {str(name)!r}, or by what it measures"
            rule = f"the name of a metric is a text{location}"
            raise InputError(f"{label} returns a metric", value=name, rule=rule, fix=fix)
    free, declared = declared_metrics(like) if like else {}, declared_metrics()
    declared = {name: metric for name, metric in declared.items() if name not in free}
    taken = [
        name
        for name in names
        if name not in free
        and (
            name in OF_A_ROW
            or name.startswith(OF_A_RUN)
            or find_metric(name, declared, roles) is not None
        )
    ]
    if taken:
        prefix = getattr(function, "__name__", "my")
        others = ", ".join(repr(f"{prefix}/{name.replace('/', '_')}") for name in taken)
        raise InputError(
            f"{label} returns metrics of names that are taken",
            value=", ".join(taken),
            rule="the run itself logs them, as it does step, phase, time/..., eval/... and those "
            f"of docs/reference/metrics.md: one number would replace the other{location}",
            fix=f"other names, such as {others}",
        )
