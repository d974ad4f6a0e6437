"""Rows in the columns of the published benchmarks, written by us, and responses to them."""

import base64
import json
import pickle
import zlib

from rljax.evaluation.suites import Suite

GSM8K = [
    {"question": "Ada has 3 hens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A pen costs $600. And two?", "answer": "2 x 600 = 1,200\n#### 1,200"},
]
MATH500 = [
    {
        "problem": "Halve $3$.",
        "solution": r"$\boxed{\frac{3}{2}}$",
        "answer": r"\frac{3}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    {
        "problem": "Which $x > 0$ has $x^2=2$?",
        "solution": r"\boxed{\sqrt{2}}",
        "answer": r"\sqrt{2}",
        "subject": "Algebra",
        "level": 5,
        "unique_id": "test/algebra/2.json",
    },
]
AIME = [{"ID": "2024-I-1", "Problem": "Find n.", "Solution": "n = 25", "Answer": 25}]
AIME_MATH_AI = [{"id": 60, "problem": "Find n.", "solution": r"\boxed{025}", "url": "u"}]
MMLU_PRO = [
    {
        "question_id": i,
        "question": f"Which is {i}?",
        "options": [str(n) for n in range(10 - i)],
        "answer": "ABCDEFGHIJ"[i],
        "answer_index": i,
        "category": category,
        "src": "ours",
        "cot_content": f"A: Let's think step by step. It is {i}. "
        f"The answer is ({'ABCDEFGHIJ'[i]}).",
    }
    for i, category in enumerate(["physics", "law", "law"])
]
IFEVAL = [
    {
        "key": 1000,
        "prompt": "Write about rain without commas, with 2 bullets.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
        "kwargs": [{"num_bullets": None}, {"num_bullets": 2}],
    },
    {
        "key": 1001,
        "prompt": "Answer in quotation marks.",
        "instruction_id_list": ["startend:quotation"],
        "kwargs": [{"num_bullets": None}],
    },
]


def packed(tests: list[dict]) -> str:
    """Tests as LiveCodeBench packs its private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def _tests(kind: str, *pairs) -> list[dict]:
    return [{"input": a, "output": b, "testtype": kind} for a, b in pairs]


LIVECODEBENCH = [
    {
        "question_title": "Sum",
        "question_content": "Print the sum of two integers.",
        "platform": "atcoder",
        "question_id": "abc1_a",
        "contest_id": "abc1",
        "contest_date": "2024-05-04T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(_tests("stdin", ("1 2\n", "3\n"))),
        "private_test_cases": packed(_tests("stdin", ("5 -7\n", "-2\n"))),
        "metadata": "{}",
    },
    {
        "question_title": "Twice",
        "question_content": "Return every number twice as large.",
        "platform": "leetcode",
        "question_id": "100",
        "contest_id": "weekly",
        "contest_date": "2024-09-01T00:00:00",
        "difficulty": "hard",
        "starter_code": "class Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n",
        "public_test_cases": json.dumps(_tests("functional", ("[1, 2]", "[2, 4]"))),
        "private_test_cases": json.dumps(_tests("functional", ("[]", "[]"), ("[-1]", "[-2]"))),
        "metadata": json.dumps({"func_name": "twice"}),
    },
]
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TWICE = (
    "Here:\n```python\nclass Solution:\n    def twice(self, xs: List[int]) -> List[int]:\n"
    "        return [2 * x for x in xs]\n```"
)


def write_rows(path, rows) -> str:
    """A .jsonl file; its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- a suite of a user --


def digits(*, data: str, samples: int = 1, temperature: float = 0.0) -> Suite:
    """Rows of {"ask", "say", "kind"}."""
    return Suite(
        data,
        _digit,
        "exact_match()",
        ("ask", "say"),
        samples=samples,
        temperature=temperature,
        max_response_tokens=3,
        by=("kind",),
    )


def _digit(row: dict) -> dict:
    return {"prompt": row["ask"], "ground_truth": row["say"], "kind": row["kind"]}
