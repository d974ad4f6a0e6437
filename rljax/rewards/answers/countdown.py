"""Countdown: an expression of the given numbers that makes the target.

A parser of + - * / and brackets that evaluates exactly (Fractions), and the reward. Nothing is
handed to Python's own eval.
"""

import collections
import json
import re
from fractions import Fraction

from rljax.contracts import contract
from rljax.rewards.answers.find import answer_text

MAX_CHARACTERS = 1000  # characters of an expression; a response may be any text
MAX_DIGITS = 12  # digits of a number in it
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")  # ASCII digits: \d would take those of every script
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


class ExpressionError(ValueError):
    """The text is no expression, or has no value; the message says why."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and the numbers in it in their order.

    + - * / with the usual precedence, from left to right, brackets and signs. Raises
    ExpressionError. Linear in the length, and without recursion: brackets may be 1000 deep.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"more than {MAX_CHARACTERS} characters")
    values: list[Fraction] = []
    operators: list[str] = []
    numbers: list[int] = []
    wants_value = True
    for token in _tokens(text):
        if token[0].isdigit():
            if not wants_value:
                raise ExpressionError(f"no operator before {token}")
            numbers.append(int(token))
            values.append(Fraction(numbers[-1]))
            wants_value = False
        elif token == "(":
            if not wants_value:
                raise ExpressionError("no operator before a bracket")
            operators.append(token)
        elif token == ")":
            if wants_value:
                raise ExpressionError("a bracket closes where a number is missing")
            while operators and operators[-1] != "(":
                _apply(operators.pop(), values)
            if not operators:
                raise ExpressionError("a bracket closes that was not opened")
            operators.pop()
        elif wants_value:
            if token not in "+-":
                raise ExpressionError(f"no number before {token}")
            if token == "-":
                operators.append("negate")
        else:
            _apply_above(_PRECEDENCE[token], operators, values)
            operators.append(token)
            wants_value = True
    if wants_value:
        raise ExpressionError("it ends where a number is missing")
    while operators:
        if operators[-1] == "(":
            raise ExpressionError("a bracket is not closed")
        _apply(operators.pop(), values)
    return values[0], numbers


def _tokens(text: str) -> list[str]:
    text, tokens, position = text.translate(_SPELLINGS).strip(), [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(
                f"{text[position : position + 10]!r} is no number and no operator"
            )
        if len(match[1]) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _apply_above(precedence: int, operators: list[str], values: list[Fraction]) -> None:
    while operators and operators[-1] != "(" and _PRECEDENCE[operators[-1]] >= precedence:
        _apply(operators.pop(), values)


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    if operator == "negate":
        values.append(-right)
        return
    left = values.pop()
    if operator == "/" and right == 0:
        raise ExpressionError("division by zero")
    values.append(
        left + right
        if operator == "+"
        else left - right
        if operator == "-"
        else left * right
        if operator == "*"
        else left / right
    )


def _problem(ground_truth: str) -> tuple[list[int], Fraction]:
    try:
        problem = json.loads(ground_truth)
        numbers = [int(n) for n in problem["numbers"]]
        return numbers, Fraction(str(problem["target"]))
    except (ValueError, KeyError, TypeError) as error:
        # A reference that is none would silently give every response 0.
        raise ValueError(
            f'ground_truth {ground_truth!r:.80} is not {{"numbers": [...], "target": n}}'
        ) from error


@contract(safe=True, reads="answer", on_timeout=0.0, truth="specification")
def countdown(response: str, ground_truth: str, *, format_score: float = 0.0) -> dict:
    """1 for an expression that uses each number exactly once and equals the target,
    `format_score` for one that uses them and does not, 0 for anything else.

    The expression is what the last <answer>...</answer> holds, else the whole response; a trailing
    "= 24" is allowed where it is the target. Parts: correct, valid (an expression that has a
    value), numbers_used. ground_truth is JSON: {"numbers": [3, 5, 7], "target": 22}. Raises
    ValueError for any other ground truth.
    """
    numbers, target = _problem(ground_truth)
    text = answer_text(response)
    left, equals, right = text.rpartition("=")
    valid = uses_all = correct = False
    try:
        if equals and evaluate(right)[0] != target:
            raise ExpressionError("it is said to equal another number")
        value, numbers_used = evaluate(left if equals else text)
        valid = True
        uses_all = collections.Counter(numbers_used) == collections.Counter(numbers)
        correct = uses_all and value == target
    except ExpressionError:
        pass
    score = 1.0 if correct else format_score if uses_all else 0.0
    return {
        "score": score,
        "correct": float(correct),
        "valid": float(valid),
        "numbers_used": float(uses_all),
    }
