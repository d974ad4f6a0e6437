r"""The letter of a multiple choice that an answer is: `B`, `(B)`, `B. Paris`, `\textbf{(B)}\ 12`.

Pure functions of strings, linear in their length.
"""

import re
import string

# `B`, `(B)`, `**B**`, `Option B`; what follows is no letter.
_LETTER = re.compile(
    r"(?:\W{0,6}(?:option|choice|letter|answer)\b)?\W{0,6}([A-Za-z])(?![A-Za-z])",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"[()\[\]{}.:*\s]*+(?:,|/|&|(?:or|and|maybe|perhaps|possibly|oder|und|ou|et|o|y|e|или|и|或|和)\b)\s*"
    r"(?:(?:or|and|maybe|perhaps|possibly|also|even|else|rather)\b\s*)*\W{0,3}"
    r"[A-Za-z](?![A-Za-z'])",
    re.IGNORECASE,
)
# `B. No, wait: C`
_CORRECTED = re.compile(
    r"(?i:\b(?:no|wait|actually|rather|sorry|correction|hmm)\b)[^A-Za-z0-9]{1,3}"
    r"(?:[a-z']{1,10}[^A-Za-z0-9]{1,3}){0,4}([A-Z])(?![A-Za-z0-9])"
)
# `A;B`, `A|B`, `A-D`, `(A)(B)`: a second letter alone behind signs alone.
_ANOTHER = re.compile(r"(?:[)}\].:*\s]*[;|\\+–-]\W{0,3}|[)\]}]+\W{0,3}[(\[{])([A-Z])(?!\w|\s+\w)")
# Commands that set type, and what they leave between an answer's parts.
_TYPE = re.compile(
    r"\\(?:text[a-z]*|math[a-z]+|mbox|boldsymbol|bm|operatorname\*?|underline|boxed|fbox)\s{0,9}(?=\{)"
)
_SPACES = re.compile(r"\\[ ,;:!]|\\q?quad(?![a-zA-Z])|~")
# A letter alone, or one that a stop, a colon, a dash or its own brackets part from a text.
_LABELLED = re.compile(
    r"[\s$*_:({\[]{0,9}(?:(?i:option|choice|letter|answer)\s{0,9}[:\s])?"
    r"[\s$*_({\[]{0,9}(?P<letter>[A-Z])(?:(?P<alone>[\s$*_)}\].:]{0,9}\Z)"
    r"|[\s$*_){}\]]{0,9}[.:](?![0-9])|\s{0,3}[)\]}*_]{1,9}(?=\s)|\s[-\u2013\u2014]\s(?=[A-Za-z]{2}))"
)


def untyped(text: str) -> str:
    """The text without the commands that only set its type; their braces stay."""
    return _SPACES.sub(" ", _TYPE.sub("", text)).strip()


def labelled_letter(text: str) -> str | None:
    r"""The letter A to Z that the text is, or that labels it: `B: Paris`, `\text{E}`. None for a
    word, a sentence, `A cat`, and for several letters."""
    text = untyped(text[:2000])
    match = _LABELLED.match(text)
    return match and letter_of(text, string.ascii_uppercase)


def sole_letter(text: str) -> str | None:
    r"""The letter that the text is and nothing else: `B`, `(B)`, `\text{(B)}`."""
    match = _LABELLED.match(untyped(text[:100]))
    return match["letter"] if match and match["alone"] is not None else None


def letter_of(text: str, letters: str, *, after_cue: bool = False) -> str | None:
    """The one letter that the text begins with; None for none, for several, for a sentence."""
    text = untyped(text)
    match = _LETTER.match(text)
    if match is None or match[1].upper() not in letters.upper():
        return None
    letter, rest = match[1], text[match.end() :]
    # `a dog` and, unless it was called the answer, `A dog` are sentences; `A. a dog` is a choice.
    sentence = re.match(r"\s+\w", rest) and (letter.islower() or not after_cue)
    others = set(re.findall(r"(?<![A-Za-z])([A-Z])[.)]\s", text)) & set(letters) - {letter}
    another = _ANOTHER.match(rest)
    corrected = _CORRECTED.search(rest[:200])
    if corrected and corrected[1] in letters and corrected[1] != letter.upper():
        return None
    if sentence or _SEVERAL.match(rest) or others or (another and another[1] in letters):
        return None
    return letter.upper()
