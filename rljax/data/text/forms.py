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
_SAID, _KEY = "RLJAX-SAID-{}-{}-", "RLJAX-KEY-{}-"
_THOUGHT = "RLJAX-THOUGHT-{}-"


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
    """The group of a message."""
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
    """The message in a form; None leaves it as it is."""
    content = message.get("content")
    if form is Form.TEXT:
        texts = (part["text"] for part in content if part["type"] == "text")
        return {**message, "content": "".join(texts)}
    if form is Form.PARTS:
        return {**message, "content": [{"type": "text", "text": content}]}
    if form in (Form.THINKING, Form.THINKING_PARTS):
        thought = next(message[n] for n in REASONING if isinstance(message.get(n), str))
        rest = {n: v for n, v in message.items() if n not in REASONING}
        if form is Form.THINKING_PARTS:
            thought = [{"type": "text", "text": thought}]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        part = {"type": "thinking", "thinking": thought}
        return {**rest, "content": [part, *(content or ())]}
    return dict(message)


def forms_of(
    render: Callable[[list[dict]], str], view: Sequence[Mapping], reads_thinking: bool
) -> tuple[dict[Group, Form], set[Group], bool]:
    """(the form of each group that the template does not write as it is given, groups whose
    contents it writes in no form, whether it renders the conversation at all). `reads_thinking`:
    whether it may know parts of thinking."""
    best, written = {}, _written(render, view, {})
    lists = [g for g in written.unsaid if g.is_list and not g.has_images]
    texts = [g for g in written.unsaid if g.content == ("text",)]
    other_form = dict.fromkeys(lists, Form.TEXT) | dict.fromkeys(texts, Form.PARTS)
    # All lists as texts, all texts as lists, and where that is not it, each group by itself.
    for groups in (lists, texts, *([group] for group in other_form)):
        if not (changed := [g for g in groups if g in written.unsaid]):
            continue
        forms = {g: f for g, f in best.items() if g not in changed}
        forms |= {g: other_form[g] for g in changed if g not in best}
        other = _written(render, view, forms)
        # What is written in neither form is text, as in rows of data.
        if other.points > written.points or (groups is lists and other.points == written.points):
            best, written = forms, other
    for form in (Form.THINKING, Form.THINKING_PARTS) if reads_thinking else ():
        forms = best | {g: form for g in written.unthought}
        if forms != best and (other := _written(render, view, forms)).points > written.points:
            best, written = forms, other
    return best, written.unsaid, written.points >= 0


class _Written(NamedTuple):
    """Result of rendering a marked conversation: the number of contents and reasonings that are
    whole, -1 where the template fails; the groups of others, of contents and of reasonings."""

    points: int
    unsaid: set[Group]
    unthought: set[Group]


def _written(render, view, forms: Mapping[Group, Form]) -> _Written:
    groups = [group_of(message) for message in view]
    made = [
        _marked(in_form(message, forms.get(group)), number)
        for number, (message, group) in enumerate(zip(view, groups, strict=True))
    ]
    thoughtful = {g for g in groups if g.reasoning}
    try:
        text = render([message for message, _, _ in made])
    except InputError:
        return _Written(-1, set(groups), thoughtful)
    points, unsaid, unthought = 0, set(), set()
    for number, (group, (_, said, thoughts)) in enumerate(zip(groups, made, strict=True)):
        whole = all(mark in text for mark in said) and _KEY.format(number) not in text
        thought = all(mark in text for mark in thoughts)
        points += whole + thought
        unsaid |= set() if whole else {group}
        unthought |= set() if thought else {group}
    return _Written(points, unsaid, unthought)


def _marked(message: dict, number: int) -> tuple[dict, list[str], list[str]]:
    """(the message with marks for its texts, those of its content, those of its reasoning)."""
    said, thought = [], _THOUGHT.format(number)
    thoughts = [n for n in REASONING if isinstance(message.get(n), str) and message[n].strip()]
    message = {**message, **dict.fromkeys(thoughts, thought)}
    content, thoughts = message.get("content"), [thought] if thoughts else []

    texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content or ()]
    blank = not any(map(str.strip, texts))  # which a template may tell from a content that says any

    def mark(text: str) -> str:
        if blank:
            return text
        said.append(_SAID.format(number, len(said)))
        return said[-1]

    if isinstance(content, str):
        message["content"] = mark(content)
    elif isinstance(content, list):
        parts = [{**part, _KEY.format(number): ""} for part in content]
        for part in parts:
            if part["type"] == "text":
                part["text"] = mark(part["text"])
            elif part["type"] == "thinking":
                inside = part["thinking"]
                part["thinking"] = (
                    thought if isinstance(inside, str) else [{"type": "text", "text": thought}]
                )
                thoughts = [thought]
        message["content"] = parts
    return message, said, thoughts
