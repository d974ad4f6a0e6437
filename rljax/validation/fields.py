"""Rules of fields that depend on others, batch arithmetic, tasks and models of a config. Types,
ranges, paths and names of the fields by themselves are rljax.config.checks."""

import math

from rljax.components import Component
from rljax.config import Config, OptimizerConfig, is_path, row_tokens, value_of
from rljax.config.checks import check_fields, is_no_component
from rljax.config.schema import DATA, OPTIMIZERS
from rljax.config.values import texts_of
from rljax.errors import InputError
from rljax.learn.optimizers import handed, learning_rate, make_optimizer, rule_fields
from rljax.sampler.layout import parsed
from rljax.validation.asynchrony import check_flight_ranges
from rljax.validation.problems import ConfigProblems, resolve_field, shards_of

MOST_LR = 10.0


def check_ranges(config: Config, problems: ConfigProblems) -> None:
    """Checks the fields by themselves, and the rules that join a few of them."""
    check_fields(config, problems)
    rule = "training needs samples, and temperature 0 is greedy"
    fix = "1.0 (evaluation is greedy by itself)"
    problems.check_field(config.sampler.temperature != 0, "sampler.temperature", rule, fix)
    check_flight_ranges(config, problems)
    _check_prompt_rules(config, problems)
    for section in OPTIMIZERS:
        check_optimizer(value_of(config, section), problems, section)
    _check_mesh(config, problems)
    fits = not config.lora.adapter or config.lora.rank > 0
    fix = "set lora.rank to `r` of its adapter_config.json"
    problems.check_field(fits, "lora.adapter", "needs lora.rank, the adapter's own", fix)


def _check_prompt_rules(config: Config, problems: ConfigProblems) -> None:
    """Checks mixtures, held-out rows and streams."""
    data = config.data
    fraction, files = data.test_fraction, [s for s in (data.train, *data.sources) if is_path(s)]
    rule, fix = "data.test names the held-out rows already", "data.test=''"
    problems.check_field(not (fraction and data.test), "data.test_fraction", rule, fix)
    rule = "no source is a file, and tasks have a test split of their own"
    problems.check_field(not fraction or files, "data.test_fraction", rule, "0")
    rule = "no source is a file: tasks are made, not read"
    files += [s for s in (config.sft.data, config.pretraining.data) if is_path(s)]
    problems.check_field(not data.stream or files, "data.stream", rule, "False")
    sources = 1 + len(data.sources)
    for name in ("weights", "final_weights"):
        weights = getattr(data, name)
        fits = not weights or len(weights) == sources and min(weights) >= 0 and sum(weights) > 0
        rule = f"{sources} weights >= 0: data.train first, then data.sources; () = equal"
        problems.check_field(fits, f"data.{name}", rule, f"write {(1.0,) * sources}, or ()")


def check_optimizer(optimizer: OptimizerConfig, problems: ConfigProblems, prefix: str) -> None:
    """Checks the optimizer and its schedule, and that they read every field that is set."""
    rule = f"a learning rate is at most {MOST_LR:g}"
    problems.check(optimizer.lr <= MOST_LR, f"{prefix}.lr", optimizer.lr, rule, f"{prefix}.lr=1e-6")
    update_rule = resolve_field(problems, f"{prefix}.name", optimizer.name, "optimizer")
    schedule = resolve_field(problems, f"{prefix}.schedule", optimizer.schedule, "schedule")
    if update_rule is not None:
        _check_read(optimizer, update_rule, problems, prefix)
        fields = handed(update_rule, rule_fields(optimizer))
        _check_call(problems, f"{prefix}.name", update_rule, (None,), fields)
    if schedule is not None:
        fields = handed(schedule, {"lr": None, "steps": None})
        _check_call(problems, f"{prefix}.schedule", schedule, (), fields)
    if any(problem.startswith(f"{prefix}.") for problem in problems):
        return
    for field, make in (("schedule", learning_rate), ("name", make_optimizer)):
        try:
            make(optimizer, 100)
        except InputError as error:
            problems.add(f"{prefix}.{field}", getattr(optimizer, field), error)
            return


def _check_call(problems: ConfigProblems, field: str, component: Component, args, fields) -> None:
    try:
        component.signature.bind(*args, **{**fields, **component.options})
    except TypeError as error:
        fix = "write its options in the text, name(option=value)"
        problems.check(False, field, component.text, f"cannot be called: {error}", fix)


def _check_read(optimizer, update_rule: Component, problems: ConfigProblems, prefix: str) -> None:
    """Checks that the optimizer reads every field that was set, and none that its text sets too."""
    defaults = rule_fields(OptimizerConfig())
    for name, value in rule_fields(optimizer).items():
        unset = defaults[name]
        if value == unset:
            continue
        if name in update_rule.positional and name not in update_rule.options:
            continue
        optimizer_text = f"{prefix}.name={update_rule.text!r}"
        if name in update_rule.options:
            rule, fix = f"{optimizer_text} sets it too", f"leave the field at {unset}"
        else:
            rule, fix = f"{optimizer_text} does not read it", f"{prefix}.{name}={unset}"
            if name in update_rule.parameters:
                fix = f"{fix}, and {prefix}.name='{update_rule.name}({name}={value})'"
        problems.check(False, f"{prefix}.{name}", value, rule, fix)


def _check_mesh(config: Config, problems: ConfigProblems) -> None:
    sizes, slices = config.mesh.sizes(), config.mesh.slices
    unset = [name for name, size in sizes.items() if size == -1]
    rule = "at most one size may be -1"
    problems.check(len(unset) <= 1, "mesh", sizes, rule, f"set mesh.{next(iter(unset), 'data')}=1")
    data = config.mesh.data
    rule = f"must divide by mesh.slices={slices}: data alone reaches from one slice to another"
    fix = f"mesh.data={slices}"
    problems.check_field(slices < 1 or data < 1 or data % slices == 0, "mesh.data", rule, fix)
    try:
        parsed(config.sampler.layout)
    except InputError as error:
        problems.add("sampler.layout", config.sampler.layout, error)


def check_devices(config: Config, devices: int, problems: ConfigProblems, apart: int = 0) -> None:
    """Checks that the mesh has as many devices as there are. `apart`: the number of further devices
    that placed roles, or sampling, have."""
    sizes = config.mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size > 0)
    unset = -1 in sizes.values()
    fits = devices % fixed == 0 if unset else devices == fixed
    available = f"{devices} device{'s are' if devices > 1 else ' is'} there"
    group = "that sample" if config.rollouts.sampler_devices else "of config.placement"
    available += f", beside {apart} {group}" * bool(apart)
    rule = f"needs {fixed} devices{' or a multiple of that' if unset else ''}, and {available}"
    fix = "sizes whose product is the number of devices; one may be -1 = what is left"
    problems.check(fits, "mesh", sizes, rule, fix)


def _divisors_near(n: int, target: int) -> str:
    small_divisors = [d for d in range(1, min(math.isqrt(n), 10**6) + 1) if n % d == 0]
    divisors = {*small_divisors, *(n // d for d in small_divisors)}
    nearest = sorted(divisors, key=lambda d: abs(d - target))[:3]
    return " or ".join(str(d) for d in sorted(nearest))


def _parts_of_row(config: Config) -> tuple[str, str]:
    """Returns (the fields that make up a row, the one that most of its tokens come from), with
    their values."""
    if config.environment.function:
        longest = f"environment.max_tokens={config.environment.max_tokens}"
        return "environment.max_tokens, or all turns", longest
    fields = ("data.max_prompt_tokens", "sampler.max_response_tokens")
    parts = [f"{field}={value_of(config, field)}" for field in fields]
    prompt, response = (value_of(config, field) for field in fields)
    return " + ".join(parts), parts[0] if prompt >= response else parts[1]


def check_batch(config: Config, problems: ConfigProblems) -> None:
    """Adds a problem for each size of a step that does not divide, or is smaller than a row."""
    batch = config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    sequences = (
        f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
        f"{rows} sequences per step"
    )
    step = batch.sequences_per_optimizer_step
    rule = f"must divide {sequences}"
    fix = f"{_divisors_near(rows, step)}; {rows} = one optimizer step per epoch"
    problems.check_field(rows % step == 0, "batch.sequences_per_optimizer_step", rule, fix)
    row_fields, longest = _parts_of_row(config)
    problems.check_field(
        batch.tokens_per_microbatch == 0 or batch.tokens_per_microbatch >= row_tokens(config),
        "batch.tokens_per_microbatch",
        f"must hold one row: {row_fields} = {row_tokens(config)} tokens",
        f"lower {longest}, or set batch.tokens_per_microbatch to "
        f"{row_tokens(config)} or more, or to 0: chosen by the plan",
    )
    shards, field = shards_of(config), "batch.sequences_per_optimizer_step"
    rule = f"must divide by mesh.data x fsdp x expert = {shards}"
    problems.check_field(step % shards == 0, field, rule, f"a multiple of {shards}")


def check_data_and_model(config: Config, problems: ConfigProblems) -> None:
    """Checks that tasks and built-in models that are named by a component resolve."""
    for field in DATA:
        for spec in texts_of(config, field):
            if not is_path(spec):
                resolve_field(problems, field, spec, "data")
    model = config.model
    if model and not is_path(model) and not is_no_component(model):  # which check_paths says
        resolve_field(problems, "model", model, "model")
