"""A run of a composite dataflow that is killed at random moments is the uninterrupted one."""

import pytest
from conftest import REPO
from killed_runs import killed_run
from preset_runs import preset_config
from tiny_run import metrics_rows, newest_step, policy_bytes, saved_state

from rljax.config.flags import load_config_file

AGENTS = ("kuhn",)  # by the page self_play, whose baseline of each seat is a role
PRESETS = ("prime", "raft", "expert_iteration", "special_token", "vineppo")


def agent(name: str):
    config = load_config_file(f"{REPO}/configs/agents/{name}.py")
    config.sft.steps, config.compilation_cache = 6, ""
    return config


def learned(row: dict, name: str) -> dict:
    """Of games all but what follows the clock: which of them share a dispatch of the sampler, whose
    log-probs then differ in their last bits."""
    follow = ("env/", "episode/seconds", "slots/", "mismatch/", "compiles", "learning_programs")
    return {k: v for k, v in row.items() if name not in AGENTS or not k.startswith(follow)}


@pytest.mark.slow  # each start takes 10 seconds
@pytest.mark.parametrize("name", (*PRESETS, *AGENTS))
def test_it_resumes_bitwise(tmp_path, name):
    """Kills fall into supervised steps, rollouts, updates and saves."""
    whole, killed = (tmp_path / each for each in ("whole", "killed"))
    for folder, kills in ((whole, 0), (killed, 4)):
        config = agent(name) if name in AGENTS else preset_config(name)
        config.run_dir, config.steps, config.checkpoint.every_steps = str(folder), 16, 1
        config.trackers = ()
        killed_run(config, kills)
    rows = [[learned(row, name) for row in metrics_rows(folder)] for folder in (killed, whole)]
    assert rows[0] == rows[1] and len(rows[1]) > 16
    assert policy_bytes(killed) == policy_bytes(whole)
    step = newest_step(whole)
    assert newest_step(killed) == step
    saved = [saved_state(folder, step) for folder in (killed, whole)]
    for one in saved:
        one["metrics"] = learned(one["metrics"], name)
    assert saved[0] == saved[1]
