"""Reasoning and answer of a response: `answer_of` cuts the reasoning, by the families' marks.

The one function by which rewards, extractors of answers and maj@k tell the answer from the
reasoning; a function of a response asks for it by its contract, reads="answer" (rljax.contracts).
Pure functions of strings, linear in their length: a response is untrusted.
"""

import bisect
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

_TAGS = ("think", "thinking", "thought", "reasoning", "seed:think", "longcat_think")
_PAIRS = (
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
# What opens the reasoning of a family, and what ends it.
MARKS = (*((f"<{tag}>", f"</{tag}>") for tag in _TAGS), *_PAIRS)
_WORD_END = {True: r"\b", False: ""}  # behind a mark that ends with a letter
_MARK = re.compile(
    rf"<(?P<ends>/?)(?P<tag>(?i:{'|'.join(_TAGS)}))>|"
    + "|".join(
        rf"(?P<o{i}>{re.escape(begin)}{_WORD_END[begin[-1].isalpha()]})|(?P<c{i}>{re.escape(end)})"
        for i, (begin, end) in enumerate(_PAIRS)
    )
)
LONGEST_MARK = 24  # characters
# A message of gpt-oss has a channel, one of Muse a recipient: `analysis` and `self` are reasoning.
_HEADER = re.compile(
    r"<\|channel\|>\s{0,5}(?P<channel>\w{1,64})[^<]{0,200}(?:<\|constrain\|>[^<]{0,100})?<\|message\|>"
    r"|(?:\bassistant\s{0,5}|^\s{0,5})to=(?P<to>\w{1,64})\s{0,5}<\|message\|>"
)
_MESSAGE_END = re.compile(r"<\|(?:end|return|call|eom|eot|start|channel)\|>")
_TO_THE_USER = ("final", "user")
# Granite 3.2 says it in words, which others may write as well: only both of them count.
_IN_WORDS = re.compile(r"\s{0,20}Here(?:'s| is) my thought process:")
_WORDS_END = re.compile(r"Here(?:'s| is) my response:")
# What some families write around the answer.
_AROUND = re.compile(
    r"\s*(?:<response>|<\|START_RESPONSE\|>|<\|begin_of_solution\|>)(.*?)"
    r"(?:</response>|<\|END_RESPONSE\|>|<\|end_of_solution\|>|\Z)\s*",
    re.DOTALL,
)
_BLANK_LINES = re.compile(r"(?:[ \t\r]*\n)+")
# A mark in quotes, or in a short text in quotes, is mentioned, not written.
_QUOTES = {"`": "`", '"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "\u00ab": "\u00bb"}
_OPENING_QUOTE = re.compile(r"(?:^|[\W_])[rbfRBF]{0,2}([`\"'\u201c\u2018\u00ab])$")
_LONGEST_QUOTE = 40
_IN_A_SENTENCE = re.compile(r" [a-z]|[.,;:!?)]")
_WRAPPED = {"*": "*", "_": "_", "(": ")", "[": "]", "{": "}", "|": "|"}  # around a mark
_COMMENT = re.compile(r"\s*(?:#|//|/\*|--|>|\*\s|\"\"\"|''')")
_IS_MENTIONED = re.compile(r"[.,;:!?)]")  # behind a mark that closes nothing: a word of a sentence
_FENCE = re.compile(r"^[ \t>]*(?:```|~~~)", re.MULTILINE)


class Response(str):
    """The text of a response that knows its answer, where that is not to be read from the text:
    marks that are special tokens are no part of it, and a prompt may have begun the reasoning."""

    answer: str

    def __new__(cls, text: str, answer: str = ""):
        made = super().__new__(cls, text)
        made.answer = answer
        return made


def answer_of(response: str, begun: str = "") -> str:
    """Returns what stands behind the reasoning of a response: all of it without reasoning, "" for
    reasoning that has not ended.

    Behind several blocks of reasoning it is what follows the last one, or, where nothing does, what
    stands outside of them. A closing mark alone ends reasoning that the prompt began. A mark that
    is quoted is text. `begun`: how the prompt begins the response (`beginning_of`).
    """
    if isinstance(response, Response):
        return response.answer
    text = f"{begun}{response}"
    visible = _messages_to_the_user(text)
    if visible is None:
        visible = _outside(text, len(begun))
    if visible is None:
        return response
    around = _AROUND.fullmatch(visible)
    visible = around[1] if around else visible
    start = _BLANK_LINES.match(visible)
    return visible[start.end() :] if start else visible


def cut_reasoning(value: object) -> object:
    """The same without reasoning: of a response, of a list of them, and of TRL's lists of messages,
    whose assistant messages get it as `reasoning_content`."""
    if isinstance(value, str):
        answer = answer_of(value)
        return Response(answer, answer)
    if isinstance(value, list | tuple):
        return type(value)(map(cut_reasoning, value))
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        if value.get("role", "assistant") != "assistant":
            return value
        answer = cut_reasoning(value["content"])
        cut = _reasoning_before(value["content"], answer)
        return {**value, "content": answer, **({"reasoning_content": cut} if cut else {})}
    return value


def _reasoning_before(text: str, answer: str) -> str:
    """Returns what was cut, without the marks at its ends."""
    if len(text) == len(answer):
        return ""
    cut = str(text).removesuffix(answer) if answer else str(text)
    marks = list(_MARK.finditer(cut))
    if marks and not cut[: marks[0].start()].strip():
        cut = cut[marks[0].end() :]
        marks = list(_MARK.finditer(cut))
    if marks and not cut[marks[-1].end() :].strip():
        cut = cut[: marks[-1].start()]
    return cut.strip()


def _messages_to_the_user(text: str) -> str | None:
    """The last message to the user of a text in messages; "" where none follows the reasoning. None
    for a text without any."""
    answer, headers = None, list(_HEADER.finditer(text))
    for header in headers:
        end = _MESSAGE_END.search(text, header.end())
        said = text[header.end() : end.start() if end else len(text)]
        answer = said if (header["channel"] or header["to"]) in _TO_THE_USER else ""
    return answer


def _outside(text: str, begin: int) -> str | None:
    """Returns what stands from `begin` on behind the last block of reasoning, or outside of all;
    "" where one has not ended, None for a text without reasoning."""
    words = _IN_WORDS.match(text)
    ends = words and list(_WORDS_END.finditer(text, words.end()))
    if ends:
        return text[ends[-1].end() :]
    spans, ended = _blocks(text, begin)
    if not spans:
        return None
    if not ended:
        return ""
    last = spans[-1][1]
    if text[last:].strip():
        return text[last:]
    starts = [begin, *(stop for _, stop in spans[:-1])]
    pieces = zip(starts, (start for start, _ in spans), strict=True)
    return "".join(text[a:b] for a, b in pieces)


def _blocks(
    text: str, begin: int, apart: Sequence[tuple[int, int]] = ()
) -> tuple[list[tuple[int, int]], bool]:
    """(the characters [a, b) from `begin` on that are reasoning, with its marks; whether the last
    block has ended). A mark within `apart`, spans of `text` in their order, is a text of theirs.

    Of a mark that is a word of the text the one that closes it is a word, too.
    """
    spans, inside, start, free = [], "", begin, begin  # free: behind the last block
    lines, mentioned = _Lines(text), {}
    calls = iter([*apart, (len(text), len(text))])
    first, last = next(calls)
    for mark in _marks(text):
        while last <= mark.start() and last < len(text):
            first, last = next(calls)
        if first <= mark.start() < last:
            continue
        kind, opens = _kind(mark)
        if opens and not inside:
            if mark.start() < begin or not _is_mentioned(lines, mark, free):
                inside, start = kind, max(begin, mark.start())
            else:
                mentioned[kind] = mentioned.get(kind, 0) + 1
        elif not opens and inside == kind:
            spans.append((start, max(begin, mark.end())))
            inside, free = "", max(begin, mark.end())
        elif not opens and not inside:
            if mentioned.get(kind):
                mentioned[kind] -= 1
            elif not (
                lines.are_fenced(free, mark.start()) or _IS_MENTIONED.match(text, mark.end())
            ):
                # What stood before a mark that closes nothing was reasoning, too.
                spans, free = [(begin, max(begin, mark.end()))], max(begin, mark.end())
    if inside:
        spans.append((start, len(text)))
    return [(a, b) for a, b in spans if b > a], not inside


def _is_mentioned(lines: "_Lines", mark: re.Match, free: int) -> bool:
    """Returns whether an opening mark is a word of a text: in a sentence (`Use the <think> tag`),
    brackets or emphasis, in a comment, in fenced code that begins behind `free`, or a type
    (`List<Thought>`)."""
    text, at = lines.text, mark.start()
    start, last = max(free, lines.start_of(at)), at  # last: behind the last word before the mark
    while last > start and text[last - 1].isspace():
        last -= 1
    before, after = text[max(start, at - 2) : at], text[mark.end() : mark.end() + 2]
    sentence = len(before) == 2 and before[0].isalnum() and before[1] == " "
    if sentence and _IN_A_SENTENCE.match(after):
        return True
    if last > start and after.lstrip()[:1] == _WRAPPED.get(text[last - 1]):
        return True
    types = (mark["tag"] or "think").lower() != "think"
    if types and before[-1:].isalnum() and lines.last_end(mark["tag"]) < mark.end():
        return True
    return _COMMENT.match(text, start, at) is not None or lines.are_fenced(free, at)


class _Lines:
    """The lines of a text, its fences of code and its last closing marks. Each is looked for once:
    a search for each of many marks would take the square of the length."""

    def __init__(self, text: str):
        self.text = text
        self.last_end = functools.cache(lambda tag: text.rfind(f"</{tag}>"))

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [0, *(end.end() for end in re.finditer("\n", self.text))]

    @functools.cached_property
    def _fences(self) -> tuple[list[int], list[int]]:
        spans = [fence.span() for fence in _FENCE.finditer(self.text)]
        return [start for start, _ in spans], [end for _, end in spans]

    def start_of(self, at: int) -> int:
        """Returns where the line of a character begins."""
        return self._starts[bisect.bisect_right(self._starts, at) - 1]

    def are_fenced(self, start: int, end: int) -> bool:
        """Returns whether a fence of code that begins behind `start` is open at `end`."""
        starts, ends = self._fences
        between = bisect.bisect_right(ends, end) - bisect.bisect_left(starts, start)
        return max(0, between) % 2 == 1


def reasoning_spans(
    response: str, begun: str = "", apart: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """The characters [a, b) of a response that are reasoning, with its marks; what is not closed is
    reasoning to the end. A mark within `apart`, spans in their order, is a text of theirs (a tool
    call's). `begun`: as in `answer_of`."""
    begin = len(begun)
    spans, _ = _blocks(f"{begun}{response}", begin, [(a + begin, b + begin) for a, b in apart])
    return [(a - begin, b - begin) for a, b in spans]


def cut_marks(reasoning: str) -> str:
    """A span of reasoning without the marks at its ends."""
    return _reasoning_before(reasoning, "")


def closes_reasoning(text: str, start: int = 0) -> int:
    """The offset behind the first mark from `start` on that closes reasoning; -1 if none does."""
    ends = (mark.end() for mark in _MARK.finditer(text, start) if not _kind(mark)[1])
    return next(ends, -1)


def begins_reasoning(response: str) -> bool:
    """Returns whether a response, or as much of it as there is, begins with reasoning."""
    mark = _MARK.match(response.lstrip())
    return mark is not None and _kind(mark)[1]


def is_mark(text: str) -> bool:
    """Returns whether the text of a token is a mark of reasoning, or begins one."""
    return _MARK.fullmatch(text) is not None or text == "<|channel>"


def _kind(mark: re.Match) -> tuple[str, bool]:
    """(the name of a mark's family, whether it opens)."""
    if mark["tag"]:
        return mark["tag"].lower(), not mark["ends"]
    return mark.lastgroup[1:], mark.lastgroup[0] == "o"


def _marks(text: str) -> Iterable[re.Match]:
    """The marks of a text that are not quoted."""
    quoted_to = 0
    for mark in _MARK.finditer(text):
        if mark.start() < quoted_to:
            continue
        opened = _OPENING_QUOTE.search(text[max(0, mark.start() - 4) : mark.start()])
        if opened:
            closing = _QUOTES[opened[1]]
            # What opens may be quoted with more; before what closes a quotation may have ended.
            longest = _LONGEST_QUOTE if _kind(mark)[1] else len(closing)
            end = text.find(closing, mark.end(), mark.end() + longest)
            if end >= 0 and "\n" not in text[mark.end() : end]:
                quoted_to = end
                continue
        yield mark


def beginning_of(prompt: str, messages: Sequence[Mapping] | None = None) -> str:
    """The end of a rendered prompt that belongs to the response: a mark at its very end, or else,
    where it holds marks of reasoning, what follows the last message that is not the assistant's."""
    end = prompt.rstrip()[-80:]
    for mark in (*_MARK.finditer(end), *_HEADER.finditer(end)):
        if mark.end() == len(end) and (mark.re is _HEADER or _kind(mark)[1]):
            return mark[0]
    said = [m.get("content") for m in messages or () if m.get("role") != "assistant"]
    last = _last_text(said[-1]).strip()[-200:] if said else ""
    at = prompt.rfind(last) if last else -1
    tail = prompt[at + len(last) :] if at >= 0 else ""
    return tail if _MARK.search(tail) or _HEADER.search(tail) else ""


def _last_text(content: object) -> str:
    """The last text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


_STRUCTURE = re.compile(
    r"<\|(?:start|channel|constrain|message|end|return|call|eom|eot)\|>|<\|channel>"
)


@functools.lru_cache(maxsize=8)
def mark_ids(tokenizer) -> dict[int, str]:
    """The special tokens of a vocabulary that are marks, or parts of them: `decode` drops them."""
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_ids}
    marks = (_MARK.fullmatch, _STRUCTURE.fullmatch)
    return {i: text for i, text in texts.items() if any(is_mark(text) for is_mark in marks)}


def response_of(
    tokenizer, ids: Iterable[int], prompt: str = "", messages: Sequence[Mapping] | None = None
) -> str:
    """The text of sampled ids, without special tokens; a Response where that text does not show
    where the reasoning ends."""
    ids = [int(i) for i in ids]
    text, marks = tokenizer.decode(ids), mark_ids(tokenizer)
    begun = beginning_of(prompt, messages)
    if marks.keys().isdisjoint(ids):
        return Response(text, answer_of(text, begun)) if begun else text
    pieces, start = [], 0
    for at, i in enumerate(ids):
        if i in marks:
            pieces += [tokenizer.decode(ids[start:at]), marks[i]]
            start = at + 1
    return Response(text, answer_of("".join([*pieces, tokenizer.decode(ids[start:])]), begun))
