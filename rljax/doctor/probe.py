"""Starts JAX and the sandbox in a process of its own: `python -m rljax.doctor.probe` prints a line
of JSON for each finding. A fault that ends or hangs that process ends no other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from rljax.doctor.before_jax import NO_DEVICE, refused_xla_flag, start_fix
from rljax.doctor.finding import Finding, broken, fine, warning
from rljax.errors import InputError
from rljax.runs.units import human_bytes


def probe(env: Mapping[str, str], timeout_s: float) -> Iterator[Finding]:
    """Runs this module as a process; yields its findings, and one about how it ended."""
    command = [sys.executable, "-P", "-m", "rljax.doctor.probe"]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    options = dict(capture_output=True, errors="replace", stdin=subprocess.DEVNULL)
    env_of_probe = {**env, "PYTHONPATH": path}
    try:
        result = subprocess.run(command, timeout=timeout_s, env=env_of_probe, **options)
        code, stdout, stderr = result.returncode, result.stdout, result.stderr
    except subprocess.TimeoutExpired as expired:
        code, stdout, stderr = None, (expired.stdout or b"").decode(errors="replace"), ""
    lines = [line for line in stdout.splitlines() if line.startswith('{"name"')]
    yield from (Finding(**json.loads(line)) for line in lines)
    if code is None:
        problem = f"JAX has not started within {timeout_s:g} s: another process may have the "
        fix = "end the process that has the devices (nvidia-smi, lsof /dev/accel0), or restart the "
        yield broken(
            "jax_hangs", f"{problem}devices, or the driver does not answer", f"{fix}machine"
        )
    elif code and (refused_flag := refused_xla_flag(stderr)):
        yield refused_flag
    elif code:
        message = stderr.strip().rpartition("\n")[2].strip()[:300]
        problem = f"JAX does not start: {message or f'exit code {code}'}"
        yield broken("jax_does_not_start", problem, start_fix(env, message))


def main() -> None:
    """Prints the findings of this process, a line of JSON each."""
    import jax

    for finding in (*_devices(jax), *_sandbox()):
        print(json.dumps(vars(finding)), flush=True)


def _devices(jax) -> Iterator[Finding]:
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter of CUDA's plugin without a GPU
        message = str(error)[:300] or type(error).__name__
        return (yield broken("no_device", f"JAX finds no device: {message}", NO_DEVICE))
    yield fine("devices", f"{len(devices)} x {devices[0].device_kind}")
    for device in devices:
        stats = device.memory_stats() or {}
        bytes_limit, bytes_used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        if bytes_limit:
            yield fine(
                "memory",
                f"{device}: {human_bytes(bytes_limit - bytes_used)} of {human_bytes(bytes_limit)}",
            )


def _sandbox() -> Iterator[Finding]:
    from rljax.rewards.sandbox.tiers import LEFT_OPEN, sandbox_tier

    try:
        tier = sandbox_tier()
    except InputError as error:
        return (yield broken("sandbox_missing", *error.parts))
    if tier in LEFT_OPEN:
        problem = f"programs of the policy run in the tier {tier}: {LEFT_OPEN[tier]}"
        fix = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or install bwrap"
        yield warning("sandbox_weak", problem, fix)
    else:
        yield fine("sandbox", tier)


if __name__ == "__main__":
    main()
