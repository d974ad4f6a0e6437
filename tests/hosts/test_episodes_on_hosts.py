"""Episodes on several hosts are those of one process: each host plays its own, all decode all."""

import json

import pytest
from on_hosts import all_well, on_hosts

pytestmark = pytest.mark.hosts
PLAYED = {
    "preset": "grpo",
    "steps": 2,
    "sft.steps": 0,
    "data.train": "tiny_environments.rows()",
    "reward.function": "",
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "batch.sequences_per_optimizer_step": 16,
    "environment.max_tokens": 40,
    "environment.max_reply_tokens": 8,
    "environment.max_turns": 5,
    "environment.max_failed": 1.0,
}
FLIGHT = {
    "rollouts.max_staleness": 2,
    "rollouts.ahead": 2,
    "rollouts.clock": "logical(2)",
    "algorithm.policy_loss": "cispo(behaviour='sampler')",
}
JOBS = {
    "alone": {**PLAYED, "environment.function": "tiny_environments.count_letter()"},
    "fails": {**PLAYED, "environment.function": "tiny_environments.fails(share=0.3)"},
    "seats": {
        **PLAYED,
        "environment.function": "tiny_environments.two_seats()",
        "sampler.slots": 6,
    },
    "scored": {
        **PLAYED,
        "environment.function": "tiny_environments.last_turn()",
        "reward.function": "tiny_environments.first_letter_and_turns()",
    },
    "flight": {
        **PLAYED,
        "environment.function": "tiny_environments.count_letter()",
        "steps": 3,
        "sampler.slots": 8,
        **FLIGHT,
    },
    "scored in flight": {
        **PLAYED,
        "environment.function": "tiny_environments.last_turn()",
        "steps": 3,
        "reward.function": "tiny_environments.first_letter_and_turns()",
        **FLIGHT,
    },
}
BATCH = ("tokens", "mask", "group", "scores", "rewards")


def played(hosts: int, devices: int, folder) -> list[dict]:
    """What the jobs did, on each host."""
    command = ["tests/helpers/hosts_online.py", folder, json.dumps([*JOBS.values()])]
    done = all_well(on_hosts(hosts, devices, command, timeout_s=580))
    return [dict(zip(JOBS, json.loads(one.out.splitlines()[-1]), strict=True)) for one in done]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_episodes_are_those_of_one_process(tmp_path, count):
    (alone,) = played(1, count, tmp_path / "one")
    for host in played(count, 1, tmp_path / "several"):
        for name in JOBS:
            for here, there in zip(host[name]["steps"], alone[name]["steps"], strict=True):
                assert {k: here[k] for k in BATCH} == {k: there[k] for k in BATCH}, name
                assert here["values"] == there["values"] and here["statuses"] == there["statuses"]
                for metric in ("episode/turns", "episode/return", "env/failed", "calls/bad"):
                    assert here["metrics"][metric] == there["metrics"][metric], (name, metric)
                for metric in ("queue/open", "staleness/steps_mean", "slots/dispatches"):
                    known = [step["metrics"].get(metric) for step in (here, there)]
                    assert known[0] == known[1] and (known[0] is None) == ("flight" not in name)
    assert any(float(step["metrics"]["env/failed"]) > 0 for step in alone["fails"]["steps"])
