"""Text to token ids and back: one surface, two implementations, and where models stop.

`CharTokenizer` is for procedural tasks, `HuggingFaceTokenizer` reads a model folder (tokenizer.json
and the files beside it) with the `tokenizers` package. Templates are rendered in `chat`. The ids
carry no meaning but their text: padding travels as lengths and masks and is never read from an id,
for `pad_id` may be an end token too.
"""

import abc
import datetime
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from rljax.data.chat import ChatTemplate, check_unicode
from rljax.data.files import parse_json, read_json_object, read_text
from rljax.errors import InputError

CHAR_FILE = "char_tokenizer.json"
FOLDER_FILES = (  # what an exported model folder needs, so that others tokenize and stop alike
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
_COPY_AGAIN = "copy the file from the model's repository again"


class Tokenizer(abc.ABC):
    """What the rest of rljax knows of a tokenizer.

    `eos_ids` is the stop set; its first id is the tokenizer's own end token, which supervised
    examples get appended. `special_ids` are ids that `decode` leaves out.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    @abc.abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without special tokens added, and for each the characters [start, end) it covers."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids; with `add_special_tokens` the BOS in front where the model has one, never an EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids."""

    @abc.abstractmethod
    def render_chat(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
    ) -> str:
        """The text of a conversation by the chat template."""

    def encode_chat(
        self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation; templates write their BOS themselves, so none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    @abc.abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer into a model folder, from which `load_tokenizer` reads it."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Equal for two tokenizers that turn all text into the same ids and stop alike."""


def load_tokenizer(folder: str | Path, *, now: datetime.datetime | None = None) -> Tokenizer:
    """The tokenizer of a model folder, ours or a Hugging Face one."""
    path = Path(folder) / CHAR_FILE
    if not path.is_file():
        return HuggingFaceTokenizer(folder, now=now)
    alphabet = read_json_object(path).get("alphabet")
    if not isinstance(alphabet, str):
        raise InputError(f"{path}: 'alphabet' is not a text", value=alphabet, fix="export it again")
    return CharTokenizer(alphabet)


class CharTokenizer(Tokenizer):
    """One id per character: 0 = pad, 1 = eos, then the alphabet in its order. No BOS."""

    pad_id = 0
    bos_id = None
    eos_ids = (1,)
    special_ids = frozenset({0, 1})

    def __init__(self, alphabet: str):
        if not isinstance(alphabet, str) or not alphabet:
            raise InputError("a character tokenizer needs an alphabet", value=alphabet)
        double = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if double:
            raise InputError("the alphabet names a character twice", value="".join(double))
        check_unicode(alphabet, "the alphabet")
        self.alphabet = alphabet
        self.vocab_size = 2 + len(alphabet)
        self._ids = {character: i for i, character in enumerate(alphabet, start=2)}

    def encode_with_offsets(self, text):
        try:
            ids = [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"character {error.args[0]!r} is not in the alphabet",
                value=text,
                rule=f"the alphabet is {self.alphabet!r}",
                fix="add it to the alphabet or take it out of the text",
            ) from None
        return ids, [(i, i + 1) for i in range(len(ids))]

    def encode(self, text, add_special_tokens=False):
        return self.encode_with_offsets(text)[0]

    def decode(self, ids, skip_special_tokens=True):
        # A model's vocabulary may be larger than ours; such an id must stay visible in the text,
        # or a reward would take "1?2" for "12".
        names = ["", ""] if skip_special_tokens else ["<pad>", "<eos>"]
        table = [*names, *self.alphabet]
        return "".join(table[i] if 0 <= i < len(table) else "\ufffd" for i in ids)

    def render_chat(self, messages, *, add_generation_prompt=True, tools=None):
        raise InputError(
            "a character tokenizer has no chat template",
            fix="use text prompts, or a tokenizer from a model folder",
        )

    def save(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        saved = json.dumps({"alphabet": self.alphabet})
        (Path(folder) / CHAR_FILE).write_text(saved, encoding="utf-8")

    def fingerprint(self):
        return _digest("char", self.alphabet)


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face model folder. `now`: the date that its chat template sees."""

    def __init__(self, folder: str | Path, *, now: datetime.datetime | None = None):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(
                f"{self.folder} is not a folder",
                rule="a tokenizer is read from a local model folder",
                fix="download the model and name its folder",
            )
        self._text, self._library = _load_library(self.folder / "tokenizer.json")
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        added = self._library.get_added_tokens_decoder()
        self._special_tokens = self._read_special_tokens()
        self.bos_id = self._id_of("bos_token")
        self.eos_ids = self._stop_set()
        pad = self._id_of("pad_token")
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self.special_ids = frozenset(
            {i for i, token in added.items() if token.special} | {self.pad_id, *self.eos_ids}
        )
        self._adds_bos = self._reads_bos_rule()
        self._templates = self._read_templates(now)

    def _optional(self, name: str) -> dict:
        path = self.folder / name
        return read_json_object(path) if path.exists() else {}

    def _read_special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ...: name -> text, from the two files that may hold them."""
        found = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            for field, value in self._optional(name).items():
                if not field.endswith("_token") or field.startswith("add_") or value is None:
                    continue
                text = value.get("content") if isinstance(value, dict) else value
                if not isinstance(text, str):
                    raise InputError(
                        f"{self.folder / name}: '{field}' is not a token",
                        value=value,
                        rule='a token is a text or {"content": text}',
                        fix=_COPY_AGAIN,
                    )
                found[field] = text
        return found

    def _id_of(self, field: str) -> int | None:
        text = self._special_tokens.get(field)
        if text is None:
            return None
        number = self._library.token_to_id(text)
        if number is None:
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: '{field}' is not in tokenizer.json",
                value=text,
                fix="take both files from the same model, or correct the token's spelling",
            )
        return number

    def _stop_set(self) -> tuple[int, ...]:
        """The tokenizer's own end token, then those of generation_config.json or config.json.

        The own token is always in the set: supervised training appends it, and a sampler that did
        not stop there would run on.
        """
        own = self._id_of("eos_token")
        listed = self._eos_of("generation_config.json", self._optional("generation_config.json"))
        if not listed:
            config = self._optional("config.json")
            listed = self._eos_of("config.json", config)
            if not listed and isinstance(config.get("text_config"), dict):
                listed = self._eos_of("config.json: text_config", config["text_config"])
        ids = ([] if own is None else [own]) + listed
        if not ids:
            raise InputError(
                f"{self.folder} names no end-of-text token",
                rule="without one no response ever stops",
                fix="set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json",
            )
        return tuple(dict.fromkeys(ids))

    def _eos_of(self, name: str, config: dict) -> list[int]:
        value = config.get("eos_token_id")
        if value is None:
            return []
        place = f"{self.folder / name}: 'eos_token_id'"
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, int) or isinstance(item, bool):
                raise InputError(
                    f"{place} is not an id",
                    value=value,
                    rule="it is a number or a list of numbers",
                    fix=_COPY_AGAIN,
                )
            if not 0 <= item < self.vocab_size:
                raise InputError(
                    f"{place} is outside the vocabulary",
                    value=item,
                    rule=f"tokenizer.json has the ids 0..{self.vocab_size - 1}",
                    fix="take both files from the same model, or correct the id",
                )
        return list(value) if isinstance(value, list) else [value]

    def _reads_bos_rule(self) -> bool:
        """Whether plain text gets a BOS: what the config says, else what tokenizer.json does."""
        rule = self._optional("tokenizer_config.json").get("add_bos_token")
        if rule is not None and not isinstance(rule, bool):
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: 'add_bos_token' is not a boolean",
                value=rule,
                fix="write true or false",
            )
        if self.bos_id is None:
            return False
        if rule is not None:
            return rule
        return self._encode("", add_special_tokens=True).ids[:1] == [self.bos_id]

    def _read_templates(self, now: datetime.datetime | None) -> dict[str, ChatTemplate]:
        """Name -> chat template; chat_template.jinja goes before tokenizer_config.json."""
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return {"default": ChatTemplate(read_text(path), str(path), now=now)}
        path = self.folder / "tokenizer_config.json"
        listed = self._optional("tokenizer_config.json").get("chat_template")
        if listed is None:
            return {}
        if isinstance(listed, str):
            listed = [{"name": "default", "template": listed}]
        templates = {}
        for entry in listed if isinstance(listed, list) else [listed]:
            name = entry.get("name") if isinstance(entry, dict) else None
            text = entry.get("template") if isinstance(entry, dict) else None
            if not isinstance(name, str) or not isinstance(text, str):
                raise InputError(
                    f"{path}: 'chat_template' is malformed",
                    value=entry,
                    rule='it is a text or a list of {"name": text, "template": text}',
                    fix=_COPY_AGAIN,
                )
            templates[name] = ChatTemplate(text, f"{path}: chat_template {name!r}", now=now)
        return templates

    def _encode(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        try:
            return self._library.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library's own class says no more than Exception
            raise InputError(
                f"{self.folder / 'tokenizer.json'} cannot encode a text",
                value=text,
                rule=str(error),
                fix="take the characters out of the data that this tokenizer does not know",
            ) from None

    def encode_with_offsets(self, text):
        encoding = self._encode(text)
        return encoding.ids, encoding.offsets

    def encode(self, text, add_special_tokens=False):
        ids = self._encode(text).ids
        if add_special_tokens and self._adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids, skip_special_tokens=True):
        return self._library.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages, *, add_generation_prompt=True, tools=None):
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InputError(
                f"{self.folder} has no chat template"
                + (f" called 'default', only {sorted(self._templates)}" if self._templates else ""),
                rule="chat messages need one",
                fix="use text prompts, or put the model's chat_template.jinja into the folder",
            )
        return self._templates[name].render(
            messages,
            special_tokens=self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )

    def save(self, folder):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FOLDER_FILES:
            source, target = self.folder / name, folder / name
            if source.is_file() and source.resolve() != target.resolve():
                shutil.copyfile(source, target)

    def fingerprint(self):
        templates = sorted((name, t.text) for name, t in self._templates.items())
        rules = [self.bos_id, self._adds_bos, self.eos_ids, self._special_tokens, templates]
        return _digest(self._text, json.dumps(rules, sort_keys=True))


def _digest(*texts: str) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def _load_library(path: Path) -> tuple[str, tokenizers.Tokenizer]:
    """The text of tokenizer.json and the library's tokenizer, set to do only what it is told."""
    if not path.exists():
        raise InputError(
            f"{path} does not exist",
            rule="only tokenizers with a tokenizer.json are read",
            fix="save the model's tokenizer with its fast version: it writes tokenizer.json",
        )
    text = read_text(path)
    content = parse_json(text, str(path))
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise InputError(
            f"{path} has no 'model' object", value=content, fix=f"it is no tokenizer: {_COPY_AGAIN}"
        )
    # Trimmed offsets leave spaces out of a token: a space that ends a turn would seem to cover
    # nothing, and would not be learned.
    trimmed = _untrim(content.get("post_processor"))
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content) if trimmed else text)
        # A file may ask for truncation or padding to a fixed length, silently.
        library.no_truncation()
        library.no_padding()
        size = library.get_vocab_size(with_added_tokens=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is not an Exception
        raise InputError(
            f"{path} is not a tokenizer of the 'tokenizers' library",
            rule=str(error),
            fix=f"{_COPY_AGAIN}, or update the tokenizers package",
        ) from None
    if size == 0:
        raise InputError(f"{path}: the vocabulary is empty", fix=_COPY_AGAIN)
    return text, library


def _untrim(post_processor: object) -> bool:
    """Sets every 'trim_offsets' in the post processor to false; says whether it found one."""
    if isinstance(post_processor, list):
        return any([_untrim(item) for item in post_processor])
    if not isinstance(post_processor, dict):
        return False
    found = bool(post_processor.get("trim_offsets"))
    if found:
        post_processor["trim_offsets"] = False
    return any([found, *[_untrim(value) for value in post_processor.values()]])
