"""Rewards made of rewards: sums, names of parts, fields, errors, one reward per data source."""

import pytest

from rljax.components import resolve
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rewards.mixing import SOURCES
from rljax.rewards.pool.calling import HOME, call_reward, late_score, prepare, wanted_fields
from rljax.rewards.pool.pool import RewardPool

SAMPLE = {
    "response": "<think>9 by 8</think><answer>72</answer>",
    "ground_truth": "72",
    "prompt": "?",
    "data_source": "openai/gsm8k",
    "extra_info": {"target_tokens": 10},
    "num_tokens": 12,
    "finish_reason": "stop",
}


def score(text: str, **fields) -> tuple[float, dict]:
    return call_reward(resolve(text, HOME), SAMPLE | fields)


def test_a_mixture_is_the_weighted_sum_with_the_parts_of_its_members():
    text = "mixture(rewards=('qa_exact_match()', 'format_tags(partial=0.5)'), weights=(0.8, -0.4))"
    value, parts = score(text)
    assert value == pytest.approx(0.8 - 0.4)
    assert parts == {
        "score": value,
        "qa_exact_match": 1.0,
        "format_tags": 1.0,
        "format_tags/ordered": 1.0,
        "format_tags/tag/think": 1.0,
        "format_tags/tag/answer": 1.0,
    }
    assert set(score(text[:-1] + ", inner_parts=False)")[1]) == {
        "score",
        "qa_exact_match",
        "format_tags",
    }
    value, parts = score(text, response="<answer>71</answer>")
    assert value == pytest.approx(0.8 * 0 - 0.4 * 0.25) and parts["format_tags"] == 0.25


def test_weights_default_to_one_and_may_be_normalised():
    rewards = "rewards=('qa_exact_match()', 'length_under(max_tokens=12)')"
    assert score(f"mixture({rewards})")[0] == 1.0
    assert score(f"mixture({rewards}, normalise=True)")[0] == 0.5
    assert score(f"mixture({rewards}, weights=(3, -1), normalise=True)")[0] == 0.75


def test_two_members_of_one_name_are_numbered():
    _, parts = score(
        "mixture(rewards=('length_under(max_tokens=12)', 'length_under(max_tokens=13)'))"
    )
    assert parts == {"score": 1.0, "length_under": 0.0, "length_under_2": 1.0}


def test_a_mixture_is_handed_what_its_members_want():
    wanted = wanted_fields(
        resolve("mixture(rewards=('length_under(max_tokens=3)', 'gsm8k()'))", HOME)
    )[0]
    assert {"response", "num_tokens", "ground_truth"} <= set(wanted)
    assert not {"prompt", "extra_info", "data_source", "finish_reason"} & set(wanted)
    nested = "mixture(rewards=('mixture(rewards=(\"l1_exact(correct=\\'gsm8k()\\')\",))',))"
    assert {"extra_info", "num_tokens", "ground_truth"} <= set(
        wanted_fields(resolve(nested, HOME))[0]
    )


def test_mixtures_and_lengths_nest():
    text = "mixture(rewards=('l1_exact(alpha=0.01, correct=\"qa_exact_match()\")',), weights=(2,))"
    value, parts = score(text)
    assert value == pytest.approx(2 * (1 - 0.02)) and parts["l1_exact/length_error"] == 2.0


def test_a_member_that_raises_makes_the_sample_an_error_and_is_named():
    text = "mixture(rewards=('format_tags()', 'gsm8k()'))"
    samples = [SAMPLE, SAMPLE | {"ground_truth": "seventy"}, SAMPLE]
    with RewardPool(text, workers=1) as pool:
        scores = pool.score(samples)
    assert [s.status for s in scores] == ["ok", "error", "ok"]
    assert "member 'gsm8k()': ValueError: ground_truth 'seventy'" in scores[1].message


@pytest.mark.parametrize(
    "text, message",
    [
        ("mixture()", "needs 'rewards'"),
        ("mixture(rewards=())", r"mixture\(rewards\): got \(\); at least one"),
        ("mixture(rewards=('gsm9k()',))", "did you mean gsm8k"),
        ("mixture(rewards=('gsm8k(x=1)',))", "no option 'x'"),
        ("mixture(rewards=('length_under()',))", "needs 'max_tokens'"),
        ("mixture(rewards='gsm8k()')", "rewards"),
        ("mixture(rewards=('gsm8k()',), weights=(1, 2))", "each of the 1 rewards"),
        ("mixture(rewards=('gsm8k()',), weights=(0,), normalise=True)", "divides by"),
        ("mixture(rewards=('gsm8k()',), weights=('a',))", "must be a tuple of float"),
        ("by_source(sources=(('a', 'gsm9k()'),))", "did you mean gsm8k"),
        ("l1_exact(correct='gsm9k()')", "did you mean gsm8k"),
    ],
)
def test_a_mixture_that_fits_no_sample_is_refused_before_the_first(text, message):
    with pytest.raises(InputError, match=message):
        RewardPool(text, workers=1)


# -- one reward per data source -------------------------------------------------------------------


def test_every_named_source_has_a_reward():
    response = "#### 72\n\\boxed{72}\nAnswer: 72\n<answer>72</answer>"
    for name, text in SOURCES:
        truth = {"target": ["72"]} if name.startswith("searchR1") else "72"
        value, _ = score(
            "by_source()", data_source=name.replace("*", "x"), response=response, ground_truth=truth
        )
        assert value == 1.0, (name, text)
        assert resolve(text, HOME).name in ("gsm8k", "boxed", "dapo", "qa_exact_match")


def test_sources_of_ones_own_come_first():
    own = "by_source(sources=(('mine', 'length_under(max_tokens=13)'), ('aime*', 'boxed()')))"
    assert score(own, data_source="mine")[0] == 1.0
    assert score(own, data_source="aime2025", response="no")[0] == 0.0  # -1 by dapo
    assert score("by_source()", data_source="aime2025", response="no")[0] == -1.0
    assert score(own, data_source="openai/gsm8k", response="#### 72")[0] == 1.0


def test_an_unknown_source_is_an_error_that_lists_the_known_ones():
    with pytest.raises(InputError, match="'openai/gsm8'.*mine, openai/gsm8k.*by_source"):
        score("by_source(sources=(('mine', 'gsm8k()'),))", data_source="openai/gsm8")
    with pytest.raises(InputError, match="'openai/gsm8k'.*named are mine"):
        score("by_source(sources=(('mine', 'gsm8k()'),), defaults=())")
    with RewardPool("by_source()", workers=1) as pool:
        (found,) = pool.score([SAMPLE | {"data_source": "nowhere"}])
    assert found.status == "error" and "no reward for data source 'nowhere'" in found.message


def test_what_no_source_names_may_have_a_reward():
    text = (
        "by_source(sources=(('mine', 'length_under(max_tokens=13)'),), otherwise='exact_match()')"
    )
    assert score(text, data_source="mine")[0] == 1.0
    assert score(text, response="#### 72")[0] == 1.0  # openai/gsm8k, of the table
    assert score(text, data_source="else", response="72")[0] == 1.0
    assert score(text, data_source="else", response="#### 72")[0] == 0.0
    with pytest.raises(InputError, match="did you mean exact_match"):
        RewardPool("by_source(otherwise='exact_mach()')", workers=1)


def test_a_rule_says_whether_there_was_an_answer():
    """The share of responses without one tells format from correctness; learning sees the score."""

    def extracted(text, response):
        return score(text, response=response)[1]["format/extracted"]

    for text in ("gsm8k()", "gsm8k(method='strict')", "gsm8k(method='flexible')"):
        assert extracted(text, "#### 71") == 1.0 and extracted(text, "none") == 0.0
    assert extracted("boxed()", "\\boxed{7}") == 1.0 and extracted("boxed()", "72") == 0.0
    assert score("by_source()", response="so 72")[1] == {"score": 0.0, "format/extracted": 0.0}
    _, parts = score("mixture(rewards=('gsm8k()', 'format_tags()'))")
    assert parts["gsm8k/format/extracted"] == 0.0
    for text, response in (("gsm8k", "#### 72"), ("boxed", "\\boxed{72}")):
        with RewardPool(text, workers=1) as pool:
            (found,) = pool.score([SAMPLE | {"response": response}])
        assert found.parts == {"score": 1.0, "format/extracted": 1.0}


# -- what is done once per worker ---------------------------------------------------------------

SLOW = """
import time
from rljax.contracts import contract
ready = []
def load():
    time.sleep(2.0)
    ready.append("loaded")
@contract(prepare=lambda options: load)
def reward(response):
    return {"score": 1.0, "ready": len(ready)}
"""


@pytest.mark.parametrize("text", ["slow_reward.reward", "mixture(rewards=('slow_reward.reward',))"])
def test_preparation_is_over_before_the_first_clock_starts(text, tmp_path, monkeypatch):
    (tmp_path / "slow_reward.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(text, workers=1, timeout_s=1.5) as pool:
        found = pool.score([SAMPLE] * 3)
    assert [s.status for s in found] == ["ok"] * 3
    assert {v for k, v in found[0].parts.items() if k.endswith("ready")} == {1.0}


def test_a_reward_with_the_cost_that_another_says():
    cost = "regex_match(pattern='think')"
    text = f"with_cost(reward='format_tags()', cost=\"{cost}\", scale=2.0, shift=-1.0)"
    value, parts = score(text)
    alone, of_reward = score("format_tags()")
    assert value == alone == 1.0 and parts == {**of_reward, "score": 1.0, "cost": 1.0}
    assert score(text, response="<answer>72</answer>")[1]["cost"] == -1.0
    assert {"response", "ground_truth"} <= set(wanted_fields(resolve(text, HOME))[0])
    with pytest.raises(InputError, match="needs 'max_tokens'"):
        score("with_cost(reward='format_tags()', cost='length_under()')")


def test_a_late_sample_has_a_cost_where_both_declare_what_it_is_worth():
    late = resolve("with_cost(reward='exact_match()', cost='exact_match()', shift=0.5)", HOME)
    assert late_score(late, SAMPLE) == (0.0, {"score": 0.0, "cost": 0.5})
    slow = resolve("with_cost(reward='exact_match()', cost='reward_model()')", HOME)
    assert late_score(slow, SAMPLE) is None


# -- a reward under judges --

JUDGES = ("format_tags(partial=0.5)", "length_under(max_tokens=13)")
JUDGED = f"with_judges(reward='qa_exact_match()', judges={JUDGES})"


def test_a_judged_response_complies_where_every_judge_passes():
    value, parts = score(JUDGED)
    assert value == 1.0 and parts == {
        "score": 1.0,
        "compliant": 1.0,
        "judge/format_tags": 1.0,
        "judge/length_under": 1.0,
    }
    for changed, verdicts in (
        ({"num_tokens": 13}, (1.0, 0.0)),
        ({"response": "<answer>72</answer>"}, (0.0, 1.0)),  # half of the format is not all of it
    ):
        value, parts = score(JUDGED, **changed)
        assert value == 1.0 and parts["compliant"] == 0.0
        assert (parts["judge/format_tags"], parts["judge/length_under"]) == verdicts
    lenient = JUDGED[:-1] + ", pass_at=(0.2, 1.0))"
    assert score(lenient, response="<answer>72</answer>")[1]["compliant"] == 1.0


def test_a_reward_model_may_be_judged_and_a_judge_that_raises_is_an_error():
    text = "with_judges(reward='reward_model()', judges=('qa_exact_match()', 'qa_exact_match()'))"
    value, parts = score(text, model_score=-3.5)
    assert value == -3.5 and parts["judge/qa_exact_match_2"] == 1.0
    with pytest.raises(RuntimeError, match="with_judges, judge.*regex_match"):
        score(
            "with_judges(reward='reward_model()', judges=('regex_match()',))",
            model_score=0.0,
            ground_truth="",
        )


def test_a_late_judge_fails_unless_it_asks_somebody():
    def late(text):
        return spec(resolve(text, HOME)).on_timeout(SAMPLE)

    assert late(JUDGED) == {
        "score": 0.0,
        "compliant": 0.0,
        "judge/format_tags": 0.0,
        "judge/length_under": 0.0,
    }
    assert late("with_judges(reward='reward_model()', judges=('qa_exact_match()',))") is None


@pytest.mark.parametrize(
    "options", ["judges=('gsm8k()')", "judges=()", "judges=('gsm8k()',), pass_at=(1, 2)"]
)
def test_judges_and_their_marks_are_refused_before_the_first_sample(options):
    with pytest.raises(InputError, match="with_judges"):
        prepare(resolve(f"with_judges(reward='gsm8k()', {options})", HOME))
