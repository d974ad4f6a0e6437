"""Runs with groups in flight and rewards pending that are killed by SIGKILL at random moments: no
group is lost or trained twice, and by the logical clock nothing at all differs."""

import json
from pathlib import Path

import jax
import pytest
from killed_runs import killed_run
from tiny_run import metrics_rows, policy_bytes, tiny_config

from rljax.setup import build, prompt_order

pytestmark = pytest.mark.slow  # a start takes 5 to 10 seconds
SMALL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"


def config_of(folder: Path, kills: int, eta: int, clock: str):
    """Every start takes up to four steps before its end, and two more are in a save."""
    fields = dict(
        model=SMALL,
        sft__steps=0,
        evaluate__every_steps=0,
        evaluate__prompts=4,
        sampler__loop="host",
        sampler__slots=12,
        checkpoint__every_steps=2,
        checkpoint__keep=1000,
        reward__function="in_flight_rewards.slow(fails=0.05)",
        steps=6 * kills + 4,
        algorithm__policy_loss="cispo(behaviour='sampler')",
    )
    if eta:
        flight = dict(max_staleness=eta, ahead=max(1, eta - 1), clock=clock)
        fields |= {f"rollouts__{name}": value for name, value in flight.items()}
    return tiny_config(folder, **fields)


def assert_whole(folder: Path, config) -> None:
    """The line of conservation in every checkpoint: what was admitted is trained, dropped, failed
    or open; what is open are the prompts of its tickets; what was trained stays so."""
    setup = build(config, devices=jax.devices()[:1])
    before: set[int] = set()
    every = sorted((folder / "checkpoints").glob("[0-9]*/state.json"))
    assert len(every) == config.steps // 2
    order = prompt_order(config, setup.data).take(4 * (config.steps + 5))
    for path in every:
        state = json.loads(path.read_text())
        saved = state["sources"]["rl"]["in_flight"]
        tickets, step = saved["tickets"], int(path.parent.name)
        open_ = {int(ticket) for ticket, _ in tickets["open"]}
        now = set(range(tickets["admitted"])) - open_
        assert tickets["step"] == step and tickets["dropped"] == 0
        assert len(now) == tickets["trained"] + tickets["failed"] == 4 * step and before <= now
        assert state["sources"]["rl"]["position"] == tickets["admitted"]
        assert open_ == {int(ticket) for ticket in saved["groups"]}
        for ticket, group in saved["groups"].items():
            assert group["record"]["prompt_id"] == order[int(ticket)].prompt_id
        before = now


@pytest.mark.parametrize(("eta", "kills"), [(1, 3), (0, 50), (1, 50), (4, 50)])
def test_a_killed_run_is_bitwise_the_uninterrupted_one(tmp_path, eta, kills):
    configs = [config_of(tmp_path / name, kills, eta, "logical(2)") for name in ("whole", "killed")]
    whole, killed = killed_run(configs[0], 0), killed_run(configs[1], kills)
    rows, wanted = metrics_rows(killed), metrics_rows(whole)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    assert rows == wanted
    assert policy_bytes(killed) == policy_bytes(whole)
    if eta:
        assert 0 < max(row["staleness/steps_max"] for row in rows) <= eta
        assert_whole(killed, configs[1])


@pytest.mark.parametrize("eta", [1, 4])
def test_by_the_walls_clock_no_group_is_lost_or_trained_twice(tmp_path, eta):
    config = config_of(tmp_path / "killed", 50, eta, "wall")
    killed = killed_run(config, 50, seed=1)
    rows = metrics_rows(killed)
    assert [row["step"] for row in rows] == list(range(1, config.steps + 1))
    assert max(row["staleness/steps_max"] for row in rows) <= eta
    assert_whole(killed, config)
