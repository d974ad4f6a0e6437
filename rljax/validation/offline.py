"""Checks of a config by the source of its dataflow's batches: rows of a file, or rollouts."""

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.schema import FIELDS, STAGES
from rljax.contracts import spec
from rljax.data.kinds import OF_FILES
from rljax.data.online.default_rewards import training_text
from rljax.errors import InputError
from rljax.rewards.on_device import without_form
from rljax.setup.setup import rollout_of
from rljax.validation.problems import (
    ConfigProblems,
    check_call,
    check_schedule,
    resolve_field,
    resolved,
    shards_of,
)


def _check_off(config: Config, problems: ConfigProblems, read_by: str, rule: str) -> None:
    """Checks that the switches of runs that learn from `read_by` are off. Those of `algorithm` that
    the dataflow itself reads are found by the dry run (rljax.setup.dry_run)."""
    default = Config()
    for field, declared in FIELDS.items():
        if not declared.refused or declared.read_by != read_by:
            continue
        value, off = value_of(config, field), value_of(default, field)
        is_off = tuple(value) == off if isinstance(off, tuple) else value == off
        problems.check_field(is_off, field, rule, f"{field}={off!r}")


def check_file(config: Config, problems: ConfigProblems, dataflow: Component, kind: str) -> None:
    """Checks a dataflow that learns from rows of a file of this kind."""
    if kind not in OF_FILES:
        rule = f"its contract says data={kind!r}: one of rollouts, samples, {', '.join(OF_FILES)}"
        fix = f"@contract(data='rollouts'), or another of these, at {dataflow.name}"
        problems.check_field(False, "dataflow", rule, fix)
        return
    loss = _preference_loss(config, problems, dataflow, kind)
    _check_teacher(config, problems, dataflow)
    offline, learns_from_file = config.offline, f"dataflow={config.dataflow!r} learns from a file"
    _check_off(config, problems, "samples", f"{learns_from_file}: there is nothing for it to do")
    packs = kind == "examples" or not offline.packing
    rule = f"packs demonstrations (SFT), not {kind}"
    problems.check_field(packs, "offline.packing", rule, "offline.packing=False")
    field, stored = "offline.reference_logprobs", offline.reference_logprobs
    stores = kind in ("pairs", "trajectories") or not stored
    rule = f"can be stored for pairs and trajectories, not for {kind}"
    problems.check_field(stores, field, rule, "''")
    reads = kind != "pairs" or loss is None or "ref_logprobs" in spec(loss).reads
    rule = f"{config.algorithm.preference_loss} reads no reference"
    problems.check_field(reads or not stored, field, rule, "''")
    ties = kind == "pairs" or offline.ties == "drop"
    problems.check_field(ties, "offline.ties", f"is of pairs, not of {kind}", "'drop'")
    fits = kind == "examples" or config.data.turns != "each"
    rule = f"makes an example of each turn: it is of demonstrations, not of {kind}"
    problems.check_field(fits, "data.turns", rule, "'last' or 'auto'")
    fits = not config.evaluate.prompts_from or "actor" in dataflow.parameters
    rule = f"dataflow={config.dataflow!r} trains no policy to sample from"
    problems.check_field(fits, "evaluate.prompts_from", rule, "''")
    sft, rule = config.sft, f"{learns_from_file}, so sft.steps need their own"
    fix = "sft.data='FILE' of demonstrations, or sft.steps=0"
    problems.check_field(sft.steps == 0 or sft.data, "sft.data", rule, fix)
    _check_sizes(config, problems, dataflow, kind, loss)


def _preference_loss(
    config: Config, problems: ConfigProblems, dataflow: Component, kind: str
) -> Component | None:
    """Returns the preference loss, after a check that it can be called as the data need it; None
    unless the dataflow trains a policy with it."""
    if "actor" not in dataflow.parameters or kind not in ("pairs", "unpaired"):
        return None
    field, text = "algorithm.preference_loss", config.algorithm.preference_loss
    loss = resolve_field(problems, field, text, "preference_loss")
    if loss is None:
        return None
    optional_args = tuple(name for name in ("kl", "delta") if name in loss.positional)
    called = (*STAGES["preference_loss"].called_with, *optional_args)
    fix = "dpo()" if kind == "pairs" else "kto(), or bco() with dataflow='bco'"
    check_call(problems, field, loss, called, fix)
    rows = spec(loss).rows
    fits = rows > 1 if kind == "pairs" else rows == 1
    rule = f"reads examples of {rows} row{'s' * (rows > 1)}, which {kind} are not"
    problems.check_field(fits, field, rule, fix)
    rule = "reads scores as what becomes of the policy's own samples, not as what a file says"
    problems.check_field(not spec(loss).scores_of_samples, field, rule, fix)
    keeps, reads = "baseline" in dataflow.parameters, "delta" in optional_args
    rule = "reads no running mean" if keeps else f"dataflow={dataflow.name!r} keeps no running mean"
    loss_fix = "bco(), or dataflow='kto'" if keeps else "dataflow='bco'"
    problems.check_field(kind == "pairs" or keeps == reads, field, rule, loss_fix)
    return loss


def _check_sizes(
    config: Config, problems: ConfigProblems, dataflow: Component, kind: str, loss: Component | None
) -> None:
    rows = 1 if kind == "unpaired" else spec(dataflow).rows
    if kind == "pairs" and loss is not None:
        rows = max(spec(loss).rows, rows)
    offline, limit = config.offline, config.batch.tokens_per_microbatch
    needed, field = offline.max_tokens * rows, "batch.tokens_per_microbatch"
    rule = f"must hold one example: {rows} x offline.max_tokens={offline.max_tokens}"
    problems.check_field(limit == 0 or limit >= needed, field, rule, f"{needed} or more")
    shards, field = shards_of(config), "offline.examples_per_step"
    rule, fix = f"must divide by mesh.data x fsdp x expert = {shards}", f"a multiple of {shards}"
    problems.check_field(offline.examples_per_step % shards == 0, field, rule, fix)


def check_online(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks a dataflow that learns from samples of the policy."""
    _check_teacher(config, problems, dataflow)
    rule = f"is of dataflows that learn from a file; {config.dataflow!r} samples"
    _check_off(config, problems, "rows", rule)
    share, replay = config.rollouts.replay_share, config.rollouts.replay
    rule = "above 0, and at most 1 (all prompts of a step)"
    fix = "rollouts.replay_share=0.5"
    problems.check_field(0 < share <= 1, "rollouts.replay_share", rule, fix)
    rule = "there is nothing to replay: rollouts.replay is ''"
    problems.check_field(replay or share == 1, "rollouts.replay_share", rule, "1.0")
    fits = "costs" in spec(dataflow).reads or not config.reward.cost_model
    rule, fix = f"dataflow={config.dataflow!r} reads no costs", "reward.cost_model=''"
    problems.check_field(fits, "reward.cost_model", rule, fix)
    _check_pretraining(config, problems, dataflow)
    if config.program_steps > 1:
        _check_program(config, problems, dataflow)
    if replay:
        single_prompt = config.batch.prompts_per_step == 1 and share < 1
        rule = "a step of one prompt has no share to replay"
        problems.check_field(not single_prompt, "rollouts.replay_share", rule, "1.0")
    rollout = spec(dataflow).rollout
    opponent = bool(rollout) and spec(resolve(rollout, NAMESPACES["collect"])).opponent
    if spec(dataflow).rows > 1 or opponent:
        _check_compared(config, problems, dataflow, opponent)


def _check_program(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks that the dataflow, the rollout and the reward of a program's steps can be traced."""
    field, fix = "program_steps", "program_steps=1"
    rule = f"dataflow={config.dataflow!r} is not one program"
    full_fix = f"decorate it by @program (rljax.roles), or {fix}"
    problems.check_field(hasattr(dataflow.function, "arguments"), field, rule, full_fix)
    if resolved(config.algorithm.collect, "collect") is not None:
        rollout = rollout_of(config, dataflow)
        rule = f"algorithm.collect={rollout.text!r} reads scores or texts on the host: it does not "
        rule += "declare @contract(on_device=True)"
        full_fix = f"{fix}, or once(), greedy_baseline(), dynamic(max_rounds=1, if_short='fill')"
        problems.check_field(spec(rollout).on_device, field, rule, full_fix)
    if spec(dataflow).data != "rollouts" or not (text := training_text(config)):
        return
    reward = resolve_field(problems, "reward.function", text, "reward")
    if reward is not None:
        lacks = without_form(reward)
        rule = f"the reward {lacks!r} has no form for the device: it is called on the host"
        full_fix = f"{fix}, or @contract(on_device=DeviceForm(...)) of rljax.rewards.on_device"
        problems.check_field(not lacks, field, rule, full_fix)


def _check_pretraining(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks that a second batch for the actor has a reader, and that its rows divide."""
    settings, field = config.pretraining, "pretraining.data"
    takes = "pretraining" in dataflow.parameters
    rule = f"dataflow={config.dataflow!r} takes no `pretraining`"
    problems.check_field(takes or not settings.data, field, rule, f"{field}=''")
    if settings.data:
        _check_pretraining_loss(config, problems)
    rows, shards = settings.sequences_per_optimizer_step, shards_of(config)
    rule = f"must divide by mesh.data x fsdp x expert = {shards}"
    field = "pretraining.sequences_per_optimizer_step"
    fix = f"{field}={-(-max(rows, 1) // shards) * shards}"
    problems.check_field(not settings.data or rows % shards == 0, field, rule, fix)


def _check_pretraining_loss(config: Config, problems: ConfigProblems) -> None:
    """Checks that the loss of the examples reads nothing that examples lack, and that its
    coefficient has a schedule."""
    settings, field = config.pretraining, "pretraining.loss"
    loss = resolve_field(problems, field, settings.loss, "policy_loss")
    if loss is not None:
        declared = spec(loss)
        fits = not (declared.reads or declared.whole_step or declared.reads_targets)
        rule = "reads more of an example than the log-probs of its tokens"
        fix = f"{field}='negative_log_likelihood', or 'chord_phi'"
        problems.check_field(fits and declared.rows == 1, field, rule, fix)
    rule = "must be at most 1: with pretraining.mixed it is a share"
    is_share = settings.coef <= 1 or not settings.mixed
    problems.check_field(is_share, "pretraining.coef", rule, "pretraining.coef=0.5")
    check_schedule(problems, "pretraining.schedule", settings.schedule)


def _check_teacher(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks that there are teachers where they are read and nowhere else, one for each pattern."""
    parameter = dataflow.signature.parameters.get("teacher")
    optional = parameter is not None and parameter.default is not parameter.empty
    coef, field = config.algorithm.teacher_coef, "algorithm.teacher_coef"
    rule = f"dataflow={config.dataflow!r} learns from the teacher alone"
    if parameter is None:
        rule = f"dataflow={config.dataflow!r} takes no teacher beside its reward"
    problems.check_field(not coef or optional, field, rule, "teacher_coef=0, or dataflow='grpo'")
    has_teacher = bool(config.teacher_model) or bool(config.teachers)
    with_hint = _shows_hints(config, dataflow)
    rate, rate_field = config.algorithm.teacher_rate, "algorithm.teacher_rate"
    rule = "it moves a teacher that is the policy itself: with algorithm.collect='with_hint(...)', "
    rule += "and neither teacher_model nor teachers"
    is_policy = with_hint and not has_teacher
    problems.check_field(not rate or is_policy, rate_field, rule, f"{rate_field}=0")
    if parameter is not None and (coef or not optional):
        rule = "the folder of a teacher is needed"
        rule += f", as {field}={coef} reads it" if optional else ""
        fix = "teacher_model=FOLDER, or a name of the hub; or the policy itself, which is shown "
        fix += "more, by algorithm.collect='with_hint(...)'"
        problems.check_field(has_teacher or with_hint, "teacher_model", rule, fix)
        return _check_teachers(config, problems)
    rule, fix = f"{config.dataflow!r} has no teacher", ""
    if optional:
        rule, fix = f"nothing reads it while {field} is 0", f"{field}=1.0, or "
    problems.check_field(not config.teacher_model, "teacher_model", rule, f"{fix}teacher_model=''")
    for name in ("teachers", "teacher_sources"):
        problems.check_field(not getattr(config, name), name, rule, f"{fix}{name}=()")
    rule = f"asks a teacher, which {'nothing reads' if optional else 'the dataflow does not take'}"
    problems.check_field(not with_hint, "algorithm.collect", rule, f"{fix}once()")


def _shows_hints(config: Config, dataflow: Component) -> bool:
    """Returns whether the rollout fills the log-probs of the teacher itself."""
    try:
        return "teacher_logprobs" in (spec(rollout_of(config, dataflow)).fills or ())
    except InputError:  # of algorithm.collect, which is said elsewhere
        return False


def _check_teachers(config: Config, problems: ConfigProblems) -> None:
    """Checks that each of several teachers has a pattern of its own, and each row a prompt."""
    count, patterns = len(config.teachers), config.teacher_sources
    rule = f"{len(patterns)} patterns of data_source for {count} teachers"
    fix = "a pattern for each of `teachers`, in their order; '*' is any data_source"
    problems.check_field(count == len(patterns), "teacher_sources", rule, fix)
    names = (*patterns, *["teacher_model"] * bool(config.teacher_model))  # of the metrics
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    rule, fix = f"{twice[:1]} stands twice: the first one has all its prompts", "each pattern once"
    problems.check_field(not twice, "teacher_sources", rule, fix)
    environment = config.environment.function
    if count and environment:
        rule = f"{environment!r} has several seats, whose groups are not those of the prompts"
        seats = spec(resolve(environment, NAMESPACES["environment"])).seats
        problems.check_field(len(seats) < 2, "teachers", rule, "one teacher_model, and teachers=()")


def _check_compared(
    config: Config, problems: ConfigProblems, dataflow: Component, opponent: bool
) -> None:
    """Checks samples that are compared with each other: the loss reads the examples that the
    dataflow makes of them, and the numbers divide."""
    field, text = "algorithm.preference_loss", config.algorithm.preference_loss
    loss = resolve_field(problems, field, text, "preference_loss")
    if loss is None:
        return
    rows, loss_rows = spec(dataflow).rows, spec(loss).rows
    rule = f"reads examples of {loss_rows} rows; those of dataflow={config.dataflow!r} have {rows}"
    fix = "sppo, xpo, nash_md have their own"
    if not problems.check_field(loss_rows == rows, field, rule, fix):
        return
    offered = ("chosen_is_policy",) if opponent and rows == 2 else ()
    optional_args = tuple(name for name in offered if name in loss.positional)
    called = (*STAGES["preference_loss"].called_with, *optional_args)
    fix = "write the options that have no default in the text, name(option=value)"
    check_call(problems, field, loss, called, fix)
    if "preference" in dataflow.parameters:
        options = {**{"preference": "bradley_terry()"}, **dataflow.options}
        resolve_field(problems, "dataflow", options["preference"], "preference")
    batch = config.batch
    generated = batch.prompts_per_step * batch.samples_per_prompt
    learned = generated * rows // 2 if opponent else batch.prompts_per_step * rows
    shards = shards_of(config)
    steps = max(generated // batch.sequences_per_optimizer_step, 1)
    multiple, field = steps * shards * rows, "batch.prompts_per_step"
    rule = f"leaves {learned} rows to learn from, which do not divide into {steps} optimizer steps "
    rule += f"of examples of {rows} rows on {shards} devices"
    fix = f"{field}={-(-batch.prompts_per_step // multiple) * multiple}"
    problems.check_field(learned % multiple == 0, field, rule, fix)
