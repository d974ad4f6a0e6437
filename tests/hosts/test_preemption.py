"""SIGTERM on one host, in any phase: all stop at one place inside the step and save, and the
resumed run is bitwise the one that nothing stopped."""

import json
import re

import pytest
from hosts_run import config_file, event
from on_hosts import all_well, on_hosts
from tiny_run import assert_same_run

# (phase, step) at which a host gets SIGTERM, and the step that is saved: 3 supervised steps, which
# exchange nothing but at their ends, and 6 of GRPO, with an evaluation after every second one.
MOMENTS = [
    ("load", 0, None),
    ("data", 1, 1),
    ("learn", 2, 2),
    ("data", 3, 3),
    ("evaluate", 3, 3),
    ("generate", 4, 3),
    ("reward", 4, 3),
    ("learn", 4, 4),
    ("generate", 5, 4),
    ("data", 5, 4),
    ("reward", 5, 4),
    ("evaluate", 5, 5),
    ("evaluate", 5, 5),
    ("learn", 6, 6),
    ("generate", 7, 6),
    ("reward", 7, 6),
    ("evaluate", 7, 7),
    ("save", 8, 8),
    ("reward", 9, 8),
    ("evaluate", 9, 9),
]

STOPS = """
import json, os, sys
import hosts_run
from rljax.config.flags import load_config_file
from rljax.training import RunStopped, train

config, whole, moments = json.loads(sys.argv[1])
hosts_run.watch_for_events()
told = []
for n, (phase, step, _) in enumerate(moments):
    host = n % 2
    due = hosts_run.event(host, phase, step, "SIGTERM")
    hosts_run.TODO[:] = [due] if int(os.environ["RLJAX_HOST"]) == host else []
    try:
        status = train(load_config_file(config)).summary["status"]
    except RunStopped as stop:
        status = stop.run.summary["status"] if stop.code == 143 else f"code {stop.code}"
    told.append((status, bool(hosts_run.TODO)))
    print(phase, step, told[-1], file=sys.stderr, flush=True)
hosts_run.TODO.clear()
statuses = [train(load_config_file(path)).summary["status"] for path in (config, whole)]
print(json.dumps({"told": told, "statuses": statuses}))
"""


@pytest.mark.hosts
def test_twenty_stops(tmp_path):
    fields = dict(sft__steps=3, steps=6, evaluate__every_steps=2, checkpoint__every_steps=8)
    names = ("stopped", "whole")
    paths = [str(config_file(tmp_path, name, **fields)) for name in names]
    command = ["-c", STOPS, json.dumps([*paths, MOMENTS])]
    host = all_well(on_hosts(2, 1, command, timeout_s=400.0))[0]
    said = json.loads(host.out.splitlines()[-1])
    for n, ((phase, step, saved), (status, missed)) in enumerate(
        zip(MOMENTS, said["told"], strict=True)
    ):
        assert not missed, (phase, step)
        after = f"saved at step {saved}" if saved else "before the first checkpoint"
        wanted = rf"stopped by SIGTERM on host {n % 2} \([^)]*\) at step \d+, {after}"
        assert re.fullmatch(wanted, status), (phase, step, status)
    assert said["statuses"] == ["finished", "finished"]
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.hosts
def test_the_exit_code_is_143_on_all(tmp_path):
    from hosts_run import rounds

    config = config_file(tmp_path, sft__steps=0, steps=3)
    due = event(1, "reward", 2, "SIGTERM")
    asked = [{"hosts": 2, "config": str(config), "event": due}]
    (result,) = rounds(tmp_path, asked, timeout_s=120.0)
    assert result["codes"] == [143, 143], result["err"]
    assert re.search(r"stopped by SIGTERM on host 1 \([^)]*\) at step 1, saved", result["out"][0])
