"""Dataflows that learn from a file, or from preferences between samples: whether data, loss, roles
and the rest of the config fit."""

import math

from rljax.components import Component
from rljax.config import Config
from rljax.contracts import spec
from rljax.validation.problems import Problems, resolve_field, value_of

# Fields that say nothing to a dataflow that samples nothing, and what they would have to be.
_ONLINE_ONLY = {
    "algorithm.kl_in_reward": 0.0,
    "algorithm.kl_in_loss": 0.0,
    "algorithm.kl_target": 0.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.trust_region": 0.0,
    "algorithm.correction": "",
    "algorithm.reward_shaping": (),
    "algorithm.baseline_filters": (),
    "algorithm.filters": (),
    "batch.epochs": 1,
    "data.retire_at_pass_rate": 0.0,
    "data.drop_above_pass_rate": 0.0,
    "data.target_tokens": (),
    "reward.model": "",
    "reward.process_model": "",
}


def check_offline(config: Config, problems: Problems, dataflow: Component, kind: str) -> None:
    """`kind` is the kind of data that the dataflow reads."""
    loss = _preference_loss(config, problems, dataflow, kind)
    if kind == "pairs" and "actor" not in dataflow.parameters:
        loss = None  # two rows, which algorithm.reward_loss reads
    _check_teacher(config, problems, "teacher" in dataflow.parameters)
    if kind == "prompts":
        _check_online(config, problems)
        _check_unread(config, problems, dataflow)
        if loss is not None and "rows_per_example" in vars(dataflow.function):
            _check_compared(config, problems, dataflow, loss)
        return
    offline, made = config.offline, f"dataflow={config.dataflow!r} learns from a file"
    for field, off in _ONLINE_ONLY.items():
        value, rule = value_of(config, field), f"{made}: there is nothing for it to do"
        same = tuple(value) == off if isinstance(off, tuple) else value == off
        problems.check(same, field, value, rule, f"{field}={off!r}")
    packs = kind == "examples" or not offline.packing
    rule = f"packs worked examples (SFT), not {kind}"
    problems.check(packs, "offline.packing", offline.packing, rule, "offline.packing=False")
    stores = kind in ("pairs", "trajectories") or not offline.reference_logprobs
    rule = f"can be stored for pairs and trajectories, not for {kind}"
    problems.check(stores, "offline.reference_logprobs", offline.reference_logprobs, rule, "''")
    reads = kind != "pairs" or loss is None or "ref_logprobs" in spec(loss).reads
    rule = f"{config.algorithm.preference_loss} reads no reference"
    unread = bool(offline.reference_logprobs) and not reads
    problems.check(not unread, "offline.reference_logprobs", offline.reference_logprobs, rule, "''")
    ties = kind == "pairs" or offline.ties == "drop"
    problems.check(ties, "offline.ties", offline.ties, f"is of pairs, not of {kind}", "'drop'")
    greedy = config.evaluate.prompts_from
    fits = not greedy or "actor" in dataflow.parameters
    rule = f"dataflow={config.dataflow!r} trains no policy to sample from"
    problems.check(fits, "evaluate.prompts_from", greedy, rule, "''")
    needs = config.sft.steps == 0 or bool(config.sft.data)
    problems.check(needs, "sft.data", config.sft.data, f"{made}, so sft.steps need their own")
    _check_sizes(config, problems, kind, loss)


def _preference_loss(
    config: Config, problems: Problems, dataflow: Component, kind: str
) -> Component | None:
    """The loss can be called as the data need it."""
    field, text = "algorithm.preference_loss", config.algorithm.preference_loss
    component = resolve_field(problems, field, text, "preference_loss")
    compares = "actor" in dataflow.parameters and kind in ("pairs", "labelled")
    if component is None or not compares:
        return component
    beside = tuple(name for name in ("kl", "delta") if name in component.positional)
    called = ("policy", "batch", *beside)
    fix = "dpo()" if kind == "pairs" else "kto(), or bco() with dataflow='bco'"
    try:
        component.signature.bind(*called, **component.options)
    except TypeError as error:
        rule = f"it is called with ({', '.join(called)}): {error}"
        problems.check(False, field, text, rule, fix)
    together = spec(component).rows
    fits = together > 1 if kind == "pairs" else together == 1
    rule = f"reads examples of {together} row{'s' * (together > 1)}, which {kind} are not"
    problems.check(fits, field, text, rule, fix)
    rule = "reads scores as what becomes of the policy's own samples, not as what a file says"
    known = not spec(component).scores_of_samples
    problems.check(known, field, text, rule, fix)
    wants, name = "delta" in beside, dataflow.name
    known = name not in ("kto", "bco") or (name == "bco") == wants
    rule = f"dataflow={name!r} keeps no running mean" if wants else "reads no running mean"
    other = "dataflow='bco'" if wants else "bco(), or dataflow='kto'"
    problems.check(known, field, text, rule, other)
    return component


def _check_sizes(config: Config, problems: Problems, kind: str, loss: Component | None) -> None:
    together = 1
    if kind == "pairs":
        together = max(spec(loss).rows, 2) if loss else 2
    offline, limit = config.offline, config.batch.tokens_per_microbatch
    problems.check(
        limit >= offline.max_tokens * together,
        "batch.tokens_per_microbatch",
        limit,
        f"must hold one example: {together} x offline.max_tokens={offline.max_tokens}",
        f"{offline.max_tokens * together} or more",
    )
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert)
    shards = math.prod(sizes) if min(sizes) > 0 else 1
    problems.check(
        offline.examples_per_step % shards == 0,
        "offline.examples_per_step",
        offline.examples_per_step,
        f"must divide by mesh.data x fsdp x expert = {shards}",
        f"a multiple of {shards}",
    )


def _check_online(config: Config, problems: Problems) -> None:
    for field in ("offline.reference_logprobs", "offline.packing", "evaluate.prompts_from"):
        value = value_of(config, field)
        rule = f"is of dataflows that learn from a file; {config.dataflow!r} samples"
        problems.check(not value, field, value, rule, f"{field}={type(value)()!r}")


def _check_teacher(config: Config, problems: Problems, wanted: bool) -> None:
    field, value = "teacher_model", config.teacher_model
    rule = "the folder of a teacher is needed" if wanted else f"{config.dataflow!r} has no teacher"
    problems.check(bool(value) == wanted, field, value, rule, "" if wanted else "teacher_model=''")


# What only dataflows with an advantage read.
_OF_ADVANTAGES = {
    "algorithm.kl_in_reward": 0.0,
    "algorithm.correction": "",
    "algorithm.baseline_filters": (),
    "algorithm.filters": (),
    "algorithm.trust_region": 0.0,
}


def _check_unread(config: Config, problems: Problems, dataflow: Component) -> None:
    """Fields that the dataflow would pass over without a word."""
    fields = dict(_OF_ADVANTAGES) if "rows_per_example" in vars(dataflow.function) else {}
    if "teacher" in dataflow.parameters and "reward" not in dataflow.parameters:
        others = {"algorithm.kl_in_loss": 0.0, "algorithm.entropy_coef": 0.0, "reward.model": ""}
        fields = {**_OF_ADVANTAGES, **others}
    for field, off in fields.items():
        value, rule = value_of(config, field), f"dataflow={config.dataflow!r} does not read it"
        same = tuple(value) == off if isinstance(off, tuple) else value == off
        problems.check(same, field, value, rule, f"{field}={off!r}")


def _check_compared(config: Config, problems: Problems, dataflow: Component, loss: Component):
    """Samples that are compared with each other: the loss reads what the dataflow makes of them,
    and the numbers divide."""
    marks, batch = vars(dataflow.function), config.batch
    field, text = "algorithm.preference_loss", config.algorithm.preference_loss
    wanted, has = marks["rows_per_example"], spec(loss).rows
    rule = f"reads examples of {has} rows; those of dataflow={config.dataflow!r} have {wanted}"
    if not problems.check(has == wanted, field, text, rule, "sppo, xpo, nash_md have their own"):
        return
    opponent = marks.get("has_opponent", False)
    told = ("chosen_is_policy",) if opponent and wanted == 2 else ()
    called = ("policy", "batch", *(name for name in told if name in loss.positional))
    try:
        loss.signature.bind(*called, **loss.options)
    except TypeError as error:
        problems.check(False, field, text, f"it is called with ({', '.join(called)}): {error}")
    if "preference" in dataflow.parameters:
        options = {**{"preference": "bradley_terry()"}, **dataflow.options}
        resolve_field(problems, "dataflow", options["preference"], "preference")
    samples = batch.samples_per_prompt
    fits = samples % 2 == 0 if opponent else samples > 1
    rule = "must be even: half are the opponent's" if opponent else "must be 2 or more to compare"
    if not problems.check(fits, "batch.samples_per_prompt", samples, rule):
        return
    generated = batch.prompts_per_step * samples
    learned = generated * wanted // 2 if opponent else batch.prompts_per_step * wanted
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert)
    shards = math.prod(sizes) if min(sizes) > 0 else 1
    steps = max(generated // batch.sequences_per_optimizer_step, 1)
    problems.check(
        learned % (steps * shards * wanted) == 0,
        "batch.prompts_per_step",
        batch.prompts_per_step,
        f"leaves {learned} rows to learn from, which do not divide into {steps} optimizer steps of "
        f"examples of {wanted} rows on {shards} devices",
    )
