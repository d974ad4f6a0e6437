"""What the launchers share: the --config flag with overrides, options as flags, tables, and errors
as plain text. Imports no model code before the flags are parsed, so that --help and a misspelt flag
answer at once.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from rljax.config import Config, field_names, unknown_field
from rljax.config.options import CompilerOptions, define_flags, parsed_options
from rljax.errors import InputError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file with get_config(), such as configs/quickstart.py"
)


def check_flag_names(arguments: list[str], config: Config) -> None:
    """Every --config.x.y must be a field: lists all that are not, each with the nearest name."""
    known = field_names(config)
    problems = []
    for argument in arguments:
        name = argument.lstrip("-").split("=", 1)[0]
        if argument.startswith("--config.") and name.removeprefix("config.") not in known:
            field = name.removeprefix("config.")
            problems.append(unknown_field(field, "--config."))
    if problems:
        raise InputError("unknown flags:\n  " + "\n  ".join(problems))


def load_config_file(path: str) -> Config:
    """get_config() of a config file; `file.py:text` passes the text to it. Errors name the file."""
    module = config_module(path)
    name, _, argument = path.partition(":")
    try:
        config = module.get_config(argument) if argument else module.get_config()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{name}: get_config({argument!r}) failed", rule=f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Config):
        raise InputError(
            f"{name}: get_config() must return rljax.config.Config", value=type(config).__name__
        )
    return config


def config_module(path: str):
    """The module of a config file."""
    import importlib.util

    name = path.partition(":")[0]
    if not os.path.isfile(name):
        raise InputError("no such config file", value=name, fix="see configs/ for those that ship")
    spec = importlib.util.spec_from_file_location("_rljax_config", name)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{name} cannot be imported", rule=f"{type(error).__name__}: {error}"
        ) from error
    if not callable(vars(module).get("get_config")):
        raise InputError(
            f"{name} has no get_config()",
            fix="define get_config() that returns rljax.config.Config",
        )
    return module


def require_sweep(module, path: str) -> None:
    """The config file must define sweep()."""
    if not callable(vars(module).get("sweep")):
        raise InputError(
            f"{path.partition(':')[0]} has no sweep()",
            fix="define sweep() that yields {'dotted.field': value, ...} for each run",
        )


def config_path(arguments: list[str]) -> str | None:
    """The value of --config in either spelling."""
    for i, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
        if argument == "--config" and i + 1 < len(arguments):
            return arguments[i + 1]
    return None


def _quiet() -> None:
    """One line per warning of ours; libraries speak from ERROR on."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.ERROR)
    logging.getLogger("rljax").setLevel(logging.WARNING)
    warnings.showwarning = lambda message, *_, **__: print(f"WARNING: {message}", file=sys.stderr)


def run(main: Callable[[list[str]], int | None], *, needs_config: bool = True) -> None:
    """Parse flags and call main(positional arguments); an InputError is printed, exit code 2."""
    _quiet()
    sys.path[:0] = [p for p in (os.getcwd(),) if p not in sys.path]  # the user's own modules
    arguments = sys.argv[1:]
    try:
        asks_help = any(a in ("--help", "-h", "--helpfull", "--helpshort") for a in arguments)
        path = config_path(arguments)
        if path is not None:
            check_flag_names(arguments, load_config_file(path))
        elif needs_config and not asks_help:
            raise InputError("no --config", fix="--config=configs/quickstart.py")
        app.run(lambda argv: sys.exit(_guarded(main, argv[1:])), argv=sys.argv, flags_parser=_parse)
    except InputError as error:
        sys.exit(_complain(error))


def command(main: Callable[[object], int | None], kind: type, *, needs_config: bool = False):
    """`run` of main(options): an options class of rljax.config.options gives flags and checks."""
    define_flags(kind)

    def call(positional: list[str]) -> int | None:
        options = parsed_options(kind, positional)
        if isinstance(options, CompilerOptions):
            from rljax.tracking import compiles  # after the flags: --help answers without JAX

            compiles.use_cache(options.compilation_cache)
        return main(options)

    run(call, needs_config=needs_config)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Prints a table: the first column to the left, numbers in the others to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, TypeError) as error:
        raise InputError(str(error), fix="--help lists the flags") from None


def _guarded(main: Callable, positional: list[str]) -> int:
    absl_logging.set_verbosity(absl_logging.ERROR)  # orbax logs at every save
    try:
        return main(positional) or 0
    except InputError as error:
        return _complain(error)


def _complain(error: InputError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def parsed_config() -> Config:
    """The config of --config with the overrides of the command line."""
    return _CONFIG.value
