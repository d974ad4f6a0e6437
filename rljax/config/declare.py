"""Declarations of config fields and of commands' options: a field of a dataclass with its help, its
range and what else is known of it. Its flag, its line of --help and of the reference, its check,
and whether a stranger's value needs trust follow from that."""

import ast
import dataclasses
import difflib
import itertools
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rljax.components import Range
from rljax.config.describe import flag_lines, is_about
from rljax.errors import InputError
from rljax.files import DATA_FILES, data_files, is_whole_number, require_replaceable
from rljax.runs.folder import FILES, require_writable
from rljax.runs.store import is_url
from rljax.suggest import near_names

# Names of the values of a type in an error.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
EXAMPLES = {bool: "True", int: "1", float: "0.5", str: "'text'"}
_ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}
_WRONG = r"flag --(\w+)=(.*?): (?:invalid literal|could not convert|value should be|\('Non-)"
_MOST = 2**31 - 1  # of every whole number
# Files of a run folder that no command writes again.
OF_A_RUN = {*FILES} - {"report.html"}

# Patterns of texts that a stranger may write: any, and words, as where there are choices.
ANY, WORD = r"(?s:.*)", r"[\w @/+*-]*"  # "-eval/loss"


def kind_name(kind: type) -> str:
    """Names the kind of value of a config field: "a whole number", "a list of texts"."""
    items = typing.get_args(kind)
    return f"a list of {_ITEMS[items[0]]}" if items else KINDS[kind]


def cast(value: object, kind: type) -> object:
    """Returns the value as a field of a type holds it, by the rules of ml_collections.ConfigDict: a
    whole number becomes a number, a list a tuple; any other is returned as it is."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        return tuple(value)
    return value


def type_problem(value: object, kind: type, name: str) -> tuple[str, str]:
    """Returns (rule, fix) of a value that the field `name` of a type cannot hold, else ("", ""). A
    ConfigDict takes True for a whole number, and NaN and None for any; a config does not."""
    if dataclasses.is_dataclass(kind):
        fix = f"set {name} to a {kind.__name__}(), or its fields one by one"
        return ("", "") if isinstance(value, kind) else (f"must be a {kind.__name__}", fix)
    items = typing.get_args(kind)
    rule, example = f"must be {kind_name(kind)}", EXAMPLES.get(kind)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and abs(value) <= sys.float_info.max  # false for NaN
        rule, kind_text = "must be a finite number", "a number"
    elif items:
        item_kind = (int, float) if items[0] is float else items[0]
        listed = isinstance(value, tuple | list)
        fits = listed and all(isinstance(v, item_kind) and not isinstance(v, bool) for v in value)
        kind_text, example = kind_name(kind), f"({EXAMPLES[items[0]]},)"
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        kind_text = kind_name(kind)
        if fits and kind is int and abs(value) > _MOST:
            if value < 0:
                return f"must be {-_MOST} or more", f"write {-_MOST} or more"
            return f"must be below {_MOST + 1}", f"write {_MOST} or less"
    return ("", "") if fits else (rule, f"write {kind_text}, such as {example}")


@dataclasses.dataclass(frozen=True)
class Spec:
    """The declaration of a field; `low` and `high` are included, `above` and `below` are not."""

    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    fits: Callable[[typing.Any], bool] | None = None
    rule: str = ""  # of `fits` or of the range, as an error says it
    fix: str = ""  # of an error; "" = by the choices or the range
    # Of options of commands.
    required: bool = False
    flag: str = ""  # the flag's name where it is not the field's
    positional: bool = False  # no flag: the arguments without one
    first: bool = False  # may also be given as the argument without a flag
    # Of fields of the config; `component` and `path` also of options of commands.
    component: str = ""  # it names components: the key of their namespace in NAMESPACES
    # It has components inside, as in "NAME=maker()": the key of their namespace; "field": names of
    # fields of the config.
    holds: str = ""
    # It names a folder: of a "model", a "tokenizer", an "adapter", a "policy" (which may be a run),
    # or a path that is written: a "written_file" or a "written_folder", or either, "written"; of an
    # option of a command also of "data".
    path: str = ""
    needs: str = ""  # the field of its section without which nothing reads it; of a section, too
    switches: tuple[str, ...] = ()  # dotted names of all such fields, of the sections around first
    learn: bool = False  # a field of rljax.dataflows.Algorithm
    # Runs that read it: those that learn from "samples" or "rows", with "a critic" or "a policy",
    # with any "sampling", also that of evaluations, or with "prompts", of which demonstrations have
    # one, too; from the "answers" or the "steps" of a file.
    read_by: str = ""
    refused: bool = False  # off by default; in a run that does not read it, on is an error
    may_change: bool = False  # changes no number of the run, so that a resume may change it
    # Runs of one program may differ in it: in a number that is not 0, or in the numbers of its
    # components (rljax.training.run_numbers).
    per_run: bool = False
    safe: str = ""  # pattern of the texts that a stranger may write, beside harmless components
    needs_trust: bool = False  # a stranger may write no value but the default, not even a number
    kind: typing.Any = None  # the type of its values, which `declared` reads from the class

    @property
    def is_written(self) -> bool:
        """Returns whether its value is a path that is written."""
        return self.path.startswith("written")

    @property
    def harmless(self) -> str:
        """Pattern of the texts that a stranger may write: `safe`, or words where there are
        choices."""
        return self.safe or (WORD if self.choices else "")

    @property
    def help_text(self) -> str:
        """Help of the option, which says whether it is needed."""
        return f"{self.help} (needed)" if self.required else self.help

    def problem(self, value, default_high: int | None = None) -> str:
        """Returns why `value` cannot be used, "" if it can. None stands for the default and always
        can. `default_high` is the limit of whole numbers that have none of their own."""
        if value is None:
            return ""
        if self.required and not value:
            return f"needed: {self.help}"
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.fits is not None and not self.fits(value):
            return self.rule
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        high = default_high if self.high is None and isinstance(value, int) else self.high
        range_problem = Range(self.low, high, self.above, self.below).problem(value)
        return range_problem and (self.rule or range_problem)

    def fix_of(self, name: str, value) -> str:
        """Returns the fix of a value that has a problem; `name` is that of the field."""
        if self.fix or not self.choices:
            return self.fix or f"write {self.low} or more"
        similar = difflib.get_close_matches(value, filter(None, self.choices), n=1)
        first_choice = f"{name}={self.choices[0]!r}, or another one"
        return f"did you mean {similar[0]!r}?" if similar else first_choice


def option(default: object, help: str, **spec) -> typing.Any:
    """Declares a field of the config or of the options of a command; `spec` are fields
    of `Spec`."""
    return dataclasses.field(default=default, metadata={"spec": Spec(help, **spec)})


def section(make: Callable[[], object], needs: str = "", read_by: str = "") -> typing.Any:
    """Declares a section of the config. Nothing reads it while its field `needs` is off, or in a
    run that lacks `read_by`."""
    spec = Spec("", needs=needs, read_by=read_by)
    return dataclasses.field(default_factory=make, metadata={"spec": spec})


def declared(
    kind: type, prefix: str = "", switches: tuple[str, ...] = (), read_by: str = ""
) -> dict[str, Spec]:
    """Returns {dotted name: declaration} of every field of a class and of its sections, in
    their order."""
    specs = {}
    for field in dataclasses.fields(kind):
        name, spec = prefix + field.name, field.metadata["spec"]
        if dataclasses.is_dataclass(field.type):
            switch = (f"{name}.{spec.needs}",) if spec.needs else ()
            readers = spec.read_by or read_by
            specs |= declared(field.type, f"{name}.", switches + switch, readers)
        else:
            switch = (prefix + spec.needs,) if spec.needs else ()
            changes = dict(kind=field.type, flag=spec.flag or name, switches=switches + switch)
            changes["read_by"] = spec.read_by or read_by
            specs[name] = dataclasses.replace(spec, **changes)
    return specs


def is_interval(limits: Sequence[int]) -> bool:
    """Returns whether limits are (low, high) with 1 <= low <= high, or () for none."""
    return len(limits) == 0 or len(limits) == 2 and 1 <= limits[0] <= limits[1]


def is_count_or_rest(number: int) -> bool:
    """Returns whether a number is at least 1, or -1 for all that there are."""
    return number >= 1 or number == -1


# The rule of a field that holds limits in tokens.
LIMITS = {
    "fits": is_interval,
    "rule": "(low, high) with 1 <= low <= high, or () = off",
    "fix": "write (64, 512), or ()",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of the options of a command; used itself by commands that have none."""

    def conflicts(self) -> Iterable[tuple[str, object, str]]:
        """Returns (field, value, rule) of options that do not go together."""
        return ()


def check_options(options: Options, config_file: str = "") -> None:
    """Raises InputError that lists every problem of every option, in the order of the fields.
    `config_file`: that of --config, over which no option may write."""
    shown, problems = {}, []
    for name, spec in declared(type(options)).items():
        shown[name] = name.upper() if spec.positional else f"--{spec.flag}"
        value = getattr(options, name)
        problems.append((name, value, spec.problem(value, _MOST)))
    paths = [problem for problem in _overwritten(options, config_file) if problem[-1]]
    problems = [problem for problem in [*problems, *options.conflicts()] if problem[-1]] + paths
    problems.sort(key=lambda problem: list(shown).index(problem[0]))
    lines = [f"  {shown[name]}={value}: {rule}" for name, value, rule in problems]
    if lines:
        text = "\n".join(["these flags cannot be used:", *lines])
        another = " and ".join(shown[name] for name, _, _ in paths)
        of_paths_alone = len(problems) == len(paths)
        fix = f"give another path for {another}" if of_paths_alone else "--help lists the flags"
        raise InputError(text, fix=fix)


def _overwritten(options: Options, config_file: str) -> Iterable[tuple[str, object, str]]:
    """Yields (field, value, rule) of paths that are written and are also read, or cannot be
    replaced or written, or are written twice. It is asked before anything is computed."""
    specs = declared(type(options))
    read = {os.path.realpath(path): "--config" for path in _paths_in(config_file)}
    written = {}
    for name, spec in specs.items():
        value = getattr(options, name)
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts if not spec.is_written else ():
            for path in _paths_in(text):
                shown = name.upper() if spec.positional else f"--{spec.flag}"
                if os.path.isfile(path) or spec.path or spec.component or spec.positional:
                    read[os.path.realpath(path)] = shown
                if "data" in (spec.path, spec.component) and os.path.isdir(path):
                    files = (os.path.join(path, file) for file in os.listdir(path))
                    rows = (file for file in files if file.endswith(DATA_FILES))
                    read |= dict.fromkeys(map(os.path.realpath, rows), shown)
    for name, spec in specs.items():
        path = getattr(options, name)
        if not spec.is_written or not path or is_url(path):
            continue
        real_path = os.path.realpath(path)
        existing_parent = next(p for p in Path(os.path.abspath(path)).parents if os.path.lexists(p))
        rule = f"it is {read[real_path]}, which is read" if real_path in read else ""
        if real_path in written:
            rule = rule or f"--{written[real_path]} is written there, too"
        if os.path.basename(path) in OF_A_RUN and os.path.lexists(path):
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.lexists(os.path.join(folder, "metrics.jsonl")):
                rule = rule or f"it is what the run in {folder} has written; name another file"
        if not os.path.isdir(existing_parent):
            rule = rule or f"{existing_parent} is a file, not a folder"
        elif os.path.isdir(path) and spec.path == "written_file":
            rule = rule or "it is a folder; name a file, such as one in it"
        elif os.path.isfile(path) and spec.path == "written_folder":
            rule = rule or "it is a file; name a folder"
        try:
            require_replaceable(path)
            if not rule:
                require_writable(path if os.path.isdir(path) else existing_parent)
        except InputError as error:
            rule = rule or error.parts[0].removeprefix(f"{path} ")
        written[real_path] = spec.flag
        yield name, path, rule


def _paths_in(text: object) -> list[str]:
    """Returns the paths that exist among the files that a text may name: a path, several with
    commas, a pattern, those of both splits, the file of a function, and texts in quotes inside a
    call."""
    if not isinstance(text, str) or not text or is_url(text):
        return []
    names = [text, *text.split(","), *re.findall(r"""['"]([^'"]+)['"]""", text)]
    names += [name.partition(":")[0] for name in names]
    names += [name.replace("{split}", split) for name in names for split in ("train", "test")]
    paths = []
    for name in dict.fromkeys(part.strip() for part in names):
        try:
            paths += filter(os.path.lexists, data_files(name) if name else ())
        except (InputError, OSError, ValueError):  # a pattern without a file is said elsewhere
            continue
    return paths


def define_flags(kind: type, into) -> None:
    """Defines a flag for every option of a class; `into` is absl's FlagValues."""
    from absl import flags

    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    main = {"flag_values": into}
    for name, spec in declared(kind).items():
        default = getattr(kind, name)
        if spec.positional:
            continue
        if spec.choices:
            flags.DEFINE_enum(spec.flag, default, spec.choices, spec.help, **main)
        elif typing.get_origin(spec.kind) is tuple:
            flags.DEFINE_string(spec.flag, ",".join(map(str, default)), spec.help, **main)
        else:
            define[without_none(spec.kind)](spec.flag, default, spec.help, **main)


def parse_flags(
    kind: type, into, argv: Sequence[str], config_flag: Callable[[str], str] | None = None
) -> list[str]:
    """Parses the flags of a class into absl's FlagValues; returns the arguments without a flag.
    For a command that takes a config, `config_flag` says which of its flags another flag means.
    Raises InputError for an unknown flag, a value that is not of its type, and a flag that is
    given twice."""
    from absl import flags

    specs = {spec.flag: spec for spec in declared(kind).values()}
    try:
        arguments = into(argv)
    except flags.UnrecognizedFlagError as error:
        similar = near_names(error.flagname, specs, 1)
        hint = f"did you mean --{similar[0]}? " if similar else ""
        if not similar and config_flag is not None:
            hint = config_flag(error.flagname)
        fix = f"{hint}--help lists the flags"
        raise InputError("no such flag", value=f"--{error.flagname}", fix=fix) from None
    except (flags.Error, ValueError, TypeError) as error:
        match = re.match(_WRONG, str(error), re.DOTALL)
        if match is None or match[1] not in specs:  # a flag without a value
            raise InputError(str(error), fix="--FLAG=VALUE; --help lists the flags") from None
        spec = specs[match[1]]
        of_type, choices = without_none(spec.kind), list(filter(None, spec.choices))
        rule = f"one of {', '.join(choices)}" if choices else f"must be {KINDS.get(of_type)}"
        example = choices[0] if choices else EXAMPLES[of_type].lower()
        problem, fix = f"--{match[1]}={match[2]}: {rule}", f"such as --{match[1]}={example}"
        raise InputError(problem, fix=fix) from None
    repeated = [name for name in into if into[name].present > 1]
    if repeated:
        raise InputError(f"--{repeated[0]} is given twice", fix="remove one")
    return arguments


def parsed_options(kind: type, positional: Sequence[str], parsed, config_file: str = ""):
    """Returns the options of a class, checked, from parsed flags (absl's FlagValues) and
    the arguments without a flag. Raises InputError for arguments that are left over, and
    as `check_options`, which is given `config_file`."""
    values, remaining = {}, tuple(positional)
    for name, spec in declared(kind).items():
        if spec.positional:
            values[name], remaining = remaining, ()
            continue
        value = parsed[spec.flag].value
        if spec.first and remaining:
            if value:
                raise InputError(
                    f"--{spec.flag} is given twice",
                    value=[value, remaining[0]],
                    fix=f"write it once: leave --{spec.flag} or the name in front out",
                )
            value, remaining = remaining[0], remaining[1:]
        if value == "None":  # a text, where Python has no value
            fix = f"leave --{spec.flag} out, or --{spec.flag}= for an empty text"
            raise InputError(f"--{spec.flag}", value=value, rule="a flag has no null", fix=fix)
        if typing.get_origin(spec.kind) is tuple:
            numbers = typing.get_args(spec.kind)[0] is int
            try:
                texts = tuple(filter(None, map(str.strip, list_items(value))))
            except ValueError as error:
                fix = f"such as --{spec.flag}=a,b"
                raise InputError(f"--{spec.flag}={value}", rule=str(error), fix=fix) from None
            value = whole_numbers(",".join(texts), spec.flag) if numbers and texts else texts
        values[name] = value
    if remaining:
        raise InputError("unknown arguments", value=list(remaining), fix="--help lists the flags")
    options = kind(**values)
    check_options(options, config_file)
    return options


def option_flags(kind: type, values: Mapping[str, object]) -> list[str]:
    """Returns the flags that set options of a class to these values. Raises InputError for a name
    that the class does not have."""
    flag_names, flags = {name: spec.flag for name, spec in declared(kind).items()}, []
    for name, value in values.items():
        if name not in flag_names:
            similar = near_names(name, flag_names, 1)
            fix = f"did you mean {similar[0]}?" if similar else f"one of {', '.join(flag_names)}"
            raise InputError("no such option", value=name, fix=fix)
        if value is not None:
            parts = value if isinstance(value, list | tuple) else (value,)
            text = ",".join(str(part) for part in parts)
            flags.append(f"--{flag_names[name]}={text}")
    return flags


def options_of(kind: type, values: Mapping[str, object]):
    """Returns the options of a class with these values, checked as those of the command
    line are."""
    from absl import flags

    into = flags.FlagValues()
    define_flags(kind, into)
    parse_flags(kind, into, ["", *option_flags(kind, values)])
    return parsed_options(kind, (), into)


def option_words(kind: type) -> dict[str, tuple[str, ...]]:
    """Returns {flag as it is typed: its values, if they are few}: {"--rows=": (), "--ids": (),
    "--noids": (), "--split=": ("train", "test")}."""
    values_of_flags = {}
    for spec in declared(kind).values():
        if spec.positional:
            continue
        if without_none(spec.kind) is bool:
            values_of_flags |= {f"--{spec.flag}": (), f"--no{spec.flag}": ()}
        else:
            values_of_flags[f"--{spec.flag}="] = tuple(filter(None, spec.choices))
    return values_of_flags


def options_usage(kind: type) -> str:
    """Returns the arguments without a flag, as --help writes them: "[CHECKPOINT]"."""
    names = [n for n, spec in declared(kind).items() if spec.first or spec.positional]
    return "".join(f" {name.upper()}" for name in names)


def options_help(kind: type, width: int, words: Iterable[str] = ()) -> list[str]:
    """Returns lines for --help: every option with its default, its type and its help; with `words`
    only those whose flag or help holds them."""
    lines = []
    for name, spec in declared(kind).items():
        if is_about(words, spec.flag, spec.help):
            default = shown_default(getattr(kind, name))
            flag_text = name.upper() if spec.positional else f"--{spec.flag}={default}"
            lines += flag_lines(flag_text, spec.kind, spec.help_text, width)
    return lines


def shown_default(default: object) -> str:
    """Returns the default of an option as its flag has it."""
    if isinstance(default, bool):
        return str(default).lower()
    text = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if text is None else str(text)


def without_none(hint):
    """Returns the type without None: int of int | None."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def split_at_commas(text: str) -> list[str]:
    """Returns the parts of a list. Commas inside brackets, as in "gsm8k(shots=8, data='a,b')", do
    not separate; brackets that do not close are text like any other."""
    cuts, depth, quote = [-1], 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif depth > 0 and character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth <= 0:
            cuts.append(index)
    if depth or quote:
        return text.split(",")
    return [text[start + 1 : end] for start, end in itertools.pairwise([*cuts, len(text)])]


def list_items(text: str) -> list[str]:
    """Returns the items of a list as texts: those of "a, mixture(x=1, y=2)", of Python's
    "('a', 'b')", and of "[a, b]", which is left of the latter when a shell has read it. Raises
    ValueError with the rule for an empty item, a list in a list, a bracket that does not close, and
    one bare text in brackets, which may be meant as a list or as a text."""
    opened = text[:1] in ("(", "[")
    if opened or text[:1] in ("'", '"'):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
        else:
            items = value if isinstance(value, (tuple, list)) else (value,)
            if not all(isinstance(item, str | int | float) for item in items):
                raise ValueError("an item is neither a text nor a number")
            return [item if isinstance(item, str) else repr(item) for item in items]
    masked = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)
    bracket_end = _end_of_bracket(masked) if opened else -1
    enclosed = bracket_end == len(text) - 1 > 0
    if opened and not bracket_end and "," in masked:
        raise ValueError("its first bracket does not close; a text is written ('a[b',)")
    start = int(enclosed)
    lengths = map(len, split_at_commas(masked[start : len(text) - start]))
    parts = []
    for length in lengths:
        parts.append(text[start : start + length])
        start += length + 1
    if len(parts) == 1 and enclosed:
        (item,) = parts
        raise ValueError(f"a list of one is written {item}, a text in brackets ({text!r},)")
    if len(parts) == 1:
        return [text] if text else []
    parts = [part.strip() for part in parts]
    parts = parts if parts[-1] else parts[:-1]  # one comma more at the end
    if not all(parts):
        raise ValueError("an item is empty; a text with a comma in it is written ('a,b',)")
    if any(part[0] in "[(" and "," in part for part in parts):
        raise ValueError("an item is a list; a text with a comma in it is written ('[a,b]',)")
    return [part[1:-1] if _QUOTED.fullmatch(part) else part for part in parts]


# An item of a list that is in quotes.
_QUOTED = re.compile(r"""(?<![^\[(,\s])(['"])(?:(?!\1).)*\1(?=\s*(?:[\]),]|$))""", re.DOTALL)


def _end_of_bracket(text: str) -> int:
    """Returns the index at which the bracket that begins a text closes; 0 if it does not."""
    depth, close = 0, ")]"["([".index(text[0])]
    for index, character in enumerate(text):
        depth += (character == text[0]) - (character == close)
        if not depth:
            return index
    return 0


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Returns (1, 4) of "1,4,1": whole numbers, sorted and without repetition. Raises InputError
    that names the flag."""
    parts = text.split(",")
    if not all(is_whole_number(part.strip()) for part in parts):
        raise InputError(
            f"--{flag}", value=text, rule="whole numbers", fix=f"such as --{flag}=1,4,8"
        )
    return tuple(sorted({int(part) for part in parts}))
