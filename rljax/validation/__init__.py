"""validate(config): every problem of a config at once, each with its fix, before any model loads:
types, ranges, batch arithmetic, and whether components exist and fit together."""

import copy
from collections.abc import Collection, Iterable

from rljax.components import resolve
from rljax.config import NAMESPACES, AlgorithmConfig, Config, as_config, is_path, value_of
from rljax.config.checks import Problems, check_names, check_paths, check_types
from rljax.config.schema import DATA, OPTIMIZERS
from rljax.config.values import texts_of
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.online.default_rewards import evaluation_text
from rljax.setup.features import Parts, violations
from rljax.validation.asynchrony import flight_warnings
from rljax.validation.fields import check_batch, check_data_and_model, check_devices, check_ranges
from rljax.validation.placement import check_placement, devices_left
from rljax.validation.problems import ConfigProblems, resolve_field
from rljax.validation.stages import check_components
from rljax.validation.unread import unread, unread_warnings


def validate(
    config: Config, devices: int | None = None, shipped: Config | None = None
) -> list[str]:
    """Returns warnings of the config; raises one InputError that lists all of its problems. Runs
    before any model loads. `devices`: how many there are, if it is known. `shipped`: the config of
    the library that this one was made from."""
    config = as_config(config, "validate")
    checked = _Checked(config)
    sound, problems = checked.sound, checked.joint_problems
    problems.check_field(sound.data.train, "data.train", "is not set", "a path, or a task")
    rule, fix = "nothing to train: sft.steps is 0 too", "steps=100, or sft.steps=100"
    problems.check_field(sound.steps + sound.sft.steps > 0, "steps", rule, fix)
    checked.check_parts()
    if devices is not None and (mesh_devices := devices_left(sound, devices, problems)):
        check_devices(sound, mesh_devices, problems, devices - mesh_devices)
    checked.refuse()
    return [
        *unread_warnings(config, shipped),
        *_task_cautions(config),
        *_unusual_warnings(config),
        *_warnings(config),
    ]


def validate_sizes(config: Config) -> None:
    """Checks a config as `validate` does, for those who read no data: data.train may be unset."""
    checked = _Checked(as_config(config, "validate_sizes"))
    checked.check_parts()
    checked.refuse()


class _Checked:
    """A config and its problems: `field_problems` of fields by themselves, and `joint_problems` of
    how they fit together. The latter are looked for in `sound`, which has defaults where a value is
    of a wrong type or divides by 0."""

    def __init__(self, config: Config):
        self.field_problems = Problems()
        check_types(config, self.field_problems)
        self.sound = _with_defaults(config, _fields_of(self.field_problems))
        self.replaced = set(_fields_of(self.field_problems))
        ranges = ConfigProblems(self.sound)
        check_ranges(self.sound, ranges)
        self.field_problems += [problem for problem in ranges if not self._follows(problem)]
        sizes = {field for field in _fields_of(ranges) if field.startswith(("batch.", "mesh"))}
        self.sound = _with_defaults(self.sound, sizes)
        self.replaced |= sizes
        self.joint_problems = ConfigProblems(self.sound)

    def _follows(self, problem: str) -> bool:
        """Returns whether a problem may be that of a default which stands for another value."""
        (field,) = _fields_of([problem])
        return field.partition(".")[0] in {name.partition(".")[0] for name in self.replaced}

    def check_parts(self) -> None:
        """Adds the problems of paths, names, components and features."""
        config, problems = self.sound, self.joint_problems
        fix = "a Hugging Face folder, or 'decoder(...)'"
        problems.check_field(config.model, "model", "is not set", fix)
        check_paths(config, problems)
        check_data_and_model(config, problems)
        check_names(config, problems)
        _check_trackers(config, problems)
        check_placement(config, problems)
        if check_components(config, problems) in (*SAMPLED, ""):
            check_batch(config, problems)
        for rule, field, value, message in violations(Parts(config)):
            problems.check(False, field, value, message, rule.fix)

    def refuse(self) -> None:
        """Raises InputError that lists everything."""
        joint = [problem for problem in self.joint_problems if not self._follows(problem)]
        Problems([*self.field_problems, *joint]).refuse()


def _check_trackers(config: Config, problems: Problems) -> None:
    """Checks that each tracker is a service, or a class or function of the user's that takes
    (run_dir, config)."""
    for text in config.trackers:
        maker = None if text == "console" else resolve_field(problems, "trackers", text, "tracker")
        if maker is not None and len(maker.positional) != 2:
            rule = f"a tracker is made of (run_dir, config), not of {maker.positional}"
            problems.add("trackers", text, f"{rule}. Fix: def {maker.short_name}(run_dir, config)")


def _fields_of(problems: Iterable[str]) -> list[str]:
    return [problem.partition("=")[0] for problem in problems]


def _with_defaults(config: Config, fields: Collection[str]) -> Config:
    """Returns the config; if there are `fields`, a copy with the defaults in these."""
    if not fields:
        return config
    copied, default = copy.deepcopy(config), Config()
    for field in fields:
        section, _, name = field.rpartition(".")
        setattr(value_of(copied, section), name, value_of(default, field))
    return copied


def _loss_warnings(algorithm: AlgorithmConfig) -> list[str]:
    warnings, loss = [], resolve(algorithm.policy_loss, NAMESPACES["policy_loss"])
    reduction = resolve(algorithm.reduction, NAMESPACES["reduction"]).name
    usual = spec(loss).reduction
    if usual and reduction != usual:
        warnings.append(
            f"policy_loss={loss.name} is one value per sequence, repeated on its tokens: with "
            f"reduction={reduction!r} long sequences weigh more; the paper's is {usual}"
        )
    if spec(loss).corrects_mismatch and algorithm.correction:
        correction = resolve(algorithm.correction, NAMESPACES["correction"])
        if correction.options.get("mode") != "off":
            warnings.append(
                f"policy_loss={algorithm.policy_loss} weighs by the sampler's log-probs itself: "
                "algorithm.correction counts the mismatch twice"
            )
    return warnings


def _task_cautions(config: Config) -> list[str]:
    """Returns the cautions about their rows that the tasks of a config declare."""
    named = [text for field in DATA for text in texts_of(config, field) if not is_path(text)]
    tasks = [resolve(text, NAMESPACES["data"]) for text in named]
    return list(dict.fromkeys(filter(None, (spec(task).caution for task in tasks))))


# Numbers that a run accepts, and that are most often a slip: (fields, reason, the test).
_UNUSUAL = (
    (
        tuple(f"{name}.clip_norm" for name in OPTIMIZERS),
        "every gradient is scaled down to this norm (0 = no clipping); 1.0 is usual",
        lambda value: 0 < value < 1e-4,
    ),
    (
        tuple(f"{name}.eps" for name in OPTIMIZERS),
        "it outweighs most gradients in AdamW's denominator, so that steps are tiny; 1e-8 is usual",
        lambda value: value > 1e-2,
    ),
    (
        ("sampler.temperature",),
        "samples are close to random tokens; 1.0 is usual",
        lambda value: value > 2,
    ),
    (
        ("algorithm.kl_in_loss", "algorithm.kl_in_reward"),
        "the KL penalty outweighs the rewards; 0.001 to 0.1 is usual",
        lambda value: value > 1,
    ),
)


def _unusual_warnings(config: Config) -> list[str]:
    unread_names = unread(config)
    return [
        f"{name}={value_of(config, name)!r} is unusual: {reason}"
        for names, reason, is_unusual in _UNUSUAL
        for name in names
        if name not in unread_names and is_unusual(value_of(config, name))
    ]


def _warnings(config: Config) -> list[str]:
    warnings = _held_out_warnings(config)
    if spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data not in SAMPLED:
        return warnings
    if config.reward.model and not evaluation_text(config) and config.evaluate.correct_at == 1.0:
        warnings.append(
            "eval/accuracy is the share of responses that the reward model scores 1.0 or more, and "
            "its scores have no such mark: read eval/reward, or set evaluate.reward, or the score "
            "that counts as right in evaluate.correct_at"
        )
    if config.sampler.top_p < 1 or config.sampler.top_k > 0 or config.sampler.min_p > 0:
        warnings.append(
            "with sampler.top_k, top_p or min_p the importance ratios are biased; use top_k=0, "
            "top_p=1 and min_p=0 for training"
        )
    if config.algorithm.kl_in_reward > 0 and config.algorithm.kl_in_loss > 0:
        warnings.append(
            "algorithm.kl_in_reward and kl_in_loss are both on: the KL penalty counts twice"
        )
    if config.memory.reference_on_host and not (
        config.algorithm.kl_in_reward > 0 or config.algorithm.kl_in_loss > 0
    ):
        warnings.append("memory.reference_on_host does nothing: without a KL there is no reference")
    advantage = resolve(config.algorithm.advantage, NAMESPACES["advantage"])
    reads_parts = "reward_parts" in (reads := spec(advantage).reads) and "rewards" not in reads
    if reads_parts and (config.algorithm.reward_shaping or config.algorithm.kl_in_reward):
        warnings.append(
            f"advantage={advantage.name} reads the parts of the reward: algorithm.reward_shaping "
            "and kl_in_reward do not reach it"
        )
    return warnings + _loss_warnings(config.algorithm) + flight_warnings(config)


def _held_out_warnings(config: Config) -> list[str]:
    """Returns warnings about fields that ask for evaluations where there are none, or only one."""
    data, evaluate, best = config.data, config.evaluate, config.checkpoint.best_metric
    warnings = []
    if best.removeprefix("-").startswith("eval/") and not evaluate.every_steps:
        warnings.append(
            f"checkpoint.best_metric={best!r} is measured at the end alone while "
            "evaluate.every_steps is 0, so that the last step is the best"
        )
    fields = ["evaluate.every_steps", "evaluate.patience"]
    if spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data in SAMPLED:
        fields += ["evaluate.samples", "sft.stop_at_accuracy"]
        held_out = not all(map(is_path, (data.train, *data.sources)))  # tasks have a test split
        unset = "neither data.test nor data.test_fraction"
    else:
        held_out = bool(evaluate.prompts_from)
        unset = "none of data.test, data.test_fraction and evaluate.prompts_from"
    set_fields = [name for name in fields if value_of(config, name)]
    if set_fields and not (held_out or data.test or data.test_fraction):
        verb = "do nothing" if len(set_fields) > 1 else "does nothing"
        warnings.append(
            f"{unset} is set, so nothing is held out: {' and '.join(set_fields)} {verb}"
        )
    return warnings
