"""Runs whose episodes outlive the step in which they began."""

import jax
import numpy as np
import pytest
from conftest import lanes
from tiny_run import metrics_rows, policy_bytes, saved_state, tiny_config, train_on_one

from rljax.errors import InputError
from rljax.evaluation.policy import evaluate
from rljax.policies import Policy
from rljax.setup import build
from rljax.training import sources
from rljax.training.run import Run

EXACT = ("tokens", "mask", "rewards", "scores", "step_ids", "group", "finish_reason", "episode")


def a_config(folder, function: str, **fields):
    """Turns of 4 tokens at most, logs of 40; nothing learned before."""
    plain = dict(
        sft__steps=0,
        evaluate__every_steps=0,
        steps=5,
        reward__function="",
        reward__workers=2,
        data__train="tiny_environments.rows()",
        data__max_prompt_tokens=4,
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)",
        environment__function=f"tiny_environments.{function}",
        environment__workers=1,
        environment__max_tokens=40,
        environment__max_reply_tokens=8,
        environment__max_turns=6,
        sampler__max_response_tokens=4,
        actor_optimizer__warmup_steps=0,
        algorithm__policy_loss="cispo(behaviour='sampler')",
    )
    return tiny_config(folder, **{**plain, **fields})


def batches_of(config, folder, steps: int, between=lambda run: None) -> tuple[list, dict]:
    """The batches and metrics of a run's first steps, and its weights."""
    found = []
    with Run(build(config, devices=jax.devices()[:1]), folder) as run:
        run.checkpoints.prepare()
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        take = run.source.next

        def next_one(step, roles):
            batch, metrics = take(step, roles)
            found.append((jax.tree.map(np.asarray, batch), metrics))
            return batch, metrics

        run.source.next = next_one
        for _ in range(steps):
            run.step()
            between(run)
        return found, jax.tree.map(np.asarray, run.roles["actor"].state.weights)


@pytest.mark.slow
@pytest.mark.parametrize("function", lanes(["two_seats()"], ["count_letter()", "begins_anew()"]))
def test_without_staleness_tickets_play_what_play_plays(tmp_path, monkeypatch, function):
    """The same tokens, seeds, rewards, rows and groups, step after step."""
    rows = dict(environment__max_rows=2) if function == "begins_anew()" else {}
    config = a_config(tmp_path / "plain", function, **rows)
    want, weights = batches_of(config, tmp_path / "a", 3)
    make = sources.RolloutSource.__init__

    def with_tickets(self, *args):
        make(self, *args)
        self.in_flight = self._flight()

    monkeypatch.setattr(sources.RolloutSource, "__init__", with_tickets)
    found, others = batches_of(config, tmp_path / "b", 3)
    for (batch, _), (other, metrics) in zip(want, found, strict=True):
        for name in EXACT:
            np.testing.assert_array_equal(getattr(batch, name), getattr(other, name), name)
        np.testing.assert_allclose(batch.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
        assert metrics["staleness/steps_max"] == 0 == metrics["queue/open"]

    def close(one, other):
        return np.testing.assert_allclose(one, other, atol=1e-5)

    jax.tree.map(close, weights, others)


@pytest.mark.slow
def test_slow_environments_stay_below_the_bound_and_evaluation_plays_beside_them(tmp_path):
    """Episodes in flight wait while others are played at once, and lose no step of theirs."""
    bound = dict(rollouts__max_staleness=2, rollouts__ahead=2, sampler__slots=8)
    config = a_config(tmp_path / "r", "slow(seconds=0.004)", **bound, environment__max_turns=10)
    evaluated, open_after = [], []

    def between(run):
        policy = Policy(run.roles["actor"], run.setup.tokenizer, run.setup.rollouts.sampling, 4)
        found = evaluate(policy, run.eval_player, run.setup.data.test_prompts, samples=1, ks=(1,))
        evaluated.append(found["mean@1"]["value"])
        open_after.append(run.source.in_flight.tickets)
        open_after[-1].check()

    found, _ = batches_of(config, tmp_path / "a", 4, between)
    assert evaluated == [1.0] * 4  # its eighth reply is the last
    metrics = [one for _, one in found]
    assert max(one["staleness/steps_max"] for one in metrics) == 2
    assert any(one["staleness/partial_fraction"] > 0 for one in metrics)
    assert all(one["queue/open"] > 0 and one["env/failed"] == 0 for one in metrics)
    assert all((batch.scores == 1).all() and batch.mask.any(axis=1).all() for batch, _ in found)
    last = open_after[-1]
    assert last.trained == 4 * 4 and last.admitted == last.trained + len(last.open)


def whole_and_parts(tmp_path, function: str, **fields) -> list:
    """The runs "whole", 6 steps, and "parts", the same in two processes' worth."""
    how = dict(rollouts__max_staleness=2, rollouts__ahead=2, rollouts__clock="logical(2)")
    how |= dict(sampler__slots=6, checkpoint__every_steps=2) | fields
    train_on_one(a_config(tmp_path / "whole", function, **how, steps=6))
    train_on_one(a_config(tmp_path / "parts", function, **how, steps=4))
    again = dict(steps=6, checkpoint__allow_changed=("steps",))
    train_on_one(a_config(tmp_path / "parts", function, **how, **again))
    folders = [tmp_path / name for name in ("whole", "parts")]
    return [saved_state(one, 6)["sources"]["rl"]["in_flight"]["groups"] for one in folders]


WALL = ("episode/seconds", "env/seconds", "calls/seconds", "env/replayed", "env/killed")


def without_seconds(state):
    """A state without what the wall's clock says."""
    if isinstance(state, dict):
        drop = ("age_s", "seconds", "waited_s", "call_seconds", "scores")
        return {k: without_seconds(v) for k, v in state.items() if k not in drop}
    return [without_seconds(one) for one in state] if isinstance(state, list) else state


@pytest.mark.parametrize(
    "function, fields",
    [
        pytest.param("uneven()", dict(sampler__slots=12), marks=pytest.mark.slow),
        pytest.param("lives()", {}, marks=pytest.mark.slow),
        pytest.param(
            "last_turn()",
            dict(reward__function="tiny_environments.first_letter_and_turns()"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "begins_anew()",
            dict(environment__max_rows=2, rollouts__ahead=1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "two_seats()",
            dict(rollouts__in_flight_cache="reread", sampler__page_tokens=4),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, function, fields):
    """Episodes were in flight, some at their environment: the same tokens, weights and metrics.
    What cannot be repeated begins anew in both."""
    whole, parts = whole_and_parts(tmp_path, function, **fields)
    assert policy_bytes(tmp_path / "whole") == policy_bytes(tmp_path / "parts")
    rows = [metrics_rows(tmp_path / name) for name in ("whole", "parts")]
    for row in (*rows[0], *rows[1]):
        for name in [name for name in row if name.startswith(WALL)]:
            del row[name]
    # (Step 4 was the last one once, and was evaluated.)
    assert rows[0][4:] == rows[1][4:] and rows[0][:3] == rows[1][:3]
    assert without_seconds(whole) == without_seconds(parts)
    episodes = [one for group in whole.values() for one in group["episodes"]]
    marks = {len(one["marks"]) for one in episodes if one["finish"] is None}
    middle = len(marks) > 1 or function == "lives()"  # which begin anew at each checkpoint
    assert middle, "no episode was in its middle"
    ended = any(one["finish"] is not None for one in episodes)
    assert ended or function != "uneven()", "none has ended before its group"


@pytest.mark.slow
def test_a_worker_that_is_killed_in_flight_costs_the_guilty_alone(tmp_path):
    """Its episode fails, is played anew and fails again; neighbours go on, also those of other
    steps."""
    bound = dict(rollouts__max_staleness=1, sampler__slots=8)
    how = dict(environment__max_failed=0.8, environment__retries=1, **bound)
    config = a_config(tmp_path / "r", "exits(share=0.1)", **how)
    found, _ = batches_of(config, tmp_path / "a", 3)
    lost = [~(batch.mask > 0).any(axis=1) for batch, _ in found]
    for (batch, metrics), gone in zip(found, lost, strict=True):
        assert metrics["env/failed"] == gone.sum() and (batch.scores[~gone] == 1).all()
    assert 0 < np.sum(lost) < np.size(lost)
    assert sum(metrics["env/killed"] for _, metrics in found) > 0


@pytest.mark.slow
def test_dead_groups_of_episodes_are_dropped(tmp_path):
    """Some prompts have one outcome for all; what is learned has two."""
    bound = dict(rollouts__max_staleness=2, sampler__slots=8, algorithm__collect="active()")
    config = a_config(tmp_path / "r", "some_dead()", **bound)
    found, _ = batches_of(config, tmp_path / "a", 4)
    assert sum(metrics["queue/dropped"] for _, metrics in found) > 0
    for batch, metrics in found:
        pairs = {(int(g), float(s)) for g, s in zip(batch.group, batch.scores, strict=True)}
        assert len(pairs) == 2 * 4 and metrics["group/dead"] == 0


@pytest.mark.slow
def test_failures_in_groups_that_were_dropped_are_counted(tmp_path):
    """What fails wherever the policy does badly would else keep its probability."""
    bound = dict(rollouts__max_staleness=2, sampler__slots=8, algorithm__collect="active()")
    config = a_config(tmp_path / "r", "some_dead(fail=True)", **bound, environment__retries=0)
    with pytest.raises(InputError, match="episodes failed, each once.*no such world"):
        batches_of(config, tmp_path / "a", 4)
