"""Options that several commands have: see rljax.config.declare. Nothing heavy is imported, so
--help answers at once."""

import dataclasses

from rljax.config.declare import Options, option
from rljax.config.schema import Config
from rljax.files import is_whole_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOptions(Options):
    """Options of every command that compiles programs."""

    compilation_cache: str = option(
        Config().compilation_cache, "Folder for compiled programs; empty = off"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustOptions(Options):
    """Options of every command that reads a run folder, or a config in JSON or YAML."""

    trust_code: bool = option(
        False, "Run the functions of others that a run folder, or a config in JSON or YAML, names"
    )


def step_option():
    """Declares the step of a run: latest, best, or a number."""
    return option(
        "latest",
        "Checkpoint of a run: latest, best, or the number of a step",
        fits=lambda step: step in ("latest", "best") or is_whole_number(step),
        rule="latest, best, or the number of a step",
    )


def temperature_option():
    """Declares a sampling temperature."""
    return option(None, "Temperature of the samples; default: the run's, or 1.0", above=0)


def prompt_tokens_option():
    """Declares the limit of prompts, in tokens."""
    return option(
        None,
        "Largest length of a prompt, in tokens; longer ones are dropped; default: the run's, or "
        "512",
        low=1,
    )


def response_tokens_option():
    """Declares the limit of responses, in tokens."""
    return option(
        None, "Largest length of a response, in tokens; default: the run's, or 512", low=1
    )


def dtype_option(help: str, *dtypes: str):
    """Declares a dtype, one of `dtypes` or ""."""
    return option(
        "",
        f"{help}: {', '.join(dtypes)}",
        fits=lambda dtype: dtype in ("", *dtypes),
        rule=f"one of {', '.join(dtypes)}",
    )


def jsonl_option(help: str, **spec):
    """Declares the path of a .jsonl file that is written."""

    def fits(path):
        return not path or path.endswith(".jsonl")

    rule = "the name of a .jsonl file"
    return option("", help, fits=fits, rule=rule, path="written_file", **spec)
