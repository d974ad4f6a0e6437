r"""Compares math answers of any form with a reference: fractions, sets, intervals, equations, text.

Finds the answer in a response, reads it, and decides when two answers are equal. There is no
deadline here. A string can hold a computer algebra system for ever (`5^{5^{5^5}}`), and a response
that makes its reward late must not gain by it: what is large is refused by its size before any work
on it begins, and what is read is compared by `math_compare`, which neither simplifies nor solves.
"""

import functools
import itertools
import math
import re
from typing import Literal

from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rewards.answers.compare import same_letter, same_number, same_text
from rljax.rewards.answers.find import find, reference_answer
from rljax.rewards.answers.latex import (
    MAX_ANSWER_CHARACTERS,
    latex_form,
    spelled_alike,
    without_base,
)
from rljax.rewards.answers.normalise import is_text, plain_form, rational, unwrapped_remarks
from rljax.rewards.text.targets import targets

_MAX_DIGITS = 20_000  # digits of a number that is worked out
_MAX_DEPTH = 12  # depth of brackets: some of them double the parser's time
_MAX_PRODUCTS = 9  # nested products, as in a/b/c/d
_MAX_TEXT_CHARACTERS = 200
# Work that is still to do: restating the problem is no answer to it.
_OPEN = re.compile(
    r"\\(?:i{0,2}int|oint|sum|prod|lim|det)(?![a-z])|\\frac\s*\{d\}\s*\{d[a-z]\}"
    r"|\\begin\s?\{vmatrix\}|(?:\||\\l?vert)\s?\\begin\s?\{(?:matrix|smallmatrix|array)\}"
)


@contract(safe=True, reads="answer", on_timeout=0.0, prepare=lambda options: _prepare)
def math_verify(
    response: str,
    ground_truth: str | list | dict,
    *,
    extraction: Literal["any", "boxed", "marked", "last"] = "any",
    strict: bool = True,
    decimals: int = 6,
) -> dict:
    r"""1 if the answer equals a target, both as math-verify's parser reads them, else 0.

    Where the answer is looked for; the last one counts, and `3 or 4` is not 3:
      boxed   `\boxed{...}`, brace-matched          marked  the rest of the line after `####`
      last    after "answer is" or "answer:", else the last formula, else the last number
      any     in <answer>...</answer> if there is one, else in the response: boxed if there is a
              box, else marked if there is a mark, else last; a short text in the tag, as it stands
    Equal = the same text, the same number (decimals rounded to `decimals` places), or the same
    value of what math-verify's grammar reads: expressions, equations (`x=5` is 5), inequalities,
    intervals, sets, tuples, matrices. `strict=False`: names of variables do not matter. Units are
    not compared, and 50% is 50 and 0.5. `\gcd`, `\lcm`, `\min` and `\max` of whole numbers are
    worked out. An answer that still holds an integral, a sum, a product, a limit, a derivative or a
    determinant is 0, unless the reference holds one.

    Of math-verify the parser alone is used, its package latex2sympy2_extended. Its `parse` and
    `verify` are not: they simplify and solve under a timer of the process. Their verdicts differ:
    `verify` takes `13 = 12` and `12 thousand` for 12, `\{1,2\}` for (1,2) and X for x, and does
    not take `x \ge 2` for `[2,\infty)`, `2x>4` for `x>2`, `1 million` for 1000000 or the second of
    two boxes.

    Parts: extracted, 1 if an answer was found that can be read; what cannot scores 0. A reference
    that cannot be read is an error. Needs the extra [rewards].
    """
    references = [_reference(target) for target in targets(ground_truth)]
    answer = find(response, extraction)
    # Longer ones are not even looked at.
    longest = 10 * MAX_ANSWER_CHARACTERS + max(map(len, references))
    if answer is None or len(answer.strip()) > longest or not plain_form(answer):
        return {"score": 0.0, "extracted": 0.0}
    equal = [_equal(reference, answer, strict, decimals) for reference in references]
    return {"score": float(any(equal)), "extracted": float(equal != [None] * len(equal))}


def _reference(ground_truth: str) -> str:
    """The answer of the reference, which may be a whole solution."""
    text = reference_answer(ground_truth)
    if not plain_form(text):
        raise ValueError(f"ground_truth {ground_truth!r:.80} is empty")
    if is_text(text) and len(text) > _MAX_TEXT_CHARACTERS:
        # A wrong column, say: no answer would ever equal it.
        raise ValueError(f"ground_truth {ground_truth!r:.80} is a text, not an answer")
    return text


def _equal(reference: str, answer: str, strict: bool, decimals: int) -> bool | None:
    """Returns whether the answer equals the reference; None if the answer cannot be read. Raises
    ValueError for a reference that cannot be read."""
    if plain_form(reference) == plain_form(answer) or _same_words(reference, answer):
        return True
    verdict = same_letter(reference, answer)  # first: the parser would drop the sign of A^T
    if verdict is not None:
        return verdict
    if without_base(reference) in (None, plain_form(reference).partition("_")[0]):
        # A number of a base is asked for as such: 5 is no answer to 101_2, but 101_2 is one to 5.
        reference, answer = (without_base(text) or text for text in (reference, answer))
    if is_text(reference) or is_text(answer):
        return same_text(reference, answer)
    verdict = same_number(reference, answer, plain_form, decimals)
    if verdict is not None:
        return verdict
    if _OPEN.search(answer) and not _OPEN.search(reference):
        return False
    try:
        gold = _read(reference)
    except _Unreadable as error:
        raise ValueError(
            f"ground_truth {reference!r:.80} cannot be read as mathematics: {error}"
        ) from error
    try:
        parsed = _read(answer)
    except _Unreadable:
        return None
    try:
        return spelled_alike(reference, answer) and _same(gold, parsed, strict, decimals)
    except Exception:  # sympy's, of many kinds: a response must not choose to have no score
        return None


def _same_words(reference: str, answer: str) -> bool:
    r"""Returns whether the two are one text but for `\text{...}` around words of it."""
    expected, actual = (plain_form(unwrapped_remarks(text)) for text in (reference, answer))
    return bool(expected) and expected == actual


def _same(gold, parsed, strict: bool, decimals: int) -> bool:
    _, _, compare = _library()
    if compare.equal(gold, parsed, decimals):
        return True
    names = [sorted(x.free_symbols, key=str) for x in (gold, parsed)]
    if strict or len(names[0]) != len(names[1]) or not 0 < len(names[0]) <= 3:
        return False
    orders = itertools.permutations(names[0])
    renamed = (parsed.xreplace(dict(zip(names[1], order, strict=True))) for order in orders)
    return any(compare.equal(gold, candidate, decimals) for candidate in renamed)


class _Unreadable(Exception):
    """The text is not taken as mathematics; the message says why."""


@functools.cache
def _library() -> tuple:
    """Returns (latex2sympy2_extended, sympy, math_compare), which take about a second to import."""
    try:
        import latex2sympy2_extended
        import sympy

        from rljax.rewards.answers import math_compare
    except ImportError as error:
        raise InputError(
            "the reward math_verify needs math-verify, which is not installed",
            rule=str(error),
            fix="pip install 'math-verify>=0.9'",
        ) from None
    return latex2sympy2_extended, sympy, math_compare


def _prepare() -> None:
    """Imports the library before the first sample's clock starts: the pool's workers call it."""
    _library()
    _read(r"\frac{x}{2}+1")  # builds the grammar's tables


def _read(text: str):
    """LaTeX or plain mathematics as a sympy object. Raises _Unreadable."""
    latex = latex_form(text)
    if latex is None:
        raise _Unreadable("it is not a formula, or is too long")
    if _depth(latex) > _MAX_DEPTH:
        raise _Unreadable("its brackets are nested too deep")
    return _parsed(_with_numbers(latex))


_FUNCTIONS = {"gcd": math.gcd, "lcm": math.lcm, "min": min, "max": max}
_INNERMOST = (
    re.compile(  # gcd(12,18), \\operatorname{lcm}(4,6), \\max\\{1,2\\}, of no further function
        r"(?:\\(?:operatorname|mathrm|text|mathop)\s?\{\s?(gcd|GCD|lcm|LCM|min|max)\s?\}"
        r"|\\(gcd|lcm|min|max)(?![A-Za-z])|(?<![\\A-Za-z])(gcd|GCD|lcm|LCM|min|max))"
        r"\s{0,9}(?:\\left\s?|\\big\s?)?(?:(\()|(\[)|(\\\{))"
    )
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MOST_FUNCTIONS = 20  # functions that are worked out, and arguments of one
_MOST_BITS = 500  # bits of an argument: lcm multiplies arguments


def _with_numbers(latex: str) -> str:
    r"""The text with the value in place of each `\gcd`, `\lcm`, `\min` and `\max` of whole numbers.

    The inner ones come first, so that they may be nested. What has other arguments stays.
    """
    calls = list(_INNERMOST.finditer(latex))
    for call in reversed(calls[:_MOST_FUNCTIONS]):
        end = _closed(latex, call.end(), call[0][-1])
        if end is None:
            continue
        inside = latex[call.end() : end].removesuffix("\\").rstrip()
        inside = re.sub(r"\\(?:right|big)\s?\Z", "", inside)
        parts = _parts(inside)
        if not 1 < len(parts) <= _MOST_FUNCTIONS:
            continue
        numbers = [_whole(part) for part in parts]
        if None in numbers or max(number.bit_length() for number in numbers) > _MOST_BITS:
            continue
        before = latex[: call.start()].rstrip()
        times = r"\cdot " if before[-1:] in (*"0123456789)}]",) else ""
        value = _FUNCTIONS[(call[1] or call[2] or call[3]).lower()](*numbers)
        latex = f"{before}{times}({value}){latex[end + 1 :]}"
    return latex


def _closed(text: str, start: int, opening: str) -> int | None:
    """The index of the bracket that closes the one that ends at `start`."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == opening) - (text[index] == _CLOSING[opening])
        if not depth:
            return index
    return None


def _parts(text: str) -> list[str]:
    """The arguments between commas that stand in no further brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _whole(text: str) -> int | None:
    """Returns the whole number that an argument is; None for anything else."""
    number = rational(plain_form(text))
    if number is None:
        try:
            return _integer(_parsed(text.strip()), _library()[1])
        except (_Unreadable, ValueError, OverflowError):
            return None
    return int(number) if number.denominator == 1 else None


def _integer(node, sympy) -> int | None:
    """The value of sums, products and powers of whole numbers, the size of which was checked."""
    if isinstance(node, sympy.Integer):
        return int(node)
    if not isinstance(node, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial):
        return None
    values = [_integer(child, sympy) for child in node.args]
    if None in values:
        return None
    if isinstance(node, sympy.Add):
        return sum(values)
    if isinstance(node, sympy.Mul):
        return math.prod(values)
    if values[-1] < 0:
        return None
    return math.factorial(values[0]) if len(values) == 1 else values[0] ** values[1]


@functools.lru_cache(maxsize=1024)  # the samples of a group share the reference, and often answers
def _parsed(latex: str):
    reader, _, _ = _library()
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    options = dict(malformed_operators=True, nits=True, boxed="none")
    try:
        latex, with_units = (
            reader.normalize_latex(latex, reader.NormalizationConfig(units=units, **options))
            for units in (True, False)
        )
        latex = with_units if _lost_factors(latex, with_units) else latex
        _check_written(latex)
        expression = reader.latex2sympy(
            latex,
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except _Unreadable:
        raise
    except Exception as error:  # the grammar's own, sympy's TypeError, RecursionError, ...
        raise _Unreadable(f"{type(error).__name__} while parsing") from error
    _check_size(expression)
    return expression


_VARIABLE = re.compile(r"(?<![\\A-Za-z])[a-df-hj-zA-DF-HJ-Z]|(?:\\cdot|\\times|[-+*/])\s{0,9}\Z")
_LAST_FACTORS = re.compile(r"[a-z]|\s{0,9}(?:[cht]|ab|bc)\s{0,9}")


def _lost_factors(latex: str, with_units: str) -> bool:
    """Returns whether the library took variables for units: it reads c, bc and h behind a digit or
    a space so, and a^2bc as a^2."""
    if not with_units.startswith(latex) or not _LAST_FACTORS.fullmatch(with_units[len(latex) :]):
        return False
    return _VARIABLE.search(latex.rpartition("=")[2]) is not None


def _depth(text: str) -> int:
    """The deepest nesting of brackets."""
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


# Commands that the parser itself works out, and that no answer needs.
_WORKED_OUT = re.compile(
    r"\\(?:gcd|lcm|xrightarrow)(?![a-z])|\\operatorname\s*\{\s*(?!(?:arc?)?(?:sin|cos|tan|cot|sec|csc)"
    r"h?\s*\}|floor|ceil|sgn|Re|Im|lb|log|ln)"
)


def _check_written(latex: str) -> None:
    """Refuses what the parser itself works out, before anyone can look at its size."""
    if re.search(r"!\s*[)}]*\s*!\s*[)}]*\s*!", latex) or latex.count("!") > 20:
        raise _Unreadable("a tower of factorials")
    if re.search(r"(?:\^\s*\{?\s*\(?\s*[0-9]+\s*){4}", latex):
        raise _Unreadable("a tower of powers")
    choices = len(re.findall("binom|choose", latex))
    if choices and re.search(r"\^|[0-9]{5}", latex):
        raise _Unreadable("a binomial coefficient of large numbers")
    if choices > 1 and re.search(r"(?:binom|choose)[^+=,-]*[{}][^+=,-]*(?:binom|choose)", latex):
        raise _Unreadable("a binomial coefficient of binomial coefficients")
    if re.search(r"\\[gG]amma", latex) and re.search("[0-9]{4}", latex):
        raise _Unreadable("the gamma function of a large number")
    if latex.count("&") > 9 and re.search(r"\\det|vmatrix|\}\s*\^", latex):
        raise _Unreadable("a determinant or a power of a large matrix")
    if re.search(r"matrix\}[^&0-9]{0,20}\^[\s{(-]{0,5}(?:[0-9]{2}|[^&]{1,9}\^)", latex):
        raise _Unreadable("a high power of a matrix")
    if len(re.findall(r"[<>=]|\\(?:le|ge|ne|lt|gt)q?(?![a-z])", latex)) > 12:
        raise _Unreadable("a long chain of relations")
    if len(re.findall(r"\\(?:cup|cap|setminus)", latex)) > 20 or latex.count(",") > 200:
        raise _Unreadable("too many sets or elements")
    if len(re.findall(r"(?<!\\)\||\\[lr]?vert", latex)) > 8:
        raise _Unreadable("too many bars, of which any two may be a pair")
    if _WORKED_OUT.search(latex):
        raise _Unreadable("a command that is still to be worked out")


def _check_size(expression) -> None:
    """Raises _Unreadable if evaluating the expression would take too long."""
    _, sympy, _ = _library()
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        raise _Unreadable(f"it is read as a {type(expression).__name__}")
    parts = expression if isinstance(expression, sympy.MatrixBase) else [expression]
    if len(parts) > 400:
        raise _Unreadable("too many entries")
    try:
        for part in parts:
            _digits(part, sympy)
            if _products(part, sympy) > _MAX_PRODUCTS:
                raise _Unreadable("products are nested too deep")
    except (RecursionError, OverflowError, ValueError) as error:
        raise _Unreadable("it is too large to work out") from error


def _products(node, sympy) -> int:
    """Counts the products that are nested in each other: sympy works each of them out twice."""
    inner = max((_products(child, sympy) for child in getattr(node, "args", ())), default=0)
    return inner + isinstance(node, sympy.Mul)


def _digits(node, sympy) -> float:
    """Returns about how many digits the value has before its point, where names count as small
    numbers. Raises _Unreadable above the limit."""
    children = [_digits(child, sympy) for child in getattr(node, "args", ())]
    if isinstance(node, sympy.Rational):
        digits = (max(abs(node.p), node.q).bit_length()) * 0.30103
    elif isinstance(node, sympy.Float):
        digits = abs(float(sympy.log(abs(node), 10).evalf(5))) if node else 0.0
    elif not children:
        digits = 0.6
    elif isinstance(node, sympy.Pow):
        power = node.exp
        scale = float(abs(power)) if isinstance(power, sympy.Rational) else _value_of(children[1])
        digits = children[0] * min(scale, 1e300)
    elif isinstance(node, sympy.factorial | sympy.gamma):
        value = _value_of(children[0])
        digits = value * max(1.0, math.log10(value + 1))
    elif isinstance(node, sympy.binomial):
        digits = _value_of(children[1])
    elif isinstance(node, sympy.exp | sympy.sinh | sympy.cosh | sympy.tanh):
        digits = _value_of(children[0])
    elif isinstance(node, sympy.Mul):
        digits = sum(children)
    else:
        digits = max(children) + math.log10(len(children))
    if digits > _MAX_DIGITS:
        raise _Unreadable(f"a number of more than {_MAX_DIGITS} digits")
    return digits


def _value_of(digits: float) -> float:
    """Returns a number of so many digits."""
    return 10.0 ** min(digits, 300.0)
