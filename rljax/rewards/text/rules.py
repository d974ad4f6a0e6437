"""Rewards that are rules: the answer of a response against a reference, its length, its format.

Pure functions of strings, linear in the length of the response, safe on any text (a response is
untrusted input).
"""

import json
import re
import unicodedata
from fractions import Fraction
from typing import Literal

from rljax.contracts import contract
from rljax.rewards.answers.countdown import ExpressionError, evaluate
from rljax.rewards.answers.letters import formula_of_letter, labelled_letter, sole_letter
from rljax.rewards.pool.calling import Scored


def answer_unless_whole(options: dict) -> str:
    """Returns what a published rule reads: the answer; with its option whole_response, as it was
    published, the reasoning, too."""
    return "response" if options["whole_response"] else "answer"


# An answer stands at the end; verl's window of 300 characters also bounds the work on a long
# response.
_GSM8K_WINDOW = 300


@contract(safe=True, reads=answer_unless_whole, on_timeout=0.0)
def gsm8k(
    response: str,
    ground_truth: str,
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
    """
    check_text(ground_truth)
    tail = response[-_GSM8K_WINDOW:]
    if method == "strict":
        number = strict_number(tail)
        numbers, right = number is not None, number == ground_truth
    elif method == "flexible":
        numbers = [number for number in re.findall(r"-?[0-9.,]+", tail) if number != "."]
        right = bool(numbers) and numbers[-1] == ground_truth
    elif method == "numeric":
        number, reference = marked_number(tail), _reference_number(ground_truth)
        numbers, right = number is not None, number == reference
    else:
        raise ValueError(f"gsm8k has no method {method!r}; use 'numeric', 'strict' or 'flexible'")
    return _with_format(score if right else format_score if numbers else 0.0, bool(numbers))


def strict_number(text: str) -> str | None:
    """The last `#### NUMBER` of a text without its commas, as verl's rule reads it; None without
    one."""
    numbers = re.findall(r"#### (-?[0-9.,]+)", text[-_GSM8K_WINDOW:])
    return numbers[-1].replace(",", "") if numbers else None


def _with_format(score: float, extracted: bool) -> Scored:
    return Scored(score, {"format/extracted": float(extracted)})


# Digits of every script and full-width signs -> ASCII; the minus signs and dashes of typesetters.
_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {
    ord(sign): "-" for sign in "\u2212\u2010\u2011\u2012\u2013\ufe63"
}
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u3000"), " ")


def plain_signs(text: str) -> str:
    """The text with digits of any script, minus signs and spaces as ASCII has them."""
    if text.isascii():
        return text
    text = text.translate(_WIDE | _SPACES)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


# 1,234, also as 1 234 or, in India, 12,34,567; 12,34 is none.
_DIGITS = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])|[0-9]{1,3}(?: [0-9]{3})++(?![0-9])"
    r"|[0-9]{1,2}(?:,[0-9]{2}){1,5},[0-9]{3}(?![0-9,])|[0-9]++(?!,[0-9]))"
)
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[$€£¥]\s*(?P<second>[-+]?))?(?P<number>{_DIGITS}(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?!\.[0-9])(?:\s+(?P<upper>[0-9]{1,4})/(?P<lower>[0-9]{1,4})|\s*/\s*(?P<divisor>[0-9]{1,9}))?"
)
# What may stand behind a number: a unit and words, but no second number and nothing that takes it
# back. A letter right behind a number is a unit or a variable.
_UNIT = re.compile(r"(?:%|[€£¥$]|°[CF]?|[mgshlL](?![A-Za-z])|[A-Za-z]{2,})?[^0-9=+*^<>\\]*")
TAKEN_BACK = re.compile(
    r"\b(?:or|not|no|nor|never|wrong|incorrect|false|cannot|except|unless|either|minus|plus|times"
    r"|divided|to|between|x|half|halves|dozens?|squared|cubed|maybe|perhaps)\b|n't\b",
    re.IGNORECASE,
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LEAD = re.compile(
    r"(?:(?:so|the|final|correct|answer|total|result|is|equals?)\b[\s:]*+)*+"
    r"(?:[A-Za-z ]{1,30}[=:]\s*+)?",
    re.IGNORECASE,
)


def marked_number(text: str) -> Fraction | None:
    """The number that the line behind the last #### says; None for none, for several and for what
    is still to be worked out."""
    _, mark, rest = plain_signs(text).rpartition("####")
    line = rest.strip().partition("\n")[0] if mark else ""
    for typeset, plain in (("\\$", "$"), ("\\%", "%"), ("{,}", ",")):
        line = line.replace(typeset, plain)
    line = line.strip().strip("*_`").strip()
    boxed = last_boxed(line)
    line = line if boxed is None else boxed
    *before, said = line.split("=")
    value = _said_number(said.strip().strip("$*_` ") if before else line)
    if value is None or not before:
        return value
    # 24 + 48 = 72, not 6 = 5; `x = 72` and words say nothing against it.
    left = before[-1].replace("$", "").replace(",", "").replace("x", "*")
    sums = re.fullmatch(r"[0-9.+\-*/×÷() ]+", left)
    return value if not sums or _worked_out(left) in (value, None) else None


def _worked_out(text: str) -> Fraction | None:
    try:
        return evaluate(text)[0]
    except ExpressionError:
        return None


def _said_number(text: str) -> Fraction | None:
    """The number of `The answer is $72.`, `**72** apples`, `3 1/2`, `5 million`."""
    text = text.strip("$*_` ")
    text = text[1:-1] if text[:1] == "(" and text.find(")") == len(text) - 1 else text
    text = text[_LEAD.match(text).end() :].strip("*_` ")
    match = _PLAIN_NUMBER.match(text)
    if match is None:
        return None
    rest = text[match.end() :].replace("*", "").replace("_", "")
    if not _UNIT.fullmatch(rest) or TAKEN_BACK.search(rest) or re.match(r"\s*[-/]\s*\S|,\S", rest):
        return None
    # 5\u00bd, 5\u00b2; 5k; 5?
    if any(map(str.isnumeric, rest)) or re.match(r"(?![mgshlL])[A-Za-z](?![A-Za-z])|\s*\?", rest):
        return None
    value = Fraction(re.sub("[, ]", "", match["number"]))
    divisor = int(match["lower"] or match["divisor"] or 1)
    if divisor == 0:
        return None
    value = value + Fraction(int(match["upper"]), divisor) if match["upper"] else value / divisor
    for word in re.findall("[a-z]+", rest.lower())[:2]:
        value *= 10 ** SCALES.get(word, 0)
    return -value if "-" in (match["sign"], match["second"]) else value


def _reference_number(ground_truth: str) -> Fraction:
    # A reference that is no number would silently give every response 0.
    text = re.sub(r"[$€£,\s]", "", ground_truth).rstrip(".")
    if not re.fullmatch(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", text):
        raise ValueError(
            f"ground_truth {ground_truth!r:.80} is not a number (gsm8k(method='strict') compares"
            " texts)"
        )
    return Fraction(text)


@contract(safe=True, reads=answer_unless_whole, on_timeout=0.0)
def boxed(response: str, ground_truth: str, *, whole_response: bool = False) -> float:
    r"""MATH: 1 if the last `\boxed{...}` (brace-matched) equals the reference, else 0.

    Equal = the same text after light normalisation (spaces, `\left`, `\dfrac`, units, degrees,
    `x=`), or the same rational number (`.5`, `1/2`, `\frac{1}{2}`). Nothing symbolic: `\sqrt{8}` is
    not `2\sqrt{2}`. A box in the reasoning is none, unless `whole_response`, as published. Part:
    format/extracted, whether there is a box.
    """
    check_text(ground_truth)
    answer = last_boxed(response)
    return _with_format(
        answer is not None and _equal_boxes(answer, ground_truth), answer is not None
    )


def _equal_boxes(answer: str, ground_truth: str) -> bool:
    if letter := sole_letter(ground_truth):
        if chosen := labelled_letter(answer):
            return chosen == letter
        if formula_of_letter(answer):  # degrees are no unit of a letter
            return False
    ours, theirs = normal_form(answer), normal_form(ground_truth)
    if not ours or not theirs:
        # Nothing but units or spaces is left, and two such texts are not the same answer.
        return bool(answer.strip()) and answer.strip() == ground_truth.strip()
    number = rational(ours)
    return ours == theirs or (number is not None and number == rational(theirs))


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or brace-free `\boxed ...$`; None if there is
    none."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$", 1)[0] if text.startswith(" ", start + len("\\boxed")) else None
    depth = 0
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # `\{` is a set's brace, not a group's
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            return rest[1 : token.start()]
    return None


def _joined(match: re.Match) -> str:
    return match[1] + match[2].replace(" ", "")


# (pattern, replacement), applied in this order; every pattern takes linear time on any text.
_NORMALISE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\{,\}", ","),  # 1{,}000
        (r"\\!", ""),
        (r"\\[,;: ]|[\n\t~]", " "),  # spacing commands
        (r"(?<![0-9.])([0-9]{1,3})((?: [0-9]{3})++)(?![0-9])", _joined),  # 10\,000; 5 10 stay two
        # A unit: 12\text{ cm}^2. Not at the start: there the text is the answer; nor ` or 6`.
        (
            r"(?<=.)\\(?:text|mbox|mathrm)\{\s(?! *(?:or|and|not|is|isn't|are|if|hundred|thousand"
            r"|[bmtr]+illion|dozen|half|wrong|incorrect|false|squared|cubed)\b)[^{}0-9]*\}"
            r"(?:\^\{?[0-9]\}?)?",
            "",
        ),
        (r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1"),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:left|right)(?![a-z])", ""),
        (r"\^\{?\\circ\}?|\\?%|\\?\$", ""),
        (r"(?<![0-9])\s+|\s+(?![0-9])", ""),
        (r"^[A-Za-z]{1,2}=(?=[^=]+$)", ""),  # x=5, but no equation such as y=2x=4
        (r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}"),
        (
            r"\\frac(?:\{([^{}]*)\}|([0-9A-Za-z]))(?:\{([^{}]*)\}|([0-9A-Za-z]))",
            r"\\frac{\1\2}{\3\4}",
        ),
        (r"(?<![0-9])\.(?=[0-9])", "0."),
        (r"\.$", ""),
    ]
]


def normal_form(text: str) -> str:
    """One spelling for the common ways to write the same LaTeX answer."""
    text = plain_signs(text.strip())
    for pattern, replacement in _NORMALISE:
        text = pattern.sub(replacement, text)
    return text


_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]*)?"
_RATIONAL = re.compile(
    rf"([-+]?)\\frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}|({_NUMBER})(?:/({_NUMBER}))?"
)


def rational(text: str) -> Fraction | None:
    r"""`12`, `1,200`, `0.5`, `1/2` or `\frac{1}{2}` in normal form -> Fraction; else None."""
    if len(text) > 64:  # int() of a digit string takes quadratic time
        return None
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?", text):
        text = text.replace(",", "")
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return None
    sign, upper, lower, number, divisor = match.groups()
    value, divisor = Fraction(upper or number), Fraction(lower or divisor or "1")
    if divisor == 0:
        return None
    return (-value if sign == "-" else value) / divisor


@contract(safe=True, reads="answer", on_timeout=0.0)
def exact_match(response: str, ground_truth: str) -> float:
    """1 if the texts are equal once stripped of surrounding whitespace, else 0."""
    check_text(ground_truth)
    return float(response.strip() == ground_truth.strip())


@contract(safe=True, reads="answer", on_timeout=0.0)
def last_line(response: str, ground_truth: str) -> float:
    """1 if the last line of the response that is not blank is the ground truth, else 0: a solution
    in lines, whose last one is the answer."""
    check_text(ground_truth)
    lines = response.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == ground_truth.strip())


@contract(safe=True, reads="answer", on_timeout=0.0)
def sequence_match(response: str, ground_truth: str, *, partial: float = 0.0) -> float:
    """1 if the stripped texts are equal, else `partial * agree / longer`, which is below 1.

    agree = number of positions with the same character in both; longer = the larger length.
    """
    check_text(ground_truth)
    if not 0.0 <= partial <= 1.0:
        raise ValueError(f"sequence_match: partial must lie in [0, 1], got {partial!r}")
    ours, theirs = response.strip(), ground_truth.strip()
    if ours == theirs:
        return 1.0
    agree = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return partial * agree / max(len(ours), len(theirs))


@contract(safe=True, on_timeout=0.0)
def length_under(response: str, num_tokens: int, *, max_tokens: int) -> float:
    """1 if num_tokens < max_tokens, else 0. In the sampler's tokens, never in characters."""
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


def check_text(ground_truth: str) -> None:
    # 72 == "72" is False without an error: a whole data set would score 0.
    if not isinstance(ground_truth, str):
        raise TypeError(
            f"ground_truth must be text, got {type(ground_truth).__name__} {ground_truth!r:.80}"
        )


@contract(safe=True, on_timeout=0.0, truth="specification")
def letter_quota(response: str, ground_truth: str, *, quota: int) -> float:
    """max(0, 1 - |n - quota| / quota), n = how often the letter `ground_truth` occurs: 1 at the
    quota, 0 at none and at twice as many."""
    if quota < 1:
        raise ValueError(f"letter_quota needs a quota of at least 1, got {quota}")
    return max(0.0, 1 - abs(response.count(ground_truth) - quota) / quota)
