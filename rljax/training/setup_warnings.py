"""Warnings about a run's data and numbers of steps, before the first step."""

from collections.abc import Iterable, Iterator

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, OptimizerConfig, is_path, value_of
from rljax.contracts import spec
from rljax.data.online.prompts import PromptRecord
from rljax.setup import Phase, Setup

_LARGE = 0.1  # a large learning rate, for optimizers whose steps have its size
_FEW = 20  # optimizer steps up to which one without an effect is worth a warning


def setup_warnings(setup: Setup, shipped: Config | None = None) -> list[str]:
    """Returns a line for each setting of a run's data and optimizers that can hardly be meant. A
    warm-up that the config has from the one that `shipped` with the library causes none: the user
    did not set it."""
    lines = [*_of_optimizers(setup, shipped), *_of_held_out_rows(setup), *_of_few_rows(setup)]
    return list(dict.fromkeys(lines))


def _of_optimizers(setup: Setup, shipped: Config | None) -> Iterator[str]:
    for phase in setup.phases:
        for field in _optimizers(phase):
            optimizer: OptimizerConfig = value_of(setup.config, field)
            lr, warmup, total = optimizer.lr, optimizer.warmup_steps, phase.optimizer_steps
            if phase.steps and lr == 0:
                yield f"{field}.lr=0: nothing is learned by it"
            rule = spec(resolve(optimizer.name, NAMESPACES["optimizer"]))
            if lr > _LARGE and rule.steps_of_one_size:
                yield (
                    f"{field}.lr={lr:g}: a step of {optimizer.name} changes every weight by about "
                    f"as much; usual are 1e-7 to 1e-2"
                )
            set_by_user = shipped is None or warmup != value_of(shipped, field).warmup_steps
            if set_by_user and phase.steps and warmup >= total:
                yield (
                    f"{field}.warmup_steps={warmup}: {phase.label} has {total} optimizer steps, so "
                    f"the learning rate {lr:g} is never reached"
                )
            elif (
                set_by_user
                and lr
                and 0 < warmup
                and not optimizer.warmup_from
                and 0 < total <= _FEW
            ):
                yield (
                    f"{field}.warmup_steps={warmup} begins at a learning rate of 0: the first of "
                    f"{total} optimizer steps changes nothing. {field}.warmup_from=0.1 begins at a "
                    "tenth of the rate"
                )


def _optimizers(phase: Phase) -> list[str]:
    """The fields of the config with the optimizers of a phase."""
    if phase.name == "sft":
        return ["sft.optimizer"]
    roles = phase.dataflow.parameters
    actor = ["actor_optimizer"] * ("actor" in roles)
    scalar = any(name in roles for name in ("reward_model", "cost_critic"))
    trains_critic = (
        "critic" in roles and phase.dataflow.signature.parameters["critic"].default is not None
    )
    return actor + ["critic_optimizer"] * (scalar or trains_critic)


def _of_held_out_rows(setup: Setup) -> Iterator[str]:
    """Warns of a file of held-out rows: how many of them are trained on."""
    config, data = setup.config, setup.data
    test, trains = config.data.test, (config.data.train, *config.data.sources)
    if not is_path(test) or not any(map(is_path, trains)):
        return
    if test in trains and "{split}" not in test and data.endless:
        yield f"data.test={test!r} is data.train, too: what is evaluated is trained on"
        return
    held_out = [key for row in data.test_prompts or data.held_out for key in _keys(row)]
    trained = {key for row in data.prompts for key in _keys(row)}
    twice = sum(key in trained for key in held_out)
    if twice:
        yield (
            f"{twice} of {len(held_out)} held-out rows ({twice / len(held_out):.0%}) of data.test "
            "are rows of data.train, too: the accuracy is partly that of trained rows. "
            "data.test_fraction=0.05 with data.test='' holds rows out"
        )


def _of_few_rows(setup: Setup) -> Iterator[str]:
    """Warns of files with fewer rows than a step draws."""
    config, data = setup.config, setup.data
    specs = (config.data.train, *config.data.sources)
    if data.endless or not all(map(is_path, specs)):
        return
    sampled = setup.main.samples
    field = "batch.prompts_per_step" if sampled else "offline.examples_per_step"
    # A step draws packed rows whole.
    rows, count = len({_keys(row) for row in data.prompts}), value_of(config, field)
    if rows < count:
        packed = "packed " * config.offline.packing
        kind = "prompt" if sampled else f"{packed}row"
        yield (
            f"{field}={count}: the data has {rows} {kind}{'s' * (rows != 1)} that differ, so every "
            "step repeats them"
        )


def _keys(row: PromptRecord | dict) -> tuple[int, ...]:
    """A number for each prompt or example of a row, several where the row is packed: the same
    number for the same content."""
    if isinstance(row, PromptRecord):
        return (hash((row.prompt_text, tuple(str(image.source) for image in row.images))),)
    items = row["item"] if isinstance(row["item"], list) else [row["item"]]
    return tuple(hash(_content(item)) for item in items)


def _content(value: object) -> object:
    """Arrays and the objects around them as tuples of bytes and plain values."""
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, str | int | float | bytes) or value is None:
        return value
    if isinstance(value, dict):
        return tuple((key, _content(value[key])) for key in sorted(value))
    if isinstance(value, Iterable):
        return tuple(map(_content, value))
    return tuple((name, _content(inner)) for name, inner in sorted(vars(value).items()))
