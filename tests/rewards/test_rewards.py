"""The rules against the worked examples and verl's own outputs, and what a reward is handed."""

import asyncio
import json
import math
import subprocess
import sys

import pytest
from conftest import golden, worked_example

from rljax.components import Component, resolve
from rljax.errors import InputError
from rljax.rewards import boxed, exact_match, gsm8k, length_under, sequence_match, valid_json
from rljax.rewards.pool.calling import Abstained, call_reward, wanted_fields
from rljax.rewards.pool.pool import RewardPool


def test_gsm8k_gives_the_worked_example():
    example = worked_example("reward.gsm8k")
    pairs = list(zip(*example["inputs"].values(), strict=True))
    for method, expected in example["outputs"].items():
        assert [gsm8k(r, g, method=method) for r, g in pairs] == expected, method


@pytest.mark.smoke
@pytest.mark.parametrize("name, reward, count", [("gsm8k", gsm8k, 53), ("math_reward", boxed, 64)])
def test_rules_agree_with_verl(name, reward, count):
    cases = json.loads(golden("verl", "reward_scores.json").read_text())["cases"]
    cases = [c for c in cases if c["fn"] == f"{name}.compute_score"]
    assert len(cases) == count
    for case in cases:
        got = reward(case["solution_str"], case["ground_truth"], **case["kwargs"])
        assert got == case["output"], case


@pytest.mark.parametrize(
    "response, ground_truth, expected",
    [
        ("#### 72", "72", 1),
        ("#### 72.00", "72", 1),
        ("#### $1,234.50", "1234.5", 1),
        ("#### -$5", "-5", 1),
        ("**#### 72**", "72", 1),
        ("####72", "72", 1),
        ("#### .5", "0.5", 1),
        ("#### 72 apples", "72", 1),
        ("#### 9007199254740993", "9007199254740992", 0),  # equal as floats
        ("#### 72/5", "72", 0),
        ("#### 72 * 5", "72", 0),
        ("#### 720", "72", 0),
        ("#### 1.2.3", "1.2", 0),
        ("#### 72 no wait #### 71", "72", 0),
        ("#### ７２", "72", 1),  # full-width digits
        ("#### 72" + " " * 300, "72", 0),  # outside the window
        ("72", "72", 0),
        ("", "72", 0),
    ],
)
def test_gsm8k_numeric(response, ground_truth, expected):
    assert gsm8k(response, ground_truth) == expected


def test_gsm8k_pays_for_format_only_if_there_is_a_number():
    options = {"score": 2.0, "format_score": 0.25}
    for method in ("strict", "numeric", "flexible"):
        assert gsm8k("#### 72", "72", method=method, **options) == 2.0
        assert gsm8k("#### 71", "72", method=method, **options) == 0.25
        assert gsm8k("no number.", "72", method=method, **options) == 0.0


def test_a_reference_that_can_never_match_is_an_error_not_a_zero():
    for reward in (gsm8k, boxed, exact_match, sequence_match):
        with pytest.raises(TypeError, match="ground_truth must be text, got int"):
            reward("#### 72", 72)
    with pytest.raises(ValueError, match="'seventy' is not a number"):
        gsm8k("no number", "seventy")
    with pytest.raises(ValueError, match="no method 'strct'"):
        gsm8k("#### 72", "72", method="strct")


@pytest.mark.parametrize(
    "response, ground_truth, expected",
    [
        (r"\boxed{\frac{1}{2}}", "1/2", 1),
        (r"\boxed{-\frac{1}{2}}", "-0.5", 1),
        (r"\boxed{\frac12}", r"\dfrac{1}{2}", 1),
        ("\\boxed{\u2212\uff15}", "-5", 1),  # a minus sign and a full-width digit
        (r"\boxed{10{,}000}", "10,000", 1),
        (r"\boxed{10,000}", "10000", 1),
        (r"\boxed{12\text{ cm}^2}", "12", 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        (r"\boxed{\text{ yes}}", "yes", 1),  # not a unit: the text is the answer
        (r"\boxed{\text{ yes}}", r"\text{ no}", 0),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right.", 1),  # an escaped brace needs no partner
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"\boxed{5", "5", 0),  # cut off
        (r"\boxed{5} then \boxed{6", "5", 0),  # the last one counts, and it is cut off
        (r"\boxed{y=2x}", "2x", 1),
        (r"\boxed{1/0}", "1", 0),
        (r"\boxed{}", "", 0),
        (r"\boxed{\%}", r"\$", 0),  # nothing is left of either
        (r"\boxedfoo", "foo", 0),
        ("5", "5", 0),
    ],
)
def test_boxed(response, ground_truth, expected):
    assert boxed(response, ground_truth) == expected


def test_exact_match_strips_and_nothing_else():
    assert exact_match(" 72\n", "72") == 1.0
    assert exact_match("72.", "72") == 0.0
    assert exact_match("a b", "a  b") == 0.0


def test_sequence_match_is_the_share_of_equal_positions():
    assert sequence_match(" abcd ", "abcd") == 1.0
    assert sequence_match("abxd", "abcd") == 0.0
    assert sequence_match("abxd", "abcd", partial=0.5) == 0.5 * 3 / 4
    assert sequence_match("ab", "abcd", partial=0.5) == 0.5 * 2 / 4
    assert sequence_match("abcdefgh", "abcd", partial=0.5) == 0.5 * 4 / 8
    assert sequence_match("bcd", "abcd", partial=1.0) == 0.0  # positions, not an alignment
    assert sequence_match("", "abcd", partial=1.0) == 0.0
    assert 0.99 < sequence_match("a" * 99_999, "a" * 100_000, partial=1.0) < 1.0
    with pytest.raises(ValueError, match="partial must lie in"):
        sequence_match("a", "b", partial=1.5)


def test_length_under_counts_tokens_and_excludes_the_limit():
    assert [length_under("x" * 99, n, max_tokens=4) for n in (3, 4, 5)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "response, expected",
    [
        ('{"a": [1, 2.5e3, null]}', 1),
        (" 3 ", 1),
        ("9" * 10_000, 1),  # valid, though int() refuses it
        ("", 0),
        ("{'a': 1}", 0),
        ('{"a": 1} and more', 0),
        ("NaN", 0),
        ("[" * 100_000 + "]" * 100_000, 0),
    ],
)
def test_valid_json(response, expected):
    assert valid_json(response) == expected


def test_importing_the_rewards_and_the_pool_imports_no_array_library():
    heavy = "{m.split('.')[0] for m in sys.modules} & {'jax', 'numpy', 'torch', 'flax'}"
    code = f"import sys, rljax.rewards, rljax.rewards.pool.pool; print({heavy})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr


# -- what a reward is handed --

SAMPLE = {
    "response": "abc",
    "ground_truth": "abc",
    "prompt": "say abc",
    "num_tokens": 3,
    "extra_info": {"level": 2},
}


def component(function, options="", **option_values) -> Component:
    """A Component around a local function; `resolve` needs an importable one."""
    made = resolve("exact_match", "rljax.rewards")
    made.name, made.function, made.options = function.__name__, function, option_values
    return made


@pytest.mark.smoke
def test_a_reward_is_handed_exactly_what_it_declares():
    def everything(**fields):
        return len(fields)

    def some(response, extra_info, finish_reason="unknown", *, width=1.0):
        assert (response, finish_reason) == ("abc", "unknown")
        return extra_info["level"] * width

    assert call_reward(component(everything), SAMPLE) == (5.0, {"score": 5.0})
    assert call_reward(component(some, width=0.5), SAMPLE)[0] == 1.0
    assert wanted_fields(component(some, width=0.5)) == (
        ("response", "extra_info", "finish_reason"),
        ("response", "extra_info"),
    )
    text = "length_under(max_tokens=4)"
    assert call_reward(resolve(text, "rljax.rewards"), SAMPLE) == (1.0, {"score": 1.0})


def test_parts_are_named_numbers_with_a_score():
    def parts(response):
        return {"score": 1, "format": True}

    assert call_reward(component(parts), SAMPLE) == (1.0, {"score": 1.0, "format": 1.0})


@pytest.mark.parametrize(
    "returned, message",
    [
        ("1.0", "'1.0' .str. as 'score'"),
        ([1.0], "not|no number"),
        (math.nan, "nan as 'score', not a finite"),
        (-math.inf, "-inf as 'score'"),
        (1e39, "of at most 1e.15"),  # float32, in which advantages are computed, holds no such
        ({"score": 1.0, "cost": -1e16}, "-1e.16 as 'cost'"),
        (1j, "no number"),
        ({"format": 1.0}, "without 'score'"),
        ({"score": 1.0, "format": math.inf}, "inf as 'format'"),
        ({"score": 1.0, "answer": "72"}, "'72' .str. as 'answer'"),
    ],
)
def test_anything_but_finite_numbers_is_refused(returned, message):
    def reward(response):
        return returned

    with pytest.raises((TypeError, ValueError), match=message):
        call_reward(component(reward), SAMPLE)


@pytest.mark.parametrize("returned", [None, {"score": None, "format": 1.0}])
def test_none_is_no_number_and_no_error(returned):
    def reward(response):
        return returned

    with pytest.raises(Abstained, match="returned None for this response .*test_rewards.py"):
        call_reward(component(reward), SAMPLE)


def test_an_async_reward_is_awaited():
    async def judge(response):
        await asyncio.sleep(0)
        return 0.25

    assert call_reward(component(judge), SAMPLE)[0] == 0.25


def test_a_missing_field_is_named_with_what_there_is():
    def judge(response, data_source):
        return 1.0

    with pytest.raises(InputError, match="needs 'data_source', which this sample lacks.*'prompt'"):
        call_reward(component(judge), SAMPLE)


def test_a_reward_that_no_sample_can_satisfy_is_refused():
    def typo(response, groundtruth):
        return 1.0

    def positional(response, /):
        return 1.0

    with pytest.raises(InputError, match="needs 'groundtruth', which no sample has.*ground_truth"):
        wanted_fields(component(typo))
    assert wanted_fields(component(typo, groundtruth="72"))[1] == ("response",)
    with pytest.raises(InputError, match="by position only"):
        wanted_fields(component(positional))
    with pytest.raises(InputError, match="needs 'max_tokens'"):
        RewardPool("length_under")
    with pytest.raises(InputError, match="'method'.*'strct'.*'numeric', 'strict', 'flexible'"):
        RewardPool("gsm8k(method='strct')")
