r"""Extracts the answer of a math response as text, and gives it one spelling.

Pure functions of strings, linear in their length. Mathematics is in `math_answers.py`.
"""

import re
from typing import Literal

from rljax.rewards.text.rules import last_boxed

MAX_ANSWER_CHARACTERS = 1000
_WINDOW = 2000  # an answer that is not marked is looked for in the last characters only

Extraction = Literal["any", "boxed", "marked", "last"]


def find_answer(response: str, extraction: Extraction) -> str | None:
    """The text of the answer, None if there is none where it is looked for."""
    if extraction == "any":
        boxed, marked = "\\boxed" in response, "####" in response
        extraction = "boxed" if boxed else "marked" if marked else "last"
    if extraction == "boxed":
        return last_boxed(response)
    if extraction == "marked":
        _, mark, rest = response.rpartition("####")
        return rest.strip().split("\n", 1)[0].strip() or None if mark else None
    return _last_answer(response[-_WINDOW:])


_ANSWER_IS = re.compile(r"\banswer\b[ \t*_]{0,9}(?:is|was|:|=)[ \t*_:]{0,9}", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$([^$]{1,1000})\$\$|(?<![\\$0-9])\$([^$\n]{1,1000})\$"
    r"|\\\[((?:[^\\]|\\(?!\])){1,1000})\\\]|\\\(((?:[^\\\n]|\\(?!\))){1,1000})\\\)"
)
_NUMBER_RE = r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?"
_NUMBER_WITH_PERCENT = re.compile(rf"(?<![A-Za-z0-9.]){_NUMBER_RE}[ ]?(?:\\?%)?")


def _last_answer(text: str) -> str | None:
    """After the last "answer is" or "answer:", else the last formula, else the last number."""
    matches = list(_ANSWER_IS.finditer(text))
    if matches:
        # One sentence, this line or the next: the stop ends it unless a digit follows, as in 0.5.
        line = text[matches[-1].end() :].lstrip(" \t\n*_:").split("\n", 1)[0]
        rest = re.split(r"[.!?](?:\s|$)", line.strip().strip("*_"), maxsplit=1)[0]
        formulas = list(_FORMULA.finditer(rest))
        if len(formulas) == 1:
            return _content(formulas[0])
        return rest.strip(" *_$.`") or None
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _content(formulas[-1])
    numbers = _NUMBER_WITH_PERCENT.findall(text)
    return numbers[-1] if numbers else None


def _content(match: re.Match) -> str:
    return next(group for group in match.groups() if group is not None)


def plain_form(text: str) -> str:
    """The text without what only sets type: spaces, dollars, sizes of brackets, a final stop."""
    text = _unwrapped(text.strip().strip("*").strip())
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text.strip()


_PLAIN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\{,\}", ","),
        (r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\?\$", ""),
        ("[\u2212\u2013]", "-"),
        (r"(?<![0-9])\s+|\s+(?![0-9])", ""),  # 5 6 is not 56
        (r"(?<=[0-9])\.$", ""),
        (r"(?<=.)\.$", ""),
    ]
]
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it))\s*\{([^{}]*)\}")


def _unwrapped(text: str) -> str:
    r"""`\text{Evelyn}` -> `Evelyn`; what stands outside of the braces keeps them."""
    match = _WRAPPER.fullmatch(text)
    return match[1].strip() if match else text


# Names of functions and constants: their letters are no text.
_MATH_WORDS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log exp sqrt inf infinity "
    "pct percent percentage lim max min gcd lcm det mod and".split()
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NUMBER_AND_WORDS = re.compile(rf"(\$?\s*{_NUMBER_RE})\s*((?:[A-Za-z]{{3,}}\s*)+)\.?")


# 12 cm^2, 30 km/h: the parser knows the plain units, and takes these for products of variables.
_MEASURED = re.compile(
    rf"({_NUMBER_RE})\s*(?:[cdkm]?m|in|ft|yd|mi|[km]?g|m?[lL]|s|h|hr|min)"
    r"(?:\s*\^\s*\{?[23]\}?|\s*/\s*(?:[ck]?m|k?g|[lL]|s|h|hr|min)(?:\^\{?[23]\}?)?)"
)


def is_text(text: str) -> bool:
    r"""Whether the answer is text, not a formula: `\text{Evelyn}`, `no solution`, `March 5`. A
    formula's letters commute (dog is god), so text must be compared as text."""
    if _number_with_unit(text):
        return False
    text = _unwrapped(text.strip())
    if re.search(r"[\\^_=<>{}+*/|$]", text):
        return False
    return any(word.lower() not in _MATH_WORDS for word in _WORD.findall(text))


def _number_with_unit(text: str) -> tuple[str, list[str]] | None:
    """`5 apples` -> ("5", ["apples"]); None for anything else."""
    match = _NUMBER_AND_WORDS.fullmatch(text.strip()) if len(text) < 100 else None
    return (match[1], match[2].lower().split()) if match else None


def same_text(a: str, b: str) -> bool:
    """Equal but for case, spaces, brackets around and a final stop: (B) is b."""
    a, b = (" ".join(_unwrapped(x.strip()).casefold().strip(" ().:$*").split()) for x in (a, b))
    return bool(a) and a == b


_SYMBOLS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00f7": "/", "\u00b7": r"\cdot ",
        "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u03c0": r"\pi ", "\u2264": r"\le ",
        "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b2": "^{2}", "\u00b3": "^{3}",
        "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}",
        "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}", "\u00b0": r"^\circ ",
        "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ", "\u2208": r"\in ",
    }
)  # fmt: skip
_READABLE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\*\*", "^"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\[dtc]?frac\s*([0-9])\s+([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"(?<=[0-9])[eE]([-+]?[0-9]{1,4})(?![0-9.A-Za-z])", r"\\times 10^{\1}"),
        (r"(?<![0-9])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
        (r"(?<=\\sqrt )\(([^()]*)\)", r"{\1}"),
    ]
]
_TEXT_INFINITY = re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", re.IGNORECASE)
_REPEATING = re.compile(r"(-?)([0-9]{0,15})\.([0-9]{0,15})\\overline\{?([0-9]{1,15})\}?")
_SPACE = r"(?:\s|~|\\[,;:! ])"  # the parser would multiply the parts of 12\,345
_GAP = re.compile(rf"(?<![_^0-9])[0-9]+{_SPACE}+[0-9]")  # in \log_2 8 the first is no number
_THOUSANDS = re.compile(rf"(?<![0-9.])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])")


def latex_form(text: str) -> str | None:
    """The answer as LaTeX that a parser reads as it is meant; None if it is no formula."""
    text = text.strip().strip("*").strip()
    if len(text) > MAX_ANSWER_CHARACTERS or any(not _printable(c) for c in text):
        return None
    text = _unwrapped(text).translate(_SYMBOLS)
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        return _fraction(*repeating.groups())
    measured = _MEASURED.fullmatch(text)
    text = measured[1] if measured else text
    counted = _number_with_unit(text)
    if counted:
        number, words = counted
        scales = [_SCALES[word] for word in words if word in _SCALES]
        text = number + "".join(rf" \times 10^{{{scale}}}" for scale in scales)
        text += r"\%" if {"percent", "pct", "percentage"} & set(words) else ""
    text = text.replace(r"\$", "").replace("$", "")
    text = _TEXT_INFINITY.sub(r"\\infty ", text)
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    for pattern, replacement in _READABLE:
        text = pattern.sub(replacement, text)
    # The parser would add the numbers of `5 6`, as it does those of a mixed fraction.
    if _GAP.search(text) or is_text(text):
        return None
    return text.strip() or None


def _printable(character: str) -> bool:
    return character >= " " and not "\ud800" <= character <= "\udfff" or character in "\t\n\r"


def _fraction(sign: str, whole: str, once: str, again: str) -> str:
    upper = int(whole + once + again) - int(whole + once or "0")
    return rf"{sign}\frac{{{upper}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")


def spelled_alike(reference: str, answer: str) -> bool:
    r"""False where the same numbers mean different things: `\{1,2\}` and `(1,2)`, 11_2 and 11_3."""
    ours, theirs = plain_form(reference), plain_form(answer)
    braces = [form.startswith("\\{") for form in (ours, theirs)]
    brackets = [
        form.startswith(("(", "[")) and form.endswith((")", "]")) for form in (ours, theirs)
    ]
    if (braces[0] and brackets[1]) or (brackets[0] and braces[1]):
        return False
    bases = [_BASE.fullmatch(form) for form in (ours, theirs)]
    return not all(bases) or bases[0].groups() == bases[1].groups()
