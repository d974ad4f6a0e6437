"""Text to token ids and back: one interface, two implementations, and the stop tokens of a model.

`CharTokenizer` is for procedural tasks, `HuggingFaceTokenizer` reads a model folder (tokenizer.json
and the files beside it, see `tokenizer_files`) with the `tokenizers` package. Templates are
rendered in `template`. The ids carry no meaning but their text: padding travels as lengths and
masks and is never read from an id, for `pad_id` may be an end token too.
"""

import abc
import collections
import datetime
import functools
import hashlib
import json
import os
import shutil
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from rljax import hub
from rljax.data.text.control_tokens import closing_tags, parted_messages, parted_texts
from rljax.data.text.ends import PROBED_TOOL, EndOfTurn, always_opened, turn_ends
from rljax.data.text.messages import check_unicode
from rljax.data.text.template import ChatTemplate, checked_variables
from rljax.data.text.tokenizer_files import (
    COPY_AGAIN,
    TEMPLATE_FOLDER,
    complete_added_tokens,
    load_library,
    read_optional,
    read_special_tokens,
    read_templates,
)
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.gguf import names_the_file
from rljax.reasoning import MARKS

MOST_CHARACTERS = 200_000  # of an alphabet; Unicode has 150,000
LONG_TEXT = 10_000  # characters
# Only batches of one are encoded: threads would gain nothing, and warn where a process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHAR_FILE = "char_tokenizer.json"
FOLDER_FILES = (  # of an exported model folder, so that others tokenize and stop alike
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Tokenizer(abc.ABC):
    """The interface of a tokenizer.

    `eos_ids` is the stop set; its first id is the tokenizer's own end token, which supervised
    examples get appended. `turn_ends` are the tokens of it that end a turn in the chat template.
    `special_ids` are ids that `decode` leaves out. `template_ids` are these and the other added
    tokens that the chat template writes, such as </tool_response> and <think>. `closing_tags` are
    texts by which the chat template closes a block, and which are no tokens.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    template_ids: frozenset[int]
    closing_tags: frozenset[str] = frozenset()
    has_chat_template: bool = False
    turn_ends: tuple[EndOfTurn, ...] = ()
    variables: Mapping[str, object] = types.MappingProxyType({})  # of the chat template
    now: datetime.datetime | None = None  # date of the chat template
    image_mark: str = ""  # stands for an image in the texts of messages
    context_free: bool = False  # whether the ids of a text never depend on what stands before it

    @property
    def end_of_turn_id(self) -> int:
        """The token that ends a turn of the assistant: the chat template's, else the tokenizer's
        own end token."""
        return self.turn_ends[0].id if self.turn_ends else self.eos_ids[0]

    @property
    def template_marks(self) -> frozenset[int | str]:
        """The tokens and closing tags of the chat template: no text of a tool may hold one."""
        return self.template_ids | self.closing_tags

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without special tokens added, and for each the characters [start, end) it covers.
        Raises InputError for a text that cannot be encoded."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids; with `add_special_tokens` the BOS in front where the model has one, never an EOS.
        Raises InputError for a text that cannot be encoded."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids, without special tokens if `skip_special_tokens`."""

    @abc.abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation by the chat template.

        `variables` are further names that the template reads, `{"enable_thinking": False}`. With
        `continue_final_message` the text ends where the last message does, without an end of turn.
        Raises InputError without a chat template, and for messages that it refuses.
        """

    def render_marked(
        self,
        messages: Sequence[Mapping],
        *,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
        text: str | None = None,
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Returns (a finished conversation's text, the characters [a, b) that its template marks as
        the assistant's); None instead of the characters if it marks nothing. Pass `text` if the
        rendering is already known."""
        options = dict(tools=tools, documents=documents, variables=variables)
        if text is None:
            text = self.render_chat(messages, add_generation_prompt=False, **options)
        return text, None

    def encode_chat(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The ids of a conversation; templates write their BOS themselves, so none is added."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=variables,
            continue_final_message=continue_final_message,
        )
        return self.encode(text)

    def reads_key(self, name: str) -> bool:
        """Returns whether the chat template may read a key of a message: its text has the name."""
        return False

    def reads_variable(self, name: str) -> bool:
        """Returns whether the chat template may read a variable of this name."""
        return False

    def reads_as_written(self, ids: Collection[int]) -> bool:
        """Returns whether these tokens are found in a text only where their own text stands."""
        return True

    @abc.abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """The token of every id, added ones too: equal for two tokenizers whose ids mean the
        same."""

    @abc.abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer into a model folder, from which `load_tokenizer` reads it."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A digest that is equal for two tokenizers that turn all text into the same ids and
        stop alike."""


@names_the_file
def load_tokenizer(
    folder: str | Path,
    *,
    now: datetime.datetime | None = None,
    variables: Mapping[str, object] | None = None,
) -> Tokenizer:
    """Returns the tokenizer of a folder, ours or a Hugging Face one, or of a repository of the hub.
    `now` and `variables` are those of a HuggingFaceTokenizer. Raises InputError for files that are
    missing or invalid, and for variables without a chat template."""
    folder = hub.model_folder(folder, hub.TOKENIZER)
    path = folder / CHAR_FILE
    if not os.path.lexists(path):
        return HuggingFaceTokenizer(folder, now=now, variables=variables)
    if variables:
        raise InputError(
            f"{folder} has no chat template that could read variables",
            value=sorted(variables),
            fix="leave data.template_variables empty",
        )
    alphabet = read_json_object(path).get("alphabet")
    if not isinstance(alphabet, str):
        raise InputError(f"{path}: 'alphabet' is not a text", value=alphabet, fix="export it again")
    return CharTokenizer(alphabet)


class CharTokenizer(Tokenizer):
    """One id per character: 0 = pad, 1 = eos, then the alphabet in its order. No BOS."""

    pad_id = 0
    bos_id = None
    eos_ids = (1,)
    special_ids = template_ids = frozenset({0, 1})
    context_free = True

    def __init__(self, alphabet: str):
        if not isinstance(alphabet, str) or not alphabet:
            raise InputError(
                "a character tokenizer needs an alphabet",
                value=alphabet,
                fix="tokenizer='chars(...)' with the characters of your texts between the brackets",
            )
        if len(alphabet) > MOST_CHARACTERS:
            raise InputError(
                "the alphabet",
                value=len(alphabet),
                rule=f"at most {MOST_CHARACTERS}",
                fix="use a tokenizer of words: tokenizer=FOLDER with a tokenizer.json",
            )
        repeated = sorted(c for c, count in collections.Counter(alphabet).items() if count > 1)
        if repeated:
            raise InputError(
                "the alphabet names a character twice",
                value="".join(repeated),
                fix="name each character once",
            )
        check_unicode(alphabet, "the alphabet")
        self.alphabet = alphabet
        self.vocab_size = 2 + len(alphabet)
        self._ids = {character: i for i, character in enumerate(alphabet, start=2)}

    def encode_with_offsets(self, text):
        """Encodes each character alone. Raises InputError for one that is not in the alphabet."""
        try:
            ids = [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"character {error.args[0]!r} is not in the alphabet",
                value=text,
                rule=f"the alphabet is {self.alphabet[:200]!r}",
                fix="add it to the alphabet or take it out of the text",
            ) from None
        return ids, [(i, i + 1) for i in range(len(ids))]

    def encode(self, text, add_special_tokens=False):
        """Encodes the text; no special token is ever added."""
        return self.encode_with_offsets(text)[0]

    def decode(self, ids, skip_special_tokens=True):
        """Decodes the ids; one beyond the alphabet becomes U+FFFD."""
        # A model's vocabulary may be larger than ours; such an id must stay visible in the text,
        # or a reward would take "1?2" for "12".
        names = ("", "") if skip_special_tokens else ("<pad>", "<eos>")
        return "".join(
            "\ufffd"
            if not 0 <= i < self.vocab_size
            else names[i]
            if i < 2
            else self.alphabet[i - 2]
            for i in ids
        )

    def render_chat(
        self,
        messages,
        *,
        add_generation_prompt=True,
        tools=None,
        documents=None,
        variables=None,
        continue_final_message=False,
    ):
        """Raises InputError: there is no chat template."""
        raise InputError(
            "a character tokenizer has no chat template",
            fix="use text prompts, or a tokenizer from a model folder",
        )

    def vocabulary(self):
        """The token of every id."""
        return dict(enumerate(("<pad>", "<eos>", *self.alphabet)))

    def save(self, folder):
        """Writes the alphabet as char_tokenizer.json."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        saved = json.dumps({"alphabet": self.alphabet})
        (Path(folder) / CHAR_FILE).write_text(saved, encoding="utf-8")

    def fingerprint(self):
        """A digest of the alphabet."""
        return _digest("char", self.alphabet)


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face model folder. `now` is the date that its chat template sees.
    `variables` reach the template in every rendering, `{"enable_thinking": False}`; those of a call
    go before them."""

    def __init__(
        self,
        folder: str | Path,
        *,
        now: datetime.datetime | None = None,
        variables: Mapping[str, object] | None = None,
    ):
        self.folder = Path(folder)
        if not os.path.isdir(self.folder):
            raise InputError(
                f"{self.folder} is not a folder",
                fix="check the path, or name a model of the hub: hf://OWNER/NAME",
            )
        self._text, self._library = load_library(self.folder / "tokenizer.json")
        self._special_tokens, unnamed = read_special_tokens(self.folder)
        self._completed = complete_added_tokens(
            self.folder, self._library, list(self._special_tokens.values()), unnamed
        )
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._id_of("bos_token")
        self.eos_ids = self._stop_set()
        self.now = now or datetime.datetime.now()
        self._templates = read_templates(self.folder, self.now)
        self._openers: dict[int, str] = {}
        self.has_chat_template = "default" in self._templates
        self.variables = checked_variables(variables)
        if unread := [name for name in self.variables if not self.reads_variable(name)]:
            raise InputError(
                f"{self.folder}: the chat template does not read a variable",
                value=unread,
                rule="data.template_variables are read by the model's chat template",
                fix="correct the name, or remove it",
            )
        self._join_turn_ends()
        added = self._library.get_added_tokens_decoder()
        pad = self._id_of("pad_token")
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self.special_ids = frozenset(
            {i for i, token in added.items() if token.special} | {self.pad_id, *self.eos_ids}
        )
        self.template_ids = self.special_ids | self._written_by_templates()
        tags = closing_tags(template.text for template in self._templates.values())
        self.closing_tags = frozenset(tags - {token.content for token in added.values()})
        self._adds_bos, self._prefix = self._read_prefix()

    def _id_of(self, field: str) -> int | None:
        text = self._special_tokens.get(field)
        if text is None:
            return None
        token_id = self._library.token_to_id(text)
        if token_id is None:
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: '{field}' is not in tokenizer.json",
                value=text,
                fix="take both files from the same model, or correct the token's spelling",
            )
        return token_id

    @names_the_file
    def _stop_set(self) -> tuple[int, ...]:
        """Returns the tokenizer's own end token, then those of generation_config.json or
        config.json.

        The own token is always in the set: supervised training appends it, and a sampler that did
        not stop there would run on.
        """
        eos_id = self._id_of("eos_token")
        listed = self._end_ids_of(
            "generation_config.json", read_optional(self.folder, "generation_config.json")
        )
        if not listed:
            config = read_optional(self.folder, "config.json")
            listed = self._end_ids_of("config.json", config)
            if not listed and isinstance(config.get("text_config"), dict):
                listed = self._end_ids_of("config.json: text_config", config["text_config"])
        ids = ([] if eos_id is None else [eos_id]) + listed
        if not ids:
            raise InputError(
                f"{self.folder} names no end-of-text token",
                rule="without one no response ever stops",
                fix="set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json",
            )
        return tuple(dict.fromkeys(ids))

    def _join_turn_ends(self) -> None:
        """Adds the tokens that end a turn in the template to the stop set, as tokens that `decode`
        leaves out: else a turn would be learned with an end that no sampler stops at."""
        added = self._library.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        ends, written = [], set()
        for template in self._templates.values():

            def render(messages, prompt, template=template):
                text = self._render_probe(template, messages, prompt)
                written.update(i for i, _, _ in self._added_tokens_in(text))
                return text

            ends += turn_ends(render, self._added_tokens_in, special, self.eos_ids)
        self.turn_ends = tuple(dict.fromkeys(ends))
        new_specials = [added[end.id] for end in self.turn_ends if end.id not in special]
        for token in new_specials:
            token.special = True
        self._library.add_special_tokens(new_specials)
        self._completed += [repr(token) for token in new_specials]
        self.eos_ids = tuple(dict.fromkeys([*self.eos_ids, *(end.id for end in self.turn_ends)]))
        self._written = frozenset(written)

    def _render_probe(
        self, template: ChatTemplate, messages: Sequence[Mapping], prompt: bool
    ) -> str:
        """Returns the text of messages that probe a template for the tokens that it writes."""
        has_tools = any(message.get("tool_calls") for message in messages)
        has_tools = has_tools or template is self._templates.get("tool_use")
        return template.render(
            messages,
            special_tokens=self._special_tokens,
            add_generation_prompt=prompt,
            tools=[PROBED_TOOL] if has_tools else None,
            variables=self.variables,
        )

    def _added_tokens_in(self, text: str) -> list[tuple[int, int, int]]:
        """Returns the added tokens of a text: (id, first character, end)."""
        added = self._library.get_added_tokens_decoder()
        ids, offsets = self.encode_with_offsets(text)
        return [(i, a, b) for i, (a, b) in zip(ids, offsets, strict=True) if i in added]

    def _written_by_templates(self) -> set[int]:
        """Returns the added tokens whose text stands in a chat template, or marks reasoning. A
        token that is a word or white space is part of any text, and is left out: it closes
        nothing."""
        sources = [template.text for template in self._templates.values()]
        sources += [mark for pair in MARKS for mark in pair] if sources else []
        return {
            i
            for i, token in self._library.get_added_tokens_decoder().items()
            if any(not (c.isalnum() or c.isspace()) for c in token.content)
            and (i in self._written or any(token.content.strip() in text for text in sources))
        }

    def _end_ids_of(self, name: str, config: dict) -> list[int]:
        value = config.get("eos_token_id")
        if value is None:
            return []
        location = f"{self.folder / name}: 'eos_token_id'"
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, int) or isinstance(item, bool):
                raise InputError(
                    f"{location} is not an id",
                    value=value,
                    rule="it is a number or a list of numbers",
                    fix=COPY_AGAIN,
                )
            if not 0 <= item < self.vocab_size:
                raise InputError(
                    f"{location} is outside the vocabulary",
                    value=item,
                    rule=f"tokenizer.json has the ids 0..{self.vocab_size - 1}",
                    fix="take both files from the same model, or correct the id",
                )
        return list(value) if isinstance(value, list) else [value]

    def _read_prefix(self) -> tuple[bool, list[int]]:
        """Returns whether plain text gets a BOS, and all ids in front of it: by the config, else by
        tokenizer.json."""
        add_bos = read_optional(self.folder, "tokenizer_config.json").get("add_bos_token")
        if add_bos is not None and not isinstance(add_bos, bool):
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: 'add_bos_token' is not a boolean",
                value=add_bos,
                fix="write true or false",
            )
        if add_bos is not None and self.bos_id is not None:
            return add_bos, [self.bos_id] if add_bos else []
        # The ids that belong to no text and come before it; one after it is an end token.
        text = self._library.id_to_token(self.eos_ids[0])
        encoding = self._encode(text, add_special_tokens=True)
        added = [i is None for i in encoding.sequence_ids]
        prefix = encoding.ids[: added.index(False) if False in added else 0]
        return self.bos_id is not None and prefix[:1] == [self.bos_id], prefix

    def _encode(
        self, text: str, add_special_tokens: bool = False, offsets: bool = True
    ) -> tokenizers.Encoding:
        options = dict(add_special_tokens=add_special_tokens)
        try:
            if not offsets and len(text) > LONG_TEXT:
                # Unlike a text, a batch of one leaves the interpreter to other threads.
                return self._library.encode_batch_fast([text], **options)[0]
            return self._library.encode(text, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is not an Exception
            raise InputError(
                f"{self.folder / 'tokenizer.json'} cannot encode a text",
                value=text,
                rule=str(error),
                fix="take the characters out of the data that this tokenizer does not know",
            ) from None

    def encode_with_offsets(self, text):
        """Encodes the text with the library."""
        encoding = self._encode(text)
        return encoding.ids, encoding.offsets

    def encode(self, text, add_special_tokens=False):
        """Encodes the text with the library; `add_special_tokens` puts the model's prefix, usually
        a BOS, in front."""
        ids = self._encode(text, offsets=False).ids
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            return [*self._prefix, *ids]
        return ids

    def decode(self, ids, skip_special_tokens=True):
        """Decodes the ids with the library. Raises InputError for ids that it cannot decode."""
        numbers = [int(i) for i in ids]
        try:
            return self._library.decode(numbers, skip_special_tokens=skip_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is not an Exception
            raise InputError(
                f"{self.folder / 'tokenizer.json'} cannot decode ids",
                value=numbers,
                rule=str(error),
                fix=COPY_AGAIN,
            ) from None

    def _template(self, tools: object) -> ChatTemplate:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InputError(
                f"{self.folder} has no chat template"
                + (f" called 'default', only {sorted(self._templates)}" if self._templates else ""),
                rule="chat messages need one",
                fix="use text prompts, or put the model's chat_template.jinja into the folder",
            )
        return self._templates[name]

    def render_chat(
        self,
        messages,
        *,
        add_generation_prompt=True,
        tools=None,
        documents=None,
        variables=None,
        continue_final_message=False,
    ):
        """Renders the chat template; texts of tools and documents hold no mark of it."""
        messages, tools, documents = self._without_template_marks(messages, tools, documents)
        template = self._template(tools)
        text = template.render(
            messages,
            special_tokens=self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables={**self.variables, **(variables or {})},
            continue_final_message=continue_final_message,
        )
        if add_generation_prompt or continue_final_message:
            return text
        return text.removesuffix(self._opener(template))

    def _opener(self, template: ChatTemplate) -> str:
        """Returns the beginning of an answer that the template writes behind every conversation, as
        Llama 3's first one does; "" for others."""
        if id(template) not in self._openers:
            self._openers[id(template)] = always_opened(
                functools.partial(self._render_probe, template),
                self._added_tokens_in,
                self.turn_ends,
                self.eos_ids,
            )
        return self._openers[id(template)]

    def _without_template_marks(self, messages, tools, documents) -> tuple:
        """Returns answers of tools, their descriptions and documents as texts that hold no mark of
        the template: whoever wrote them could end a turn, or the block that they stand in."""
        if isinstance(messages, (list, tuple)) and all(isinstance(m, Mapping) for m in messages):
            messages = parted_messages(self, messages, self.template_marks)
        tools, documents = (
            parted_texts(self, value, self.template_marks) for value in (tools, documents)
        )
        return messages, tools, documents

    def render_marked(self, messages, *, tools=None, documents=None, variables=None, text=None):
        """Renders a finished conversation with the characters of its `{% generation %}` blocks."""
        template = self._template(tools)
        if not template.marks_assistant:
            return super().render_marked(
                messages, tools=tools, documents=documents, variables=variables, text=text
            )
        messages, tools, documents = self._without_template_marks(messages, tools, documents)
        return template.render_marked(
            messages,
            special_tokens=self._special_tokens,
            add_generation_prompt=False,
            tools=tools,
            documents=documents,
            variables={**self.variables, **(variables or {})},
            text=text,
        )

    def vocabulary(self):
        """The token of every id, added ones too."""
        return {i: token for token, i in self._library.get_vocab(with_added_tokens=True).items()}

    def reads_as_written(self, ids):
        """Returns False if the library looks for one of these tokens in normalized text."""
        added = self._library.get_added_tokens_decoder()
        return self._library.normalizer is None or not any(
            added[i].normalized for i in ids if i in added
        )

    def reads_key(self, name):
        """Returns whether the text of a template has the name."""
        return any(name in template.text for template in self._templates.values())

    def reads_variable(self, name):
        """Returns whether a template reads the name, outside of what it sets itself."""
        return any(name in template.variables for template in self._templates.values())

    def save(self, folder):
        """Copies the files of the tokenizer and its templates."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        template_paths = sorted(self.folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))
        for name in (*FOLDER_FILES, *(path.relative_to(self.folder) for path in template_paths)):
            source, target = self.folder / name, folder / name
            if source.is_file() and source.resolve() != target.resolve():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)

    def fingerprint(self):
        """A digest of tokenizer.json, the stop set, the special tokens, the templates and
        the variables."""
        templates = sorted((name, t.text) for name, t in self._templates.items())
        rules = [self.bos_id, self._adds_bos, self.eos_ids, self._special_tokens, templates]
        # Only where they say more than the rules above: an old run's fingerprint stays.
        if self._prefix != [self.bos_id][: self._adds_bos]:
            rules.append(self._prefix)
        if self._completed:
            rules.append(self._completed)
        if self.variables:
            rules.append(self.variables)
        return _digest(self._text, json.dumps(rules, sort_keys=True))


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
