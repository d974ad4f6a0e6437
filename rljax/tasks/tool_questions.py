"""Questions that need a tool, and programs that need a second look, for models of a few layers.

Worked examples teach how a call is written and how its answer is copied. Of those that begin an
answer only `call_share` make a call; the others give any answer. They are logs as the policy reads
them if the tokenizer has no chat template: texts one behind the other.
"""

import dataclasses
import json
import random

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.tasks.task import TEXT, Problem, Task, check_range, procedural

_LETTERS = "bdfgklmnprstvz", "aeiou"
_LINE = "x{}{}"  # a line of `broken_lines`: an operation and a digit


def _check_share(task: str, share: float) -> None:
    if not 0 <= share <= 1:
        fix = "set call_share to a share, such as 0.5"
        raise InputError(f"{task}(call_share)", value=share, rule="0 to 1", fix=fix)


@contract(safe=True)
def products(
    *,
    call_share: float = 0.2,
    call: PlainText = "<calc>{}</calc>",
    test: int = 256,
    worked_examples: int = 512,
    seed: int = 0,
) -> Task:
    """ "37*58=" -> "2146": the product of two numbers of two digits, which has four."""

    def draw(rng: random.Random) -> Problem:
        while True:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            if a * b >= 1000:
                return Problem(f"{a}*{b}=", str(a * b), str(a * b))

    return _calculations("products", draw, call, call_share, test, worked_examples, seed)


@contract(safe=True)
def expressions(
    *,
    call_share: float = 0.2,
    call: PlainText = "```python\n{}\n```\n",
    test: int = 256,
    worked_examples: int = 512,
    seed: int = 0,
) -> Task:
    """ "12+34*56=" -> "1916": the value of three numbers with a product, four digits."""

    def draw(rng: random.Random) -> Problem:
        while True:
            a, b, c = (rng.randint(10, 99) for _ in range(3))
            sign = rng.choice("+-")
            first = f"{a}*{b}{sign}{c}", a * b + (c if sign == "+" else -c)
            last = f"{c}{sign}{a}*{b}", c + (a * b if sign == "+" else -a * b)
            text, value = rng.choice((first, last))
            if 1000 <= value <= 9999:
                return Problem(f"{text}=", str(value), str(value))

    return _calculations("expressions", draw, call, call_share, test, worked_examples, seed)


def _calculations(
    name: str, draw, call: str, call_share: float, test: int, worked_examples: int, seed: int
) -> Task:
    """Returns a task of drawn prompts that end in "=". A call asks for the text before it, and is
    answered by the completion."""
    _check_share(name, call_share)
    sizes = dict(test=test, worked_examples=worked_examples, seed=seed)
    task = procedural(name, draw, reward="exact_match()", **sizes)

    def asked(row):
        return row["prompt"].removesuffix("=")

    def answers(row):
        return row["completion"]

    return _with_calls(task, call, asked, answers, call_share, seed)


@contract(safe=True)
def facts(
    *,
    lines: int = 500,
    call_share: float = 0.03,
    call: PlainText = "<search>{}</search>",
    answer: PlainText = "[1] {}",
    test: int = 128,
    worked_examples: int = 512,
    seed: int = 0,
) -> Task:
    """ "bak?" -> "417": what no prompt says. `fact_lines` has it, which the search tool reads as a
    file (configs/agents/facts.txt) and shows as `answer` says."""
    _check_share("facts", call_share)
    pairs = [line.split(" ") for line in fact_lines(lines=lines, seed=seed)]
    check_range("facts", "test", test, 1, lines - 1)
    rows = [
        {"prompt": f"{word}?", "ground_truth": number, "data_source": "facts", "index": i}
        for i, (word, number) in enumerate(pairs)
    ]
    rng = random.Random(f"facts/{seed}/worked")
    examples = [
        {"prompt": row["prompt"], "completion": row["ground_truth"]}
        for row in (rng.choice(rows[test:]) for _ in range(worked_examples))
    ]
    task = Task(TEXT, rows[test:], rows[:test], examples)

    def asked(row):
        return row["prompt"].removesuffix("?")

    def answers(row):
        return answer.format(f"{asked(row)} {row['completion']}")

    return _with_calls(task, call, asked, answers, call_share, seed)


def fact_lines(*, lines: int = 500, seed: int = 0) -> list[str]:
    """ "bak 417": the corpus that facts() asks about, a line for each of `lines` words."""
    consonants, vowels = _LETTERS
    words = [a + v + b for a in consonants for v in vowels for b in consonants]
    check_range("facts", "lines", lines, 2, len(words))
    rng = random.Random(f"facts/{seed}")
    return [f"{word} {rng.randint(100, 999)}" for word in rng.sample(words, lines)]


def _with_calls(task: Task, call: str, question_of, answer_of, share: float, seed: int) -> Task:
    """Returns the task with worked examples of a first turn (a call, or any answer), of the rest of
    a call that is begun, and of the text behind a call. `question_of(row)` is the text of the call,
    `answer_of(row)` the tool's answer."""
    if call.count("{}") != 1:
        rule = "{} stands once in it, where the question goes"
        fix = "write the call with one {}, such as 'calc({})'"
        raise InputError("call", value=call, rule=rule, fix=fix)
    rng = random.Random(f"calls/{seed}")
    opening, _, closing = call.partition("{}")
    examples = []
    for row in task.worked_examples:
        call_text = call.format(question_of(row))
        answer = rng.choice(task.worked_examples)["completion"]
        turn = call_text if rng.random() < share else answer
        log = row["prompt"] + call_text + answer_of(row)
        examples += [
            {"prompt": row["prompt"], "completion": turn},
            {"prompt": row["prompt"] + opening, "completion": question_of(row) + closing},
            {"prompt": log, "completion": row["completion"]},
        ]
    held_out = examples[: max(1, len(examples) // 8)]
    return dataclasses.replace(task, worked_examples=examples, worked_test=held_out)


@contract(safe=True)
def broken_lines(
    *, tests: int = 4, test: int = 128, worked_examples: int = 256, seed: int = 0
) -> Task:
    """ "x+3 2:6>" -> "x*3": a line that f(x) does not return, with a test that it fails.

    The right line is x, one of + - *, and a digit from 1 to 4; several may agree with one test. The
    ground truth has `tests` of them, the one that is shown among them; worked examples answer with
    any line.
    """
    check_range("broken_lines", "tests", tests, 2, 5)
    lines = [_LINE.format(operation, digit) for operation in "+-*" for digit in range(1, 5)]

    def value(line: str, x: int) -> int:
        operation, digit = line[1], int(line[2])
        return {"+": x + digit, "-": x - digit, "*": x * digit}[operation]

    def draw(rng: random.Random) -> Problem:
        while True:
            right, broken = rng.sample(lines, 2)
            begin = rng.randrange(5)
            inputs = [2 + (begin + i) % 5 for i in range(tests)]
            failed = [x for x in inputs if value(right, x) != value(broken, x)]
            if failed:
                break
        outputs = [value(right, x) for x in inputs]
        truth = {"inputs": [[x] for x in inputs], "outputs": outputs, "fn_name": "f"}
        prompt = f"{broken} {failed[0]}:{value(right, failed[0])}>"
        return Problem(prompt, json.dumps(truth), rng.choice(lines))

    sizes = dict(test=test, worked_examples=worked_examples, seed=seed)
    alphabet = "0123456789x+-* :>"
    return procedural("broken_lines", draw, reward="code_tests()", alphabet=alphabet, **sizes)
