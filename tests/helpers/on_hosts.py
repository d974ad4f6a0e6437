"""Several processes on this machine as the hosts of one run."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
# Small programs compile fastest so; see tests/conftest.py.
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a host's process has left: its exit code (negative: killed by that signal; None: it ran
    on past the deadline and was killed), and what it printed."""

    code: int | None
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def host_environment(index: int, count: int, devices: int, port: int, **others: str) -> dict:
    """The environment of host `index` of `count`, with `devices` virtual CPU devices."""
    hosts = {}
    if count > 1:
        hosts = {"RLJAX_COORDINATOR": f"127.0.0.1:{port}", "RLJAX_HOSTS": str(count)}
        hosts["RLJAX_HOST"] = str(index)
    old = " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RLJAX_", "PYTEST_"))},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_FLAGS}{old}",
        "PYTHONPATH": os.pathsep.join(
            [str(REPO), str(REPO / "tests"), str(REPO / "tests/helpers")]
        ),
        **hosts,
        **others,
    }


@contextlib.contextmanager
def started(count: int, devices: int, command: str | Sequence[str] | Callable, **others: str):
    """`count` running processes, as a list of Popen with files `.out` and `.err`.

    A text is a python program; a list the arguments after `python`; a function of the host's
    number gives either. What still runs at the end is killed, its process group with it.
    """
    port, processes = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for k in range(count):
                given = command(k) if callable(command) else command
                arguments = ["-c", given] if isinstance(given, str) else list(given)
                files = [open(Path(folder) / f"{k}.{name}", "w+") for name in ("out", "err")]
                process = subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    env=host_environment(k, count, devices, port, **others),
                    stdout=files[0],
                    stderr=files[1],
                    start_new_session=True,
                )
                process.files = files
                processes.append(process)
            yield processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for file in process.files:
                    file.close()


def said(process) -> tuple[str, str]:
    """What a started process has printed so far: (out, err)."""
    return tuple(Path(file.name).read_text() for file in process.files)


def ended(processes, timeout_s: float) -> list[Ended]:
    """Waits for all of them, at most timeout_s together."""
    deadline, codes = time.monotonic() + timeout_s, []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return [Ended(code, *said(process)) for code, process in zip(codes, processes, strict=True)]


def on_hosts(
    count: int,
    devices: int,
    command: str | Sequence[str] | Callable,
    *,
    timeout_s: float = 240.0,
    **others: str,
) -> list[Ended]:
    """Runs a command on `count` hosts of `devices` devices each, to its end."""
    with started(count, devices, command, **others) as processes:
        return ended(processes, timeout_s)


def all_well(hosts: list[Ended]) -> list[Ended]:
    """The same list; fails with the output of the first host whose exit code is not 0."""
    for k, host in enumerate(hosts):
        assert host.code == 0, f"host {k}: exit code {host.code}\n{host.out}\n{host.err}"
    return hosts
