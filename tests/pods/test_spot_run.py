"""A run on a spot pod that is taken away in the middle has the weights of one that was not."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO
from fake_gcloud import FakeCloud
from on_hosts import free_port

pytestmark = pytest.mark.hosts
SETUP = (
    f"--setup=echo {os.pathsep.join(p for p in sys.path if 'site-packages' in p)} > "
    "$(ls -d $VENV/lib/python3*/site-packages)/here.pth"
)


def policy_of(run: Path) -> dict[str, str]:
    files = sorted((run / "policy").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_babysit_finishes_a_run_bitwise(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    helper = (REPO / "tests/helpers/tiny_run.py").read_text()
    (project / "tiny.py").write_text(helper)
    flags = re.sub("device_count=8", "device_count=1", os.environ["XLA_FLAGS"])
    cloud = FakeCloud(tmp_path / "cloud", free_port())
    options = dict(
        cwd=project, text=True, env={**cloud.variables, "XLA_FLAGS": flags, "PYTHONPATH": str(REPO)}
    )
    rljax = [sys.executable, "-m", "rljax", "pod"]

    def train(name):
        cache = f"--config.compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
        return "--", "train", "tiny.py", f"--config.run_dir={tmp_path / name}", cache

    whole = subprocess.run(
        [*rljax, "local", "--hosts=2", "--devices=1", *train("whole")],
        **options,
        capture_output=True,
        timeout=500,
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    spot = ["--name=mine", "--zone=z", "--type=v4-16", "--poll_s=0.5", "--spot", SETUP]
    babysit = subprocess.Popen(
        [*rljax, "babysit", *spot, *train("spot")],
        **options,
        stdout=(out := (tmp_path / "out").open("w")),
        stderr=subprocess.STDOUT,
    )
    try:
        metrics, deadline = tmp_path / "spot/metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") >= 8):
            assert time.monotonic() < deadline and babysit.poll() is None, Path(
                out.name
            ).read_text()
            time.sleep(0.1)
        cloud.suspend("mine")
        babysit.wait(timeout=400)
    finally:
        babysit.kill()
        cloud.close()
        out.close()
    said = Path(out.name).read_text()
    assert babysit.returncode == 0, said
    assert "SUSPENDED: deleted, and asked for again" in said
    starts = [json.loads(line) for line in (tmp_path / "spot/starts.jsonl").open()]
    assert len(starts) == 2 and starts[0]["step"] == 0 < starts[1]["step"] < 12
    summary = json.loads((tmp_path / "spot/summary.json").read_text())
    assert summary["status"] == "finished"
    assert policy_of(tmp_path / "spot") == policy_of(tmp_path / "whole") != {}
