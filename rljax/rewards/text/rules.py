"""Rewards by fixed rules: the answer of a response against a reference, its length, its format.

Pure functions of strings, linear in the length of the response, safe on any text (a response is
untrusted input). Of several targets in a ground truth any one counts (`targets`, which raises
TypeError for one that is no text).
"""

import json
import re
from fractions import Fraction
from typing import Literal

from rljax.contracts import contract
from rljax.rewards.answers.compare import same_letter, same_number
from rljax.rewards.answers.countdown import ExpressionError, evaluate
from rljax.rewards.answers.find import last_boxed, marked_line, reference_answer
from rljax.rewards.answers.normalise import normal_form, plain_signs, said_number
from rljax.rewards.pool.calling import Scored
from rljax.rewards.text.targets import only_target, targets


def answer_unless_whole(options: dict) -> str:
    """Returns which text a published rule reads: "answer", or "response", reasoning included, with
    its option whole_response."""
    return "response" if options["whole_response"] else "answer"


_FORMS = "rljax.rewards.on_device.forms"  # forms for the device of the rewards here
# An answer stands at the end; verl's window of 300 characters also bounds the work on a long
# response.
_GSM8K_WINDOW = 300


@contract(safe=True, reads=answer_unless_whole, on_timeout=0.0, on_device=f"{_FORMS}.gsm8k")
def gsm8k(
    response: str,
    ground_truth: str | list | dict,
    *,
    method: Literal["numeric", "strict", "flexible"] = "numeric",
    score: float = 1.0,
    format_score: float = 0.0,
    whole_response: bool = False,
) -> float:
    """GSM8K: `score` for the right answer, `format_score` for another number, 0 for none. Part:
    format/extracted, whether there is a number.

    Only the last 300 characters are read, and of the reasoning none: `whole_response=True` looks
    there, too, as verl's rule does. Where the answer is, and how it is compared:
      strict    last `#### (-?[0-9.,]+)`, commas deleted, as strings: `#### 72.`, `#### $72` fail,
                and `#### 72 or 73` passes (verl's rule, as published; so is flexible)
      numeric   what the line behind the last `####` says, as an exact number: `$1,234.50`,
                `**72**`, `72 apples`, `72%`, `3 1/2`, `5 million`, `24 + 48 = 72`. `72 or 73`,
                `72 - 1`, `72x` and `7,2` are no number
      flexible  last number anywhere, as it is written, as strings: `1,234` is not `1234`

    Raises ValueError for an unknown method, and for a ground truth that is no number.
    """
    accepted = targets(ground_truth)
    tail = response[-_GSM8K_WINDOW:]
    if method == "strict":
        number, references = (
            strict_number(tail),
            [written_number(target, method) for target in accepted],
        )
        numbers, right = number is not None, number in references
    elif method == "flexible":
        numbers = [number for number in re.findall(r"-?[0-9.,]+", tail) if number != "."]
        references = [written_number(target, method) for target in accepted]
        right = bool(numbers) and numbers[-1] in references
    elif method == "numeric":
        number, references = marked_number(tail), [_reference_number(target) for target in accepted]
        numbers, right = number is not None, number in references
    else:
        raise ValueError(f"gsm8k has no method {method!r}; use 'numeric', 'strict' or 'flexible'")
    return _with_format(score if right else format_score if numbers else 0.0, bool(numbers))


def strict_number(text: str) -> str | None:
    """The last `#### NUMBER` of a text without its commas, as verl's rule reads it; None without
    one."""
    numbers = re.findall(r"#### (-?[0-9.,]+)", text[-_GSM8K_WINDOW:])
    return numbers[-1].replace(",", "") if numbers else None


def written_number(reference: str, method: str) -> str:
    """The text that the method "strict" or "flexible" finds where a response says the reference.
    Raises ValueError for one that no response can say so."""
    text = reference.strip("$[] \n")
    if not re.fullmatch(r"-?[0-9.,]+", text):
        raise ValueError(f"ground_truth {reference!r:.80} is not a number, as {method!r} reads one")
    return text.replace(",", "") if method == "strict" else text


def _with_format(score: float, extracted: bool) -> Scored:
    return Scored(score, {"format/extracted": float(extracted)})


def marked_number(text: str) -> Fraction | None:
    """The number in the line behind the last ####; None if there is none, if there are several, and
    for a calculation that is not worked out."""
    line = marked_line(plain_signs(text)) or ""
    for typeset, plain in (("\\$", "$"), ("\\%", "%"), ("{,}", ",")):
        line = line.replace(typeset, plain)
    line = line.strip().strip("*_`").strip()
    boxed = last_boxed(line)
    line = line if boxed is None else boxed
    *sides, result = line.split("=")
    value = said_number(result.strip().strip("$*_` ") if sides else line)
    if value is None or not sides:
        return value
    # 24 + 48 = 72, not 6 = 5; `x = 72` and words say nothing against it.
    calculation = sides[-1].replace("$", "").replace(",", "").replace("x", "*")
    sums = re.fullmatch(r"[0-9.+\-*/×÷() ]+", calculation)
    return value if not sums or _worked_out(calculation) in (value, None) else None


def _worked_out(text: str) -> Fraction | None:
    try:
        return evaluate(text)[0]
    except ExpressionError:
        return None


def _reference_number(ground_truth: str) -> Fraction:
    # A reference that is no number would silently give every response 0.
    text = re.sub(r"[$€£,\s]", "", ground_truth).rstrip(".")
    if not re.fullmatch(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", text):
        raise ValueError(f"ground_truth {ground_truth!r:.80} is not a number")
    return Fraction(text)


@contract(safe=True, reads=answer_unless_whole, on_timeout=0.0)
def boxed(response: str, ground_truth: str | list | dict, *, whole_response: bool = False) -> float:
    r"""MATH: 1 if the last `\boxed{...}` (brace-matched) equals a target, else 0.

    Equal = the same text after light normalisation (spaces, `\left`, `\dfrac`, units, degrees,
    `x=`), or the same rational number (`.5`, `1/2`, `\frac{1}{2}`). Nothing symbolic: `\sqrt{8}` is
    not `2\sqrt{2}`. A box in the reasoning is none, unless `whole_response`, as published. A ground
    truth may be a box itself or a whole solution, as for math_verify(); ValueError for one that
    does not say which part of it is the answer. Part: format/extracted, whether there is a box.
    """
    accepted, answer = targets(ground_truth), last_boxed(response)
    accepted += [reference_answer(target) for target in accepted]
    right = answer is not None and any(_equal_boxes(answer, target) for target in accepted)
    return _with_format(right, answer is not None)


def _equal_boxes(answer: str, ground_truth: str) -> bool:
    verdict = same_letter(ground_truth, answer)  # first: degrees are no unit of a letter
    if verdict is not None:
        return verdict
    actual, expected = normal_form(answer), normal_form(ground_truth)
    if not actual or not expected:
        # Nothing but units or spaces is left, and two such texts are not the same answer.
        return bool(answer.strip()) and answer.strip() == ground_truth.strip()
    return actual == expected or bool(same_number(ground_truth, answer, normal_form))


@contract(safe=True, reads="answer", on_timeout=0.0, on_device=f"{_FORMS}.exact_match")
def exact_match(response: str, ground_truth: str | list | dict) -> float:
    """1 if the response equals a target, both stripped of surrounding whitespace, else 0. A ground
    truth that is the text of a list may be the answer itself, too."""
    return float(response.strip() in _stripped(ground_truth))


def _stripped(ground_truth: str | list | dict) -> list[str]:
    accepted = [target.strip() for target in targets(ground_truth)]
    return [*accepted, ground_truth.strip()] if isinstance(ground_truth, str) else accepted


@contract(safe=True, reads="answer", on_timeout=0.0)
def last_line(response: str, ground_truth: str | list | dict) -> float:
    """1 if the last line of the response that is not blank is that of a target, else 0: a solution
    in lines, whose last one is the answer."""
    lines = response.strip().splitlines()
    accepted = [(target.splitlines() or [""])[-1].strip() for target in _stripped(ground_truth)]
    return float(bool(lines) and lines[-1].strip() in accepted)


@contract(safe=True, reads="answer", on_timeout=0.0, on_device=f"{_FORMS}.sequence_match")
def sequence_match(
    response: str, ground_truth: str | list | dict, *, partial: float = 0.0
) -> float:
    """1 if the stripped texts are equal, else `partial * agree / longer`, which is below 1.

    agree = number of positions with the same character in both; longer = the larger length. The
    best of the targets. Raises ValueError unless 0 <= partial <= 1.
    """
    if not 0.0 <= partial <= 1.0:
        raise ValueError(f"sequence_match: partial must lie in [0, 1], got {partial!r}")
    text = response.strip()
    return max(_agreement(text, target, partial) for target in _stripped(ground_truth))


def _agreement(text: str, target: str, partial: float) -> float:
    if text == target:
        return 1.0
    agree = sum(a == b for a, b in zip(text, target, strict=False))
    return partial * agree / max(len(text), len(target))


@contract(safe=True, on_timeout=0.0, on_device=f"{_FORMS}.length_under")
def length_under(response: str, num_tokens: int, *, max_tokens: int) -> float:
    """1 if num_tokens < max_tokens, else 0. Both count the sampler's tokens, not characters."""
    return float(num_tokens < max_tokens)


@contract(safe=True, reads="answer", on_timeout=0.0)
def valid_json(response: str) -> float:
    """1 if the response, without its reasoning, is one JSON value (RFC 8259, so no NaN) that is not
    nested ~1000 deep, else 0."""
    try:
        # Numbers stay text: int() refuses a huge digit string, though it is valid JSON.
        json.loads(response, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@contract(safe=True, on_timeout=0.0, truth="specification", on_device=f"{_FORMS}.letter_quota")
def letter_quota(response: str, ground_truth: str | list | dict, *, quota: int) -> float:
    """max(0, 1 - |n - quota| / quota), n = how often the letter `ground_truth` occurs: 1 at the
    quota, 0 at none and at twice as many.

    Raises ValueError for a quota below 1, and for several letters.
    """
    if quota < 1:
        raise ValueError(f"letter_quota needs a quota of at least 1, got {quota}")
    return max(0.0, 1 - abs(response.count(only_target(ground_truth)) - quota) / quota)
