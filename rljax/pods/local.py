"""Several hosts on one machine: processes on loopback, each with virtual CPU devices."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

OTHERS_S = 60.0  # from the end of one host by a failure to the end of all


def run_local(command: Sequence[str], hosts: int, devices: int) -> int:
    """Runs the command as `hosts` processes and prints their output, "[3] ...". Returns the exit
    code of the first that failed, 0 if none did. SIGTERM and Ctrl-C go to all of them."""
    port = _free_port()
    processes, threads, ended = [], [], {}
    stopped = threading.Event()

    def stop(*_):
        stopped.set()
        _signal(processes, signal.SIGTERM)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for host in range(hosts):
            process = subprocess.Popen(
                command,
                env=_environment(host, hosts, devices, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.append(process)
            thread = threading.Thread(target=print_lines, args=(process.stdout, host), daemon=True)
            thread.start()
            threads.append(thread)
        if stopped.is_set():  # while they were being started
            _signal(processes, signal.SIGTERM)
        _wait(processes, ended)
    finally:
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        for thread in threads:
            thread.join(5)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    failed = {host: code for host, code in ended.items() if code}
    for host, code in failed.items():
        print(f"host {host}: exit code {code}", file=sys.stderr)
    return next(iter(failed.values()), 0)


def _environment(host: int, hosts: int, devices: int, port: int) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    flags += f" --xla_force_host_platform_device_count={devices}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "PYTHONUNBUFFERED": "1",
        "RLJAX_COORDINATOR": f"127.0.0.1:{port}",
        "RLJAX_HOSTS": str(hosts),
        "RLJAX_HOST": str(host),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: list[subprocess.Popen], ended: dict[int, int]) -> None:
    """Waits until all have ended: `ended` has their exit codes, in the order of their ends. Hosts
    whose run has lost one end by themselves; what is still there OTHERS_S later is killed."""
    deadline = None
    while len(ended) < len(processes):
        for host, process in enumerate(processes):
            if host not in ended and process.poll() is not None:
                code = process.returncode
                ended[host] = code if code >= 0 else 128 - code
                if code and deadline is None:
                    deadline = time.monotonic() + OTHERS_S
        if deadline is not None and time.monotonic() > deadline:
            _signal(processes, signal.SIGKILL)
            deadline = None
        time.sleep(0.05)


def print_lines(stream, host: int) -> None:
    """Prints the output of a host, "[3] ...", until it ends."""
    with stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                sys.stdout.write(f"[{host}] {text}\n")
                sys.stdout.flush()


def _signal(processes: list[subprocess.Popen], number: int) -> None:
    """Sends a signal to each process that runs; SIGKILL goes to its group, so that none of its
    workers is left."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)
