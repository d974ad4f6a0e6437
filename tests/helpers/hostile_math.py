r"""Responses that hang, crash or starve a math verifier: kinds of text, each at many sizes.

Every kind is a function of a size n from 1 to 500 or so; `hostile_responses(count)` takes turns
among them, so that any count holds every kind at small and at large sizes.
"""

import random
from collections.abc import Callable, Iterator

# What a box may hold, at size n.
BOXED: dict[str, Callable[[int], str]] = {
    "tower of powers": lambda n: _at(r"5^{5^{5^{@}}}", n),
    "tower in Python": lambda n: f"{n}**({n}**({n}**{n}))",
    "tower without braces": lambda n: "^".join(["9"] * (n % 60 + 3)),
    "power of a power": lambda n: _at(r"\left(@^{@}\right)^{10^{@}}", n + 1, n + 2, n % 40 + 5),
    "factorial": lambda n: f"{n * 1000}!",
    "factorials": lambda n: _at("((@!)!)!", n + 3),
    "huge integer": lambda n: "9" * (n * 400),
    "huge exponent": lambda n: f"1e{n * 10_000_000}",
    "nested fractions": lambda n: r"\frac{1}{1+" * n + "1" + "}" * n,
    "nested roots": lambda n: r"\sqrt{2+" * n + "2" + "}" * n,
    "nested brackets": lambda n: "(" * n + "1" + ")" * n,
    "nested braces": lambda n: "{" * (n * 200) + "1" + "}" * (n * 200),
    "unclosed braces": lambda n: "{" * (n * 200),
    "sum": lambda n: _at(r"\sum_{i=1}^{10^{@}} \frac{\sin i}{i^2+@}", n % 30 + 3, n),
    "product": lambda n: _at(r"\prod_{i=1}^{@} (i^2+1)", n * 10_000),
    "integral": lambda n: _at(r"\int_0^{@} \sin(\sin(x^x)) e^{x^{@}} dx", n, n),
    "limit": lambda n: _at(r"\lim_{x\to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^{@}}", n % 25 + 7),
    "expansion": lambda n: _at("(x+y+z+w)^{@}", n * 10),
    "trigonometric power": lambda n: _at(r"(\sin x+\cos x)^{@}", n),
    "polynomial": lambda n: "+".join(f"{i}x^{{{i}}}" for i in range(n + 2)),
    "determinant": lambda n: r"\det" + _matrix(n % 9 + 3, "x_{{{}{}}}"),
    "inverse": lambda n: _matrix(n % 7 + 2, "a_{{{}{}}}+x") + "^{-1}",
    "matrix": lambda n: _matrix(n % 120 + 2, "{}{}"),
    "power of a matrix": lambda n: _matrix(4, "{}.{}") + _at("^{@}", (10**5 * n)),
    "equation": lambda n: _at(r"x^{@} + \sin(x) e^{x} = @ x + 7", n + 5, n),
    "equations": lambda n: "x" + "=x" * n,
    "inequalities": lambda n: "x" + "<x" * n + "+1",
    "set": lambda n: r"\{" + ",".join(rf"\sqrt{{{i}}}" for i in range(2, n + 3)) + r"\}",
    "union": lambda n: r" \cup ".join(f"({i},{i + 1}]" for i in range(n + 1)),
    "binomial": lambda n: _at(r"\binom{10^{@}}{@}", n % 12 + 6, n * 10**5),
    "gamma": lambda n: _at(r"\Gamma(10^{@})", n % 30 + 4),
    "trigonometry of a huge number": lambda n: _at(r"\sin(10^{10^{@}})", n % 12 + 3),
    "logarithm of a huge number": lambda n: _at(r"\log_{2}{(2^{10^{@}})}", n % 20 + 5),
    "remainder": lambda n: _at(r"@^{10^{@}} \mod 7", n + 2, n % 20 + 6),
    "zero divided": lambda n: _at(r"\frac{@}{0^{@}}", n, n + 1),
    "python": lambda n: _at("__import__('os').system('sleep @')", n),
    "python of digits": lambda n: _at("(1).__class__.__base__.__subclasses__()[@]", n),
    "power of three names": lambda n: _at("(x+y+z)^{@}", 199 + n),
    "unordered set": lambda n: r"\{" + ",".join(f"{i}+x-x" for i in range(min(n, 90))) + r"\}",
    "gamma of a number": lambda n: rf"\Gamma({n}9999)",
    "choices of choices": lambda n: (
        rf"\binom{{\binom{{{n + 500}}}{{500}}}}{{\binom{{999}}{{499}}}}"
    ),
    "choose": lambda n: rf"{{{n + 500} \choose {{{n + 500} \choose 3}}}}",
    "tower of names": lambda n: "x^{" * (n % 9 + 3) + "x" + "}" * (n % 9 + 3),
    "tower of e": lambda n: "e^{" * (n % 9 + 3) + "9" + "}" * (n % 9 + 3),
    "large unit matrix": lambda n: rf"\operatorname{{eye}}({n}999)",
    "zeros": lambda n: rf"\operatorname{{zeros}}({n}99,{n}99)",
    "greatest divisor": lambda n: rf"\gcd(10^{{{n}999}},3)",
    "nested functions": lambda n: r"\sin(" * (n % 12) + "x" + ")" * (n % 12),
    "nested hyperbolic functions": lambda n: r"\sinh(" * (n % 5 + 2) + "99" + ")" * (n % 5 + 2),
    "inequality": lambda n: f"x^4-7x^3+11x^2-13x+{n}<0",
    "inequality of functions": lambda n: rf"x^{{{n}}}\sin x<e^x",
    "product of matrices": lambda n: _matrix(2, "x_{{{}{}}}") * (n % 9 + 2),
    "power of a symbolic matrix": lambda n: _matrix(2, "x_{{{}{}}}") + f"^{{{n}}}",
    "nested powers": lambda n: "(" * (n % 12) + "x+1" + ")^{9}" * (n % 12),
    "nested subscripts": lambda n: "x_{" * (n % 30) + "1" + "}" * (n % 30),
    "bars": lambda n: "|x" * n + "|" * n,
    "cancellation": lambda n: rf"(10^{{{n}9}}+\sqrt2)-10^{{{n}9}}",
    "power of a name": lambda n: f"x^{{{n}999999}}",
    "fractions of fractions": lambda n: "/".join(["9" * 40] * (n % 22 + 1)),
    "mixed numbers": lambda n: "1 1/2" * n,
    "long logarithms": lambda n: r"\log_" * n + "2",
    "sum of fractions": lambda n: "+".join(rf"\frac{{1}}{{{i}}}" for i in range(1, n % 60 + 2)),
    "commands": lambda n: r"\input{/etc/passwd}\loop\def\x{\x\x}\x" * n,
}
# Whole responses, at size n.
WHOLE: dict[str, Callable[[int], str]] = {
    "unclosed boxes": lambda n: r"\boxed{" * (n * 200),
    "nested boxes": lambda n: r"\boxed{" * n + "5" + "}" * n,
    "many boxes": lambda n: r"\boxed{5} " * (n * 100),
    "long LaTeX": lambda n: r"\frac{1}{2}+\sqrt{3}" * 5_000 + f" {n}",
    "long LaTeX in a box": lambda n: r"\boxed{" + r"\frac{1}{2}+\sqrt{3}" * 5_000 + f"{n}" + "}",
    "null bytes": lambda n: r"\boxed{5" + "\0" * (n * 200) + "}",
    "control characters": lambda n: "".join(map(chr, range(32))) * n + r"\boxed{5" + "\b" * n + "}",
    "lone surrogates": lambda n: r"\boxed{" + "\ud800\udfff"[: n % 2 + 1] * n + "}",
    "right to left": lambda n: "\u202e" * n + r"\boxed{" + "\u0665" * n + "\u200f5}",
    "combining characters": lambda n: r"\boxed{5" + "\u0301" * n * 100 + "}",
    "dollars": lambda n: "$" * (n * 200) + "5",
    "answers": lambda n: "answer is " * (n * 100) + "(" * n,
    "answer and dollars": lambda n: "the answer is: " + "$5" * n * 50,
    "equals": lambda n: "answer: " + "=5 " * n * 100,
    "marks": lambda n: "#### " * (n * 100) + "9" * n,
    "spaces": lambda n: r"\boxed{" + " " * (n * 200) + "5}",
    "digits and spaces": lambda n: "9 " * (n * 200),
    "digits and commas": lambda n: "1," * (n * 200),
    "points": lambda n: "." * (n * 200) + "5",
    "backslashes": lambda n: r"\boxed{" + "\\" * (n * 200) + "}",
    "noise": lambda n: _noise(n),
    "empty": lambda n: " " * (n - 1),
}


def _at(template: str, *numbers: int) -> str:
    """The template with its @ replaced by the numbers in turn (braces are LaTeX's here)."""
    pieces = template.split("@")
    return pieces[0] + "".join(f"{n}{piece}" for n, piece in zip(numbers, pieces[1:], strict=True))


def _matrix(size: int, entry: str) -> str:
    rows = ("&".join(entry.format(i, j) for j in range(size)) for i in range(size))
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


_PIECES = r"\frac \sqrt \boxed{ \int \sum \left( \text{ \ { } ^ _ ( ) 9 x ! $ = , & e % |".split()


def _noise(n: int) -> str:
    random_, pieces = random.Random(n), [*_PIECES, "\0", " "]
    return r"\boxed{" + "".join(random_.choice(pieces) for _ in range(3 * n)) + "}"


def kinds() -> dict[str, Callable[[int], str]]:
    """Every kind as a whole response."""
    boxed = {
        name: lambda n, make=make: r"so \boxed{" + make(n) + "}" for name, make in BOXED.items()
    }
    return {**boxed, **WHOLE}


def hostile_responses(count: int) -> Iterator[tuple[str, str]]:
    """`count` pairs (kind and size, response), the kinds in turn, small and large sizes in turn."""
    makers = list(kinds().items())
    rounds = -(-count // len(makers))
    for i in range(count):
        name, make = makers[i % len(makers)]
        size = 1 + 499 * (i // len(makers)) // (rounds - 1) if rounds > 1 else 40
        yield f"{name}, size {size}", make(size)
