"""The tiny language, its limits and reward; the problems, the oracle, and labels by search."""

import itertools
import json
import random

import pytest
from program_oracle import recoverable
from spent import at_most

from rljax import tasks
from rljax.components import resolve
from rljax.config import Config
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.first_error import best_of, label_lines
from rljax.errors import InputError
from rljax.rewards.unit_tests.programs import (
    MAX_VALUE,
    ProgramError,
    parse_program,
    passed_tests,
    program_tests,
    run_program,
)
from rljax.tasks.program_task import function_text, instructions, program_text


def truth(tests, max_lines=3) -> str:
    return json.dumps({"tests": tests, "max_lines": max_lines})


def run(text, x):
    return run_program(parse_program(text), x)


def test_the_language():
    assert run("*2\n+1", 5) == 11
    assert run("*x\n-x\n-12", 5) == 8
    assert run("# nothing\n\n  +3  \n", -4) == -1
    assert run("", 7) == 7


@pytest.mark.parametrize(
    "text",
    [
        "+",
        "x",
        "+-3",
        "/2",
        "+3 +4",
        "+3;",
        "++",
        "+xx",
        "+ 3",
        "+12345",
        "+٣",
        "+3\r+4",
        "__import__('os')",
        "+1\n?",
        "\x00",
        "x" * 5000,
        "+1\n" * 2000,
    ],
)
def test_what_is_no_program(text):
    with pytest.raises(ProgramError):
        parse_program(text)
    assert program_tests(text, truth([[1, 2]]))["score"] == -1.0


def test_runs_are_bounded():
    with pytest.raises(ProgramError, match="steps"):
        run_program([("+", "1")] * 65, 0)
    with pytest.raises(ProgramError, match="above"):
        run_program([("*", "9999")] * 64, 1)
    with at_most(5):
        for text in ("*9999\n" * 64, "*x\n" * 64, "#" * 4096, " " * 10**6):
            assert program_tests(text, truth([[MAX_VALUE, 1]], 64))["score"] == -1.0


def test_reward():
    tests = [[1, 3], [2, 5], [3, 7], [4, 9]]
    good, long = "*2\n+1", "*2\n+1\n+1\n-1"
    assert program_tests(good, truth(tests)) == {
        "score": 1.0,
        "all_passed": 1.0,
        "tests_passed": 1.0,
        "parsed": 1.0,
    }
    assert passed_tests(long, truth(tests)) == [False] * 4
    assert passed_tests(long, truth(tests, 4)) == [True] * 4
    assert passed_tests("+2", truth(tests)) == [True, False, False, False]
    assert program_tests("+2", truth(tests))["score"] == -1.0
    scored = program_tests("+2", truth(tests), partial=0.5, failed=0.0)
    assert scored["score"] == 0.125 and scored["all_passed"] == 0.0
    assert program_tests("", truth([[1, 1]]))["score"] == -1.0  # nothing is not the identity
    assert program_tests("#", truth([]))["score"] == -1.0
    with pytest.raises(ValueError, match="ground_truth"):
        program_tests(good, "11")
    with pytest.raises(ValueError, match="partial"):
        program_tests(good, truth(tests), partial=1.0)


def test_function_text():
    cases = {
        "*2\n+1": "2x+1",
        "-x": "0",
        "*x\n*3\n-x": "3x^2-x",
        "-3": "x-3",
        "*x\n*x": "x^3",
        "-x\n-2": "-2",
        "*x\n-x\n*2": "2x^2-2x",
        "-x\n-x": "-x",
    }
    for text, want in cases.items():
        assert function_text(parse_program(text)) == want


def test_defaults():
    task = tasks.program_synthesis()
    assert len(task.test) == 64 and len(task.worked_examples) == 256 < len(task.train)
    assert max(len(r["prompt"]) for r in task.train) <= 10


TRACED = {"operations": "+-", "with_input": False, "max_constant": 9}


@pytest.mark.parametrize("show", ["function", "examples", "trace"])
def test_every_problem_is_solved_by_its_own_program(show):
    options = {"lines": 3, "show": show, "prompts": 1000, "test": 20, "worked_examples": 100}
    options |= TRACED if show == "trace" else {}
    task = tasks.program_synthesis(**options, seed=1)
    assert task == tasks.program_synthesis(**options, seed=1)
    assert task.train != tasks.program_synthesis(**options, seed=2).train
    assert not {r["prompt"] for r in task.train} & {r["prompt"] for r in task.test}
    tokenizer = CharTokenizer(task.alphabet)
    truths = {r["prompt"]: r["ground_truth"] for r in task.train}
    lengths = set()
    for example in task.worked_examples:
        ids = tokenizer.encode(example["prompt"] + example["completion"])
        assert tokenizer.decode(ids) == example["prompt"] + example["completion"]
        assert program_tests(example["completion"], truths[example["prompt"]])["score"] == 1.0
        lengths.add(example["completion"].count("\n") + 1)
    assert lengths == {1, 2, 3}
    wrong = [program_tests("+1\n+1", r["ground_truth"])["score"] for r in task.train]
    assert sum(w == 1.0 for w in wrong) <= (len(wrong) // 50 if show == "trace" else 1)


def test_a_trace_is_what_the_program_does_line_by_line():
    options = {"lines": 5, "min_lines": 3, "show": "trace", "prompts": 300, "test": 20}
    task = tasks.program_synthesis(**options, worked_examples=200, **TRACED)
    lengths = set()
    for example in task.worked_examples:
        start, shown = example["prompt"][0], example["prompt"][1:]
        program = parse_program(example["completion"])
        values = [run_program(program[:n], int(start)) for n in range(1, len(program) + 1)]
        places = [f">{value}," for value in values] + [",,,"] * (5 - len(program))
        assert shown == "".join(places) + ":" and all(0 <= v <= 9 for v in values)
        # A line is as wide as the place of its value: they are equally far apart everywhere.
        assert len(shown) == 3 * 5 + 1 and len(example["completion"]) + 1 == 3 * len(program)
        lengths.add(len(program))
    assert lengths == {3, 4, 5}
    trace = json.dumps({"tests": [[1, 3], [5, 7]], "max_lines": 3, "trace": [3, 4, 5]})
    assert passed_tests("+1\n+1", trace) == [True] * 3
    # The shortcut to the same result is another program, and so is one with a line too many.
    assert passed_tests("+2", trace) == passed_tests("+2\n-1\n+1", trace) == [True, True, False]
    assert passed_tests("+2\n-1", trace) == [False] * 3 and passed_tests("?", trace) == [False] * 3


def test_min_lines_bounds_the_programs_that_are_asked_for():
    options = {"lines": 4, "min_lines": 4, "prompts": 200, "test": 5, "worked_examples": 50}
    task = tasks.program_synthesis(**options)
    assert {example["completion"].count("\n") for example in task.worked_examples} == {3}


def test_the_tests_tell_functions_apart():
    """A program that passes all tests computes the function that the prompt shows."""
    task = tasks.program_synthesis(lines=2, max_constant=2, prompts=500, test=5, worked_examples=5)
    alphabet = instructions(2, "+-*", True)
    programs = [p for n in (1, 2) for p in itertools.product(alphabet, repeat=n)]
    for record in task.test:
        # Two lines of a program may make x * x * x of x: four points know it.
        assert len(json.loads(record["ground_truth"])["tests"]) >= 4
        for program in programs:
            same = function_text(program) + ":" == record["prompt"]
            passes = program_tests(program_text(program), record["ground_truth"])["score"] == 1.0
            assert same == passes


def test_config_and_files_know_it():
    spec = "program_synthesis(prompts=50, test=5, worked_examples=5)"
    records = load_prompts(spec, "train")
    assert json.loads(records[0]["ground_truth"])["max_lines"] == 3
    assert records[0]["data_source"] == "program_synthesis"
    assert len(load_demonstrations(spec, "train")) == 5
    reward = resolve("program_tests(partial=0.5)", "rljax.rewards")
    assert reward("", records[0]["ground_truth"])["score"] == -1.0
    made = Config()
    made.data.train, made.reward.function = spec, "program_tests"
    assert made.data.train == spec


@pytest.mark.parametrize(
    "options",
    [
        {"lines": 0},
        {"min_lines": 4},
        {"show": "trace"},
        {"show": "trace", "operations": "+-"},
        {"show": "trace", "with_input": False},
        {"max_constant": 1},
        {"operations": "+/"},
        {"operations": "++"},
        {"operations": ""},
        {"show": "tests"},
        {"examples": 9},
        {"prompts": 1},
        {"test": 10**6},
    ],
)
def test_bad_options(options):
    with pytest.raises(InputError):
        tasks.program_synthesis(**options)


def test_the_oracle_by_brute_force():
    rng = random.Random(0)
    alphabet = instructions(2, "+-*", True)
    task = tasks.program_synthesis(lines=3, max_constant=2, prompts=40, test=8, worked_examples=5)
    seen = set()
    for record in task.test:
        for _ in range(6):
            prefix = [rng.choice(alphabet) for _ in range(rng.randint(0, 3))]
            want = any(
                program_tests(program_text([*prefix, *rest]), record["ground_truth"])["score"] == 1
                for n in range(4 - len(prefix))
                for rest in itertools.product(alphabet, repeat=n)
            )
            got = recoverable(program_text(prefix), record["ground_truth"], max_constant=2)
            assert got == want
            seen.add(want)
    assert seen == {True, False}
    assert not recoverable("?", task.test[0]["ground_truth"], max_constant=2)


def test_labels_by_search_agree_with_the_oracle_line_by_line():
    """Random wrong programs: with the oracle exactly, with random completions never too late."""
    rng = random.Random(3)
    alphabet = instructions(2, "+-*", True)
    task = tasks.program_synthesis(lines=4, max_constant=2, prompts=90, test=30, worked_examples=5)
    truths = [r["ground_truth"] for r in task.test]
    programs = [program_text([rng.choice(alphabet) for _ in range(4)]).split("\n") for _ in truths]
    passes = [
        program_tests("\n".join(p), t)["score"] == 1 for p, t in zip(programs, truths, strict=True)
    ]

    def start(i, kept):
        return "\n".join(programs[i][:kept])

    def accepts(prefixes):
        return [recoverable(start(*p), truths[p[0]], max_constant=2) for p in prefixes]

    exact, _ = label_lines(programs, accepts, passes=passes)
    errors = set()
    for i, found in enumerate(exact):
        if passes[i]:
            continue
        kept = [recoverable(start(i, m), truths[i], max_constant=2) for m in range(1, 4)] + [False]
        assert found.first_error == 1 + kept.index(False)
        errors.add(found.first_error)
    assert len(errors) > 2

    def sample(prefixes):
        return [
            program_text([rng.choice(alphabet) for _ in range(rng.randint(1, 4 - kept))])
            for _, kept in prefixes
        ]

    def tested(prefixes, completions):
        texts = [start(*p) + "\n" + c for p, c in zip(prefixes, completions, strict=True)]
        return [
            program_tests(text, truths[i])["score"] == 1
            for text, (i, _) in zip(texts, prefixes, strict=True)
        ]

    by_chance, _ = label_lines(programs, best_of(sample, tested, 200), passes=passes)
    for one, other, done in zip(exact, by_chance, passes, strict=True):
        assert done or other.first_error <= one.first_error
    agree = sum(a.first_error == b.first_error for a, b in zip(exact, by_chance, strict=True))
    assert agree > 0.6 * len(programs)
