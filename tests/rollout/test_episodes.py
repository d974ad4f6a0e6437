"""Episodes of several turns: what is in the batch is what was drawn, and limits hold."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from role_programs import logprobs

from rljax.arrays import fetch
from rljax.batch import FinishReason, observed_tokens
from rljax.config import Config
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.evaluation.policy import evaluate
from rljax.keys import root_key
from rljax.policies import Policy
from rljax.rollout.players.episodes.driver import Driver
from rljax.rollout.players.episodes.rows import rows_of
from rljax.sampler import Layout, held_weights
from rljax.sampler.inputs import RequestKeys
from rljax.setup import build, initial_params, make_roles, open_players
from rljax.tracking.timing import collect
from rljax.training import train
from rljax.validation import validate

PROMPTS, SAMPLES = 4, 4


def config_of(function: str, **environment) -> Config:
    """4 prompts of 4 episodes; turns of at most 4 tokens, logs of 40."""
    config = Config(dataflow="grpo", steps=1)
    config.model = (
        "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"
    )
    config.model_settings.remat = "none"
    config.data.train, config.data.max_prompt_tokens = "tiny_environments.rows()", 4
    config.sampler.max_response_tokens = 4
    config.batch.prompts_per_step, config.batch.samples_per_prompt = PROMPTS, SAMPLES
    config.batch.sequences_per_optimizer_step = PROMPTS * SAMPLES
    config.environment.function, config.environment.workers = function, 1
    config.environment.max_tokens, config.environment.max_reply_tokens = 40, 8
    config.environment.max_turns = 6
    for name, value in environment.items():
        setattr(config.environment, name, value)
    config.trackers, config.compilation_cache = (), ""
    return config


@pytest.fixture(scope="module")
def actor():
    setup = build(config_of("tiny_environments.endless()"), jax.devices()[:1])
    params = initial_params(setup.config, setup.model)
    return make_roles(setup, setup.main, params)["actor"]


@contextlib.contextmanager
def environment_of(config, tmp_path):
    setup = build(config, jax.devices()[:1])
    environment = open_players(setup, tmp_path / "rewards.log")[0]
    with contextlib.closing(environment):
        yield setup, environment


def played(actor, config, tmp_path, *, n=SAMPLES, seed=0, **decoding):
    """(host batch, report, metrics) of one step's episodes."""
    with environment_of(config, tmp_path) as opened:
        return played_in(opened, actor, n=n, seed=seed, **decoding)


def played_in(opened, actor, *, n=SAMPLES, seed=0, **decoding):
    """The same in an environment that is open: no further process begins."""
    setup, environment = opened
    actor = dataclasses.replace(actor, decoding=dataclasses.replace(actor.decoding, **decoding))
    prompts = Prompts.from_records(setup.data.prompts[:PROMPTS], length=4)
    batch, report = environment.play(actor, prompts, root_key(seed), setup.rollouts.sampling, n=n)
    return fetch(batch), report, report.metrics()


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """The environment of count_letter, open."""
    config = config_of("tiny_environments.count_letter()")
    with environment_of(config, tmp_path_factory.mktemp("letters")) as opened:
        yield opened


@pytest.fixture(scope="module")
def counted(actor, letters):
    """What it plays."""
    return played_in(letters, actor)


@pytest.mark.slow
def test_what_is_learned_is_what_was_drawn(actor, counted):
    """Log-probs of the trainer's own pass over each log are the sampler's at mask 1, turn after
    turn: no token was rendered, tokenized or masked differently."""
    batch, report, metrics = counted
    again = fetch(logprobs(actor, batch))
    chosen = batch.mask > 0
    np.testing.assert_allclose(again[chosen], batch.sampler_logprobs[chosen], atol=2e-5)
    assert metrics["episode/turns"] == 3 and chosen.any(axis=1).all()
    assert (batch.step_ids[chosen] > 0).all() and batch.step_ids.max() == 3
    assert not chosen[:, :2].any()  # the prompt
    between = (batch.step_ids == 0) & (np.cumsum(chosen, axis=1) > 0) & (batch.segment_ids > 0)
    assert between.any() and not chosen[between].any()  # what was said to the policy
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(PROMPTS), SAMPLES))


@pytest.mark.slow
def test_what_the_environment_said_is_learned_beside_grpo(counted, tmp_path):
    """Two steps with ECHO's term; its tokens are those that stand between the turns."""
    batch, _, _ = counted
    between = (batch.step_ids == 0) & (np.cumsum(batch.step_ids, axis=1) > 0)
    between &= np.cumsum(batch.step_ids[:, ::-1], axis=1)[:, ::-1] > 0
    np.testing.assert_array_equal(observed_tokens(batch), between)
    assert between.any(axis=1).all()
    config = config_of("tiny_environments.count_letter()")
    config.algorithm.observation_coef, config.algorithm.entropy_target = 0.1, 50.0
    config.steps, config.run_dir, config.export = 2, str(tmp_path / "run"), False
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [row["observation_loss"] for row in rows if "observation_loss" in row]
    assert len(losses) == 2 and all(0 < loss < 50 for loss in losses)
    coefs = [r["entropy_controller/coef"] for r in rows if "entropy_controller/coef" in r]
    assert coefs == pytest.approx([0.0, 0.005])


@pytest.mark.slow
def test_turns_are_paid_where_they_end(counted):
    batch, report, _ = counted
    for row, scored in enumerate(report.rows):
        ends = [np.flatnonzero(batch.step_ids[row] == k).max() for k in (1, 2, 3)]
        assert set(np.flatnonzero(batch.rewards[row])) <= set(ends)
        paid = batch.rewards[row, ends[:2]].sum()
        assert paid == pytest.approx(scored.score.parts["turn_rewards"])
        assert batch.rewards[row].sum() == pytest.approx(batch.scores[row], abs=1e-6)
        assert batch.scores[row] == pytest.approx(scored.score.value)
        # The state of a turn is the one that it was played in: nothing was found before the first.
        assert batch.state_ids[row, ends[0]] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [dict(slots=3), dict(slots=7), dict(slots=7, page_tokens=4, pages=20)]
)
def test_no_draw_depends_on_slots(actor, letters, counted, how):
    whole, _, _ = counted
    few, _, metrics = played_in(letters, actor, **how)
    assert ("pages/occupancy" in metrics) == ("pages" in how)
    for name in ("tokens", "mask", "rewards", "scores", "step_ids", "finish_reason"):
        np.testing.assert_array_equal(getattr(few, name), getattr(whole, name), err_msg=name)
    np.testing.assert_allclose(few.sampler_logprobs, whole.sampler_logprobs, atol=1e-5)


@pytest.mark.slow
def test_no_draw_depends_on_the_layout(letters, counted):
    """Weights split over two devices decode whole on each of them, brought there once."""
    config = config_of("tiny_environments.count_letter()")
    whole, _, _ = counted
    setup = build(config, jax.devices()[:2])
    two = make_roles(setup, setup.main, initial_params(config, setup.model))["actor"]
    layout = dataclasses.replace(two.decoding, layout=Layout(data=2))
    with collect() as timings, held_weights():
        for _ in range(2):
            batch, _, _ = played_in(letters, dataclasses.replace(two, decoding=layout), slots=4)
    for name in ("tokens", "mask", "rewards", "scores", "step_ids", "finish_reason"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name), err_msg=name)
    np.testing.assert_allclose(batch.sampler_logprobs, whole.sampler_logprobs, atol=1e-5)
    assert timings.synced_bytes == sum(2 * x.nbytes for x in jax.tree.leaves(two.state.params))


def test_failures_are_masked_and_siblings_stay(actor, tmp_path):
    config = config_of("tiny_environments.fails(share=0.4)", max_failed=1.0, retries=1)
    batch, report, metrics = played(actor, config, tmp_path)
    lost = ~(batch.mask > 0).any(axis=1)
    assert 0 < lost.sum() < len(lost)
    assert metrics["env/failed"] == lost.sum() and metrics["env/retried"] == lost.sum()
    assert {row.score.status for row, gone in zip(report.rows, lost, strict=True) if gone} == {
        "error"
    }
    assert all("no such world" in row.score.message for row in report.rows if row.score.message)
    group = np.repeat(np.arange(PROMPTS), SAMPLES)
    np.testing.assert_array_equal(batch.group[~lost], group[~lost])
    assert len({*batch.group[lost]}) == lost.sum() and batch.group[lost].min() >= PROMPTS
    assert not batch.scores[lost].any() and not batch.rewards[lost].any()


@pytest.mark.slow
def test_too_many_failures_end_the_run_with_their_reasons(actor, tmp_path):
    config = config_of("tiny_environments.fails(share=0.4)", max_failed=0.05, retries=0)
    with pytest.raises(InputError, match="episodes failed, each once.*no such world") as error:
        played(actor, config, tmp_path)
    assert "tiny_environments.py" in str(error.value)  # with its traceback
    assert error.value.parts[1].startswith("correct that line of the environment")


@pytest.mark.slow
@pytest.mark.parametrize("share, most, ends", [(1.0, 0.05, True), (0.0, 0.0, False)])
def test_one_failure_of_one_is_too_many(actor, tmp_path, share, most, ends):
    config = config_of(f"tiny_environments.fails(share={share})", max_failed=most, retries=0)
    with environment_of(config, tmp_path) as (setup, environment):
        prompts = Prompts.from_records(setup.data.prompts[:1], length=4)
        sampling = setup.rollouts.sampling
        raises = pytest.raises(InputError, match="1 of 1 episodes failed")
        with raises if ends else contextlib.nullcontext():
            environment.play(actor, prompts, root_key(0), sampling, n=1)


@pytest.mark.slow
def test_a_failed_episode_keeps_no_reward_of_its_turns(actor, tmp_path):
    config = config_of("tiny_environments.pays_and_fails()", max_failed=1.0, retries=0)
    batch, _, metrics = played(actor, config, tmp_path)
    assert metrics["episode/ended/failed"] == 1.0 and metrics["group/dead"] == 1.0
    assert not batch.rewards.any() and not batch.mask.any() and not batch.scores.any()


LIMITED = [({"max_calls": 1}, "every()"), ({"on_bad_call": "end"}, "unreadable()")]


@pytest.mark.slow
@pytest.mark.parametrize("limits, calls", LIMITED)
def test_a_limit_of_calls_is_the_reason_of_the_end(actor, tmp_path, limits, calls):
    """The environment is asked once more, without the call, and returns: still the limit ended
    it, and what it returned counts."""
    limits["calls"] = f"tiny_environments.{calls}"
    config = config_of("tiny_environments.until_no_call()", **limits)
    batch, report, metrics = played(actor, config, tmp_path)
    assert metrics["episode/ended/turns"] == 1.0
    assert (batch.finish_reason == FinishReason.TURNS).all() and (batch.scores == 7).all()


@pytest.mark.slow
def test_masked_turns_leave_their_rewards_to_the_rest(actor, tmp_path, monkeypatch):
    """Rewards sum to the return, also where the last row of an episode is not learned from."""

    def with_bad_turns(episodes, *rest, **options):
        for episode in episodes:
            for turn in episode.logs[1].turns:
                turn.bad = True
        return rows_of(episodes, *rest, **options)

    monkeypatch.setattr("rljax.rollout.players.episodes.episodes.rows_of", with_bad_turns)
    config = config_of("tiny_environments.pays_then_anew()", mask_bad_turns=True, max_rows=2)
    config.batch.samples_per_prompt = 8
    batch, report, _ = played(actor, config, tmp_path, n=8)
    rewards = batch.rewards.reshape(-1, 2, 40).sum(axis=(1, 2))
    np.testing.assert_allclose(rewards, batch.scores[::2])
    np.testing.assert_array_equal(batch.group[::2], batch.group[1::2])
    assert (batch.scores == 6).all() and (batch.mask[::2].any(axis=1)).all()
    assert not batch.mask[1::2].any()


@pytest.mark.slow
def test_an_episode_of_masked_turns_alone_is_in_nobodys_baseline(actor, tmp_path, monkeypatch):
    """It keeps no score, and a group of its own, as a failed one does."""

    def with_bad_turns(episodes, *rest, **options):
        for turn in episodes[1].logs[0].turns:
            turn.bad = True
        return rows_of(episodes, *rest, **options)

    monkeypatch.setattr("rljax.rollout.players.episodes.episodes.rows_of", with_bad_turns)
    config = config_of("tiny_environments.count_letter()", mask_bad_turns=True)
    batch, _, _ = played(actor, config, tmp_path)
    assert not batch.mask[1].any() and not batch.rewards[1].any() and batch.scores[1] == 0
    assert batch.group[1] >= PROMPTS and (batch.group[[0, 2, 3]] == 0).all()


@pytest.mark.slow
def test_each_seat_has_a_row_and_a_return_of_its_own(actor, tmp_path):
    config = config_of("tiny_environments.two_seats()")
    batch, report, metrics = played(actor, config, tmp_path)
    np.testing.assert_array_equal(batch.seat, np.arange(PROMPTS * SAMPLES) % 2)
    first, second = batch.scores[::2], batch.scores[1::2]
    np.testing.assert_allclose(first, -second)
    group = np.repeat(np.arange(PROMPTS), SAMPLES) * 2 + batch.seat
    np.testing.assert_array_equal(batch.group, group)
    again = fetch(logprobs(actor, batch))
    chosen = batch.mask > 0
    np.testing.assert_allclose(again[chosen], batch.sampler_logprobs[chosen], atol=2e-5)
    assert metrics["episode/turns"] == 4
    with pytest.raises(InputError, match="a multiple of the rows of an episode: 2 seats"):
        played(actor, config, tmp_path, n=3)


@pytest.mark.slow
def test_an_episode_without_an_outcome_is_scored_by_its_last_turn(actor, tmp_path):
    config = config_of("tiny_environments.last_turn()")
    config.reward.function = "tiny_environments.first_letter_and_turns()"
    batch, report, _ = played(actor, config, tmp_path)
    for row, scored in enumerate(report.rows):
        at = batch.step_ids[row] == 2
        text = scored.sample["response"]
        assert len(text) == sum(batch.tokens[row, at] > 1)
        assert batch.scores[row] == 10 * 2 + text.count("a")
        assert [m["role"] for m in scored.sample["conversation"]].count("assistant") == 2


@pytest.mark.slow
@given(
    turns=st.integers(1, 4),
    tokens=st.integers(7, 30),
    response=st.integers(1, 4),
    reply=st.integers(1, 6),
)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_limits_hold(actor, tmp_path, turns, tokens, response, reply):
    """No log is longer than max_tokens, no episode has more turns, no turn more tokens, and the
    last token of a log is the policy's."""
    config = config_of(
        "tiny_environments.endless()", max_turns=turns, max_tokens=40, max_reply_tokens=reply
    )
    config.sampler.max_response_tokens = response
    with environment_of(config, tmp_path) as (setup, environment):
        limits = dataclasses.replace(environment.rules.limits, max_tokens=tokens)
        environment.rules = dataclasses.replace(environment.rules, limits=limits)
        prompts = Prompts.from_records(setup.data.prompts[:PROMPTS], length=4)
        batch, _ = environment.play(actor, prompts, root_key(1), setup.rollouts.sampling, n=1)
    batch = fetch(batch)
    lengths = (batch.segment_ids > 0).sum(axis=1)
    assert lengths.max() <= tokens and batch.step_ids.max() <= turns
    for row, length in enumerate(lengths):
        assert batch.mask[row, length - 1] == 1
        sizes = np.bincount(batch.step_ids[row])[1:]
        assert sizes.max() <= response
        full = batch.step_ids[row].max() == turns
        reason = FinishReason.TURNS if full else FinishReason.LENGTH
        assert batch.finish_reason[row] == reason


@pytest.mark.slow
def test_limits_of_a_turn_hold_for_that_turn(actor, tmp_path):
    config = config_of("tiny_environments.limited()")
    config.sampler.max_response_tokens = 12
    config.environment.max_tokens = 60
    batch, report, _ = played(actor, config, tmp_path)
    stops = set(build(config, jax.devices()[:1]).tokenizer.encode("abcd"))
    ended = 0
    for tokens, steps, mask in zip(batch.tokens, batch.step_ids, batch.mask, strict=True):
        first = tokens[steps == 1].tolist()
        assert not stops & set(first[:-1])
        ended += first[-1] in stops
        assert mask[steps == 1].all()
        assert 0 < (steps == 2).sum() <= 2
    assert ended > len(batch.tokens) // 2
    assert (batch.scores == 1.0).all()


@pytest.mark.slow
def test_evaluation_plays_episodes(actor, tmp_path):
    with environment_of(config_of("tiny_environments.two_seats()"), tmp_path) as (setup, played):
        policy = Policy(actor, setup.tokenizer, setup.rollouts.sampling, 4)
        found = evaluate(policy, played, setup.data.test_prompts, samples=2, ks=(1, 2))
    assert found["turns"]["value"] == 4 and found["calls"]["value"] == 0
    assert 0 <= found["mean@2"]["value"] <= 1 and found["failed_rewards"] == 0


@pytest.mark.slow
def test_an_episode_over_its_seconds_ends_and_the_others_go_on(actor, tmp_path):
    config = config_of("tiny_environments.slow(seconds=0.2)", episode_timeout_s=0.5)
    batch, _, metrics = played(actor, config, tmp_path, n=1)
    assert metrics["episode/ended/time"] == 1.0 and (batch.finish_reason == FinishReason.TIME).all()
    assert 1 <= metrics["episode/turns"] < 8 and (batch.mask > 0).any(axis=1).all()


@pytest.mark.slow
def test_no_time_passes_for_episodes_while_nothing_is_played(actor, tmp_path):
    """As while the policy learns: the seconds of episodes in flight are those of their driver."""
    with environment_of(config_of("tiny_environments.endless()"), tmp_path) as (setup, environment):
        prompts = Prompts.from_records(setup.data.prompts[:1], length=4)
        driver = Driver(
            environment.sampler(environment.engine(actor, 2)), environment.crew, environment.rules
        )
        for episode in environment.episodes(prompts, 0, 0, RequestKeys(root_key(0)), 2):
            driver.admit(episode)
        while not driver.sampler.pending:
            driver.look()
        driver.look()
        played = driver.seconds
        assert played > 0
        driver.rest()
        driver.look()
        assert driver.seconds == played
        driver.look()
        assert driver.seconds > played
        driver.close()


PROBLEMS = {
    "tiny_environments.LETTERS": "environment.function",
    "tiny_environments.rows()": "generator function",
    "no_such_module.play()": "environment.function",
    "tiny_environments.two_seats()": "batch.samples_per_prompt=3: an episode takes 2 seats x 1",
}


@pytest.mark.parametrize("function", PROBLEMS)
def test_a_wrong_environment_is_a_problem_of_the_config(function):
    config = config_of(function)
    config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 3, 12
    with pytest.raises(InputError) as error:
        validate(config)
    assert PROBLEMS[function] in str(error.value)


def test_settings_that_nothing_would_read_are_said():
    config = config_of("")
    config.environment.workers = 2
    (found,) = [text for text in validate(config) if "environment.function is off" in text]
    assert "environment.max_turns=6" in found
    config = config_of("tiny_environments.endless()")
    config.reward.model = "somewhere"
    with pytest.raises(InputError, match="reward.model='somewhere'"):
        validate(config)


@pytest.mark.slow
def test_a_row_that_lacks_a_field_is_named_before_anything_is_compiled(tmp_path):
    config = config_of("tiny_environments.wants_more()")
    with environment_of(config, tmp_path) as (setup, environment):
        with pytest.raises(InputError, match="wants_more.*needs 'world'"):
            environment.first_exchange(setup.data.prompts[0])


@pytest.mark.slow
def test_a_resumed_run_plays_the_same_episodes(tmp_path):
    """Four steps, and two and two: the same weights to the last bit, the same episodes."""

    def run(folder, steps, allow=()):
        config = config_of("tiny_environments.count_letter()")
        config.steps, config.run_dir = steps, str(tmp_path / folder)
        config.checkpoint.every_steps, config.checkpoint.allow_changed = 2, allow
        config.samples_every_steps = 1
        train(config, devices=jax.devices()[:1])
        lines = (tmp_path / folder / "episodes.jsonl").read_text().splitlines()
        weights = (tmp_path / folder / "policy" / "model.safetensors").read_bytes()
        return weights, [line for line in lines if '"step": 4' in line]

    whole = run("whole", 4)
    run("halves", 2)
    assert run("halves", 4, ("steps",)) == whole and whole[1]
