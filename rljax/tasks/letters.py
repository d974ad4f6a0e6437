"""Small tasks over a few characters, for models of a few layers: a fixed set of prompts each.

All prompts are drawn at once and split at random. Endless streams are in `integers`,
`documents` and `programs`.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Literal

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.unit_tests.programs import OPERATIONS
from rljax.tasks.program_task import problems as program_problems
from rljax.tasks.task import Task, check_range


def _check_prompts(name: str, prompts: int) -> None:
    if prompts < 2:
        rule = "at least 2: it is split in two"
        raise InputError(f"{name}(prompts)", value=prompts, rule=rule, fix="prompts=2 or more")


def _split(
    name: str, alphabet: str, pairs: list[tuple[str, str]], test: int, demonstrations: int
) -> Task:
    if not 0 < test < len(pairs):
        rule = f"between 1 and {len(pairs) - 1}, the distinct prompts"
        fix = f"test={max(1, len(pairs) // 10)}, or raise the number of prompts"
        raise InputError(f"{name}(test)", value=test, rule=rule, fix=fix)
    if not 0 < demonstrations <= len(pairs) - test:
        rule = f"between 1 and {len(pairs) - test}"
        fix = "lower worked_examples, or raise the number of prompts"
        raise InputError(f"{name}(worked_examples)", value=demonstrations, rule=rule, fix=fix)
    records = [
        {"prompt": p, "ground_truth": a, "data_source": name, "extra_info": {}, "index": i}
        for i, (p, a) in enumerate(pairs)
    ]
    train = records[test:]
    examples, held_out = (
        [{"prompt": r["prompt"], "completion": r["ground_truth"]} for r in part]
        for part in (train[:demonstrations], records[:test])
    )
    return Task(alphabet, train, records[:test], examples, held_out)


def _judged(task: Task, reward: str, truth: Callable[[dict], object]) -> Task:
    """The task with another ground truth of each row, for a reward that judges more than the
    demonstration."""
    splits = task.train, task.test
    train, test = ([r | {"ground_truth": truth(r)} for r in rows] for rows in splits)
    return dataclasses.replace(task, train=train, test=test, reward=reward)


@contract(safe=True)
def sort_digits(
    *,
    digits: int = 5,
    prompts: int = 20_000,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "83051>" -> "01358": put the digits in ascending order. `prompts` distinct ones, split at
    random.

    Raises InputError unless 2 <= digits <= 12.
    """
    check_range("sort_digits", "digits", digits, 2, 12)
    _check_prompts("sort_digits", prompts)
    rng = random.Random(seed)
    numbers = rng.sample(range(10**digits), min(prompts, 10**digits))
    texts = [str(n).zfill(digits) for n in numbers]
    pairs = [(f"{t}>", "".join(sorted(t))) for t in texts]
    return _split("sort_digits", "0123456789>", pairs, test, worked_examples)


@contract(safe=True)
def addition(
    *,
    digits: int = 2,
    prompts: int = 20_000,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "37+58=" -> "95": add two numbers of up to `digits` digits.

    Raises InputError unless 1 <= digits <= 9.
    """
    check_range("addition", "digits", digits, 1, 9)
    _check_prompts("addition", prompts)
    rng = random.Random(seed)
    pairs_of_numbers = rng.sample(range(100**digits), min(prompts, 100**digits))
    terms = [divmod(n, 10**digits) for n in pairs_of_numbers]
    pairs = [(f"{a}+{b}=", str(a + b)) for a, b in terms]
    return _split("addition", "0123456789+=", pairs, test, worked_examples)


@contract(safe=True)
def letter_count(
    *,
    letters: int = 8,
    kinds: int = 6,
    prompts: int = 5_000,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "dabfcaed>" -> "2": how often "a" occurs, 0 to letters/2 times, all equally likely.

    `prompts` texts are drawn and repeated ones dropped. Raises InputError unless 2 <= letters <= 19
    and 3 <= kinds <= 26.
    """
    check_range("letter_count", "letters", letters, 2, 19, ": a count is one digit")
    check_range("letter_count", "kinds", kinds, 3, 26)
    _check_prompts("letter_count", prompts)
    rng = random.Random(seed)
    alphabet = "abcdefghijklmnopqrstuvwxyz"[:kinds]
    answers = {}
    for _ in range(prompts):
        count = rng.randint(0, letters // 2)
        text = list("a" * count) + rng.choices(alphabet[1:], k=letters - count)
        rng.shuffle(text)
        answers["".join(text) + ">"] = str(count)
    pairs = list(answers.items())
    return _split("letter_count", "0123456789>" + alphabet, pairs, test, worked_examples)


@contract(safe=True)
def first_letter(
    *,
    letters: int = 3,
    kinds: int = 4,
    test: int = 16,
    seed: int = 0,
    data_source: PlainText = "first_letter",
) -> Task:
    """ "bca>" -> "b": the first of `letters` letters, each one of `kinds`; all texts, split at
    random. The smallest task with a right answer per prompt. Another `data_source` makes it another
    task of a mixture.

    Raises InputError unless 2 <= kinds <= 26, 1 <= letters <= 6, and kinds^letters <= 20,000.
    """
    check_range("first_letter", "kinds", kinds, 2, 26)
    if not 1 <= letters <= 6 or kinds**letters > 20_000:
        rule = "1 to 6, and kinds^letters <= 20000"
        fix = "lower letters, or kinds"
        raise InputError("first_letter(letters)", value=letters, rule=rule, fix=fix)
    alphabet = "abcdefghijklmnopqrstuvwxyz"[:kinds]
    texts = ["".join(t) for t in itertools.product(alphabet, repeat=letters)]
    random.Random(seed).shuffle(texts)
    pairs = [(f"{t}>", t[0]) for t in texts]
    task = _split("first_letter", alphabet + ">", pairs, test, len(pairs) - test)

    def named(rows):
        return [row | {"data_source": data_source} for row in rows]

    return dataclasses.replace(task, train=named(task.train), test=named(task.test))


@contract(safe=True)
def hinted_letter(*, letters: int = 3, kinds: int = 4, test: int = 16, seed: int = 0) -> Task:
    """The prompts of first_letter, "bca>" -> "b", behind which a hint may stand: "bca>b>" -> "b".
    Worked examples have one, each letter in turn, which their answer repeats: they teach to follow
    hints, and not which letter is right. The column privileged_context of a row is the right
    letter."""
    task = first_letter(letters=letters, kinds=kinds, test=test, seed=seed)

    def hinted(rows):
        return [row | {"extra_info": {"privileged_context": row["ground_truth"]}} for row in rows]

    examples = [
        {"prompt": f"{row['prompt']}{hint}>", "completion": hint}
        for row in task.train
        for hint in task.alphabet[:kinds]
    ]
    train, held_out = hinted(task.train), hinted(task.test)
    return dataclasses.replace(task, train=train, test=held_out, worked_examples=examples)


@contract(safe=True)
def letter_feedback(*, letters: int = 3, kinds: int = 4, test: int = 16, seed: int = 0) -> Task:
    """The prompts of first_letter with judged answers: rows that serve as pairs, labelled answers,
    trajectories and steps, for dataflows that learn from a file. Every second answer is wrong."""
    task = first_letter(letters=letters, kinds=kinds, test=test, seed=seed)
    rng = random.Random(seed)

    def judged(records):
        rows = []
        for index, record in enumerate(records):
            right = record["ground_truth"]
            wrong = rng.choice([c for c in task.alphabet[:kinds] if c != right])
            good = index % 2 == 0
            answer = right if good else wrong
            feedback = dict(chosen=right, rejected=wrong, completion=answer, label=good)
            feedback |= dict(safer=right, more_harmful=wrong)
            feedback |= dict(safer_is_safe=True, more_harmful_is_safe=False)
            steps = dict(completions=[right, answer], labels=[True, good], reward=float(good))
            rows.append({**record, **feedback, **steps})
        return rows

    train, held_out = judged(task.train), judged(task.test)
    return dataclasses.replace(task, alphabet=task.alphabet + "\n", train=train, test=held_out)


@contract(safe=True)
def running_sum(
    *,
    terms: int = 4,
    modulus: int = 10,
    prompts: int = 5_000,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "3574>" -> "8\\n5\\n9": the sums of the first 2, 3, ... digits, one a line, each modulo
    `modulus`; the last line is the answer. The reward is `last_line`, the ground truth the answer
    alone: a slip on the way is not seen but in what follows from it.

    Raises InputError unless 3 <= terms <= 9 and 2 <= modulus <= 10.
    """
    check_range("running_sum", "terms", terms, 3, 9)
    check_range("running_sum", "modulus", modulus, 2, 10, ": a sum is one digit")
    _check_prompts("running_sum", prompts)
    numbers = random.Random(seed).sample(range(modulus**terms), min(prompts, modulus**terms))
    pairs = []
    for number in numbers:
        digits = [number // modulus**i % modulus for i in reversed(range(terms))]
        sums = [total % modulus for total in itertools.accumulate(digits)]
        pairs.append(("".join(map(str, digits)) + ">", "\n".join(map(str, sums[1:]))))
    task = _split("running_sum", "0123456789>\n", pairs, test, worked_examples)

    return _judged(task, "last_line()", lambda row: row["ground_truth"][-1])


@contract(safe=True)
def program_synthesis(
    *,
    lines: int = 3,
    min_lines: int = 1,
    max_constant: int = 5,
    operations: PlainText = OPERATIONS,
    with_input: bool = True,
    show: Literal["function", "examples", "trace"] = "function",
    examples: int = 3,
    prompts: int = 5_000,
    test: int = 64,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "2x+1:" -> "*2\\n+1": a program of at most `lines` lines in the language of
    rljax.rewards.unit_tests.programs, whose reward is `program_tests`.

    `show` "examples" gives inputs and outputs instead, "1>3,2>5,3>7:"; the unit tests are more.
    "trace" gives an input and the value after each line, "3>5,>4,,,,:" -> "+2\\n-1" (at most three
    lines), all of one digit, each in a place as wide as a line, and every line is judged: it needs
    two neighbours alone, so that what is learned on some problems holds on others, and a wrong line
    is never made good.

    Harder with more lines, constants and `operations`; `with_input` lets x be an operand; the
    program has at least `min_lines`. Repeated prompts are dropped: 500 of 5000 functions stay.
    Raises InputError for an option outside of its range, and for "trace" unless operations="+-"
    and with_input=False.
    """
    check_range("program_synthesis", "lines", lines, 1, 6)
    check_range("program_synthesis", "min_lines", min_lines, 1, lines)
    check_range("program_synthesis", "max_constant", max_constant, 2, 9)
    check_range("program_synthesis", "examples", examples, 1, 8)
    if not operations or len(set(operations)) < len(operations) or set(operations) - {*OPERATIONS}:
        rule = f"some of {OPERATIONS}, once"
        fix = f"operations={OPERATIONS[:2]!r}, or others of these"
        raise InputError("program_synthesis(operations)", value=operations, rule=rule, fix=fix)
    if show not in ("function", "examples", "trace"):
        raise InputError(
            "program_synthesis(show)", value=show, fix="write function, examples or trace"
        )
    if show == "trace" and (with_input or set(operations) != {"+", "-"}):
        raise InputError(
            "program_synthesis(show='trace')",
            value=(operations, with_input),
            rule="one run does not tell +x from +3, nor *2 from +3",
            fix="operations='+-', with_input=False",
        )
    _check_prompts("program_synthesis", prompts)
    sizes = dict(lines=lines, min_lines=min_lines, max_constant=max_constant, examples=examples)
    language = dict(operations=operations, with_input=with_input, show=show)
    drawn = program_problems(random.Random(seed), **sizes, **language)
    distinct = {p.prompt: p for p in itertools.islice(drawn, prompts)}
    # _split puts an answer beside each prompt: the program is the demonstration, the tests judge.
    alphabet = "0123456789+-*x^>,:\n"
    pairs = [(p.prompt, p.program) for p in distinct.values()]
    task = _split("program_synthesis", alphabet, pairs, test, worked_examples)
    return _judged(task, "program_tests()", lambda row: distinct[row["prompt"]].ground_truth)


@contract(safe=True)
def letter_quota(
    *,
    letters: int = 8,
    kinds: int = 4,
    quota: int = 4,
    shown: int = 2,
    prompts: int = 256,
    test: int = 64,
    worked_examples: int = 128,
    seed: int = 0,
) -> Task:
    """ "bcad>" -> `letters` letters of which `quota` are the first one of the prompt, in any order;
    the reward is `letter_quota`, 1 at the quota and less with every letter too few or too many.

    The demonstrations are bounded: at most `shown` of their letters count, each number from 0 to
    `shown` equally often. With `shown` below `quota` none of them is a best answer, and what scores
    them in order, such as a reward model, sees only that more is better. Raises InputError unless 2
    <= letters <= 32, 2 <= kinds <= 26, 1 <= quota <= letters and 0 <= shown <= letters.
    """
    ranges = (("letters", letters, 2, 32), ("kinds", kinds, 2, 26), ("quota", quota, 1, letters))
    for name, value, low, high in (*ranges, ("shown", shown, 0, letters)):
        check_range("letter_quota", name, value, low, high)
    _check_prompts("letter_quota", prompts)
    rng = random.Random(seed)
    alphabet = "abcdefghijklmnopqrstuvwxyz"[:kinds]
    numbers = rng.sample(range(kinds**4), min(prompts, kinds**4))
    texts = ["".join(alphabet[n // kinds**i % kinds] for i in range(4)) for n in numbers]
    pairs = []
    for text in texts:
        count = rng.randint(0, shown)
        answer = list(text[0] * count)
        answer += rng.choices(alphabet.replace(text[0], ""), k=letters - count)
        rng.shuffle(answer)
        pairs.append((f"{text}>", "".join(answer)))
    task = _split("letter_quota", alphabet + ">", pairs, test, worked_examples)

    return _judged(task, f"letter_quota(quota={quota})", lambda row: row["prompt"][0])
