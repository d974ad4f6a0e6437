"""Rollout: the result of sampling the prompts of a step; RolloutConfig: the settings of it.

A rollout is a function (prompts, key, cfg, *, sample, draw, ...) -> Rollout that
`algorithm.collect` names. Of its keyword-only parameters, those with a default are its options. The
others are passed by name: `sample(prompts, key, n=)` returns scored trajectories
(rljax.rollout.sample), `draw(n)` the next n prompts of the data, `tokenizer` and `reward` are the
run's, and any other name is the role of that name.
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from inspect import signature

import jax.numpy as jnp

from rljax.batch import Batch
from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import component_in, spec
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError, location_in, location_of, mending
from rljax.rollout.scoring.report import RewardReport
from rljax.sampler import Sampling, held_weights
from rljax.tracking.metric_names import check_metric_names

RolloutText = component_in(NAMESPACES["collect"])


def of_inner(name: str, *further: str) -> Callable[[dict], object]:
    """Returns the value of a contract of a rollout that wraps another, its option `inner`: what
    that one declares as `name`, and of a tuple these `further` ones."""

    def declared(options: dict):
        value = getattr(spec(resolve(options["inner"], NAMESPACES["collect"])), name)
        return (*(value or ()), *further) if further else value

    return declared


HANDED_ON = ("actor", "reward", "sample", "draw", "tokenizer")  # by a rollout to its `inner` one


def check_inner(inner: str) -> None:
    """Raises InputError for an inner rollout that asks for more than HANDED_ON."""
    parameters = resolve(inner, NAMESPACES["collect"]).signature.parameters.values()
    needed = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    if lacking := sorted(needed - {*HANDED_ON}):
        raise InputError(
            "the rollout inside another",
            value=inner,
            rule=f"it asks for {', '.join(lacking)}, and is handed {', '.join(HANDED_ON)}",
            fix="inner='once()', or another that asks for no more",
        )


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The settings that a rollout reads as `cfg`. None is part of the compiled learning step."""

    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    correct_at: float = 1.0
    reward_shaping: tuple[Callable, ...] = ()
    advantage: Callable | None = None  # algorithm.advantage
    microbatch_rows: int = 0  # rows that a model reads at once; 0 = all
    # The samples of the step have been decoded. Where the rollout declares drops_dead, groups of
    # equal scores have been replaced, so that none is left to choose.
    in_flight: bool = False

    def replace(self, **fields) -> "RolloutConfig":
        """Returns a copy with these fields."""
        return dataclasses.replace(self, **fields)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Trajectories [B, S] on the mesh, where `batch.group` is the index into `prompts`; the rewards
    of all samples, also of those that are not in the batch; the rollout's metrics."""

    batch: Batch
    prompts: Prompts
    report: RewardReport
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def replace(self, **fields) -> "Rollout":
        """Returns a copy with these fields."""
        return dataclasses.replace(self, **fields)


def run_rollout(rollout, prompts: Prompts, key, cfg: RolloutConfig, **available) -> Rollout:
    """Calls rollout(prompts, key, cfg, ...) with those of `available` that its signature names.
    Returns its Rollout.

    Weights are brought to the layout of decoding once, and the copy is dropped at the end. Raises
    InputError if it returns no Rollout, for metrics that are no numbers or have names that are
    taken, and for what a line of the user's own raises.
    """
    names = rollout.parameters if isinstance(rollout, Component) else signature(rollout).parameters
    arguments = {name: value for name, value in available.items() if name in names}
    function = rollout.function if isinstance(rollout, Component) else rollout
    label = f"algorithm.collect={rollout.text if isinstance(rollout, Component) else function!r}"
    try:
        with held_weights():
            result = rollout(prompts, key, cfg, **arguments)
    except InputError:
        raise
    except Exception as error:
        if not (location := location_in(error, [function], innermost=True)):
            raise  # a fault of ours, with its traceback
        raise InputError(
            f"{label} fails when it is called",
            rule=f"{type(error).__name__}: {error}{location}",
            fix=mending(error),
        ) from error
    parts = vars(result) if isinstance(result, Rollout) else {}
    if not isinstance(parts.get("batch"), Batch) or not isinstance(parts["metrics"], Mapping):
        kinds = ", ".join(type(part).__name__ for part in parts.values())
        raise InputError(
            f"{label} returns the wrong thing",
            value=f"Rollout({kinds})" if parts else type(result).__name__,
            rule="it returns rljax.rollout.Rollout(batch, prompts, report, metrics)"
            f"{location_of(function)}",
            fix="return Rollout(batch, prompts, report, metrics)",
        )
    check_metric_names(label, result.metrics, function, like=("rljax.rollout.rules.",))
    for name, value in result.metrics.items():
        if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
            raise InputError(
                f"{label} returns a metric {name!r}",
                value=value,
                rule=f"a metric is one number{location_of(function)}",
                fix="return a number, and call several by several names",
            )
    return result


def check_rows(rollout: Component, batch: Batch, cfg: RolloutConfig) -> None:
    """Raises InputError unless the batch of a step has the rows that the config says: fewer would
    be learned from without a word."""
    rows = cfg.prompts_per_step * cfg.samples_per_prompt
    if batch.rows != rows:
        raise InputError(
            f"algorithm.collect={rollout.text!r} returns the wrong number of rows",
            value=batch.rows,
            rule=f"a step has prompts_per_step x samples_per_prompt = {cfg.prompts_per_step} x "
            f"{cfg.samples_per_prompt} = {rows} rows{location_of(rollout.function)}",
            fix="return n=cfg.samples_per_prompt rows for each of cfg.prompts_per_step prompts, or "
            "set batch.prompts_per_step and batch.samples_per_prompt to what it returns",
        )


def widened(batch: Batch, columns: int) -> Batch:
    """Returns the batch [B, S] padded to `columns` columns. All steps of a run have one shape, so
    that a shorter limit of the response does not recompile the learning step."""
    padding = columns - batch.tokens.shape[1]
    if padding <= 0:
        return batch
    fields = {}
    for field in dataclasses.fields(batch):
        value = vars(batch)[field.name]
        if value is not None and field.metadata["axes"][:2] == ("B", "S"):
            rest = [(0, 0)] * (value.ndim - 2)
            fields[field.name] = jnp.pad(value, [(0, 0), (0, padding), *rest])
    return dataclasses.replace(batch, **fields)
