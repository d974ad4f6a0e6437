"""Reports of a reward: calls are independent, scored text starts where the prompts say, and
reports of several rounds are joined."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import lanes
from rollout_cases import ASKED, Letters, asked_prompts, policy
from sampler_cases import EOS, shallow
from tiny_tokenizer import write_tokenizer

from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.environments.messages import EpisodeLimits
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout import EpisodeRules, Reward, RewardReport, ScoredRow, make_sample
from rljax.rollout.players.episodes.log import Trajectory, summed_parts
from rljax.rollout.players.episodes.outcomes import seat_scores
from rljax.rollout.scoring.reward import parts_of
from rljax.sampler import Sampling

SHORT = Sampling(max_response_tokens=4, stop_ids=(EOS,))
LENGTH = "length_under(max_tokens=3)"


@pytest.fixture(scope="module")
def pool():
    with RewardPool(LENGTH, workers=1) as made:
        yield made


def row(value, group, *, prompt_id=None, source="", data_source="toy", **fields) -> ScoredRow:
    record = PromptRecord(
        "p", np.ones(1, np.int32), "", data_source, {}, 0, prompt_id=prompt_id, source=source
    )
    sample = {"prompt": "p", "response": "r", "ground_truth": "", "finish_reason": "stop"}
    score = Score(value, {"score": value, **fields}, "ok", 0.0)
    if np.isnan(value):
        score = Score(value, {}, "error", 0.0, "ValueError: no")
    return ScoredRow(sample, score, record, group)


def test_metrics_of_a_report():
    report = RewardReport(
        (
            row(1.0, 0, prompt_id=3),
            row(0.0, 0, prompt_id=3),
            row(np.nan, 1),
            row(0.5, 1, style=2.0),
        ),
        ({"process/lines": 1.0}, {"process/lines": 2.0}),
    )
    assert report.metrics() == {
        "reward/errors": 1.0,
        "reward/timeouts": 0.0,
        "reward/errors/ValueError": 1.0,
        "reward/failed_fraction/toy": 0.25,
        "reward/source/toy": 0.5,
        "reward/part/score": 0.5,
        "reward/part/style": 2.0,
        "reward/all_equal": 0.0,
        "reward/equal_groups": 0.0,
        "reward/best_of_k": 1.0,
        "process/lines": 1.5,
    }
    assert report.outcomes == [(3, 1.0), (3, 0.0)]
    assert [x["status"] for x in report.examples] == ["ok", "ok", "error", "ok"]
    assert RewardReport().metrics() == {"reward/errors": 0.0, "reward/timeouts": 0.0}
    mixed = RewardReport((row(1.0, 0, source="a"), row(0.0, 1, data_source="b")))
    metrics = mixed.metrics()
    assert metrics["data/share/a"] == metrics["data/share/b"] == 0.5


def test_abstentions_are_counted_and_are_no_failures():
    silent = row(np.nan, 1)
    silent = dataclasses.replace(silent, score=Score(np.nan, {}, "abstained", 0.0, "None"))
    others = {"abstained/a": 1.0, "m/abstained/judge/b": 1.0, "c": 2.0}
    report = RewardReport((row(1.0, 0, **others), row(0.0, 0, a=3.0, c=0.0), silent))
    metrics = report.metrics()
    assert metrics["reward/abstained"] == metrics["reward/abstained/a"] == 1.0
    assert metrics["reward/abstained/m/judge/b"] == 1.0
    assert (metrics["reward/errors"], metrics["reward/failed_fraction/toy"]) == (0.0, 0.0)
    assert (metrics["reward/part/a"], metrics["reward/part/c"]) == (3.0, 1.0)
    assert not [name for name in metrics if name.startswith("reward/part/abstained")]
    assert metrics["reward/best_of_k"] == 1.0  # of the known scores


def test_a_part_that_all_abstained_from_keeps_its_place_among_the_others():
    """gdpo and mixed_parts weigh parts in the order of their names."""
    scores = [r.score for r in (row(1.0, 0, **{"abstained/a": 1.0, "b": 2.0}), row(0.0, 0, b=1.0))]
    np.testing.assert_array_equal(parts_of(scores), [[np.nan, 2.0], [np.nan, 1.0]])


def test_samples_over_a_limit_are_counted_with_and_without_a_score():
    """And whether they are the long ones: 2 of 4 pairs, and one draw."""
    rows = [
        (Score(np.nan, {}, "timeout", 9.0, "late"), 30),
        (Score(-1.0, {"score": -1.0}, "ok", 9.0, "late", over_limit=True), 10),
        (Score(1.0, {"score": 1.0}, "ok", 0.1), 10),
        (Score(0.0, {"score": 0.0}, "ok", 0.1), 20),
    ]
    rows = [
        dataclasses.replace(row(0.0, 0), score=score, sample={"num_tokens": n}) for score, n in rows
    ]
    metrics = RewardReport(tuple(rows)).metrics()
    assert (metrics["reward/timeouts"], metrics["reward/timeouts_scored"]) == (1.0, 1.0)
    assert metrics["reward/timeout_longer_fraction"] == 2.5 / 4
    assert metrics["reward/source/toy"] == 0.0  # of all that have a score
    assert "reward/timeout_longer_fraction" not in RewardReport(tuple(rows[:2])).metrics()


def test_the_share_of_responses_without_an_answer():
    """Parts called extracted, of the reward itself or of a member of a mixture; failed rows say
    nothing."""
    found = {"format/extracted": 1.0}
    rows = (row(1.0, 0, **found), row(0.0, 0, extracted=0.0), row(np.nan, 1), row(0.5, 1))
    rows += (row(0.5, 1, **{"gsm8k/format/extracted": 0.0}), row(1.0, 1, **found))
    report = RewardReport(rows)
    assert report.extraction_failed_fraction == 0.5
    assert report.metrics()["reward/extraction_failed_fraction"] == 0.5
    assert RewardReport((row(1.0, 0),)).extraction_failed_fraction is None


def test_prompts_of_different_rounds_stay_different_groups():
    """Each round numbers its prompts from 0; both samples of each prompt are equal."""
    rounds = [RewardReport((row(x, 0), row(x, 0))) for x in (0.0, 1.0)]
    both = RewardReport.joined(rounds)
    assert [scored.group for scored in both.rows] == [0, 0, 1, 1]
    assert both.metrics()["reward/equal_groups"] == 1.0
    assert both.metrics()["reward/all_equal"] == 0.0
    assert both.metrics()["reward/best_of_k"] == 0.5
    assert RewardReport.joined([]) == RewardReport()


def test_best_of_k_is_of_prompts_with_several_scores():
    """A failed sample is left out, and a prompt with one score has no best of several."""
    rows = (row(-1.0, 0), row(0.25, 0), row(np.nan, 0), row(9.0, 1), row(np.nan, 1))
    assert RewardReport((*rows, row(-1.0, 2), row(-0.5, 2))).metrics()["reward/best_of_k"] == -0.125
    assert "reward/best_of_k" not in RewardReport((row(1.0, 0), row(0.0, 1))).metrics()


@pytest.mark.slow
def test_two_rollouts_may_be_in_flight(pool):
    """The second is begun before the first is scored: neither report knows of the other."""
    model = shallow()
    actor = policy(model)
    reward = Reward(pool, Letters, model.mesh)
    asked = [asked_prompts(2), asked_prompts(3)]
    early, batches = [], []
    for key, prompts in enumerate(asked):
        early.append(reward.start_early(prompts, 2))
        batches.append(
            actor.generate(prompts, jax.random.key(key), ASKED, n=2, finished=early[-1].finished)
        )
    second, of_second = reward(batches[1], asked[1], early=early[1])
    first, of_first = reward(batches[0], asked[0], early=early[0])
    assert (len(of_first.rows), len(of_second.rows)) == (4, 6)
    for batch, prompts, report, scored in (
        (batches[0], asked[0], of_first, first),
        (batches[1], asked[1], of_second, second),
    ):
        alone, again = reward(batch, prompts)
        assert again.examples == report.examples and again.metrics() == report.metrics()
        np.testing.assert_array_equal(alone.scores, scored.scores)
    with pytest.raises(AssertionError, match="another rollout"):
        reward(batches[0], asked[0], early=early[1])


class Counting(RewardPool):
    """Counts the samples that were not scored early: those come one by one."""

    late = 0

    def submit(self, samples):
        self.late += len(samples) if len(samples) > 1 else 0
        return super().submit(samples)


@pytest.mark.parametrize("loop", lanes(["whole"], ["slots"]))
def test_the_scored_response_begins_at_starts(loop):
    """A prompt is continued from one token of a response: it is scored, not sampled."""
    model = shallow()
    actor = policy(model, **({"slots": 4} if loop == "slots" else {}))
    plain = asked_prompts(2)
    prompts = dataclasses.replace(plain, starts=plain.lengths - 1)
    key = jax.random.key(0)
    long = SHORT if loop == "whole" else ASKED
    with Counting(LENGTH, workers=1) as pool:
        reward = Reward(pool, Letters, model.mesh)
        batch, report = make_sample(actor, reward, long)(prompts, key, n=2)
        assert pool.late == (4 if loop == "whole" else 0)
        _, own = make_sample(actor, reward, long)(plain, key, n=2)
    for r, (whole, rest) in enumerate(zip(report.rows, own.rows, strict=True)):
        p = r // 2
        prefix = plain.tokens[p, plain.lengths[p] - 1 : plain.lengths[p]].tolist()
        assert whole.sample["response"] == Letters.decode(prefix) + rest.sample["response"]
        assert whole.sample["num_tokens"] == rest.sample["num_tokens"] + 1
        at = np.flatnonzero(np.asarray(batch.mask)[r])
        assert at[0] == plain.lengths[p]  # learning is about the sampled tokens alone


def test_prompts_joined_and_selected_keep_their_starts():
    plain = asked_prompts(3)
    begun = dataclasses.replace(plain, starts=plain.lengths - 1)
    both = plain.joined(begun)
    np.testing.assert_array_equal(both.starts, [*plain.lengths, *(plain.lengths - 1)])
    assert plain.joined(plain).starts is None
    some = both.select([4, 0])
    assert some.records == (plain.records[1], plain.records[0])
    np.testing.assert_array_equal(some.starts, [plain.lengths[1] - 1, plain.lengths[0]])
    np.testing.assert_array_equal(some.tokens, plain.tokens[[1, 0]])
    images = {"pixels": np.arange(3.0)[:, None, None]}
    chosen = dataclasses.replace(plain, images=images).select([2, 2, 0])
    np.testing.assert_array_equal(chosen.images["pixels"].ravel(), [2, 2, 0])


def test_a_reward_is_any_function(pool):
    """`sample` hands it the batch and the prompts, and returns what it returns."""
    prompts, said = asked_prompts(2), RewardReport((row(1.0, 0),))
    sample = make_sample(
        policy(shallow()), lambda batch, prompts: (batch.replace(mask=batch.mask * 0), said), SHORT
    )
    batch, report = sample(prompts, jax.random.key(0), n=2)
    assert report is said and not np.asarray(batch.mask).any() and isinstance(prompts, Prompts)


def test_samples_are_shown_with_the_special_tokens_within_them(tmp_path, pool):
    """A reward reads a response without special tokens; people see those that it ran over."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    reward = Reward(pool, tokenizer, None)
    end, start = (tokenizer.encode(text)[0] for text in ("<|im_end|>", "<|im_start|>"))
    record = PromptRecord("p", np.array([1]), "4", "toy", {}, 0)
    for ids, shown in (
        ([*tokenizer.encode("4"), end], "4"),
        ([*tokenizer.encode("4"), start, *tokenizer.encode("2"), end], "4<|im_start|>2"),
        (tokenizer.encode("4"), "4"),
    ):
        sample = reward.fields(record, ids, 1, 0)
        assert sample["response"] == shown.replace("<|im_start|>", "")
        assert (
            ScoredRow(sample, Score(1.0, {}, "ok", 0.0, ""), record, 0).example()["response"]
            == shown
        )


def test_parts_of_one_name_are_added_up():
    """Of turns, and of the reward that scores the last one; a part is not replaced by another."""
    sampling = Sampling(max_response_tokens=2)
    rules = EpisodeRules(EpisodeLimits(max_tokens=8), sampling)
    episode = Trajectory(0, 0, None, {}, np.zeros((1, 2), np.uint32))
    episode.parts = summed_parts({"style": 3.0, "tries": 1.0}, {"style": 0.5})
    [score] = seat_scores(episode, rules, {0: Score(2.0, {"style": 5.0}, "ok", 0.0)})
    parts = {"style": 8.5, "tries": 1.0, "outcome": 2.0, "turn_rewards": 0.0}
    assert (score.value, score.parts) == (2.0, parts)
