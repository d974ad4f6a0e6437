"""Tasks about numbers: countdown, arithmetic, sorting. Endless streams unless `prompts` is set.

`style` "words" asks in English, for models that read; "short" in a few characters, for models of a
few layers; "number" of arithmetic asks for the number alone, for small pretrained models."""

import json
import random
import re
from typing import Literal

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.answers.countdown import evaluate
from rljax.tasks.task import TEXT, Problem, Task, check_choice, check_range, procedural

OPERATIONS = "+-*/"


def _check_operations(task: str, operations: str) -> None:
    if not operations or len({*operations}) < len(operations) or {*operations} - {*OPERATIONS}:
        rule = f"some of {OPERATIONS}, each once"
        fix = f"operations='+-', or other characters of {OPERATIONS!r}"
        raise InputError(f"{task}(operations)", value=operations, rule=rule, fix=fix)


@contract(safe=True)
def countdown(
    *,
    numbers: int = 4,
    max_number: int = 99,
    max_target: int = 99,
    operations: PlainText = OPERATIONS,
    style: Literal["words", "short"] = "words",
    chat: bool = False,
    prompts: int = 0,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "3,5,7=22>" -> "3*5+7": an expression that uses each number once and makes the target.

    Every problem is made from a random expression, so that it has an answer; the target is a whole
    number from 1 to `max_target`. Reward: countdown(format_score=0.1); evaluation: countdown().
    Raises InputError for an option outside of its range, and if no expression with a target within
    reach is found.
    """
    check_range("countdown", "numbers", numbers, 2, 8)
    check_range("countdown", "max_number", max_number, 2, 9999)
    check_range("countdown", "max_target", max_target, 2, 99_999)
    _check_operations("countdown", operations)
    check_choice("countdown", "style", style, "words", "short")

    def draw(rng: random.Random) -> Problem:
        for _ in range(10_000):
            drawn = [rng.randint(1, max_number) for _ in range(numbers)]
            value, text = _random_expression(rng, drawn, operations)
            if value is not None and 1 <= value <= max_target:
                break
        else:
            raise InputError(
                "countdown finds no expression whose value is within reach",
                value=dict(numbers=numbers, max_target=max_target, operations=operations),
                fix="raise max_target, lower max_number, or allow more operations",
            )
        ordered = sorted(drawn)  # one spelling of a problem: what is held out is not met reordered
        truth = json.dumps({"numbers": ordered, "target": value})
        number_list = ",".join(map(str, ordered))
        if style == "short":
            return Problem(f"{number_list}={value}>", truth, text)
        prompt = (
            f"Using the numbers {number_list.replace(',', ', ')}, write an expression that equals "
            f"{value}. Use each number exactly once, with {' '.join(operations)} and brackets. "
            "Write the expression between <answer> and </answer>.\n"
        )
        return Problem(prompt, truth, f"<answer>{text}</answer>")

    scores = dict(reward="countdown(format_score=0.1)", evaluation="countdown()")
    alphabet = "0123456789+-*/(),=>" if style == "short" else TEXT
    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    return procedural("countdown", draw, alphabet=alphabet, chat=chat, **scores, **sizes)


def _random_expression(
    rng: random.Random, numbers: list[int], operations: str
) -> tuple[int | None, str]:
    """Returns the value and the text of a random expression of all the numbers; (None, "") if a
    division leaves a remainder."""
    parts = [(n, str(n), 3) for n in numbers]  # value, text, precedence
    while len(parts) > 1:
        left = parts.pop(rng.randrange(len(parts)))
        right = parts.pop(rng.randrange(len(parts)))
        operation = rng.choice(operations)
        level = 1 if operation in "+-" else 2
        # The right side of - and / needs brackets at its own level as well.
        tight = level + (operation in "-/")
        text = _bracketed(left, level) + operation + _bracketed(right, tight)
        if operation == "/":
            if right[0] == 0 or left[0] % right[0]:
                return None, ""
            value = left[0] // right[0]
        else:
            value = {"+": left[0] + right[0], "-": left[0] - right[0], "*": left[0] * right[0]}[
                operation
            ]
        parts.append((value, text, level))
    return parts[0][0], parts[0][1]


def _bracketed(part: tuple[int, str, int], level: int) -> str:
    return f"({part[1]})" if part[2] < level else part[1]


@contract(safe=True)
def arithmetic(
    *,
    terms: int = 2,
    digits: int = 2,
    min_number: int = 0,
    operations: PlainText = "+-*",
    brackets: bool = False,
    style: Literal["words", "short", "number"] = "words",
    chat: bool = False,
    prompts: int = 0,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "37+58*2=" -> "153": the value of an expression of `terms` numbers of up to `digits` digits.

    The result is a whole number; with "/" among the operations, divisions come out even. Harder
    with more terms, digits, operations and `brackets`. The numbers begin at `min_number`; the
    divisor of a division is chosen to fit. Reward of style "words": gsm8k(), the number after
    "####"; of "short": exact_match(); of "number", "What is 37 + 58? Reply with the number only.":
    integer_answer(), the last number of the response.
    """
    check_range("arithmetic", "terms", terms, 2, 10)
    check_range("arithmetic", "digits", digits, 1, 9)
    check_range("arithmetic", "min_number", min_number, 0, 10**digits - 1)
    _check_operations("arithmetic", operations)
    check_choice("arithmetic", "style", style, "words", "short", "number")

    def draw(rng: random.Random) -> Problem:
        while True:
            drawn = [rng.randint(min_number, 10**digits - 1) for _ in range(terms)]
            if brackets:
                value, text = _random_expression(rng, drawn, operations)
            else:
                value, text = _chain(rng, drawn, operations)
            if value is not None:
                break
        if style == "short":
            return Problem(f"{text}=", str(value), str(value))
        if style == "number":
            spaced = re.sub(f"([{re.escape(OPERATIONS)}])", r" \1 ", text)
            prompt = f"What is {spaced}? Reply with the number only."
            return Problem(prompt, str(value), str(value))
        prompt = f'What is {text}? Write the result as a whole number after "####".\n'
        return Problem(prompt, str(value), f"#### {value}")

    bound = 10 ** (digits * terms)
    rewards = {
        "words": "gsm8k()",
        "short": "exact_match()",
        "number": f"integer_answer(low={-bound}, high={bound})",
    }
    alphabet = "0123456789+-*/()=" if style == "short" else TEXT
    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    scores = dict(reward=rewards[style])
    return procedural("arithmetic", draw, alphabet=alphabet, chat=chat, **scores, **sizes)


def _chain(rng: random.Random, numbers: list[int], operations: str) -> tuple[int, str]:
    """Returns the value and the text of the numbers in their order with random
    operations between them, without brackets. A number that divides is replaced by a
    divisor of the product before it."""
    product, text = numbers[0], str(numbers[0])
    for number in numbers[1:]:
        sign = rng.choice(operations)
        if sign == "/":
            limit = min(max(numbers), abs(product), 1000)
            divisors = [d for d in range(2, limit + 1) if product % d == 0]
            number = rng.choice(divisors or [1])
            product //= number
        else:
            product = product * number if sign == "*" else number
        text += sign + str(number)
    return int(evaluate(text)[0]), text


@contract(safe=True)
def sorting(
    *,
    items: int = 5,
    max_number: int = 99,
    descending: bool = False,
    style: Literal["words", "short"] = "words",
    chat: bool = False,
    prompts: int = 0,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "8,31,5>" -> "5,8,31": the numbers in ascending, or `descending`, order.

    Reward: list_match(partial=0.5), the share of right positions; evaluation: list_match(), all
    of them.
    """
    check_range("sorting", "items", items, 2, 100)
    check_range("sorting", "max_number", max_number, 2, 10**9)
    check_choice("sorting", "style", style, "words", "short")
    order = "descending" if descending else "ascending"

    def draw(rng: random.Random) -> Problem:
        drawn = [rng.randint(0, max_number) for _ in range(items)]
        answer = ",".join(map(str, sorted(drawn, reverse=descending)))
        text = ",".join(map(str, drawn))
        if style == "short":
            return Problem(f"{text}>", answer, answer)
        prompt = (
            f"Sort these numbers in {order} order: {text.replace(',', ', ')}. Write them, parted "
            "by commas, between <answer> and </answer>.\n"
        )
        return Problem(prompt, answer, f"<answer>{answer}</answer>")

    scores = dict(reward="list_match(partial=0.5)", evaluation="list_match()")
    alphabet = "0123456789,>" if style == "short" else TEXT
    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    return procedural("sorting", draw, alphabet=alphabet, chat=chat, **scores, **sizes)
