"""Tasks: data, reward and evaluation that belong together; streams without end; what a run of
them uses where its config names no reward."""

import json
import logging
import subprocess
import sys

import pytest
from tiny_run import tiny_config

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.online.default_rewards import evaluation_of, evaluation_text, reward_text
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.online.stream import Stream
from rljax.data.rows.sources import load_endless_prompts, load_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, call_reward

PROCEDURAL = [
    "countdown(test=16, worked_examples=8)",
    "countdown(numbers=3, style='short', operations='+-', test=16, worked_examples=8)",
    "arithmetic(test=16, worked_examples=8)",
    "arithmetic(terms=5, operations='+-*/', brackets=True, test=16, worked_examples=8)",
    "arithmetic(operations='/', style='short', test=16, worked_examples=8)",
    "arithmetic(operations='+-', min_number=10, style='number', test=16, worked_examples=8)",
    "sorting(test=16, worked_examples=8)",
    "sorting(descending=True, style='short', test=16, worked_examples=8)",
    "json_extraction(test=16, worked_examples=8)",
    "json_extraction(style='short', fields=2, test=16, worked_examples=8)",
    "code_tests(test=16, worked_examples=8)",
    "code_tests(style='short', test=16, worked_examples=8)",
]
FIXED = [
    "sort_digits(prompts=100, test=8, worked_examples=8)",
    "addition(prompts=600, test=8)",
    "letter_count()",
    "first_letter()",
    "running_sum()",
    "program_synthesis()",
    "gsm8k()",
    "math()",
]


def task_of(spec):
    return resolve(spec, NAMESPACES["data"])()


def score(reward, response, row):
    sample = dict(response=response, ground_truth=row["ground_truth"], data_source="")
    return call_reward(resolve(reward, HOME), sample)[0]


@pytest.mark.smoke
@pytest.mark.parametrize("spec", [s for s in PROCEDURAL + FIXED if "code_tests" not in s])
def test_a_tasks_worked_answers_earn_its_own_reward_and_evaluation(spec):
    task = task_of(spec)
    assert len(task.test) == len(task.worked_test) > 0
    for row, worked in zip(task.test, task.worked_test, strict=True):
        assert row["prompt"] == worked["prompt"]
        for reward in (task.reward, task.evaluation or task.reward):
            assert score(reward, worked["completion"], row) == 1.0
            assert score(reward, "none of it", row) < 0.5
    other = next(
        w for w in task.worked_test if w["completion"] != task.worked_test[0]["completion"]
    )
    assert score(task.evaluation or task.reward, other["completion"], task.test[0]) <= 0.0


@pytest.mark.parametrize("spec", PROCEDURAL)
def test_a_stream_is_a_function_of_seed_and_index_and_never_meets_the_test_split(spec):
    task, again = task_of(spec), task_of(spec)
    assert isinstance(task.train, Stream) and task.test == again.test
    late = [again.train[i] for i in (70_000, 3, 10**12, 3)]
    assert [task.train[i] for i in (70_000, 3, 10**12, 3)] == late and late[1] == late[3]
    held_out = {row["prompt"] for row in task.test}
    assert len(held_out) == len(task.test)
    drawn = task.train.first(200)
    assert not held_out & {row["prompt"] for row in drawn}
    assert [w["prompt"] for w in task.worked_examples] == [r["prompt"] for r in drawn[:8]]
    other = task_of(spec.replace("test=16", "test=16, seed=1"))
    assert other.train.first(5) != drawn[:5]
    assert len({json.dumps(row) for row in drawn}) > 50
    with pytest.raises(IndexError):
        task.train[-1]


@pytest.mark.parametrize("spec", PROCEDURAL)
def test_a_tiny_tokenizer_reads_every_task(spec):
    task = task_of(spec)
    tokenizer = CharTokenizer(task.alphabet)
    for row in task.train.first(100) + list(task.test):
        assert tokenizer.decode(tokenizer.encode(row["prompt"])) == row["prompt"]
    for worked in task.worked_examples:
        assert tokenizer.decode(tokenizer.encode(worked["completion"])) == worked["completion"]


def test_a_fixed_number_of_prompts_and_chat():
    task = task_of("sorting(prompts=30, items=2, max_number=9, test=5, chat=True)")
    asked = [row["prompt"][0]["content"] for row in task.train]
    assert 20 < len({*asked}) == len(asked) <= 30
    assert not {*asked} & {row["prompt"][0]["content"] for row in task.test}
    assert task.worked_examples[0]["prompt"] == task.train[0]["prompt"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("countdown(numbers=1)", "2 to 8"),
        ("countdown(operations='+%')", "some of"),
        ("countdown(style='long')", "words"),
        ("countdown(style='number')", "one of 'words', 'short'. Fix"),
        ("arithmetic(style='long')", "'words', 'short', 'number'"),
        ("arithmetic(min_number=100)", "0 to 99"),
        ("instructions(kind='rhyme')", "'words', 'ending', 'repeat'"),
        ("instructions(kind='words', test=1000)", "lower test"),
        ("sorting(items=2, max_number=2, test=100)", "lower test"),
        ("countdown(test=0)", "at least 1"),
        ("countdown(max_target=2, max_number=9999, numbers=8, operations='+')", "no expression"),
        ("json_extraction(fields=7)", "1 to 6"),
        ("code_tests(tests=3, shown=4)", "0 to 3"),
        ("code_tests(style='long')", "'short'"),
        ("gsm8k(path='nowhere.jsonl')", "does not exist"),
        ("countdwon()", "did you mean"),
    ],
)
def test_options_out_of_range(spec, says):
    with pytest.raises(InputError, match=says):
        task_of(spec)


@pytest.mark.parametrize("style", ["words", "short"])
def test_no_code_test_is_passed_by_one_constant_answer(style):
    task = task_of(f"code_tests(tests=2, shown=0, style='{style}', test=50, worked_examples=0)")
    for row in [*task.test, *task.train.first(300)]:
        assert len(set(json.loads(row["ground_truth"])["outputs"])) > 1


def test_reference_programs_give_the_outputs_of_their_tests():
    """The oracle of the outputs is not Python's: the program is run as a user would run it."""
    task = task_of("code_tests(steps=4, test=12, worked_examples=12)")
    code, expected = "import io, sys\n", []
    for row, worked in zip(task.test, task.worked_test, strict=True):
        program = worked["completion"].removeprefix("```python\n").removesuffix("\n```")
        tests = json.loads(row["ground_truth"])
        assert len(tests["inputs"]) == len(tests["outputs"]) == 6 and "\n" in tests["inputs"]
        assert f"Input: {tests['inputs'][0]}Output: {tests['outputs'][0]}" in row["prompt"]
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            code += f"sys.stdin = io.StringIO({given!r})\nexec({program!r})\n"
            expected.append(wanted)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout == "".join(expected)
    assert len({*expected}) > 10


def test_reference_functions_give_the_outputs_of_their_tests():
    """The outputs are computed step by step, the function is one expression: Python compares."""
    task = task_of("code_tests(steps=3, shown=2, style='short', test=40, worked_examples=0)")
    assert all(set(row["prompt"]) <= set(task.alphabet) for row in task.test)
    for row, worked in zip(task.test, task.worked_test, strict=True):
        assert set(worked["completion"]) <= set(task.alphabet)
        tests, defined = json.loads(row["ground_truth"]), {}
        exec(worked["completion"], defined)
        assert [defined["f"](*x) for x in tests["inputs"]] == tests["outputs"]
        steps, *shown = row["prompt"].removesuffix(">").split(";")
        assert len(steps.split(",")) == 3 and len(tests["inputs"]) == 6
        pairs = zip(tests["inputs"][:2], tests["outputs"], strict=False)
        assert shown == [f"{x}={y}" for (x,), y in pairs]


def test_gsm8k_and_math_read_the_published_columns(tmp_path):
    rows = [{"question": "1+1?", "answer": "It is 2.\n#### 1,002"}] * 2
    raw = [{"problem": "$x=2$, x?", "solution": "so $\\boxed{\\frac{1}{2}}$", "level": "Level 1"}]
    prepared = [
        {
            "prompt": [{"role": "user", "content": "q"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
    ]
    for name, content in (("gsm8k", rows), ("math", raw), ("verl", prepared)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in content)
            (tmp_path / name / f"{split}.jsonl").write_text(text)
    found = load_prompts(f"gsm8k(path='{tmp_path}/gsm8k')", "train")
    assert [r["ground_truth"] for r in found] == ["1002"] * 2 and "####" in found[0]["prompt"]
    assert found[0]["data_source"] == "gsm8k"
    (row,) = load_prompts(f"math(path='{tmp_path}/math', chat=True)", "test")
    assert row["ground_truth"] == "\\frac{1}{2}" and row["prompt"][0]["content"].endswith("{}.")
    (row,) = load_prompts(f"gsm8k(path='{tmp_path}/verl')", "test")
    assert (row["ground_truth"], row["data_source"]) == ("7", "openai/gsm8k")
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "x", "answer": "no mark"}\n')
    with pytest.raises(InputError, match=r"row 0 \(line 1\) column 'answer' has no number"):
        task_of(f"gsm8k(path='{tmp_path}/gsm8k')")


# -- whose reward --


def config_of(train, *sources, **more):
    config = Config()
    config.data.train, config.data.sources = train, sources
    for name, value in more.items():
        setattr(config.reward, name, value)
    return config


def test_the_tasks_own_reward_unless_one_is_named(tmp_path):
    own = config_of("countdown(test=2)")
    assert reward_text(own) == "countdown(format_score=0.1)"
    assert evaluation_text(own) == "countdown()"
    named = config_of("countdown(test=2)", function="exact_match()")
    assert (reward_text(named), evaluation_text(named)) == ("exact_match()", "countdown()")
    named.evaluate.reward = "last_line"
    assert evaluation_text(named) == "last_line"
    assert reward_text(config_of("program_synthesis()")) == "program_tests()"
    assert evaluation_text(config_of("program_synthesis()")) == "program_tests()"
    of_a_file = reward_text(config_of(str(tmp_path / "x.jsonl")))
    assert of_a_file == "by_source(otherwise='exact_match()')"
    assert reward_text(config_of("test_data.counting")) == "exact_match()"  # has no reward
    assert reward_text(config_of("test_data.plain_rows(needed='1')")) == "exact_match()"
    assert evaluation_of("sorting(test=2)") == "list_match()"
    # Where a model rewards, a task judges held-out answers only if it says how.
    assert evaluation_text(config_of("first_letter()", model="folder")) == ""
    assert evaluation_text(config_of("countdown(test=2)", model="folder")) == "countdown()"


def test_each_task_of_a_mixture_is_scored_by_its_own_reward(tmp_path):
    config = config_of("countdown(test=2)", "sorting(test=2)", str(tmp_path / "x.jsonl"))
    (tmp_path / "x.jsonl").write_text("{}")
    reward, countdown = resolve(reward_text(config), HOME), '{"numbers": [1, 2], "target": 3}'

    def call(**sample):
        return call_reward(reward, sample)[0]

    assert call(data_source="countdown", response="1+2", ground_truth=countdown) == 1.0
    assert call(data_source="countdown", response="1*2", ground_truth=countdown) == 0.1
    assert call(data_source="sorting", response="1 3 2 4", ground_truth="1,2,3,4") == 0.25
    assert call(data_source="x", response="1+2", ground_truth="1+2") == 1.0  # a file's
    judged = resolve(evaluation_text(config), HOME)
    sample = dict(data_source="sorting", response="1 3 2 4", ground_truth="1,2,3,4")
    assert call_reward(judged, sample)[0] == 0.0
    same = config_of("first_letter()", "sort_digits(prompts=100, test=8, worked_examples=8)")
    assert reward_text(same) == "exact_match()"
    with pytest.raises(InputError, match="reward it differently"):
        reward_text(config_of("arithmetic(test=2)", "arithmetic(test=2, style='short')"))


def test_rows_of_a_file_are_scored_as_their_source_is(tmp_path, caplog):
    """The evaluation of a known data set; equality only where the source is unknown."""
    row = {"prompt": "1", "ground_truth": "72"}
    rows = [{**row, "data_source": name} for name in ("openai/gsm8k", "lighteval/MATH", "mine")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = config_of(str(path))
    with caplog.at_level(logging.INFO, "rljax"):
        load_data(config, CharTokenizer("0123456789"))
    said = [(r.levelname, r.getMessage().replace(str(path), "FILE")) for r in caplog.records]
    assert said == [
        ("INFO", "FILE, data source 'lighteval/MATH': reward boxed()"),
        (
            "WARNING",
            "FILE: no reward is known for data source 'mine' of 1 of the 3 rows that were read: "
            'they are scored by exact_match(). Fix: --config.reward.function="by_source(sources='
            "(('mine', 'my_module.my_reward()'),))\", or one reward for all rows",
        ),
        ("INFO", "FILE, data source 'openai/gsm8k': reward gsm8k()"),
    ]
    reward = resolve(reward_text(config), HOME)
    answers = {"openai/gsm8k": "so #### 72", "lighteval/MATH": "\\boxed{72}", "mine": "72"}
    for name in answers:
        row = {"data_source": name, "ground_truth": "72"}
        scores = {by: call_reward(reward, {**row, "response": x})[0] for by, x in answers.items()}
        assert scores == {by: float(by == name) for by in answers}, name
    caplog.clear()
    for named in (dict(function="last_line"), dict(model="folder")):
        load_data(config_of(str(path), **named), CharTokenizer("0123456789"))
    assert not [r for r in caplog.records if "data source" in r.getMessage()]
    path.write_text(json.dumps({"prompt": "1"}) + "\n")
    with pytest.raises(InputError, match="ground_truth"):
        load_data(config, CharTokenizer("0123456789"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_source_without_a_known_reward_is_warned_of_where_a_row_names_it(
    stream, tmp_path, caplog
):
    """Rows that name none are called after their file, which nobody took for a source."""

    def warned(**more):
        path = tmp_path / "sums.jsonl"
        rows = [{"prompt": str(i), "ground_truth": "7", **more} for i in range(4)]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        config = config_of(str(path))
        config.data.stream = stream
        caplog.clear()
        with caplog.at_level(logging.INFO, "rljax"):
            load_data(config, CharTokenizer("0123456789"))
        of_source = [r for r in caplog.records if "data source" in r.getMessage()]
        assert len(of_source) == 1
        return [r.getMessage() for r in of_source if r.levelno >= logging.WARNING]

    assert warned() == [] == warned(data_source="gsm8k")
    assert "data source 'my/sums' of" in warned(data_source="my/sums")[0]
    folder = tmp_path.name  # a part of the path, which no row is called after
    assert f"data source {folder!r} of" in warned(data_source=folder)[0]


def test_a_task_in_one_file_needs_no_further_setting():
    config = config_of("my_task.doubling()")
    data = load_data(config, load_run_tokenizer(config))
    assert data.endless and len(data.test_prompts) == 4
    assert reward_text(config) == "my_task.is_double(partial=0.25)"
    assert evaluation_text(config) == "my_task.is_double()"


def test_what_needs_a_fixed_set_of_prompts_says_so():
    with pytest.raises(InputError, match="prompts=5000"):
        load_prompts("countdown(test=2)", "train")
    assert len(load_prompts("countdown(test=2)", "test")) == 2
    assert len(load_endless_prompts("countdown(test=2, prompts=5)")) == 5


@pytest.mark.parametrize("field", ["retire_at_pass_rate", "drop_above_pass_rate"])
def test_no_prompt_of_a_stream_is_retired(field):
    from rljax.setup.setup import prompt_order

    config = config_of("countdown(test=2)")
    setattr(config.data, field, 0.9)
    data = load_data(config, load_run_tokenizer(config))
    with pytest.raises(InputError, match="not known before"):
        prompt_order(config, data)


# -- a run --


def stream_config(folder, **more):
    fields = dict(
        data__train="my_task.doubling()",
        reward__function="",
        data__max_prompt_tokens=4,
        sft__steps=2,
        steps=4,
        sampler__max_response_tokens=3,
        evaluate__prompts=4,
        evaluate__every_steps=4,
        export=False,
    )
    return tiny_config(folder, **{**fields, **more})


def drawn_prompts(config, monkeypatch):
    """The prompt texts of every step of a run."""
    from rljax.data.online.prompts import Prompts
    from rljax.training import train
    from rljax.training.sources import RolloutSource

    seen, draw = [], RolloutSource.draw

    def noted(self, count) -> Prompts:
        prompts = draw(self, count)
        seen.append([record.prompt_text for record in prompts.records])
        return prompts

    monkeypatch.setattr(RolloutSource, "draw", noted)
    train(config)
    monkeypatch.setattr(RolloutSource, "draw", draw)
    return seen


@pytest.mark.slow
def test_a_run_on_a_stream_resumes_at_the_same_prompts(tmp_path, monkeypatch):
    whole = drawn_prompts(stream_config(tmp_path / "whole"), monkeypatch)
    parts = drawn_prompts(stream_config(tmp_path / "parts", steps=2), monkeypatch)
    go_on = stream_config(tmp_path / "parts", checkpoint__allow_changed=("steps",))
    parts += drawn_prompts(go_on, monkeypatch)
    assert parts == whole and len(whole) == 4
    assert whole[0] == [f"{n}>" for n in range(4, 8)]
    rows = [json.loads(x) for x in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["data/dropped_overlong"] == 0.0 and "eval/accuracy" in rows[-1]


def test_what_a_saved_policy_is_judged_by(tmp_path):
    from rljax.config.policy_options import EvaluateOptions
    from rljax.evaluation.saved import data_and_reward
    from rljax.policies import SavedPolicy

    def judged(config, step=3, **options):
        policy = SavedPolicy(config, None, None, None, step)
        return data_and_reward(EvaluateOptions("run", **options), policy)

    sums, rows = config_of("sorting(test=2)"), str(tmp_path / "x.jsonl")
    assert judged(sums) == ("sorting(test=2)", "list_match()")
    assert judged(sums, data="countdown(test=2)")[1] == "countdown()"
    assert judged(sums, data="countdown(test=2)", reward="gsm8k()")[1] == "gsm8k()"
    assert judged(sums, data=rows)[1] == "list_match()"
    named = config_of("sorting(test=2)", function="exact_match()")
    assert judged(named, data="countdown(test=2)")[1] == "countdown()"
    assert judged(named, data="first_letter(test=2)")[1] == "exact_match()"
    named.evaluate.reward = "last_line()"
    assert judged(named, data="countdown(test=2)")[1] == "last_line()"
    bare = Config(model="folder")
    assert judged(bare, step=None, data="math()") == ("math()", "boxed()")
    with pytest.raises(InputError, match="set --reward"):
        judged(bare, step=None, data=rows)
