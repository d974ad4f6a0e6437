"""A tiny language, its interpreter and the unit tests that score a program written in it.

One register holds the input x at the start. A program is a list of instructions, one per line, that
run once from top to bottom; what the register holds at the end is the output:

    +3      add 3            lines that are blank or start with # do nothing
    *x      times the input
    -12     subtract 12      example, 2x + 1:  "*2\n+1"

Nothing is handed to Python's own eval. A program is untrusted text: its length, its constants and
its values are bounded, so every run ends in microseconds.
"""

import json
import re
from collections.abc import Sequence

from rljax.contracts import contract

OPERATIONS = "+-*"
MAX_STEPS = 64  # instructions that one run may execute
MAX_CHARACTERS = 4096  # characters of a program; a response may be any text
MAX_VALUE = 10**12  # absolute value that the register may reach

Instruction = tuple[str, str]  # operation, operand: digits or "x"

# ASCII digits: \d would take those of every script.
_INSTRUCTION = re.compile(r"([+\-*])(x|[0-9]{1,4})")


class ProgramError(ValueError):
    """The error of a text that is no program, or does not end within the limits; says
    where and why."""


def parse_program(text: str) -> list[Instruction]:
    """The instructions of a program, without blank lines and comments. Raises ProgramError for any
    other line, and for a program that is too long."""
    if len(text) > MAX_CHARACTERS:
        raise ProgramError(f"the program has more than {MAX_CHARACTERS} characters")
    program = []
    # Not splitlines(): that also breaks at characters which no tokenizer of the task has.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" ")
        if not line or line.startswith("#"):
            continue
        match = _INSTRUCTION.fullmatch(line)
        if match is None:
            raise ProgramError(f"line {number} is no instruction: {line!r:.40}")
        program.append((match[1], match[2]))
    return program


def run_program(instructions: Sequence[Instruction], x: int) -> int:
    """The value of the register at the end, from x on. Raises ProgramError for a value beyond
    the limits."""
    register = x
    for step, (operation, operand) in enumerate(instructions):
        if step >= MAX_STEPS:
            raise ProgramError(f"more than {MAX_STEPS} steps")
        value = x if operand == "x" else int(operand)
        if operation == "+":
            register += value
        elif operation == "-":
            register -= value
        else:
            register *= value
        if abs(register) > MAX_VALUE:
            raise ProgramError(f"step {step + 1} leaves a number above {MAX_VALUE}")
    return register


def run_trace(instructions: Sequence[Instruction], x: int) -> list[int]:
    """The register's value at the start, x, and after each instruction. Raises ProgramError as
    `run_program` does."""
    return [run_program(instructions[:n], x) for n in range(len(instructions) + 1)]


def unit_tests(ground_truth: str) -> tuple[list[tuple[int, int]], int, list[int]]:
    """Returns (pairs of input and output, most instructions allowed, the trace that one run has to
    leave, [] for none) from a ground truth in JSON. Raises ValueError for any other text."""
    try:
        parsed = json.loads(ground_truth)
        tests = [(int(x), int(y)) for x, y in parsed["tests"]]
        return tests, int(parsed["max_lines"]), [int(x) for x in parsed.get("trace", ())]
    except (ValueError, KeyError, TypeError) as error:
        # A reference that is none would silently give every response the failing score.
        raise ValueError(
            f"ground_truth {ground_truth!r:.80} is not "
            '{"tests": [[input, output], ...], "max_lines": n}, maybe with "trace": [input, ...]'
        ) from error


def passed_tests(response: str, ground_truth: str) -> list[bool]:
    """Returns, for each unit test and for the trace if there is one, whether it passed. A text
    that is no program, or is too long, fails all of them. Raises ValueError for a ground truth
    without tests."""
    tests, max_lines, trace = unit_tests(ground_truth)
    count = len(tests) + bool(trace)
    try:
        instructions = parse_program(response)
    except ProgramError:
        return [False] * count
    if not 0 < len(instructions) <= max_lines:
        return [False] * count
    out = []
    for x, y in tests:
        try:
            out.append(run_program(instructions, x) == y)
        except ProgramError:
            out.append(False)
    if trace:
        try:
            out.append(run_trace(instructions, trace[0]) == trace)
        except ProgramError:
            out.append(False)
    return out


@contract(
    safe=True, reads="answer", on_timeout=lambda options: options["failed"], truth="specification"
)
def program_tests(
    response: str,
    ground_truth: str,
    *,
    passed: float = 1.0,
    failed: float = -1.0,
    partial: float = 0.0,
) -> dict:
    """`passed` if every unit test passes, else failed + partial (passed - failed) share of them.

    Parts: all_passed, tests_passed (the share), parsed. `partial` below 1 keeps a pass apart.
    Raises ValueError unless 0 <= partial < 1, and for a ground truth without tests.
    """
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"program_tests: partial must lie in [0, 1), got {partial!r}")
    results = passed_tests(response, ground_truth)
    share = sum(results) / len(results) if results else 0.0
    all_passed = bool(results) and all(results)
    try:
        parsed = bool(parse_program(response))
    except ProgramError:
        parsed = False
    return {
        "score": passed if all_passed else failed + partial * (passed - failed) * share,
        "all_passed": float(all_passed),
        "tests_passed": share,
        "parsed": float(parsed),
    }
