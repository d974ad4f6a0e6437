"""Tasks: data, its reward and its evaluation in one place. `data.train="countdown(numbers=4)"`.

What is importable here is what a config may call by its bare name; a task of your own is a function
that returns a `Task`, named by its module, `"my_task.my_task(size=3)"`. Where reward.function is ""
the reward is the task's own, and where evaluate.reward is "" so is the evaluation.

Functions that return a Task, by theme. A task's splits are disjoint: held-out prompts are never
trained on. Each raises InputError for an option outside of its range, and if the prompts are too
few for its splits.
"""

from rljax.data.online.stream import Stream
from rljax.tasks.documents import json_extraction
from rljax.tasks.games import guess_number, kuhn_poker, tic_tac_toe
from rljax.tasks.gym import reasoning_gym
from rljax.tasks.instructions import instructions
from rljax.tasks.integers import arithmetic, countdown, sorting
from rljax.tasks.letters import (
    addition,
    first_letter,
    hinted_letter,
    letter_count,
    letter_feedback,
    letter_quota,
    program_synthesis,
    running_sum,
    sort_digits,
)
from rljax.tasks.pictures import drawn_digits
from rljax.tasks.programs import code_tests
from rljax.tasks.public import gsm8k, math
from rljax.tasks.task import Task
from rljax.tasks.texts import prompt_texts
from rljax.tasks.tool_questions import broken_lines, expressions, facts, products

__all__ = [
    "Stream",
    "Task",
    "addition",
    "arithmetic",
    "broken_lines",
    "code_tests",
    "countdown",
    "drawn_digits",
    "expressions",
    "facts",
    "first_letter",
    "hinted_letter",
    "gsm8k",
    "guess_number",
    "instructions",
    "json_extraction",
    "kuhn_poker",
    "letter_count",
    "letter_feedback",
    "letter_quota",
    "math",
    "products",
    "prompt_texts",
    "program_synthesis",
    "reasoning_gym",
    "running_sum",
    "sort_digits",
    "sorting",
    "tic_tac_toe",
]
