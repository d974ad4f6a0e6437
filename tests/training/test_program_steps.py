"""Steps that one program takes are those that are taken one at a time."""

import gc
import json

import jax
import numpy as np
import pytest
from conftest import lanes
from tiny_run import assert_same_run, flat_bytes, metrics_rows, summary, tiny_config, train_on

from rljax import setup as build
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rewards.on_device import DeviceForm
from rljax.rollout import Rollout
from rljax.tracking import compiles
from rljax.training.loop import one_step
from rljax.training.run import Run
from rljax.validation import validate

CRITIC = dict(
    dataflow="ppo",
    algorithm__advantage="gae(lam=0.95)",
    algorithm__kl_in_reward=0.05,
    critic_optimizer__lr=1e-3,
)
CASES = {
    "grpo": dict(algorithm__kl_in_loss=0.01),
    "ppo": CRITIC,
    "rloo": dict(algorithm__advantage="rloo()"),
    "remax": dict(dataflow="remax", algorithm__advantage="remax()"),
    "dynamic": dict(
        algorithm__collect="dynamic(oversample=2.0, max_rounds=1, if_short='fill')",
        reward__function="regex_match(pattern='[0-4]$')",
    ),
    "epochs": dict(batch__epochs=2, sampler__temperature=0.7),
    "parts": dict(
        algorithm__advantage="gdpo(weights=(1.0, 0.5))",
        reward__function="mixture(rewards=('exact_match()', 'length_under(max_tokens=6)'))",
    ),
}


def opened(config, folder, devices=1) -> Run:
    """A run whose last phase has begun."""
    run = Run(build.build(config, jax.devices()[:devices]), folder)
    run.begin(run.setup.main, build.initial_params(config, run.setup.model))
    return run


def steps_of(config, folder, count: int, devices=1) -> tuple[list[dict], dict]:
    """(metrics of some steps, the roles' arrays behind them)."""
    with opened(config, folder, devices) as run:
        rows = [one_step(run) for _ in range(count)]
        arrays = jax.device_get(build.role_arrays(run.roles))
    skip = ("time/", "sync/", "compiles", "learning_programs", "tokens_per_s", "generate_tokens")
    return [{k: v for k, v in row.items() if not k.startswith(skip)} for row in rows], arrays


def config_of(folder, **fields):
    fixed = dict(sft__steps=0, evaluate__every_steps=0, checkpoint__every_steps=0, steps=3)
    return tiny_config(folder, **{**fixed, **fields})


@pytest.mark.parametrize("name", lanes(["ppo"], [name for name in CASES if name != "ppo"]))
def test_steps_of_one_program_are_bitwise_those_of_the_host(tmp_path, name):
    one = steps_of(config_of(tmp_path, **CASES[name]), tmp_path, 3)
    config = config_of(tmp_path, program_steps=3, **CASES[name])
    together = steps_of(config, tmp_path, 3)
    assert len(one[0][0]) > 60
    for row, wanted in zip(together[0], one[0], strict=True):
        assert row.keys() == wanted.keys()
        # (A score is a float32 on the device, and 1 / 14 is none.)
        near = {k: pytest.approx(x, rel=1e-6) for k, x in wanted.items() if "reward/" in k}
        wanted = {**wanted, **near}
        assert {k: (row[k], x) for k, x in wanted.items() if row[k] != x} == {}
    assert flat_bytes(one[1]) == flat_bytes(together[1])


@pytest.mark.slow
def test_a_run_of_programs_is_the_run_of_steps(tmp_path):
    """With supervised steps before it, evaluations, checkpoints and samples between programs, of
    4, 2 and fewer steps."""
    fields = dict(evaluate__every_steps=4, checkpoint__every_steps=6, samples_every_steps=3)
    fields |= dict(reward__function="regex_match(pattern='[0-4]$')")
    train_on(1, tiny_config(tmp_path / "one", steps=7, **fields))
    train_on(1, tiny_config(tmp_path / "four", steps=7, program_steps=4, **fields))
    assert_same_run(tmp_path / "four", tmp_path / "one")
    # One program, whatever the number of its steps.
    assert metrics_rows(tmp_path / "four")[-1]["step"] == 13
    rows = (tmp_path / "four" / "metrics.jsonl").read_text().splitlines()
    compiled = [json.loads(line).get("compiles") for line in rows]
    assert compiled[-1] == compiled[8]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_steps(tmp_path):
    fields = dict(sft__steps=0, evaluate__every_steps=0, checkpoint__every_steps=2)
    train_on(1, tiny_config(tmp_path / "one", steps=6, **fields))
    spread = dict(checkpoint__allow_changed=("steps",))
    train_on(1, tiny_config(tmp_path / "two", steps=4, program_steps=2, **fields))
    later = tiny_config(tmp_path / "two", steps=6, program_steps=5, **fields, **spread)
    train_on(1, later)
    one, two = (summary(tmp_path / name) for name in ("one", "two"))
    assert one["rl_steps"] == two["rl_steps"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(mesh__data=8), dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)]
)
def test_on_a_mesh_the_samples_are_the_same(tmp_path, mesh):
    fields = dict(batch__prompts_per_step=8, batch__sequences_per_optimizer_step=32, **mesh)
    one = steps_of(config_of(tmp_path, **fields), tmp_path, 3, devices=8)
    together = steps_of(config_of(tmp_path, program_steps=3, **fields), tmp_path, 3, devices=8)
    for row, wanted in zip(together[0], one[0], strict=True):
        assert row["reward/mean"] == wanted["reward/mean"]
        assert row["response_tokens/mean"] == wanted["response_tokens/mean"]
    for a, b in zip(jax.tree.leaves(together[1]), jax.tree.leaves(one[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "fields, at, expected",
    [
        (dict(steps=10), (0, 0), 4),
        (dict(steps=10), (8, 8), 2),
        (dict(steps=10, evaluate__every_steps=3), (4, 4), 2),
        (dict(steps=10, checkpoint__every_steps=5), (9, 4), 1),
        (dict(steps=10, sft__steps=5, checkpoint__every_steps=6), (5, 0), 1),
        (dict(steps=10, profile_steps=(3, 4)), (0, 0), 2),
        (dict(steps=10, profile_steps=(3, 4)), (2, 2), 1),
    ],
)
def test_a_program_takes_as_many_steps_as_there_are_to_the_next_stop(
    tmp_path, fields, at, expected
):
    config = config_of(tmp_path, program_steps=4, **fields)
    with Run(build.build(config, jax.devices()[:1]), tmp_path) as run:
        assert run.programs.steps_until(*at) == expected


@contract(on_device=True)
def twice_as_many(prompts, key, cfg, *, sample, draw):
    """Draws as many prompts again and learns from these."""
    further = draw(prompts.count)
    sample(prompts, key, n=1)
    batch, report = sample(further, key, n=cfg.samples_per_prompt)
    return Rollout(batch, further, report, {"mine/longest": batch.segment_ids.sum(axis=1).max()})


@contract(reads=("rewards",), fills=())
def by_hand(batch, key, cfg, *, actor):
    return {"actor": actor}, {}


@contract(on_device=True)
def reads_records(prompts, key, cfg, *, sample):
    return sample(prompts, key, n=len(prompts.records))


@contract(on_device=True)
def scores_for_itself(prompts, key, cfg, *, sample):
    batch, _ = sample(prompts, key, n=cfg.samples_per_prompt)
    return Rollout(batch, prompts, None)


def test_a_rollout_of_ones_own_is_traced_with_the_prompts_that_it_draws(tmp_path):
    fields = dict(algorithm__collect=f"{__name__}.twice_as_many()", program_steps=2)
    with opened(config_of(tmp_path, **fields), tmp_path) as run:
        first = run.source.loader.position
        metrics = one_step(run)
        assert run.source.loader.position - first == 2 * 8  # of both steps
        assert metrics["batch/prompts"] == 8.0 and metrics["mine/longest"] <= 15
        drawn = [record.index for record in run.programs.taken[0].prompts.records]
        reported = {row.record.index for row in run.source.report.rows}
        assert len(drawn) == 8 and len(run.source.report.rows) == 16
        one_step(run)
        assert {row.record.index for row in run.source.report.rows} == {*drawn[4:]} != reported


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(algorithm__collect=f"{__name__}.reads_records()"), "reads prompts.records"),
        (dict(algorithm__collect=f"{__name__}.scores_for_itself()"), "a report of its own"),
        (dict(sampler__layout="mesh(tensor=1)", sampler__loop="device"), None),
    ],
    ids=["records", "report", "same layout"],
)
def test_what_cannot_be_traced_is_refused_before_a_step(tmp_path, fields, said):
    config = config_of(tmp_path, program_steps=2, **fields)
    if said is None:
        with opened(config, tmp_path) as run:
            assert one_step(run)["batch/prompts"] == 4.0
        return
    with pytest.raises(InputError, match=said), opened(config, tmp_path) as run:
        one_step(run)


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(rollouts__max_staleness=1), "max_staleness"),
        (dict(sampler__stop_strings=("a",)), "stop_strings"),
        (dict(algorithm__collect="dynamic()"), "dynamic.*on_device"),
        (dict(reward__function="valid_json()"), "valid_json.*no form for the device"),
        (dict(dataflow=f"{__name__}.by_hand"), "by_hand.*not one program"),
        (dict(sampler__loop="host"), "loop"),
        (dict(data__drop_above_pass_rate=0.9), "pass_rate"),
        (dict(environment__function="guess_number(high=3)"), "environment"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_host_takes_part_in_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(InputError, match=f"program_steps=2: .*{said}.*Fix: .*program_steps=1"):
        validate(config_of(tmp_path, program_steps=2, **fields))


def test_the_reward_of_a_task_or_of_a_files_rows_is_looked_at(tmp_path):
    """Where reward.function names none."""
    validate(config_of(tmp_path, program_steps=2, reward__function=""))  # that of the task
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1>", "ground_truth": "1", "data_source": "openai/gsm8k"}\n')
    fields = dict(reward__function="", data__train=str(rows), data__test="")
    with pytest.raises(InputError, match="by_source.*no form for the device"):
        validate(config_of(tmp_path, program_steps=2, **fields))


def counted_zeros(responses, fields):
    """Takes the zeros behind a text for letters of the ground truth, which has some behind it."""
    return (responses.text[:, :, None] == fields["truth"][:, None, :]).any(axis=2).mean(axis=1)


@contract(on_device=DeviceForm(counted_zeros, lambda ground_truth: {"truth": np.zeros(9, "uint8")}))
def zeros(response, ground_truth):
    return 0.25


def test_a_form_that_scores_otherwise_than_the_reward_is_refused(tmp_path):
    fields = dict(reward__function=f"{__name__}.zeros()", program_steps=2)
    said = r"zeros.*differ on 16 of 16 responses: got .* on the device and 0.25 of the text"
    with opened(config_of(tmp_path, **fields), tmp_path) as run:
        with pytest.raises(InputError, match=said):
            one_step(run)


def test_a_row_that_the_form_cannot_decide_on_is_masked_and_counted(tmp_path):
    fields = dict(
        data__train="sort_digits(prompts=300, test=8, worked_examples=8)",
        reward__function="exact_match()",
    )
    with opened(config_of(tmp_path, program_steps=2, **fields), tmp_path) as run:
        scorer = run.programs.static.scorer
        scorer.unknown[5] = True  # as a token that has no text
        metrics = one_step(run)
        rows = run.source.report.rows
    failed = [5 in row.sample["token_ids"] for row in rows]
    assert 0 < sum(failed) < len(rows) == 16
    assert metrics["reward/errors"] == sum(failed) and metrics["skipped_steps"] == 0.0
    scores = [row.score.value for row in rows if row.score.status == "ok"]
    assert metrics["reward/mean"] == pytest.approx(np.mean(scores))
    assert [row.score.status == "error" for row in rows] == failed
    assert "cannot decide" in next(row.score.message for row in rows if row.score.status == "error")


@pytest.mark.slow
def test_the_collector_does_not_look_at_what_exists_when_a_run_has_settled(tmp_path):
    """Each step makes an object for every sample, and the collector would look at all traced
    programs again and again."""
    compiles.watch()
    gc.unfreeze()
    try:
        with opened(config_of(tmp_path, program_steps=3), tmp_path) as run:
            for _ in range(3):  # one program, which is compiled
                one_step(run)
            assert not run.steady and not gc.get_freeze_count()
            one_step(run)
            assert run.steady and gc.get_freeze_count() > 100_000
            before = gc.get_freeze_count()
            one_step(run)
            assert gc.get_freeze_count() <= before  # once is enough
    finally:
        gc.unfreeze()
