"""One seat's conversation: its messages, and the log of token ids that only grows.

Ids that were read or sampled are never tokenized again; new text is appended. A tokenizer without a
chat template puts texts behind one another as they are. Lengths are in tokens.
"""

import functools
from collections.abc import Mapping, Sequence

from rljax.data.text.chat import appended_after, compare_log, encode_after, prompt_text
from rljax.data.text.contents import check_messages
from rljax.data.text.control_tokens import Marks, parted_messages, parted_pieces
from rljax.environments.calls import Parsed, assistant_message
from rljax.errors import InputError
from rljax.reasoning import answer_of, beginning_of, response_of

TAIL = 16  # tokens at the end of a log in which its last mark is found
CHARACTERS_PER_TOKEN = 64  # characters beyond which a text that is too long is not tokenized


class Conversation:
    """Messages, ids [n] and their rendering. `ids` are those of the row that is being written;
    `limit` is that of one observation, in tokens."""

    def __init__(self, tokenizer, limit: int, *, rewrite: bool, variables=None):
        self.tokenizer, self.limit, self.rewrite = tokenizer, limit, rewrite
        self.variables: dict = dict(variables or {})  # variables of the chat template
        self.messages: list[dict] | None = None  # None: plain texts behind one another
        self.tools: list | None = None
        self.ids: list[int] = []
        self._rendered = ""  # text that the policy's turn answers, as the template writes it
        self._written = ""  # the policy's last turn

    def begin(self, messages: Sequence[Mapping] | None, ids=None, tools=()) -> list[int]:
        """The ids [n] of the first prompt, encoded from messages unless they are given. Raises
        InputError if the template refuses the messages."""
        templated = self.tokenizer.has_chat_template and messages is not None
        self.tools = list(tools) if tools and templated else None
        if templated:
            self.messages = [dict(message) for message in messages]
            # A last turn of the assistant is one that the policy goes on with. A template may write
            # no tools: an environment may tell of them itself.
            self._rendered = prompt_text(
                self.tokenizer, self.messages, needs_tools=False, **self._options
            )
            if ids is None or self.tools:
                ids = self.tokenizer.encode(self._rendered)
        elif ids is None:
            text = "".join(message.get("content") or "" for message in messages)
            ids = self.tokenizer.encode(text, add_special_tokens=True)
        self.ids = [int(i) for i in ids]
        return self.ids

    @property
    def _options(self) -> dict:
        """Options of the chat template."""
        return dict(tools=self.tools, variables=self.variables)

    @property
    def begun(self) -> str:
        """Returns the text by which the prompt begins the reasoning of the policy's next turn."""
        return beginning_of(*self._asked())

    def _asked(self) -> tuple[str, list[dict] | None]:
        """Returns the text of the prompt of the policy's next turn, or the end of
        it, and its messages."""
        if self.messages is not None:
            return self._rendered, self.messages
        return self.tokenizer.decode(self.ids[-TAIL:], skip_special_tokens=False), None

    def answer(self, ids: Sequence[int]) -> str:
        """Returns the text behind the reasoning of a turn that the policy has written."""
        return answer_of(response_of(self.tokenizer, ids, *self._asked()))

    def said(self, ids: Sequence[int], text: str, parsed: Parsed) -> None:
        """Appends the policy's turn: its ids, its text, and the parsed reply."""
        self.ids, self._written = [*self.ids, *ids], text
        if self.messages is None:
            return
        separate = bool(parsed.reasoning) and _reads_reasoning_apart(self.tokenizer)
        message = assistant_message(text, parsed, apart=separate)
        if self.messages[-1]["role"] == "assistant":  # the policy has continued this message
            opened = self.messages.pop()
            message = {**opened, **message, "content": _joined(opened, message)}
        self.messages.append(message)

    def append(self, new: Sequence[Mapping], *, look: bool) -> tuple[list[int], bool, str]:
        """Appends messages of the environment. Returns (the ids to append, or a whole new prompt;
        whether it is a new prompt; the drift if `look`, else ""). Raises InputError if the template
        leaves out what they say."""
        if self.messages is None:
            text = "".join(message.get("content") or "" for message in new)
            ids = encode_after(self.tokenizer, self.ids[-1], text)[0] if text else []
            self.ids = [*self.ids, *ids]
            return ids, False, ""
        prompt, options = self._rendered, dict(written=self._written, **self._options)
        ids, rendered, unchanged = appended_after(
            self.tokenizer, self.ids[-1], prompt, self.messages, new, **options
        )
        check_messages(
            self.tokenizer,
            new,
            rendered[len(prompt) :] if rendered.startswith(prompt) else rendered,
        )
        self.messages += [dict(message) for message in new]
        self._rendered = rendered
        drift = ""
        if look:
            drift = compare_log(self.tokenizer, [*self.ids, *ids], rendered)[0].value
        if self.rewrite and not unchanged:
            self.ids = self.tokenizer.encode(rendered)
            return self.ids, True, drift
        self.ids = [*self.ids, *ids]
        return ids, False, drift

    def final_drift(self) -> str:
        """The drift of a log that ends with the policy's turn; "" without a chat template."""
        if self.messages is None or self.messages[-1]["role"] != "assistant":
            return ""
        try:
            rendered = self.tokenizer.render_chat(
                self.messages, add_generation_prompt=False, **self._options
            )
        except InputError:  # a template that refuses what the policy wrote
            return "rewritten"
        return compare_log(self.tokenizer, self.ids, rendered, complete=False)[0].value

    def shortened(self, messages: Sequence[Mapping]) -> list[dict]:
        """The messages of an observation with at most `limit` tokens of content: the longest ones
        keep their heads and tails."""
        return shortened(self.tokenizer, messages, self.limit)


def _joined(opened: Mapping, message: Mapping) -> str:
    """Returns the content of a turn that was begun, followed by the text that the policy wrote."""
    text = opened.get("content") or ""
    if not isinstance(text, str):
        text = "".join(part.get("text") or "" for part in text)
    return text + (message.get("content") or "")


@functools.lru_cache(maxsize=8)
def _reads_reasoning_apart(tokenizer) -> bool:
    """Returns whether the chat template writes a turn's reasoning_content, and another text where
    the reasoning stands in the content, in its marks."""
    question = {"role": "user", "content": "Q"}
    inline = {"role": "assistant", "content": "<think>\nWHY\n</think>\n\nANSWER"}
    separate = {"role": "assistant", "content": "ANSWER", "reasoning_content": "WHY"}
    try:
        first, second = (
            tokenizer.render_chat([question, message], add_generation_prompt=False)
            for message in (inline, separate)
        )
    except InputError:
        return False
    return "WHY" in second and first != second


def shortened(tokenizer, messages: Sequence[Mapping], limit: int) -> list[dict]:
    """Messages whose contents have `limit` tokens together at most; in answers of tools stands no
    mark of the chat template."""
    messages = parted_messages(tokenizer, messages, tokenizer.template_marks)
    texts = [message.get("content") or "" for message in messages]
    if sum(map(len, texts)) * 4 <= limit:  # no tokenizer makes more than four tokens of a character
        return [dict(message) for message in messages]
    capped = [len(text) > CHARACTERS_PER_TOKEN * limit for text in texts]
    sizes = [
        limit + 1 if cut else len(tokenizer.encode(text))
        for text, cut in zip(texts, capped, strict=True)
    ]
    share = _share(sizes, limit)
    return [
        dict(message)
        if size <= share
        else {**message, "content": _cut(tokenizer, text, share, _control(tokenizer, message))}
        for message, text, size in zip(messages, texts, sizes, strict=True)
    ]


def _control(tokenizer, message: Mapping) -> Marks:
    """Returns the marks that must not form in a message's text where it is cut."""
    return tokenizer.template_marks if message.get("role") == "tool" else tokenizer.special_ids


def _share(sizes: Sequence[int], limit: int) -> int:
    """Returns the greatest number c with sum(min(size, c)) <= limit."""
    remaining, count = limit, len(sizes)
    for size in sorted(sizes):
        if size * count > remaining:
            return remaining // count
        remaining, count = remaining - size, count - 1
    return limit


def _cut(tokenizer, text: str, limit: int, control: Marks) -> str:
    """Returns head and tail of a text, with the number of tokens or characters that were
    left out between them."""
    most = CHARACTERS_PER_TOKEN * limit
    complete = len(text) <= most
    head_ids = tokenizer.encode(text if complete else text[:most])
    tail_ids = head_ids if complete else tokenizer.encode(text[-most:])
    room = limit
    while room > 0:
        head, tail = head_ids[: (room + 1) // 2], tail_ids[len(tail_ids) - room // 2 :]
        # Half a character at a cut decodes to U+FFFD.
        first, last = (tokenizer.decode(ids).strip("\ufffd") for ids in (head, tail))
        if complete:
            left_out = f"[{len(head_ids) - room} tokens cut]"
        else:
            left_out = f"[{len(text) - len(first) - len(last)} characters cut]"
        excess = 1
        for between in (left_out, ""):  # an alphabet may not have these characters
            try:
                joined = "".join(parted_pieces(tokenizer, [first, between, last], control))
                excess = len(tokenizer.encode(joined)) - limit
            except InputError:
                continue
            if excess <= 0:
                return joined
            break
        room -= excess
    return ""
