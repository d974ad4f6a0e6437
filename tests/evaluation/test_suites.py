"""Benchmarks from files in the published columns: prompts, extraction, scores and metrics of known
responses, refusals, and a policy from the rows to results.json and a model card."""

import base64
import dataclasses
import json
import math
import pickle
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tiny_gsm8k import write_model
from tiny_suites import (
    ADD,
    AIME,
    AIME_MATH_AI,
    GSM8K,
    IFEVAL,
    LIVECODEBENCH,
    MATH500,
    MMLU_PRO,
    TWICE,
    packed,
    write_rows,
)

import rljax
from rljax.command import evaluate as evaluate_command
from rljax.config import Config
from rljax.config.declare import check_options, option_flags, options_of, split_at_commas
from rljax.config.policy_options import EvaluateOptions
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.benchmarks import (
    evaluate_suites,
    items_of,
    make_suite,
    score_items,
    suite_metrics,
    suite_records,
)
from rljax.evaluation.policy import bootstrap, pass_at_k
from rljax.report.card import read_evaluation
from rljax.report.publish import publish

SUITES = {
    "gsm8k": GSM8K,
    "math500": MATH500,
    "aime24": AIME,
    "aime25": AIME_MATH_AI,
    "mmlu_pro": MMLU_PRO,
    "ifeval": IFEVAL,
    "livecodebench": LIVECODEBENCH,
}


def opened(tmp_path, name: str, rows=None, options: str = ""):
    """(suite, records) of rows in a file."""
    path = write_rows(tmp_path / f"{name}.jsonl", SUITES[name] if rows is None else rows)
    suite = make_suite(f"{name}(data={path!r}{options})")
    return suite, suite_records(suite)


def scored(suite, records, responses: list[list[str]]) -> list[dict]:
    """The items of known responses."""
    items = items_of(suite, records)
    for item, texts in zip(items, responses, strict=True):
        item["samples"] = [{"response": t, "tokens": len(t), "truncated": False} for t in texts]
    score_items(suite, items, workers=1)
    return items


def scores(items) -> list[list[float]]:
    return [[sample["score"] for sample in item["samples"]] for item in items]


def said(record) -> str:
    return "\n".join(message["content"] for message in record["prompt"])


# -- prompts, extractors and scores, suite by suite --


@pytest.mark.smoke
def test_gsm8k(tmp_path):
    suite, records = opened(tmp_path, "gsm8k")
    assert said(records[0]).startswith("Ada has 3 hens") and '"####"' in said(records[0])
    items = scored(
        suite,
        records,
        [["3 + 4 = 7\n#### 7", "It is 7", "#### 8"], ["#### 1200", "#### 1,200", "#### 1,20"]],
    )
    assert scores(items) == [[1, 0, 0], [1, 1, 0]]
    found = suite_metrics(items, (2, 3))
    assert found["avg@3"]["value"] == 0.5 and found["pass@3"]["value"] == 1
    assert found["pass@2"]["value"] == pytest.approx((pass_at_k(3, 1, 2) + 1) / 2)
    assert found["extraction_failed_fraction"] == pytest.approx(1 / 6)
    assert not any(name.startswith("maj@") for name in found)  # nobody says what is voted on


def test_the_majority_of_a_suite_votes_on_its_answers(tmp_path):
    suite, records = opened(tmp_path, "gsm8k")
    items = scored(
        suite,
        records,
        [
            # Two texts without an answer have no vote, and 7 wins against 8 as it came first.
            ["It is 7", "#### 7", "It is 7", "#### 8", "the sum is\n#### 7", "#### 8"],
            [
                "#### 1,200",
                "#### 1,1",
                "#### 11",
                "#### 1200",
                "#### 11",
                "<think>#### 1200</think>",
            ],
        ],
    )
    found = suite_metrics(items, (3, 6), answer=suite.answer)
    assert found["maj@6"]["value"] == 0.5 and found["maj@6"]["n"] == 2
    assert found["maj@3"]["value"] == 0.5  # 7 and 8 of the first, 1200 and 11 of the second
    # A reward that failed is no vote, and leaves too few for six.
    items[0]["samples"][3].update(score=None, error="why")
    assert suite_metrics(items, (6,), answer=suite.answer)["maj@6"]["n"] == 1


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25"])
def test_the_majority_of_boxed_answers(name, tmp_path):
    suite, _ = opened(tmp_path, name)
    votes = [r"\boxed{ 25 }", r"so \boxed{1} \boxed{25}", "25", r"<think>\boxed{3}</think>", ""]
    assert [suite.answer(text) for text in votes] == ["25", "25", None, None, None]


def test_gsm8k_with_solved_questions_as_text(tmp_path):
    others = [{**row, "question": row["question"].replace("?", " in all?")} for row in GSM8K]
    train = write_rows(tmp_path / "train.jsonl", [*others, {"question": "q", "answer": "#### 3"}])
    suite, records = opened(tmp_path, "gsm8k", None, f", shots=2, exemplars={train!r}")
    prompt = records[0]["prompt"]
    assert prompt.count("Question: ") == 3 and prompt.endswith("How many?\nAnswer:")
    assert "Answer: 3 + 4 = <<3+4=7>>7\n#### 7\n\nQuestion: A pen" in prompt
    assert suite.stop == ("Question:",)
    write_rows(tmp_path / "test.jsonl", GSM8K)  # a folder with both splits needs no more
    assert suite_records(make_suite(f"gsm8k(data={str(tmp_path)!r}, shots=3)"))[1]["index"] == 1
    with pytest.raises(InputError, match="shots=4, and .*train.jsonl has 3 rows"):
        make_suite(f"gsm8k(data={str(tmp_path)!r}, shots=4)")
    with pytest.raises(InputError, match="needs solved questions that are not asked.*exemplars="):
        make_suite(f"gsm8k(data={train!r}, shots=2)")
    with pytest.raises(InputError, match="row 0.* is asked and is shown as an exemplar, too"):
        opened(tmp_path, "gsm8k", others, f", shots=1, exemplars={train!r}")
    with pytest.raises(InputError, match="exemplars: got .*needs shots"):
        make_suite("gsm8k(exemplars='a.jsonl')")


def test_math500(tmp_path):
    pytest.importorskip("math_verify")
    suite, records = opened(tmp_path, "math500")
    assert said(records[0]).endswith(r"put your final answer within \boxed{}.")
    items = scored(
        suite, records, [[r"so \boxed{1.5}", "3/2"], [r"\boxed{2^{1/2}}", r"\boxed{1.414}"]]
    )
    assert scores(items) == [[1, 0], [1, 0]]
    found = suite_metrics(items, ())
    assert found["avg@2/level=1"]["value"] == found["avg@2/subject=Algebra"]["value"] == 0.5
    assert found["extraction_failed_fraction"] == 0.25


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_aime(tmp_path, name):
    suite, records = opened(tmp_path, name)
    assert (suite.samples, suite.temperature) == (32, 0.6) and records[0]["ground_truth"] == "25"
    responses = [r"\boxed{25}", r"\boxed{025}", r"\boxed{1025}", "no idea", r"\boxed{25.0}"]
    items = scored(suite, records, [responses])
    assert scores(items) == [[1, 1, 0, 0, 1]]
    assert suite_metrics(items, ())["extraction_failed_fraction"] == pytest.approx(2 / 5)


def test_aime_with_units_and_names(tmp_path):
    """Arcs in degrees, as AIME 2025 asks for, in the columns and the form of another data set."""
    suite, records = opened(tmp_path, "aime25", [{"question": "p", "answer": r"$336^\circ$"}])
    assert records[0]["ground_truth"] == "336"
    right = [r"336^\circ", "336°", "m + n = 336", r"336 \text{ cm}", r"336\%", r"\frac{672}{2}"]
    wrong = ["n > 336", "n>=336", "n=336 or n=337", "2x=336", "336.5", "-336", "="]
    boxes = [rf"so \boxed{{{text}}}" for text in (*right, *wrong)]
    assert scores(scored(suite, records, [boxes])) == [[1] * len(right) + [0] * len(wrong)]


def test_mmlu_pro(tmp_path):
    suite, records = opened(tmp_path, "mmlu_pro")
    prompt = said(records[0])
    assert "(with answers) about physics. Think" in prompt and '"the answer is (X)"' in prompt
    assert "Options:\nA. 0\nB. 1\n" in prompt and prompt.endswith("J. 9")
    items = scored(
        suite,
        records,
        [
            ["The answer is (A).", "answer is B", "A or\nAnswer: A", "It is A I think"],
            ["the answer is (B), not A", "Answer: A", "none", "Answer: Answer: B"],
            ["C"] * 4,
        ],
    )
    assert scores(items) == [[1, 0, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]]  # the last letter: I
    found = suite_metrics(items, ())
    assert found["avg@4/category=physics"]["n"] == 1 and found["avg@4/category=law"]["n"] == 2
    assert found["avg@4/category=law"]["value"] == 0.75
    assert found["extraction_failed_fraction"] == pytest.approx(1 / 12)


def test_mmlu_pro_with_solved_questions_of_the_category(tmp_path):
    others = [{**row, "question": f"Now: {row['question']}"} for row in MMLU_PRO]
    solved = write_rows(tmp_path / "validation.jsonl", others)
    _, records = opened(tmp_path, "mmlu_pro", MMLU_PRO[1:], f", shots=1, exemplars={solved!r}")
    prompt = records[0]["prompt"]
    assert prompt.count("Question:") == 2 and prompt.count("about law") == 1
    assert "Answer: Let's think step by step. It is 1. The answer is (B).\n\nQuestion:" in prompt
    assert prompt.endswith("Answer: Let's think step by step.")
    none = write_rows(tmp_path / "none.jsonl", others[:1])
    with pytest.raises(InputError, match="column 'category': got 'law'; no exemplar"):
        opened(tmp_path, "mmlu_pro", MMLU_PRO[1:], f", shots=1, exemplars={none!r}")
    with pytest.raises(InputError, match="row 1.* is asked and is shown as an exemplar, too"):
        opened(tmp_path, "mmlu_pro", [MMLU_PRO[1], others[1]], f", shots=1, exemplars={solved!r}")


def test_ifeval_by_prompt_and_by_instruction(tmp_path):
    path = tmp_path / "ifeval.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(IFEVAL), path)
    suite = make_suite(f"ifeval(data={str(path)!r})")
    records = suite_records(suite)
    assert said(records[1]) == "Answer in quotation marks."
    items = scored(suite, records, [["* rain,\n* more, rain"], ['Here:\n"yes"']])
    found = suite_metrics(items, (), parts=suite.parts)
    assert found["avg@1"]["value"] == 0 and found["prompt_loose"]["value"] == 0.5
    for item in items:  # all of them right: an interval that draws from them has no width
        item["samples"][0]["parts"] |= {"prompt_loose": 1.0}
    loose = suite_metrics(items, (), parts=suite.parts)["prompt_loose"]
    assert loose["value"] == loose["high"] == 1 and 0.2 < loose["low"] < 0.6
    # 3 instructions of 2 prompts: not the mean of the two prompts' shares, 1/2 and 0.
    assert found["instruction_strict"]["value"] == pytest.approx(1 / 3)
    assert found["instruction_loose"]["value"] == pytest.approx(2 / 3)
    assert found["instruction_loose"]["n"] == 2
    assert found["instruction_loose"]["low"] == 0.5 and found["instruction_loose"]["high"] == 1


def test_livecodebench(tmp_path):
    suite, records = opened(tmp_path, "livecodebench")
    assert "Read the inputs from stdin" in said(records[0])
    assert "class Solution:" in said(records[1]) and "starter code" in said(records[1])
    wrong = ADD.replace("a + b", "a + abs(b)")  # right on the public test, wrong on the private
    unfenced = ADD.replace("```python", "").replace("```", "")
    items = scored(suite, records, [[ADD, wrong, unfenced], [TWICE, ADD, TWICE.replace("2 *", "")]])
    assert scores(items) == [[1, 0, 0], [1, 0, 0]]
    assert items[1]["samples"][0]["parts"]["tests"] == 3
    found = suite_metrics(items, (3,))
    assert found["pass@3"]["value"] == 1 and found["avg@3/difficulty=hard"]["n"] == 1
    assert found["extraction_failed_fraction"] == pytest.approx(1 / 6)


def test_livecodebench_by_the_day_of_the_contest(tmp_path):
    _, records = opened(tmp_path, "livecodebench", None, ", start='2024-08-01', end='2024-09-01'")
    assert [record["index"] for record in records] == [1]
    with pytest.raises(InputError, match="no row for this suite"):
        opened(tmp_path, "livecodebench", None, ", start='2025-01-01'")
    with pytest.raises(InputError, match="start: got '2024-13-01'"):
        make_suite("livecodebench(start='2024-13-01')")


class _Attack:
    def __reduce__(self):
        return (print, ("run",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    evil = base64.b64encode(zlib.compress(pickle.dumps(_Attack()))).decode()
    with pytest.raises(InputError, match="'private_test_cases' cannot be read.*builtins.print"):
        opened(tmp_path, "livecodebench", [{**LIVECODEBENCH[0], "private_test_cases": evil}])
    assert "run" not in capsys.readouterr().out


# -- rows that are refused --


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gsm8k", {"answer": None}, "column 'answer' is empty or not a text"),
        ("gsm8k", {"answer": "seven"}, "no number after '#### '"),
        ("gsm8k", {"question": " "}, "column 'question' is empty"),
        ("math500", {"answer": ""}, "column 'answer' is empty"),
        ("math500", {"problem": ...}, "lacks the column 'problem'"),
        ("aime24", {"Answer": 1025}, "column 'answer': got 1025; an integer from 0 to 999"),
        ("aime24", {"Answer": ..., "Solution": ...}, "lacks the column 'answer'"),
        ("aime24", {"Problem": ...}, "lacks the column 'problem'"),
        ("mmlu_pro", {"options": ["one"]}, "column 'options'.*a list of 2 to 10 texts"),
        ("mmlu_pro", {"options": ...}, "lacks the column 'options'"),
        ("mmlu_pro", {"answer": "K"}, "column 'answer': got 'K'"),
        ("mmlu_pro", {"answer_index": 3}, "column 'answer_index': got 3"),
        ("ifeval", {"kwargs": [{}]}, "kwargs is not a list of 2 objects"),
        ("ifeval", {"kwargs": ...}, "lacks the column 'kwargs'"),
        ("ifeval", {"instruction_id_list": ["a:b", "c"]}, "holds 'a:b', which is none of"),
        ("livecodebench", {"public_test_cases": "[}"}, "'public_test_cases' cannot be read"),
        ("livecodebench", {"public_test_cases": '[{"input": 1}]'}, '"testtype": "stdin"'),
        ("livecodebench", {"private_test_cases": "eA=="}, "'private_test_cases' cannot be read"),
        ("livecodebench", {"question_content": ...}, "lacks the column 'question_content'"),
        ("livecodebench", {"public_test_cases": "[]", "private_test_cases": ""}, "holds no test"),
    ],
)
def test_a_row_that_is_none_names_place_column_and_columns(tmp_path, name, change, says):
    row = {k: v for k, v in {**SUITES[name][0], **change}.items() if v is not ...}
    with pytest.raises(InputError, match=says) as error:
        opened(tmp_path, name, [row])
    assert "row 0 (line 1)" in str(error.value)
    assert f"Fix: rows have the columns {', '.join(make_suite(name).columns)}" in str(error.value)


def test_files_and_suites_that_are_none(tmp_path):
    with pytest.raises(InputError, match="has no rows"):
        opened(tmp_path, "gsm8k", [])
    with pytest.raises(InputError, match="does not exist"):
        suite_records(make_suite("gsm8k(data='none.jsonl')"))
    with pytest.raises(InputError, match="did you mean gsm8k"):
        make_suite("gsm9k")
    with pytest.raises(InputError, match="returned no suite"):
        make_suite("rljax.evaluation.policy.final_answer(response='x')")
    with pytest.raises(InputError, match="temperature 0"):
        make_suite("tiny_suites.digits(data='a', samples=2)")


def test_a_functional_problem_without_metadata_is_called_by_its_starter_code(tmp_path):
    row = {k: v for k, v in LIVECODEBENCH[1].items() if k != "metadata"}
    suite, records = opened(tmp_path, "livecodebench", [row])
    assert scores(scored(suite, records, [[TWICE]])) == [[1]]
    assert packed([]) and json.loads(records[0]["ground_truth"])["fn_name"] == "twice"


# -- metrics --


def test_intervals_are_over_prompts_and_weighed():
    values, weights = [1.0, 0.0, math.nan], [3.0, 1.0, 5.0]
    found = bootstrap(values, weights=weights)
    assert found["value"] == 0.75 and found["n"] == 2 and (found["low"], found["high"]) == (0, 1)
    rng = np.random.default_rng(0)
    values = rng.random(50)
    assert bootstrap(values, weights=[2.0] * 50) == pytest.approx(bootstrap(values))


def test_a_failed_reward_is_no_wrong_answer():
    sample = {"tokens": 1, "truncated": True, "parts": {}}
    right, failed = {**sample, "score": 1.0}, {**sample, "score": None, "error": "ValueError: x"}
    items = [{"by": {}, "samples": [right, failed]}, {"by": {}, "samples": [failed, failed]}]
    found = suite_metrics(items, ())
    assert found["avg@2"] == {"value": 1, "low": pytest.approx(0.2065, abs=1e-4), "high": 1, "n": 1}
    assert found["failed_rewards"] == 3 and found["truncated_fraction"] == 1
    with pytest.raises(InputError, match="every reward of the suite failed.*ValueError: x"):
        suite_metrics(items[1:], ())


# -- the command --


def test_the_flags(tmp_path):
    flags = {
        "checkpoint": "x",
        "suites": ("gsm8k(shots=8, data='a,b')", "aime24", "a.py:b(c=(1,))"),
    }
    options = options_of(EvaluateOptions, flags)
    assert options.suites == flags["suites"] and options.samples is None
    assert option_flags(EvaluateOptions, flags)[1].startswith("--suite=gsm8k(")
    assert split_at_commas("it's.json,b(1.json,c") == ["it's.json", "b(1.json", "c"]
    with pytest.raises(InputError) as error:
        check_options(
            EvaluateOptions("x", suites=("gsm8k", "aime24"), data="a", reward="b", against="c")
        )
    for flag in ("--data=a: of one suite", "--reward=b: not beside --suite", "--against=c"):
        assert flag in str(error.value)
    greedy = EvaluateOptions(
        "x", suites=("gsm8k",), samples=4, data=write_rows(tmp_path / "a.jsonl", GSM8K)
    )
    with pytest.raises(InputError, match="--samples: got 4.*gsm8k is greedy.*--temperature"):
        evaluate_suites(greedy)
    with pytest.raises(InputError, match=r"--k: got \[64\]; aime24 draws 32 samples"):
        evaluate_suites(EvaluateOptions("x", suites=("aime24",), ks=(64,)))


def test_a_model_folder_from_rows_to_results(tmp_path):
    model = write_model(tmp_path / "qwen3", "qwen3")
    data = write_rows(tmp_path / "gsm8k.jsonl", GSM8K)
    options = EvaluateOptions(
        str(model),
        suites=("gsm8k",),
        data=data,
        samples=2,
        temperature=4.0,
        ks=(1, 2),
        max_response_tokens=6,
    )
    result = evaluate_suites(options)
    (suite,) = result["suites"]
    assert suite["prompts"] == 2 and suite["template"] == "chat" and suite["temperature"] == 4.0
    assert {"avg@2", "pass@2", "maj@2", "truncated_fraction"} < suite["metrics"].keys()
    assert result["metrics"]["gsm8k/avg@2"] == suite["metrics"]["avg@2"]
    for item, row in zip(suite["items"], GSM8K, strict=True):
        assert row["question"] in item["prompt"] and "<|im_start|>user" in item["prompt"]
        assert len(item["samples"]) == 2 and all(s["score"] is not None for s in item["samples"])
    again = evaluate_suites(dataclasses.replace(options))["suites"][0]
    assert again["items"] == suite["items"] and again["prompts_sha256"] == suite["prompts_sha256"]
    stored = tmp_path / "results.json"
    stored.write_text(json.dumps(result))
    assert read_evaluation(stored)[1]["suites"][0]["items"] == suite["items"]
    with pytest.raises(InputError, match="the model's context is 256 tokens"):
        evaluate_suites(dataclasses.replace(options, max_response_tokens=None))


LETTERS = "first_letter(letters=3, kinds=3, test=6)"


@pytest.mark.slow
def test_a_trained_policy_its_own_suite_and_the_card(tmp_path):
    """A run of a task answers a suite of the user's, by greedy and drawn responses, and the file
    becomes tables of the model card."""
    config = Config(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)",
        dataflow="sft",
        steps=60,
        trackers=(),
        run_dir=str(tmp_path / "run"),
    )
    config.model_settings.remat, config.data.train = "none", LETTERS
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 4, 6
    config.offline.examples_per_step, config.offline.max_tokens = 32, 8
    config.reward.function, config.reward.workers = "exact_match()", 1
    config.actor_optimizer.lr = 1e-2
    rljax.train(config)
    rows = [
        {"ask": r["prompt"], "say": r["ground_truth"], "kind": ["even", "odd"][i % 2]}
        for i, r in enumerate(load_prompts(LETTERS, "test"))
    ]
    data, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "results.json"
    options = EvaluateOptions(
        str(tmp_path / "run"),
        out=str(out),
        suites=(
            f"tiny_suites.digits(data={data!r})",
            f"tiny_suites.digits(data={data!r}, samples=4, temperature=1.0)",
        ),
    )
    evaluate_command.main(options)
    result = json.loads(out.read_text())
    greedy, drawn = result["suites"]
    assert greedy["metrics"]["avg@1"]["value"] == 1 and greedy["template"] == "text"
    assert drawn["metrics"]["avg@4"]["value"] > 0.9 and drawn["metrics"]["pass@4"]["value"] == 1
    assert drawn["metrics"]["avg@4/kind=odd"]["n"] == 3
    assert all(len(item["samples"]) == 4 for item in drawn["items"])
    assert result["step"] == 60 and "--suite=" in result["command"]
    made = publish(
        str(tmp_path / "run"), "me/made", evaluations=(str(out),), out=str(tmp_path / "o")
    )
    card = (tmp_path / "o" / "README.md").read_text()
    assert made.files and "avg@4/kind=odd" in card and "4 samples at temperature 1.0" in card
