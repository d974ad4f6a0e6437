"""What is started again, and what is not."""

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import REPO
from processes import alive, wait_until

from rljax.pods import supervise as module
from rljax.pods.supervise import RESTARTS, supervise

# Ends with the codes of its arguments, one per start.
ENDS = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
n = int(count.read_text()) if count.exists() else 0
count.write_text(str(n + 1))
sys.exit(int(sys.argv[2:][min(n, len(sys.argv) - 3)]))
"""


@pytest.mark.parametrize(
    "codes, starts, last", [("0", 1, 0), ("2", 1, 2), ("1", 1, 1), ("143,0", 2, 0), ("170", 6, 170)]
)
def test_restarts(tmp_path, codes, starts, last):
    count = tmp_path / "count"
    command = ["python3", "-c", ENDS, str(count), *codes.split(",")]
    assert supervise(command, first_pause_s=0.01) == last
    assert count.read_text() == str(starts)
    assert all(code in RESTARTS for code in (143, 170, 171, 134, 137, 139))


# Fails with 171 at every start; saves step 3 at the third one, and leaves a process behind.
SAVES = """
import os, pathlib, subprocess, sys
count = pathlib.Path(sys.argv[1])
n = int(count.read_text()) if count.exists() else 0
count.write_text(str(n + 1))
pathlib.Path(os.environ["RLJAX_LAST_SAVED"]).write_text("3" if n >= 2 else "0")
left = pathlib.Path(sys.argv[1] + ".left")
if left.exists() and os.path.exists(f"/proc/{left.read_text()}/stat"):
    assert open(f"/proc/{left.read_text()}/stat").read().split()[2] == "Z", "it still runs"
sleep = "import time; time.sleep(" + ("600)" if n == 3 else "0.3)")
left.write_text(str(subprocess.Popen([sys.executable, "-c", sleep]).pid))
sys.exit(171)
"""


def test_a_newer_checkpoint_counts_anew_and_what_was_left_behind_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_RESTARTS", 2)
    monkeypatch.setattr(module._end_group, "__defaults__", (1.5,))
    count = tmp_path / "count"
    assert supervise(["python3", "-c", SAVES, str(count)], first_pause_s=0.01) == 171
    # Two starts with no checkpoint but the first, the third saves, and two more.
    assert count.read_text() == "5"
    assert not alive(int((tmp_path / "count.left").read_text()))


def test_a_host_that_ended_with_2_ends_the_restarts_on_all(tmp_path, capfd):
    failure = json.dumps({"host": 2, "reason": "InputError: no such file", "code": 2})
    words = f"import os, sys; open(os.environ['RLJAX_LAST_WORDS'], 'w').write({failure!r})"
    assert supervise(["python3", "-c", words + "; sys.exit(171)"], first_pause_s=0.01) == 171
    assert "no restart mends that" in capfd.readouterr().err


@pytest.mark.parametrize("when", ["while it runs", "in a pause"])
def test_sigterm_goes_on_to_the_command_and_ends_the_restarts(tmp_path, when):
    runs = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); "
    runs += f"open({str(tmp_path / 'on')!r}, 'w'); "
    runs += "time.sleep(3600)" if when == "while it runs" else "sys.exit(171)"
    script = f"from rljax.pods.supervise import supervise; raise SystemExit(supervise({[sys.executable, '-c', runs]!r}, 3600))"  # noqa: E501
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "on").exists, "the command")
    if when == "in a pause":
        assert "again in 300 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == (143 if when == "while it runs" else 171)
