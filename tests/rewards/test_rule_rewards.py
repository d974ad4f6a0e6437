"""Rewards of text, form and style: what they pay, what only looks right, verl's own numbers."""

import http.server
import json
import threading
import tracemalloc

import pytest
from conftest import golden, worked_example

from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.rewards import (
    boxed,
    by_source,
    choice,
    contains,
    dapo,
    exact_match,
    format_tags,
    gsm8k,
    integer_answer,
    json_match,
    json_schema,
    l1_max,
    language,
    last_line,
    letter_quota,
    list_match,
    looping,
    math_verify,
    mmlu_pro,
    qa_exact_match,
    regex_match,
    repetition,
    sequence_match,
    soft_overlong,
    token_f1,
)
from rljax.rewards.answers.minerva import dapo_answer
from rljax.rewards.text.targets import targets

# -- verl's own numbers -------------------------------------------------------------------------


def verl_cases(name: str, count: int) -> list[dict]:
    cases = json.loads(golden("verl", "reward_scores.json").read_text())["cases"]
    cases = [c for c in cases if c["fn"] == f"{name}.compute_score"]
    assert len(cases) == count
    return cases


def test_the_answer_rule_of_dapo_agrees_with_verl():
    for case in verl_cases("math_dapo", 51):
        want = case["output"]
        found = dapo(case["solution_str"], case["ground_truth"], **case["kwargs"])
        assert (found["score"], found["acc"]) == (want["score"], want["acc"]), case
        answer = dapo_answer(case["solution_str"], **case["kwargs"])
        lacking = None if case["kwargs"]["strict_box_verify"] else "[INVALID]"
        assert (lacking if answer is None else answer) == want["pred"], case
        assert found["extracted"] == (want["pred"] not in (None, "[INVALID]"))


def test_exact_match_of_tagged_answers_agrees_with_verl():
    for case in verl_cases("search_r1_like_qa_em", 27):
        found = qa_exact_match(case["solution_str"], case["ground_truth"], **case["kwargs"])
        assert found == case["output"], case


@pytest.mark.parametrize(
    "response, ground_truth, strict, score",
    [
        ("Answer: $5$", "5", False, 1),
        ("Answer: 5 hours", "5", False, 1),
        ("Answer: \\text{east}", "east", False, 1),
        ("Answer: \\frac12", "\\frac{1}{2}", False, 1),
        ("Answer: 5\nthen more", "5", False, 1),
        ("Answer: 5" + " " * 300, "5", False, -1),  # outside the window
        ("\\boxed{5}" + " " * 100, "5", True, -1),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True, 1),
        ("\\boxed{5", "5", False, -1),
        ("", "5", False, -1),
    ],
)
def test_the_answer_rule_of_dapo(response, ground_truth, strict, score):
    assert dapo(response, ground_truth, strict_box_verify=strict)["score"] == score


# -- text ---------------------------------------------------------------------------------------


def test_tagged_answers_with_other_scores_and_many_tags():
    options = {"score": 2.0, "format_score": 0.25}
    assert qa_exact_match("<answer>The Paris!</answer>", ["Rome", "paris"], **options) == 2.0
    assert qa_exact_match("<answer>Lyon</answer>", "Paris", **options) == 0.25
    assert qa_exact_match("Paris", "Paris", **options) == 0.0
    assert qa_exact_match("<answer>Paris", "Paris", **options) == 0.0
    assert qa_exact_match("<answer>Paris</answer>" * 11, "Paris", **options) == 0.5
    assert qa_exact_match("paris.", "Paris", tag="") == 1.0
    # An opening inside of an answer belongs to it, as for the pattern <answer>(.*?)</answer>.
    assert qa_exact_match("<answer>a <answer>Paris</answer>", "Paris") == 0.0


def test_f1_of_tokens():
    found = token_f1("The cat sat on a mat.", "a cat on the mat")
    assert found["precision"] == 3 / 4 and found["recall"] == 1.0 and found["exact"] == 0.0
    assert found["score"] == pytest.approx(2 * 0.75 / 1.75)
    assert token_f1("b b b", "b c")["score"] == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    assert token_f1("cat", {"target": ["dog", "The cat"]})["score"] == 1.0
    assert token_f1("", "cat")["score"] == 0.0
    assert token_f1("<answer>cat</answer> dog", "cat", tag="answer")["exact"] == 1.0
    assert token_f1("dog", "cat", tag="answer")["score"] == 0.0


def test_several_targets_as_json_text_as_rows_of_data_hold_them():
    for truth in ('["Rome", "New York"]', '{"target": ["Rome", "New York"]}', '{"target": "Rome"}'):
        assert qa_exact_match("<answer>rome</answer>", truth) == 1.0
        assert token_f1("Rome", truth)["exact"] == 1.0
        assert contains("it is Rome", truth) == 1.0
        assert contains("it is Oslo", truth) == 0.0
    assert contains("so [1, 2] it is", "[1, 2]") == 1.0  # no texts: the target itself
    assert contains("use {x}", "{x}") == 1.0


# A reward, a response that is right for the second of two targets, one that is for neither.
COMPARED = {
    "exact_match": (exact_match, " 73 ", "7"),
    "last_line": (last_line, "so\n73", "73\nso"),
    "sequence_match": (sequence_match, "73", "99"),
    "boxed": (boxed, r"\boxed{73}", r"\boxed{7}"),
    "gsm8k": (gsm8k, "#### $73", "#### 7"),
    "gsm8k strict": (lambda r, t: gsm8k(r, t, method="strict"), "#### 73", "#### 7"),
    "gsm8k flexible": (lambda r, t: gsm8k(r, t, method="flexible"), "73", "7"),
    "math_verify": (lambda r, t: math_verify(r, t)["score"], r"\boxed{73.0}", r"\boxed{7}"),
    "dapo": (lambda r, t: dapo(r, t)["acc"], "Answer: 73", "Answer: 7"),
    "dapo strict": (
        lambda r, t: dapo(r, t, strict_box_verify=True)["acc"],
        r"\boxed{73}",
        r"\boxed{7}",
    ),
    "integer_answer": (lambda r, t: integer_answer(r, t)["score"], "it is 073", "it is 7"),
    "regex_match": (regex_match, "so 73.", "so 7."),
    "contains": (contains, "so 73.", "so 7."),
    "token_f1": (lambda r, t: token_f1(r, t)["exact"], "73", "7"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_any_of_several_targets_is_right(name):
    reward, right, wrong = COMPARED[name]
    texts = ["72", "73"]
    for truth in (texts, {"target": texts}, texts[1:], "73", {"target": "73"}):
        for given in (truth, truth if isinstance(truth, str) else json.dumps(truth)):
            assert reward(right, given) == 1.0, given
            assert reward(wrong, given) == 0.0, given
    for broken in ('["72", 73]', '["72", null]', '{"target": 72}', '{"target": []}', ["72", 73]):
        with pytest.raises((TypeError, ValueError), match="ground_truth"):
            reward(right, broken)


SQUAD = {"text": ["1843", "1843", "in 1843"], "answer_start": [16, 16, 13]}
TRIVIA = {"value": "Ada", "aliases": ["Ada", "Ada Lovelace"], "normalized_aliases": ["ada"]}
OF_OBJECTS = {  # an object of answers as a row holds it -> its targets
    "SQuAD": (SQUAD, ["1843", "in 1843"]),
    "SQuAD, one": ({"text": "1843", "answer_start": 16, "id": "a"}, ["1843"]),
    "SQuAD, each": ([{"text": "1843", "answer_start": 16}, SQUAD], ["1843", "in 1843"]),
    "TriviaQA": (TRIVIA, ["Ada", "Ada Lovelace"]),
    "TriviaQA, null": ({**TRIVIA, "aliases": None}, ["Ada"]),
    "TriviaQA, no value": ({**TRIVIA, "value": None, "aliases": ["Ada"]}, ["Ada"]),
}


def truth_of(value, column="answer"):
    answer = {"reward_model": {"ground_truth": value}} if column != "answer" else {column: value}
    return load_prompts([{"prompt": "q", **answer}], "train")[0]["ground_truth"]


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_objects_of_answers_are_their_targets(name):
    value, texts = OF_OBJECTS[name]
    for truth in (value, json.dumps(value), truth_of(value), truth_of(value, "reward_model")):
        assert targets(truth) == texts
        for text in texts:
            assert exact_match(text, truth) == token_f1(text, truth)["exact"] == 1.0
            assert qa_exact_match(f"<answer>{text}</answer>", truth) == 1.0
            assert contains(f"It was {text}.", truth) == 1.0
            assert not isinstance(truth, str) or list_match(text, truth) == 1.0
        assert exact_match("text", truth) == contains("no", truth) == 0.0


def test_objects_without_known_answers_are_errors_of_their_row():
    for value in ({"number": "3", "spans": []}, {"answers": ["a"]}, {"a": 1}, [{"a": "b"}]):
        truth = truth_of(value)
        for reward in (exact_match, qa_exact_match, token_f1, contains, last_line, boxed, gsm8k):
            with pytest.raises(ValueError, match="ground_truth is an object of .*target"):
                reward(json.dumps(value), truth)
        assert exact_match(json.dumps(value), json.dumps(value)) == 1.0  # a text is one
    for value in ({"text": [], "answer_start": []}, {"value": "<unk>", "aliases": []}):
        with pytest.raises(ValueError, match="ground_truth has no target"):
            exact_match("<unk>", truth_of(value))
    with pytest.raises(TypeError, match="ground_truth must be text"):
        exact_match("5", truth_of({"value": 5, "aliases": ["five"]}))


# A reference, and the answer that it holds.
WRITTEN = {
    r"\boxed{5}": "5",
    r"$\boxed{\frac{1}{2}}$": r"\frac{1}{2}",
    r"We add: $2+3=\boxed{5}$.": "5",
    r"\boxed{4}? No: \boxed 5": "5",
    r"\fbox{5}": "5",
    "2 + 3 = 5\n#### 5": "5",
    "#### 1,005": "1,005",
    "<think>2 + 3</think> <answer>5</answer>": "5",
    r"<answer>\boxed{5}</answer>": "5",
    "$5$": "5",
    "$$5$$": "5",
    r"\(5\)": "5",
    r"\[5\]": "5",
    "We add the two and find it.\nAnswer: 5": "5",
    "Two and three, so the answer is $5$.": "5",
}
FINDERS = {
    "boxed": (boxed, r"so \boxed{%s}"),
    "math_verify": (lambda r, t: math_verify(r, t)["score"], r"so \boxed{%s}"),
    "dapo": (lambda r, t: dapo(r, t)["acc"], "Answer: %s"),
    "dapo, strict": (lambda r, t: dapo(r, t, strict_box_verify=True)["acc"], r"\boxed{%s}"),
    "integer_answer": (lambda r, t: integer_answer(r, t, high=9999)["score"], r"\boxed{%s}"),
    "by_source": (
        lambda r, t: by_source("numina_x", response=r, ground_truth=t)["score"],
        r"\boxed{%s}",
    ),
}


@pytest.mark.parametrize("name", FINDERS)
def test_a_reference_may_be_a_box_or_a_whole_solution(name):
    reward, form = FINDERS[name]
    for reference, answer in WRITTEN.items():
        if "frac" in answer and name not in ("boxed", "math_verify", "by_source", "dapo"):
            continue
        for truth in (reference, json.dumps(["77", reference])):
            assert reward(form % answer, truth) == 1.0, truth
            assert reward(form % "6", truth) == 0.0, truth


def test_a_solution_that_does_not_say_its_answer_is_an_error_of_its_row():
    solution = "We add two and three, which makes five apples.\nThat was all that they had."
    for text in (
        solution,
        f"$x$ is what we look for.\n{solution}",
        solution.replace("\n", " ") * 3,
    ):
        for reward, form in FINDERS.values():
            with pytest.raises((ValueError, RuntimeError), match="ground_truth .* not an answer"):
                reward(form % "5", text)
    for text in (
        "",
        "A",
        r"5 \text{ or } 6",
        "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}",
        "no answers",
        r"\text{the answer is x}",
        "The answer is 5",
    ):
        assert boxed(rf"\boxed{{{text}}}", text) == float(bool(text))
    for text in ("five", "5 apples", r"\frac{1}{2}", "#### 5", r"\boxed{5}", "<answer>5</answer>"):
        for method in ("numeric", "strict", "flexible"):
            with pytest.raises(ValueError, match="ground_truth .* is not a number"):
                gsm8k("#### 5", text, method=method)
    for text in ("$5$", "5"):
        for method in ("numeric", "strict", "flexible"):
            assert gsm8k("#### 5", text, method=method) == 1.0
    assert gsm8k("#### 1,005", "1,005", method="strict") == 1.0


def test_text_answers_and_lists_in_the_tag_of_a_reference():
    for truth in ("<answer>Paris</answer>", r"\boxed{Paris}", "It is so.\n#### Paris"):
        for text in (truth, json.dumps(["Rome", truth])):
            assert qa_exact_match("<answer>paris</answer>", text) == 1.0
            assert token_f1("<answer>Paris</answer>", text, tag="answer")["exact"] == 1.0
            assert qa_exact_match("<answer>Oslo</answer>", text) == 0.0
    assert qa_exact_match("<a>x</a>", "<a>x</a>", tag="a") == 1.0
    assert token_f1("<answer>Paris</answer>", "<answer>Paris</answer>")["exact"] == 1.0
    for truth in ("<answer>1, 2</answer>", "#### 1 2", r"\boxed{1, 2}"):
        assert list_match("<answer>[1, 2]</answer>", truth) == 1.0
        assert list_match("1, 3", truth) == 0.0
    assert last_line("so\n73", "we add\n73\n") == 1.0 and last_line("73", "73\nso") == 0.0


def test_several_letters_and_lists_of_items():
    for truth in ('["A", "B"]', {"target": ["A", "B"]}, '["B"]'):
        assert choice("B", truth)["score"] == 1.0 and choice("C", truth)["score"] == 0.0
        assert mmlu_pro("The answer is (B)", truth)["score"] == 1.0
        assert mmlu_pro("The answer is (C)", truth)["score"] == 0.0
    for truth in ('["3", "5"]', "[3, 5]", '{"target": ["3, 5", "5, 3"]}'):
        assert list_match("3, 5", truth) == list_match('["3", "5"]', truth) == 1.0
        assert list_match("3", truth) == 0.0
    assert letter_quota("aab", '["a"]', quota=2) == 1.0
    with pytest.raises(ValueError, match="several targets"):
        letter_quota("aab", '["a", "b"]', quota=2)


def test_text_that_is_no_list_of_texts_is_one_target():
    for text in ("[1, 2]", "[72]", '{"a": "b"}', '{"target": 5, "numbers": [5]}', '["a"', "{x}"):
        assert exact_match(text, text) == sequence_match(text, text) == 1.0
        assert exact_match("72", text) == 0.0
    assert sequence_match("abd", '["xyz", "abc"]', partial=0.5) == pytest.approx(1 / 3)
    for text in ('["a", "b"]', '{"target": "a"}'):  # a list may be what is asked for
        assert exact_match(f" {text}", text) == last_line(f"so\n{text}", text) == 1.0
        assert exact_match("a", text) == sequence_match(text, text) == 1.0


def test_a_target_of_which_the_normal_form_leaves_nothing_is_not_met_by_nothing():
    for truth in ("A", "The", "+"):
        assert qa_exact_match("<answer></answer>", truth) == 0.0
        assert token_f1("...", truth)["score"] == 0.0
        assert qa_exact_match(f"<answer>{truth.lower()}</answer>", truth) == 1.0


@pytest.mark.parametrize("reward", [qa_exact_match, token_f1, contains])
@pytest.mark.parametrize("ground_truth", [5, None, [], {"answer": "a"}, ["a", 5], {"target": 5}])
def test_targets_that_are_none_are_errors_not_zeros(reward, ground_truth):
    with pytest.raises((TypeError, ValueError), match="ground_truth"):
        reward("a", ground_truth)


@pytest.mark.parametrize(
    "response, expected",
    [
        ("B", 1),
        ("(B)", 1),
        ("b", 1),
        ("**B**", 1),
        ("B. Paris", 1),
        (r"so \boxed{B}", 1),
        (r"so \boxed{\text{(B)}}", 1),
        ("<answer>B</answer>", 1),
        ("<answer>The answer is B</answer>", 1),
        ("<answer>The answer is not B</answer>", None),
        ("Answer: B\n\nA: wrong\nC: wrong", 1),
        ("A: x\nB: y\nC: z", None),
        ("B.\n\nC: wrong", 1),
        ("The answer is B because A is wrong.", 1),
        ("I thought A. The answer is (B).", 1),
        ("Answer: B", 1),
        ("The answer is B. No, the answer is A", 0),
        (r"\boxed{A} or rather \boxed{B}", 1),
        ("A", 0),
        ("B or A", None),
        ("B, A", None),
        ("B;A", None),
        ("B|A|C|D", None),
        ("B-D", None),
        ("(B)(A)", None),
        ("B - Dublin", 1),
        ("The answer is (B) - C is wrong.", 1),
        ("A. x\nB. y\nC. z", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{}", None),
        ("Blue", None),
        ("E", None),
        ("A dog is B", None),
        ("The answer is a dog", None),
        ("I would say B", None),
        ("", None),
    ],
)
def test_choice(response, expected):
    found = choice(response, "B")
    assert found == {"score": float(expected or 0), "extracted": float(expected is not None)}


def test_choice_refuses_a_reference_that_is_no_letter():
    with pytest.raises(ValueError, match="none of the letters 'ABCD'"):
        choice("B", "Paris")
    assert choice("E", "E", letters="ABCDE")["score"] == 1.0


LABELLED = [
    r"B: A polygenic score",
    "B. Paris",
    "B) Paris",
    "(B) A cat",
    "**B**",
    "B - Paris",
    r"\text{B}",
    r"\text{Option B}",
    r"\mathrm{B}",
    r"\mathbf{B}",
    r"\boldsymbol{B}",
    r"\text{\textbf{B}}",
    r"\textbf{(B)}",
    r"\textbf{(B)}\ 12",
    r"\textbf{(B) }\frac{1}{2}",
    r"\textbf{(B)}~\frac{1}{2}",
    r"\mathrm{(B)}\ 12",
    r"\textbf{B.} Paris",
    r"\text{B. A cat}",
    r"\text{B}: A cat",
    r"B\text{: Paris}",
    r"\text{B} \text{: a cat}",
    "$B$",
    r"\text{ B }",
    r"\text{Answer: B}",
    "(B)Paris",
    r"\text{(B)Paris}",
    "B)Paris",
    "B (Paris)",
    r"\text{B (Paris)}",
    "B [Paris]",
    "B, Paris",
    "B\uff1aParis",
    "B\uff0cParis",
    r"\text{B }\text{Paris}",
    r"\text{B}\text{ Paris}",
    "`B`",
    '"B"',
    "'B'",
    "\u201cB\u201d",
    "\uff08B\uff09",
    "\uff22",
    "__B__",
    r"\left(B\right)",
    r"\left(\text{B}\right)",
    r"\rm B",
    r"{\bf B}",
    r"\displaystyle B",
    r"\color{red}{B}",
    r"\textcolor{red}{B}",
    r"\textcolor{blue}{\textbf{B: Paris}}",
    r"B: $\vec{A}$",
    "B. x^2",
    "B: Both A and C",
    "B. C++",
    "B: the A-type star",
    "B: Vitamin C",
    "B. Type A: blood",
    r"\textbf{(B)}\ \frac{A}{C}",
    "B. I",
    "B. X",
    "B, since A is wrong",
    "B (since A is wrong)",
]
NO_LETTERS = [
    "Because",
    "Bob. Paris",
    r"\text{Because it is}",
    "C: text",
    r"\text{E}",
    "B or C",
    "B, C",
    r"\text{B and C}",
    r"\text{B} or \text{C}",
    "(B)(C)",
    "BC",
    "A: B",
    "A. B",
    "2B",
    "B. No, wait: C",
    "$B$ and $C$",
    "$B$ or $C$",
    "`B` or `C`",
    "B\u3001C",
    "B\u548cC",
    "B\u6216C",
    r"B \lor C",
    r"B \cup C",
    r"B \to C",
    r"B \ne C",
    "B \u2192 C",
    "B \u222a C",
    "B=C",
    "B vs C",
    "B: x and C: y",
    "B: 5, C: 6",
    "B:5, C:6",
    "(B): 5, (C): 6",
    r"\text{B: 5 and C: 6}",
    "B : C = 2 : 3",
    "B:C",
    "B: C",
    "B. C",
    "B.C.",
    "B.C",
    "B.M.",
    "B (Paris) or C (Rome)",
    "B, Paris, C, Rome",
    "B (or C)",
    "B (wrong)",
    "B^2",
    "B^T",
    "B'",
    r"B^\circ",
    r"\text{B}^\circ",
    "B_1",
    "B_{12}",
    "B2",
    "B12",
    "B++",
    "B#",
    "B-tree",
    "B'Artagnan",
    "B\u2032",
    "\u00b0B",
]


@pytest.mark.parametrize("said", [*LABELLED, *NO_LETTERS])
def test_a_letter_may_carry_the_text_of_its_option(said):
    response = rf"So it is \boxed{{{said}}}."
    right = float(said in LABELLED)
    for reference in ("B", "(B)", r"\text{(B)}"):
        assert choice(response, reference)["score"] == right
        assert math_verify(response, reference)["score"] == right
        assert boxed(response, reference) == right
    if right:
        assert mmlu_pro(response, "B")["score"] == 1.0


@pytest.mark.parametrize("said", ["B: x and C: y", "B: 5, C: 6", "C: B", "B.C.", "B.C", "B : C"])
def test_mmlu_pro_takes_no_letter_of_several_labels(said):
    for letter in "BC":
        assert mmlu_pro(rf"So it is \boxed{{{said}}}", letter)["score"] == 0.0


def test_a_sentence_in_a_box_is_no_letter():
    for said in ("A cat", r"\text{A cat}", r"\mathrm{A cat}", "B cat"):
        for letter in "AB":
            response = rf"\boxed{{{said}}}"
            assert choice(response, letter)["score"] == math_verify(response, letter)["score"] == 0


@pytest.mark.parametrize(
    "response",
    [
        "B. Paris",
        "**B. A cat**",
        "(B) A cat",
        "B: A polygenic score",
        "I choose:\n\n**(B) A cat**",
        "The answer is: B. A cat",
        "Option B: A cat",
        r"The answer is $\boxed{\text{B. A cat}}$",
    ],
)
def test_mmlu_pro_reads_a_label_before_a_letter_that_stands_alone(response):
    assert mmlu_pro(response, "B")["score"] == 1.0
    assert mmlu_pro(response, "A")["score"] == 0.0


def test_contains_whole_words():
    assert contains("a red bluebird", "BLUE") == 0.0
    assert contains("Blue, red", ["blue", "green"]) == 1.0
    assert contains("Blue, red", ["blue", "green"], need="all") == 0.0
    assert contains("Blue, red", ["blue", "green"], need="share") == 0.5
    assert contains("Blue", "blue", ignore_case=False) == 0.0
    assert contains("it costs $5 (five).", "$5") == 1.0
    with pytest.raises(ValueError, match="empty target"):
        contains("a", " ")


def test_regex_match():
    assert regex_match("so: 12", pattern=r"^so: \d+$") == 1.0
    assert regex_match("and so: 12", pattern=r"so: \d+") == 1.0
    assert regex_match("and so: 12", pattern=r"so: \d+", whole=True) == 0.0
    assert regex_match("a\nb", "a.b") == 1.0
    with pytest.raises(InputError, match=r"pattern is none.*\("):
        regex_match("a", pattern="(")
    with pytest.raises(InputError, match="no pattern"):
        regex_match("a")


# -- form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, score, parts",
    [
        ("<think>a</think><answer>b</answer>", 1.0, (1, 1, 1)),
        (" <think>a\n</think>\n\n<answer>b</answer>\n", 1.0, (1, 1, 1)),
        ("<think>a</think><answer>b</answer> and more", 0.5, (1, 1, 1)),
        ("<answer>b</answer><think>a</think>", 0.5, (1, 1, 0)),
        ("<think>a<answer>b</answer></think>", 0.5, (1, 1, 0)),
        ("<think>a</think><answer>b", 0.25, (1, 0, 0)),
        ("<think>a</think><answer> </answer>", 0.25, (1, 0, 0)),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.25, (1, 0, 0)),
        ("</think>a<think><answer>b</answer>", 0.25, (0, 1, 0)),
        ("<think>a</think></think><answer>b</answer>", 0.25, (0, 1, 0)),
        ("plain", 0.0, (0, 0, 0)),
        ("", 0.0, (0, 0, 0)),
    ],
)
def test_tags_once_and_in_order(response, score, parts):
    found = format_tags(response, partial=0.5)
    assert found["score"] == score
    assert (found["tag/think"], found["tag/answer"], found["ordered"]) == parts
    assert format_tags(response)["score"] == float(score == 1.0)


def test_a_tag_that_the_prompt_opened_is_open():
    """As R1-like templates do; without that every response would have the wrong form."""
    rest = "b</think><answer>a</answer>"
    assert format_tags(rest)["score"] == 0.0
    assert format_tags(rest, "<|user|>?<|assistant|>\n<think>\n")["score"] == 1.0
    assert format_tags(f"<think>{rest}", "<|user|>?<|assistant|>\n")["score"] == 1.0
    assert format_tags(f"<think>{rest}", "<|user|>?<|assistant|><think>")["score"] == 0.0
    assert format_tags(rest, "Begin with <think>, please.")["score"] == 0.0


def test_tags_of_other_names_and_text_around_them():
    assert format_tags("so <a>x</a> then <b>y</b>.", tags=("a", "b"), only=False)["score"] == 1.0
    with pytest.raises(InputError, match="partial < 1"):
        format_tags("", partial=1.0)


SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "response, parsed, valid",
    [
        ('{"name": "A", "age": 3}', 1, 1),
        ('Sure:\n```json\n{"name": "A", "age": 3}\n```\nDone.', 1, 1),
        ('```\n{"name": 1}\n```\n```json\n{"name": "A", "age": 3}\n```', 1, 1),  # the last block
        ('I say {"name": "A", "age": 3} {', 1, 1),
        ('with {x} it is {"name": "A", "age": 3}', 1, 1),
        ('{"name": "A", "age": -1}', 1, 0),
        ('{"name": "A", "age": 3, "more": 1}', 1, 0),
        ('{"name": "A", "age": true}', 1, 0),
        ("[]", 1, 0),
        ('{"name": "A", "age": NaN}', 0, 0),
        ("{'name': 'A', 'age': 3}", 0, 0),
        ("no", 0, 0),
        ("[" * 100_000, 0, 0),
        ('{"name": "A", "age": ' + "9" * 10_000 + "}", 0, 0),
    ],
)
def test_json_against_a_schema(response, parsed, valid, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    want = {"score": 0.25 * parsed + 0.75 * valid, "parsed": parsed, "valid": valid}
    assert json_schema(response, schema=json.dumps(SCHEMA), parsed=0.25) == want
    assert json_schema(response, schema=str(tmp_path / "schema.json"), parsed=0.25) == want
    assert json_schema(response, {"schema": SCHEMA}, parsed=0.25) == want


def test_a_schema_that_is_none_is_an_error_and_nothing_is_fetched():
    for schema in ('{"type": "objet"}', "{", "no_such_file.json"):
        with pytest.raises(InputError, match="json_schema"):
            json_schema("{}", schema=schema)
    with pytest.raises(InputError, match="no schema"):
        json_schema("{}")
    asked = []

    class Schema(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

    with http.server.HTTPServer(("127.0.0.1", 0), Schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = {"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}
        with pytest.raises(Exception, match="schema.json"):
            json_schema("{}", schema=json.dumps(remote))
        server.shutdown()
    assert asked == []


def test_json_against_a_reference():
    want = '{"a": 1, "b": {"c": [2, "x"]}}'
    assert json_match('{"b": {"c": [2.0, "x"]}, "a": 1}', want)["score"] == 1.0
    half = json_match('{"a": 1, "b": {"c": [3, "x"]}}', want)
    assert half["score"] == 2 / 4 and half["recall"] == half["precision"] == 2 / 3
    assert half["exact"] == 0.0 and half["parsed"] == 1.0
    everything = json.dumps({"a": 1, "b": {"c": [2, "x"]}} | {str(i): i for i in range(97)})
    assert json_match(everything, want)["score"] == 3 / 100
    assert json_match(everything, want, partial=False)["score"] == 0.0
    assert json_match('{"a": true}', '{"a": 1}')["score"] == 0.0
    assert json_match('{"a": "1"}', '{"a": 1}')["score"] == 0.0
    assert json_match('{"a": []}', '{"a": {}}')["score"] == 0.0
    assert json_match("no", want) == dict.fromkeys(half, 0.0)
    for twice in ('{"a": 2, "a": 1}', '[{"a": 2, "a": 1}]', '{"x": NaN, "y": {"a": 1}}'):
        assert json_match(twice, '{"a": 1}')["parsed"] == 0.0
    with pytest.raises(ValueError):
        json_match("{}", "{not json")


def test_json_that_would_take_gigabytes_to_compare_scores_nothing():
    deep, wide = "[" * 900 + "1," * 100_000 + "1" + "]" * 900, "[" + "1," * 150_000 + "1]"
    deeper = '{"a":' * 400 + "[" + "1," * 50_000 + "1]" + "}" * 400
    tracemalloc.start()
    for bomb in (deep, wide, deeper, f"[{wide},{wide}]"):
        assert json_match(bomb, '{"a": 1}')["score"] == 0.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6, peak  # what the values themselves take
    many = json.dumps({str(i): i for i in range(3000)})
    assert json_match(many, many)["exact"] == 1.0
    nested = "[" * 150 + "1" + "]" * 150
    assert json_match(nested, nested)["exact"] == 1.0


def test_unique_items_of_any_kind_in_linear_time():
    schema = '{"type": "array", "uniqueItems": true}'
    items = ",".join(f'{{"a": {i}}}' for i in range(20_000))
    assert json_schema(f"[{items}]", schema=schema)["valid"] == 1.0
    assert json_schema(f'[{items}, 1, true, "1", [1]]', schema=schema)["valid"] == 1.0
    assert json_schema(f'[{items}, {{"a": 7.0}}]', schema=schema)["valid"] == 0.0


# -- style --------------------------------------------------------------------------------------


def test_language_is_the_share_of_letters_of_the_scripts():
    assert language("abc déf") == 1.0
    assert language("abc где") == 0.5
    assert language("\u4f60\u597d ok", scripts=("Han",)) == 0.5
    assert language("\u4f60\u597d ok", scripts=("zh", "en")) == 1.0
    assert language("\u3053\u3093 \u6f22\u5b57 \u30ab", scripts=("ja",)) == 1.0
    assert language("\\frac{1}{2} <think>\u4f60</think>", scripts=("Han",)) == 1.0
    assert language("12 + 3") == language("") == 0.0
    assert language("abc где", at_least=0.5) == 1.0
    assert language("abc где", at_least=0.6) == 0.0
    with pytest.raises(InputError, match="'Klingon'.*Cyrillic"):
        language("a", scripts=("Klingon",))


def test_repetition_is_the_share_of_repeated_ngrams():
    assert repetition("a b c d e", ngram=2) == 0.0
    assert repetition("a b a b a b", ngram=2) == -(1 - 2 / 5)
    assert repetition("A b a B a b", ngram=2, max_penalty=0.5) == -0.5 * (1 - 2 / 5)
    assert repetition("a b", ngram=3) == repetition("", ngram=3) == 0.0
    assert repetition("aaaa", ngram=2) == 0.0  # one word
    assert repetition("aa\naa", ngram=2, unit="character") == -(1 - 1 / 3)


def test_looping_finds_the_loop_at_the_end():
    loop = looping("I know that. " + "abc" * 40)
    assert loop["loop_characters"] == 120 and loop["score"] == -120 / 133
    assert looping("a" * 49)["score"] == 0.0
    assert looping("a" * 50)["score"] == -1.0
    assert looping("a" * 60 + " and so the answer is 5")["score"] == 0.0  # it got out of it
    assert looping("x = 1\n" * 30 + "x = ", max_penalty=0.5)["loop_share"] == 1.0
    sentence = "the quick brown fox jumps over the lazy dog and runs. "
    assert looping(sentence * 4)["score"] == 0.0 and looping(sentence * 5)["loop_share"] > 0.99
    assert looping("")["score"] == 0.0
    assert looping("ab" * 50_000)["loop_characters"] == 20_000


# -- length -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo.soft_overlong", "dapo.soft_overlong_small"])
def test_soft_overlong_as_a_reward_gives_the_worked_examples(name):
    example = worked_example(name)
    p = example["params"]
    options = {"max_tokens": p["L_max"], "cache_tokens": p["L_cache"]}
    found = [soft_overlong(n, **options) for n in example["inputs"]["length"]]
    assert found == example["outputs"]["reward"]
    assert soft_overlong(p["L_max"], **options, penalty=0.5) == -0.5
    with pytest.raises(InputError, match="cache_tokens"):
        soft_overlong(3, max_tokens=4, cache_tokens=5)
    hard = {"max_tokens": 4, "cache_tokens": 0, "penalty": 2.0}  # no cache: a hard limit
    assert [soft_overlong(n, **hard) for n in (0, 4, 5, 50)] == [0, 0, -2, -2]


@pytest.mark.parametrize("n, share", [(1000, 0.5), (1100, 0.35), (600, 1.0), (4000, 0.0)])
def test_the_released_form_of_l1_max(n, share):
    """(clip(alpha (target - n), -1, 1) + 1) / 2, by hand for alpha = 0.003 and a target of 1000."""
    options = {"alpha": 0.003, "form": "released", "response": "a", "ground_truth": "a"}
    found = l1_max(n, {"target_tokens": 1000}, **options)
    assert found["score"] == pytest.approx(share)
    wrong = l1_max(n, {"target_tokens": 1000}, **{**options, "response": "b"})
    assert wrong["score"] == 0.0


@pytest.mark.parametrize(
    "said",
    ["5½", "5²", "5k", "5 dozen", "5 squared", "5 half", "5 maybe", "5?", "5 thousand", "5 wrong"],
)
def test_what_makes_another_number_of_it_is_not_paid(said):
    assert gsm8k(f"#### {said}", "5") == 0
    number, _, word = said.partition(" ")
    if word and word != "maybe":
        assert boxed(rf"\boxed{{{number}\text{{ {word}}}}}", "5") == 0
