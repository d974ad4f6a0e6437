"""The tasks for pretrained models: what they ask is what their rewards pay for."""

import re

import pytest

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.rewards.pool.calling import HOME, call_reward


def task_of(spec):
    return resolve(spec, NAMESPACES["data"])()


def score(task, response, row):
    sample = dict(response=response, ground_truth=row["ground_truth"], data_source="")
    return call_reward(resolve(task.reward, HOME), sample)[0]


KINDS = {
    "words": r"Write exactly (?P<count>\d) words about a (?P<topic>\w+)\.",
    "ending": r'Write a short sentence about a (?P<topic>\w+) that ends with "(?P<phrase>[^"]+)"',
    "repeat": r'Write the word "(?P<topic>\w+)" exactly (?P<count>\d) times\.',
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_asks_for_what_its_reward_pays(kind):
    task = task_of(f"instructions(kind='{kind}', test=60, worked_examples=60)")
    assert len({row["prompt"] for row in task.test}) == 60
    for row, worked in zip(task.test, task.worked_test, strict=True):
        asked = re.fullmatch(KINDS[kind], row["prompt"])
        assert asked and score(task, worked["completion"], row) == 1
        # Right answers and wrong ones, made from the words of the prompt alone.
        if kind == "ending":
            right, wrong = f"x {asked['phrase']}", f"{asked['phrase']} x"
        else:
            word = asked["topic"]
            right = " ".join([word] * int(asked["count"]))
            wrong = f"{right} {word}"
            assert score(task, " ".join([word] * (int(asked["count"]) - 1)), row) == 0
        assert score(task, right, row) == 1 and score(task, wrong, row) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_instructions_are_never_trained_on(kind):
    task = task_of(f"instructions(kind='{kind}', chat=True)")
    held_out = {row["prompt"][0]["content"] for row in task.test}
    drawn = {task.train[i]["prompt"][0]["content"] for i in range(500)}
    assert len(held_out) == 200 and len(drawn) > 100 and not held_out & drawn


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("{sum}", 1),
        ("{a} + {b} equals {sum}.", 1),
        ("The sum is **{sum}**", 1),
        ("${sum}.", 1),
        ("{a} + {b} =", 0),
        ("{sum}1", 0),
        ("To add {a} and {b}", 0),
        ("-{sum}", 0),
        ("{sum}, so {a}", 0),
        ("", 0),
        ("{sum}.5", 0),
    ],
)
def test_the_last_number_of_a_response_is_its_sum(response, right):
    spec = "arithmetic(operations='+', min_number=10, style='number', chat=True, test=50)"
    task = task_of(spec)
    for row in task.test:
        (message,) = row["prompt"]
        asked = r"What is (\d\d) \+ (\d\d)\? Reply with the number only\."
        a, b = map(int, re.fullmatch(asked, message["content"]).groups())
        assert row["ground_truth"] == str(a + b)
        assert score(task, response.format(a=a, b=b, sum=a + b), row) == right


def test_every_sign_is_spaced_and_results_may_be_negative_or_large():
    task = task_of("arithmetic(digits=9, terms=3, operations='-*', style='number', test=50)")
    for row in task.test:
        expression = row["prompt"].removeprefix("What is ").split("?")[0]
        assert re.fullmatch(r"\d+( [-*] \d+){2}", expression)
        assert score(task, str(eval(expression)), row) == 1
    assert any(row["ground_truth"].startswith("-") for row in task.test)
