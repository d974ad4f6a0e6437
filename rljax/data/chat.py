"""Chat messages to text by a model's own template, and which tokens the assistant wrote.

A message is `{"role": str, "content": str}`; other keys (tool_calls, name, ...) reach the template.
Templates come with downloaded models, so they run in a sandbox with bounded loops and output.
No tokenizer is defined here; `encode_conversation` is handed one.
"""

import datetime
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from rljax.errors import InputError

MAX_LOOP = 1_000_000  # steps of all range() loops of one rendering together
MAX_REPEAT = 100_000  # length of "text" * n
MAX_OUTPUT = 16_000_000  # characters: a context of some million tokens


def validate_messages(messages: object, *, where: str = "chat messages") -> list[dict]:
    """The messages with every content as one string; raises InputError that names the message."""
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, (list, tuple)):
        raise InputError(f"{where}: not a list of messages", value=messages, fix=fix)
    if not messages:
        raise InputError(f"{where}: the list of messages is empty", fix=fix)
    checked = []
    for number, message in enumerate(messages):
        place = f"{where}: message {number}"
        if not isinstance(message, Mapping):
            raise InputError(f"{place} is not an object", value=message, fix=fix)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError(f"{place}: 'role' must be a text", value=role, fix=fix)
        checked.append({**message, "content": _content(message, place)})
        check_unicode(checked[-1]["content"], f"{place}: 'content'")
    return checked


def _content(message: Mapping, place: str) -> str:
    """A message's content as one string; text parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""  # a turn that only calls tools has no text of its own
    fix = 'write text, or [{"type": "text", "text": "..."}]'
    if not isinstance(content, (list, tuple)):
        raise InputError(f"{place}: 'content' is missing or not text", value=content, fix=fix)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InputError(f"{place}: 'content' has a part that is not text", value=part, fix=fix)
        texts.append(text)
    return "".join(texts)


def check_unicode(text: str, place: str) -> None:
    """Raises InputError where `text` holds half a surrogate pair: no tokenizer can encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place} has half a surrogate pair at character {error.start}",
            value=text[error.start : error.start + 8],
            rule="text must be valid Unicode",
            fix="write the character as one \\U code point or remove it",
        ) from None


class _RaisedByTemplate(jinja2.TemplateError):
    """What `raise_exception("...")` in a template throws."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's text; here only its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


class ChatTemplate:
    """A compiled chat template. `now` is the date that `strftime_now` tells, for all renderings."""

    def __init__(self, text: str, source: str, *, now: datetime.datetime | None = None):
        self.text = text
        self.source = source
        # Read once: a rendering that changes at midnight would not be a prefix of the next one.
        self._now = now or datetime.datetime.now()
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        del environment.globals["lipsum"]  # unbounded text of no use
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._now.strftime
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            lines = text.splitlines() or [""]
            raise InputError(
                f"{source}: the chat template has a syntax error in line {error.lineno}",
                value=lines[min(error.lineno, len(lines)) - 1],
                rule=str(error.message),
                fix="copy the template from the model's repository again",
            ) from None
        except Exception as error:  # the compiler meets arbitrary text, e.g. 10000 open brackets
            raise InputError(
                f"{source}: the chat template cannot be compiled",
                rule=f"{type(error).__name__}: {error}",
                fix="copy the template from the model's repository again",
            ) from None

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        tools: Sequence[Mapping] | None = None,
    ) -> str:
        """The text of the messages; `special_tokens` are seen as bos_token, eos_token, ..."""
        messages = validate_messages(messages)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                **special_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                range=_bounded_range(),
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise SecurityError(f"writes more than {MAX_OUTPUT} characters")
        except Exception as error:  # the template is input: whatever it raises is about the input
            own_words = isinstance(error, _RaisedByTemplate)
            roles = [message["role"] for message in messages[:8]]
            raise InputError(
                f"{self.source}: the chat template {'refuses' if own_words else 'fails on'} "
                f"{len(messages)} messages with roles {roles}",
                rule=f"it says {str(error)!r}" if own_words else f"{type(error).__name__}: {error}",
                fix="use roles and turns that this template knows, or correct the template",
            ) from None
        text = "".join(pieces)
        check_unicode(text, f"{self.source}: the rendered chat")
        return text


def encode_conversation(tokenizer, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
    """Token ids of a finished conversation, and a mask: 1 on what the assistant says.

    That is every assistant turn's content with its end-of-turn token. The ids are those of the
    whole text; where a token spans the border into a turn it counts as the assistant's, for else
    the turn's first characters would never be learned.
    """
    messages = validate_messages(messages)
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = [0] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if k == 0:
            raise InputError(
                "a conversation begins with the assistant",
                value=message["content"],
                rule="an assistant's turn answers something",
                fix="put a user or system message first",
            )
        before = tokenizer.render_chat(messages[:k], add_generation_prompt=True)
        through = tokenizer.render_chat(messages[: k + 1], add_generation_prompt=False)
        _require_prefix(before, through, f"messages 0..{k - 1} with the generation prompt", k)
        _require_prefix(through, text, f"messages 0..{k}", len(messages) - 1)
        turn = [
            t
            for t, (start, stop) in enumerate(offsets)
            if start < len(through) and stop > len(before)
        ]
        for t in _without_tail(turn, ids, offsets, text, tokenizer.special_ids):
            mask[t] = 1
    return ids, mask


def _without_tail(turn, ids, offsets, text, special_ids) -> list[int]:
    """A turn's tokens without the white space that the template writes after its end token.

    The sampler stops at the end token, so the policy never writes what follows. A turn that ends
    without a special token keeps its white space: there it is the end of turn.
    """
    end = len(turn)
    while end and ids[turn[end - 1]] not in special_ids:
        start, stop = offsets[turn[end - 1]]
        if text[start:stop].strip():
            return turn
        end -= 1
    return turn[:end] if end else turn


def _require_prefix(shorter: str, longer: str, what: str, last: int) -> None:
    """Raises InputError unless the longer rendering only appends to the shorter one."""
    if longer.startswith(shorter):
        return
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), None)
    at = min(len(shorter), len(longer)) if same is None else same
    raise InputError(
        f"the chat template is not append-only: {what} are not the beginning of messages 0..{last}",
        value=(shorter[max(0, at - 20) : at + 20], longer[max(0, at - 20) : at + 20]),
        rule="a template that rewrites earlier turns makes the assistant's tokens ambiguous",
        fix="use a template that keeps earlier turns, or split the conversation so that each "
        "example ends at its only assistant turn",
    )
