"""Maps from the columns of published data sets to ours: one function of (example, index) each.

`gsm8k`, `math`, and what a map of your own needs. A map returns {"prompt", "ground_truth"}
and maybe more columns, or None to drop the row.
"""

from rljax.errors import InputError
from rljax.rewards.answers.find import last_boxed

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def column(example: dict, name: str) -> str:
    """Returns the text in a column. Raises InputError that names it."""
    if name not in example:
        fix = f"rename the column that holds it to {name!r}"
        raise InputError(f"lacks the column {name!r}", value=sorted(map(str, example)), fix=fix)
    value = example[name]
    if not isinstance(value, str) or not value.strip():
        fix = f"write a text in {name!r}, or drop the row"
        raise InputError(f"column {name!r} is empty or not a text", value=value, fix=fix)
    return value


def with_instruction(question: str, instruction: str) -> str:
    """Returns the question, and behind it the instruction if it is not ""."""
    return f"{question} {instruction}" if instruction else question


def gsm8k(example: dict, index: int, *, instruction: str = GSM8K_INSTRUCTION) -> dict:
    """Maps {"question", "answer"}; the ground truth is the number after "#### ", without commas, as
    verl writes it. Raises InputError for an answer without one."""
    question, answer = column(example, "question"), column(example, "answer")
    _, mark, final = answer.rpartition("#### ")
    final = final.strip().replace(",", "")
    if not mark or not final:
        raise InputError(
            "column 'answer' has no number after '#### '",
            value=answer[-80:],
            fix="end the answer with '#### NUMBER', or drop the row",
        )
    return dict(
        prompt=with_instruction(question, instruction),
        ground_truth=final,
        ability="math",
        extra_info={"question": question, "answer": answer},
    )


def math(
    example: dict,
    index: int,
    *,
    instruction: str = MATH_INSTRUCTION,
    problem_column: str = "problem",
    solution_column: str = "solution",
) -> dict:
    r"""Maps {"problem", "solution"}; the ground truth is the answer in the solution's last
    \boxed{...}. Raises InputError for a solution without one."""
    problem, solution = column(example, problem_column), column(example, solution_column)
    answer = last_boxed(solution)
    if answer is None or not answer.strip():
        raise InputError(
            f"column {solution_column!r} has no \\boxed{{...}}",
            value=solution[-80:],
            fix=f"put the answer into \\boxed{{...}} in {solution_column!r}, or drop the row",
        )
    others = {k: example[k] for k in ("level", "type", "subject") if k in example}
    return dict(
        prompt=with_instruction(problem, instruction),
        ground_truth=answer.strip(),
        ability="math",
        extra_info={**others, "solution": solution},
    )
