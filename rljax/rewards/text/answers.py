"""Rewards for text answers: exact match and token F1 with several targets, choices, substrings,
patterns. Several targets of a ground truth are those of `targets`.
"""

import functools
import re
from collections import Counter
from typing import Literal

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.answers.find import find, marked_answer, reference_answer, tagged
from rljax.rewards.answers.letters import is_labelled, labelled_letter, letter_of
from rljax.rewards.answers.normalise import WIDE, integer_of, squad_form
from rljax.rewards.text.rules import answer_unless_whole
from rljax.rewards.text.targets import targets

_MAX_TAGS = 10  # more answers than that are no answer


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
    accepted = {squad_form(target) for target in _in_tag(targets(ground_truth), tag)}
    answer = tagged(response, tag)
    if answer is None:
        return 0.0
    if squad_form(answer) not in accepted:
        return float(format_score)
    too_many = tag and max(response.count(f"<{tag}>"), response.count(f"</{tag}>")) > _MAX_TAGS
    return score / 4 if too_many else float(score)


def _in_tag(accepted: list[str], tag: str) -> list[str]:
    """Returns the targets, and the answers that targets hold in the tag, in a
    box or behind a mark."""
    inside = (marked_answer(target, tag) for target in accepted if tag)
    return [*accepted, *filter(None, inside)]


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def token_f1(response: str, ground_truth: str | list | dict, *, tag: PlainText = "") -> dict:
    """SQuAD's F1, the best of the targets: 2 p r / (p + r) over words in normal form.

    p = shared words / words of the answer, r = shared words / words of the target. `tag` as in
    `qa_exact_match`. Parts: precision, recall, exact.
    """
    accepted = [squad_form(target).split() for target in _in_tag(targets(ground_truth), tag)]
    answer = tagged(response, tag)
    answer_words = None if answer is None else squad_form(answer).split()
    best = {"score": 0.0, "precision": 0.0, "recall": 0.0, "exact": 0.0}
    for target_words in accepted if answer_words is not None else ():
        score = _f1(answer_words, target_words)
        best = max(best, score, key=lambda parts: parts["score"])
    return best


def _f1(answer_words: list[str], target_words: list[str]) -> dict:
    shared = (Counter(answer_words) & Counter(target_words)).total()
    exact = float(answer_words == target_words)
    if not answer_words or not target_words:
        return {"score": exact, "precision": exact, "recall": exact, "exact": exact}
    precision, recall = shared / len(answer_words), shared / len(target_words)
    f1 = 2 * precision * recall / (precision + recall) if shared else 0.0
    return {"score": f1, "precision": precision, "recall": recall, "exact": exact}


# Quotes and the end of a line may part it from a letter, unlike from a formula or a number.
_ANSWER_IS = re.compile(r"\banswer\b\W{0,4}(?:is|:|=)", re.IGNORECASE)


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def choice(response: str, ground_truth: str | list | dict, *, letters: PlainText = "ABCD") -> dict:
    r"""1 if the chosen letter is a target, else 0. Part: extracted.

    The letter stands in the last `\boxed{}`, else in the last <answer>, else after the last "answer
    is" or "answer:", else the response begins with it: `B`, `(B)`, `B. Paris`. Two are none. Raises
    ValueError for a ground truth that is none of the letters.
    """
    references = [letter_of(target, letters) for target in targets(ground_truth)]
    if None in references:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is none of the letters {letters!r}")
    chosen = _chosen(response, letters)
    return {"score": float(chosen in references), "extracted": float(chosen is not None)}


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
    """Returns the letter of a marked answer, which may say `the answer is` itself."""
    return letter_of(_ANSWER_IS.split(text)[-1], letters)


_MMLU_PRO_IS = re.compile(r"answer is \(?([A-J])\)?")
_MMLU_PRO_MARKED = re.compile(r"(?=[aA]nswer:\s*([A-J]))")  # one may begin within another's letter
_MMLU_PRO_LETTERS = "ABCDEFGHIJ"
_MMLU_PRO_ALONE = re.compile(r"\b(?<![A-Z]\.)[A-J]\b(?!\.[A-Z]\b)")  # in B.C. none does


@contract(safe=True, probed=True, reads=answer_unless_whole, on_timeout=0.0)
def mmlu_pro(
    response: str, ground_truth: str | list | dict, *, whole_response: bool = False
) -> dict:
    """1 if the letter A to J that MMLU-Pro's evaluation extracts (arXiv 2406.01574) is a target,
    else 0. Part: extracted.

    The letter stands behind the first "answer is", else behind "Answer:", else it is the box's or
    labels the last line, `B. Paris`, else it is the last one that stands alone. The published
    evaluation knows no labels, and guesses where there is no letter; here that is wrong. It also
    looks into the reasoning: `whole_response=True`. Raises ValueError for a ground truth that is
    not a letter A to J.
    """
    references = [target.strip().strip("().").upper() for target in targets(ground_truth)]
    if not all(re.fullmatch("[A-J]", reference) for reference in references):
        raise ValueError(f"ground_truth {ground_truth!r:.80} is none of the letters A to J")
    letter = _mmlu_pro_letter(response)
    return {"score": float(letter in references), "extracted": float(letter is not None)}


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
    lone_letters = _MMLU_PRO_ALONE.findall(text)
    return lone_letters[-1] if lone_letters else None


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def integer_answer(
    response: str, ground_truth: str | list | dict, *, low: int = 0, high: int = 999
) -> dict:
    r"""1 if the answer is a target's integer, else 0. Part: extracted, whether the answer is
    an integer from `low` to `high` at all (AIME: 0 to 999, and 025 is 25).

    The answer stands where math_verify() looks for it: in the last <answer>, if there is one; in
    the last `\boxed{}`, else behind the last `####`, else after "answer is" or last. Raises
    ValueError for a ground truth that is no such integer.
    """
    references = [
        integer_of(reference_answer(target), low, high) for target in targets(ground_truth)
    ]
    if None in references:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is no integer from {low} to {high}")
    answer = integer_of(find(response, "any") or "", low, high)
    return {"score": float(answer in references), "extracted": float(answer is not None)}


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
    response: str,
    ground_truth: str | list | dict = "",
    *,
    pattern: PlainText = "",
    whole: bool = False,
) -> float:
    """1 if the pattern is found in the response (or `whole`: is all of it, stripped), else 0.

    Without the option each target is a pattern, of an answer: the reasoning is not read.
    `.` also matches a line's end. Raises InputError for a pattern that cannot be compiled, or if
    there is none.
    """
    patterns = [pattern] if pattern else targets(ground_truth)
    if not all(patterns):
        raise InputError("regex_match has no pattern", fix="regex_match(pattern='...')")
    compiled = [_pattern(source) for source in patterns]
    text = response.strip() if whole else response
    return float(any(regex.fullmatch(text) if whole else regex.search(text) for regex in compiled))
