"""Files as people have them: separators of tables, names by pattern, columns of other projects, and
what is said of rows of another kind."""

import functools
import json
import math

import pytest
from test_trl_formats import config_of

from rljax.config import Config
from rljax.config.checks import Problems, check_paths
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.rows.read import read_rows, read_stored
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.files import data_files


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_table_is_read_by_the_separator_of_its_first_line(here, name, separator):
    rows = [("question", "answer"), ("1+1", "2"), ("a b", "3")]
    (here / name).write_text("\n".join(separator.join(row) for row in rows))
    found = load_prompts(name, "train")
    assert [(r["prompt"], r["ground_truth"]) for r in found] == rows[1:]


def test_a_text_may_hold_another_separator(here):
    (here / "a.csv").write_text('question;answer\n"2,5; or 3";1,5\n')
    (here / "b.csv").write_text("question,answer\na;b|c,1\n")
    assert load_prompts("a.csv", "train")[0]["prompt"] == "2,5; or 3"
    assert load_prompts("b.csv", "train")[0]["prompt"] == "a;b|c"


@pytest.mark.parametrize("kind", ["prompts", "pairs", "unpaired", "examples"])
def test_a_table_without_names_of_columns_is_told_so(here, kind):
    (here / "a.csv").write_text("ac,ddaced>\nx,yy\n")
    with pytest.raises(InputError, match="first line, 'ac,ddaced>', was read as names.*Fix: name"):
        if kind == "prompts":
            load_prompts("a.csv", "train")
        else:
            load_rows("a.csv", "train", kind)
    (here / "b.csv").write_text("prompt,reply\nx,yy\n")  # one name is known: it is a header
    with pytest.raises(InputError) as error:
        load_prompts("b.csv", "train")
    assert "first line" not in str(error.value)


def test_several_files_are_read_one_after_the_other(here):
    (here / "rows").mkdir()
    for name in ("p_2.jsonl", "p_1.jsonl", "other.jsonl", ".p_0.jsonl"):
        jsonl(here / "rows" / name, {"prompt": name, "answer": "1"})
    for spec in (
        "rows/p_*.jsonl",
        "~/rows/p_?.jsonl",
        f"{here}/rows/p_[12].jsonl",
        "rows/p_1.jsonl, rows/p_2.jsonl",
    ):
        assert [r["prompt"] for r in load_prompts(spec, "train")] == ["p_1.jsonl", "p_2.jsonl"]
        assert {read_stored(spec, "train").rows[i]["prompt"] for i in range(2)} == {
            "p_1.jsonl",
            "p_2.jsonl",
        }
    assert data_files("rows/p_*.jsonl") == ["rows/p_1.jsonl", "rows/p_2.jsonl"]
    jsonl(here / "odd[1].jsonl", {"prompt": "odd", "answer": "1"})  # the file of that very name
    assert load_prompts("odd[1].jsonl", "train")[0]["prompt"] == "odd"


def test_an_error_of_several_files_names_the_one(here):
    jsonl(here / "p_1.jsonl", *[{"prompt": "a", "answer": "1"}] * 3)
    jsonl(here / "p_2.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "a"})
    with pytest.raises(InputError, match=r"^p_2.jsonl: row 1 \(line 2\) lacks"):
        load_prompts("p_*.jsonl", "train")
    with pytest.raises(InputError, match="no file fits .*q_\\*.jsonl.*holds p_1.jsonl, p_2.jsonl"):
        load_prompts("q_*.jsonl", "train")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("p_1.jsonl,p_3.jsonl", "Fix: correct 'p_3.jsonl', or leave it out"),
        ("q_*.jsonl", "no file fits the pattern"),
        ("~/p_3.jsonl", "does not exist"),
    ],
)
def test_a_config_names_the_file_that_is_missing(here, spec, says):
    jsonl(here / "p_1.jsonl", {"prompt": "a", "answer": "1"})
    config, problems = Config(), Problems()
    config.data.train = spec
    check_paths(config, problems)
    assert len(problems) == 1 and says in problems[0] and "data.train=" in problems[0]
    config.data.train, problems = "p_*.jsonl", Problems()
    check_paths(config, problems)
    assert not problems


def test_the_home_folder_stands_in_any_field(here):
    config = Config(model="~/m")
    config.data.sources = ("~/a.jsonl", "gsm8k")
    assert config.model == f"{here}/m" and config.data.sources == (f"{here}/a.jsonl", "gsm8k")
    config.tokenizer = "~"
    assert config.tokenizer == "~"


SOLUTIONS = {
    "so it is $\\boxed{\\frac{1}{2}}$.": "\\frac{1}{2}",
    "first \\boxed{1}, then \\boxed{2}": "2",
    "<think>no</think><answer> 3 </answer>": "3",
    "$4$": "4",
    "work\n#### 72": "72",
    "7": "7",
}


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("asks", ["prompt", "question", "problem"])
def test_a_solution_is_the_answer_where_that_is_plain(here, asks, solution):
    file, notes = jsonl(here / "a.jsonl", {asks: "q", "solution": solution}), []
    (row,) = load_prompts(file, "train", notes=notes)
    assert (row["prompt"], row["ground_truth"]) == ("q", SOLUTIONS[solution])
    assert row["extra_info"]["solution"] == solution and "'solution'" in notes[0]


@pytest.mark.parametrize(
    "solution, answer",
    [
        (204, "204"),
        (0.5, "0.5"),
        (0, "0"),
        (["204"], '["204"]'),
        (["so \\boxed{1}", "$2$", 3], '["1", "2", 3]'),
    ],
)
@pytest.mark.parametrize("asks", ["prompt", "question", "problem", "messages"])
def test_a_solution_that_is_no_text_is_the_answer_itself(here, asks, solution, answer):
    """AIME is exported with numbers; the fix was the dataflow that the run has."""
    asked = [{"role": "user", "content": "q"}] if asks == "messages" else "q"
    (row,) = load_prompts(jsonl(here / "a.jsonl", {asks: asked, "solution": solution}), "train")
    assert row["ground_truth"] == answer and row["extra_info"]["solution"] == solution


@pytest.mark.parametrize("solution", [None, [], {}, math.nan, True, ["work " * 99]])
def test_a_solution_that_holds_no_answer_is_refused_without_a_circle(solution):
    with pytest.raises(InputError) as error:
        load_prompts([{"prompt": "q", "solution": solution}], "train")
    assert "--config.dataflow=grpo" not in str(error.value)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "7"}]
    if solution in (None, [], {}, math.nan):  # a gap of a table: the last turn answers
        (row,) = load_prompts([{"messages": turns, "solution": solution}], "train")
        assert row["ground_truth"] == "7"


def test_a_solution_in_prose_is_asked_for_its_answer(here):
    file = jsonl(here / "a.jsonl", {"prompt": "q", "solution": "We see that it works. " * 9})
    with pytest.raises(InputError, match="column 'solution'.*Fix: write the answer alone"):
        load_prompts(file, "train")
    row = {"prompt": "q", "solution": "long " * 99, "answer": "5"}  # an answer is one
    assert load_prompts(jsonl(here / "b.jsonl", row), "train")[0]["ground_truth"] == "5"
    (row,) = load_prompts(file, "train", need_ground_truth=False)
    assert row["ground_truth"] == "" and row["extra_info"]["solution"].startswith("We see")


@pytest.mark.parametrize(
    "row, fix",
    [
        (
            dict(ID="I-4", Problem="q", Solution="so 33", Answer=33),
            "rename 'Problem' to 'problem' and 'Answer' to 'answer' and 'Solution' to 'solution'",
        ),
        (dict(Question="q", Solution="so 33"), "rename 'Question' to 'question' and 'Solution' to"),
        (dict(problem_text="q", Solution="so 33", answer="33"), "rename 'problem_text' to 'prob"),
        ({"question": "q", "Final Answer": "4"}, "rename 'Final Answer' to 'answer', if that is"),
        ({"prompt": "q", "Ground-Truth": "4"}, "rename 'Ground-Truth' to 'ground_truth', if"),
        (dict(task="q", solution="so 33"), "give each row a 'prompt'"),
        (dict(promt="q", Solution="s"), "rename 'promt' to 'prompt', if that is"),
    ],
)
def test_the_fix_renames_no_column_that_means_something_else(row, fix):
    with pytest.raises(InputError) as error:
        load_prompts([row], "train")
    said = str(error.value).partition("Fix: ")[2]
    assert said.startswith(fix) and "'Solution' to 'question'" not in said


@pytest.mark.parametrize(
    "row, fix",
    [
        (dict(Question="q", Response="r"), "rename 'Response' to 'response'"),
        (dict(prompt="q", context="c"), "rename the columns"),
        (dict(prompt="q", complation="c"), "rename 'complation' to 'completion'"),
    ],
)
def test_the_fix_of_a_demonstration_is_of_its_columns(row, fix):
    with pytest.raises(InputError) as error:
        load_demonstrations([row], "train")
    assert fix in str(error.value) and "'context' to" not in str(error.value)


PROMPT, PAIR = {"prompt": "a", "answer": "1"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
LABELLED, SOLVED = (
    {"prompt": "a", "completion": "b", "label": True},
    {"prompt": "a", "solution": "1"},
)
DEMO, STEPS = (
    {"prompt": "a", "response": "b"},
    {"prompt": "a", "completions": ["b"], "labels": [True]},
)


@pytest.mark.parametrize(
    ("row", "kind", "dataflow"),
    [
        (PAIR, "prompts", "preference"),
        (LABELLED, "prompts", "kto"),
        (DEMO, "prompts", "sft"),
        (STEPS, "prompts", "process_reward_model"),
        (PROMPT, "pairs", "grpo"),
        (DEMO, "pairs", "sft"),
        (LABELLED, "pairs", "kto"),
        (PAIR, "unpaired", "preference"),
        (PROMPT, "unpaired", "grpo"),
        (SOLVED, "pairs", "grpo"),
        (PAIR, "examples", "preference"),
        (PROMPT, "examples", "grpo"),
        (PROMPT, "stepwise", "grpo"),
    ],
)
def test_rows_of_another_kind_lead_to_the_dataflow_that_reads_them(here, row, kind, dataflow):
    file = jsonl(here / "a.jsonl", row)
    with pytest.raises(InputError, match=f"Fix: --config.dataflow={dataflow}, which reads such"):
        if kind == "prompts":
            load_prompts(file, "train")
        elif kind == "examples":
            load_demonstrations(file, "train")
        else:
            load_rows(file, "train", kind)


@pytest.mark.parametrize("row", [LABELLED, STEPS])
@pytest.mark.parametrize("kind", ["unpaired", "stepwise", "trajectories", "prompts", "examples"])
def test_rows_without_a_prompt_lead_to_no_dataflow_that_needs_one(here, row, kind):
    loads = {"prompts": load_prompts, "examples": load_demonstrations}
    load = loads.get(kind, functools.partial(load_rows, kind=kind))
    answer = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    row = {n: answer if n == "completion" else v for n, v in row.items() if n != "prompt"}
    with pytest.raises(InputError) as error:
        load(jsonl(here / "a.jsonl", row), "train")
    fix = error.value.parts[1]
    assert "dataflow" not in fix
    assert kind in loads or "'prompt': a text, or the messages before the answer" in fix


@pytest.mark.parametrize(
    ("rows", "fix"),
    [
        ([PAIR | {"chosen": "c"}] * 5, "two different completions"),
        ([PAIR | {"tie": True}] * 5, "offline.ties='both_orders'"),
        ([PAIR | {"prompt": "a" * 99}] * 5, "raise max_tokens"),
        ([PAIR | {"chosen": "c"}] * 4 + [PAIR | {"tie": True}], "two different completions"),
        ([PAIR | {"chosen": "c"}] + [PAIR | {"prompt": "a" * 99}] * 2, "raise max_tokens"),
    ],
)
def test_the_fix_is_of_why_the_rows_were_dropped(here, rows, fix):
    file = jsonl(here / "a.jsonl", *rows)
    records, tokenizer = load_rows(file, "train", "pairs"), CharTokenizer("abc")
    with pytest.raises(InputError) as error:
        encode_rows(records, tokenizer, "pairs", max_tokens=20)
    assert f"none of {len(rows)} rows is left" in str(error.value) and fix in error.value.parts[1]
    assert ("offline.max_tokens" in error.value.parts[1]) == (fix == "raise max_tokens")


@pytest.mark.parametrize(
    ("overlong", "proposed"), [("drop", ["left", "right"]), ("left", ["right"])]
)
def test_the_fix_of_rows_that_are_too_long_is_not_the_setting_that_failed(overlong, proposed):
    records, tokenizer = (
        load_rows([PAIR | {"chosen": "c" * 99}] * 2, "train", "pairs"),
        CharTokenizer("abc"),
    )
    with pytest.raises(InputError) as error:
        encode_rows(records, tokenizer, "pairs", max_tokens=20, overlong=overlong)
    fix = error.value.parts[1]
    assert [side for side in ("left", "right") if f"overlong='{side}'" in fix] == proposed
    items, _ = encode_rows(records, tokenizer, "pairs", max_tokens=20, overlong="right")
    assert len(items) == 2


def test_a_table_of_one_column_is_read(here):
    (here / "a.csv").write_text("text\nab\ncd\n")
    assert [row["text"] for row in read_rows("a.csv", "train").rows] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("field", "fixes"),
    [
        ("sft.steps", ("sft.data=FILE", "sft.steps=0")),
        ("sft.data", ("sft.data=FILE", "sft.steps=0")),
        ("pretraining.data", ("pretraining.data=FILE",)),
        ("data.test", ("data.test=FILE",)),
    ],
)
def test_the_fix_is_no_dataflow_where_another_field_asks_for_the_rows(here, field, fixes):
    config = Config(model="decoder(layers=1)", dataflow="grpo")
    config.reward.function = "exact_match()"
    tokenizer, config.data.train = CharTokenizer("abc"), jsonl(here / "a.jsonl", PROMPT, PROMPT)
    config.sft.steps = 1 if field.startswith("sft") else 0
    other = jsonl(here / "b.jsonl", PAIR, PAIR)
    if field == "sft.data":
        config.sft.data = other
    elif field == "pretraining.data":
        config.pretraining.data = other
    elif field == "data.test":
        config.data.test = other
    with pytest.raises(InputError, match=rf"^{field}.*: row 0") as error:
        load_data(config, tokenizer)
    _, fix = error.value.parts
    assert all(f"--config.{one}" in fix for one in fixes) and "dataflow" not in fix
    config.sft.steps, config.data.test, config.pretraining.data = 0, "", ""
    assert load_data(config, tokenizer).prompts


def test_the_fix_of_prompts_that_an_offline_run_evaluates_on_names_their_field(here):
    config = Config(model="decoder(layers=1)", dataflow="sft")
    config.data.train = config.evaluate.prompts_from = jsonl(here / "a.jsonl", DEMO)
    with pytest.raises(InputError, match=r"^evaluate.prompts_from: .*row 0.*prompts_from=FILE"):
        load_data(config, CharTokenizer("abc"), "examples")


def test_a_conversation_that_the_supervised_phase_cannot_learn_says_which_phase_reads_it(here):
    asked = {"messages": [{"role": "user", "content": "a"}], "answer": "b"}
    config = config_of(here, "grpo", [asked])
    tokenizer, config.sft.steps = load_run_tokenizer(config), 1
    says = "^sft.steps reads data.train: .*no message of the assistant.*sft.steps=0"
    with pytest.raises(InputError, match=says):
        load_data(config, tokenizer)
