"""reasoning-gym's data sets as tasks: rows, their own scores in another process, difficulty,
train and test apart, and the guard before scorers that run an answer as code."""

import json
import os
import sys

import pytest

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.online.default_rewards import reward_text
from rljax.errors import InputError
from rljax.rewards import reasoning_gym_score
from rljax.rewards.pool.pool import RewardPool
from rljax.rewards.text.gym import _packed, _unpacked, is_algebra

pytest.importorskip("reasoning_gym")

FEW = (
    "basic_arithmetic",
    "bitwise_arithmetic",
    "list_functions",
    "n_queens",
    "rearc",
    "word_ladder",
)
# Data sets whose entries hold no answer of their own: any of several is right, and their scorers
# judge it. (Their scorers were asked with None and an empty answer.)
NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")

# codeio runs published programs, some of which draw random numbers of their own; the scorer of
# game_of_life_halting takes every text but "true" for "false".
AT_FAULT = {"codeio", "game_of_life_halting"}


def names():
    import reasoning_gym  # noqa: F401
    from reasoning_gym.factory import DATASETS

    return sorted({*DATASETS} - {"composite"})


def task_of(name, **options):
    options = {"name": name, "test": 2, "worked_examples": 2, **options}
    text = ", ".join(f"{k}={v!r}" for k, v in options.items())
    return resolve(f"reasoning_gym({text})", NAMESPACES["data"])()


def check(name):
    """Rows of both splits, equal when made again in another order, and each worked answer earns 1
    in the reward."""
    task = task_of(name)
    rows = [task.train[i] for i in (300, 0, 1)]
    from rljax.tasks import gym

    gym._made.cache_clear()
    gym._dataset.cache_clear()
    again = task_of(name)
    assert [again.train[i] for i in (1, 0, 300)] == rows[::-1], "not a function of the index"
    assert again.test == task.test
    held_out = {row["prompt"] for row in task.test}
    assert not held_out & {row["prompt"] for row in rows} and len(held_out) == 2
    found = []
    for worked in (*task.worked_examples, *task.worked_test):
        every = [task.train[0], task.train[1], *task.test]
        row = next(r for r in every if r["prompt"] == worked["prompt"])
        found.append(reasoning_gym_score(worked["completion"], row["ground_truth"]))
    for row in (*rows, *task.test):
        for wrong in ("", "<answer></answer>", "<answer>no such answer</answer>", "<answer>\0"):
            assert 0.0 <= reasoning_gym_score(wrong, row["ground_truth"])["score"] < 1.0
    return found


@pytest.mark.slow
def test_what_the_reward_refuses_is_not_taught():
    """Some of this data set's answers are the integral itself, unsolved."""
    task = task_of("intermediate_integration", test=24, worked_examples=0)
    truth = {row["prompt"]: row["ground_truth"] for row in task.test}
    assert 12 < len(task.worked_test) < len(truth)
    for worked in task.worked_test:
        found = reasoning_gym_score(worked["completion"], truth[worked["prompt"]])
        assert found["refused"] == 0.0, worked


@pytest.mark.parametrize("name", FEW)
def test_its_own_answers_score_one(name):
    found = check(name)
    assert len(found) == 4
    assert [part["score"] for part in found] == [1.0] * 4 and not any(p["refused"] for p in found)


@pytest.mark.slow
def test_every_data_set():
    wrong = {}
    for name in names():
        try:
            found = [part["score"] for part in check(name)]
        except Exception as error:  # the others are looked at all the same
            found = f"{type(error).__name__}: {error}"[:200]
        if found != ([] if name in NO_ANSWER else [1.0] * 4):
            wrong[name] = found
    assert set(wrong) <= AT_FAULT, wrong


@pytest.mark.slow
def test_every_level_of_every_curriculum_makes_a_problem():
    from reasoning_gym.factory import CURRICULA

    from rljax.tasks.gym import _config, _dataset

    failed = {}
    for name in names():
        if name not in CURRICULA:
            continue
        for level in (0, 1):
            try:
                chosen = _config(name, level, {})
                entry = _dataset(name, tuple(sorted(chosen.items())), 5)[0]
                assert entry["question"]
            except Exception as error:
                failed[name, level] = f"{type(error).__name__}: {error}"[:100]
    # What the library's own curricula set and its own checks refuse.
    assert set(failed) == {("knight_swap", 0), ("knight_swap", 1), ("modulo_grid", 1)}


def test_an_answer_that_its_scorer_cannot_parse_is_wrong_and_a_broken_entry_is_an_error():
    row = task_of("n_queens").test[0]
    broken = json.loads(row["ground_truth"])
    del broken["entry"]["metadata"]
    with pytest.raises(KeyError):
        reasoning_gym_score("<answer>x</answer>", json.dumps(broken))
    assert reasoning_gym_score("<answer>x</answer>", row["ground_truth"])["score"] == 0.0


@pytest.mark.slow
def test_the_pool_scores_in_another_process():
    task = task_of("basic_arithmetic")
    config = Config()
    config.data.train = "reasoning_gym(name='basic_arithmetic', test=2, worked_examples=2)"
    pool = RewardPool(reward_text(config), workers=1, timeout_s=60)
    try:
        samples = [
            dict(response=worked["completion"], ground_truth=row["ground_truth"])
            for row, worked in zip(task.test, task.worked_test, strict=True)
        ] + [dict(response="<answer>x</answer>", ground_truth=task.test[0]["ground_truth"])]
        scores = pool.score(samples)
    finally:
        pool.close()
    assert [s.status for s in scores] == ["ok"] * 3
    assert [s.value for s in scores[:2]] == [1.0, 1.0] and scores[2].value < 1


def test_difficulty_is_a_level_of_the_curriculum():
    easy, hard = (task_of("number_sorting", difficulty=d) for d in (0, 3))

    def count(task):
        return len(json.loads(task.test[0]["ground_truth"])["entry"]["question"])

    assert (
        json.loads(easy.test[0]["ground_truth"])["config"]
        != (json.loads(hard.test[0]["ground_truth"])["config"])
    )
    assert count(hard) > count(easy)
    both = task_of("number_sorting", difficulty=0, max_numbers=50, min_numbers=50)
    assert json.loads(both.test[0]["ground_truth"])["config"]["max_numbers"] == 50


def test_options_seed_and_size():
    fixed = task_of("basic_arithmetic", size=20, min_terms=5, max_terms=5)
    assert len(fixed.train) == len({r["prompt"] for r in fixed.train}) <= 20
    other = task_of("basic_arithmetic", size=20, min_terms=5, max_terms=5, seed=1)
    assert {r["prompt"] for r in fixed.train} != {r["prompt"] for r in other.train}
    assert fixed.train[0]["data_source"] == "reasoning_gym/basic_arithmetic"
    assert task_of("basic_arithmetic", chat=True).test[0]["prompt"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(name="countdwn"), "did you mean countdown"),
        (dict(name="zzzzzz"), "use one of .*countdown"),
        (dict(name="composite"), "data.sources"),
        (dict(name="basic_arithmetic", max_term=3), "did you mean 'max_terms'"),
        (dict(name="basic_arithmetic", min_terms=9, max_terms=2), "refuses its options"),
        (dict(name="basic_arithmetic", difficulty=99), "has levels 0 to"),
        (dict(name="basic_arithmetic", difficulty=-2), "from 0 on"),
        (dict(name="gsm_symbolic", size=-1), "at least 0"),
    ],
)
def test_wrong_options_name_what_is_meant(options, says):
    with pytest.raises(InputError, match=says):
        task_of(**options)


def test_a_data_set_without_a_curriculum_says_so():
    from reasoning_gym.factory import CURRICULA

    name = next(n for n in names() if n not in CURRICULA)
    with pytest.raises(InputError, match="has no curriculum"):
        task_of(name, difficulty=0)


@pytest.mark.parametrize(
    "value",
    [(1, (2, 3)), {"a": {1: "x", (2, 3): [4]}}, {"()": 1}, {"{}": ()}, [None, True, 1.5, "\u2028"]],
)
def test_entries_survive_as_json(value):
    assert _unpacked(json.loads(json.dumps(_packed(value)))) == value


@pytest.mark.parametrize("truth", ["", "{}", "[1]", '{"dataset": "countdown"}'])
def test_a_reference_that_is_no_entry_is_an_error(truth):
    with pytest.raises(ValueError, match="not an entry"):
        reasoning_gym_score("<answer>1</answer>", truth)


# -- scorers that evaluate --

EVALUATES = (
    "binary_matrix",
    "n_queens",
    "spiral_matrix",
    "string_insertion",
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)


@pytest.mark.parametrize("name", ["binary_matrix", "n_queens", "countdown", "simple_integration"])
def test_an_answer_is_never_run_as_code(name, tmp_path):
    check_no_code(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATES)
def test_no_scorer_runs_an_answer_as_code(name, tmp_path):
    check_no_code(name, tmp_path)


def check_no_code(name, tmp_path):
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).write_text('x')"
    truth = task_of(name, test=1, worked_examples=0).test[0]["ground_truth"]
    attacks = [
        code,
        f"[{code}]",
        f"exec({code!r})",
        f"sqrt({code!r})",
        "".join(f"chr({ord(c)})+" for c in code)[:-1],
        f"open({str(canary)!r}, 'w')",
        f"[x for x in [{code}]]",
        f"f'{{{code}}}'",
        f"(lambda: {code})()",
        f"eval\n({code!r})",
        f"ｅval({code!r})",
        f"sympify({code!r})",
    ]
    for attack in attacks:
        assert reasoning_gym_score(f"<answer>{attack}</answer>", truth)["score"] < 1.0
        assert not canary.exists(), attack


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("(3 + 5) * 7.5", True),
        ("2*x**2 - 3*x + C", True),
        ("sqrt(x)*exp(2*x) + log(x)/2", True),
        ("exit()", False),
        ("x.y", False),
        ("(x).real", False),
        ("1 .real", False),
        ("__import__", False),
        ("'x'", False),
        ("x[0]", False),
        ("lambda x: x", False),
        ("eval(1)", False),
        ("x" * 3000, False),
        ("x**3*exp(2*x) - sin(3*x + 1)/2 + C", True),
        ("(x + 1)**9 + 2**64", True),
        ("9**9**9**9", False),  # what would take sympy years, or all memory
        ("((99**99)**99)**99", False),
        ("1/x**(9**9**9)", False),
        ("(x + y + z)**199", False),
        ("sin(sin(sin(sin(sin(x)))))", False),
    ],
)
def test_what_sympy_may_see(text, safe):
    assert is_algebra(text) is safe


def test_the_library_is_imported_only_when_it_is_named():
    import subprocess

    code = "import sys, rljax.rewards, rljax.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "polynomial_multiplication",
        "simple_integration",
        "number_sorting",
        "bitwise_arithmetic",
        "binary_matrix",
        "string_insertion",
    ],
)
def test_nothing_of_an_entry_is_run(name, tmp_path):
    """A row may be a stranger's: what its entry holds is read as a value, or is an error."""
    import reasoning_gym

    ran = tmp_path / "ran"
    hostile = f"__import__('pathlib').Path({str(ran)!r}).touch()"
    for entry in reasoning_gym.create_dataset(name, size=3, seed=1):
        truth = json.dumps({"dataset": name, "config": {}, "entry": _packed(entry)})
        assert reasoning_gym_score(f"<answer>{entry['answer']}</answer>", truth)["score"] == 1.0
        texts = {k: hostile for k, v in entry["metadata"].items() if isinstance(v, str)}
        bad = {**entry, "answer": hostile, "metadata": {**entry["metadata"], **texts}}
        for answer in ("1", "x", "[1]", entry["answer"]):
            truth = json.dumps({"dataset": name, "config": {}, "entry": _packed(bad)})
            try:
                reasoning_gym_score(f"<answer>{answer}</answer>", truth)
            except Exception as error:
                assert not isinstance(error, NameError)
            assert not ran.exists(), answer
