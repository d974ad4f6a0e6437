"""Faults that end a process as JAX starts: the checks of `rljax doctor` that every command that
needs a device makes first. Imports no JAX."""

import functools
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping

from rljax.doctor.environment import fatal_variables
from rljax.doctor.finding import Finding, broken
from rljax.doctor.packages import unmet_requirements, version_of
from rljax.errors import InputError

_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_to=")
_PARSES_FLAGS = "from jaxlib import _jax; _jax.CompileOptions()"
NO_DEVICE = "unset JAX_PLATFORMS, or install the plugin of this machine's devices"
_VARIABLES, _DEVICES = (os.path.join("jax", "_src", f"{x}.py") for x in ("config", "xla_bridge"))


@functools.cache
def refuse_what_ends_jax() -> None:
    """Raises InputError for a package that is missing or too old, and for a variable that would
    make JAX end the process without a message of ours."""
    for finding in fatal_findings(os.environ):
        raise InputError(finding.what, fix=finding.fix)


def fatal_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the findings of packages and variables that end a process as JAX starts."""
    yield from unmet_requirements()
    yield from fatal_variables(env)
    flags = env.get("XLA_FLAGS", "").split()
    if "jax" in sys.modules or all(flag.startswith(_HARMLESS_FLAGS) for flag in flags):
        return  # a process that has read them goes on; the others are known
    command = [sys.executable, "-P", "-c", _PARSES_FLAGS]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(env))
    except (OSError, subprocess.SubprocessError):
        return
    if refused_flag := result.returncode and refused_xla_flag(result.stderr):
        yield refused_flag


def refused_xla_flag(stderr: str) -> Finding | None:
    """Returns the finding of a process that ended at XLA_FLAGS, by what it printed; None for
    another end."""
    if match := re.search(r"Couldn't interpret value (.*?) for flag (\w+)", stderr):
        name = f"--{match[2]}"
        problem = f"XLA_FLAGS holds {name}={match[1].strip()}, and {name} takes no such value: "
        fix = f"correct the value, or take {name} out of XLA_FLAGS"
        return broken("xla_flag_value_wrong", f"{problem}JAX does not start", fix)
    if not (match := re.search("Unknown flag[^:]*:(.*)", stderr)):
        return None
    flags = match[1].strip()
    problem = f"XLA_FLAGS holds {flags}, which"
    if flags.startswith(("--xla_tpu_", "--xla_jf_")):
        problem += " libtpu alone knows: elsewhere the process ends at it"
        return broken("xla_flags_of_tpu", problem, "put flags of TPUs into LIBTPU_INIT_ARGS")
    problem += " this jaxlib does not know: the process ends at it"
    return broken("xla_flags_unknown", problem, "take it out of XLA_FLAGS")


def no_device(error: BaseException) -> InputError | None:
    """Returns the error of a JAX that does not accept a variable or has found no device; None for
    any other exception."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    message = (str(error) or type(error).__name__).splitlines()[0][:300]
    if any(file.endswith(_DEVICES) for file in files):
        for finding in fatal_variables(os.environ):
            return InputError(finding.what, fix=finding.fix)
        return InputError(f"JAX finds no device: {message}", fix=NO_DEVICE)
    if files[-1].endswith(_VARIABLES) and any(name.startswith("JAX_") for name in os.environ):
        return InputError(f"JAX does not start: {message}", fix=start_fix(os.environ, message))
    return None


def start_fix(env: Mapping[str, str], error: str) -> str:
    """Returns the fix for a JAX that does not start: an import that fails is a fault of the
    installation, everything else of the variables that JAX reads, if some are set."""
    names = sorted(name for name in env if name.startswith(("JAX_", "XLA_", "LIBTPU_")))
    if names and not error.startswith(("ImportError", "ModuleNotFoundError")):
        return f"unset {' '.join(names)}; the one that the error is about is enough"
    versions = {name: version_of(name) for name in ("jax", "jaxlib", "numpy")}
    packages = " ".join(f"{name}=={text}" if text else name for name, text in versions.items())
    return f"pip install --force-reinstall {packages}, for this Python"
