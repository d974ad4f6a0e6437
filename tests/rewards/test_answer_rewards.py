"""Rewards for expressions, lists and JSON objects: right, wrong, malformed and hostile answers."""

import json
from fractions import Fraction

import pytest
from spent import at_most

from rljax.components import resolve
from rljax.rewards import countdown, json_match, list_match
from rljax.rewards.answers.countdown import ExpressionError, evaluate
from rljax.rewards.pool.calling import HOME, call_reward

TRUTH = json.dumps({"numbers": [3, 5, 7], "target": 22})


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("3*5+7", 22, [3, 5, 7]),
        ("7 + 3 × 5", 22, [7, 3, 5]),
        ("2-3-4", -5, [2, 3, 4]),
        ("16/4/2", 2, [16, 4, 2]),
        ("16/(4/2)", 8, [16, 4, 2]),
        ("1/3+1/6", Fraction(1, 2), [1, 3, 1, 6]),
        ("(1-6)*-2", 10, [1, 6, 2]),
        ("2--3", 5, [2, 3]),
        ("-(2+3)*4", -20, [2, 3, 4]),
        ("-2*3", -6, [2, 3]),
        ("((((8))))", 8, [8]),
        ("8/(3-8/3)", 24, [8, 3, 8, 3]),
    ],
)
def test_expressions_are_exact(text, value, numbers):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3+",
        "*3",
        "3 5",
        "(3",
        "3)",
        "()",
        "3+()",
        "1/0",
        "1/(2-2)",
        "2**3",
        "3//2",
        "a+1",
        "1.5",
        "1e3",
        "__import__('os')",
        "3,5",
        "(" * 2000,
        "9" * 13,
        "3(5)",
        "(3)(5)",
        "²",
        "٣",
        "3\0+5",
    ],
)
def test_what_is_no_expression(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    ("response", "score", "valid", "used"),
    [
        ("3*5+7", 1.0, 1, 1),
        ("<answer>1+1</answer> no: <answer> 7 + 3*5 </answer>", 1.0, 1, 1),
        ("<answer>3*5+7 = 22</answer>", 1.0, 1, 1),
        ("<answer>3*5+7 = 23</answer>", 0.0, 0, 0),
        ("<answer>3*5+7", 1.0, 1, 1),
        ("3+5+7", 0.1, 1, 1),
        ("3*7+5-5+1", 0.0, 1, 0),
        ("22", 0.0, 1, 0),
        ("3*5+7*1", 0.0, 1, 0),
        ("3*5", 0.0, 1, 0),
        ("35-7-6", 0.0, 1, 0),  # digits are not numbers
        ("The answer is 3*5+7", 0.0, 0, 0),
        ("3*5+7\0", 0.0, 0, 0),
        ("", 0.0, 0, 0),
    ],
)
def test_countdown(response, score, valid, used):
    found = countdown(response, TRUTH, format_score=0.1)
    assert (found["score"], found["valid"], found["numbers_used"]) == (score, valid, used)
    assert countdown(response, TRUTH)["score"] == float(score == 1.0) == found["correct"]


def test_a_number_that_is_given_twice_is_used_twice():
    truth = json.dumps({"numbers": [3, 3, 5], "target": 11})
    assert countdown("3+3+5", truth)["score"] == 1.0
    assert countdown("3+5+5-2", truth)["score"] == 0.0
    fewer = countdown("5*3-4", json.dumps({"numbers": [3, 3, 5], "target": 8}))
    assert countdown("3+5", json.dumps({"numbers": [3, 3, 5], "target": 8}))["numbers_used"] == 0.0
    assert countdown("3+5+5", json.dumps({"numbers": [3, 5], "target": 13}))["score"] == 0.0
    assert fewer["score"] == 0.0


@pytest.mark.parametrize("truth", ["22", "{}", '{"numbers": 3, "target": 22}', "", "[1]"])
def test_a_reference_that_is_no_problem_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth"):
        countdown("3", truth)


@pytest.mark.parametrize(
    "character", ["(", ")", "-", "3", "<answer>", "=", "{", "[", "\\", "```json\n"]
)
def test_hostile_answers_cost_little(character):
    with at_most(5):
        assert countdown(character * 100_000, TRUTH)["score"] == 0.0
        assert json_match(character * 100_000, '{"a": 1}')["score"] == 0.0
        assert list_match(character * 100_000, "1 2") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("1,2,3", 1.0),
        ("[1, 2, 3]", 1.0),
        ("Sure. <answer>1 2 3</answer>", 1.0),
        ("1,3,2", 0.5 / 3),
        ("1,2,3,4", 0.5 * 3 / 4),
        ("1,2", 0.5 * 2 / 3),
        ("1,2,03", 0.5 * 2 / 3),
        ("", 0.0),
    ],
)
def test_list_match(response, score):
    assert list_match(response, "1, 2, 3", partial=0.5) == pytest.approx(score)
    assert list_match(response, "1, 2, 3") == float(score == 1.0)


def test_the_rewards_of_several_tasks_are_told_apart_by_data_source():
    text = "by_source(sources=(('a', 'list_match()'), ('b', 'gsm8k()'), ('*', 'exact_match()')))"

    def call(**s):
        return call_reward(resolve(text, HOME), s)

    assert call(data_source="a", response="1 2", ground_truth="1,2")[0] == 1.0
    assert call(data_source="b", response="#### 2", ground_truth="2")[0] == 1.0
    assert call(data_source="c", response="2", ground_truth="2")[0] == 1.0
    with pytest.raises(RuntimeError, match="ground_truth"):
        call(data_source="b", response="#### 2", ground_truth="two")
