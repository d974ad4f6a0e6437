"""A run under a URL on several hosts: stopped by the store, it goes on with other hosts."""

import json

import numpy as np
import pytest
from on_hosts import all_well, on_hosts
from safetensors.numpy import load_file
from tiny_run import metrics_rows, summary

pytestmark = pytest.mark.hosts
RUN = """
from rljax import hosts
hosts.start()
import brittle
from test_store_runs import URL, config
from rljax.config import MeshConfig
from rljax.runs import store
from rljax.training import train
store.PAUSES_S = (0.0, 0.0)
train(config(URL, batch__prompts_per_step=8, mesh=MeshConfig(data=1, fsdp=4)))
"""
PATH = "import sys; sys.path.insert(0, 'tests/training')\n"


def run(hosts: int, devices: int, bucket, faults: str = ""):
    env = dict(BRITTLE=str(bucket), BRITTLE_FAULTS=faults)
    return on_hosts(hosts, devices, PATH + RUN, timeout_s=400, **env)


def weights(folder) -> dict:
    return load_file(folder / "policy/model.safetensors")


def test_two_hosts_begin_and_four_end(tmp_path):
    whole, began = tmp_path / "whole", tmp_path / "began"
    all_well(run(1, 4, whole))
    stopped = run(2, 2, began, "broken_step=3")
    assert {host.code for host in stopped} <= {2, 171}, stopped
    assert "checkpoint of step 3 could not be written" in stopped[0].err + stopped[1].err
    place = "bucket/runs/one"
    saved = json.loads((began / place / "checkpoints/00000002/state.json").read_text())
    assert saved["hosts"] == 2
    one = whole / place
    ended = all_well(run(4, 1, began))
    assert "was saved by 2 hosts" in ended[0].err
    here = began / place
    assert summary(here)["status"] == "finished" and not (here / ".lock").exists()
    for ours, theirs in zip(metrics_rows(here), metrics_rows(one), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
    ours, theirs = weights(here), weights(one)
    assert ours.keys() == theirs.keys()
    assert max(np.abs(ours[name] - theirs[name]).max() for name in theirs) < 1e-6
    texts = [(folder / "samples.jsonl").read_text().splitlines() for folder in (here, one)]
    said = [[json.loads(line)["response"] for line in lines] for lines in texts]
    assert said[0] == said[1] and len(said[0]) > 4


SEES = """
import os
from rljax import hosts
hosts.start()
os.environ["BRITTLE"] += f"/{hosts.index() // 2}"  # as memory:// or an endpoint of each host
import brittle
from rljax.training.run_folder import run_folder
with run_folder("brittle://bucket/runs/one", "one"):
    print("it began")
"""


def test_stores_that_hosts_do_not_share_are_refused_by_name(tmp_path):
    for host in on_hosts(3, 1, SEES, BRITTLE=str(tmp_path)):
        assert host.code != 0 and "began" not in host.out
        assert "run_dir is not the same store by host 2 (" in host.err, host.err
        assert "host 1" not in host.err.split("not the same store")[1].split(":")[0]


def test_a_store_without_rights_is_refused_on_every_host(tmp_path):
    for host in run(2, 2, tmp_path, "forbidden=1"):
        assert host.code in (2, 171)
        assert "run_dir cannot be written by host 0 (" in host.err and "permission" in host.err
        assert "plan:" not in host.out
