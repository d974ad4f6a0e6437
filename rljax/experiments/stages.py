"""Stages of a pipeline, from what a config file's `pipeline()` yields: checked before one runs.

A stage is a command of rljax with its options, or "train" with fields of the config:

    def pipeline(variant=""):                       # variant: of --config=FILE:VARIANT
        yield {"stage": "sft", "command": "train", "dataflow": "sft", "steps": 100}
        yield {"stage": "pairs", "command": "sample", "checkpoint": "{sft}", "pairs": "pairs.jsonl"}
        yield {"stage": "scorer", "command": "train", "dataflow": "reward_model",
               "model": "{sft}/policy", "data.train": "{pairs}/pairs.jsonl"}

{NAME} is the folder of an earlier stage. Every stage writes into a folder of its own.
"""

import dataclasses
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rljax import hub
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, changed_fields, fingerprints, value_of, with_overrides
from rljax.config import policy_options as of
from rljax.config.declare import Options, Spec, declared, option_flags, options_of, without_none
from rljax.config.own_functions import plain_value
from rljax.config.schema import FIELDS
from rljax.config.trust import is_harmless, value_asks_for_trust
from rljax.errors import InputError
from rljax.evaluation.benchmarks import HOME as SUITES
from rljax.experiments.sweep import TRAIN, config_of, flag, without_config
from rljax.rewards.judges.judging import HOME as JUDGES
from rljax.rewards.judges.judging import judge_of
from rljax.runs.store import is_url
from rljax.training.run_folder import exports_of
from rljax.validation import validate

# The options of every other command, and the files that each makes, by the option that names them.
COMMANDS: dict[str, tuple[type[Options], dict[str, str]]] = {
    "sample": (of.RejectionOptions, {"out": "samples.jsonl", "pairs": "", "trajectories": ""}),
    "label preferences": (of.PreferenceOptions, {"out": "pairs.jsonl"}),
    "label steps": (of.LabelOptions, {"out": "steps"}),
    "evaluate": (of.EvaluateOptions, {"out": "result.json", "answers": "answers.jsonl"}),
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TAKEN = ("lineage.json", "pipeline.html")  # files of the pipeline's own folder
_KEPT = ("split",)  # {split} is the training or the test split of a path
# {NAME} at the beginning of a path: of a value, of one behind a comma, of a text in quotes.
_REFERENCE = re.compile(r"^\{([\w.-]+)\}(?=[/@]|$)|(?<=['\",])\{([\w.-]+)\}(?=/)")
# Options that name components of modules which no field of the config names.
_HOMES = {"judge": JUDGES, "suites": SUITES}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage. `values` are those that pipeline() has yielded for it, `settings` the Config or
    the options that they make; in both {NAME} stands for the folder of a stage."""

    name: str
    command: str
    values: Mapping[str, object]
    settings: Config | Options
    home: Path  # of the pipeline
    arguments: tuple[str, ...] = ()  # that give a "train" stage the config of the file

    @property
    def folder(self) -> Path:
        """Folder of the stage."""
        return self.home / self.name

    @property
    def config(self) -> Config | None:
        """Config of a "train" stage; None for other commands."""
        return self.settings if isinstance(self.settings, Config) else None

    def specs(self) -> dict[str, Spec]:
        """Returns {field or option: its declaration}."""
        return FIELDS if self.config is not None else declared(type(self.settings))

    def fields(self) -> dict[str, object]:
        """Returns {field or option: value}."""
        return {name: value_of(self.settings, name) for name in self.specs()}

    def in_folder(self, home: Path) -> "Stage":
        """Returns the stage with the folders of the stages in `home` in its values and settings."""
        fields = self.fields()
        changed = {k: v for k in fields if (v := _put(fields[k], home)) != fields[k]}
        if self.config is not None:
            settings = with_overrides(self.config, changed, self.name)
        else:
            settings = dataclasses.replace(self.settings, **changed)
        values = {name: _put(value, home) for name, value in self.values.items()}
        return dataclasses.replace(self, values=values, settings=settings)

    def compared(self) -> dict[str, object]:
        """Returns the fields and options that must be equal to those of the stage in its folder."""
        if self.config is not None:
            return {k: _with_whole_paths(v) for k, v in fingerprints(self.config).items()}
        fields = {k: v for k, v in self.fields().items() if k != "compilation_cache"}
        fields = {k: _with_whole_paths(v) for k, v in fields.items()}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    def shown(self) -> dict:
        """Returns the fields of the config that differ from its defaults, or the options."""
        return self.compared() if self.config is None else changed_fields(self.config)

    def needs(self) -> tuple[str, ...]:
        """Returns the stages whose folders it reads."""
        names = dict.fromkeys(n for value in self.fields().values() for n in _references(value))
        return tuple(name for name in names if name != self.name)

    def outputs(self) -> tuple[str, ...]:
        """Returns the files and folders that it makes for others, relative to its folder."""
        if self.config is not None:
            return exports_of(self.config)
        files = {option: getattr(self.settings, option) for option in COMMANDS[self.command][1]}
        if self.command == "evaluate":
            del files["out"]  # it holds seconds: what the record has of it are the metrics
        return tuple(Path(file).name for file in files.values() if file)

    def command_line(self) -> list[str]:
        """Returns the command that runs this stage by hand."""
        values = self.in_folder(self.home).values
        if self.config is not None:
            fields = {k: v for k, v in values.items() if k != "config"}
            return [*TRAIN, *self.arguments, *(flag(k, v) for k, v in fields.items())]
        flags = option_flags(COMMANDS[self.command][0], values)
        return [*TRAIN[:-1], *self.command.split(), *flags]


def _texts(value: object) -> list[str]:
    """The texts of a value or of a list of values, without the empty ones."""
    values = value if isinstance(value, tuple | list) else (value,)
    return [text for text in values if isinstance(text, str) and text]


def _references(value: object) -> list[str]:
    """The names in {} that begin a path."""
    matches = [match for text in _texts(value) for match in _REFERENCE.finditer(text)]
    return [name for match in matches if (name := match[1] or match[2]) not in _KEPT]


def _put(value: object, home: Path) -> object:
    """The value with {NAME} as the folder NAME of `home`."""
    if isinstance(value, tuple | list):
        return tuple(_put(item, home) for item in value)
    if not isinstance(value, str):
        return value

    def replaced(match):
        return match[0] if match[1] in _KEPT else f"{home}/{match[1] or match[2]}"

    return _REFERENCE.sub(replaced, value)


def _with_whole_paths(value: object) -> object:
    """The value with the file of FILE.py:function as a whole path, wherever it was named from."""
    if isinstance(value, tuple | list):
        return type(value)(map(_with_whole_paths, value))
    if not isinstance(value, str):
        return value

    def resolved(match):
        return str(Path(match[0]).resolve())

    return re.sub(r"[^\s()'\"=,]+\.py(?=:)", resolved, value)


# -- making and checking them --


def make_stages(
    base: Config,
    listed: object,
    home: Path,
    where: str,
    arguments: Sequence[str] = (),
    trusted: bool = True,
    flags: Collection[str] = (),
) -> list[Stage]:
    """Returns the stages, each one valid. Raises InputError that lists every problem of
    every stage.

    `base` is the config of the file, `arguments` the flags that gave it, and `flags` the fields
    that they have set. `trusted`: the stages may name code of others.
    """
    try:
        items = list(listed)
    except InputError:
        raise
    except Exception as error:  # a generator runs the user's code here
        rule = f"{type(error).__name__}: {error}"
        fix = f"correct pipeline() in {where} so that it yields its stages"
        raise InputError(f"{where}: pipeline() failed", rule=rule, fix=fix) from error
    if not items:
        raise InputError(f"{where}: pipeline() yields nothing", fix="yield a stage")
    stages, problems = [], []
    with tempfile.TemporaryDirectory(prefix="rljax-") as nowhere:
        for number, item in enumerate(items):
            location = f"{where}: stage {number} of pipeline()"
            try:
                if isinstance(item, Mapping) and isinstance(item.get("stage"), str):
                    location = f"{where}: stage {item['stage']!r}"
                stage = _stage(base, item, home, location, arguments, flags, trusted)
                if stage.name in [s.name for s in stages]:
                    raise InputError("two stages have this name", fix="rename one of them")
                stages.append(stage)
                _check(stage, stages[:-1], Path(nowhere))
            except InputError as error:
                text = str(error).replace(str(nowhere), "{home}")
                for earlier in stages:
                    text = text.replace(f"{{home}}/{earlier.name}", f"{{{earlier.name}}}")
                problems.append(f"{location}: {text}")
    if problems:
        text = "the pipeline cannot run:\n" + "\n".join(problems)
        raise InputError(text, fix=f"correct these stages of {where}")
    return stages


def _stage(
    base: Config,
    item,
    home: Path,
    location: str,
    arguments: Sequence[str],
    flags: Collection[str],
    trusted: bool,
) -> Stage:
    if not isinstance(item, Mapping) or not all(isinstance(k, str) for k in item):
        fix = 'write {"stage": NAME, "command": "train", FIELD: VALUE, ...}'
        raise InputError("a stage is a dict of names and values", value=item, fix=fix)
    name, command = item.get("stage"), item.get("command")
    if type(name) is int:  # what YAML makes of '1'
        name = str(name)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (*_KEPT, *_TAKEN):
        rule = f"letters, digits and . _ -: it is the name of a folder, not {', '.join(_TAKEN)}"
        fix = '"stage": "sft", or another name of this form'
        raise InputError("stage", value=name, rule=rule, fix=fix)
    values = {k: plain_value(v) for k, v in item.items() if k not in ("stage", "command")}
    for field, value in values.items():
        if not _is_plain(value):
            rule = "a text, a number, True, False, None, or a list of these"
            fix = f"write {field!r} as one of these; a function is named by a text, "
            fix += "'my_file.py:function'"
            raise InputError(field, value=value, rule=rule, fix=fix)
    if command == "train":
        if "run_dir" in values:
            fix = "leave it out: it is the stage's"
            raise InputError("run_dir", value=values["run_dir"], fix=fix)
        values["run_dir"] = f"{{{name}}}"
        keywords = dict(flags=flags, location=location, trusted=trusted)
        config = config_of(base, values, values["run_dir"], **keywords)
        if "config" in values:
            arguments = [f"--config={values['config']}", *without_config(arguments)]
        return Stage(name, "train", values, config, home, tuple(arguments))
    if not isinstance(command, str) or command not in COMMANDS:
        rule, fix = (
            f"one of train, {', '.join(COMMANDS)}",
            '"command": "train", or another of these',
        )
        raise InputError("command", value=command, rule=rule, fix=fix)
    if not trusted:
        _refuse_own_code(values, *COMMANDS[command])
    kind, output_options = COMMANDS[command]
    specs = declared(kind)
    defaults = {"seed": base.seed, "compilation_cache": base.compilation_cache}
    # What the stages before it have trained may run the code of their configs. (That of a pipeline
    # of data is vouched for as each of its runs begins.)
    policies = [option for option, spec in specs.items() if spec.path == "policy"]
    if trusted and any(_references(values.get(option)) for option in policies):
        defaults["trust_code"] = True
    values = {k: v for k, v in defaults.items() if k in specs} | values
    for option, usual in output_options.items():
        file = values.get(option, usual)
        if file and (not isinstance(file, str) or Path(file).name != file):
            plain, rule = Path(str(file)).name, "a name: it is made in the stage's folder"
            fix = f"{option}={plain!r}; later stages read it as {{STAGE}}/{plain}"
            raise InputError(option, value=file, rule=rule, fix=fix)
        values[option] = f"{{{name}}}/{file}" if file else ""
    if values.get("iterations"):
        raise InputError("iterations", value=values["iterations"], fix="yield a stage for each")
    values = {k: v for k, v in values.items() if v not in ("", None)}
    return Stage(name, command, values, options_of(kind, values), home)


def _refuse_own_code(values: Mapping[str, object], kind: type, outputs: Mapping[str, str]) -> None:
    """Raises InputError where an option of a stage of a data file asks for trust. `outputs`: the
    options that name a file of the stage's own folder."""
    if values.get("trust_code"):
        raise InputError("trust_code", value=True, fix="give --trust_code on the command line")
    specs = declared(kind)
    for option, value in values.items():
        spec = specs.get(option)
        # A misspelt name, or a text in place of a number, is refused as that.
        if spec is None or (isinstance(value, str) and _is_number(spec)):
            continue
        needs_trust = value_asks_for_trust(spec, value)
        if option in _HOMES:
            needs_trust = not all(is_harmless(text, _HOMES[option]) for text in _texts(value))
        # A folder of a policy is looked at when it is opened.
        if needs_trust and option not in outputs:
            rule = "a file of data runs no code of others, and sends nothing away"
            raise InputError(option, value=value, rule=rule, fix="look at it, then --trust_code")


def _is_number(spec: Spec) -> bool:
    """Returns whether an option is a number, or true or false, that anybody may set."""
    return not spec.needs_trust and without_none(spec.kind) in (bool, int, float)


def _is_plain(value: object) -> bool:
    """Returns whether a value can stand in a record: {NAME} is found in texts alone."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def _check(stage: Stage, earlier: Sequence[Stage], nowhere: Path) -> None:
    """Raises InputError for whatever is wrong with the stage. What earlier stages will make stands
    empty in the folder `nowhere`."""
    by_name = {previous.name: previous for previous in earlier}
    output_fields = ("run_dir", *COMMANDS.get(stage.command, (None, {}))[1])
    specs = stage.specs()
    for field, value in stage.fields().items():
        for text in _texts(value) if field not in output_fields else ():
            for name in _references(text):
                _check_reference(field, text, name, by_name, specs[field].path == "policy")
    for previous in earlier:
        for output in previous.outputs():
            path = nowhere / previous.name / output
            (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
            if path.suffix:
                path.touch()
            else:
                (path / "config.json").write_text("{}")
    local_stage = stage.in_folder(nowhere)
    if local_stage.config is not None:
        validate(local_stage.config)
    for option, value in local_stage.fields().items() if local_stage.config is None else ():
        for text in _texts(value):
            _check_option(option, specs[option], text)


def _check_option(option: str, spec: Spec, text: str) -> None:
    """Raises InputError for a function that is not there, or a folder that no stage will make."""
    if option == "judge":
        judge_of(text)
    elif spec.component and (spec.component != "data" or "(" in text):
        resolve(text, NAMESPACES[spec.component])
    elif spec.path in ("policy", "model") and not is_url(text):
        folder = text if Path(text).exists() else text.rpartition("@")[0]
        if not (folder and Path(folder).exists()) and not hub.model_name(text):
            rule = "a folder that is there, a model of the hub, or {NAME} of an earlier stage"
            fix = "correct the path, or put the stage that makes it in front of this one"
            raise InputError(option, value=text, rule=rule, fix=fix)


def _check_reference(
    field: str, text: str, name: str, by_name: Mapping[str, Stage], takes_run: bool
) -> None:
    if name not in by_name:
        fix = f"one of {', '.join(by_name)}" if by_name else "the first stage has none before it"
        raise InputError(field, value=text, rule=f"no earlier stage is called {name!r}", fix=fix)
    origin = by_name[name]
    path = re.search(rf"\{{{re.escape(name)}\}}/?([^@,'\"]*)", text)[1]
    if ".." in path.split("/"):
        rule = f"inside of the folder of {name!r}"
        fix = f"leave '..' out: {{{name}}} is the folder of the stage {name!r}"
        raise InputError(field, value=text, rule=rule, fix=fix)
    if not path and origin.config is not None and takes_run:
        return
    outputs = origin.outputs()
    # A folder of labelled steps has a file for each split.
    if path not in outputs and path.partition("/")[0] not in outputs:
        rule = f"stage {name!r} makes {', '.join(outputs) or 'nothing: its export is off'}"
        fix = f"{{{name}}}/{outputs[0]}" if outputs else "export=True"
        raise InputError(field, value=text, rule=rule, fix=fix)
