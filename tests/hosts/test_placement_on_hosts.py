"""Groups of config.placement that are devices of other hosts."""

import json

import numpy as np
import pytest
from on_hosts import all_well, on_hosts
from tiny_run import metrics_rows
from tiny_scorer import write_scorer

HELPER = "tests/helpers/placed_steps.py"
# 12 rows: they divide over 1, 2 and 3 devices.
FIELDS = dict(
    batch__samples_per_prompt=3, batch__sequences_per_optimizer_step=12, evaluate__prompts=8
)
COLUMN = 4 * 12 * 13  # bytes of one number for each token
MIXTURE = "mixture(rewards=('sequence_match(partial=0.5)', 'reward_model()'))"
SCORED = dict(reward__function=MIXTURE)


def steps(folder, count: int, devices: int, groups, fields) -> list[dict]:
    """What the first of `count` hosts says of two steps."""
    folder.mkdir(exist_ok=True)
    command = [HELPER, folder, json.dumps(groups), json.dumps(fields)]
    out = all_well(on_hosts(count, devices, command, timeout_s=300))[0].out
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def assert_same(found: list[dict], wanted: list[dict]) -> None:
    assert len(found) == len(wanted) == 2
    for one, want in zip(found, wanted, strict=True):
        assert one["metrics"].keys() == want["metrics"].keys()
        for name, value in want["metrics"].items():
            np.testing.assert_allclose(
                one["metrics"][name], value, rtol=1e-4, atol=2e-6, err_msg=name
            )


@pytest.mark.hosts
def test_reference_and_reward_model_on_the_devices_of_another_host(tmp_path):
    """The mesh of the actor has no device of the second host, nor have the groups one of the first;
    both run the same commands, and their numbers are those of one process with one mesh."""
    scorer = write_scorer(tmp_path / "scorer")
    fields = FIELDS | SCORED | dict(reward__model=scorer)
    one = steps(tmp_path / "one", 1, 2, [], fields)
    groups = ["reference=group(devices=1)", "reward_model=group(devices=1)"]
    two = steps(tmp_path / "two", 2, 2, groups, fields)
    assert_same(two, one)
    for step in two:
        moved = {role: sums["moved_bytes"] for role, sums in step["moves"].items()}
        assert moved == {"reference": 5 * COLUMN, "reward_model": 4 * COLUMN}
    assert not one[0]["moves"]


@pytest.mark.hosts
def test_a_reference_on_a_part_of_another_host(tmp_path):
    """The actor's mesh has two devices of one host and one of the other."""
    one = steps(tmp_path / "one", 1, 3, [], FIELDS)
    two = steps(tmp_path / "two", 2, 2, ["reference=group(devices=1)"], FIELDS)
    assert_same(two, one)
    assert two[0]["moves"]["reference"]["moved_bytes"] == 5 * COLUMN


@pytest.mark.hosts
def test_a_run_with_a_reference_on_another_host_is_resumed(tmp_path):
    """Each mesh is of one host alone: its arrays are in the checkpoint, and come back to it."""
    fields = FIELDS | dict(evaluate__every_steps=0, export=False, checkpoint__every_steps=1)
    groups = ["reference=group(devices=2)"]
    steps(tmp_path / "two", 2, 2, groups, {**fields, "steps": 2})
    steps(tmp_path / "two", 2, 2, groups, {**fields, "steps": 3})
    steps(tmp_path / "one", 1, 2, [], {**fields, "steps": 3})
    found, wanted = metrics_rows(tmp_path / "two"), metrics_rows(tmp_path / "one")
    assert len(found) == len(wanted) == 3
    for row, want in zip(found, wanted, strict=True):
        for name in ("loss", "ref_kl/k1", "reward/mean", "grad_norm"):
            np.testing.assert_allclose(row[name], want[name], rtol=1e-4, atol=2e-6, err_msg=name)
