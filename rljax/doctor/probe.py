"""Starts JAX, the sandbox and a look at the hosts' variables, in a process of its own: `python -m
rljax.doctor.probe` prints a line of JSON for each. What ends or hangs that process ends no other.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions

from rljax.doctor.finding import Finding, broken, fine, warning
from rljax.doctor.variables import xla_flag_value_wrong
from rljax.errors import InputError
from rljax.runs.units import human_bytes


def probe(env: Mapping[str, str], timeout_s: float) -> Iterator[Finding]:
    """Runs this module as a process -> its answer, and how it ended."""
    command = [sys.executable, "-P", "-m", "rljax.doctor.probe"]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**env, "PYTHONPATH": path},
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = None, (late.stdout or b"").decode(errors="replace"), ""
    seen = []
    for line in out.splitlines():
        if line.startswith('{"name"'):
            seen.append(Finding(**json.loads(line)))
    yield from seen
    if code is None:
        yield broken(
            "jax_hangs",
            f"JAX has not started within {timeout_s:g} s: another process may have "
            "the devices, or the driver does not answer",
            "end the process that has the devices "
            "(nvidia-smi, lsof /dev/accel0), or restart the machine",
        )
    elif code and (refused := refused_xla_flag(err)):
        yield refused
    elif code:
        yield broken(
            "jax_does_not_start",
            f"JAX does not start: {_last_line(err) or f'exit code {code}'}",
            _how_to_start(env, err),
        )


def refused_xla_flag(err: str) -> Finding | None:
    """The finding of a process that ended at XLA_FLAGS, by what it printed; None of another."""
    if value := re.search(r"Couldn't interpret value (.*?) for flag (\w+)", err):
        return xla_flag_value_wrong(f"--{value[2]}={value[1].strip()}")
    if "Unknown flag" not in err:
        return None
    flags = err.partition("Unknown flag")[2].partition(":")[2].splitlines()[0].strip()
    return broken(
        "xla_flags_unknown",
        f"XLA_FLAGS holds {flags}, which this jaxlib does not know: the process ends at it",
        "take it out of XLA_FLAGS",
    )


def _how_to_start(env: Mapping[str, str], err: str) -> str:
    """Names the fix for a JAX that does not start: an import that fails is of the installation,
    everything else of the variables that JAX reads, where some are set."""
    names = sorted(name for name in env if name.startswith(("JAX_", "XLA_", "LIBTPU_")))
    error = _last_line(err)
    if names and not error.startswith(("ImportError", "ModuleNotFoundError")):
        return f"unset {' '.join(names)}; the one that the error is about is enough"
    kept = " ".join(
        f"{one.name}=={one.version}"
        for one in distributions()
        if one.name in ("jax", "jaxlib", "numpy")
    )
    return f"pip install --force-reinstall {kept or 'jax jaxlib numpy'}, for this Python"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def main() -> None:
    import jax

    for finding in (*_devices(jax), *_hosts(), *_sandbox()):
        print(json.dumps(vars(finding)), flush=True)


def _devices(jax) -> Iterator[Finding]:
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter of CUDA's plugin without a GPU
        said = str(error)[:300] or type(error).__name__
        yield broken(
            "no_device",
            f"JAX finds no device: {said}",
            "unset JAX_PLATFORMS, or install the plugin of this machine's devices",
        )
        return
    yield fine("devices", f"{len(devices)} x {devices[0].device_kind}")
    for device in devices:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        if limit:
            yield fine("memory", f"{device}: {human_bytes(limit - used)} of {human_bytes(limit)}")


def _hosts() -> Iterator[Finding]:
    from rljax.hosts.cluster import environment

    try:
        cluster = environment(os.environ)
    except InputError as error:
        what, fix = error.parts
        yield broken(
            "hosts_variables_wrong",
            what,
            fix
            or "set RLJAX_COORDINATOR, RLJAX_HOSTS and RLJAX_HOST on every host, or none of them",
        )
        return
    yield fine("hosts", str(cluster) if cluster else "one")


def _sandbox() -> Iterator[Finding]:
    from rljax.rewards.sandbox.tiers import LEFT_OPEN, sandbox_tier

    try:
        tier = sandbox_tier()
    except InputError as error:
        what, fix = error.parts
        yield broken("sandbox_missing", what, fix)
        return
    if tier in LEFT_OPEN:
        yield warning(
            "sandbox_weak",
            f"programs of the policy run in the tier {tier}: {LEFT_OPEN[tier]}",
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or install bwrap",
        )
    else:
        yield fine("sandbox", tier)


if __name__ == "__main__":
    main()
