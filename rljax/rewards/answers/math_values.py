"""The values of a sympy expression at a few points, by which expressions are compared."""

import functools
import random

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_DIGITS = 80
CONTEXT = mpmath.MPContext()  # has our own precision: the library's context is a global of 53 bits
CONTEXT.dps = _DIGITS + 20
CLOSE = CONTEXT.mpf(10) ** -60  # relative, of what holds no decimal
ZERO = CONTEXT.mpf(10) ** -75  # an exact zero is found as such a number
_POINTS = ((200, 900), (1100, 3900), (-900, -200), (-3900, -1100), (-2000, 2000), (200, 3900))


def is_name(value) -> bool:
    """Returns whether the value is a variable or an undefined function such as f(x)."""
    return isinstance(value, sympy.Symbol | AppliedUndef)


def is_relation(value) -> bool:
    """Returns whether the value is an equation, an inequality or a conjunction of them."""
    return isinstance(value, Relational) or isinstance(value, sympy.And)


def names_of(expression) -> frozenset[str]:
    """The names of the variables in an expression, without the imaginary unit i."""
    return frozenset(symbol.name for symbol in _plain(expression).free_symbols) - {"i"}


def _plain(expression):
    """Returns the expression with f(x) as one symbol, and with a mod b by its
    definition, which has a value."""
    for mod in expression.atoms(sympy.Mod):
        a, b = mod.args
        expression = expression.xreplace({mod: a - b * sympy.floor(a / b)})
    functions = {f: sympy.Symbol(str(f)) for f in expression.atoms(AppliedUndef)}
    return expression.xreplace(functions) if functions else expression


@functools.lru_cache(maxsize=4096)
def values(expression: sympy.Expr) -> tuple:
    """The complex value at each test point, None where it has none; i is the imaginary unit."""
    plain = _plain(expression)
    symbols = sorted(plain.free_symbols, key=lambda symbol: symbol.name)
    variables = [symbol for symbol in symbols if symbol.name != "i"]
    results = []
    for low, high in _POINTS if variables else _POINTS[:1]:
        draw = {s: random.Random(f"{s.name} {low} {high}").randint(low, high) for s in variables}
        point = {s: sympy.Rational(2 * n + 1, 1999) for s, n in draw.items()}
        point |= {s: sympy.I for s in symbols if s.name == "i"}
        try:
            value = plain.evalf(_DIGITS, subs=point) if point else plain.evalf(_DIGITS)
            parts = [CONTEXT.mpf(p._to_mpmath(332)) for p in value.as_real_imag()]
            results.append(CONTEXT.mpc(*parts) if all(map(CONTEXT.isfinite, parts)) else None)
        except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):
            results.append(None)
    return tuple(results) if variables else tuple(results) * len(_POINTS)


def common_values(a: tuple, b: tuple) -> list[tuple]:
    """The pairs of values at points where both have one; only the real pairs if there are at
    least two."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    real = [(x, y) for x, y in pairs if is_real(x) and is_real(y)]
    return real if len(real) >= 2 else pairs


def is_real(value) -> bool:
    """Returns whether the imaginary part is 0 up to rounding."""
    return abs(value.imag) <= CLOSE * max(1, abs(value.real))


def near(x, y, tolerance) -> bool:
    """Returns whether two real numbers differ by at most `tolerance`, relative to the
    larger one."""
    if CONTEXT.isinf(x) or CONTEXT.isinf(y):
        return x == y
    return abs(x - y) <= max(tolerance * max(abs(x), abs(y)), ZERO)
