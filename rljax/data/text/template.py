"""A model's own chat template: compiled once, rendered with bounds.

Templates come with downloaded models, so they may be hostile: they are compiled and rendered in a
process whose processor time and memory are limited (`guarded`), inside jinja's sandbox
(`template_sandbox`), and see plain values only. What they render equals what `transformers`
renders. Messages are checked in `messages`; tokens and masks are in `chat`.
"""

import datetime
import itertools
from collections.abc import Mapping, Sequence

from rljax.data.text import guarded
from rljax.data.text.forms import Form, Group, forms_of, group_of, in_form
from rljax.data.text.guarded_process import OK, REFUSED, SYNTAX
from rljax.data.text.messages import (
    check_unicode,
    template_view,
    to_plain,
    tools_in_one_form,
    validate_objects,
    with_text_arguments,
)
from rljax.data.text.template_sandbox import MARKS
from rljax.errors import InputError
from rljax.files import parse_json

MAX_TEMPLATE = 1_000_000  # characters
# Characters that a rendering may have, and how many more for each that it is given.
MAX_OUTPUT, MAX_GROWTH = 1_000_000, 8
RESERVED = (MARKS, "messages", "tools", "documents", "add_generation_prompt", "range")
_MOST_FORMS = 1_000  # kinds of conversations of which the forms are kept
_COPY_AGAIN = "copy the template from the model's repository again"
# Values beside the messages, and how each of their objects is written.
_FORMS_OF_OBJECTS = {
    "tools": 'write each tool as {"type": "function", "function": {"name": ..., "description": ...,'
    ' "parameters": {"type": "object", "properties": {...}}}}',
    "documents": 'write each document as {"title": ..., "text": ...}',
}
# Stands at the end of a message that is continued; its space tells whether the template trims.
_END = "RLJAX-END-OF-THE-FINAL-MESSAGE "


# Characters that no script has: of the private use areas, and above the last plane that is used.
_UNUSED = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def _unused_characters(text: str) -> tuple[str, str]:
    """Returns two characters that do not stand in a text."""
    used = set(text)
    unused = (c for c in map(chr, itertools.chain(*_UNUSED)) if c not in used)
    first, last = next(unused, ""), next(unused, "")
    if not last:
        raise InputError(
            "a chat holds all characters of the private use areas",
            rule="two that it does not hold mark what the assistant has written",
            fix="remove them",
        )
    return first, last


class ChatTemplate:
    """A compiled chat template. `now` is the date that `strftime_now` returns in all renderings.
    Raises InputError for a text that is not a valid template."""

    def __init__(self, text: str, source: str, *, now: datetime.datetime | None = None):
        if len(text) > MAX_TEMPLATE:
            raise InputError(
                f"{source}: the chat template has {len(text)} characters",
                rule=f"at most {MAX_TEMPLATE}",
                fix=_COPY_AGAIN,
            )
        self.text = text
        self.source = source
        # Read once: a rendering that changes at midnight would not be a prefix of the next one.
        self._now = now or datetime.datetime.now()
        self._forms: dict[tuple, dict[Group, Form]] = {}
        kind, reply = guarded.call("compile", text, self._now)
        if kind == SYNTAX:
            line, _, rule = reply.partition(" ")
            lines = text.split("\n")
            raise InputError(
                f"{source}: the chat template has a syntax error in line {line}",
                value=lines[min(int(line), len(lines)) - 1],
                rule=rule,
                fix=_COPY_AGAIN,
            )
        if kind != OK:  # the compiler meets arbitrary text, e.g. 10000 open brackets
            raise InputError(
                f"{source}: the chat template cannot be compiled", rule=reply, fix=_COPY_AGAIN
            )
        marks_assistant, variables = parse_json(reply, source)
        self.marks_assistant: bool = marks_assistant
        self.variables: frozenset[str] = frozenset(variables)  # that it may read

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the text of the messages; the template sees `special_tokens` as bos_token,
        eos_token, ...

        `variables` are further names for the template (`enable_thinking`); they go before the
        special tokens. With `continue_final_message` the text ends where the last message's does. A
        list of text parts reaches the template, and one string where it cannot read the list.
        Raises InputError for messages that the template refuses or cannot render within its limits,
        and for `continue_final_message` together with `add_generation_prompt`.
        """
        view = template_view(messages)
        context = _template_context(
            special_tokens, add_generation_prompt, tools, documents, variables
        )
        if continue_final_message:
            if add_generation_prompt:
                raise InputError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    rule="a turn is continued or a new one begun",
                    fix="set one of them to False",
                )
            return self._continued_text(view, context)
        return self._text_of(view, context)

    def render_marked(
        self,
        messages: Sequence[Mapping],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
        text: str | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns (the text of `render`, the characters [a, b) of its `{% generation %}` blocks).
        Pass `text` if the rendering is already known. Raises InputError as `render` does, and if a
        block cannot be found in the text."""
        view = template_view(messages)
        context = _template_context(
            special_tokens, add_generation_prompt, tools, documents, variables
        )
        text = self._text_of(view, context) if text is None else text
        first, last = _unused_characters(text)
        marked = self._text_of(view, {**context, MARKS: (first, last)})
        spans, start, size = [], None, 0
        for character in marked:
            if character == first:
                start = size
            elif character == last:
                spans.append((start, size))
            else:
                size += 1
        if marked.replace(first, "").replace(last, "") != text:
            raise InputError(
                f"{self.source}: the text within {{% generation %}} is changed by what is around",
                rule="then it cannot be found in the rendered chat",
                fix="write the block where its text is written, outside of filters",
            )
        return text, [(a, b) for a, b in spans if b > a]

    def _text_of(self, view: list[dict], context: Mapping) -> str:
        try:
            return self._text_of_contents(view, context)
        except InputError:
            with_texts = with_text_arguments(view)
            if with_texts == view:
                raise
        # Some templates (DeepSeek's) write content and arguments out as they are, without tojson.
        return self._text_of_contents(with_texts, context)

    def _text_of_contents(self, view: list[dict], context: Mapping) -> str:
        """Returns the text of messages, each in the form in which the template reads it."""
        groups = [group_of(message) for message in view]
        counts = {n: len(context.get(n) or ()) for n in ("tools", "documents")}
        other_names = {n: v for n, v in context.items() if n != MARKS and n not in counts}
        key = (frozenset(groups), groups[-1], repr(other_names), *counts.values())
        forms = self._forms.get(key)
        if forms is None:
            plain_context = {n: v for n, v in context.items() if n != MARKS}
            forms, unsaid, renders = forms_of(
                lambda marked: self._run(marked, plain_context), view, "thinking" in self.text
            )
            if any(group.has_images for group in unsaid):
                raise InputError(
                    "the chat template writes no images",
                    rule="it does not read a list of parts",
                    fix="use the template of a model with images",
                )
            if renders:  # else it may be the order of the messages that it refuses
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                self._forms[key] = forms
        messages = [
            in_form(message, forms.get(group)) for message, group in zip(view, groups, strict=True)
        ]
        return self._run(messages, context)

    def _continued_text(self, view: list[dict], context: Mapping) -> str:
        """Returns the text up to the end of the last message's content."""
        content = view[-1].get("content")
        if isinstance(content, list) and content:
            final = content[-1]["text"]
            marked = [*content[:-1], {**content[-1], "text": final + _END}]
        elif isinstance(content, str):
            final, marked = content, content + _END
        else:
            raise InputError(
                "the final message has no content to continue",
                value=view[-1],
                fix="give it a 'content', or do not set continue_final_message",
            )
        text = self._text_of([*view[:-1], {**view[-1], "content": marked}], context)
        end = text.rfind(_END.strip())
        if end < 0 or final.strip() not in text[:end]:
            raise InputError(
                f"{self.source}: the chat template does not write the final message as it is",
                value=final,
                rule="then no place is found where it could be continued",
                fix="continue a message that the template keeps whole",
            )
        keeps_space = text.startswith(_END, end)
        return text[:end] if keeps_space else text[:end].rstrip()

    def _run(self, view: list[dict], context: Mapping) -> str:
        context = {**context, "messages": view}
        kind, text = self._call(context)
        if kind != OK:
            refused = kind == REFUSED
            verb = "refuses" if refused else "fails on"
            rule = f"it says {text!r}" if refused else text
            for name, form in _FORMS_OF_OBJECTS.items():
                if context.get(name) and self._call({**context, name: None})[0] == OK:
                    raise InputError(
                        f"{self.source}: the chat template {verb} the {name!r}",
                        value=context[name],
                        rule=rule,
                        fix=f"{form}, or correct the template",
                    )
            roles = [message["role"] for message in view[:8]]
            raise InputError(
                f"{self.source}: the chat template {verb} {len(view)} messages with roles {roles}",
                rule=rule,
                fix="use roles and turns that this template knows, or correct the template",
            )
        check_unicode(text, f"{self.source}: the rendered chat")
        return text

    def _call(self, context: Mapping) -> tuple[str, str]:
        """Returns (OK, the rendered text), or another kind of reply with its reason."""
        most = MAX_OUTPUT + MAX_GROWTH * _characters(context)
        return guarded.call("render", self.text, self._now, context, most)


def _characters(value: object) -> int:
    """Returns the number of characters of all texts of a plain value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(name) + _characters(item) for name, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


def _template_context(
    special_tokens, add_generation_prompt, tools, documents, variables
) -> dict[str, object]:
    """Returns all names that a template sees beside the messages; the user's go before special
    tokens."""
    return {
        **special_tokens,
        **checked_variables(variables),
        "tools": tools_in_one_form(tools, "tools"),
        "documents": validate_objects(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }


def checked_variables(variables: Mapping[str, object] | None) -> dict[str, object]:
    """Returns further names for a template as plain values. Raises InputError for a name that is
    taken."""
    for name in variables or {}:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise InputError(
                "a template variable has a name that it may not have",
                value=name,
                rule=f"it is an identifier and none of {', '.join(RESERVED)}",
                fix="rename it, or pass messages, tools and documents as themselves",
            )
    return to_plain(dict(variables or {}))
