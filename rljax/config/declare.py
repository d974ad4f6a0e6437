"""How an option of a command is declared: a field of a dataclass with its help and its range; its
flag, its line of --help and its check follow from that."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rljax.components import Range
from rljax.config.describe import flag_lines, is_about
from rljax.errors import InputError
from rljax.files import is_whole_number
from rljax.suggest import near_names

# What a value of a type is called in an error.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
EXAMPLES = {bool: "True", int: "1", float: "0.5", str: "'text'"}
_ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}
_WRONG = r"flag --(\w+)=(.*?): (?:invalid literal|could not convert|value should be|\('Non-)"
_MOST = 2**31 - 1  # of every whole number


def kind_name(kind: type) -> str:
    """What a value of a config field's type is called: "a whole number", "a list of texts"."""
    items = typing.get_args(kind)
    return f"a list of {_ITEMS[items[0]]}" if items else KINDS[kind]


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Help and range of an option; `low` and `high` are included, `above` and `below` are not."""

    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    fits: Callable[[str], bool] | None = None
    rule: str = ""  # what `fits` asks for
    flag: str = ""  # the flag's name where it is not the field's
    positional: bool = False  # no flag: the arguments without one
    first: bool = False  # may also be given as the argument without a flag

    def problem(self, value) -> str:
        """Why `value` cannot be used, "" if it can. None stands for the default and always can."""
        if value is None:
            return ""
        if self.required and not value:
            return f"needed: {self.help}"
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.fits is not None and not self.fits(value):
            return self.rule
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return self._out_of_range(value) if number else ""

    def _out_of_range(self, value: float) -> str:
        high = _MOST if self.high is None and isinstance(value, int) else self.high
        return Range(self.low, high, self.above, self.below).problem(value)


def option(default: object, help: str, **spec) -> typing.Any:
    """A field of an options class; `spec` are fields of `_Spec`."""
    return dataclasses.field(default=default, metadata={"spec": _Spec(help, **spec)})


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of the options of a command; by itself, of one that has none."""

    def conflicts(self) -> Iterable[tuple[str, object, str]]:
        """(field, value, rule) of options that do not go together."""
        return ()


def _specs(kind: type) -> Iterator[tuple[str, str, _Spec]]:
    """(field, flag, spec) of every option of a class."""
    for field in dataclasses.fields(kind):
        spec = field.metadata["spec"]
        yield field.name, spec.flag or field.name, spec


def check_options(options: Options) -> None:
    """Raises InputError that lists every problem of every option, in the order of the fields."""
    shown, problems = {}, []
    for name, flag, spec in _specs(type(options)):
        shown[name] = name.upper() if spec.positional else f"--{flag}"
        value = getattr(options, name)
        problems.append((name, value, spec.problem(value)))
    problems += options.conflicts()
    problems = [problem for problem in problems if problem[-1]]
    problems.sort(key=lambda problem: list(shown).index(problem[0]))
    lines = [f"  {shown[name]}={value}: {rule}" for name, value, rule in problems]
    if lines:
        text = "\n".join(["these flags cannot be used:", *lines])
        raise InputError(text, fix="--help lists the flags")


def define_flags(kind: type, into) -> None:
    """A flag for every option of a class; `into` is absl's FlagValues."""
    from absl import flags

    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    main = {"flag_values": into}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        spec, default, hint = field.metadata["spec"], field.default, hints[field.name]
        name = spec.flag or field.name
        if spec.positional:
            continue
        if spec.choices:
            flags.DEFINE_enum(name, default, spec.choices, spec.help, **main)
        elif typing.get_origin(hint) is tuple:
            flags.DEFINE_string(name, ",".join(map(str, default)), spec.help, **main)
        else:
            define[_without_none(hint)](name, default, spec.help, **main)


def parse_flags(
    kind: type, into, argv: Sequence[str], config_flag: Callable[[str], str] | None = None
) -> list[str]:
    """Parses the flags of a class into absl's FlagValues -> the arguments without a flag. Of a
    command that takes a config, `config_flag` says which of its flags another flag means."""
    from absl import flags

    specs = {flag: (name, spec) for name, flag, spec in _specs(kind)}
    try:
        rest = into(argv)
    except flags.UnrecognizedFlagError as error:
        near = near_names(error.flagname, specs, 1)
        hint = f"did you mean --{near[0]}? " if near else ""
        if not near and config_flag is not None:
            hint = config_flag(error.flagname)
        fix = f"{hint}--help lists the flags"
        raise InputError("no such flag", value=f"--{error.flagname}", fix=fix) from None
    except (flags.Error, ValueError, TypeError) as error:
        wrong = re.match(_WRONG, str(error), re.DOTALL)
        if wrong is None or wrong[1] not in specs:  # a flag without a value
            raise InputError(str(error), fix="--FLAG=VALUE; --help lists the flags") from None
        name, spec = specs[wrong[1]]
        rule = f"one of {', '.join(filter(None, spec.choices))}" if spec.choices else ""
        rule = rule or f"must be {KINDS.get(_without_none(typing.get_type_hints(kind)[name]))}"
        example = next(filter(None, spec.choices), "") if spec.choices else ""
        example = example or EXAMPLES[_without_none(typing.get_type_hints(kind)[name])].lower()
        what, fix = f"--{wrong[1]}={wrong[2]}: {rule}", f"such as --{wrong[1]}={example}"
        raise InputError(what, fix=fix) from None
    twice = [name for name in into if into[name].present > 1]
    if twice:
        raise InputError(f"--{twice[0]} is given twice", fix="remove one")
    return rest


def parsed_options(kind: type, positional: Sequence[str], parsed):
    """The options of a class, checked, from parsed flags (absl's FlagValues) and the arguments
    without a flag."""
    values, hints, rest = {}, typing.get_type_hints(kind), tuple(positional)
    for name, flag, spec in _specs(kind):
        if spec.positional:
            values[name], rest = rest, ()
            continue
        value = parsed[flag].value
        if spec.first and rest:
            if value:
                raise InputError(
                    f"--{flag} is given twice",
                    value=[value, rest[0]],
                    fix=f"write it once: leave --{flag} or the name in front out",
                )
            value, rest = rest[0], rest[1:]
        if typing.get_origin(hints[name]) is tuple:
            numbers = typing.get_args(hints[name])[0] is int
            texts = tuple(part.strip() for part in split_at_commas(value) if part.strip())
            value = whole_numbers(value, flag) if numbers and texts else texts
        values[name] = value
    if rest:
        raise InputError("unknown arguments", value=list(rest), fix="--help lists the flags")
    options = kind(**values)
    check_options(options)
    return options


def option_flags(kind: type, values: Mapping[str, object]) -> list[str]:
    """The flags that set options of a class to these values. Raises InputError for a name that the
    class has not."""
    known, out = {name: flag for name, flag, _ in _specs(kind)}, []
    for name, value in values.items():
        if name not in known:
            near = near_names(name, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise InputError("no such option", value=name, fix=fix)
        if value is not None:
            parts = value if isinstance(value, list | tuple) else (value,)
            text = ",".join(str(part) for part in parts)
            out.append(f"--{known[name]}={text}")
    return out


def options_of(kind: type, values: Mapping[str, object]):
    """The options of a class with these values, checked as those of the command line are."""
    from absl import flags

    into = flags.FlagValues()
    define_flags(kind, into)
    parse_flags(kind, into, ["", *option_flags(kind, values)])
    return parsed_options(kind, (), into)


def option_words(kind: type) -> dict[str, tuple[str, ...]]:
    """{flag as it is typed: the values it may have, where they are few}: {"--rows=": (), "--ids":
    (), "--noids": (), "--split=": ("train", "test")}."""
    out, hints = {}, typing.get_type_hints(kind)
    for name, flag, spec in _specs(kind):
        if spec.positional:
            continue
        if _without_none(hints[name]) is bool:
            out |= {f"--{flag}": (), f"--no{flag}": ()}
        else:
            out[f"--{flag}="] = tuple(filter(None, spec.choices))
    return out


def options_usage(kind: type) -> str:
    """The arguments without a flag, as --help writes them: "[CHECKPOINT]"."""
    names = [name for name, _, spec in _specs(kind) if spec.first or spec.positional]
    return "".join(f" {name.upper()}" for name in names)


def options_help(kind: type, width: int, words: Iterable[str] = ()) -> list[str]:
    """Lines for --help: every option with its default, its type and what it is for; with `words`
    those whose flag or help holds them."""
    lines, hints = [], typing.get_type_hints(kind)
    for field, (name, flag, spec) in zip(dataclasses.fields(kind), _specs(kind), strict=True):
        if not is_about(words, flag, spec.help):
            continue
        default = field.default
        default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = "" if default is None else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown
        written = name.upper() if spec.positional else f"--{flag}={shown}"
        needed = f"{spec.help} (needed)" if spec.required else spec.help
        lines += flag_lines(written, hints[name], needed, width)
    return lines


def _without_none(hint):
    """int | None -> int."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def split_at_commas(text: str) -> list[str]:
    """The parts of a list: commas inside of brackets, as in "gsm8k(shots=8, data='a,b')", part
    nothing. Brackets that do not close are text like any other."""
    parts, start, depth, quote = [], 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif depth and character in "\"'":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "," and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]] if depth == 0 and not quote else text.split(",")


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """ "4,1,4" -> (1, 4). Raises InputError that names the flag."""
    parts = text.split(",")
    if not all(is_whole_number(part.strip()) for part in parts):
        raise InputError(
            f"--{flag}", value=text, rule="whole numbers", fix=f"such as --{flag}=1,4,8"
        )
    return tuple(sorted({int(part) for part in parts}))
