"""A model's own chat template: compiled once, rendered in a sandbox with bounds.

Templates come with downloaded models, so they may be hostile: the sandbox bounds their loops and
their output, and they see plain values only. What they render equals what `transformers` renders.
Messages are checked in `messages`; tokens and masks are in `chat`. Lengths are in characters.
"""

import datetime
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from rljax.data.text.messages import (
    check_unicode,
    joined_parts,
    plain,
    template_view,
    validate_objects,
)
from rljax.errors import InputError

MAX_LOOP = 1_000_000  # steps of all range() loops of one rendering together
MAX_REPEAT = 100_000  # length of "text" * n
MAX_OUTPUT = 16_000_000  # characters: a context of some million tokens
MARKS = "generation_marks"
RESERVED = (MARKS, "messages", "tools", "documents", "add_generation_prompt", "range")
# Stands at the end of a message that is continued; its space tells whether the template trims.
_END = "RLJAX-END-OF-THE-FINAL-MESSAGE "


class _RaisedByTemplate(jinja2.TemplateError):
    """The error of `raise_exception("...")` in a template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the assistant's text.

    A rendering that is given two characters as MARKS writes them around it.
    """

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(has_generation=False)

    def parse(self, parser):
        self.environment.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block has a scope of its own: what is set within is not seen after it.
        call = self.call_method("_marked", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context, caller):
        first, last = context.get(MARKS) or ("", "")
        return first + caller() + last


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that stores no name with an underscore in front: those reach Python."""

    def __init__(*args, **kwargs):
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name, value):
        _require_public(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace stores no name like {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses the two operators that fill the memory in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context, operator, left, right):
        if operator == "**" and (abs(left) > 1e6 or abs(right) > 64):
            raise SecurityError("power is too large")
        for text, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(text, (str, list, tuple)):
                if isinstance(times, int) and len(text) * times > MAX_REPEAT:
                    raise SecurityError(f"repeats a text to more than {MAX_REPEAT} characters")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> None:
    raise _RaisedByTemplate(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models are trained on plain JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _dict(*args, **kwargs) -> dict:
    # A function, for the class itself has attributes that a template should not reach.
    return dict(*args, **kwargs)


def _bounded_range():
    """A `range` whose loops may take MAX_LOOP steps together, so that nesting them ends too."""
    spent = 0

    def bounded(*args):
        nonlocal spent
        steps = range(*args)
        spent += len(steps)
        if spent > MAX_LOOP:
            raise SecurityError(f"loops for more than {MAX_LOOP} steps")
        return steps

    return bounded


def _environment(now: datetime.datetime) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    del environment.globals["lipsum"]  # unbounded text of no use
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class ChatTemplate:
    """A compiled chat template. `now` is the date that `strftime_now` tells, for all renderings."""

    def __init__(self, text: str, source: str, *, now: datetime.datetime | None = None):
        self.text = text
        self.source = source
        # Read once: a rendering that changes at midnight would not be a prefix of the next one.
        self._now = now or datetime.datetime.now()
        self._environment = _environment(self._now)
        fix = "copy the template from the model's repository again"
        try:
            self._template = self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            lines = text.splitlines() or [""]
            raise InputError(
                f"{source}: the chat template has a syntax error in line {error.lineno}",
                value=lines[min(error.lineno, len(lines)) - 1],
                rule=str(error.message),
                fix=fix,
            ) from None
        except Exception as error:  # the compiler meets arbitrary text, e.g. 10000 open brackets
            raise InputError(
                f"{source}: the chat template cannot be compiled",
                rule=f"{type(error).__name__}: {error}",
                fix=fix,
            ) from None
        self.marks_assistant: bool = self._environment.has_generation

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
        """The text of the messages; `special_tokens` are seen as bos_token, eos_token, ...

        `variables` are further names for the template (`enable_thinking`); they go before the
        special tokens. With `continue_final_message` the text ends where the last message's does.
        A list of text parts reaches the template, and one string where it cannot read the list.
        """
        view = template_view(messages)
        context = _seen(special_tokens, add_generation_prompt, tools, documents, variables)
        if continue_final_message:
            if add_generation_prompt:
                raise InputError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    rule="a turn is continued or a new one begun",
                    fix="set one of them to False",
                )
            return self._continued(view, context)
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
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `render`, and where its `{% generation %}` blocks are: characters [a, b)."""
        view = template_view(messages)
        context = _seen(special_tokens, add_generation_prompt, tools, documents, variables)
        text = self._text_of(view, context)
        first, last = [c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text][:2]
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
        if not any(isinstance(message.get("content"), list) for message in view):
            return self._run(view, context)
        parts = [message["content"] for message in view if isinstance(message.get("content"), list)]
        try:
            text = self._run(view, context)
            if not any(str(content) in text for content in parts if content):
                return text
        except InputError:
            pass  # the template takes text only, and its message about that is of no use
        return self._run(joined_parts(view), context)

    def _continued(self, view: list[dict], context: Mapping) -> str:
        """The text up to the end of the last message's content."""
        content = view[-1].get("content")
        if isinstance(content, list) and content:
            final = content[-1]["text"]
            ended = [*content[:-1], {**content[-1], "text": final + _END}]
        elif isinstance(content, str):
            final, ended = content, content + _END
        else:
            raise InputError(
                "the final message has no content to continue",
                value=view[-1],
                fix="give it a 'content', or do not set continue_final_message",
            )
        text = self._text_of([*view[:-1], {**view[-1], "content": ended}], context)
        at = text.rfind(_END.strip())
        if at < 0 or final.strip() not in text[:at]:
            raise InputError(
                f"{self.source}: the chat template does not write the final message as it is",
                value=final,
                rule="then no place is found where it could be continued",
                fix="continue a message that the template keeps whole",
            )
        kept = text.startswith(_END, at)
        return text[:at] if kept else text[:at].rstrip()

    def _run(self, view: list[dict], context: Mapping) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**context, messages=view, range=_bounded_range()):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise SecurityError(f"writes more than {MAX_OUTPUT} characters")
        except Exception as error:  # the template is input: whatever it raises is about the input
            refused = isinstance(error, _RaisedByTemplate)
            roles = [message["role"] for message in view[:8]]
            raise InputError(
                f"{self.source}: the chat template {'refuses' if refused else 'fails on'} "
                f"{len(view)} messages with roles {roles}",
                rule=f"it says {str(error)!r}" if refused else f"{type(error).__name__}: {error}",
                fix="use roles and turns that this template knows, or correct the template",
            ) from None
        text = "".join(pieces)
        check_unicode(text, f"{self.source}: the rendered chat")
        return text


def _seen(special_tokens, add_generation_prompt, tools, documents, variables) -> dict[str, object]:
    """All names that a template sees beside the messages; the user's go before special tokens."""
    return {
        **special_tokens,
        **_checked_variables(variables),
        "tools": validate_objects(tools, "tools"),
        "documents": validate_objects(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }


def _checked_variables(variables: Mapping[str, object] | None) -> dict[str, object]:
    for name in variables or {}:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise InputError(
                "a template variable has a name that it may not have",
                value=name,
                rule=f"it is an identifier and none of {', '.join(RESERVED)}",
                fix="rename it, or pass messages, tools and documents as themselves",
            )
    return plain(dict(variables or {}))
