r"""Reads the letter of a multiple choice from an answer: `B`, `(B)`, `B. Paris`,
`\textbf{(B)}\ 12`.

Pure functions of strings, linear in their length.
"""

import re
import string

from rljax.rewards.answers.normalise import SPACING, WIDE

# `B`, `(B)`, `**B**`, `Option B`; what follows is no letter.
_LETTER = re.compile(
    r"(?:\W{0,6}(?:option|choice|letter|answer)\b)?[\W_]{0,6}(?<!°)([A-Za-z])(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# A formula or a name that begins with the letter: `B^2`, `B_1`, `B'`, `C++`, `B-tree`.
_FORMULA = re.compile(r"[)}\]$]*(?:\s*\^|_[A-Za-z0-9{\\]|[\u2032°#]|\+(?!\w)|-[a-z])")
_APOSTROPHES = ("'", "\u2019")
_SEVERAL = re.compile(
    r"[()\[\]{}.:*$\"'`\s]*+(?:,|/|&|[\u3001和或と及与與跟]|(?:or|and|maybe|perhaps|possibly|plus|vs|versus"
    r"|as\s+well\s+as|oder|und|ou|et|o|y|e|или|и)\b)\s*"
    r"(?:(?:or|and|maybe|perhaps|possibly|also|even|else|rather)\b\s*)*\W{0,3}"
    r"[A-Za-z](?![A-Za-z'])",
    re.IGNORECASE,
)
# `B. No, wait: C`
_CORRECTED = re.compile(
    r"(?i:\b(?:no|wait|actually|rather|sorry|correction|hmm)\b)[^A-Za-z0-9]{1,3}"
    r"(?:[a-z']{1,10}[^A-Za-z0-9]{1,3}){0,4}([A-Z])(?![A-Za-z0-9])"
)
# `A;B`, `A|B`, `A-D`, `(A)(B)`, `A \lor B`, `A : B`: a second letter alone behind signs alone.
_ANOTHER = re.compile(
    r"(?:[)}\].:*\s]*[;|\\+–-]\W{0,3}|[)\]}]+\W{0,3}[(\[{]"
    r"|[)}\]*$\s]*(?:\\[A-Za-z]{2,20}+(?!\{)|[<>=~\u00d7\u00b7\u2190-\u22ff])\W{0,3}"
    r"|[)}\]*$]*\s+:\W{0,3}|[)}\]*$]*:|[)}\]*$]*[.:]\s+(?=[A-HJ][\s$)}\].*]*\Z))([A-Z])(?![\w'-]|\s+\w)"
)
# `B.C.`, `A.M.`; `B (wrong)`
_NO_CHOICE = re.compile(r"\.[A-Z](?:\.|\W{0,3}\Z)|\s{0,3}[(\[](?:wrong|incorrect|false)\b")
# `B: 5, C: 6`; `A. x B. y`
_LATER_LABEL = re.compile(r"(?<![A-Za-z])([A-Z])[.)]\s")
_LATER_COLON = re.compile(r"(?<![A-Za-z])([A-Z])[\s$)}\]*]{0,5}:")
# `B (Paris) or C (Rome)`, `B, Paris, C, Rome`
_LATER_REMARK = re.compile(r"(?:[,;]|\b(?:and|or))\s{1,3}\(?([A-Z])\)?\s{0,3}(?=[,;(]|\Z)")
_REFUSED = re.compile(r"(?i:\b(?:not|neither|nor|than|unlike|wrong|incorrect|false|because)\b)")
# Commands that set type, and what they leave between an answer's parts.
_TYPE = re.compile(
    r"\\(?:text[a-z]*|math[a-z]+|mbox|boldsymbol|bm|operatorname\*?|underline|boxed|fbox)\s{0,9}(?=\{)"
)
_SWITCHES = re.compile(
    r"\\(?:text)?color\s{0,9}\{[a-zA-Z0-9!]{1,20}\}"
    r"|\\(?:left|right|displaystyle|textstyle|rm|bf|it|sf|tt|bfseries|itshape|large|Large)(?![A-Za-z])"
)
# Full-width signs and letters, and quotes of typesetters, as ASCII has them.
_WIDE = WIDE | str.maketrans("\u201c\u201d\u2018\u2019\u3002", "\"\"''.")
_SPACES = re.compile(SPACING)
# A letter alone, or one that a stop, a colon, a comma, a dash or brackets part from a text.
_LABELLED = re.compile(
    r"[\s$*_:({\[\"'`]{0,9}(?:(?i:option|choice|letter|answer)\s{0,9}[:\s])?"
    r"[\s$*_({\[\"'`]{0,9}(?P<letter>[A-Z])(?:(?P<alone>[\s$*_)}\].:\"'`]{0,9}\Z)"
    r"|[\s$*_){}\]\"'`]{0,9}[.:](?![0-9])|\s{0,3}[)\]}*_\"'`]{1,9}(?=\s)|\s{0,3}[)\]](?=[A-Za-z][a-z])"
    r"|\s[-\u2013\u2014]\s(?=[A-Za-z]{2})"
    r"|(?P<remark>[)}\]*$\"'`]{0,9},\s{0,3}(?=[A-Za-z][a-z])"
    r"|(?:\s\}\{|\}\{(?=[A-Z\s]))\s{0,3}(?=[A-Za-z][a-z])"
    r"|[)}\]*$\"'`]{0,9}\s{1,3}[(\[](?=[A-Za-z][a-z][^()\[\]=]{0,400}[)\]][\s.$}]{0,9}\Z)))"
)
_LONE_CAPITAL = re.compile(r"(?<!\w)[A-Z](?![\w'-]|\s+[a-z])")


def untyped(text: str) -> str:
    """The text without the commands that only set its type; their braces stay."""
    text = _SWITCHES.sub("", text.translate(_WIDE))
    return _SPACES.sub(" ", _TYPE.sub("", text)).strip()


def labelled_letter(text: str) -> str | None:
    r"""The letter A to Z that the text is, or that labels it: `B: Paris`, `\text{E}`. None for a
    word, a sentence, `A cat`, and for several letters."""
    text = untyped(text[:2000])
    match = _LABELLED.match(text)
    if match is None:
        return None
    if match["remark"]:  # so may a list begin: what it says must name no other letter
        rest = text[match.end() :]
        if _LONE_CAPITAL.search(rest) or _REFUSED.match(rest):
            return None
    return letter_of(text, string.ascii_uppercase)


def is_labelled(text: str) -> bool:
    """Returns whether the text begins as a letter and its option do, though it may name several."""
    return _LABELLED.match(untyped(text[:2000])) is not None


def sole_letter(text: str) -> str | None:
    r"""The letter that the text is and nothing else: `B`, `(B)`, `\text{(B)}`."""
    text = untyped(text[:100])
    match = _LABELLED.match(text)
    alone = match and match["alone"] is not None and not _marked(text, match.end("letter"))
    return match["letter"] if alone else None


def formula_of_letter(text: str) -> bool:
    r"""Returns whether a formula, not an option's letter, begins the text: `A^T`, `A'`."""
    text = untyped(text[:100])
    match = _LETTER.match(text)
    return match is not None and _marked(text, match.end())


def _marked(text: str, end: int) -> bool:
    """Returns whether the letter before `end` is part of a formula; in quotes it is none."""
    rest = text[end:]
    quoted = any(quote in text[:end] for quote in _APOSTROPHES)
    prime = rest.lstrip(")}]$").startswith(_APOSTROPHES) and not quoted
    return prime or _FORMULA.match(rest) is not None


def letter_of(text: str, letters: str, *, after_cue: bool = False) -> str | None:
    """The one letter of `letters` that the text begins with; None for none, for several, for
    a sentence."""
    text = untyped(text)
    match = _LETTER.match(text)
    if match is None or match[1].upper() not in letters.upper():
        return None
    letter, rest = match[1], text[match.end() :]
    # `a dog` and, unless it was called the answer, `A dog` are sentences; `A. a dog` is a choice.
    sentence = re.match(r"\s+\w", rest) and (letter.islower() or not after_cue)
    if _marked(text, match.end()) or _NO_CHOICE.match(rest):
        return None
    others = _later_letters(text, rest, after_cue) & set(letters) - {letter}
    another = _ANOTHER.match(rest)
    corrected = _CORRECTED.search(rest[:200])
    if corrected and corrected[1] in letters and corrected[1] != letter.upper():
        return None
    if sentence or _SEVERAL.match(rest) or others or (another and another[1] in letters):
        return None
    return letter.upper()


def _later_letters(text: str, rest: str, after_cue: bool) -> set[str]:
    """Returns the letters further on that label an answer or are one themselves."""
    first_line = rest.split("\n", 1)[0]
    letters = set(_LATER_LABEL.findall(text))
    if re.match(r"[)}\]*$\s]*:", rest):
        # Behind an answer that was called one, the lines below may go through the options.
        letters |= set(_LATER_COLON.findall(first_line if after_cue else rest))
    if re.match(r"[)}\]*$\s]*[,(]", rest) and not _REFUSED.search(first_line):
        letters |= set(_LATER_REMARK.findall(first_line))
    return letters
