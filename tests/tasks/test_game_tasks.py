"""The rows of games and of questions that need a tool: their worked examples are logs that the
environments make, and their tokenizers read them."""

import json
import re

import pytest
from conftest import REPO

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.data.text.tokenizer import CharTokenizer
from rljax.environments.functions import calc
from rljax.errors import InputError
from rljax.tasks.games import DEALS
from rljax.tasks.tool_questions import fact_lines

TASKS = [
    "guess_number()",
    "tic_tac_toe()",
    "kuhn_poker()",
    "products()",
    "expressions()",
    "facts()",
    "broken_lines()",
]


def task_of(spec):
    return resolve(spec, NAMESPACES["data"])()


@pytest.mark.parametrize("spec", TASKS)
def test_a_tiny_tokenizer_reads_every_row_and_example(spec):
    task, again = task_of(spec), task_of(spec)
    tokenizer = CharTokenizer(task.alphabet)
    rows = [task.train[i] for i in range(6)] + list(task.test)
    texts = [row["prompt"] for row in rows]
    texts += [row[name] for row in task.worked_examples for name in ("prompt", "completion")]
    for text in texts:
        assert text and tokenizer.decode(tokenizer.encode(text)) == text
    assert task.worked_examples == again.worked_examples and task.test == again.test


def test_rows_and_examples_of_games():
    task = task_of("guess_number(high=16, turns=4)")
    assert [row["extra_info"]["secret"] for row in task.train] == list(range(1, 17))
    turn = re.compile(r"Guess my number, 1 to 16\.(\d+\n(higher|lower)){0,3}")
    assert all(turn.fullmatch(row["prompt"]) for row in task.worked_examples)
    assert {int(row["completion"]) for row in task.worked_examples} == set(range(1, 17))
    assert [row["extra_info"]["deal"] for row in task_of("kuhn_poker()").train] == list(DEALS)
    for row in task_of("tic_tac_toe()").worked_examples:
        board = row["prompt"][-10:-1]
        assert board[int(row["completion"]) - 1] == "."
        assert row["prompt"][-1] == "xo"[(9 - board.count(".")) % 2]
        assert len(row["prompt"]) == 10 + 11 * ((9 - board.count(".")) // 2)


@pytest.mark.parametrize("name, share", [("products", 0.2), ("expressions", 0.5), ("facts", 0.03)])
def test_examples_call_as_often_as_asked_and_copy_what_the_tool_says(name, share):
    task = task_of(f"{name}(call_share={share}, worked_examples=1000)")
    first, begun, after = (task.worked_examples[i::3] for i in range(3))
    calls = [row for row in first if not row["completion"].isdecimal()]
    assert abs(len(calls) / 1000 - share) < 0.06
    whole = {row["prompt"] + row["completion"] for row in begun}
    assert all(row["prompt"] + row["completion"] in whole for row in calls)
    for row in after:
        said = row["prompt"].rpartition(">" if name != "expressions" else "`\n")[2]
        assert said.split(" ")[-1] == row["completion"]
    assert {row["prompt"] for row in task.test}.isdisjoint(row["prompt"] for row in first)


def test_answers_are_right():
    for name in ("products", "expressions"):
        for row in task_of(f"{name}()").test:
            assert calc(row["prompt"].removesuffix("=")) == row["ground_truth"]
            assert len(row["ground_truth"]) == 4
    known = dict(line.split(" ") for line in fact_lines())
    assert (REPO / "configs/agents/facts.txt").read_text().splitlines() == fact_lines()
    task = task_of("facts()")
    assert len(known) == 500 == len(task.train) + len(task.test)
    for row in [*task.train, *task.test]:
        assert known[row["prompt"].removesuffix("?")] == row["ground_truth"]


def test_a_broken_line_fails_the_test_that_is_shown():
    for row in task_of("broken_lines()").test:
        broken, test = row["prompt"].removesuffix(">").split(" ")
        x, right = map(int, test.split(":"))
        truth = json.loads(row["ground_truth"])
        assert truth["outputs"][truth["inputs"].index([x])] == right
        assert int(calc(broken.replace("x", str(x)))) != right


@pytest.mark.parametrize(
    "spec",
    [
        "guess_number(high=1)",
        "products(call_share=2)",
        "facts(lines=1)",
        "facts(test=500)",
        "products(call='calc')",
        "broken_lines(tests=1)",
        "tic_tac_toe(games=0)",
    ],
)
def test_options_that_are_refused(spec):
    with pytest.raises(InputError):
        task_of(spec)
