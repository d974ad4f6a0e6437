"""Code tests: a small program over a list of integers, judged by inputs and outputs.

The problems, their reference programs and tests; the reward is `code_tests`. An endless stream
unless `prompts` is set.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Literal

from rljax.contracts import contract
from rljax.tasks.task import TEXT, Problem, Task, check_choice, check_range, procedural

# One step of a pipeline: what the prompt says, the expression of `x` that the reference program
# uses, and the same as a function; `{k}` is a constant.
Step = tuple[str, str, Callable[[int, int], object]]

_KEEP: tuple[Step, ...] = (
    ("keep the even numbers", "x % 2 == 0", lambda x, k: x % 2 == 0),
    ("keep the odd numbers", "x % 2 == 1", lambda x, k: x % 2 == 1),
    ("keep the numbers above {k}", "x > {k}", lambda x, k: x > k),
    ("keep the numbers below {k}", "x < {k}", lambda x, k: x < k),
    ("keep the multiples of {k}", "x % {k} == 0", lambda x, k: x % k == 0),
)
_MAP: tuple[Step, ...] = (
    ("add {k} to each", "x + {k}", lambda x, k: x + k),
    ("subtract {k} from each", "x - {k}", lambda x, k: x - k),
    ("multiply each by {k}", "x * {k}", lambda x, k: x * k),
    ("square each", "x * x", lambda x, k: x * x),
    ("change the sign of each", "-x", lambda x, k: -x),
    ("take the remainder of each after division by {k}", "x % {k}", lambda x, k: x % k),
)
# Results that are printed at the end, one value or several; an empty list sums to 0, its largest is
# 0, as the prompt says.
_REDUCE: tuple[tuple[str, str, Callable[[list[int]], int | Iterable[int]]], ...] = (
    ("the sum", "sum(numbers)", sum),
    ("how many are left", "len(numbers)", len),
    ("the largest, or 0 if none is left", "max(numbers, default=0)", lambda v: max(v, default=0)),
    ("the smallest, or 0 if none is left", "min(numbers, default=0)", lambda v: min(v, default=0)),
    ("them in ascending order, parted by blanks", "*sorted(numbers)", sorted),
    ("them in reverse order, parted by blanks", "*reversed(numbers)", reversed),
    ("how many different ones there are", "len(set(numbers))", lambda v: len(set(v))),
)


@contract(safe=True)
def code_tests(
    *,
    steps: int = 2,
    tests: int = 6,
    shown: int = 1,
    style: Literal["words", "short"] = "words",
    chat: bool = False,
    prompts: int = 0,
    test: int = 256,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "... keep the even numbers, then square each. Print the sum." -> a Python program.

    The program reads integers from one line of standard input. `steps` operations on the list, one
    result; `shown` of the `tests` stand in the prompt as examples. ground_truth is JSON: {"inputs":
    [texts], "outputs": [texts]}. Reward: code_tests().

    "short" asks models of a few layers for a function of one integer: "+3,*2;4=14>" ->
    "def f(x):return((x+3)*2)", tested by calls.

    Raises InputError unless 1 <= steps <= 6, 1 <= tests <= 50 and 0 <= shown <= tests, and for
    another style.
    """
    check_range("code_tests", "steps", steps, 1, 6)
    check_range("code_tests", "tests", tests, 1, 50)
    check_range("code_tests", "shown", shown, 0, tests)
    check_choice("code_tests", "style", style, "words", "short")
    make_problem = _function_problem if style == "short" else _program_problem

    def draw(rng: random.Random) -> Problem:
        while True:  # one answer to all tests would need no program that reads its input
            problem = make_problem(rng, steps, tests, shown)
            if tests == 1 or len(set(json.loads(problem.ground_truth)["outputs"])) > 1:
                return problem

    alphabet = _SHORT_TEXT if style == "short" else TEXT
    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    return procedural(
        "code_tests", draw, reward="code_tests()", alphabet=alphabet, chat=chat, **sizes
    )


def _program_problem(rng: random.Random, steps: int, tests: int, shown: int) -> Problem:
    """A list of integers through `steps` operations to one number: a program and its tests."""
    texts, lines, pipeline = [], ["numbers = [int(word) for word in input().split()]"], []
    for _ in range(steps):
        keeps = rng.random() < 0.4
        text, code, function = rng.choice(_KEEP if keeps else _MAP)
        k = rng.randint(2, 9)
        texts.append(text.format(k=k))
        code = code.format(k=k)
        items = f"x for x in numbers if {code}" if keeps else f"{code} for x in numbers"
        lines.append(f"numbers = [{items}]")
        pipeline.append((keeps, function, k))
    result, code, reduce = rng.choice(_REDUCE)
    lines.append(f"print({code})")
    inputs = ["\n"] if tests > 1 else []  # an empty list is a test of its own
    while len(inputs) < tests:
        count = rng.randint(1, 8)
        inputs.insert(0, " ".join(str(rng.randint(-20, 20)) for _ in range(count)) + "\n")
    outputs = [_run(pipeline, reduce, text) + "\n" for text in inputs]
    prompt = (
        "Write a Python program. It reads integers, parted by blanks, from one line of "
        f"standard input, which may be empty. Steps: {', then '.join(texts)}. Print {result}.\n"
    )
    for input_text, output_text in list(zip(inputs, outputs, strict=True))[:shown]:
        prompt += f"Input: {input_text}Output: {output_text}"
    truth = json.dumps({"inputs": inputs, "outputs": outputs})
    return Problem(prompt, truth, "```python\n" + "\n".join(lines) + "\n```")


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, k: x + k,
    "-": lambda x, k: x - k,
    "*": lambda x, k: x * k,
    "%": lambda x, k: x % k,
}
_SHORT_TEXT = "0123456789+-*%(),:;=> defnrtux"


def _function_problem(rng: random.Random, steps: int, tests: int, shown: int) -> Problem:
    """ "+3,*2;4=14>": a function of one integer, and calls of it as tests."""
    operations = [(rng.choice(sorted(_OPERATIONS)), rng.randint(2, 9)) for _ in range(steps)]
    body, inputs = "x", [rng.randint(-20, 20) for _ in range(tests)]
    outputs = list(inputs)
    for operation, k in operations:
        body = f"({body}{operation}{k})"
        outputs = [_OPERATIONS[operation](x, k) for x in outputs]
    examples = "".join(f";{x}={y}" for x, y in zip(inputs[:shown], outputs, strict=False))
    truth = {"inputs": [[x] for x in inputs], "outputs": outputs, "fn_name": "f"}
    prompt = ",".join(f"{operation}{k}" for operation, k in operations) + f"{examples}>"
    return Problem(prompt, json.dumps(truth), f"def f(x):return{body}")


def _run(pipeline: list[tuple], reduce: Callable, text: str) -> str:
    values = [int(word) for word in text.split()]
    for keeps, function, k in pipeline:
        results = [function(x, k) for x in values]
        values = list(itertools.compress(values, results)) if keeps else results
    result = reduce(values)
    return str(result) if isinstance(result, int) else " ".join(map(str, result))
