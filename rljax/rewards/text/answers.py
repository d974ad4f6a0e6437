"""Rewards for text answers: exact match and token F1 with several targets, choices, substrings,
patterns.

A ground truth with several targets is a list of texts or {"target": [...]}, or one of these as JSON
text, which is how a row of data holds it.
"""

import functools
import json
import re
from collections import Counter
from typing import Literal

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.answers.find import find, tagged
from rljax.rewards.answers.letters import is_labelled, labelled_letter, letter_of
from rljax.rewards.answers.normalise import WIDE, integer_of, squad_form
from rljax.rewards.text.rules import answer_unless_whole, check_text

_MAX_TAGS = 10  # more answers than that are no answer


def targets(ground_truth: object) -> list[str]:
    """The accepted answers of "a", ["a", "b"] or {"target": ...}, the last two also as JSON text.
    Raises ValueError if there is none, and TypeError for an answer that is no text."""
    if isinstance(ground_truth, str):
        ground_truth = _from_json(ground_truth)
    if isinstance(ground_truth, dict):
        if "target" not in ground_truth:
            raise ValueError(f"ground_truth has no 'target': {sorted(map(str, ground_truth))}")
        ground_truth = ground_truth["target"]
    if hasattr(ground_truth, "tolist"):  # an array of parquet
        ground_truth = ground_truth.tolist()
    texts = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not isinstance(texts, list | tuple):
        check_text(texts)
    if not texts:
        raise ValueError("ground_truth has no target")
    for target in texts:
        check_text(target)
    return list(texts)


def _from_json(text: str) -> object:
    """The value of a text that is JSON of several targets, else the text: "[1]" is a target."""
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    several = value.get("target") if isinstance(value, dict) else value
    several = [several] if isinstance(several, str) else several
    texts = isinstance(several, list) and all(isinstance(one, str) for one in several)
    return value if texts and several else text


@contract(safe=True, probed=True, reads=answer_unless_whole, on_timeout=0.0)
def qa_exact_match(
    response: str,
    ground_truth: str | list | dict,
    *,
    tag: PlainText = "answer",
    score: float = 1.0,
    format_score: float = 0.0,
    whole_response: bool = False,
) -> float:
    """`score` if the last <answer>...</answer> equals a target in SQuAD's normal form (Search-R1,
    arXiv 2503.09516), `format_score` if another answer stands there, 0 if none.

    A quarter of the score if the response has more than 10 such tags. `tag=""`: all of its text.
    `whole_response=True` also looks into the reasoning, as the published rule does.
    """
    accepted = {squad_form(target) for target in targets(ground_truth)}
    answer = tagged(response, tag)
    if answer is None:
        return 0.0
    if squad_form(answer) not in accepted:
        return float(format_score)
    many = tag and max(response.count(f"<{tag}>"), response.count(f"</{tag}>")) > _MAX_TAGS
    return score / 4 if many else float(score)


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def token_f1(response: str, ground_truth: str | list | dict, *, tag: PlainText = "") -> dict:
    """SQuAD's F1, the best of the targets: 2 p r / (p + r) over words in normal form.

    p = shared words / words of the answer, r = shared words / words of the target. `tag` as in
    `qa_exact_match`. Parts: precision, recall, exact.
    """
    accepted = [squad_form(target).split() for target in targets(ground_truth)]
    answer = tagged(response, tag)
    ours = None if answer is None else squad_form(answer).split()
    best = {"score": 0.0, "precision": 0.0, "recall": 0.0, "exact": 0.0}
    for words in accepted if ours is not None else ():
        score = _f1(ours, words)
        best = max(best, score, key=lambda parts: parts["score"])
    return best


def _f1(ours: list[str], theirs: list[str]) -> dict:
    shared = (Counter(ours) & Counter(theirs)).total()
    exact = float(ours == theirs)
    if not ours or not theirs:
        return {"score": exact, "precision": exact, "recall": exact, "exact": exact}
    precision, recall = shared / len(ours), shared / len(theirs)
    f1 = 2 * precision * recall / (precision + recall) if shared else 0.0
    return {"score": f1, "precision": precision, "recall": recall, "exact": exact}


# Quotes and the end of a line may part it from a letter, unlike from a formula or a number.
_ANSWER_IS = re.compile(r"\banswer\b\W{0,4}(?:is|:|=)", re.IGNORECASE)


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def choice(response: str, ground_truth: str, *, letters: PlainText = "ABCD") -> dict:
    r"""1 if the chosen letter is the reference's, else 0. Part: extracted.

    The letter stands in the last `\boxed{}`, else in the last <answer>, else after the last "answer
    is" or "answer:", else the response begins with it: `B`, `(B)`, `B. Paris`. Two are none. Raises
    ValueError for a ground truth that is none of the letters.
    """
    check_text(ground_truth)
    reference = letter_of(ground_truth, letters)
    if reference is None:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is none of the letters {letters!r}")
    chosen = _chosen(response, letters)
    return {"score": float(chosen == reference), "extracted": float(chosen is not None)}


def _chosen(response: str, letters: str) -> str | None:
    response = response.translate(WIDE)
    if "\\boxed" in response:
        return _stated(find(response, "boxed") or "", letters)
    if "<answer>" in response:
        return _stated(tagged(response, "answer") or "", letters)
    parts = _ANSWER_IS.split(response[-2000:])
    return (
        letter_of(parts[-1][:200], letters, after_cue=True)
        if len(parts) > 1
        else letter_of(response[:2000], letters)
    )


def _stated(text: str, letters: str) -> str | None:
    """The letter of a marked answer, which may say `the answer is` itself."""
    return letter_of(_ANSWER_IS.split(text)[-1], letters)


_MMLU_PRO_IS = re.compile(r"answer is \(?([A-J])\)?")
_MMLU_PRO_MARKED = re.compile(r"(?=[aA]nswer:\s*([A-J]))")  # one may begin within another's letter
_MMLU_PRO_LETTERS = "ABCDEFGHIJ"
_MMLU_PRO_ALONE = re.compile(r"\b(?<![A-Z]\.)[A-J]\b(?!\.[A-Z]\b)")  # in B.C. none does


@contract(safe=True, probed=True, reads=answer_unless_whole, on_timeout=0.0)
def mmlu_pro(response: str, ground_truth: str, *, whole_response: bool = False) -> dict:
    """1 if the letter A to J that MMLU-Pro's evaluation extracts (arXiv 2406.01574) is the
    reference's, else 0. Part: extracted.

    The letter stands behind the first "answer is", else behind "Answer:", else it is the box's or
    labels the last line, `B. Paris`, else it is the last one that stands alone. The published
    evaluation knows no labels, and guesses where there is no letter; here that is wrong. It also
    looks into the reasoning: `whole_response=True`. Raises ValueError for a ground truth that is
    not a letter A to J.
    """
    check_text(ground_truth)
    reference = ground_truth.strip().strip("().").upper()
    if not re.fullmatch("[A-J]", reference):
        raise ValueError(f"ground_truth {ground_truth!r:.80} is none of the letters A to J")
    letter = _mmlu_pro_letter(response)
    return {"score": float(letter == reference), "extracted": float(letter is not None)}


def _mmlu_pro_letter(text: str) -> str | None:
    if match := _MMLU_PRO_IS.search(text):
        return match[1]
    marked = list(_MMLU_PRO_MARKED.finditer(text))
    if marked:  # the last one of the first line that has any
        end = text.find("\n", marked[0].start())
        return [m for m in marked if end < 0 or m.start() < end][-1][1]
    last = find(text, "boxed") or (text.strip().splitlines() or [""])[-1]
    last = _ANSWER_IS.split(last)[-1]
    if (letter := labelled_letter(last)) and letter in _MMLU_PRO_LETTERS:
        return letter
    if letter is None and is_labelled(last):  # `B: 5, C: 6` chooses none
        return None
    alone = _MMLU_PRO_ALONE.findall(text)
    return alone[-1] if alone else None


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def integer_answer(response: str, ground_truth: str, *, low: int = 0, high: int = 999) -> dict:
    r"""1 if the answer is the reference's integer, else 0. Part: extracted, whether the answer is
    an integer from `low` to `high` at all (AIME: 0 to 999, and 025 is 25).

    The answer stands where math_verify() looks for it: in the last <answer>, if there is one; in
    the last `\boxed{}`, else behind the last `####`, else after "answer is" or last. Raises
    ValueError for a ground truth that is no such integer.
    """
    check_text(ground_truth)
    reference = integer_of(ground_truth, low, high)
    if reference is None:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is no integer from {low} to {high}")
    answer = integer_of(find(response, "any") or "", low, high)
    return {"score": float(answer == reference), "extracted": float(answer is not None)}


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def contains(
    response: str,
    ground_truth: str | list | dict,
    *,
    need: Literal["any", "all", "share"] = "any",
    ignore_case: bool = True,
) -> float:
    """1 if any (all) of the targets stands in the response as whole words, else 0; or the share.

    Raises ValueError for an empty target.
    """
    flags = re.IGNORECASE if ignore_case else 0
    hits = []
    for target in targets(ground_truth):
        if not target.strip():
            raise ValueError("ground_truth holds an empty target, which every response contains")
        pattern = rf"(?<!\w){re.escape(target.strip())}(?!\w)"
        hits.append(re.search(pattern, response, flags) is not None)
    return {"any": float(any(hits)), "all": float(all(hits))}.get(need, sum(hits) / len(hits))


@functools.cache
def _pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise InputError(
            "regex_match: the pattern is none",
            value=text,
            rule=str(error),
            fix=r"correct it; brackets and stars that mean themselves are written \( and \*",
        ) from None


@contract(
    safe=True,
    probed=True,
    reads=lambda o: "response" if o["pattern"] else "answer",
    on_timeout=0.0,
    truth="specification",
    on_device="rljax.rewards.on_device.forms.regex_match",
)
def regex_match(
    response: str, ground_truth: str = "", *, pattern: PlainText = "", whole: bool = False
) -> float:
    """1 if the pattern is found in the response (or `whole`: is all of it, stripped), else 0.

    Without the option the ground truth is the pattern, of an answer: the reasoning is not read.
    `.` also matches a line's end. Raises InputError for a pattern that cannot be compiled, or if
    there is none.
    """
    check_text(ground_truth)
    if not (pattern or ground_truth):
        raise InputError("regex_match has no pattern", fix="regex_match(pattern='...')")
    compiled = _pattern(pattern or ground_truth)
    match = compiled.fullmatch(response.strip()) if whole else compiled.search(response)
    return float(match is not None)
