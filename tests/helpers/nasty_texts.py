r"""Texts of any length that make a careless pattern quadratic: repeats that are never closed,
openings without an end, blanks and digits in the place where a pattern may stop anywhere."""

import random

# Every one is (head, piece, tail): the text is the head, the piece as often as fits, the tail.
PIECES: dict[str, tuple[str, str, str]] = {
    "letters": ("", "a", ""),
    "letters behind a fence": ("```", "a", ""),
    "blanks behind a fence": ("```", " ", "`"),
    "blanks before a fence": ("", " ", "```\n"),
    "tabs and a fence on each line": ("", "\t```\t\n", ""),
    "fences": ("", "```", ""),
    "fences on lines": ("", "```\n", ""),
    "open fences with a name": ("", "```json\nx ", ""),
    "a fence of newlines": ("```json\n", "\n", "x"),
    "a fence of blank lines": ("```\n", " \n", "``"),
    "an indented fence": (" " * 4000 + "```python\n", " " * 4000 + "x\n", ""),
    "backslashes": ("", "\\", ""),
    "escaped braces": ("", "\\{", ""),
    "braces": ("", "{", ""),
    "closing braces": ("", "}", ""),
    "brackets": ("", "[", ""),
    "brackets and commas": ("", "[1,", ""),
    "round brackets": ("", "(", ")"),
    "brackets closed": ("", "()", ""),
    "blanks": ("", " ", ""),
    "blanks between digits": ("1", " ", "1"),
    "newlines": ("", "\n", ""),
    "newlines and a letter": ("", "\r\n", "x"),
    "no-break spaces": ("5", "\u00a0", "x"),
    "digits": ("", "9", ""),
    "digits and commas": ("", "1,", "x"),
    "digits and points": ("", "1.", ""),
    "thousands": ("1", ",000", "0"),
    "digits and blanks": ("", "9 ", "/"),
    "marks": ("", "#### ", ""),
    "a mark and digits": ("#### ", "7", "x"),
    "a mark and blanks": ("#### ", " ", "7"),
    "open boxes": ("", "\\boxed{", ""),
    "boxes": ("", "\\boxed{5}", ""),
    "boxes without braces": ("", "\\boxed ", "$"),
    "dollars": ("", "$", "x"),
    "formulas": ("", "$x$ ", ""),
    "open fractions": ("", "\\frac{", ""),
    "fractions": ("", "\\frac12", ""),
    "roots": ("", "\\sqrt", ""),
    "open text": ("", "\\text{ a", ""),
    "text": ("", "x\\text{ a}^{2}", ""),
    "open tags": ("", "<answer>", ""),
    "closing tags": ("", "</answer>", ""),
    "an open tag and letters": ("<answer>", "a", ""),
    "halves of tags": ("", "</think", ""),
    "thinking": ("", "<think>", "</think>"),
    "answers": ("", "answer is ", "("),
    "answers on lines": ("", "Answer: \n", "5"),
    "choices": ("A", ") ", "("),
    "choices in brackets": ("", "(A)", ""),
    "several choices": ("A", " or", " B"),
    "stars": ("", "*", "5"),
    "points": ("5", ".", ""),
    "equals": ("", "=", "5"),
    "signs": ("", "-", "5"),
    "underlines and letters": ("", "_a", "\\"),
    "quotes": ('{"a": "', '\\"', ""),
    "JSON objects": ("", '{"a":', ""),
    "JSON in JSON": ('{"a":[', '{"b":1},', ""),
    "colons": ("def f", " :", "("),
    "definitions": ("", "async def\n", ""),
    "combining marks": ("5", "\u0301", ""),
    "full-width digits": ("", "\uff15", ""),
    "surrogates": ("", "\ud800", ""),
    "zeros": ("", "\0", ""),
}
_MIXED = (
    "a 1 , . { } [ ] ( ) \\ $ ` \n # < > * = - _ ^ % \\boxed{ \\text{ ``` <answer> answer: ####"
)


def nasty_texts(length: int) -> dict[str, str]:
    """A text of about this length for every name, and three mixtures of all pieces."""
    texts = {}
    for name, (head, piece, tail) in PIECES.items():
        count = max(1, (length - len(head) - len(tail)) // len(piece))
        texts[name] = head + piece * count + tail
    for seed in range(3):
        draw, pieces = random.Random(seed), [*_MIXED.split(" "), " "]
        part = "".join(draw.choice(pieces) for _ in range(min(length // 4, 50_000)))
        texts[f"mixture {seed}"] = (part * (length // len(part) + 1))[:length]
    return texts
