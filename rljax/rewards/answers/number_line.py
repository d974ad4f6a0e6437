"""Sets of real numbers as pieces of the line, so that two of them can be compared."""

import functools
import itertools

import sympy
from sympy.core.relational import Relational

from rljax.rewards.answers.math_values import (
    CONTEXT,
    is_name,
    is_real,
    is_relation,
    names_of,
    near,
    values,
)

MOST_ELEMENTS = 100
# Relations as "left kind right", turned round where the sign is -1.
KINDS = {
    sympy.Eq: ("=", 1),
    sympy.Ne: ("!", 1),
    sympy.Lt: ("<", 1),
    sympy.Gt: ("<", -1),
    sympy.Le: ("<=", 1),
    sympy.Ge: ("<=", -1),
}

_REAL_LINE = [(-CONTEXT.inf, False, CONTEXT.inf, False)]

Piece = tuple  # (low, whether it belongs to it, high, whether it belongs to it)


def pieces(value) -> list[Piece] | None:
    """The intervals and points of the real line, in order, that a set, or a relation of one name,
    stands for; None for anything else."""
    if isinstance(value, sympy.Interval):
        ends = _real(value.start), _real(value.end)
        if None in ends:
            return None
        return [(ends[0], not value.left_open, ends[1], not value.right_open)]
    if value == sympy.S.Reals:
        return _REAL_LINE
    if value == sympy.S.EmptySet:
        return []
    if isinstance(value, sympy.FiniteSet):
        return _of_elements(value)
    if isinstance(value, sympy.Union | sympy.Intersection | sympy.Complement):
        parts = [pieces(part) for part in value.args]
        if None in parts:
            return None
        if isinstance(value, sympy.Complement):
            return _cut(parts[0], _complement(parts[1]))
        intersect = functools.partial(functools.reduce, _cut)
        return _union(parts) if isinstance(value, sympy.Union) else intersect(parts)
    if isinstance(value, sympy.And):
        parts = [pieces(part) for part in value.args]
        one_name = len(names_of(value)) == 1
        return functools.reduce(_cut, parts) if one_name and None not in parts else None
    return _of_relation(value) if isinstance(value, Relational) else None


def _real(number):
    if number in (sympy.oo, -sympy.oo):
        return CONTEXT.inf if number == sympy.oo else -CONTEXT.inf
    value = values(number)[0] if isinstance(number, sympy.Expr) and not names_of(number) else None
    return value.real if value is not None and is_real(value) else None


def _of_elements(elements) -> list[Piece] | None:
    """Points, or relations: `x<1, x>3` are alternatives, `x>1, x<3` hold together."""
    if len(elements.args) > MOST_ELEMENTS:
        return None
    if all(is_relation(element) for element in elements.args):
        parts = [pieces(element) for element in elements.args]
        if None in parts or len(names_of(elements)) != 1:
            return None
        union = _union(parts)
        return functools.reduce(_cut, parts) if union == _REAL_LINE else union
    numbers = [_real(element) for element in elements.args]
    return None if None in numbers else _union([[(n, True, n, True)] for n in numbers])


def _of_relation(relation) -> list[Piece] | None:
    left, right = relation.args
    if isinstance(relation, sympy.Eq) and is_name(left) and isinstance(right, sympy.Set):
        return pieces(right)
    if type(relation) not in KINDS or len(names_of(relation)) != 1:
        return None
    kind, sign = KINDS[type(relation)]
    if not is_name(left):
        left, right, sign = right, left, -sign
    number = _real(right) if is_name(left) and isinstance(right, sympy.Expr) else None
    if number is None:
        return _of_polynomial(relation)
    closed = kind in ("<=", "=")
    if kind == "=":
        return [(number, True, number, True)]
    if kind == "!":
        return _complement([(number, True, number, True)])
    return (
        [(-CONTEXT.inf, False, number, closed)]
        if sign > 0
        else [(number, closed, CONTEXT.inf, False)]
    )


def _of_polynomial(relation) -> list[Piece] | None:
    """A small inequality of one name, such as x^2 < 4, by its roots."""
    nodes = list(itertools.islice(sympy.preorder_traversal(relation), 40))
    powers = [node.exp for node in nodes if isinstance(node, sympy.Pow)]
    small = len(nodes) < 40 and all(p.is_Integer and 0 < p <= 4 for p in powers)
    if not small or isinstance(relation, sympy.Eq) or len(powers) > 4:
        return None
    (name,) = relation.free_symbols or (None,)
    if name is None or not all(side.is_polynomial(name) for side in relation.args):
        return None
    if sympy.degree(relation.lhs - relation.rhs, name) > 4:
        return None
    try:
        return pieces(relation.as_set())
    except (NotImplementedError, TypeError, ValueError):
        return None


def _union(parts: list[list[Piece]]) -> list[Piece]:
    merged: list[Piece] = []
    for low, has_low, high, has_high in sorted(
        (piece for part in parts for piece in part), key=lambda piece: (piece[0], not piece[1])
    ):
        touches = merged and (
            low < merged[-1][2] or (low == merged[-1][2] and (has_low or merged[-1][3]))
        )
        if touches:
            previous = merged[-1]
            end = max((previous[2], previous[3]), (high, has_high))
            merged[-1] = (*previous[:2], *end)
        elif low < high or (low == high and has_low and has_high):
            merged.append((low, has_low, high, has_high))
    return merged


def _complement(part: list[Piece]) -> list[Piece]:
    gaps, low, has_low = [], -CONTEXT.inf, False
    for start, has_start, end, has_end in part:
        gaps.append((low, has_low, start, not has_start))
        low, has_low = end, not has_end
    gaps.append((low, has_low, CONTEXT.inf, False))
    return _union([[gap] for gap in gaps if gap[0] < gap[2] or (gap[1] and gap[3])])


def _cut(first: list[Piece], second: list[Piece]) -> list[Piece]:
    return _complement(_union([_complement(first), _complement(second)]))


def same_pieces(ours: list[Piece], theirs: list[Piece], decimals: int) -> bool:
    """Returns whether the pieces are the same, with ends equal to `decimals` places."""
    unit = CONTEXT.mpf(10) ** -decimals
    return len(ours) == len(theirs) and all(
        (a[1], a[3]) == (b[1], b[3])
        and all(x == y or near(x, y, unit / 10) for x, y in ((a[0], b[0]), (a[2], b[2])))
        for a, b in zip(ours, theirs, strict=True)
    )
