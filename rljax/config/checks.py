"""What can be said of a config without JAX, so that a mistyped path or name is answered at once:
types, sizes, paths, and names of trackers and of our functions. rljax.validation has the rest."""

import ast
import dataclasses
import difflib
import importlib.util
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path

from rljax.components import is_own_code, names_of
from rljax.config.declare import EXAMPLES, kind_name
from rljax.config.names import FIELDS_LISTED, field_names
from rljax.config.overrides import DATA_FILES, is_path, value_of
from rljax.config.schema import NAMESPACES, Config
from rljax.errors import InputError
from rljax.files import data_files, how_to_get_data
from rljax.hub.names import data_name, is_hub, model_name
from rljax.tracking.store import is_url

_OF_TRAINING = ("data.train", "data.sources", "sft.data", "pretraining.data", "rollouts.replay")
OF_DATA = (*_OF_TRAINING, "data.test", "evaluate.prompts_from")
FOLDERS = (
    "critic_model", "teacher_model", "reward.model", "reward.cost_model", "reward.process_model",
    "reward.judge_model", "lora.adapter",
)  # fmt: skip
_NEW_FOLDERS = ("run_dir", "offline.reference_logprobs")
_TFDS = "tfds:"
# Options of components that send data away, read secrets, or write.
_OUTWARD = {"base_url", "url", "api_key_env", "cache"}
# Folders and plain texts: every other text of a config may be resolved to a function.
_NEVER_CALLED = {
    "tokenizer", *FOLDERS, *_NEW_FOLDERS, "data.target_instruction", "offline.step_separator",
    "sampler.stop_strings", "sampler.end_of_thinking", "sampler.interrupt_phrase",
    "compilation_cache",
}  # fmt: skip
# Fields that name a component, and the namespace of bare names.
COMPONENTS = {
    "dataflow": "dataflow",
    "model": "model",
    "reward.function": "reward",
    "evaluate.reward": "reward",
    "reward.rubrics": "rubrics",
    "environment.function": "environment",
    **dict.fromkeys(OF_DATA, "data"),
    **dict.fromkeys(("reward.process_reward", "reward.process_lines"), "process_reward"),
    **{
        f"algorithm.{stage}": stage
        for stage in (
            "advantage", "policy_loss", "value_loss", "preference_loss", "reward_loss", "reduction",
            "correction", "collect",
        )
    },
    "algorithm.reward_shaping": "shaping",
    "algorithm.baseline_filters": "filter",
    "algorithm.filters": "filter",
    **{
        f"{optimizer}.{field}": home
        for optimizer in ("actor_optimizer", "critic_optimizer", "sft.optimizer")
        for field, home in (("name", "optimizer"), ("schedule", "schedule"))
    },
    "trackers": "tracker",
}  # fmt: skip

_POSITIVE = (
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "batch.sequences_per_optimizer_step",
    "batch.epochs",
    "sampler.max_response_tokens",
    "data.max_prompt_tokens",
    "reward.workers",
    "environment.max_turns",
    "environment.max_reply_tokens",
    "environment.max_rows",
    "environment.workers",
    "sft.sequences_per_step",
    "sft.check_every_steps",
    "pretraining.sequences_per_optimizer_step",
    "pretraining.max_tokens",
    "evaluate.prompts",
    "checkpoint.keep",
    "samples_every_steps",
    "max_skipped_in_a_row",
    "data.pass_rate_samples",
    "offline.examples_per_step",
    "offline.max_tokens",
    "hosts.init_timeout_s",
    "hosts.heartbeat_s",
)
_NOT_NEGATIVE = (
    "sampler.page_tokens",
    "sampler.pages",
    "sampler.draft_tokens",
    "rollouts.max_staleness",
    "hosts.stall_s",
    "rollouts.sampler_devices",
    "reward.memory_gb",
    "environment.max_calls",
    "environment.max_tokens",
    "environment.episode_timeout_s",
    "environment.memory_gb",
    "environment.retries",
    "batch.tokens_per_microbatch",
    "steps",
    "report_every_minutes",
    "sft.steps",
    "evaluate.every_steps",
    "evaluate.samples",
    "evaluate.patience",
    "checkpoint.every_steps",
    "sampler.top_k",
    "sampler.temperature",
    "sampler.slots",
    "algorithm.kl_in_reward",
    "algorithm.kl_in_loss",
    "lora.rank",
    "model_settings.router_aux_loss_coef",
    "model_settings.router_bias_update_speed",
    "algorithm.entropy_coef",
    "algorithm.kl_target",
    "algorithm.trust_region",
    "sft.stop_at_accuracy",
    "seed",
)


class Problems(list):
    """Collects what is wrong; each entry names the field, the value, the rule and the fix."""

    def check(self, ok: bool, field: str, value, rule: str, fix: str) -> bool:
        if not ok:
            self.add(field, value, f"{rule}. Fix: {fix}")
        return ok

    def add(self, field: str, value, text: object) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        self.append(f"{field}={shown}: {text}")

    def refuse(self) -> None:
        """Raises InputError that lists all of them, if there are any."""
        if self:
            listed = "\n".join(f"  {i}. {p}" for i, p in enumerate(self, 1))
            text = f"the config has {len(self)} problem{'s' * (len(self) > 1)}:\n{listed}"
            fixed = all("Fix: " in problem for problem in self)
            raise InputError.of_text(text) if fixed else InputError(text, fix=FIELDS_LISTED)


def refuse_early(config: Config) -> None:
    """Raises InputError for every wrong type, size, path and name that is found without JAX."""
    problems = Problems()
    check_types(config, problems)
    if not problems:
        check_bounds(config, problems)
        check_paths(config, problems)
        check_names(config, problems)
        _check_bare_names(config, problems)
    problems.refuse()


def refuse_own_code(config: Config, where: str) -> None:
    """Raises InputError where the config names a function that is not rljax's own, an address or a
    secret: a config that came in a folder is data, and what it names runs, and is sent to, only
    where the user has said so."""
    found = []
    for field in set(field_names(Config)) - _NEVER_CALLED:
        value = value_of(config, field)
        for text in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(text, str) and asks_for_trust(field, text):
                found.append(f"{field}={text!r}")
    cache = config.compilation_cache  # of programs: not one that came with the folder
    if cache and not cache.startswith(("~", "/")):
        found.append(f"compilation_cache={config.compilation_cache!r}")
    if found:
        raise InputError(
            f"{where} names code, addresses or secrets that are not rljax's own",
            value="; ".join(sorted(found)),
            rule="a folder is data: they are used only where you trust it",
            fix="look at them, then --trust_code",
        )


def asks_for_trust(field: str, text: str) -> bool:
    """Whether the text of a field names code of others, an address or a secret."""
    # What the hub has is data, and it is asked at the address that this machine is set to.
    if is_hub(text) and (field in OF_DATA or field == "model"):
        return False
    if field in OF_DATA:
        if text.startswith(_TFDS):  # a folder of TFDS names classes, which are imported
            return os.path.lexists(text.removeprefix(_TFDS).strip())
        if Path(text).suffix in DATA_FILES:
            return False
    elif field == "model" and is_path(text):
        return False
    call = text.partition("=")[2] if field in ("roles", "placement") else text
    names, options = names_of(call)
    return any(is_own_code(name) for name in names) or not options.isdisjoint(_OUTWARD)


def check_types(config, problems: Problems, prefix: str = "") -> None:
    """Every field holds a value of its annotated type: a typo such as lr="1e-6" is caught here."""
    for field in dataclasses.fields(config):
        value, name, kind = getattr(config, field.name), prefix + field.name, field.type
        if dataclasses.is_dataclass(kind):
            if problems.check(
                isinstance(value, kind),
                name,
                value,
                f"must be a {kind.__name__}",
                fix=f"set {name} to a {kind.__name__}(), or its fields one by one",
            ):
                check_types(value, problems, name + ".")
        elif kind is float:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            finite = number and abs(value) <= sys.float_info.max  # false for NaN
            problems.check(
                finite, name, value, "must be a finite number", fix="write a number, such as 0.5"
            )
        elif kind in (int, bool, str):
            exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            ok = problems.check(
                exact,
                name,
                value,
                f"must be {kind_name(kind)}",
                fix=f"write {kind_name(kind)}, such as {EXAMPLES[kind]}",
            )
            if ok and kind is int:
                problems.check(
                    abs(value) < 2**31,
                    name,
                    value,
                    f"must be below {2**31}",
                    fix=f"write {2**31 - 1} or less",
                )
        else:
            item = typing.get_args(kind)[0]
            wanted = (int, float) if item is float else item
            fits = isinstance(value, (tuple, list)) and all(
                isinstance(v, wanted) and not isinstance(v, bool) for v in value
            )
            problems.check(
                fits,
                name,
                value,
                f"must be {kind_name(kind)}",
                fix=f"write {kind_name(kind)}, such as ({EXAMPLES[item]},)",
            )


def check_bounds(config: Config, problems: Problems) -> None:
    """Sizes and counts that must be at least 1, or not negative."""
    for names, least in ((_POSITIVE, 1), (_NOT_NEGATIVE, 0)):
        for name in names:
            value = value_of(config, name)
            problems.check(
                value >= least, name, value, f"must be >= {least}", fix=f"write {least} or more"
            )


def _each(config: Config, field: str) -> tuple[str, ...]:
    """The texts of a field that holds one or several, without the empty ones."""
    value = value_of(config, field)
    return tuple(text for text in ((value,) if isinstance(value, str) else value) if text)


def check_paths(config: Config, problems: Problems) -> None:
    """Data, models and tokenizer that are named by a path exist; what will be written is free."""
    for field in ("model", "tokenizer", *FOLDERS):
        spec = value_of(config, field)
        if spec and (field != "model" or is_path(spec)) and not os.path.isdir(spec):
            _check_on_hub(field, spec, model_name, problems)
    for field in OF_DATA:
        for spec in _each(config, field):
            if is_hub(spec):
                _check_on_hub(field, spec, data_name, problems)
            elif is_path(spec) and not spec.startswith(_TFDS):
                file = spec.replace("{split}", "train" if field in _OF_TRAINING else "test")
                _check_files(field, spec, file, problems)
    for field in _NEW_FOLDERS:
        path = value_of(config, field)
        free = not os.path.exists(path) or os.path.isdir(path)
        problems.check(free, field, path, "is a file", "name a folder")
    stored = config.offline.reference_logprobs
    rule = "must be a folder of a disk; under a URL there are run_dir and what lies in it"
    problems.check(
        not is_url(stored),
        "offline.reference_logprobs",
        stored,
        rule,
        fix="name a folder of the machine, or '' to compute them in the run",
    )


def _check_files(field: str, spec: str, named: str, problems: Problems) -> None:
    try:
        files = data_files(named)
    except InputError as error:
        problems.add(field, spec, error)
        return
    missing = [file for file in files if not os.path.exists(file)]
    fix = how_to_get_data(spec) or "give the path of a file"
    if missing and len(files) > 1:
        fix = f"correct {missing[0]!r}, or leave it out"
    problems.check(not missing, field, spec, "does not exist", fix)


def _check_on_hub(field: str, spec: str, named: Callable, problems: Problems) -> None:
    """A text that is no local path names a repository of the hub, and there is the client for it.
    Whether the repository is there is asked when the run begins."""
    try:
        name = named(spec)
    except InputError as error:
        problems.add(field, spec, error)
        return
    fix = "a Hugging Face folder, or a model of the hub: OWNER/NAME or hf://OWNER/NAME@REVISION"
    if problems.check(name is not None, field, spec, "is not a folder", fix):
        there = importlib.util.find_spec("huggingface_hub") is not None
        fix = "pip install 'huggingface_hub>=2.4'" + (
            "" if is_hub(spec) else ", or give the path of a folder"
        )
        rule = "is no folder here, and the hub is read by huggingface_hub, which is not installed"
        problems.check(there, field, spec, rule, fix)


def check_names(config: Config, problems: Problems) -> None:
    """Fields that may change at a resume."""
    choices = ("data", *field_names(config))
    for name in config.checkpoint.allow_changed:
        close = difflib.get_close_matches(name, choices, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"such as {choices[0]!r}"
        problems.check(name in choices, "checkpoint.allow_changed", name, "no such name", fix)


def _check_bare_names(config: Config, problems: Problems) -> None:
    """A component without a dot is a function of its namespace, whose source says which it has."""
    for field, stage in COMPONENTS.items():
        for text in _each(config, field):
            name = text.partition("(")[0].strip()
            known = functions_of(NAMESPACES[stage]) + ["console"] * (field == "trackers")
            if known and name.isidentifier() and name not in known and not is_path(text):
                close = difflib.get_close_matches(name, known, n=2)
                fix = (
                    f"did you mean {' or '.join(close)}?" if close else "a dotted name of your own"
                )
                problems.check(False, field, text, f"{NAMESPACES[stage]} has no {name!r}", fix)


def functions_of(module: str) -> list[str]:
    """Every name that the source of a module of ours defines or imports."""
    body = _source_of(module)
    named = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return named + [alias.asname or alias.name for n in imports for alias in n.names]


def components_of(module: str) -> list[str]:
    """The functions that a namespace offers: those of its `__all__`, else those that it defines."""
    body = _source_of(module)
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(node.value) if name[0].islower()]
    named = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [name for name in named if not name.startswith("_")]


def _source_of(module: str) -> list[ast.stmt]:
    place = Path(__file__).parent.parent.parent.joinpath(*module.split("."))
    for path in (place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8")).body
    return []
