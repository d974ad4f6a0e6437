"""Whether the beginning of a program can still be completed: the truth of process labels."""

from collections.abc import Sequence

from rljax.rewards.unit_tests.programs import (
    MAX_VALUE,
    Instruction,
    ProgramError,
    parse_program,
    run_program,
    unit_tests,
)
from rljax.tasks.program_task import instructions


def recoverable(
    prefix: str,
    ground_truth: str,
    *,
    max_constant: int,
    operations: str = "+-*",
    with_input: bool = True,
) -> bool:
    """Whether some completion of `prefix` passes all tests within the lines allowed: the oracle.

    Breadth first over what the register holds in all tests at once: equal states are one.
    """
    tests, max_lines, _ = unit_tests(ground_truth)
    inputs, wanted = [x for x, _ in tests], tuple(y for _, y in tests)
    try:
        begun = parse_program(prefix)
        states = {tuple(run_program(begun, x) for x in inputs)}
    except ProgramError:
        return False
    alphabet = instructions(max_constant, operations, with_input)
    for used in range(len(begun), max_lines + 1):
        if used and wanted in states:  # the empty program is no answer
            return True
        states = {_step(state, inputs, i) for state in states for i in alphabet}
        states = {s for s in states if max(map(abs, s)) <= MAX_VALUE}
    return False


def _step(state: tuple[int, ...], inputs: Sequence[int], instruction: Instruction) -> tuple:
    operation, operand = instruction
    values = inputs if operand == "x" else [int(operand)] * len(inputs)
    if operation == "+":
        return tuple(r + v for r, v in zip(state, values, strict=True))
    if operation == "-":
        return tuple(r - v for r, v in zip(state, values, strict=True))
    return tuple(r * v for r, v in zip(state, values, strict=True))
