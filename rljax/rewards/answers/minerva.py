r"""DAPO's answer rule: the text after `Answer:`, in the normal form of Minerva, as a string.

This is verl's `math_dapo`, for parity; `math_answers.py` also accepts equal answers that are
written differently. Minerva: arXiv 2206.14858, appendix D; DAPO: arXiv 2503.14476.
"""

import re

from rljax.contracts import contract
from rljax.rewards.answers.find import reference_answer
from rljax.rewards.answers.normalise import rewritten, steps
from rljax.rewards.text.rules import answer_unless_whole
from rljax.rewards.text.targets import targets

_WINDOW = 300  # characters of the response that are read; of a strict box the last 100
_STRICT_WINDOW = 100
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# In this order. Removed words are units and fillers of MATH's references.
_REPLACED = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]
_REMOVED = [
    *"square ways integers dollars mph inches hours km units".split(),
    "\\ldots",
    *"sue points feet minutes digits cents degrees cm gm pounds meters meals edges".split(),
    *"students childrentickets multiples".split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
]
_REWRITTEN = steps(
    (r"(?m)^.*?\$(.*?)\$.*$", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def minerva_form(answer: str) -> str:
    """The normal form of an answer: what follows its last "=", without units, text and dollars."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    answer = rewritten(answer, _REWRITTEN).replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def dapo_answer(response: str, *, strict_box_verify: bool = False) -> str | None:
    r"""The answer that `dapo` compares, in normal form, or as it stands in a strict box; None
    without one.

    After the last `Answer:` of the last 300 characters, else in their last `\boxed{}`; a strict box
    stands in the last 100.
    """
    tail = response[-_WINDOW:]
    if strict_box_verify:
        return _braced(tail[-_STRICT_WINDOW:])
    matches = _ANSWER.findall(tail)
    answer = matches[-1] if matches else _braced(tail)
    return None if answer is None else minerva_form(answer)


def _braced(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; every brace counts, as in the reference."""
    start = text.rfind("\\boxed{")
    depth = 0
    for brace in re.finditer("[{}]", text[start:]) if start >= 0 else ():
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


@contract(safe=True, reads=answer_unless_whole, on_timeout={"score": -1.0, "acc": 0.0})
def dapo(
    response: str,
    ground_truth: str | list | dict,
    *,
    strict_box_verify: bool = False,
    whole_response: bool = False,
) -> dict:
    r"""1 if the answer equals a target as text in Minerva's normal form, else -1.

    `strict_box_verify`: the text of the last box equals a target as they stand. Parts: acc
    (0 or 1), extracted. As verl's math_dapo, but for `pred`, which is text: `dapo_answer`. It stays
    as published, with what that pays: `7 = 5`, `$5$ or $6$`, `not $5$` and `5,0` are 5; but for a
    target that is a whole solution, which is read as math_verify() reads it, and for the reasoning,
    in which the published rule also looks: `whole_response=True`.
    """
    accepted = targets(ground_truth)
    # The published rule takes no mark off a reference but a box, and of a strict one none.
    accepted += [reference_answer(target) for target in accepted]
    if not strict_box_verify:
        accepted = [minerva_form(target) for target in accepted]
    answer = dapo_answer(response, strict_box_verify=strict_box_verify)
    right = answer is not None and answer in accepted
    return {
        "score": 1.0 if right else -1.0,
        "acc": float(right),
        "extracted": float(answer is not None),
    }
