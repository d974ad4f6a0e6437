"""A task in one file, as a user writes it: data, reward and evaluation."""

from rljax.tasks import Stream, Task


def is_double(response, ground_truth, partial: float = 0.0) -> float:
    """1 for the right number, `partial` for another one."""
    right = response.strip() == ground_truth
    return 1.0 if right else partial * response.strip().isdecimal()


def doubling(test: int = 4) -> Task:
    """ "7>" -> "14"."""
    rows = [{"prompt": f"{n}>", "ground_truth": str(2 * n)} for n in range(40)]
    return Task(
        alphabet="0123456789>",
        train=Stream(lambda index: rows[test + index % (len(rows) - test)]),
        test=rows[:test],
        worked_examples=[{"prompt": "7>", "completion": "14"}] * 8,
        reward="my_task.is_double(partial=0.25)",
        evaluation="my_task.is_double()",
    )
