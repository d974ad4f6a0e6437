r"""Rewrites an answer as LaTeX that a parser of mathematics reads as it is meant.

Pure functions of strings, linear in their length.
"""

import re

from rljax.rewards.answers.normalise import (
    NUMBER,
    REMARK,
    SCALES,
    TAKEN_BACK,
    bare,
    counted,
    is_text,
    named_value,
    plain_form,
    rewritten,
    steps,
)

MAX_ANSWER_CHARACTERS = 1000

# 12 cm^2, 30 km/h: the parser knows the plain units, and takes these for products of variables.
_MEASURED = re.compile(
    rf"({NUMBER})\s*(?:[cdkm]?m|in|ft|yd|mi|[km]?g|m?[lL]|s|h|hr|min)"
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
_UNIT = (  # compiled for the first answer, which takes 0.15 s, and not at import
    rf"(?<=[0-9}})%A-Za-z])(?:\s|~|\\[,;:! ]|\\cdot(?![a-z])|[/*]){{0,6}}+(?:{_UPRIGHT_PRODUCT}"
    rf"|\\[dt]?frac\s?\{{{_UPRIGHT_PRODUCT}\s?\}}\s?\{{\s?{_UPRIGHT_PRODUCT}\s?\}}"
    rf"|\\(?:mathrm|text|rm)\s?\{{\s?\\[dt]?frac\s?\{{{_UNITS_INSIDE}\}}\s?\{{{_UNITS_INSIDE}\}}\s?\}})"
    r"\s{0,9}\.?\Z"
    r"|(?<=[0-9])(?:~|\\[,;:! ])\s?(?:\\(?:mathrm|text)\s?\{\s?[kMGm]\s?\}\s?)?\\Omega\s{0,9}\Z"
)
# Upright letters that are a constant or a variable are no unit.
_UPRIGHT_LETTER = re.compile(r"\\(?:mathrm|text)\s?\{\s?([einxyz])\s?\}")


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
_READABLE = steps(
    # The parser would take `dc` for a differential.
    (
        r"(?<![\\A-Za-z])(?=[a-d]{3,4}(?![A-Za-z]))(?=[abc]{0,3}d)[a-d]{3,4}",
        lambda match: "".join(f"({letter})" for letter in match[0]),
    ),
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
)
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
_SPACE = r"(?:\s|~|\\[,;:! ])"  # the parser would multiply the parts of 12\,345
_GAP = re.compile(rf"(?<![_^0-9])[0-9]+{_SPACE}+[0-9]")  # in \log_2 8 the first is no number
_THOUSANDS = re.compile(rf"(?<![0-9.])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])")


def latex_form(text: str) -> str | None:
    """Returns the answer in LaTeX that a parser reads with its intended meaning; None
    if it is no formula."""
    if len(text) > MAX_ANSWER_CHARACTERS or any(not _printable(c) for c in text):
        return None
    text = bare(text)
    text = (named_value(text) or text).translate(_SYMBOLS)
    text = _UPRIGHT_LETTER.sub(r" \1 ", text)
    text = re.sub(_UNIT, "", text)
    if any(_taken_back(remark[1]) for remark in REMARK.finditer(text)):
        return None
    repeating = _REPEATING.fullmatch(text) or _ELLIPSIS.fullmatch(text)
    if repeating:
        sign, integer, fixed, *repeated = repeating.groups()
        return _fraction(sign, integer, fixed, "".join(digits or "" for digits in repeated))
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    measured = _MEASURED.fullmatch(text)
    text = measured[1] if measured else text
    if quantity := counted(text):
        number, words = quantity
        scales = [SCALES[word] for word in words if word in SCALES]
        text = number + "".join(rf" \times 10^{{{scale}}}" for scale in scales)
        text += r" \times 12" if "dozen" in words else ""
        text += r"\%" if {"percent", "pct", "percentage"} & set(words) else ""
    text = text.replace(r"\$", "").replace("$", "")
    text = _TEXT_INFINITY.sub(r"\\infty ", text)
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text).replace("~", " ")
    text = rewritten(text, _READABLE)
    # The parser would add the numbers of `5 6`, as it does those of a mixed fraction.
    if _GAP.search(text) or is_text(text):
        return None
    return text.strip() or None


def _taken_back(remark: str) -> bool:
    """Returns whether a remark holds a number, or words that make another answer of it; `or` alone
    parts two answers."""
    is_joiner = remark.strip().lower() in ("or", "and", ", or", "x", "to")
    return not is_joiner and bool(re.search("[0-9]", remark) or TAKEN_BACK.search(remark))


def _printable(character: str) -> bool:
    return character >= " " and not "\ud800" <= character <= "\udfff" or character in "\t\n\r"


def _fraction(sign: str, integer: str, fixed: str, repeated: str) -> str:
    upper = int(integer + fixed + repeated) - int(integer + fixed or "0")
    return rf"{sign}\frac{{{upper}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


_BASE = re.compile(r"((?=[A-Za-z]*[0-9])[0-9A-Za-z]{1,100})_\{?([0-9]{1,2})\}?")


def without_base(text: str) -> str | None:
    """The number of `101_2` in decimal; None for what names no base, or no digits of it."""
    match = _BASE.fullmatch(plain_form(text)) if len(text) < 120 else None
    try:
        return str(int(match[1], int(match[2]))) if match else None
    except ValueError:
        return None


def spelled_alike(reference: str, answer: str) -> bool:
    r"""Returns False if the same numbers mean different things: `\{1,2\}` and `(1,2)`,
    11_2 and 11_3."""
    expected, actual = plain_form(reference), plain_form(answer)
    braces = [
        form.startswith("\\{") and not re.match(_SET_BUILDER, form) for form in (expected, actual)
    ]
    brackets = [
        form.startswith(("(", "[")) and form.endswith((")", "]")) for form in (expected, actual)
    ]
    if (braces[0] and brackets[1]) or (brackets[0] and braces[1]):
        return False
    expected, actual = _BASE.fullmatch(expected), _BASE.fullmatch(actual)
    return (
        expected is None
        if actual is None
        else expected is not None and expected.groups() == actual.groups()
    )
