"""Several hosts on one machine: `rljax pod local`."""

import signal
import subprocess
import sys

import pytest
from conftest import REPO

SHOW = """
import os, sys, time
host = os.environ["RLJAX_HOST"]
print("host", host, os.environ["RLJAX_HOSTS"], os.environ["RLJAX_COORDINATOR"].split(":")[0])
print(os.environ["XLA_FLAGS"].split()[-1], file=sys.stderr)
time.sleep(float(sys.argv[1]))
sys.exit(7 if host == "1" and sys.argv[2] == "fail" else 0)
"""


def local(tmp_path, *arguments):
    (tmp_path / "show.py").write_text(SHOW)
    return subprocess.Popen(
        [sys.executable, str(REPO / "launchers/pod.py"), "local", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_host_runs_the_command_and_its_lines_are_marked(tmp_path):
    process = local(tmp_path, "--hosts=3", "--devices=2", "--", "python", "show.py", "0", "-")
    out, err = process.communicate()
    assert process.returncode == 0 and err == ""
    flag = "--xla_force_host_platform_device_count=2"
    assert sorted(out.splitlines()) == sorted(
        line for k in range(3) for line in (f"[{k}] host {k} 3 127.0.0.1", f"[{k}] {flag}")
    )


def test_the_exit_code_is_that_of_the_first_that_failed(tmp_path):
    process = local(tmp_path, "--", "python", "show.py", "0.5", "fail")
    _, err = process.communicate()
    assert process.returncode == 7 and err == "host 1: exit code 7\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_host(tmp_path, number):
    process = local(tmp_path, "--", "python", "show.py", "3600", "-")
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(lines)  # from here on they sleep for an hour
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert sorted(err.splitlines()) == [f"host {k}: exit code 143" for k in range(2)]
