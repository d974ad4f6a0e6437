r"""Extracts the answer of a math response as text, and gives it one spelling.

Pure functions of strings, linear in their length. Mathematics is in `math_answers.py`.
"""

import re
from typing import Literal

from rljax.rewards.text.rules import SCALES, TAKEN_BACK, last_boxed, plain_signs

MAX_ANSWER_CHARACTERS = 1000
_WINDOW = 2000  # an answer that is not marked is looked for in the last characters only

Extraction = Literal["any", "boxed", "marked", "last"]


def find_answer(response: str, extraction: Extraction) -> str | None:
    """The text of the answer, None if there is none where it is looked for."""
    response = response.replace("\\fbox", "\\boxed")
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


# The stop of a sentence, unless a digit follows as in 0.5, or a clause that gives a reason.
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|,?\s(?:because|since|as shown|which)\b", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"\banswer (?:cannot|can not|can't|could not|isn't|is not|must not)\b", re.IGNORECASE
)


def _last_answer(text: str) -> str | None:
    """After the last "answer is" or "answer:", else the last formula, else the last number."""
    matches = list(_ANSWER_IS.finditer(text))
    if matches:
        # One sentence, on this line or the next.
        line = text[matches[-1].end() :].lstrip(" \t\n*_:").split("\n", 1)[0]
        rest = _SENTENCE_END.split(line.strip().strip("*_"), maxsplit=1)[0]
        formulas = list(_FORMULA.finditer(rest))
        if len(formulas) == 1:
            return _content(formulas[0])
        return rest.strip(" *_$.`") or None
    if _NO_ANSWER.search(text):
        return None
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _content(formulas[-1])
    numbers = _NUMBER_WITH_PERCENT.findall(text)
    return numbers[-1] if numbers else None


def _content(match: re.Match) -> str:
    return next(group for group in match.groups() if group is not None)


def plain_form(text: str) -> str:
    """The text without what only sets type: spaces, dollars, sizes of brackets, a final stop."""
    text = _bare(text)
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text.strip()


_PLAIN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\{,\}", ","),
        (r"^\(([0-9A-Za-z]+)\)_", r"\1_"),  # (101)_2
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
# Commands that only change how their braces look, and colours, whose first braces name one.
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|underline|fbox"
    r"|boxed|ensuremath|(?:text)?color\s*\{[a-zA-Z0-9!]{1,20}\})\s*(?=\{)"
)
_COLOURED = re.compile(r"\{?\s*\\color\s*\{[a-zA-Z0-9!]{1,20}\}\s*([^{}]{1,200}?)\}?")
# What leads to an answer and says nothing of it; only before a formula.
_LEAD = re.compile(
    r"(?:(?:(?:so|thus|hence|therefore|then|the|final|correct|exact|answer|result|value|number|is|it"
    r"|approximately|approx|about|around|roughly|nearly|almost|exactly|precisely|definitely|clearly"
    r"|simply|just|certainly|surely|obviously|probably|indeed|actually|equal to|equals|we get)\b"
    r"|\\text\s*\{\s*(?:approximately|about|around|roughly|exactly)\s*\}|\\approx|\u2248|\\simeq|\\sim|=|:|,|\\Rightarrow|\\implies|\\therefore)[\s:,.]*+)++"
    r"(?=[-+(\[\\$0-9.{\u221a\u03c0|]|[A-Za-z](?![A-Za-z]))(?!=)",
    re.IGNORECASE,
)


def _unwrapped(text: str) -> str:
    r"""`\text{Evelyn}` -> `Evelyn`, `\color{red}{5}` -> `5`; what is not all in braces keeps
    them."""
    for _ in range(5):
        text = text.strip().strip("$").strip()
        match = _WRAPPER.match(text)
        if match is None:
            coloured = _COLOURED.fullmatch(text) if "\\color" in text[:30] else None
            return coloured[1].strip() if coloured else text
        depth = 0
        for brace in re.finditer(r"\\.|[{}]", text[match.end() :], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                break
        if depth or match.end() + brace.end() != len(text):
            return text
        text = text[match.end() + 1 : -1]
    return text.strip()


_CURRENCY = re.compile(
    r"^(?:[\u00a3\u20ac\u00a5\u20b9]|Rs\.?|\\text\s*\{\s*(?:Rs\.?|USD|EUR)\s*\})\s*(?=[0-9])"
)
# A comma, a space, `12^{\text{th}}` and `k \in \mathbb{Z}` at the end.
_TRAILING = re.compile(
    r"(?:(?<!\\)(?:\\[!,;: ]|[,;])\s{0,20}){1,9}$"
    r"|(?<=[0-9])\^?\{?\\(?:text|mathrm)\s?\{\s?(?:st|nd|rd|th)\s?\}\}?$"
    r"|,\s{0,9}(?:\\q?quad\s?)?[a-z]\s?\\in\s?\\mathbb\{?[ZN]\}?$"
)


def _bare(text: str) -> str:
    """The answer without what wraps it and without the words that lead to it."""
    text = _unwrapped(plain_signs(text).strip().strip("*").strip()).strip("\u3002").strip()
    text = re.sub(r"(?<![.])\.$", "", text.replace("{:}", ":"))
    text = _CURRENCY.sub("", _TRAILING.sub("", text))
    lead = _LEAD.match(text)
    return _unwrapped(text[lead.end() :]) if lead else text


# Names of functions and constants: their letters are no text.
_MATH_WORDS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log exp sqrt inf infinity "
    "pct percent percentage lim max min gcd lcm det mod and".split()
)
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
_NAMED = {word: str(number) for number, word in enumerate(_SMALL)} | {
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    "no solution": r"\emptyset",
    "no solutions": r"\emptyset",
    "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset",
    "the empty set": r"\emptyset",
    "empty set": r"\emptyset",
}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NUMBER_AND_WORDS = re.compile(rf"(\$?\s*{_NUMBER_RE})\s*((?:[A-Za-z]{{3,}}\s*)+)\.?")


# 12 cm^2, 30 km/h: the parser knows the plain units, and takes these for products of variables.
_MEASURED = re.compile(
    rf"({_NUMBER_RE})\s*(?:[cdkm]?m|in|ft|yd|mi|[km]?g|m?[lL]|s|h|hr|min)"
    r"(?:\s*\^\s*\{?[23]\}?|\s*/\s*(?:[ck]?m|k?g|[lL]|s|h|hr|min)(?:\^\{?[23]\}?)?)"
)


# Units with powers, written upright: \mathrm{m/s^2}, \text{ kg}\cdot\text{m}^2, /\mathrm{s}.
_SYMBOL = (
    r"(?:(?:[kMGTPhcdmnpf\u00b5\u03bc]|da|\\mu\s?)?(?:mol|cal|rad|bar|Pa|Hz|eV|Wh|Bq|Sv|lm|lx|cd|"
    r"\\Omega|\\ohm|[mgsAKNJWVCFHTLlt]|Wb)|min|hr?|days?|d|in|ft|yd|mi|lbs?|oz|gal|sr|atm|mmHg|ppm|amu|"
    r"u|ha|ac|mph|kph|kmh|rpm|knots?|deg|au|AU|ly|pc|units?|square|sq|cubic|per|"
    r"(?:kilo|centi|milli|nano|micro)?(?:met(?:er|re)|gram|lit(?:er|re)|second|joule|watt|newton|"
    r"volt|pascal)s?|inch(?:es)?|feet|foot|yards?|miles?|minutes?|hours?|weeks?|months?|years?|"
    r"pounds?|ounces?)"
)
_GAP_OR_TIMES = r"(?:\s|~|\\[,;:! ]|\\cdot(?![a-z])|\\times(?![a-z])|[/.*\u00b7()-]){0,6}+"
_UNIT_POWER = r"(?:\s?\^\s?(?:[+-]?[0-9]|\{\s?[+-]?[0-9](?:/[0-9])?\s?\}))?"
_UNITS_INSIDE = rf"{_GAP_OR_TIMES}(?:{_SYMBOL}(?![A-Za-z]){_UNIT_POWER}{_GAP_OR_TIMES}){{1,8}}"
_UPRIGHT = rf"\\(?:text(?:rm|up)?|mbox|mathrm|rm)\s?\{{{_UNITS_INSIDE}\}}{_UNIT_POWER}"
_UPRIGHT_UNITS = rf"(?:\\mu\s?)?{_UPRIGHT}(?:\s?\\(?:Omega|ohm)(?![A-Za-z]))?"
_UPRIGHT_PRODUCT = rf"{_UPRIGHT_UNITS}(?:{_GAP_OR_TIMES}{_UPRIGHT_UNITS}){{0,7}}"
_UNIT = re.compile(
    rf"(?<=[0-9}})%A-Za-z])(?:\s|~|\\[,;:! ]|\\cdot(?![a-z])|[/*]){{0,6}}+(?:{_UPRIGHT_PRODUCT}"
    rf"|\\[dt]?frac\s?\{{{_UPRIGHT_PRODUCT}\s?\}}\s?\{{\s?{_UPRIGHT_PRODUCT}\s?\}}"
    rf"|\\(?:mathrm|text|rm)\s?\{{\s?\\[dt]?frac\s?\{{{_UNITS_INSIDE}\}}\s?\{{{_UNITS_INSIDE}\}}\s?\}})"
    r"\s{0,9}\.?\Z"
    r"|(?<=[0-9])(?:~|\\[,;:! ])\s?(?:\\(?:mathrm|text)\s?\{\s?[kMGm]\s?\}\s?)?\\Omega\s{0,9}\Z"
)
# Upright letters that are a constant or a variable are no unit.
_UPRIGHT_LETTER = re.compile(r"\\(?:mathrm|text)\s?\{\s?([einxyz])\s?\}")


def is_text(text: str) -> bool:
    r"""Returns whether the answer is text, not a formula: `\text{Evelyn}`, `no solution`, `March
    5`. A formula's letters commute (dog is god), so text must be compared as text."""
    worded = re.fullmatch(r"\s*\\(?:text[a-z]*|mbox|mathrm)\s*\{[A-Za-z]{2,99}\}\.?\s*", text)
    text = _bare(text)
    if _number_with_unit(text) or _name(text):
        return False
    if worded or text.lower() == "no":
        return True
    if re.search(r"[\\^_=<>{}+*/|$]", text):
        return False
    return any(word.lower() not in _MATH_WORDS for word in _WORD.findall(text))


def _number_with_unit(text: str) -> tuple[str, list[str]] | None:
    r"""`5 apples`, `5\text{ apples}` -> ("5", ["apples"]); None for anything else."""
    if len(text) > 100:
        return None
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*([A-Za-z ]+)\}", r" \1", text.strip())
    match = _NUMBER_AND_WORDS.fullmatch(text)
    return (match[1], match[2].lower().split()) if match and not TAKEN_BACK.search(text) else None


def _name(text: str) -> str | None:
    """`five` -> 5, `all real numbers` -> their sign; None for what is no name of a value."""
    return _NAMED.get(text.lower().strip(" .")) if len(text) < 30 else None


def same_text(a: str, b: str) -> bool:
    """Equal but for case, spaces, brackets around and a final stop: (B) is b."""
    a, b = (
        " ".join(_REMARK.sub(r"\1", _bare(x)).casefold().strip(" ().:$*").split()) for x in (a, b)
    )
    return bool(a) and a == b


_SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "\u00f7": "/",
        "\u00b7": r"\cdot ",
        "\u221e": r"\infty ",
        "\u221a": r"\sqrt ",
        "\u03c0": r"\pi ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u00b2": "^{2}",
        "\u00b3": "^{3}",
        "\u00bd": r"\frac{1}{2}",
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\u2153": r"\frac{1}{3}",
        "\u2154": r"\frac{2}{3}",
        "\u00b0": r"^\circ ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u2205": r"\emptyset ",
        "\u2208": r"\in ",
    }
)
# {x | x > 3}
_SET_BUILDER = r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?(?:\\mid|\||:)(.*)\\\}$"
_READABLE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\*\*", "^"),
        (r"\{\}(?=\s?\^\s?\{?\s?\\circ)", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\[dtc]?frac\s*([0-9])\s+([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"(?<=[0-9])[eE]([-+]?[0-9]{1,4})(?![0-9.A-Za-z])", r"\\times 10^{\1}"),
        (r"(?<![0-9])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
        (r"(?<=\\sqrt )\(([^()]*)\)", r"{\1}"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\log_\{?e\}?(?![A-Za-z0-9])", r"\\ln "),
        (r"\\[dtc]?frac\s+([A-Za-z])\s*([A-Za-z0-9])", r"\\frac{\1}{\2}"),
        (r"\\bmod(?![A-Za-z])|(?<![\\A-Za-z])mod(?![A-Za-z])", r"\\mod "),
        (_SET_BUILDER, r"\1"),
        (r"^\](.*,.*)(?=[\[\]]$)", r"(\1"),  # ]0, 1[, as in France
        (r"^([(\[][^\[\]]*,[^\[\]]*)\[$", r"\1)"),
    ]
]
_TEXT_INFINITY = re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", re.IGNORECASE)
# 0.\overline{3}, 0.1\bar{6}, 0.(3), 0.\dot{1}4285\dot{7}; and 0.333... of one digit.
_REPEATING = re.compile(
    r"(-?)([0-9]{0,15})\.([0-9]{0,15})(?:\\(?:overline|bar|dot)\s*\{?([0-9]{1,15})\}?"
    r"|\(([0-9]{1,15})\)|\\dot\{?([0-9])\}?([0-9]{0,13})\\dot\{?([0-9])\}?)"
)
_ELLIPSIS = re.compile(
    r"(-?)([0-9]{0,15})\.([0-9]{0,15}?)([0-9])\4{2,15}(?:\.\.\.|\u2026|\\l?dots)"
)
_DEGREES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*\^\s*\{?\s*\\circ\s*\}?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
# A remark in a formula is no part of it: `5 \text{ or 6}`, `5 \text{ is wrong}`.
_REMARK = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
_SPACE = r"(?:\s|~|\\[,;:! ])"  # the parser would multiply the parts of 12\,345
_GAP = re.compile(rf"(?<![_^0-9])[0-9]+{_SPACE}+[0-9]")  # in \log_2 8 the first is no number
_THOUSANDS = re.compile(rf"(?<![0-9.])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])")


def latex_form(text: str) -> str | None:
    """The answer as LaTeX that a parser reads as it is meant; None if it is no formula."""
    if len(text) > MAX_ANSWER_CHARACTERS or any(not _printable(c) for c in text):
        return None
    text = _bare(text)
    text = (_name(text) or text).translate(_SYMBOLS)
    text = _UPRIGHT_LETTER.sub(r" \1 ", text)
    text = _UNIT.sub("", text)
    if any(_taken_back(remark[1]) for remark in _REMARK.finditer(text)):
        return None
    repeating = _REPEATING.fullmatch(text) or _ELLIPSIS.fullmatch(text)
    if repeating:
        sign, whole, once, *again = repeating.groups()
        return _fraction(sign, whole, once, "".join(digits or "" for digits in again))
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    measured = _MEASURED.fullmatch(text)
    text = measured[1] if measured else text
    counted = _number_with_unit(text)
    if counted:
        number, words = counted
        scales = [SCALES[word] for word in words if word in SCALES]
        text = number + "".join(rf" \times 10^{{{scale}}}" for scale in scales)
        text += r" \times 12" if "dozen" in words else ""
        text += r"\%" if {"percent", "pct", "percentage"} & set(words) else ""
    text = text.replace(r"\$", "").replace("$", "")
    text = _TEXT_INFINITY.sub(r"\\infty ", text)
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text).replace("~", " ")
    for pattern, replacement in _READABLE:
        text = pattern.sub(replacement, text)
    # The parser would add the numbers of `5 6`, as it does those of a mixed fraction.
    if _GAP.search(text) or is_text(text):
        return None
    return text.strip() or None


def _taken_back(remark: str) -> bool:
    """Returns whether a remark holds a number, or words that make another answer of it; `or` alone
    parts two answers."""
    alone = remark.strip().lower() in ("or", "and", ", or", "x", "to")
    return not alone and bool(re.search("[0-9]", remark) or TAKEN_BACK.search(remark))


def _printable(character: str) -> bool:
    return character >= " " and not "\ud800" <= character <= "\udfff" or character in "\t\n\r"


def _fraction(sign: str, whole: str, once: str, again: str) -> str:
    upper = int(whole + once + again) - int(whole + once or "0")
    return rf"{sign}\frac{{{upper}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


_BASE = re.compile(r"((?=[A-Za-z]*[0-9])[0-9A-Za-z]{1,100})_\{?([0-9]{1,2})\}?")


def without_base(text: str) -> str | None:
    """The number of `101_2` in decimal; None for what names no base, or no digits of it."""
    match = _BASE.fullmatch(plain_form(text)) if len(text) < 120 else None
    try:
        return str(int(match[1], int(match[2]))) if match else None
    except ValueError:
        return None


def spelled_alike(reference: str, answer: str) -> bool:
    r"""False where the same numbers mean different things: `\{1,2\}` and `(1,2)`, 11_2 and 11_3."""
    ours, theirs = plain_form(reference), plain_form(answer)
    braces = [
        form.startswith("\\{") and not re.match(_SET_BUILDER, form) for form in (ours, theirs)
    ]
    brackets = [
        form.startswith(("(", "[")) and form.endswith((")", "]")) for form in (ours, theirs)
    ]
    if (braces[0] and brackets[1]) or (brackets[0] and braces[1]):
        return False
    ours, theirs = _BASE.fullmatch(ours), _BASE.fullmatch(theirs)
    return ours is None if theirs is None else ours is not None and ours.groups() == theirs.groups()
