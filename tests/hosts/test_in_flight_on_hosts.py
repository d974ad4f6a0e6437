"""Samples in flight on several hosts are those of one process: each scores its own groups, and all
of them agree on what counts."""

import json

import pytest
from on_hosts import all_well, free_port, on_hosts

pytestmark = pytest.mark.hosts
FLOWN = {
    "preset": "grpo",
    "steps": 4,
    "sft.steps": 0,
    "batch.prompts_per_step": 8,
    "batch.samples_per_prompt": 4,
    "batch.sequences_per_optimizer_step": 32,
    "sampler.slots": 16,
    "reward.function": "in_flight_rewards.slow(fails=0.1)",
    "algorithm.policy_loss": "cispo(behaviour='sampler')",
}
ETA_1 = {**FLOWN, "rollouts.max_staleness": 1, "rollouts.clock": "logical(2)"}
JOBS = {
    "eta 1": ETA_1,
    "eta 2": {**ETA_1, "rollouts.max_staleness": 2, "rollouts.ahead": 2},
    "dynamic": {**ETA_1, "rollouts.max_staleness": 2, "algorithm.collect": "active(max_rounds=3)"},
    # Which scores are there first depends on the speed of each host.
    "wall": {**ETA_1, "rollouts.max_staleness": 2, "rollouts.clock": "wall"},
}
BATCH = ("tokens", "mask", "group", "scores", "rewards")
KINDS = ("staleness/", "queue/", "reward/")


def flown(hosts: int, devices: int, folder, **env) -> list[dict]:
    """What the jobs did, on each host."""
    command = ["tests/helpers/hosts_online.py", folder, json.dumps([*JOBS.values()])]
    done = all_well(on_hosts(hosts, devices, command, timeout_s=580, **env))
    return [dict(zip(JOBS, json.loads(one.out.splitlines()[-1]), strict=True)) for one in done]


def same(run: dict) -> list:
    """What hosts have in common: batches, scores, counts of what is in flight."""
    return [
        [
            {name: step[name] for name in (*BATCH, "prompts", "values", "statuses")},
            {k: v for k, v in step["metrics"].items() if k.startswith(KINDS)},
        ]
        for step in run["steps"]
    ]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_samples_in_flight_are_those_of_one_process(tmp_path, count):
    (alone,) = flown(1, count, tmp_path / "one", GLOO_PORT=str(free_port()))
    several = flown(count, 1, tmp_path / "several")
    for host in several:
        for name in ("eta 1", "eta 2", "dynamic"):
            assert same(host[name]) == same(alone[name]), name
            assert host[name]["policy"] == alone[name]["policy"], name
        assert same(host["wall"]) == same(several[0]["wall"])
        assert host["wall"]["policy"] == several[0]["wall"]["policy"]
    for name in JOBS:
        metrics = [step["metrics"] for step in alone[name]["steps"]]
        ages = [float(one["staleness/steps_max"]) for one in metrics]
        assert 0 < max(ages) <= JOBS[name]["rollouts.max_staleness"], name
    dropped = [float(step["metrics"]["queue/dropped"]) for step in alone["dynamic"]["steps"]]
    assert sum(dropped) > 0
    statuses = [status for step in alone["eta 2"]["steps"] for status in step["statuses"]]
    assert {"ok", "error"} <= set(statuses)
