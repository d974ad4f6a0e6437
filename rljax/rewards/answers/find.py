r"""Finds the answer in a response: in a box, behind a mark, in a tag, at the end.

Pure functions of strings, linear in their length. A published rule that finds the answer in its own
way is beside its reward: `minerva.dapo_answer`, and in `text` the strict and flexible gsm8k and
mmlu_pro.
"""

import re
from typing import Literal

from rljax.rewards.answers.normalise import NUMBER, REMARK, TAKEN_BACK, group_end, is_text

_WINDOW = 2000  # an answer that is not marked is looked for in the last characters only
_MOST_WORDS = 3  # words of an answer; a tag with more of them holds a sentence

Place = Literal["any", "boxed", "marked", "last"]


def find(response: str, where: Place) -> str | None:
    """The text of the answer; None if `where` holds none. The places are those of `math_verify`."""
    response = response.replace("\\fbox", "\\boxed")
    read_last = _last_answer
    if where == "any":
        if (content := in_tag(response)) is not None:
            response, read_last = content, _tag_answer
        where = "boxed" if "\\boxed" in response else "marked" if "####" in response else "last"
    if where == "boxed":
        return last_boxed(response)
    return marked_line(response) if where == "marked" else read_last(response[-_WINDOW:])


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or brace-free `\boxed ...$`; None if there is
    none."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$", 1)[0] if text.startswith(" ", start + len("\\boxed")) else None
    end = group_end(rest, 0)
    return None if end is None else rest[1 : end - 1]


def marked_line(text: str) -> str | None:
    """The first line of text behind the last `####`; None if there is none."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if mark else None


def tagged(text: str, tag: str = "answer", *, closed: bool = True) -> str | None:
    """The content of the last <tag>...</tag>, stripped; the whole text if the tag is empty.

    `closed=False`: what follows the last <tag>, up to </tag> or the end.
    """
    if not tag:
        return text.strip()
    begin, end = f"<{tag}>", f"</{tag}>"
    if not closed:
        _, mark, rest = text.rpartition(begin)
        return rest.partition(end)[0].strip() if mark else None
    content, position = None, text.find(begin)
    # A loop, not a pattern: `.*?` takes quadratic time on many openings without an end.
    while position >= 0:
        start, position = position + len(begin), text.find(end, position)
        if position >= 0:
            content, position = text[start:position], text.find(begin, position)
    return None if content is None else content.strip()


def answer_text(response: str) -> str:
    """The text behind the last <answer>, up to </answer> or the end; without one, all of it."""
    answer = tagged(response, closed=False)
    return response.strip() if answer is None else answer


def in_tag(response: str) -> str | None:
    """Returns the answer in the last <answer>...</answer>; if no tag is closed, the answer behind
    the last <answer>, up to the end; None without a tag."""
    content = tagged(response)
    if content is None:
        return tagged(response, closed=False)
    return answer_text(content)  # an opening within: the answer is behind it


_ANSWER_IS = re.compile(r"\banswer\b[ \t*_]{0,9}(?:is|was|:|=)[ \t*_:]{0,9}", re.IGNORECASE)
_INSIDE = r"(?:[^$\\]|\\.){1,1000}+"  # content between dollars; `\$` belongs to an amount
_DISPLAY = (
    rf"\$\$({_INSIDE})\$\$|(?<!\\)\\\[((?:[^\\]|\\(?!\])){{1,1000}})\\\]"
    r"|\\begin\{(?:equation|displaymath)\*?\}((?:[^\\]|\\(?!end\{)){1,1000})\\end\{"
    r"(?:equation|displaymath)\*?\}"
)
_FORMULA = re.compile(
    rf"{_DISPLAY}|(?<![\\$0-9])\$((?:[^$\\\n]|\\[^\n]){{1,1000}}+)\$(?![0-9])"
    r"|\\\(((?:[^\\]|\\(?!\))){1,1000})\\\)",
    re.DOTALL,
)
# Words that lead from "answer is" to a formula on lines of its own.
_LEADS = re.compile(
    r"(?:[^0-9A-Z\\$\n]{0,99}:[\s*_]{1,9}|(?:(?:given|expressed|written|by|as|in|the|follows"
    r"|following|form|then|thus|therefore|hence|so|simply|just|exactly|equal|to)\b[\s,*_]{1,9}){1,9})"
    rf"(?={_DISPLAY})",
    re.DOTALL,
)
_NUMBER_WITH_PERCENT = re.compile(rf"(?<![A-Za-z0-9.]){NUMBER}[ ]?(?:\\?%)?")
# The stop of a sentence, unless a digit follows as in 0.5, or a clause that gives a reason.
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|,?\s(?:because|since|as shown|which)\b", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"\banswer (?:cannot|can not|can't|could not|isn't|is not|must not)\b", re.IGNORECASE
)
_WORD = re.compile(r"[A-Za-z]{2,}")
_LABEL = re.compile(r"[A-Za-z][A-Za-z ]{1,29}:\s{1,9}(?=\\?[-+$]{0,2}[0-9])")  # `Total: 5`
_UNSURE = re.compile(r"\b(?:or|either|neither|nor|not|maybe|perhaps)\b|n't\b", re.IGNORECASE)


_MARKS = ("<answer>", "\\boxed", "\\fbox", "####")
_MAX_CHARACTERS = 200  # characters of a text that is an answer
_COMMAND = re.compile(r"\\[A-Za-z]+\*?(?:\s?\{[A-Za-z*]{1,20}\})?")  # \begin{cases}


def reference_answer(ground_truth: str) -> str:
    """The answer of a reference, which may be a whole solution with a tag, a box, a mark or "the
    answer is", or a formula between dollars; another text is the answer itself. Raises ValueError
    for a solution that does not say which part of it is the answer."""
    text = ground_truth
    if any(mark in text for mark in _MARKS) or _ANSWER_IS.search(REMARK.sub(" ", text)):
        text = find(text, "any") or ""
        if not text.strip():
            raise ValueError(f"ground_truth {ground_truth!r:.80} is empty behind its mark")
    elif _is_prose(text):
        # A wrong column, say: no answer would ever equal it.
        raise ValueError(f"ground_truth {ground_truth!r:.80} is a text, not an answer")
    formula = _FORMULA.fullmatch(text.strip())
    return (_content(formula) if formula else text).strip()


def _is_prose(text: str) -> bool:
    """Returns whether a text without a mark is long or of several lines, and in words."""
    text = text.strip()
    if len(text) <= _MAX_CHARACTERS and "\n" not in text:
        return False
    words = _COMMAND.sub(" ", REMARK.sub(" ", _FORMULA.sub(" ", text[:_WINDOW])))
    sentence = len(_WORD.findall(words)) > _MOST_WORDS
    return sentence or len(text) > _MAX_CHARACTERS and is_text(text)


def marked_answer(text: str, tag: str = "answer") -> str | None:
    """The content of the last <tag>...</tag> of a text, or of the box in it; else of its last box,
    else the line behind its last ####; None without a mark."""
    content = tagged(text, tag)
    inner = last_boxed(text if content is None else content)
    return inner or content or marked_line(text)


def _tag_answer(content: str) -> str | None:
    """Returns the answer that a tag holds: its text as it stands, like that of a box; if it is a
    sentence, the answer that would be found in it without a tag."""
    content = content.strip().strip("`").strip()
    label = _LABEL.match(content)
    content = content[label.end() :] if label else content
    formulas = list(_FORMULA.finditer(content))
    words = _FORMULA.sub(" ", content)
    sentence = "\\" not in words and len(_WORD.findall(words)) > _MOST_WORDS
    if _ANSWER_IS.search(words) or sentence and not _UNSURE.search(words):
        return _last_answer(content) or content
    if len(formulas) == 1 and not (TAKEN_BACK.search(words) or re.search("[0-9]", words)):
        return _content(formulas[0])
    return content or None


def _last_answer(text: str) -> str | None:
    """Returns the answer after the last "answer is" or "answer:", else the last formula,
    else the last number."""
    matches = list(_ANSWER_IS.finditer(text))
    if matches:
        rest = _sentence(text[matches[-1].end() :].lstrip(" \t\n*_:`"))
        formulas = list(_FORMULA.finditer(rest))
        if len(formulas) == 1:
            return _content(formulas[0])
        return rest.strip(" *_$.`") or None
    if _NO_ANSWER.search(text):
        return None
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return _content(formulas[-1])
    numbers = _NUMBER_WITH_PERCENT.findall(text)
    return numbers[-1] if numbers else None


def _sentence(text: str) -> str:
    """The first sentence, which ends with its line; a formula in it may stand on several lines."""
    lead = _LEADS.match(text)
    text = text[lead.end() :] if lead else text
    end = 0  # end of the formulas so far
    for formula in _FORMULA.finditer(text):
        if "\n" in text[end : formula.start()]:
            break
        end = formula.end()
    line = text[:end] + text[end:].split("\n", 1)[0]
    line = line.strip().strip("*_")
    masked = _FORMULA.sub(lambda formula: "0" * len(formula[0]), line)
    stop = _SENTENCE_END.search(masked)
    return line[: stop.start()] if stop else line


def _content(match: re.Match) -> str:
    return next(group for group in match.groups() if group is not None)
