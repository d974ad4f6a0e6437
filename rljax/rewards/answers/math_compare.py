r"""Decides whether two answers that were read as sympy objects are equal.

Nothing is simplified, expanded or solved, which can take for ever: expressions are equal if they
have the same values at a few points, to 60 of 80 digits; sets of numbers if they are the same
pieces of the line. So the time is bounded by the size of what is compared.
"""

import functools
import itertools

import sympy
from sympy.core.function import AppliedUndef

from rljax.rewards.answers.math_values import (
    CLOSE,
    CONTEXT,
    ZERO,
    common_values,
    is_name,
    is_real,
    is_relation,
    names_of,
    near,
    values,
)
from rljax.rewards.answers.number_line import KINDS, MOST_ELEMENTS, pieces, same_pieces

_SMALLEST = 1e-3  # relative tolerance of rounded numbers: 2e-7 is not 1e-7
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def equal(gold, answer, decimals: int) -> bool:
    """Returns whether the answer equals the reference: numbers, expressions, relations, sets,
    tuples, matrices.

    `x=5` is 5 and the other way round; 50% is 50 and 0.5; `x>3` is (3, infinity). A number written
    as a decimal is rounded to `decimals` places.
    """
    if type(gold) is type(answer) and gold == answer:
        return True
    gold, answer = _without_names(gold, answer)
    if is_relation(gold) and is_relation(answer):
        return _same_relation(gold, answer, decimals)
    if _matrix(gold) is not None and _matrix(answer) is not None:
        shapes = {_matrix(gold).shape, _matrix(answer).shape}
        return len(shapes) == 1 and _same_items(_items(gold), _items(answer), decimals)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_expression(gold, answer, decimals)
    return _same_collection(gold, answer, decimals)


# -- expressions ----------------------------------------------------------------------------------


def _same_expression(a: sympy.Expr, b: sympy.Expr, decimals: int) -> bool:
    if not (a.has(_PERCENT) or b.has(_PERCENT)):
        return _same_values(a, b, decimals)
    scales = (sympy.Rational(1, 100), sympy.Integer(1))
    both_percent = a.has(_PERCENT) and b.has(_PERCENT)
    return any(
        _same_values(a.xreplace({_PERCENT: scale}), b.xreplace({_PERCENT: scale}), decimals)
        for scale in (scales[:1] if both_percent else scales)
    )


def _same_values(a: sympy.Expr, b: sympy.Expr, decimals: int) -> bool:
    infinite = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)
    if a in infinite or b in infinite:
        return a == b and a in infinite[:2]
    has_names = bool(names_of(a) or names_of(b))
    rounded = a.has(sympy.Float) or b.has(sympy.Float)
    pairs = common_values(values(a), values(b))
    if len(pairs) < 2:
        return False
    if not rounded:
        return all(near(x, y, CLOSE) for x, y in pairs)
    if has_names:
        return all(near(x, y, CONTEXT.mpf(10) ** -decimals) for x, y in pairs)
    exact = _is_decimal(a) and _is_decimal(b)
    return all(
        _near_rounded(x, y, decimals, exact)
        for u, v in pairs
        for x, y in ((u.real, v.real), (u.imag, v.imag))
    )


def _near_rounded(x, y, decimals: int, exact: bool) -> bool:
    """Returns whether two numbers are equal when rounded to the decimals, and
    relative to their size."""
    if near(x, y, CONTEXT.mpf(10) ** -14):  # the precision of a decimal of the grammar
        return True
    unit = CONTEXT.mpf(10) ** -decimals
    if max(abs(x), abs(y)) < unit:  # rounding says nothing: two decimals are what they are
        return not exact and near(x, y, unit)
    tolerance = max(_SMALLEST, 10 * unit) * max(abs(x), abs(y))
    return CONTEXT.nint(x / unit) == CONTEXT.nint(y / unit) and abs(x - y) <= tolerance


def _is_decimal(number: sympy.Expr) -> bool:
    """Returns whether it is written as a decimal that ends: digits, and maybe a power of ten."""
    return all(
        isinstance(node, sympy.Number | sympy.Mul | sympy.Pow) and node not in (sympy.S.Half,)
        for node in sympy.preorder_traversal(number)
    ) and all(n.q in (1, 10) for n in number.atoms(sympy.Rational))


# -- relations ------------------------------------------------------------------------------------


def _chain(relation) -> list:
    """Returns [a, b, c] of a = b = c; [] unless it is a chain of equations."""
    links = list(getattr(relation, "_unsorted_args", relation.args))
    links = links if isinstance(relation, sympy.And) else [relation]
    if not all(isinstance(link, sympy.Eq) for link in links):
        return []
    return [links[0].lhs, *(link.rhs for link in links)]


def _without_names(gold, answer) -> tuple:
    """Returns both, with `x =` taken off if only one of them has it. An equation between numbers
    that differ keeps both sides, and so is no number."""
    if is_relation(answer) and not is_relation(gold):
        answer = _said(answer)
    elif is_relation(gold) and not is_relation(answer):
        chain = _chain(gold)
        is_named = chain and (is_name(chain[0]) or is_name(chain[-1]))
        gold = _said(gold) if is_named else gold
    return gold, answer


def _said(relation):
    """Returns the value that an equation gives its name, or its first part."""
    chain = _chain(relation)
    if not chain:
        return relation
    if is_name(chain[-1]) and not is_name(chain[0]):
        chain.reverse()
    numbers = [part for part in chain if isinstance(part, sympy.Expr) and not part.free_symbols]
    pairs = itertools.pairwise(numbers)
    return chain[-1] if all(_same_expression(a, b, 6) for a, b in pairs) else relation


def _same_relation(gold, answer, decimals: int) -> bool:
    if names_of(gold) != names_of(answer):
        sides = [_chain(relation) for relation in (gold, answer)]
        functions = all(sides) and any(isinstance(side[0], AppliedUndef) for side in sides)
        return bool(functions) and equal(sides[0][-1], sides[1][-1], decimals)
    lines = pieces(gold), pieces(answer)
    if None not in lines:
        return same_pieces(*lines, decimals)
    chains = _chain(gold), _chain(answer)
    if all(len(chain) > 2 for chain in chains):  # x = 2 + 3 = 5: its ends
        gold, answer = (sympy.Eq(c[0], c[-1], evaluate=False) for c in chains)
    links = [list(r._unsorted_args) if isinstance(r, sympy.And) else [r] for r in (gold, answer)]
    return len(links[0]) == len(links[1]) and all(
        _proportional(a, b, decimals) for a, b in zip(*links, strict=True)
    )


def _proportional(a, b, decimals: int) -> bool:
    """Returns whether two relations are one multiplied by a number: y = 2x and 2x - y = 0."""
    if type(a) not in KINDS or type(b) not in KINDS:
        return False
    (kind, sign), (other_kind, other_sign) = KINDS[type(a)], KINDS[type(b)]
    sides = [*a.args, *b.args]
    if kind != other_kind or not all(isinstance(side, sympy.Expr) for side in sides):
        return kind == other_kind and all(
            map(functools.partial(equal, decimals=decimals), a.args, b.args)
        )
    first, second = (sympy.Add(x.lhs, -x.rhs, evaluate=False) for x in (a, b))
    pairs = [(x, y) for x, y in common_values(values(first), values(second))]
    if len(pairs) < 2 or any(abs(x) < ZERO or abs(y) < ZERO for x, y in pairs):
        return False
    rounded = first.has(sympy.Float) or second.has(sympy.Float)
    tolerance = CONTEXT.mpf(10) ** -decimals if rounded else CLOSE
    ratios = [sign * other_sign * x / y for x, y in pairs]
    directed = kind in ("=", "!") or all(is_real(r) and r.real > 0 for r in ratios)
    return directed and all(near(ratios[0], ratio, tolerance) for ratio in ratios)


# -- sets, tuples, matrices -----------------------------------------------------------------------


def _matrix(value):
    """A matrix that is written down, or a number times one; None for anything else."""
    if isinstance(value, sympy.MatrixBase):
        return value
    if isinstance(value, sympy.MatMul):
        matrices = [part for part in value.args if isinstance(part, sympy.MatrixBase)]
        factors = [part for part in value.args if not isinstance(part, sympy.MatrixBase)]
        if len(matrices) == 1 and all(not factor.is_Matrix for factor in factors):
            return matrices[0].applyfunc(lambda x: sympy.Mul(*factors, x, evaluate=False))
    return None


def _items(value) -> list | None:
    """The items of a tuple, of a list without brackets or of a vector, in order."""
    matrix = _matrix(value)
    if matrix is not None:
        return list(matrix)
    if isinstance(value, sympy.Tuple):
        return list(value.args)
    if isinstance(value, sympy.FiniteSet):
        return list(getattr(value, "_unsorted_args", value.args))
    if isinstance(value, sympy.Interval) and value.left_open and value.right_open:
        return [value.start, value.end]
    return None


def _same_items(expected, actual, decimals: int) -> bool:
    if expected is None or actual is None or not len(expected) == len(actual) <= 4 * MOST_ELEMENTS:
        return False
    return all(equal(a, b, decimals) for a, b in zip(expected, actual, strict=True))


def _same_collection(gold, answer, decimals: int) -> bool:
    gold, answer = _values_of_names(gold, answer)
    finite = isinstance(gold, sympy.FiniteSet), isinstance(answer, sympy.FiniteSet)
    if all(finite):
        return _same_elements(gold, answer, decimals)
    if finite[1] and isinstance(gold, sympy.Expr) and not gold.is_Matrix:  # 3/4 or 0.75
        return len(answer) <= 3 and all(equal(gold, element, decimals) for element in answer.args)
    if finite[0] and isinstance(answer, sympy.Expr) and not answer.is_Matrix:
        return len(gold) == 1 and equal(gold.args[0], answer, decimals)
    lines = pieces(gold), pieces(answer)
    if None not in lines and same_pieces(*lines, decimals):
        return True
    intervals = [isinstance(value, sympy.Interval) for value in (gold, answer)]
    if all(intervals):
        flags = [(value.left_open, value.right_open) for value in (gold, answer)]
        ends = [[value.start, value.end] for value in (gold, answer)]
        return flags[0] == flags[1] and _same_items(*ends, decimals)
    if any(m is not None and 1 not in m.shape for m in (_matrix(gold), _matrix(answer))):
        return False
    return _same_items(_items(gold), _items(answer), decimals)


def _values_of_names(gold, answer) -> tuple:
    """Returns `x=1, x=2` as {1, 2} and `x=1, y=2` as (1, 2) if the other one names nothing."""
    is_named = [
        isinstance(value, sympy.FiniteSet)
        and all(isinstance(e, sympy.Eq) and is_name(e.lhs) for e in value.args)
        for value in (gold, answer)
    ]
    if is_named[0] == is_named[1]:
        return gold, answer
    value = gold if is_named[0] else answer
    equations = list(getattr(value, "_unsorted_args", value.args))
    several = len({equation.lhs for equation in equations}) > 1
    kind = sympy.Tuple if several else sympy.FiniteSet
    if several:
        equations.sort(key=lambda equation: str(equation.lhs))
    stripped = kind(*(equation.rhs for equation in equations))
    return (stripped, answer) if is_named[0] else (gold, stripped)


def _same_elements(gold, answer, decimals: int) -> bool:
    """Returns whether the elements are the same in any order."""
    lines = pieces(gold), pieces(answer)
    relations = [is_relation(element) for element in (*gold.args, *answer.args)]
    if any(relations) and None not in lines and names_of(gold) == names_of(answer):
        return same_pieces(*lines, decimals)
    remaining = list(answer.args)
    if not len(gold.args) == len(remaining) <= MOST_ELEMENTS:
        return False
    for element in gold.args:
        index = next(
            (i for i, candidate in enumerate(remaining) if equal(element, candidate, decimals)),
            None,
        )
        if index is None:
            return False
        remaining.pop(index)
    return True
