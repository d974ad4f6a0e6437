"""Code that all commands share: arguments to options and config, --help, tables, and errors as text
with exit code 2. It imports no model code, so that --help and a misspelt flag answer at once."""

import ast
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags
from absl import logging as absl_logging

from rljax.config import Config, changed_fields, to_dict
from rljax.config.declare import (
    define_flags,
    options_help,
    options_usage,
    parse_flags,
    parsed_options,
)
from rljax.config.describe import config_help
from rljax.config.flags import config_flag, config_flags, load_config_file
from rljax.config.options import CompilerOptions, TrustOptions
from rljax.config.texts import with_texts
from rljax.config.trust import require_trust
from rljax.doctor.before_jax import no_device, refuse_what_ends_jax
from rljax.doctor.packages import hidden_libraries
from rljax.errors import InputError
from rljax.runs.folder import is_full_disk
from rljax.tracking.screen import streams_without_readers

_FLAG_ERROR = "these flags cannot be used"
_HELP = ("--help", "-h", "-help", "--helpfull", "--helpshort")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its name, a line about it, its options, whether it takes a config ("", "optional",
    "needed", or the default one), its module in this folder ("": the one of its name), whether one
    host alone can run it, whether it only prints the config, so that nothing it names runs, and
    whether it is done when nobody reads its output any more, as it makes nothing else."""

    name: str
    about: str
    options: type
    config: str = ""
    module: str = ""
    one_host: bool = False
    prints_config: bool = False
    only_prints: bool = False
    jax: bool = True  # whether it needs JAX, whose installation and variables are checked first
    data_with: str = ""  # the option with which the argument is data, and no config

    def file(self) -> str:
        """Returns the name of its module."""
        return self.module or self.name.replace(" ", "_")

    def doc(self) -> str:
        """Returns the docstring of its module, without importing it."""
        text = Path(__file__).with_name(f"{self.file()}.py").read_text(encoding="utf-8")
        return ast.get_docstring(ast.parse(text)) or ""


@dataclasses.dataclass(frozen=True)
class ConfigSource:
    """Arguments of the command line beside the options: --config, and the config that it gives."""

    path: str | None
    fields: Mapping[str, str]  # --config.FIELD=TEXT
    config: Config | None
    loaded: Config | None = None  # of the file alone, without the flags
    data: str = ""  # the argument of a command that takes data in place of a config

    def config_arguments(self, *, trust_code: bool = False) -> list[str]:
        """Returns the arguments that give another process the same config, and the same trust."""
        fields = [f"--config.{name}={text}" for name, text in self.fields.items()]
        return [f"--config={self.path}", *fields, *(["--trust_code"] if trust_code else [])]


def launch(command: Command, arguments: list[str], program: str) -> int:
    """Runs a command; returns its exit code. An InputError is printed, with exit code 2, or 171 if
    hosts are late."""
    _quieten_libraries()
    own_args = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if positions := [index for index, argument in enumerate(own_args) if argument in _HELP]:
        words = [word for word in own_args[positions[0] :] if not word.startswith("-")]
        text = _help_about(command, words) if words else _help(command, program)
        if not text:
            problem = f"no flag and no field has {' and '.join(words)} in its name or its help"
            return complain(InputError(problem, fix="--help alone prints all of them"))
        print(text)
        return 0
    try:
        _hold_back_working_folder(command.name == "doctor")
        path, fields, remaining = config_flags(arguments)
        printed_fields, remaining = _print_config(remaining)
        flag_values = flags.FlagValues()
        define_flags(command.options, flag_values)
        parse_config = config_flag if command.config else None
        words = [program, *remaining]
        positional = parse_flags(command.options, flag_values, words, parse_config)[1:]
        if command.data_with and flag_values[command.data_with].value:
            if len(positional) != 1 or path:
                fix = f"rljax {command.name} DATA --{command.data_with}=..."
                raise InputError(f"--{command.data_with} is for one file of rows", fix=fix)
            (data,), positional = positional, []
            config = with_texts(Config(), fields, _FLAG_ERROR, "--config.")
            source = ConfigSource(None, fields, config, data=data)
        else:
            if command.config not in ("", "optional") and positional and not path:
                path, *positional = positional
            source = _read_source(command, path, fields)
        if printed_fields is not None and source.config is not None:
            values = config_as_data(source.config, only_changed=printed_fields == "changed")
            print(json.dumps(values, indent=2))
            return 0
        options = parsed_options(command.options, positional, flag_values, path or "")
        if path and not command.prints_config:
            trust_code = isinstance(options, TrustOptions) and options.trust_code
            require_trust(path, source.loaded, trust_code)
        if command.jax:
            refuse_what_ends_jax()
        if command.one_host:
            from rljax import hosts  # after the flags: --help answers without JAX

            hosts.refuse_several(f"rljax {command.name}")
        if isinstance(options, CompilerOptions):
            from rljax.tracking import compiles  # after the flags, too

            compiles.use_cache(options.compilation_cache)
        absl_logging.set_verbosity(absl_logging.ERROR)  # orbax logs at every save
        main = importlib.import_module(f"rljax.command.{command.file()}").main
        with contextlib.nullcontext() if command.only_prints else streams_without_readers():
            return (main(options, source) if command.config else main(options)) or 0
    except InputError as error:
        return complain(error)
    except OSError as error:
        if not is_full_disk(error):
            raise
        path = error.filename2 or error.filename or "a file of this command"
        fix = "make room there, or write to another disk; TMPDIR names that of temporary files"
        return complain(InputError(f"{path} cannot be written", rule=error.strerror, fix=fix))
    except (RuntimeError, AssertionError, ValueError) as error:
        if (device_error := no_device(error)) is None:
            raise
        return complain(device_error)


def _read_source(command: Command, path: str | None, fields: Mapping[str, str]) -> ConfigSource:
    if (path or fields) and not command.config:
        raise InputError(f"{command.name} takes no --config", fix="--help lists the flags")
    if not path and command.config not in ("", "optional", "needed"):
        path = command.config
    if not path and (command.config == "needed" or fields):
        raise InputError("no --config", fix="--config=quickstart; `rljax configs` lists more")
    loaded = load_config_file(path, fields) if path else None
    config = loaded
    if loaded is not None:
        config = with_texts(loaded, fields, _FLAG_ERROR, "--config.")
    return ConfigSource(path, fields, config, loaded)


def _hold_back_working_folder(examines: bool) -> None:
    """Removes the working folder, which may be a stranger's, from sys.path until something of it is
    named and trusted (rljax.components). One that PYTHONPATH names, or that holds this very
    package, comes last: a tokenizers.py in it then hides no library. Raises InputError for a
    library that a folder of PYTHONPATH hides, unless the command itself `examines` that."""
    cwd = os.getcwd()
    folders = [
        os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    is_named = cwd in folders or Path(__file__).resolve().parents[2] == Path(cwd).resolve()
    others = [path for path in sys.path if path and os.path.abspath(path) != cwd]
    sys.path[:] = [*others, cwd] if is_named else others
    for file, name in hidden_libraries(os.environ) if not examines else ():
        raise InputError(f"{file} hides the library {name!r}", fix="rename that file")


def _print_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns (fields that --print_config asks for, the other arguments)."""
    separator = list(arguments).index("--") if "--" in arguments else len(arguments)
    # Behind -- stands another command.
    own_args, other_command = arguments[:separator], arguments[separator:]
    flags_given = [a for a in own_args if a.partition("=")[0] == "--print_config"]
    if not flags_given:
        return None, list(arguments)
    fields = flags_given[-1].partition("=")[2] or "all"
    if fields not in ("all", "changed"):
        fix = "--print_config or --print_config=changed"
        raise InputError("--print_config", value=fields, rule="all or changed", fix=fix)
    return fields, [*(a for a in own_args if a not in flags_given), *other_command]


def config_as_data(config: Config, *, only_changed: bool) -> dict:
    """Returns the config, or its fields that differ from the defaults, as the JSON and YAML that
    --config reads have it."""
    if not only_changed:
        return to_dict(config)
    values: dict = {}
    for name, value in changed_fields(config).items():
        *sections, field = name.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[field] = list(value) if isinstance(value, tuple) else value
    return values


def _quieten_libraries() -> None:
    """Shows each warning of ours on one line, and of libraries only errors."""
    form = "%(asctime)s %(levelname)s: %(message)s"
    logging.basicConfig(format=form, datefmt="%H:%M:%S", level=logging.ERROR)
    logging.getLogger("rljax").setLevel(logging.WARNING)
    warnings.showwarning = lambda message, *_, **__: logging.getLogger("rljax").warning(message)


def complain(error: InputError) -> int:
    """Prints the error; returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


# -- text --


def _help_about(command: Command, words: Sequence[str]) -> str:
    """Returns the flags and fields whose name or help holds the words behind --help."""
    options = options_help(command.options, _width(), words)
    fields = "\n".join(config_help(Config(), _width(), words)).strip("\n") if command.config else ""
    return "\n".join(
        [*options, *([""] if options and fields else []), *([fields] if fields else [])]
    )


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _help(command: Command, program: str) -> str:
    width = _width()
    config_usage = {"": "", "optional": "", "needed": " CONFIG"}.get(command.config, " [CONFIG]")
    usage = f"usage: {program}{config_usage}{options_usage(command.options)} [--flags]"
    lines = [usage, "", command.doc(), ""]
    if options := options_help(command.options, width):
        lines += ["Flags:", *options, ""]
    if command.config:
        text = (
            "The config: CONFIG or --config=FILE names a .py file with get_config() (FILE:VARIANT "
            "passes it a text), a .json or .yaml file, such as a run's config.json, or one that "
            "ships (`rljax configs`). --config.FIELD=VALUE changes a field; a list is written "
            "with commas: --config.trackers=console,tensorboard. --print_config prints the "
            "resolved config, --print_config=changed what differs from the defaults below. A word "
            "behind --help, as in --help kl, prints the flags and fields alone that are about it."
        )
        lines += [*textwrap.wrap(text, width), "", *config_help(Config(), width)]
    return "\n".join(lines)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Prints a table: the first column to the left, numbers in the others to the right."""
    from rich.table import Table
    from rich.text import Text

    from rljax.tracking.screen import Terminal

    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Terminal().print(table)
