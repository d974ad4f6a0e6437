"""Compares the text of an answer with that of the reference: as a letter, as a number, as text.

None means that a comparison does not apply. Mathematical answers are compared by `math_compare.py`,
after they were parsed.
"""

from collections.abc import Callable
from fractions import Fraction

from rljax.rewards.answers.letters import formula_of_letter, labelled_letter, sole_letter
from rljax.rewards.answers.normalise import REMARK, bare, rational, time_of_day


def same_letter(reference: str, answer: str) -> bool | None:
    """Returns whether the answer is the reference's letter of a multiple choice; None if one of the
    two is no letter. A formula of letters such as A^T is none of the choices."""
    if letter := sole_letter(reference):
        if chosen := labelled_letter(answer):
            return chosen == letter
        if formula_of_letter(answer):
            return False
    return None


def same_number(
    reference: str, answer: str, form: Callable[[str], str], decimals: int | None = None
) -> bool | None:
    """Returns whether two texts are the same rational number, each after `form`; None if one is no
    number. If one is written with a decimal point, both are rounded to `decimals` places."""
    expected, actual = rational(form(reference)), rational(form(answer))
    if expected is None or actual is None:
        return None
    rounded = decimals is not None and ("." in reference or "." in answer)
    return expected == actual or (rounded and _same_decimal(expected, actual, decimals))


def _same_decimal(a: Fraction, b: Fraction, decimals: int) -> bool:
    """Returns whether two numbers round to the same decimal and are close relative to their size:
    1e-7 and 2e-7 round to the same number, but are not equal."""
    if a == 0 or b == 0 or round(a, decimals) != round(b, decimals):
        return False
    return abs(a - b) <= max(1e-3, 10.0 ** (1 - decimals)) * max(abs(a), abs(b))


def same_text(a: str, b: str) -> bool:
    """Returns whether two texts are equal up to case, spaces, outer brackets and a final
    stop: (B) is b. A time of the day may be written in any way."""
    times = time_of_day(a), time_of_day(b)
    if None not in times:
        return times[0] == times[1]
    a, b = (
        " ".join(REMARK.sub(r"\1", bare(x)).casefold().strip(" ().:$*").split()) for x in (a, b)
    )
    return bool(a) and a == b
