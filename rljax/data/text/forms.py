"""The form in which a chat template reads each message: a content that is text, a list of parts, or
a list whose first part is the reasoning (Mistral).

Templates differ, and say nothing of what they do not read. So the template itself is asked: the
conversation is rendered with marks in place of its texts, in the form that was given and, where
marks are missing there, in others. Rendering is in `template`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rljax.data.text.messages import REASONING
from rljax.errors import InputError

# No template writes these by itself. The second is a key of a part: it is written where the part is
# written as an object (Python's repr of it, or JSON), and not as its text.
_CONTENT_MARK, _KEY_MARK = "RLJAX-SAID-{}-{}-", "RLJAX-KEY-{}-"
_REASONING_MARK = "RLJAX-THOUGHT-{}-"


class Form(enum.Enum):
    """A form of messages other than the one that was given."""

    TEXT = "a list of parts of text as one text"
    PARTS = "a text as a list of one part"
    THINKING = "the reasoning as the first part of the content"
    THINKING_PARTS = "the same, the reasoning as a list of texts"


class Group(NamedTuple):
    """Properties of messages; those of one group are in one form."""

    role: str
    content: tuple  # () for none, ("text",), or the first kind of parts, images, texts (2: several)
    arguments: str  # the type of a call's arguments, "" without calls
    reasoning: bool

    @property
    def is_list(self) -> bool:
        """Returns whether the contents are lists of parts."""
        return len(self.content) > 1

    @property
    def has_images(self) -> bool:
        """Returns whether an image is among the parts."""
        return self.is_list and self.content[1]


def group_of(message: Mapping) -> Group:
    """Returns the group of a message."""
    content, kinds = message.get("content"), ()
    if isinstance(content, list):
        parts = [part["type"] for part in content]
        kinds = (parts[0] if parts else "", "image" in parts, min(parts.count("text"), 2))
    elif isinstance(content, str):
        kinds = ("text",)
    arguments = ""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        arguments = type(function.get("arguments")).__name__
    reasoning = any(isinstance(message.get(n), str) and message[n].strip() for n in REASONING)
    return Group(message["role"], kinds, arguments, bool(reasoning))


def in_form(message: Mapping, form: Form | None) -> dict:
    """Returns the message in a form; None leaves it as it is."""
    content = message.get("content")
    if form is Form.TEXT:
        texts = (part["text"] for part in content if part["type"] == "text")
        return {**message, "content": "".join(texts)}
    if form is Form.PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    if form in (Form.THINKING, Form.THINKING_PARTS):
        reasoning = next(message[n] for n in REASONING if isinstance(message.get(n), str))
        fields = {n: v for n, v in message.items() if n not in REASONING}
        if form is Form.THINKING_PARTS:
            reasoning = [{"type": "text", "text": reasoning}]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        part = {"type": "thinking", "thinking": reasoning}
        return {**fields, "content": [part, *(content or ())]}
    return dict(message)


def forms_of(
    render: Callable[[list[dict]], str], view: Sequence[Mapping], reads_thinking: bool
) -> tuple[dict[Group, Form], set[Group], bool]:
    """Returns (the form of each group that the template does not write as it is given, the groups
    whose contents it writes in no form, whether it renders the conversation at all).
    `reads_thinking` says whether the template may know parts of thinking."""
    best_forms, best = {}, _render_marked(render, view, {})
    list_groups = [g for g in best.unwritten if g.is_list and not g.has_images]
    text_groups = [g for g in best.unwritten if g.content == ("text",)]
    other_form = dict.fromkeys(list_groups, Form.TEXT) | dict.fromkeys(text_groups, Form.PARTS)
    # All lists as texts, all texts as lists, and where that is not it, each group by itself.
    for groups in (list_groups, text_groups, *([group] for group in other_form)):
        if not (tried := [g for g in groups if g in best.unwritten]):
            continue
        forms = {g: f for g, f in best_forms.items() if g not in tried}
        forms |= {g: other_form[g] for g in tried if g not in best_forms}
        rendering = _render_marked(render, view, forms)
        # What is written in neither form is text, as in rows of data.
        if rendering.points > best.points or (
            groups is list_groups and rendering.points == best.points
        ):
            best_forms, best = forms, rendering
    for form in (Form.THINKING, Form.THINKING_PARTS) if reads_thinking else ():
        forms = best_forms | {g: form for g in best.without_reasoning}
        if (
            forms != best_forms
            and (rendering := _render_marked(render, view, forms)).points > best.points
        ):
            best_forms, best = forms, rendering
    return best_forms, best.unwritten, best.points >= 0


class _Rendering(NamedTuple):
    """Result of rendering a marked conversation. `points` is the number of contents and reasonings
    that are whole, -1 where the template fails. The groups are those of which a content, or a
    reasoning, is not whole."""

    points: int
    unwritten: set[Group]
    without_reasoning: set[Group]


def _render_marked(render, view, forms: Mapping[Group, Form]) -> _Rendering:
    groups = [group_of(message) for message in view]
    marked = [
        _with_marks(in_form(message, forms.get(group)), number)
        for number, (message, group) in enumerate(zip(view, groups, strict=True))
    ]
    reasoning_groups = {g for g in groups if g.reasoning}
    try:
        text = render([message for message, _, _ in marked])
    except InputError:
        return _Rendering(-1, set(groups), reasoning_groups)
    points, unwritten, without_reasoning = 0, set(), set()
    for number, (group, (_, content_marks, reasoning_marks)) in enumerate(
        zip(groups, marked, strict=True)
    ):
        has_content = (
            all(mark in text for mark in content_marks) and _KEY_MARK.format(number) not in text
        )
        has_reasoning = all(mark in text for mark in reasoning_marks)
        points += has_content + has_reasoning
        unwritten |= set() if has_content else {group}
        without_reasoning |= set() if has_reasoning else {group}
    return _Rendering(points, unwritten, without_reasoning)


def _with_marks(message: dict, number: int) -> tuple[dict, list[str], list[str]]:
    """Returns (the message with marks for its texts, the marks of its content, those of its
    reasoning)."""
    content_marks, reasoning_mark = [], _REASONING_MARK.format(number)
    reasoning_fields = [
        n for n in REASONING if isinstance(message.get(n), str) and message[n].strip()
    ]
    message = {**message, **dict.fromkeys(reasoning_fields, reasoning_mark)}
    content, reasoning_marks = message.get("content"), [reasoning_mark] if reasoning_fields else []

    texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content or ()]
    # A template may tell a blank content from one that says something.
    is_blank = not any(map(str.strip, texts))

    def mark(text: str) -> str:
        if is_blank:
            return text
        content_marks.append(_CONTENT_MARK.format(number, len(content_marks)))
        return content_marks[-1]

    if isinstance(content, str):
        message["content"] = mark(content)
    elif isinstance(content, list):
        parts = [{**part, _KEY_MARK.format(number): ""} for part in content]
        for part in parts:
            if part["type"] == "text":
                part["text"] = mark(part["text"])
            elif part["type"] == "thinking":
                reasoning = part["thinking"]
                part["thinking"] = (
                    reasoning_mark
                    if isinstance(reasoning, str)
                    else [{"type": "text", "text": reasoning_mark}]
                )
                reasoning_marks = [reasoning_mark]
        message["content"] = parts
    return message, content_marks, reasoning_marks
