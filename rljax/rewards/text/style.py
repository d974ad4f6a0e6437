"""Rewards for how a response is written: in which script, and whether it repeats itself."""

import functools
import re
import unicodedata
from typing import Literal

from rljax.contracts import PlainText, contract
from rljax.errors import InputError

# Languages are told apart by their script alone: English from Russian, not English from German.
_SCRIPTS = {
    "Latin": ("LATIN",),
    "Cyrillic": ("CYRILLIC",),
    "Greek": ("GREEK",),
    "Arabic": ("ARABIC",),
    "Hebrew": ("HEBREW",),
    "Devanagari": ("DEVANAGARI",),
    "Bengali": ("BENGALI",),
    "Tamil": ("TAMIL",),
    "Telugu": ("TELUGU",),
    "Thai": ("THAI",),
    "Hangul": ("HANGUL",),
    "Han": ("CJK", "IDEOGRAPHIC"),
    "Hiragana": ("HIRAGANA",),
    "Katakana": ("KATAKANA",),
    "Georgian": ("GEORGIAN",),
    "Armenian": ("ARMENIAN",),
    "Ethiopic": ("ETHIOPIC",),
}
_LANGUAGES = {
    "ar": ("Arabic",),
    "bn": ("Bengali",),
    "de": ("Latin",),
    "el": ("Greek",),
    "en": ("Latin",),
    "es": ("Latin",),
    "fa": ("Arabic",),
    "fr": ("Latin",),
    "he": ("Hebrew",),
    "hi": ("Devanagari",),
    "id": ("Latin",),
    "it": ("Latin",),
    "ja": ("Han", "Hiragana", "Katakana"),
    "ko": ("Hangul",),
    "pl": ("Latin",),
    "pt": ("Latin",),
    "ru": ("Cyrillic",),
    "ta": ("Tamil",),
    "te": ("Telugu",),
    "th": ("Thai",),
    "tr": ("Latin",),
    "uk": ("Cyrillic",),
    "vi": ("Latin",),
    "zh": ("Han",),
}
_MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z_][A-Za-z_0-9-]*>")


@contract(safe=True, probed=True, on_timeout=0.0)
def language(
    response: str, *, scripts: tuple[PlainText, ...] = ("Latin",), at_least: float = 0.0
) -> float:
    r"""The share of the letters that belong to the wanted scripts (0 without letters); with
    `at_least`, 1 if the share reaches it and 0 below.

    `scripts`: names of Unicode's scripts, such as "Han" or "Cyrillic", or codes of languages, "zh",
    that stand for the scripts they are written in. Languages of one script are not told apart.
    LaTeX commands and <tags> do not count as letters. Raises InputError for an unknown name.
    """
    words = frozenset(word for name in scripts for word in _words_of(name))
    letters = matching = 0
    for character in _MARKUP.sub(" ", response):
        if character.isalpha():
            letters += 1
            matching += not words.isdisjoint(_name_of(character))
    share = matching / letters if letters else 0.0
    return float(share >= at_least) if at_least > 0 and letters else share


def _words_of(script: str) -> tuple[str, ...]:
    names = _LANGUAGES.get(script, (script,))
    if any(name not in _SCRIPTS for name in names):
        raise InputError(
            "language(scripts)",
            value=script,
            rule=f"one of {', '.join(_SCRIPTS)}, or of {', '.join(_LANGUAGES)}",
            fix="name one of these",
        )
    return tuple(word for name in names for word in _SCRIPTS[name])


@functools.lru_cache(maxsize=65536)
def _name_of(character: str) -> frozenset[str]:
    # The words of a letter's name hold its script: CYRILLIC SMALL LETTER A, CJK UNIFIED ....
    return frozenset(re.split("[ -]", unicodedata.name(character, "")))


@contract(safe=True, probed=True, on_timeout=lambda options: -options["max_penalty"])
def repetition(
    response: str,
    *,
    ngram: int = 4,
    max_penalty: float = 1.0,
    unit: Literal["word", "character"] = "word",
) -> float:
    """-max_penalty (1 - different n-grams / n-grams) of the lower-case words (open-r1's rule).

    0 for a response of fewer than n. `unit="character"` for scripts without spaces. Raises
    InputError unless ngram >= 1 and max_penalty >= 0.
    """
    if ngram < 1 or max_penalty < 0:
        raise InputError(
            "repetition",
            value=(ngram, max_penalty),
            rule="ngram >= 1 and max_penalty >= 0",
            fix="repetition(ngram=3, max_penalty=1.0), or other numbers of this range",
        )
    text = response.lower()
    units = text.split() if unit == "word" else "".join(text.split())
    count = len(units) - ngram + 1
    if count < 1:
        return 0.0
    # Hashes, not slices: 100,000 slices of n words each would be held at once.
    different = len({hash(tuple(units[i : i + ngram])) for i in range(count)})
    return 0.0 - max_penalty * (1.0 - different / count)


_LOOP_WINDOW = 20_000


@contract(safe=True, probed=True, on_timeout=lambda options: -options["max_penalty"])
def looping(
    response: str, *, min_repeats: int = 5, min_characters: int = 50, max_penalty: float = 1.0
) -> dict:
    """-max_penalty times the share of the response that its end spends in a loop.

    A loop: the last characters are one piece, of any length, `min_repeats` times or more and
    `min_characters` or more in all. Read are the last 20,000 characters. Parts: loop_share,
    loop_characters. Raises InputError unless min_repeats >= 2, min_characters >= 1 and
    max_penalty >= 0.
    """
    if min_repeats < 2 or min_characters < 1 or max_penalty < 0:
        raise InputError(
            "looping",
            value=(min_repeats, min_characters, max_penalty),
            rule="min_repeats >= 2, min_characters >= 1 and max_penalty >= 0",
            fix="raise the number that is below its least value",
        )
    stripped = response.rstrip() or response
    text, spaces, longest = stripped[-_LOOP_WINDOW:], len(response) - len(stripped), 0
    for period, agreement in enumerate(_z_function(text[::-1])):
        length = period + agreement
        # The space after the last sentence belongs to its piece.
        if period and length + min(spaces, 1) >= max(min_repeats * period, min_characters):
            longest = max(longest, length)
    share = longest / len(text) if text else 0.0
    return {
        "score": 0.0 - max_penalty * share,
        "loop_share": share,
        "loop_characters": float(longest),
    }


def _z_function(text: str) -> list[int]:
    """Returns z, where z[i] is the length to which text[i:] agrees with text, in
    linear time (z[0] = 0)."""
    z, left, right = [0] * len(text), 0, 0
    for i in range(1, len(text)):
        if i < right:
            z[i] = min(right - i, z[i - left])
        while i + z[i] < len(text) and text[z[i]] == text[i + z[i]]:
            z[i] += 1
        if i + z[i] > right:
            left, right = i, i + z[i]
    return z
