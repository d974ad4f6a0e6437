"""Problems for the language of rljax.rewards.unit_tests.programs, with their tests.

The procedural generator, and the oracle that knows whether the start of a program can still be
completed to one that passes (process labels are checked against it). The task itself is
rljax.tasks.program_synthesis; parser, interpreter and reward are the reward's.
"""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence

from rljax.rewards.unit_tests.programs import Instruction, run_program


@dataclasses.dataclass(frozen=True)
class ProgramProblem:
    """A problem: its prompt ("2x+1:", "1>3,2>5:" or "3>5,>4,:"), its ground_truth for the reward,
    and a program that passes."""

    prompt: str
    ground_truth: str
    program: str


def instructions(max_constant: int, operations: str, with_input: bool) -> list[Instruction]:
    """All instructions a problem may need: +1..+c, -1..-c, *2..*c, and with x as operand."""
    out = []
    for operation in operations:
        # Times 1 does nothing.
        first = 2 if operation == "*" else 1
        out += [(operation, str(c)) for c in range(first, max_constant + 1)]
        if with_input:
            out.append((operation, "x"))
    return out


def program_text(program: Sequence[Instruction]) -> str:
    """The text of a program, one instruction per line."""
    return "\n".join(operation + operand for operation, operand in program)


def _coefficients(program: Sequence[Instruction]) -> list[int]:
    """The polynomial in x that a program computes, lowest power first."""
    register = [0, 1]
    for operation, operand in program:
        value = [0, 1] if operand == "x" else [int(operand)]
        if operation == "*":
            product = [0] * (len(register) + len(value) - 1)
            for i, a in enumerate(register):
                for j, b in enumerate(value):
                    product[i + j] += a * b
            register = product
        else:
            sign = 1 if operation == "+" else -1
            width = max(len(register), len(value))

            def wide(p):
                return p + [0] * (width - len(p))  # noqa: B023

            register = [a + sign * b for a, b in zip(wide(register), wide(value), strict=True)]
    return register


def function_text(program: Sequence[Instruction]) -> str:
    """The polynomial that a program computes: "x^2-3x+1", highest power first."""
    terms = []
    for power, c in reversed(list(enumerate(_coefficients(program)))):
        if c:
            size = "" if abs(c) == 1 and power else str(abs(c))
            letter = "" if not power else "x" if power == 1 else f"x^{power}"
            terms.append(("-" if c < 0 else "+") + size + letter)
    return "".join(terms).removeprefix("+") or "0"


def _walk(rng: random.Random, steps: int, highest: int) -> list[int]:
    """Numbers from 0 to `highest`, no two neighbours equal: a start and what `steps` lines make of
    it."""
    values = [rng.randint(0, highest)]
    while len(values) <= steps:
        values.append(rng.choice([v for v in range(highest + 1) if v != values[-1]]))
    return values


def problems(
    rng: random.Random,
    *,
    lines: int,
    min_lines: int,
    max_constant: int,
    operations: str,
    with_input: bool,
    show: str,
    examples: int,
) -> Iterator[ProgramProblem]:
    """Problems without end, drawn with `rng`, repeated ones included.

    A random program of `min_lines` to `lines` instructions is what is asked for, any program of
    at most `lines` that passes is right. The prompt shows the function, the first `examples` unit
    tests, or a trace: an input and what is in the register after each line, which a right program
    leaves, too. All tests together determine the polynomial.
    """
    alphabet = instructions(max_constant, operations, with_input)
    # A polynomial of degree d is known from d + 1 points, and every line may raise the degree.
    inputs = list(range(1, max(examples, lines + 2) + 1))
    while True:
        count = rng.randint(min_lines, lines)
        if show == "trace":
            values = _walk(rng, count, max_constant)
            gains = [after - before for before, after in itertools.pairwise(values)]
            program = [("+" if gain > 0 else "-", str(abs(gain))) for gain in gains]
        else:
            program = [rng.choice(alphabet) for _ in range(count)]
        tests = [(x, run_program(program, x)) for x in inputs]
        if show == "function":
            prompt = function_text(program)
        elif show == "trace":
            # As wide as a line of the program, one for every line it may have.
            cells = [f">{value}," for value in values[1:]] + [",,,"] * (lines - count)
            prompt = f"{values[0]}{''.join(cells)}"
        else:
            prompt = ",".join(f"{x}>{y}" for x, y in tests[:examples])
        truth = {"tests": tests, "max_lines": lines}
        truth |= {"trace": values} if show == "trace" else {}
        truth = json.dumps(truth, separators=(",", ":"))
        yield ProgramProblem(f"{prompt}:", truth, program_text(program))
