"""A run of a composite dataflow that is killed at random moments is the uninterrupted one."""

import pytest
from killed_runs import killed_run
from preset_runs import preset_config
from tiny_run import metrics_rows, newest_step, policy_bytes, saved_state

PRESETS = ("prime", "raft", "expert_iteration", "special_token", "vineppo")


@pytest.mark.slow  # each start takes 10 seconds
@pytest.mark.parametrize("name", PRESETS)
def test_it_resumes_bitwise(tmp_path, name):
    """Kills fall into supervised steps, rollouts, updates and saves."""
    whole, killed = (tmp_path / each for each in ("whole", "killed"))
    for folder, kills in ((whole, 0), (killed, 4)):
        config = preset_config(name)
        config.run_dir, config.steps, config.checkpoint.every_steps = str(folder), 16, 1
        config.trackers = ()
        killed_run(config, kills)
    assert metrics_rows(killed) == metrics_rows(whole) and len(metrics_rows(whole)) > 16
    assert policy_bytes(killed) == policy_bytes(whole)
    step = newest_step(whole)
    assert newest_step(killed) == step
    assert saved_state(killed, step) == saved_state(whole, step)
