"""Components of a config: whether they exist, can be called, and ask for the same roles and
fields. What a component needs is its contract (rljax.contracts)."""

import dataclasses
import inspect

from rljax import dataflows
from rljax.batch import Batch
from rljax.components import Component
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.schema import FIELDS, STAGES
from rljax.config.values import texts_of
from rljax.contracts import Contract, spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError, location_of
from rljax.rewards.pool.calling import reads_model
from rljax.setup.role_table import ROLES, own_roles
from rljax.setup.setup import fields_by_settings, rollout_of
from rljax.suggest import near_names
from rljax.validation.environment import check_environment
from rljax.validation.judges import check_judges
from rljax.validation.offline import check_file, check_online
from rljax.validation.problems import ConfigProblems, check_schedule, resolve_field

# Arguments that the run hands to a rollout that asks for them, beside the roles.
_ROLLOUT_ARGUMENTS = ("sample", "reward", "draw", "tokenizer")
# {field: stage}, but for preference losses and schedules, which have checks of their own.
_STAGE_OF_FIELD = {
    field: declared.component
    for field, declared in FIELDS.items()
    if field.startswith(("algorithm.", "dataflow"))
    and declared.component not in ("", "preference_loss", "schedule")
}


def check_components(config: Config, problems: ConfigProblems) -> str:
    """Returns the kind of data that the dataflow learns from, "" if there is no such dataflow."""
    components: dict[str, Component] = {}
    try:
        declared_roles = own_roles(config)
    except InputError as error:
        problems.add("roles", config.roles, error)
        declared_roles = {}
    for maker in declared_roles.values():
        _check_signature(problems, "roles", maker, "role", ())
    roles = (*ROLES, *declared_roles)

    def check(field: str, text: str, stage: str) -> None:
        component = resolve_field(problems, field, text, stage)
        if component is not None:
            _check_signature(problems, field, component, stage, roles)
            # A dataflow that learns from a file does not read algorithm.collect.
            if stage == "collect" or _check_options(config, problems, field, component):
                components[stage] = component

    defaults = Config()
    for field, stage in _STAGE_OF_FIELD.items():
        # "" is off where it is the default.
        for text in texts_of(config, field) or ("",) * bool(value_of(defaults, field)):
            check(field, text, stage)
    for field in ("reward.function", "evaluate.reward"):
        _check_reward(config, field, problems)
    check_judges(config, problems)
    if config.reward.rubrics:
        check("reward.rubrics", config.reward.rubrics, "rubrics")
    dataflow = components.get("dataflow")
    if dataflow is None:
        return ""
    kind = spec(dataflow).data
    collect = components.get("collect")
    for name in declared_roles:  # another one would be made for nothing
        read = any(
            name in reader.parameters for reader in (dataflow, collect) if reader is not None
        )
        rule = f"dataflow={config.dataflow!r} names no role {name!r}"
        problems.check_field(read, "roles", rule, "remove it")
    if kind not in SAMPLED:
        check_file(config, problems, dataflow, kind)
        return kind
    if collect is not None and not _check_options(config, problems, "algorithm.collect", collect):
        collect = None
    if "advantage" in components and kind == "rollouts":
        _check_advantage(config, problems, dataflow, components["advantage"])
        _check_group_of_one(config, problems, components["advantage"], collect)
        for field in ("reward.process_reward", "reward.process_lines"):
            scorer = resolve_field(problems, field, value_of(config, field), "process_reward")
            if scorer is not None:
                _check_signature(problems, field, scorer, "process_reward", ())
    _check_kl(config, problems, dataflow)
    _check_entropy(config, problems, dataflow)
    if collect is not None:
        _check_groups(config, problems, dataflow, collect)
    check_online(config, problems, dataflow)
    check_environment(config, problems, collect)
    return kind


def _check_signature(
    problems: ConfigProblems, field: str, component: Component, stage: str, roles: tuple[str, ...]
) -> None:
    """Checks that the function can be called as its stage calls it, and that no option that it
    needs is missing."""
    called, offered = STAGES[stage].called_with, ()
    if field == "reward.process_lines":
        called = ("token_texts", "mask", "truncated")
    if stage == "dataflow":
        offered = roles
    if stage == "collect":
        offered = (*roles, *_ROLLOUT_ARGUMENTS)
    arguments = {name: None for name in offered if name in component.parameters}
    text, rule = component.text, f"it is called with ({', '.join(called)})"
    first_parameter = component.parameters[0] if component.parameters else ""
    if stage == "dataflow" and first_parameter == "prompts":
        rule += ": it learns from a batch, and a rollout (algorithm.collect) samples it"
        problems.check(False, field, text, rule, "def my_flow(batch, key, cfg, *, actor)")
        return
    try:
        component.signature.bind(*called, **{**arguments, **component.options})
    except TypeError as error:
        fix = "write its options in the text, name(option=value); other parameters need defaults"
        if stage == "dataflow":
            rule += f" and the roles it names of {', '.join(roles)}"
            fix += "; a further role is declared, roles=('NAME=trained_policy(lr=1e-6)',)"
        problems.check(False, field, text, f"{rule}: {error}", fix)


def _check_options(
    config: Config, problems: ConfigProblems, field: str, component: Component
) -> bool:
    """Checks that the options fit each other and the config. Returns False if no contract follows
    from them."""
    declared = None
    try:
        declared = spec(component)
        _check_batch_fields(component, declared)
        if declared.check is not None:
            declared.check(config, component.options)
    except InputError as error:
        problems.add(field, component.text, error)
    return declared is not None


def _check_batch_fields(component: Component, declared: Contract) -> None:
    """Raises InputError for a name in `reads` or `fills` that no field of a batch has."""
    reads = declared.reads if isinstance(declared.reads, tuple) else ()
    fields = [field.name for field in dataclasses.fields(Batch)]
    for kind, names in {"reads": reads, "fills": declared.fills or ()}.items():
        for name in names:
            if name not in fields:
                near = near_names(name, fields, 1)
                raise InputError(
                    f"contract({kind}) of {component.name!r}",
                    value=name,
                    rule=f"the fields of a batch are {', '.join(fields)}"
                    f"{location_of(component.function)}",
                    fix=f"did you mean {near[0]!r}?" if near else "name one of these",
                )


def _check_reward(config: Config, field: str, problems: ConfigProblems) -> None:
    """Checks that a reward that reads model_score has reward.model, and reward.model a reader."""
    text, model = value_of(config, field), config.reward.model
    reward = resolve_field(problems, field, text, "reward") if text else None  # "" = the task's own
    if reward is None:
        return
    _check_options(config, problems, field, reward)
    try:
        reads = reads_model(reward)
    except InputError as error:
        problems.add(field, text, error)
        return
    rule = "it reads the score of a reward model, and reward.model is ''"
    problems.check_field(model or not reads, field, rule, "reward.model=FOLDER")
    if field == "reward.function" and model:
        rule = f"reward.function={text!r} does not read its score"
        fix = "reward.function='' (the model alone), or mixture(rewards=('reward_model()', ...))"
        problems.check_field(reads, "reward.model", rule, fix)


def _check_groups(
    config: Config, problems: ConfigProblems, dataflow: Component, collect: Component
) -> None:
    """Checks that rollouts and dataflows that compare a prompt's samples have several, in whole
    examples."""
    samples, field = config.batch.samples_per_prompt, "algorithm.collect"
    rule = "looks for groups with unequal scores: batch.samples_per_prompt must be above 1"
    problems.check_field(not spec(collect).needs_groups or samples > 1, field, rule, "once()")
    if "algorithm.collect" in " ".join(problems):
        return
    try:
        unit = spec(rollout_of(config, dataflow)).rows
    except InputError as error:
        problems.add("dataflow", config.dataflow, error)
        return
    field = "batch.samples_per_prompt"
    rule = "must be even: half are the opponent's" if unit == 2 else f"a multiple of {unit}"
    fix = f"{field}={-(-max(samples, 1) // unit) * unit}"
    if problems.check_field(samples % unit == 0, field, rule, fix):
        enough = not spec(dataflow).compares_samples or samples > 1
        fix = f"{field}=2, or more: 8 is usual"
        problems.check_field(enough, field, "must be 2 or more to compare", fix)


# Batch fields that not every dataflow or rollout fills.
_OPTIONAL_FIELDS = ("values", "process_rewards", "step_ids", "state_ids")


def _filled(config: Config, dataflow: Component) -> set[str]:
    """Returns the fields that the dataflow, its rollout and the reward fill beyond those that all
    fill."""
    makers = (dataflow, rollout_of(config, dataflow))
    filled = {name for maker in makers for name in spec(maker).fills or ()}
    return filled | fields_by_settings(config)


def _has_critic(config: Config, dataflow: Component) -> bool:
    """Returns whether a critic learns: the page asks for it, or may have one that the rollout asks
    for."""
    if "critic" not in dataflow.parameters:
        return False
    required = dataflow.signature.parameters["critic"].default is inspect.Parameter.empty
    try:
        return required or "critic" in rollout_of(config, dataflow).parameters
    except InputError:  # of algorithm.collect, which is said elsewhere
        return True


def _check_advantage(
    config: Config, problems: ConfigProblems, dataflow: Component, advantage: Component
) -> None:
    """Checks that critic and returns come together, and that every field that the advantage reads
    is filled."""
    field = "algorithm.advantage"
    critic = _has_critic(config, dataflow)
    advantage_fills, dataflow_fills = spec(advantage).fills, spec(dataflow).fills
    if "returns" in (advantage_fills or ()):
        fix = (
            f"use dataflow='ppo' or 'vapo' (now {config.dataflow!r}), or declare "
            "@contract(fills=('values',)) for one of your own, where a role fills them"
        )
        has_values = "values" in (dataflow_fills or ()) and "critic" not in dataflow.parameters
        if not problems.check_field(critic or has_values, field, "needs a critic", fix):
            return
    elif advantage_fills is not None:
        rule = f"gives no returns for the critic of dataflow={config.dataflow!r} to learn"
        problems.check_field(not critic, field, rule, "gae(), or dataflow='grpo'")
    if dataflow_fills is None:
        return  # it may fill anything: the dry run decides
    try:
        filled = _filled(config, dataflow)
    except InputError:  # of algorithm.collect, which is said elsewhere
        return
    missing = [
        field_name
        for field_name in spec(advantage).reads
        if field_name in _OPTIONAL_FIELDS and field_name not in filled
    ]
    if missing:
        suitable = [name for name in dataflows.__all__ if _fills_fields(config, name, missing)]
        fix = "a dataflow of your own, or a rollout (algorithm.collect), that fills it"
        if suitable:
            fix = f"use dataflow={' or '.join(suitable)}, or {fix}"
        names = ", ".join(missing)
        rule = f"reads batch field {names}, which dataflow={config.dataflow!r} does not fill"
        problems.check_field(False, field, rule, fix)


def _check_group_of_one(
    config: Config, problems: ConfigProblems, advantage: Component, collect: Component | None
) -> None:
    """Checks that an advantage that compares the samples of a prompt has several."""
    if collect is not None and spec(collect).targets:
        return  # what a search has chosen is learned, whatever it was worth beside others
    samples = config.batch.samples_per_prompt
    compares = spec(advantage).compares_samples and advantage.options.get("singleton") != "raw"
    rule = f"algorithm.advantage={advantage.text!r} compares the samples of a prompt: "
    rule += "of one alone every advantage is 0"
    fix = "2 or more; or an advantage of single samples, such as reinforce_plus_plus()"
    problems.check_field(samples > 1 or not compares, "batch.samples_per_prompt", rule, fix)


def _fills_fields(config: Config, name: str, fields: list[str]) -> bool:
    component = Component(name, NAMESPACES["dataflow"])
    if spec(component).data != "rollouts" or "critic" in component.parameters:
        return False
    return set(fields) <= _filled(config, component)


def _check_entropy(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks that a coefficient that changes has a controller and one cause, and observations to
    predict an environment."""
    algorithm = config.algorithm
    takes = "entropy_controller" in dataflow.parameters
    rule = f"dataflow={config.dataflow!r} takes no entropy_controller"
    is_off = not algorithm.entropy_target > 0
    problems.check_field(is_off or takes, "algorithm.entropy_target", rule, "entropy_target=0")
    if algorithm.entropy_schedule:
        field = "algorithm.entropy_schedule"
        problems.check_field(takes, field, rule, "entropy_schedule=''")
        check_schedule(problems, field, algorithm.entropy_schedule)
        rule = "it moves algorithm.entropy_coef over the steps, and that is 0"
        problems.check_field(algorithm.entropy_coef > 0, field, rule, "entropy_coef=0.01")
        rule = "algorithm.entropy_target moves the coefficient already"
        problems.check_field(is_off, field, rule, "entropy_target=0")
    if algorithm.entropy_target > 0:
        rule = f"starts above entropy_coef_max={algorithm.entropy_coef_max}"
        fix = f"entropy_coef_max={algorithm.entropy_coef}, or more"
        field = "algorithm.entropy_coef"
        problems.check_field(algorithm.entropy_coef <= algorithm.entropy_coef_max, field, rule, fix)
    if algorithm.observation_coef > 0:
        rule = "there is no environment whose words could be predicted"
        fix = "set environment.function, or observation_coef=0"
        field = "algorithm.observation_coef"
        problems.check_field(config.environment.function, field, rule, fix)
        rule = "reward.process_model numbers lines where an environment numbers turns"
        fix = "reward.process_model='', or observation_coef=0"
        problems.check_field(not config.reward.process_model, field, rule, fix)


def _check_kl(config: Config, problems: ConfigProblems, dataflow: Component) -> None:
    """Checks that references, controllers and coefficients come together."""
    algorithm = config.algorithm
    if algorithm.kl_target > 0:
        adapts, field = (
            algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0,
            "algorithm.kl_target",
        )
        fix = "set kl_in_reward or kl_in_loss, or kl_target=0"
        problems.check_field(adapts, field, "there is no KL coefficient to adapt", fix)
        rule = f"dataflow={config.dataflow!r} takes no kl_controller"
        problems.check_field("kl_controller" in dataflow.parameters, field, rule, "kl_target=0")
