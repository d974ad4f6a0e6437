"""Conversations as token ids: which tokens the policy writes, and how a log of ids grows.

One rule for every kind of data: the tokens of a turn that is learned continue the prompt that the
sampler would be given there, and end in a stop token. What the generation prompt supplies is not
learned, and neither is what the template writes behind the stop token. A conversation whose
rendering keeps no such turn raises `RewrittenTurn`: an example of each turn alone always keeps it.

Token indices count from the first id of the conversation; a mask is 1 where the policy chose the
token. A template renders the text (`template`), a tokenizer is an argument. Tokens are the record:
what was sampled is never tokenized again.
"""

import dataclasses
import enum
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rljax.data.text.contents import (
    check_conversation,
    check_turn,
    check_turn_prompt,
    renamed,
    split_reasoning,
    without_reasoning,
)
from rljax.data.text.messages import LEARN, NOT_ASKING, check_unicode, validate_messages
from rljax.data.text.template import ChatTemplate
from rljax.errors import InputError
from rljax.reasoning import MARKS

__all__ = [
    "Appended",
    "ChatTemplate",
    "Rerendering",
    "RewrittenTurn",
    "Turns",
    "answered_turns",
    "append_messages",
    "appended_after",
    "beginning",
    "check_unicode",
    "compare_log",
    "encode_after",
    "encode_conversation",
    "encode_last_turn",
    "encode_log",
    "encode_prompt_messages",
    "encode_turns",
    "learned_turns",
    "prompt_text",
    "validate_messages",
]
_PROBE = "RLJAX-CONTENT-OF-THE-LAST-TURN"
_END_OF = "-RLJAX-END-OF-{}-"  # behind the text of a message, by its number
_ENDS = re.compile(_END_OF.format(r"(\d{1,9})"))
_EMPTY = "|".join(rf"{re.escape(a)}\s*{re.escape(b)}" for a, b in MARKS)
_END_CHARACTERS = 200  # of a rendering, in which its last token is found, white space aside
_NO_REASONING = re.compile(r"<think>\s*</think>\s*")  # as templates write a turn without any
_TOOL_ANSWER = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "call00000"}
_QUESTION = {"role": "user", "content": _PROBE}
# What templates write for a turn without reasoning: a pair of marks, or the second one (GLM 4.7).
_NO_REASONING_START = re.compile(
    rf"^({_EMPTY}|{'|'.join(re.escape(close) for _, close in MARKS)})\s*"
)
_NO_REASONING_END = re.compile(
    rf"({_EMPTY}|{'|'.join(re.escape(close) for _, close in MARKS)})\s*$"
)
_OPENED = re.compile(f"({'|'.join(re.escape(opening) for opening, _ in MARKS)})\\s*$")


def without_opened_mark(prompt: str, response: str) -> str:
    """Returns the response without the mark that opens its reasoning where the prompt ends with
    it."""
    opened = _OPENED.search(prompt)
    begun = response.lstrip()
    return begun.removeprefix(opened[1]) if opened and begun.startswith(opened[1]) else response


class RewrittenTurn(InputError):
    """The error for a template that renders an earlier turn otherwise than the sampler's
    prompt continues."""


class Turns(NamedTuple):
    """The ids of a prompt, and what follows it: `ids` [n], the `mask` [n] of tokens that the
    assistant chose, the `text`, and in `offsets` the characters [a, b) of the text that each id
    covers."""

    prompt: list[int]
    ids: list[int]
    mask: list[int]
    text: str
    offsets: list[tuple[int, int]]


def prompt_text(
    tokenizer, messages: Sequence[Mapping], *, needs_tools: bool = True, **options
) -> str:
    """Returns the text that the sampler is given: the messages and the beginning of an assistant's
    turn.

    `options` are tools, documents and variables of the template. Messages that end with a turn of
    the assistant are continued where it ends (a prefill). Raises InputError where the template
    leaves out what a message says, or, with `needs_tools`, the tools.
    """
    render_arguments = beginning(messages)
    text = tokenizer.render_chat(messages, **render_arguments, **options)
    check_conversation(
        tokenizer, messages, text, options, needs_tools=needs_tools, **render_arguments
    )
    return text


def beginning(messages: object) -> dict[str, bool]:
    """Returns the render arguments that begin the assistant's turn: a new one, or the last one."""
    last = messages[-1] if isinstance(messages, (list, tuple)) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        return dict(add_generation_prompt=False, continue_final_message=True)
    return {}


def encode_prompt_messages(tokenizer, messages: Sequence[Mapping], **options) -> list[int]:
    """Returns the ids of `prompt_text`, with the same errors."""
    return tokenizer.encode(prompt_text(tokenizer, messages, **options))


def encode_conversation(
    tokenizer,
    messages: Sequence[Mapping],
    learned: Sequence[int] | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], list[int]]:
    """Returns the token ids [n] of a finished conversation, and a mask [n]: 1 on the turns
    `learned`, each with its stop token; by default those of `answered_turns`.

    In a template with `{% generation %}` blocks it is 1 on the text in them, and the stop token.
    Raises RewrittenTurn where the conversation does not hold a turn as the sampler would be asked
    for it: use `encode_last_turn` for each turn then.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    if learned is None:
        learned = answered_turns(tokenizer, messages, 0, options)[0]
    if not learned:
        text = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
        ids = tokenizer.encode(text)
        return ids, [0] * len(ids)
    turns = _encode_pieces(tokenizer, messages, learned, options)
    return turns.prompt + turns.ids, [0] * len(turns.prompt) + turns.mask


def encode_turns(
    tokenizer,
    messages: Sequence[Mapping],
    first: int,
    learned: Sequence[int] | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
    continues: bool = True,
) -> Turns:
    """Returns the prompt `messages[:first]`, and what follows it: mask 1 on the turns `learned`, by
    default those of `learned_turns`.

    The prompt is encoded alone, as it is for the sampler: no token spans the border. With
    `continues`, a prompt that ends with a turn of the assistant is continued by the first message
    of `messages[first:]`; else two turns of the assistant follow each other. Raises InputError if
    `first` is 0, if the last message is not the assistant's, and if the template leaves out what a
    message says; RewrittenTurn as `encode_conversation` does.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    _require_assistant_last(messages)
    if not first:
        raise InputError(
            "a conversation begins with the assistant",
            value=messages[0].get("content"),
            rule="a turn that is learned answers something",
            fix="put a user or system message first",
        )
    if learned is None:
        learned = [k for k in learned_turns(messages) if k >= first]
    follows_assistant = messages[first - 1].get("role") == "assistant" == messages[first]["role"]
    if not (follows_assistant and continues):
        return _encode_pieces(tokenizer, messages, learned, options, first=first)
    prompt = prompt_text(tokenizer, messages[:first], **options)
    prefill, continuation = messages[first - 1], messages[first]
    joined = {
        **prefill,
        **continuation,
        "content": prefill["content"] + (continuation.get("content") or ""),
    }
    joined.pop(LEARN, None)
    messages = [*messages[: first - 1], joined, *messages[first + 1 :]]
    return _encode_pieces(
        tokenizer,
        messages,
        [k - 1 for k in learned],
        options,
        first=first - 1,
        prompt=prompt,
        prefill_rest=continuation,
    )


def encode_last_turn(
    tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], list[int]]:
    """Returns the token ids [n] of a conversation that ends with an assistant's turn, and a mask
    [n] that is 1 on that turn only.

    `encode_last_turn(tokenizer, messages[: k + 1])` for every assistant turn k is what the policy
    reads and writes at each, whatever the template later makes of its history.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    turn = encode_turns(tokenizer, messages, len(messages) - 1, continues=False, **options)
    return turn.prompt + turn.ids, [0] * len(turn.prompt) + turn.mask


def encode_log(
    tokenizer,
    messages: Sequence[Mapping],
    first: int,
    learned: Sequence[int] | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> Turns:
    """Encodes a conversation as `encode_turns` does, but as a rollout would have written it, for a
    template that rewrites earlier turns: each turn as the policy writes it, and behind it the text
    that the new messages add."""
    options = dict(tools=tools, documents=documents, variables=variables)
    _require_assistant_last(messages)
    prompt = encode_prompt_messages(tokenizer, messages[:first], **options)
    ids, mask, offsets, text = [], [], [], ""
    learned = learned_turns(messages) if learned is None else learned
    turns = [k for k in range(first, len(messages)) if messages[k]["role"] == "assistant"]
    for k, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn = _turn(tokenizer, messages, k, options, None)
        check_turn_prompt(tokenizer, messages[: k + 1], turn.prompt, options)
        check_turn(tokenizer, k, messages[k], turn.written)
        turn_ids, spans = encode_after(tokenizer, [*prompt, *ids][-1], turn.written)
        ids += turn_ids
        mask += [int(k in learned)] * len(turn_ids)
        offsets += [(start + len(text), end + len(text)) for start, end in spans]
        text += turn.written
        if following < len(messages):
            new = messages[k + 1 : following]
            added = append_messages(
                tokenizer, [*prompt, *ids], messages[: k + 1], new, **options
            ).ids
            ids += added
            mask += [0] * len(added)
            offsets += [(len(text), len(text))] * len(added)
    return Turns(prompt, ids, mask, text, offsets)


def learned_turns(messages: Sequence[Mapping]) -> list[int]:
    """Returns the turns of the assistant that are learned: all but those with `"learn": False`."""
    return [
        k for k, m in enumerate(messages) if m["role"] == "assistant" and m.get(LEARN) is not False
    ]


def answered_turns(
    tokenizer, messages: Sequence[Mapping], first: int, options: Mapping
) -> tuple[list[int], list[int]]:
    """Splits the `learned_turns` from message `first` on: those that answer a message, and those
    that do not: a greeting before the first question, also behind a system message, and a turn for
    which no prompt can be rendered."""
    answered, unanswered = [], []
    for k in learned_turns(messages):
        if k >= first:
            is_asked = _is_asked(tokenizer, messages, k, first, options)
            (answered if is_asked else unanswered).append(k)
    return answered, unanswered


def _is_asked(tokenizer, messages, k: int, first: int, options: Mapping) -> bool:
    asking = [n for n, m in enumerate(messages) if m["role"] not in NOT_ASKING]
    if asking and asking[0] < k:
        return True
    if not first and asking and messages[asking[0]]["role"] == "user":
        return False  # the question is yet to come, even if a template renders instructions alone
    try:
        return k > 0 and bool(_prompt(tokenizer, messages, k, options))
    except InputError:  # "No user query found in messages."
        return False


# -- the text of the turns --


class _Turn(NamedTuple):
    """A turn of the assistant in two texts: its prompt, and the text that the policy writes to
    it."""

    prompt: str
    written: str
    # Number of characters at the end of `written` that the template does not write: GLM's token of
    # the next role, or the end-of-text token.
    added: int
    rendered: str  # the conversation up to the turn, as the template writes it
    begin: int | None  # where the turn begins in it; None where it is not written there


def _encode_pieces(
    tokenizer, messages, learned, options, *, first=None, prompt=None, prefill_rest=None
) -> Turns:
    """Encodes the conversation in pieces: the texts that are read, and the turns that are written,
    each behind the piece before it, so that no token spans a border. If the prompt of message
    `first` holds the beginning of the message, `prompt` is that prompt, and `prefill_rest` the
    message with the rest of it."""
    last = len(messages) - 1
    turns = {
        k: _turn(tokenizer, messages, k, options, prompt if k == first else None) for k in learned
    }
    last_text = turns[last].rendered if last in turns else None
    text, spans = tokenizer.render_marked(messages, text=last_text, **options)
    is_read_alone = last in turns and not text.startswith(turns[last].prompt)
    for k, turn in turns.items():
        text, spans = _place_turn(turn, text, spans, k, last)
    for k, turn in turns.items():  # again, for the end of the last turn may have changed the text
        _place_turn(turn, text, spans, k, None)
        message = prefill_rest if prefill_rest and k == first else messages[k]
        check_turn(tokenizer, k, message, turn.written)
    if is_read_alone:  # no rendering of the whole: the last turn is read behind its own prompt
        check_turn_prompt(tokenizer, messages, turns[last].prompt, options)
    else:
        check_conversation(tokenizer, messages, text, options, add_generation_prompt=False)
    if prompt is None and first is not None:
        prompt = _prompt(tokenizer, messages, first, options)
    if prompt is not None and not text.startswith(prompt):
        raise _rewritten_error(f"the prompt, messages 0..{first - 1},", prompt, text)
    borders = [0, *(() if prompt is None else (len(prompt),)), len(text)]
    learned_spans = {}
    for turn in turns.values():
        begin = len(turn.prompt)
        learned_spans[begin] = _learned_spans(turn, spans, tokenizer)
        borders += [begin, begin + len(turn.written)]
    borders = sorted(set(borders))
    pieces = [(text[a:b], learned_spans.get(a, [])) for a, b in itertools.pairwise(borders)]
    return _encode_joined(tokenizer, pieces, borders[1] if prompt is None else len(prompt))


def _place_turn(turn: _Turn, text: str, spans, k: int, last: int):
    """Returns the text of the conversation and its marks, once turn `k` is found in it. Raises
    RewrittenTurn where it is not."""
    turn_text = turn.prompt + turn.written
    if text.startswith(turn_text):
        return text, spans
    rendered = turn_text[: len(turn_text) - turn.added]
    if k == last:  # the end of the last turn, or all before it, is not as the template writes it
        return turn_text, spans if text.startswith(rendered) else _moved_spans(turn, spans)
    raise _rewritten_error(f"message {k}", turn_text, text)


def _moved_spans(turn: _Turn, spans) -> list[tuple[int, int]] | None:
    """Returns the marks of a turn behind its own prompt, where a rendering has it behind another
    text."""
    if spans is None or turn.begin is None:
        return None
    shift = len(turn.prompt) - turn.begin
    return [(max(a, turn.begin) + shift, b + shift) for a, b in spans if b > turn.begin]


def _rewritten_error(subject: str, expected: str, text: str) -> RewrittenTurn:
    common = len(os.path.commonprefix([expected, text]))
    return RewrittenTurn(
        f"the chat template is not append-only: {subject} is not the same at the end of a"
        " conversation and within one",
        value=tuple(t[max(0, common - 20) : common + 20] for t in (expected, text)),
        rule="the policy would learn a turn that it is never asked for",
        fix="data.turns='each' makes an example of each turn, data.turns='last' of the last one",
    )


def _prompt(tokenizer, messages, k: int, options) -> str:
    return tokenizer.render_chat(messages[:k], add_generation_prompt=True, **options)


def _turn(tokenizer, messages, k: int, options, prompt: str | None) -> _Turn:
    """Returns message `k` as the policy writes it to the messages before it, up to its stop token.
    `prompt` is its prompt where that holds the beginning of the message, else None."""
    is_begun = prompt is not None
    if not is_begun:
        prompt = _prompt(tokenizer, messages, k, options)
    through = tokenizer.render_chat(messages[: k + 1], add_generation_prompt=False, **options)
    if through.startswith(prompt):
        written, opened = through[len(prompt) :], _OPENED.search(prompt)
        # A template may leave it to the text of a turn to end its reasoning (Nemotron Nano 2).
        if not is_begun and opened and dict(MARKS)[opened[1]] not in written:
            supplied = _turn_behind_supplied(tokenizer, messages[: k + 1], options, prompt, through)
            written = written if supplied is None else supplied
    else:
        written = _turn_behind_prompt(tokenizer, messages[: k + 1], options, prompt, through)
    begin = len(through) - len(written) if through.endswith(written) else None
    ended = _up_to_stop(tokenizer, written)
    if ended is None:
        end, written = _with_missing_end(tokenizer, messages, k, options, through, written)
        return _Turn(prompt, written + end, len(end), through, begin)
    return _Turn(prompt, ended, 0, through, begin)


def _up_to_stop(tokenizer, written: str) -> str | None:
    """Returns a turn up to its stop token, the first of those at its end; None where it has none.
    Raises InputError for a stop token in the middle: the sampler would end there."""
    ids, offsets = tokenizer.encode_with_offsets(written)
    end = None
    for i, (a, b) in zip(reversed(ids), reversed(offsets), strict=True):
        if i in tokenizer.eos_ids:
            end = b
        elif written[a:b].strip():
            break
    else:
        return written[:end] if end else None
    stops = []
    if not set(ids).isdisjoint(tokenizer.eos_ids):
        stops = [(i, b) for i, (_, b) in zip(ids, offsets, strict=True) if i in tokenizer.eos_ids]
    if stops and stops[0][1] < (end or len(written)):
        shown = tokenizer.decode([stops[0][0]], skip_special_tokens=False)
        raise InputError(
            f"a turn of the assistant holds the stop token {shown!r}",
            value=written[: stops[0][1]][-60:],
            rule="decoding ends there, so what follows would never be written",
            fix="take the token out of the text, or end the turn there",
        )
    return written[:end] if end else None


def _with_missing_end(
    tokenizer, messages, k, options, through: str, written: str
) -> tuple[str, str]:
    """Returns (the end, the text) of a turn that the template ends with no stop token. The end is
    the token of the next message where the template begins each with one, else the end-of-text
    token."""
    marks = [end.id for end in tokenizer.turn_ends if end.next_role]
    has_calls = bool(messages[k].get("tool_calls"))
    following = [messages[k + 1 : k + 2], [_TOOL_ANSWER] if has_calls else [], [_QUESTION]]
    for new in following if marks else ():
        try:
            longer = tokenizer.render_chat([*messages[: k + 1], *new], **options)
        except InputError:
            continue
        added = longer[len(through) :] if new and longer.startswith(through) else ""
        ids, offsets = tokenizer.encode_with_offsets(added)
        if ids and ids[0] in tokenizer.eos_ids:
            return added[slice(*offsets[0])], written
    if not tokenizer.turn_ends:
        ids = tokenizer.encode(written.rstrip())
        if ids and ids[-1] in tokenizer.special_ids:
            raise InputError(
                "the chat template ends a turn with a token that does not stop decoding",
                value=tokenizer.decode(ids[-1:], skip_special_tokens=False),
                rule="what a turn is learned to end with is what a response ends with",
                fix="name the token's id in eos_token_id of the model's generation_config.json",
            )
    # The template puts white space between turns: the policy stops before it.
    end = tokenizer.decode([*marks, *tokenizer.eos_ids][:1], skip_special_tokens=False)
    return end, written if marks else written.rstrip()


def _turn_behind_prompt(tokenizer, messages, options, before: str, through: str) -> str:
    """Returns the text that the policy writes to the prompt `before` where the finished
    conversation `through` does not begin with that prompt. Raises InputError where none is found.
    """
    for find in (_turn_behind_other_history, _turn_behind_joined, _turn_behind_supplied):
        written = find(tokenizer, messages, options, before, through)
        if written is not None:
            return written
    common = len(os.path.commonprefix([before, through]))
    advice = ""
    if messages[-2]["role"] == "assistant":
        advice = "write both turns of the assistant in a row as one message, or "
    elif any(m.get("tool_calls") and m.get("content") for m in messages[:-1]):
        advice = "write what is said beside a call as a message of its own before it, or "
    raise InputError(
        "the chat template begins the assistant's turn otherwise than its generation prompt",
        value=(before[max(0, common - 20) :][:60], through[max(0, common - 20) :][:60]),
        rule="what is learned must continue the prompt that the sampler is given",
        fix=f"{advice}use a template whose generation prompt is the beginning of a turn",
    )


def _turn_behind_other_history(tokenizer, messages, options, before, through) -> str | None:
    """Returns the last turn's text where the template renders the history otherwise once the turn
    is there: gpt-oss drops the reasoning of calls, Mistral moves the system message.

    Behind the text of the message that the turn answers, both then go on alike: with its end and
    the header of the turn. None where they do not. A prompt may end with an instruction that the
    conversation has elsewhere, or not at all: what surrounds that is then not there either.
    """
    history, last = messages[:-1], len(messages) - 2
    marked = [_with_mark(message, _END_OF.format(n)) for n, message in enumerate(history)]
    try:
        prompt = _prompt(tokenizer, marked, len(marked), options)
        conversation = tokenizer.render_chat(
            [*marked, messages[-1]], add_generation_prompt=False, **options
        )
    except InputError:  # a template that reads contents
        return None
    prompt_mark, prompt_end = _behind_last_mark(prompt)
    whole_mark, conversation_end = _behind_last_mark(conversation)
    instructions = {n for n, m in enumerate(history) if m["role"] in ("system", "developer")}
    if prompt_mark not in instructions | {last} or whole_mark not in (last, prompt_mark):
        return None
    if prompt_mark == whole_mark:
        start = len(prompt_end) if conversation_end.startswith(prompt_end) else None
        if start is None and history[last]["role"] != "assistant":
            start = _start_behind_header(tokenizer, marked, options, prompt, conversation_end)
    else:
        sizes = range(min(len(prompt_end), len(conversation_end), _END_CHARACTERS), 0, -1)
        shared = (
            n
            for n in sizes
            if prompt_end.endswith(conversation_end[:n]) and conversation_end[:n].strip()
        )
        start = next(shared, None)
    if start is None or not (before.endswith(prompt_end) and through.endswith(conversation_end)):
        return None
    return conversation_end[start:]


def _start_behind_header(
    tokenizer, marked, options, prompt: str, conversation_end: str
) -> int | None:
    """Returns the character at which the turn begins in `conversation_end`, the text of a
    conversation behind its last message but one: behind the header that the `prompt` ends with. The
    end of that message may be another one once the turn is there (Hermes). None without a
    header."""
    try:
        history = tokenizer.render_chat(marked, add_generation_prompt=False, **options)
    except InputError:
        return None
    header = prompt.removeprefix(history) if prompt.startswith(history) else ""
    before, has_header, _ = conversation_end.partition(header) if header.strip() else ("", "", "")
    return len(before) + len(header) if has_header else None


def _with_mark(message: Mapping, mark: str) -> dict:
    """Returns the message with a mark behind its content and the names of its calls."""
    marked, content = dict(message), message.get("content")
    if isinstance(content, (list, tuple)):
        marked["content"] = [*content, {"type": "text", "text": mark}]
    elif isinstance(content, str) and (content.strip() or message["role"] != "assistant"):
        marked["content"] = content + mark
    if message.get("tool_calls"):
        marked["tool_calls"] = [renamed(call, f"call{mark}") for call in message["tool_calls"]]
    return marked


def _behind_last_mark(text: str) -> tuple[int | None, str]:
    """Returns (the number of the message whose mark is the last one in a rendering, the text behind
    that mark); (None, "") without a mark."""
    *_, end = [None, *_ENDS.finditer(text)]
    return (None, "") if end is None else (int(end[1]), text[end.end() :])


def _turn_behind_joined(tokenizer, messages, options, before, through) -> str | None:
    """Returns the last turn's text where the template joins it with the assistant's turns before
    it, under one header (Gemma 4): the text that the template writes of it without these. None
    where the turn has a header, or another text, in the conversation."""
    asking = [n for n, m in enumerate(messages) if m["role"] in ("system", "developer", "user")]
    question = messages[: asking[-1] + 1] if asking else ()
    if not question or len(question) == len(messages) - 1:
        return None
    short_conversation = [*question, messages[-1]]
    try:
        question_text, short_text, history = (
            tokenizer.render_chat(m, add_generation_prompt=False, **options)
            for m in (question, short_conversation, messages[:-1])
        )
        prompt = _prompt(tokenizer, question, len(question), options)
    except InputError:  # a template that needs another question
        return None
    if short_text.startswith(prompt):
        written = short_text[len(prompt) :]
    else:
        written = _turn_behind_other_history(
            tokenizer, short_conversation, options, prompt, short_text
        )
    if not written or not through.endswith(written):
        return None
    if not (before.startswith(history) and prompt.startswith(question_text)):
        return None
    header, usual_header = before[len(history) :], prompt[len(question_text) :]
    is_joined = header.strip() and not through.removesuffix(written).endswith(header)
    return written if is_joined and header.endswith(usual_header) else None


def _turn_behind_supplied(tokenizer, messages, options, before, through) -> str | None:
    """Returns the last turn's text where the generation prompt supplies what the template leaves
    out of a finished turn: <think>, or an empty reasoning.

    The turn is then its reasoning, the mark that ends it, and the text that the template writes of
    the rest. None where the turn does not begin as the prompt does.
    """
    message = messages[-1]
    reasoning, answer = split_reasoning(message)
    answer_message = without_reasoning(message, answer)

    def render_last(last):
        return tokenizer.render_chat([*messages[:-1], last], add_generation_prompt=False, **options)

    text, opened = render_last(answer_message), _OPENED.search(before)
    turn_start, probe, _ = render_last({**answer_message, "content": _PROBE}).partition(_PROBE)
    header = _NO_REASONING_END.sub("", turn_start)
    if not (probe and before.startswith(header) and text.startswith(header)):
        # A template may open the reasoning of a call in the prompt alone (Nemotron Nano 2).
        header = before[: opened.start()] if opened else before
        if not text.startswith(header):
            return None
    text_after, supplied = _NO_REASONING_START.sub("", text[len(header) :]), before[len(header) :]
    if opened is None:
        if through.startswith(header) and not any(
            mark in supplied for mark in itertools.chain(*MARKS)
        ):
            return through[len(header) :]
        return text_after  # if the row has reasoning, the comparison with the row misses it
    close = dict(MARKS)[opened[1]]
    separator = "\n" if before.endswith("\n") else ""
    if not separator and probe and text.startswith(turn_start):
        # With the white space behind an empty reasoning.
        text_after = _NO_REASONING_START.sub("", text[len(turn_start) :])
    return f"{reasoning}{separator}{close}{2 * separator}{text_after}"


# -- text to ids --


def _learned_spans(turn: _Turn, spans, tokenizer) -> list[tuple[int, int]]:
    """Returns the characters [a, b) of a turn that are learned: all, or those that the template
    marks and the end."""
    size, begin = len(turn.written), len(turn.prompt)
    if spans is None:
        return [(0, size)]
    inside = [(max(a - begin, 0), min(b - begin, size)) for a, b in spans]
    inside = [(a, b) for a, b in inside if a < b]
    if not inside:
        return []
    # The policy has to write everything behind the prompt: the first span begins there.
    inside[0] = (0, inside[0][1])
    ids, offsets = tokenizer.encode_with_offsets(turn.written)
    return [*inside, offsets[-1]] if ids and ids[-1] in tokenizer.eos_ids else inside


def _encode_joined(tokenizer, pieces, prompt_size: int) -> Turns:
    """Encodes the pieces, (text, learned characters [a, b) of it), of which the first `prompt_size`
    characters are the prompt."""
    prompt, ids, mask, offsets, text, position = [], [], [], [], "", 0
    for piece, learned in pieces:
        if not piece:
            continue
        if not (prompt or ids):
            piece_ids, spans = tokenizer.encode_with_offsets(piece)
        else:
            piece_ids, spans = encode_after(tokenizer, (ids or prompt)[-1], piece)
        if position < prompt_size:
            prompt += piece_ids
        else:
            ids += piece_ids
            if learned == [(0, len(piece))]:
                mask += [1] * len(piece_ids)
            else:
                mask += [int(any(a < y and b > x for x, y in learned)) for a, b in spans]
            offsets += [(a + len(text), b + len(text)) for a, b in spans]
            text += piece
        position += len(piece)
    if not prompt:
        raise InputError("the turn answers an empty prompt", fix="use a template that writes one")
    return Turns(prompt, ids, mask, text, offsets)


def encode_after(tokenizer, last: int, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns ids and offsets of a text that stands behind the token `last`, not at the beginning
    of a text.

    Tokenizers of the sentencepiece kind put a space in front of a text; encoded behind a special
    token or a newline, the text gets what it has in the middle of a conversation.
    """
    if tokenizer.context_free:
        return tokenizer.encode_with_offsets(text)
    context = "\n"
    if last in tokenizer.special_ids:
        context = tokenizer.decode([last], skip_special_tokens=False)
    context_ids = tokenizer.encode(context)
    ids, offsets = tokenizer.encode_with_offsets(context + text)
    size = len(context_ids)
    if ids[:size] != context_ids:  # the newline is one token with what follows
        return tokenizer.encode_with_offsets(text)
    return ids[size:], [(max(a - len(context), 0), b - len(context)) for a, b in offsets[size:]]


# -- a log of ids that only grows --


def _require_assistant_last(messages: Sequence[Mapping]) -> None:
    if messages[-1]["role"] != "assistant":
        raise InputError(
            "the last message is not the assistant's",
            value=messages[-1]["role"],
            rule="what follows is appended to a turn that the policy wrote",
            fix="pass the messages up to and including the assistant's turn",
        )


class Rerendering(enum.Enum):
    """Comparison of a grown log with the whole conversation rendered and tokenized anew."""

    SAME = "same"  # id for id
    RETOKENIZED = "retokenized"  # the same text in other tokens
    REWRITTEN = "rewritten"  # another text: the template, or the parser of the turn, changed it


@dataclasses.dataclass(frozen=True)
class Appended:
    """Ids to append to a log. The policy chose none of them: their mask is 0.

    The first `closing` of them end the last turn, where it was cut before its end token.
    `first_difference` is the first index at which the grown log differs from the rerendering.
    """

    ids: list[int]
    closing: int
    rerendering: Rerendering
    first_difference: int | None


def append_messages(
    tokenizer,
    ids: Sequence[int],
    messages: Sequence[Mapping],
    new: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> Appended:
    """Returns the ids by which a log grows when `new` messages (a tool's answer, a user) follow a
    turn.

    `ids` are the log so far: a prompt and what was sampled on it. `messages` are the same as
    messages, ending with the assistant's sampled turn. The next prompt is `ids + appended.ids`, so
    it begins with the log whatever the template or the tokenizer would make of the whole. Raises
    InputError for an empty log, and if the last of `messages` is not the assistant's.
    """
    validate_messages(messages)
    _require_assistant_last(messages)
    if not ids:
        raise InputError("the log of ids is empty", fix="begin it with encode_chat(messages)")
    options = dict(tools=tools, documents=documents, variables=variables)
    prompt = dict(add_generation_prompt=add_generation_prompt)
    rendered = tokenizer.render_chat([*messages, *new], **prompt, **options)
    closing, suffix = _added_text(
        tokenizer, messages, new, rendered, ids[-1] in tokenizer.eos_ids, **prompt, **options
    )
    appended, offsets = encode_after(tokenizer, ids[-1], closing + suffix)
    ended = ids[-1] in tokenizer.eos_ids
    cut = 0 if ended else sum(stop <= len(closing) for _, stop in offsets)
    return Appended(appended, cut, *compare_log(tokenizer, [*ids, *appended], rendered))


def compare_log(
    tokenizer, log: Sequence[int], rendered: str, *, complete: bool = True
) -> tuple[Rerendering, int | None]:
    """Compares a log of ids with the conversation that it stands for, `rendered` and tokenized
    anew. Returns the kind of difference, and the first index at which the ids differ,
    None if they are equal. A log that is not `complete` is compared with the beginning."""
    log_ids, new_ids = list(log), tokenizer.encode(rendered)
    if log_ids == (new_ids if complete else new_ids[: len(log_ids)]):
        return Rerendering.SAME, None
    texts = [tokenizer.decode(i, skip_special_tokens=False) for i in (log_ids, new_ids)]
    is_same_text = texts[0] == texts[1] if complete else texts[1].startswith(texts[0])
    rerendering = Rerendering.RETOKENIZED if is_same_text else Rerendering.REWRITTEN
    return rerendering, _common_length(log_ids, new_ids)


def appended_after(
    tokenizer,
    last: int,
    before: str,
    messages: Sequence[Mapping],
    new: Sequence[Mapping],
    *,
    written: str = "",
    tools: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], str, bool]:
    """Returns the ids of `append_messages`, encoding the new text alone; the rendering of all
    messages; and whether that still begins with the texts that were read and written.

    `last` is the log's last id, `before` the rendering that the last turn answered, and `written`
    the turn as it was sampled, with its calls. Where the template writes the turn so, a log of T
    turns is rendered once at each; append_messages also tokenizes all of it.
    """
    _require_assistant_last(messages)
    options = dict(tools=tools, variables=variables)
    rendered = tokenizer.render_chat([*messages, *new], add_generation_prompt=True, **options)
    content = (messages[-1].get("content") or "").strip()
    is_unchanged = rendered.startswith(before) and rendered[len(before) :].lstrip().startswith(
        content
    )
    ended = last in tokenizer.eos_ids
    text = _text_after(tokenizer, before, written or content, rendered, ended)
    if text is None:
        text = "".join(_added_text(tokenizer, messages, new, rendered, ended, **options))
    return encode_after(tokenizer, last, text)[0], rendered, is_unchanged


def _text_after(tokenizer, before: str, content: str, rendered: str, ended: bool) -> str | None:
    """Returns the text that follows the last turn, from its stop token on, where that is found at
    once: behind the prompt `before` and the turn's `content`. None where it has to be looked for.
    """
    if not rendered.startswith(before):
        return None
    continuation, stops = rendered[len(before) :], _stop_texts(tokenizer)
    candidates = [(continuation.find(stop), -len(stop)) for stop in stops if stop in continuation]
    if not candidates or any(stop in content for stop in stops):
        return None
    position, size = min(candidates)
    turn, answer = continuation[:position].strip(), content.rpartition("</think>")[2].strip()
    if turn not in (content.strip(), answer) and _NO_REASONING.sub("", turn, count=1) != answer:
        return None  # another turn's stop token, or calls that the template writes in its own way
    return continuation[position - size :] if ended else continuation[position:]


def _added_text(
    tokenizer, messages, new, rendered: str, ended: bool, *, add_generation_prompt=True, **options
) -> tuple[str, str]:
    """Returns the text that ends the last turn, and the text that the new messages add after it."""

    def render(history, following=(), prompt=False):
        return tokenizer.render_chat(
            [*history, *following], add_generation_prompt=prompt, **options
        )

    base, suffix = _new_text(tokenizer, render, messages, new, add_generation_prompt, rendered)
    closing, suffix = _closing(tokenizer, render, messages, base, suffix)
    if ended:  # the policy wrote an end token itself: it is not written again
        closing = _without_stop(tokenizer, closing)
    return closing, suffix


def _common_length(first: Sequence, second: Sequence) -> int:
    """Returns the length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _new_text(tokenizer, render, messages, new, prompt: bool, rendered: str) -> tuple[str, str]:
    """Returns a rendering that ends with the last turn, and the text that the new messages add to
    it.

    Where the template rewrites the turn once something follows it, a turn with a content that no
    template rewrites stands in for it, and only the text after that content is compared. What a
    template writes behind the turn's stop token at the end of a conversation alone (Phi-4-mini's
    eos) is no part of the turn.
    """
    base = render(messages)
    if rendered.startswith(base):
        return base, rendered[len(base) :]
    last = {**messages[-1], "content": _PROBE}
    for stand_in in (last, {"role": last["role"], "content": _PROBE}):
        history = [*messages[:-1], stand_in]
        base, longer = render(history), render(history, new, prompt)
        _, probe, after = base.partition(_PROBE)
        _, longer_probe, longer_after = longer.partition(_PROBE)
        if not (probe and longer_probe):
            continue
        if longer_after.startswith(after):
            return base, longer_after[len(after) :]
        common = after[: _common_length(after, longer_after)]
        positions = [
            common.index(stop) + len(stop) for stop in _stop_texts(tokenizer) if stop in common
        ]
        if positions:
            return base[: len(base) - len(after) + min(positions)], longer_after[min(positions) :]
    raise InputError(
        "the chat template changes how a turn ends when messages follow it",
        value=(base[-40:], rendered[-40:]),
        rule="then no text can be appended to what was sampled",
        fix="use a template that keeps the end of each turn",
    )


def _closing(tokenizer, render, messages, base: str, suffix: str) -> tuple[str, str]:
    """Returns the text that ends the last turn, from its end token on, and the suffix after
    that."""
    tail = base if not base[-_END_CHARACTERS:].strip() else base[-_END_CHARACTERS:]
    ids, offsets = tokenizer.encode_with_offsets(tail)
    for i, (start, stop) in zip(reversed(ids), reversed(offsets), strict=True):
        if i in tokenizer.eos_ids:
            return tail[start:], suffix
        if tail[start:stop].strip():
            break
    # No stop token is there: the turn ends with the text of the template behind a content, and with
    # a stop token if that is written once something follows.
    probe = {"role": "assistant", "content": _PROBE}
    _, _, after = render([*messages[:-1], probe]).partition(_PROBE)
    closing = after if base.endswith(after) else ""
    for stop in _stop_texts(tokenizer):
        if suffix.startswith(stop):
            return closing + stop, suffix[len(stop) :]
    return closing, suffix


def _without_stop(tokenizer, closing: str) -> str:
    """Returns the closing text without its stop token."""
    for stop in _stop_texts(tokenizer):
        if stop in closing:
            return closing.replace(stop, "", 1)
    return closing


def _stop_texts(tokenizer) -> list[str]:
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_ids}
    return sorted(texts - {""}, key=len, reverse=True)
