r"""Gives the text of an answer one spelling, and a number its value.

`plain_form` is the spelling of math answers; `normal_form`, that of the reward `boxed`, also drops
units, degrees and percent signs; `squad_form` is that of text answers. `latex.py` spells what a
parser of mathematics reads. Pure functions of strings, linear in their length.
"""

import re
import string
import unicodedata
from fractions import Fraction

# Digits of every script and full-width signs -> ASCII; the minus signs and dashes of typesetters.
WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_SIGNS = (
    WIDE
    | dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), "-")
    | dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u3000"), " ")
)


def plain_signs(text: str) -> str:
    """The text with digits of any script, minus signs and spaces as ASCII has them."""
    if text.isascii():
        return text
    text = text.translate(_SIGNS)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


SPACING = r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~"
# A text in a formula; as a remark it is no part of it: `5 \text{ or 6}`, `5 \text{ is wrong}`.
REMARK = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
NUMBER = r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?"


def steps(*pairs: tuple) -> list[tuple]:
    """Compiles (pattern, replacement) pairs for `rewritten`; each takes linear time on any text."""
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def rewritten(text: str, steps: list[tuple]) -> str:
    """The text after each substitution, in their order."""
    for pattern, replacement in steps:
        text = pattern.sub(replacement, text)
    return text


def plain_form(text: str) -> str:
    """The text without what only sets type: spaces, dollars, sizes of brackets, a final stop."""
    return rewritten(bare(text), _PLAIN).strip()


_PLAIN = steps(
    (r"\{,\}", ","),
    (r"^\(([0-9A-Za-z]+)\)_", r"\1_"),  # (101)_2
    (SPACING, " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\?\$", ""),
    ("[\u2212\u2013]", "-"),
    (r"(?<![0-9])\s+|\s+(?![0-9])", ""),  # 5 6 is not 56
    (r"(?<=[0-9])\.$", ""),
    (r"(?<=.)\.$", ""),
)
# Commands that only change how their braces look, and colours, whose first braces name one.
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|underline|fbox"
    r"|boxed|ensuremath|(?:text)?color\s*\{[a-zA-Z0-9!]{1,20}\})\s*(?=\{)"
)
_COLOURED = re.compile(r"\{?\s*\\color\s*\{[a-zA-Z0-9!]{1,20}\}\s*([^{}]{1,200}?)\}?")
# Words that lead to an answer and do not change it; only before a formula.
_LEAD = re.compile(
    r"(?:(?:(?:so|thus|hence|therefore|then|the|final|correct|exact|answer|result|value|number|is|it"
    r"|approximately|approx|about|around|roughly|nearly|almost|exactly|precisely|definitely|clearly"
    r"|simply|just|certainly|surely|obviously|probably|indeed|actually|equal to|equals|we get)\b"
    r"|\\text\s*\{\s*(?:approximately|about|around|roughly|exactly)\s*\}|\\approx|\u2248|\\simeq|\\sim|=|:|,|\\Rightarrow|\\implies|\\therefore)[\s:,.]*+)++"
    r"(?=[-+(\[\\$0-9.{\u221a\u03c0|]|[A-Za-z](?![A-Za-z]))(?!=)",
    re.IGNORECASE,
)


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` is a set's brace, not a group's


def group_end(text: str, start: int) -> int | None:
    """The index behind the brace that closes the one at `start`; None if none does."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.end()
    return None


def _unwrapped(text: str) -> str:
    r"""`\text{Evelyn}` -> `Evelyn`, `\color{red}{5}` -> `5`; what is not all in braces keeps
    them."""
    for _ in range(5):
        text = text.strip().strip("$").strip()
        match = _WRAPPER.match(text)
        if match is None:
            coloured = _COLOURED.fullmatch(text) if "\\color" in text[:30] else None
            return coloured[1].strip() if coloured else text
        if group_end(text, match.end()) != len(text):
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


def bare(text: str) -> str:
    """The answer without what wraps it and without the words that lead to it."""
    text = _unwrapped(plain_signs(text).strip().strip("*").strip()).strip("\u3002").strip()
    text = re.sub(r"(?<![.])\.$", "", text.replace("{:}", ":"))
    text = _CURRENCY.sub("", _TRAILING.sub("", text))
    lead = _LEAD.match(text)
    return _unwrapped(text[lead.end() :]) if lead else text


def _joined(match: re.Match) -> str:
    return match[1] + match[2].replace(" ", "")


_NORMALISE = steps(
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
    (r"\\frac(?:\{([^{}]*)\}|([0-9A-Za-z]))(?:\{([^{}]*)\}|([0-9A-Za-z]))", r"\\frac{\1\2}{\3\4}"),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"\.$", ""),
)


def normal_form(text: str) -> str:
    """One spelling for the common ways to write the same LaTeX answer."""
    return rewritten(plain_signs(text.strip()), _NORMALISE)


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_form(text: str) -> str:
    """Returns the text in lower case, without punctuation, the articles a, an, the, and repeated
    spaces (SQuAD). A text of which nothing would be left ("A", "+") keeps them."""
    stripped = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(stripped.split()) or " ".join(text.lower().split())


# -- numbers --

# 1,234, also as 1 234 or, in India, 12,34,567; 12,34 is none.
_DIGITS = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])|[0-9]{1,3}(?: [0-9]{3})++(?![0-9])"
    r"|[0-9]{1,2}(?:,[0-9]{2}){1,5},[0-9]{3}(?![0-9,])|[0-9]++(?!,[0-9]))"
)
_PLAIN_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[$€£¥]\s*(?P<second>[-+]?))?(?P<number>{_DIGITS}(?:\.[0-9]++)?|\.[0-9]++)"
    r"(?!\.[0-9])(?:\s+(?P<upper>[0-9]{1,4})/(?P<lower>[0-9]{1,4})|\s*/\s*(?P<divisor>[0-9]{1,9}))?"
)
# Text that may stand behind a number: a unit and words, but no second number and no word that takes
# it back. A letter right behind a number is a unit or a variable.
_UNIT = re.compile(r"(?:%|[€£¥$]|°[CF]?|[mgshlL](?![A-Za-z])|[A-Za-z]{2,})?[^0-9=+*^<>\\]*")
TAKEN_BACK = re.compile(
    r"\b(?:or|not|no|nor|never|wrong|incorrect|false|cannot|except|unless|either|minus|plus|times"
    r"|divided|to|between|x|half|halves|dozens?|squared|cubed|maybe|perhaps)\b|n't\b",
    re.IGNORECASE,
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER_LEAD = re.compile(
    r"(?:(?:so|the|final|correct|answer|total|result|is|equals?)\b[\s:]*+)*+"
    r"(?:[A-Za-z ]{1,30}[=:]\s*+)?",
    re.IGNORECASE,
)


def said_number(text: str) -> Fraction | None:
    """The number in `The answer is $72.`, `**72** apples`, `3 1/2`, `5 million`; None if there is
    no such number."""
    text = text.strip("$*_` ")
    text = text[1:-1] if text[:1] == "(" and text.find(")") == len(text) - 1 else text
    text = text[_NUMBER_LEAD.match(text).end() :].strip("*_` ")
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


def integer_of(text: str, low: int, high: int) -> int | None:
    r"""The integer from `low` to `high` that a text is, also with a unit, as a degree or behind a
    name (`336^\circ`, `m+n = 25`); None for any other text."""
    text = text[:1000].replace("°", "")
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(r"[^\d<>!=]*", name):  # no equation, and no bound such as n>=25
        text = value
    for form in (plain_form, normal_form):
        value = rational(form(text))
        if value is not None:
            return int(value) if value.denominator == 1 and low <= value <= high else None
    return None


# Names of functions and constants: their letters are no text.
_MATH_WORDS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log exp sqrt inf infinity "
    "pct percent percentage lim max min gcd lcm det mod and".split()
)
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
_NAMED = (
    {word: str(number) for number, word in enumerate(_SMALL)}
    | dict.fromkeys(("all real numbers", "all reals"), r"\mathbb{R}")
    | dict.fromkeys(
        (f"no {real}solution{s}" for real in ("", "real ") for s in ("", "s")), r"\emptyset"
    )
    | dict.fromkeys(("the empty set", "empty set"), r"\emptyset")
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# Letters that are variables where each of them stands once, and no word: abc, xyz, pqr.
_FACTORS = tuple(map(set, ("abcd abcxyz xyzt uvwxyz pqr rst kmnp klmn ijk lwh mgh prt".split())))
_TIME = re.compile(
    r"([0-9]{1,2})(:[0-9]{2}(?::[0-9]{2})?)?\s{0,9}(?:([AaPp])\s?\.\s?[Mm]\b|([AP])M\b|([ap])m\b)\.?"
)
_NUMBER_AND_WORDS = re.compile(rf"(\$?\s*{NUMBER})\s*((?:[A-Za-z]{{3,}}\s*)+)\.?")


def is_text(text: str) -> bool:
    r"""Returns whether the answer is text, not a formula: `\text{Evelyn}`, `no solution`, `March
    5`. A formula's letters commute (dog is god), so text must be compared as text."""
    worded = re.fullmatch(r"\s*\\(?:text[a-z]*|mbox|mathrm)\s*\{[A-Za-z]{2,99}\}\.?\s*", text)
    text = bare(text)
    if counted(text) or named_value(text):
        return False
    if time_of_day(text):
        return True
    if worded or text.lower() == "no":
        return True
    if re.search(r"[\\^_=<>{}+*/|$]", text):
        return False
    words = _WORD.findall(text)
    return any(word.lower() not in _MATH_WORDS and not _is_product(word) for word in words)


def _is_product(word: str) -> bool:
    """Returns whether the letters are variables: abc is bca, and dog is not god."""
    letters = set(word)
    return len(letters) == len(word) and any(letters <= factors for factors in _FACTORS)


def time_of_day(text: str) -> str | None:
    r"""`8:00 \text{ PM}`, `8:00 p.m.` -> 8:00 pm; None for anything else; 5 pm is a length."""
    if len(text) > 100:
        return None
    match = _TIME.fullmatch(unwrapped_remarks(text))
    if match is None or match[5] and not match[2]:
        return None
    half = (match[3] or match[4] or match[5]).lower()
    return f"{int(match[1])}{match[2] or ':00'} {half}m"


def unwrapped_remarks(text: str) -> str:
    r"""The answer with the words of `\text{...}` as they stand, and single spaces: `8:00 PM`."""
    text = re.sub(SPACING, " ", bare(text))
    return " ".join(REMARK.sub(r" \1 ", text).split())


def counted(text: str) -> tuple[str, list[str]] | None:
    r"""`5 apples`, `5\text{ apples}` -> ("5", ["apples"]); None for anything else."""
    if len(text) > 100:
        return None
    text = re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*([A-Za-z ]+)\}", r" \1", text.strip())
    match = _NUMBER_AND_WORDS.fullmatch(text)
    if match is None or TAKEN_BACK.search(text) or any(map(_is_product, match[2].split())):
        return None
    return match[1], match[2].lower().split()


def named_value(text: str) -> str | None:
    """`five` -> 5, `all real numbers` -> their sign; None for what is no name of a value."""
    return _NAMED.get(text.lower().strip(" .")) if len(text) < 30 else None
