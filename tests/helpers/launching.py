"""Running a launcher as a user does: a process of its own, flags, text and an exit code."""

import os
import subprocess
import sys

import jax
from conftest import REPO


def launch(name: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """The finished launchers/NAME.py with the arguments, on one device, with the tests' cache."""
    path = os.pathsep.join([str(REPO), str(REPO / "tests" / "helpers")])
    # The flags of the tests that make compiles fast, but one device.
    xla = [x for x in os.environ["XLA_FLAGS"].split() if "device_count" not in x]
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": " ".join(xla)}
    cache = jax.config.jax_compilation_cache_dir
    environment |= {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    command = [sys.executable, str(REPO / "launchers" / f"{name}.py"), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=REPO
    )
