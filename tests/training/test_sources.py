"""Sources: stored rollouts are replayed and mixed in, and what only sampling reads recompiles no
learning."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import lanes
from golden_checks.common import response_batch
from preset_runs import Shared, preset_config
from role_programs import logprobs

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.rollout import player_of
from rljax.setup import build
from rljax.setup.setup import sampled_prompts
from rljax.tracking import compiles
from rljax.training import sources
from rljax.training.run import Run
from rljax.training.sources import MixedSource, ReplaySource, RolloutSource
from rljax.validation import validate


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("sources"))
    yield runs
    runs.close()


def begun(run, params):
    run.begin(run.setup.main, jax.device_put(params, run.setup.model.shardings()))
    return run


@pytest.fixture(scope="module")
def stored(shared, tmp_path_factory):
    """Every sample of a step, as launchers/rejection_sample.py --trajectories writes it."""
    run = begun(shared.run(preset_config("grpo")), shared.start(0))
    batch, _ = run.source.next(0, run.roles)
    host, rows = jax.device_get(batch), []
    for b, scored in enumerate(run.source.report.rows):
        chosen = host.mask[b] > 0
        text, ended = scored.sample["response"], int(host.finish_reason[b]) == 0
        ids = run.setup.tokenizer.encode(text) + list(run.setup.tokenizer.eos_ids[:1]) * ended
        if not text or ids != host.tokens[b][chosen].tolist():  # text that another text would be
            continue
        rows.append(
            {
                "prompt": scored.record.prompt_text,
                "completion": scored.sample["response"],
                "reward": float(host.scores[b]),
                "truncated": int(host.finish_reason[b]) != 0,
                "logprobs": host.sampler_logprobs[b][chosen].tolist(),
            }
        )
    path = tmp_path_factory.mktemp("stored") / "trajectories.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path, host


def config_of(path, share=1.0, **algorithm):
    config = preset_config("grpo")
    config.rollouts = dataclasses.replace(config.rollouts, replay=str(path), replay_share=share)
    config.algorithm = dataclasses.replace(config.algorithm, **algorithm)
    return config


def test_replayed_rollouts_are_the_rows_that_were_sampled(shared, stored):
    path, host = stored
    run = begun(shared.run(config_of(path)), shared.start(0))
    assert isinstance(run.source, ReplaySource)
    batch, metrics = run.source.next(0, run.roles)
    replayed = jax.device_get(batch)
    n = run.config.batch.samples_per_prompt
    assert metrics["replay/prompts"] == run.config.batch.prompts_per_step
    assert (np.bincount(replayed.group) == n).all()
    # Rows are shuffled by group; each is one of the sampled ones, with its log-probs and reward.
    sampled = {}
    for tokens, mask, logps, score in zip(
        host.tokens, host.mask, host.sampler_logprobs, host.scores, strict=True
    ):
        key = (tuple(tokens[: int(np.max(np.flatnonzero(mask))) + 1]), float(score))
        sampled.setdefault(key, []).append(logps[mask > 0])
    for b in range(batch.rows):
        live = replayed.mask[b] > 0
        end = int(np.max(np.flatnonzero(live))) + 1
        logps = sampled[(tuple(replayed.tokens[b, :end]), float(replayed.scores[b]))]
        mine = replayed.sampler_logprobs[b][live]
        assert any(np.allclose(mine, x, atol=1e-6) for x in logps if len(x) == len(mine))
        assert replayed.rewards[b].sum() == replayed.scores[b]
    assert (replayed.policy_version[replayed.mask > 0] == -1).all()
    # Log-probs of the file are whole: nothing of the vocabulary was cut off from them.
    assert (replayed.sampler_log_kept == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "correction", lanes(["rollout_correction(level='token', upper=2.0)"], [""])
)
def test_the_policy_learns_from_stored_rollouts_alone(shared, stored, correction):
    """No reward is asked: the likelihood of the stored right answers rises."""
    path, host = stored
    config = config_of(path, correction=correction, kl_in_loss=0.0)
    run = begun(shared.run(config), shared.start(0))
    batch, _ = run.source.next(0, run.roles)

    def of_right_ones():
        logps = np.asarray(logprobs(run.roles["actor"], batch))
        return logps[right].mean()

    scores, group = np.asarray(batch.scores), np.asarray(batch.group)
    means = np.array([scores[group == g].mean() for g in group])
    right = (np.asarray(batch.mask) > 0) & (scores > means)[:, None]
    before = of_right_ones()
    rows = [run.step() for _ in range(6)]
    assert of_right_ones() > before + 0.05
    assert "batch/completions" not in rows[0] and rows[0]["replay/reward"] > 0


@pytest.mark.slow
def test_a_share_of_a_step_is_replayed(shared, stored):
    path, _ = stored
    run = begun(shared.run(config_of(path, share=0.25)), shared.start(0))
    assert isinstance(run.source, MixedSource)
    prompts = run.config.batch.prompts_per_step
    state = run.source.get_state()
    metrics = run.step()
    assert metrics["replay/prompts"] == prompts // 4
    assert metrics["batch/prompts"] == prompts - prompts // 4
    assert "batch/tokens" not in metrics  # which would be those of the stored rows alone
    assert np.isfinite(metrics["loss"]) and metrics["reward/all_equal"] in (0.0, 1.0)
    run.source.set_state(state)
    one, _ = run.source.next(0, run.roles)
    run.source.set_state(state)
    other, _ = run.source.next(0, run.roles)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    version = np.asarray(one.policy_version)[np.asarray(one.mask) > 0]
    assert (version == -1).any() and (version >= 0).any()
    assert len(np.unique(np.asarray(one.group))) == prompts  # no group holds both kinds


def test_a_share_of_a_step_is_replayed_beside_samples_in_flight(shared, stored):
    path, _ = stored
    config = config_of(path, share=0.25)
    config.rollouts.max_staleness = 1
    run = begun(shared.run(config), shared.start(0))
    prompts = run.config.batch.prompts_per_step
    sampled = prompts - prompts // 4
    rows = [run.step() for _ in range(3)]
    assert {row["replay/prompts"] for row in rows} == {prompts // 4}
    assert {row["queue/open"] for row in rows} == {float(sampled)}
    assert {row["batch/prompts"] for row in rows} == {float(sampled)}
    # Stored tokens are of no step: they make the policy's own no older.
    assert max(row["staleness/steps_max"] for row in rows) <= 1
    saved = json.loads(json.dumps(run.source.get_state()))
    assert len(saved["sampled"]["in_flight"]["groups"]) == sampled


@pytest.mark.parametrize(
    ("share", "sampled"), [(0.25, 6), (0.5, 4), (0.01, 7), (0.99, 1), (1.0, 0)]
)
def test_a_share_below_one_leaves_prompts_of_both_kinds(share, sampled):
    config = config_of("rows.jsonl", share)
    config.batch = dataclasses.replace(config.batch, prompts_per_step=8)
    assert sampled_prompts(config) == sampled
    config.rollouts.replay = ""
    assert sampled_prompts(config) == 8


def test_stored_rows_join_no_group_of_sampled_ones():
    """Nor that of a sample without a reward, which has a number of its own past the prompts'."""
    ours = response_batch(np.ones((4, 2)), np.float32, group=[0, 5, 6, 7], scores=[1, 2, 3, 4])
    theirs = response_batch(
        np.zeros((4, 2)), np.float32, group=[0, 0, 1, 1], rewards=np.ones((4, 2))
    )
    joined = sources._joined(ours, theirs, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    group = np.asarray(joined.group)
    assert not set(group[:4]) & set(group[4:])
    assert group[:4].tolist() == [0, 5, 6, 7] and group[4] == group[5] != group[6] == group[7]
    assert joined.scores is None and joined.rewards is None  # each is known of one half alone
    np.testing.assert_array_equal(joined.mask, np.repeat([1.0, 0.0], 4)[:, None] * np.ones(2))


def test_a_stored_trajectory_is_in_one_group_of_its_prompt():
    items = [
        SimpleNamespace(prompt_ids=np.array(prompt), logprobs=np.zeros(1), name=f"{prompt[0]}{i}")
        for i in range(5)
        for prompt in ([1, 2], [3])[: 2 if i < 3 else 1]
    ]
    groups = sources._groups(items, 2, "rows.jsonl")
    assert [[item.name for item in group] for group in groups] == [
        ["10", "11"],
        ["12", "13"],
        ["30", "31"],
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(replay_share=0.0), "above 0"),
        (dict(replay="", replay_share=0.5), "nothing to replay"),
        (dict(replay="absent.jsonl"), "does not exist"),
    ],
)
def test_what_cannot_be_replayed_is_said(stored, change, says):
    config = config_of(stored[0])
    config.rollouts = dataclasses.replace(config.rollouts, **change)
    with pytest.raises(InputError, match=says):
        validate(config)


def test_rows_without_log_probs_and_small_groups_are_refused(shared, stored, tmp_path):
    rows = [json.loads(line) for line in stored[0].read_text().splitlines()]
    bare = [{k: v for k, v in row.items() if k != "logprobs"} for row in rows]
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, bare)))
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
    for name, says in (("bare", "without logprobs"), ("few", "samples_per_prompt=3 or less")):
        setup = build(config_of(tmp_path / f"{name}.jsonl"), jax.devices()[:1])
        with pytest.raises(InputError, match=says):
            Run(setup, tmp_path / name, players=[player_of(shared.reward)])


def learning(since: int) -> int:
    """How many learning programs were compiled after the first `since` programs."""
    return sum("grpo" in name for name in compiles.names(since))


@pytest.mark.slow
def test_what_only_sampling_reads_recompiles_no_learning(shared):
    """A curriculum of temperatures, response lengths, collect rules and rewards: one program."""
    run = begun(shared.run(preset_config("grpo")), shared.start(0))
    setup, source = run.setup, run.source
    assert isinstance(source, RolloutSource)
    compiles.watch()
    before = compiles.count()
    run.step()
    assert learning(before) == 1
    before = compiles.count()
    sampling = setup.rollouts.sampling
    for change in (
        dict(sampling=dataclasses.replace(sampling, temperature=0.7)),
        dict(sampling=dataclasses.replace(sampling, top_p=0.9)),
        dict(sampling=dataclasses.replace(sampling, max_response_tokens=2)),
        dict(correct_at=0.5),
    ):
        source.setup = dataclasses.replace(setup, rollouts=setup.rollouts.replace(**change))
        if "temperature" in str(change):
            actor = dataclasses.replace(run.roles["actor"], temperature=0.7)
            run.roles["actor"] = actor
        metrics = run.step()
        assert np.isfinite(metrics["loss"]) and learning(before) == 0, change
    collect = dataclasses.replace(run.config.algorithm, collect="active(max_rounds=1)")
    other = build(dataclasses.replace(run.config, algorithm=collect), jax.devices()[:1])
    source.setup = dataclasses.replace(setup, rollout=other.rollout)
    source.player = player_of(lambda batch, prompts: shared.reward(batch, prompts))
    run.step()
    assert learning(before) == 0 and compiles.count() > before  # decoding did compile again


def test_log_probs_follow_the_temperature_without_another_program(shared):
    run = begun(shared.run(preset_config("grpo")), shared.start(0))
    batch, _ = run.source.next(0, run.roles)
    actor = run.roles["actor"]
    read = jax.jit(lambda role, batch: role.logprobs(batch))
    one = read(actor, batch)
    half = read(dataclasses.replace(actor, temperature=0.5), batch)
    assert read._cache_size() == 1
    live = np.asarray(batch.mask) > 0
    assert np.abs(np.asarray(half - one))[live].max() > 0.05
