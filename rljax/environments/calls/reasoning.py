"""Where the reasoning of a reply stands: what is drafted there is no call, and no answer."""

import re
from collections.abc import Sequence

# How models open and close it. A mark may be one special token, or its beginning may be one.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<unused94>thought", "<unused95>"),  # MedGemma
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)
TOKENS = tuple({mark.removesuffix("thought") for pair in MARKS for mark in pair} - {""})
LONGEST = max(len(mark) for pair in MARKS for mark in pair)


class Marks:
    """The marks of reasoning but those in `taken`: a format may call a tool by such a tag."""

    def __init__(self, taken: Sequence[str] = ()):
        self._pairs = [pair for pair in MARKS if pair[0] not in taken]
        self._kinds = {mark: k for k, pair in enumerate(self._pairs) for mark in pair}
        self._opens = tuple(first for first, _ in self._pairs)
        longest = sorted(self._kinds, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)))

    def begun(self, text: str) -> bool:
        """Whether a text ends within reasoning that it opened at the beginning of a line."""
        open_ = None
        for found in self._pattern.finditer(text):
            opens = found[0] in self._opens
            if opens and open_ is None and _begins_line(text, found.start()):
                open_ = self._kinds[found[0]]
            elif not opens and open_ == self._kinds[found[0]]:
                open_ = None
        return open_ is not None

    def ends_open(self, text: str) -> bool:
        """Whether the last that a prompt says opens reasoning."""
        return text.rstrip().endswith(self._opens)

    def opens(self, text: str) -> bool:
        """Whether a reply begins with reasoning."""
        return text.lstrip().startswith(self._opens)

    def closed(self, text: str, at: int) -> int:
        """The place behind the first mark from `at` on that closes reasoning; -1 for none."""
        for found in self._pattern.finditer(text, at):
            if found[0] not in self._opens:
                return found.end()
        return -1

    def spans(
        self, text: str, opened: bool, calls: Sequence[tuple[int, int]] = ()
    ) -> list[tuple[int, int]]:
        """The characters [a, b) of a reply that are reasoning, with its marks.

        `opened`: the prompt has begun it. Where a mark closes what none has opened, all before it
        is reasoning; what is not closed is reasoning to the end. A mark within `calls`, spans in
        their order, is a text of theirs.
        """
        found, begin, kind = [], (0 if opened else None), None
        inside = iter([*calls, (len(text), len(text))])
        first, last = next(inside)
        for mark in self._pattern.finditer(text):
            while last <= mark.start():
                first, last = next(inside)
            if first <= mark.start():
                continue
            opens, its = mark[0] in self._opens, self._kinds[mark[0]]
            if opens and begin is None and _begins_line(text, mark.start()):
                begin, kind = mark.start(), its
            elif not opens and begin is None:
                found = [(0, mark.end())]
            elif not opens and kind in (None, its):
                found.append((begin, mark.end()))
                begin = None
        return found if begin is None else [*found, (begin, len(text))]

    def inside(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        """The reasoning alone, without its marks."""
        parts = []
        for a, b in spans:
            part = text[a:b].strip()
            for first, last in self._pairs:
                part = part.removeprefix(first).removesuffix(last)
            parts.append(part.strip())
        return "\n".join(part for part in parts if part)


def _begins_line(text: str, at: int) -> bool:
    """Whether only white space, or another mark, stands before a place in its line."""
    before = text[max(0, at - LONGEST) : at].rstrip(" \t")
    return not before or before.endswith(("\n", ">", "]", "▷"))
