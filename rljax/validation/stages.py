"""Components of a config: whether they exist, can be called, and ask for the same roles and
fields."""

from rljax.components import Component
from rljax.config import Config
from rljax.data.kinds import data_kind
from rljax.errors import InputError
from rljax.rewards.pool.calling import reads_model
from rljax.validation.judges import check_judges
from rljax.validation.offline import check_offline
from rljax.validation.problems import Problems, resolve_field, value_of

# stage -> what its function is called with; every other parameter is an option of the config.
_CALLED_WITH = {
    "advantage": ("batch",),
    "policy_loss": ("policy", "batch"),
    "value_loss": ("values", "batch"),
    "reduction": ("batch",),
    "preference_loss": ("policy", "batch"),
    "reward_loss": ("scores", "batch"),
    "dataflow": ("data", "key", "cfg"),
    "collect": ("prompts", "key", "cfg"),
    "process_reward": ("batch",),
    "process_lines": ("token_texts", "mask", "truncated"),
    "rubrics": ("workers",),
    "correction": ("batch",),
    "shaping": ("batch",),
    "filter": ("batch",),
}
_ROLES = (
    "actor", "critic", "reference", "reward", "kl_controller", "baseline", "reward_model", "teacher"
)  # fmt: skip
# Stages whose field may be "" (off), and those whose field is a tuple.
_OPTIONAL = {"correction": "algorithm.correction"}
_EACH = {
    "algorithm.reward_shaping": "shaping",
    "algorithm.baseline_filters": "filter",
    "algorithm.filters": "filter",
}


def _check_signature(problems: Problems, field: str, component: Component, stage: str) -> None:
    """The function can be called as its stage calls it, and no option that it needs is missing."""
    given, called = {}, _CALLED_WITH[stage]
    if stage == "dataflow":
        given = {name: None for name in _ROLES if name in component.parameters}
    if stage == "collect":
        names = ("actor", "reward", *(("draw",) if "draw" in component.parameters else ()))
        given = dict.fromkeys(names)
    text, rule = component.text, f"it is called with ({', '.join(called)})"
    try:
        component.signature.bind(*called, **{**given, **component.options})
    except TypeError as error:
        fix = "write its options in the text, name(option=value); other parameters need defaults"
        if stage == "dataflow":
            rule += f" and the roles it names of {', '.join(_ROLES)}"
        problems.check(False, field, text, f"{rule}: {error}", fix)


def _check_reward_model(config: Config, problems: Problems, field: str, reads: bool) -> None:
    """A reward that reads model_score needs reward.model; reward.model needs a reader."""
    text, model = value_of(config, field), config.reward.model
    rule = "it reads the score of a reward model, and reward.model is ''"
    problems.check(bool(model) or not reads, field, text, rule, "reward.model=FOLDER")
    if field == "reward.function" and model:
        rule = f"reward.function={text!r} does not read its score"
        fix = "reward.function='' (the model alone), or mixture(rewards=('reward_model()', ...))"
        problems.check(reads, "reward.model", model, rule, fix)


def check_components(config: Config, problems: Problems) -> str:
    """Returns the kind of data that the dataflow reads, "" if there is no such dataflow."""
    found = {}
    for field, stage in _EACH.items():
        for text in value_of(config, field):
            component = resolve_field(problems, field, text, stage)
            if component is not None:
                _check_signature(problems, field, component, stage)
    if config.algorithm.correction:
        text = config.algorithm.correction
        found["correction"] = resolve_field(problems, "algorithm.correction", text, "correction")
        if found["correction"] is not None:
            _check_signature(problems, "algorithm.correction", found["correction"], "correction")
    stages = ("advantage", "policy_loss", "value_loss", "reduction", "collect", "reward_loss")
    for stage in (*stages, "dataflow"):
        field = "dataflow" if stage == "dataflow" else f"algorithm.{stage}"
        component = resolve_field(problems, field, value_of(config, field), stage)
        if component is not None:
            found[stage] = component
            _check_signature(problems, field, component, stage)
    for field in ("reward.function", "evaluate.reward"):
        text = value_of(config, field)
        if text:  # "" = the task's own
            reward = resolve_field(problems, field, text, "reward")
            if reward is not None:
                try:
                    reads = reads_model(reward)
                except InputError as error:
                    problems.add(field, text, error)
                else:
                    _check_reward_model(config, problems, field, reads)
    check_judges(config, problems)
    if config.reward.rubrics:
        text = config.reward.rubrics
        component = resolve_field(problems, "reward.rubrics", text, "rubrics")
        if component is not None:
            _check_signature(problems, "reward.rubrics", component, "rubrics")
    kind = data_kind(found["dataflow"]) if "dataflow" in found else ""
    if kind == "prompts" and "advantage" in found:
        _check_fit(config, problems, found["dataflow"], found["advantage"])
        _check_kl(config, problems, found["dataflow"])
        _check_process(config, problems, found["dataflow"], found["advantage"])
    if "dataflow" in found:
        check_offline(config, problems, found["dataflow"], kind)
    _check_correction(config, problems)
    rounds = "collect" in found and found["collect"].name in ("dynamic", "active")
    problems.check(
        not rounds or config.batch.samples_per_prompt > 1,
        "algorithm.collect",
        config.algorithm.collect,
        "looks for groups with unequal scores: batch.samples_per_prompt must be above 1",
        "once()",
    )
    return kind


_WITH_RETURNS = ("gae", "vapo_gae")
# Estimators that read a field which not every dataflow fills -> the field, the dataflows that do.
_READS = {
    "remax": ("values", ("remax",)),
    "prime": ("process_rewards", ()),
    "group_process": ("step_ids", ()),
    "vineppo": ("step_ids", ()),
    "gigpo": ("state_ids", ()),
}


def _check_fit(
    config: Config, problems: Problems, dataflow: Component, advantage: Component
) -> None:
    """The dataflow, the advantage and the coefficients ask for the same roles."""
    algorithm, field = config.algorithm, "algorithm.advantage"
    critic = "critic" in dataflow.parameters
    if advantage.name in _WITH_RETURNS:
        fix = f"use dataflow='ppo' or 'vapo' (now {config.dataflow!r})"
        problems.check(critic, field, algorithm.advantage, "needs a critic", fix)
    elif "." not in advantage.name:
        rule = f"gives no returns for the critic of dataflow={config.dataflow!r} to learn"
        problems.check(not critic, field, algorithm.advantage, rule, "gae(), or dataflow='grpo'")
    _check_fields(config, problems, dataflow, advantage)


def _check_fields(
    config: Config, problems: Problems, dataflow: Component, advantage: Component
) -> None:
    """The estimator reads a batch field that only some dataflow, or none so far, fills."""
    field, filled_by = _READS.get(advantage.name, ("", ()))
    own = "." in dataflow.name  # a dataflow of the user's may fill anything
    own = own or (advantage.name == "group_process" and bool(config.reward.process_model))
    problems.check(
        not field or own or dataflow.name in filled_by,
        "algorithm.advantage",
        config.algorithm.advantage,
        f"reads batch field {field}, which dataflow={config.dataflow!r} does not fill",
        f"use dataflow={' or '.join(filled_by)}" if filled_by else "a dataflow of your own",
    )


# Estimators to which it matters where in a response a reward stands.
_READ_TOKEN_REWARDS = (
    "gae",
    "vapo_gae",
    "reinforce",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
    "group_process",
)


def _check_process(
    config: Config, problems: Problems, dataflow: Component, advantage: Component
) -> None:
    """Scores of lines reach a learner that reads the reward of every token."""
    folder = config.reward.process_model
    for stage in ("process_reward", "process_lines"):
        name = f"reward.{stage}"
        component = resolve_field(problems, name, value_of(config, name), "process_reward")
        if component is not None:
            _check_signature(problems, name, component, stage)
    if not folder:
        return
    reads = advantage.name in _READ_TOKEN_REWARDS or "." in advantage.name
    rule = f"algorithm.advantage={config.algorithm.advantage!r} reads no rewards of single tokens"
    fix = "gae() with dataflow='ppo', or reinforce_plus_plus(); or reward.process_model=''"
    problems.check(reads, "reward.process_model", folder, rule, fix)
    rule = f"dataflow={config.dataflow!r} takes no reward"
    problems.check("reward" in dataflow.parameters, "reward.process_model", folder, rule)


def _check_correction(config: Config, problems: Problems) -> None:
    algorithm = config.algorithm
    both = bool(algorithm.correction) and algorithm.old_logprobs == "sampler"
    problems.check(
        not both,
        "algorithm.correction",
        algorithm.correction,
        "with old_logprobs='sampler' (bypass) the ratio is already that to the sampler: a weight "
        "would count it twice",
        "correction='', or old_logprobs='recomputed'",
    )


def _check_kl(config: Config, problems: Problems, dataflow: Component) -> None:
    """References, controllers and coefficients ask for each other."""
    algorithm = config.algorithm
    if algorithm.kl_target > 0:
        problems.check(
            algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0,
            "algorithm.kl_target",
            algorithm.kl_target,
            "there is no KL coefficient to adapt",
            "set kl_in_reward or kl_in_loss, or kl_target=0",
        )
        problems.check(
            "kl_controller" in dataflow.parameters,
            "algorithm.kl_target",
            algorithm.kl_target,
            f"dataflow={config.dataflow!r} takes no kl_controller",
            "kl_target=0",
        )
    reference = dataflow.signature.parameters.get("reference")
    wanted = algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0
    problems.check(
        not wanted or reference is not None,
        "dataflow",
        config.dataflow,
        "takes no reference, but algorithm.kl_in_reward or kl_in_loss is above 0",
        "set both to 0",
    )
