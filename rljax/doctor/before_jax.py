"""Faults that end a process as JAX starts: the checks of `rljax doctor` that every command which
needs a device makes first. Imports no JAX.
"""

import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping

from rljax.doctor.finding import Finding, broken
from rljax.doctor.packages import unmet_requirements
from rljax.doctor.probe import refused_xla_flag
from rljax.doctor.variables import variables
from rljax.errors import InputError

# Findings at which JAX ends for sure. What a machine has is not among them: not every device shows
# as a file.
_FATAL = {
    "platform_unknown",
    "platform_not_installed",
    "xla_flags_not_flags",
    "plugin_missing",
    "xla_flag_value_wrong",
    "jax_variable_not_boolean",
    "matmul_precision_unknown",
    "libtpu_missing",
}
_HARMLESS = ("--xla_force_host_platform_device_count", "--xla_dump_to=")
_PARSES_FLAGS = "from jaxlib import _jax; _jax.CompileOptions()"


@functools.cache
def refuse_what_ends_jax() -> None:
    """Raises InputError for a package that is missing or too old, and for a variable at which JAX
    would end without a word of ours."""
    for finding in fatal(os.environ):
        raise InputError(finding.what, fix=finding.fix)


def fatal(env: Mapping[str, str]) -> Iterator[Finding]:
    yield from unmet_requirements()
    found = [finding for finding in variables(env) if finding.status == "broken"]
    yield from (finding for finding in found if finding.name in _FATAL)
    flags = env.get("XLA_FLAGS", "").split()
    if "jax" in sys.modules or all(flag.startswith(_HARMLESS) for flag in flags):
        return  # a process that has read them goes on; the others are known
    command = [sys.executable, "-P", "-c", _PARSES_FLAGS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(env))
    except (OSError, subprocess.SubprocessError):
        return
    if refused := done.returncode and refused_xla_flag(done.stderr):
        of_tpu = (finding for finding in found if finding.name == "xla_flags_of_tpu")
        yield refused if refused.name == "xla_flag_value_wrong" else next(of_tpu, refused)


def no_device(error: BaseException) -> InputError | None:
    """The error of a JAX that has found no device; None for an exception of anything else."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not any(file.endswith(os.path.join("jax", "_src", "xla_bridge.py")) for file in files):
        return None
    said = (str(error) or type(error).__name__).splitlines()[0][:300]
    found = (f for f in variables(os.environ) if f.status == "broken" and "platform" in f.name)
    fix = "unset JAX_PLATFORMS, or install the plugin of this machine's devices"
    finding = next(found, broken("no_device", f"JAX finds no device: {said}", fix))
    return InputError(finding.what, fix=finding.fix)
