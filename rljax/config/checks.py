"""Checks of a config without JAX, so that a mistyped path or name is answered at once: types,
sizes, paths, and names of trackers and of our functions. rljax.validation has the rest."""

import ast
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from rljax.config.names import FIELDS_LISTED
from rljax.config.overrides import TFDS, is_path
from rljax.config.schema import DATA, FIELDS, MODELS, NAMESPACES, Config
from rljax.config.values import texts_of, value_of, wrong_types
from rljax.errors import InputError
from rljax.files import data_files, how_to_get_data, near_path
from rljax.gguf import is_gguf
from rljax.hub.names import data_name, is_hub, model_name
from rljax.runs.store import is_url
from rljax.suggest import near_names, other_value

_OF_TRAINING = ("data.train", "data.sources", "sft.data", "pretraining.data", "rollouts.replay")
DATA_FIX = (
    "the path of a file or folder that is there, hf://datasets/OWNER/NAME, or a task "
    "(`rljax inspect` shows one), such as sort_digits()"
)
# Fix of a component that no namespace has.
OWN_NAME = "one of its functions, or a dotted name of your own, such as 'my_module"


class Problems(list):
    """Collects the problems of a config; each entry names the field, the value, the rule and
    the fix."""

    def check(self, ok: bool, field: str, value, rule: str, fix: str) -> bool:
        """Adds a problem unless `ok`; returns `ok`."""
        if not ok:
            self.add(field, value, f"{rule}. Fix: {fix}")
        return ok

    def add(self, field: str, value, text: object) -> None:
        """Adds a problem; a long value is cut."""
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        self.append(f"{field}={shown}: {text}")

    def refuse(self) -> None:
        """Raises InputError that lists all problems, if there are any."""
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
        check_fields(config, problems)
        check_paths(config, problems)
        check_names(config, problems)
        _check_bare_names(config, problems)
    problems.refuse()


def check_types(config: Config, problems: Problems) -> None:
    """Adds a problem for every value that is not of the annotated type of its field: a typo such as
    lr="1e-6" is caught here."""
    for name, value, rule, fix in wrong_types(config):
        problems.check(False, name, value, rule, fix)


def check_fields(config: Config, problems: Problems) -> None:
    """Adds a problem for every field that breaks its own declaration: its range, choices
    or rule."""
    for name, spec in FIELDS.items():
        value = value_of(config, name)
        if rule := spec.problem(value):
            problems.check(False, name, value, rule, spec.fix_of(name, value))


def check_paths(config: Config, problems: Problems) -> None:
    """Adds a problem for every path of data, models or tokenizer that does not exist. Paths that
    will be written are not looked at."""
    for field in MODELS:
        for spec in texts_of(config, field):
            if field == "model" and not (is_path(spec) or is_no_component(spec)):
                continue
            if is_gguf(spec) and not is_hub(spec) and not os.path.isdir(spec):
                _check_gguf(field, spec, problems)
            elif not os.path.isdir(spec):
                _check_on_hub(field, spec, model_name, problems)
            elif FIELDS[field].path == "model":
                _check_model_folder(field, spec, problems)
    for field in DATA:
        for spec in texts_of(config, field):
            if is_hub(spec):
                _check_on_hub(field, spec, data_name, problems)
            elif is_path(spec) and not spec.startswith(TFDS):
                file = spec.replace("{split}", "train" if field in _OF_TRAINING else "test")
                _check_files(field, spec, file, problems)
    for field in (name for name, spec in FIELDS.items() if spec.is_written):
        path = value_of(config, field)
        is_free = not os.path.exists(path) or os.path.isdir(path)
        problems.check(is_free, field, path, "is a file", "name a folder")
    logprob_folder = config.offline.reference_logprobs
    rule = "must be a folder of a disk; under a URL there are run_dir and what lies in it"
    problems.check(
        not is_url(logprob_folder),
        "offline.reference_logprobs",
        logprob_folder,
        rule,
        fix="name a folder of the machine, or '' to compute them in the run",
    )


def _check_files(field: str, spec: str, path: str, problems: Problems) -> None:
    if is_url(spec):
        problems.add(
            field,
            spec,
            "addresses are not read. Fix: download it and give the path of the file, "
            "or name a data set of the hub, hf://datasets/OWNER/NAME",
        )
        return
    try:
        files = data_files(path)
    except InputError as error:
        problems.add(field, spec, error)
        return
    missing = [file for file in files if not os.path.exists(file)]
    fix = how_to_get_data(spec) or "give the path of a file"
    if missing and len(files) > 1:
        fix = f"correct {missing[0]!r}, or leave it out"
    if missing and (similar := near_path(missing[0])):
        fix = f"did you mean {similar!r}?"
    problems.check(not missing, field, spec, "does not exist", fix)


def is_no_component(spec: str) -> bool:
    """Returns whether the text of a model can be no component: it has no brackets, and is
    neither a name nor the dotted path of a function, or its module does not exist
    ("Qwen2.5-0.5B", "my.model")."""
    if "(" in spec or ".py:" in spec:
        return False
    parts = spec.split(".")
    if not all(part.isidentifier() for part in parts):
        return True
    if len(parts) == 1:
        return False
    cwd = os.getcwd()
    try:
        paths = [os.path.join(cwd, parts[0]), os.path.join(cwd, f"{parts[0]}.py")]
        return not any(map(os.path.exists, paths)) and importlib.util.find_spec(parts[0]) is None
    except (ImportError, ValueError):
        return True


def _check_gguf(field: str, file: str, problems: Problems) -> None:
    if field == "lora.adapter":
        fix = "an adapter is a folder with adapter_config.json"
        problems.add(field, file, f"is no adapter. Fix: {fix}")
        return
    similar = near_path(file)
    fix = f"did you mean {similar!r}?" if similar else "give the path of the .gguf file"
    problems.check(os.path.isfile(file), field, file, "does not exist", fix)


def _check_model_folder(field: str, folder: str, problems: Problems) -> None:
    """Checks that the folder of a model has its config.json, which is not that of a run."""
    names = set(os.listdir(folder))
    if "starts.jsonl" in names or "checkpoints" in names:
        written = [name for name in ("policy", "reward_model") if name in names]
        rule, fix = "is a run, not a model", "train it to its end: then it has RUN/policy"
        fix = f"its model is {os.path.join(folder, written[0])}" if written else fix
        problems.check(False, field, folder, rule, fix)
        return
    rule = "is a folder without a config.json, so no model" if names else "is an empty folder"
    has_model = not names.isdisjoint(("config.json", "tokenizer.json")) or any(map(is_gguf, names))
    problems.check(has_model, field, folder, rule, _model_fix(field))


def _model_fix(field: str) -> str:
    """Returns the fix of a model, or tokenizer, that is not there."""
    if field == "tokenizer":
        return "a folder with tokenizer.json, or OWNER/NAME"
    fix = "the path of a Hugging Face folder, or on the hub OWNER/NAME"
    if FIELDS[field].component:
        return f"{fix}, such as Qwen/Qwen2.5-0.5B, or 'decoder(layers=2)' for random weights"
    return fix


def _check_on_hub(field: str, spec: str, hub_name: Callable, problems: Problems) -> None:
    """Checks that a text that is no local path names a repository of the hub, and that its client
    is installed. The existence of the repository is checked when the run begins."""
    try:
        name = hub_name(spec)
    except InputError as error:
        problems.add(field, spec, error)
        return
    fix = _model_fix(field)
    if problems.check(name is not None, field, spec, "is not a folder", fix):
        has_client = importlib.util.find_spec("huggingface_hub") is not None
        fix = "pip install 'huggingface_hub>=2.4'"
        fix += "" if is_hub(spec) else ", or give the path of a folder"
        rule = "is no folder here, and the hub is read by huggingface_hub, which is not installed"
        problems.check(has_client, field, spec, rule, fix)


def check_names(config: Config, problems: Problems) -> None:
    """Adds a problem for every name in checkpoint.allow_changed that is no field."""
    choices = ("data", *FIELDS)
    for name in config.checkpoint.allow_changed:
        near = near_names(name, choices, 1)
        fix = f"did you mean {near[0]!r}?" if near else f"such as {choices[0]!r}"
        problems.check(name in choices, "checkpoint.allow_changed", name, "no such name", fix)


def _check_bare_names(config: Config, problems: Problems) -> None:
    """Checks that a component without a dot is a function of its namespace, by the source of the
    namespace."""
    for field, spec in FIELDS.items():
        for text in texts_of(config, field) if spec.component else ():
            check_bare_name(field, text, problems)


def check_bare_name(field: str, text: str, problems: Problems) -> bool:
    """Adds a problem, and returns False, if a component of a field is a name without a dot
    that its namespace does not have: another trainer's name, a component of another field, or
    a misspelling."""
    stage = FIELDS[field].component
    if not stage or is_path(text):
        return True
    home, name = NAMESPACES[stage], text.partition("(")[0].strip()
    if not name or {".", ":"} & set(name):
        return True
    if name in _names_in(home) and _declares_contract(home, name):  # one file is read for it
        return True
    components = components_of(home) + ["console"] * (field == "trackers")
    if not components or name in components:
        return True
    if field == "model" and "(" not in text and not near_names(name, components):
        return problems.check(False, field, text, "is not a folder", _model_fix(field))
    other_fields = [
        other
        for other, spec in FIELDS.items()
        if spec.component not in ("", stage) and name in components_of(NAMESPACES[spec.component])
    ]
    rule, similar = f"{home} has no {name!r}", near_names(name, components, 2)
    if replacement := other_value(field, name):
        fix = f"use {replacement}"
    elif other_fields:
        # Not sft.optimizer.name where actor_optimizer.name will do; tasks are called like rewards.
        likely_field = min(other_fields, key=lambda other: (other in DATA, other.count(".")))
        fix = f"{name} is a value of {likely_field}"
    else:
        own_fix = DATA_FIX if stage == "data" else f"{OWN_NAME}.{name}'"
        fix = f"did you mean {' or '.join(similar)}?" if similar else own_fix
    return problems.check(False, field, text, rule, fix)


def components_of(module: str) -> list[str]:
    """Returns the components that a namespace offers: the functions that it defines, or names in
    its `__all__`, and that declare a contract. Nothing is imported."""
    return [name for name in _names_in(module) if _declares_contract(module, name)]


def _names_in(module: str) -> list[str]:
    for node in _source_of(module):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return [node.name for node in _source_of(module) if isinstance(node, ast.FunctionDef)]


@functools.cache
def _declares_contract(module: str, name: str) -> bool:
    for node in _source_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            calls = [call.func for call in node.decorator_list if isinstance(call, ast.Call)]
            return any(isinstance(func, ast.Name) and func.id == "contract" for func in calls)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _declares_contract(node.module, alias.name)
    return False


@functools.cache
def _source_of(module: str) -> list[ast.stmt]:
    base = Path(__file__).parent.parent.parent.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8")).body
    return []
