"""`rljax pod accept`, here: what the first hour with a pod runs."""

import json
import subprocess
import sys

import pytest
from conftest import one_device_environment


@pytest.mark.hosts
def test_accept_here(tmp_path):
    command = [sys.executable, "-m", "rljax", "pod", "accept", "--hosts=2", "--out=seen"]
    options = dict(cwd=tmp_path, env=one_device_environment(), capture_output=True, text=True)
    done = subprocess.run(command, **options, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "seen/accept.json").read_text())
    assert list(manifest["checks"].values()) == [True] * 5
    codes = [stage["exit_code"] for stage in manifest["stages"]]
    assert [bool(code) for code in codes] == [False, True, False, True, False]
    assert [stage["hosts"] for stage in manifest["stages"]] == [2, 2, 2, 2, 1]
    assert {"python", "jax", "jaxlib", "rljax"} <= manifest["versions"].keys()
    again = subprocess.run(command, **options, timeout=60)
    assert again.returncode == 2 and "holds an earlier one" in again.stderr
