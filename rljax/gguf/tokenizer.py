"""The tokenizer in a GGUF file's metadata as tokenizer.json and tokenizer_config.json.

Nothing is built and no template rendered here: what reads the two files treats them as those of any
other folder of a stranger.
"""

import itertools

import numpy as np

from rljax.errors import InputError
from rljax.gguf.header import Header

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # of token_type
_ANOTHER = "take another file of the model, or set tokenizer= to its Hugging Face folder"
# Bounds on pieces of SentencePiece, of which every way to cut one in two is tried.
_LONGEST_PIECE = 256
_MOST_CHARACTERS = 8_000_000
_FLAGS = (
    "add_bos_token",
    "add_eos_token",
    "add_sep_token",
    "add_space_prefix",
    "remove_extra_whitespaces",
)
_READ = {"model", "pre", "tokens", "scores", "token_type", "merges", "token_type_count", *_FLAGS}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Keys of the tokens that end a turn or a message, beside the end of a text.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"{_WORD}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+|{_WORD}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_WORD}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}"
    rf"|{_WORD}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str, **extra) -> dict:
    """Returns the parts of tokenizer.json that cut a text by `pattern`, of byte-level tokens."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split["invert"] = False
    steps = [split, {**_BYTES, "use_regex": False}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, **extra}


_GPT2 = {"pre_tokenizer": {**_BYTES, "use_regex": True}}
_DIGITS = {"type": "Digits", "individual_digits": True}
_STARCODER = {
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, {**_BYTES, "use_regex": True}]}
}
# Llama 3 takes a word that is a token whole, and begins every text with its BOS.
_LLAMA3_PARTS = _split(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_PARTS = _split(_QWEN2, normalizer={"type": "NFC"})
# tokenizer.ggml.pre -> parts of tokenizer.json, and what the published tokenizer does beside.
_PRE = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _STARCODER),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "smaug-bpe"), _LLAMA3_PARTS),
    **dict.fromkeys(("falcon3", "dbrx"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_PARTS),
    "tekken": _split(_TEKKEN, ignore_merges=True),
    "gpt-4o": _split(_GPT4O),
}


def tokenizer_files(header: Header, model_type: str) -> dict[str, dict]:
    """Returns {"tokenizer.json": ..., "tokenizer_config.json": ...} of a file of a model of that
    type. Raises InputError for a kind of tokenizer, a key or a value that is not read."""
    values = _Values(header)
    values.check_all_known()
    tokens = values.tokens()
    kind = values.get("model", str)
    if kind == "gpt2":
        content, adds_bos = _byte_level(values, tokens)
    elif kind == "llama":
        content, adds_bos = _sentencepiece(values, tokens, model_type), True
    else:
        rule = "gpt2 and llama are read"
        raise InputError(f"{header.path}: {_PREFIX}model", value=kind, rule=rule, fix=_ANOTHER)
    named_tokens = {name: values.token(key) for name, key in _NAMED.items()}
    flags = {
        "bos": values.get("add_bos_token", bool, adds_bos),
        "eos": values.get("add_eos_token", bool, False),
    }
    content["added_tokens"] = _added(values, tokens, content["model"]["vocab"], named_tokens)
    content["post_processor"] = _ends_of_text(flags, named_tokens, values)
    content = {"version": "1.0", "truncation": None, "padding": None, **content}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: text for name, text in named_tokens.items() if text is not None},
        "add_bos_token": flags["bos"] and named_tokens["bos_token"] is not None,
        "clean_up_tokenization_spaces": False,
        **_templates(header),
    }
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def generation_config(header: Header) -> dict:
    """Returns generation_config.json: what begins and ends a text, and how the model is to be
    sampled where the file says it."""
    values = _Values(header)
    end_ids = [values.id(key) for key in _ENDS]
    end_ids = list(dict.fromkeys(i for i in end_ids if i is not None))
    out = {
        "bos_token_id": values.id("bos_token_id"),
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids or None,
        "pad_token_id": values.id("padding_token_id"),
    }
    options = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    for key, name in options.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if type(value) in (int, float):
            out |= {
                name: float(str(np.float32(value))) if type(value) is float else value,
                "do_sample": True,
            }
    return {name: value for name, value in out.items() if value is not None}


class _Values:
    """The keys of the tokenizer, each of the type that it has to have."""

    def __init__(self, header: Header):
        self.header = header
        self.all = {
            k.removeprefix(_PREFIX): v for k, v in header.metadata.items() if k.startswith(_PREFIX)
        }

    def wrong(self, key: str, rule: str) -> InputError:
        value = self.all.get(key)
        text = f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else value
        return InputError(
            f"{self.header.path}: {_PREFIX}{key}", value=text, rule=rule, fix=_ANOTHER
        )

    def check_all_known(self) -> None:
        unread = sorted(k for k in self.all if k not in _READ and not k.endswith("_token_id"))
        if unread or self.all.get("remove_extra_whitespaces") not in (None, False):
            names = ", ".join(_PREFIX + k for k in unread or ["remove_extra_whitespaces"])
            rule = "rljax does not read it, and it changes how texts are cut"
            raise InputError(f"{self.header.path} sets {names}", rule=rule, fix=_ANOTHER)

    def get(self, key: str, kind: type, default: object = None):
        value = self.all.get(key, default)
        if type(value) is not kind:
            raise self.wrong(key, f"one {kind.__name__}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.all.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "an array of texts")
        return value

    def numbers(self, key: str, count: int) -> np.ndarray:
        value = self.all.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.wrong(key, f"{count} numbers, one for each token")
        if not np.isfinite(value).all():
            token = int(np.flatnonzero(~np.isfinite(value))[0])
            raise self.wrong(key, f"finite numbers, and that of token {token} is {value[token]}")
        return value

    def tokens(self) -> list[str]:
        tokens = self.texts("tokens")
        rows = self.header.tensors.get("token_embd.weight")
        if not tokens or (rows is not None and len(tokens) > rows.shape[0]):
            raise self.wrong(
                "tokens",
                f"1 to {rows.shape[0] if rows else 'any number'}, as the embedding has rows",
            )
        return tokens

    def id(self, key: str) -> int | None:
        """The id of a named token; None where there is none, which 2^32 - 1 says, too."""
        value = self.all.get(key)
        if value is None or value in (0xFFFFFFFF, -1):
            return None
        if type(value) is not int or not 0 <= value < len(self.texts("tokens")):
            raise self.wrong(key, f"an id below {len(self.texts('tokens'))}")
        return value

    def token(self, key: str) -> str | None:
        number = self.id(key)
        return None if number is None else self.texts("tokens")[number]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    return vocabulary


def _listed_merges(values: _Values, vocabulary: dict[str, int]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in values.texts("merges")]
    for merge in merges:
        valid = len(merge) == 2 and all(part in vocabulary for part in (*merge, "".join(merge)))
        if not valid:
            raise InputError(
                f"{values.header.path}: {_PREFIX}merges",
                value=" ".join(merge)[:200],
                rule="two tokens and a space between them, which make a token",
                fix=_ANOTHER,
            )
    return merges


def _byte_level(values: _Values, tokens: list[str]) -> tuple[dict, bool]:
    """(tokenizer.json of a vocabulary in the byte alphabet, whether its texts begin with BOS)."""
    pre = values.get("pre", str, "default")
    if pre not in _PRE:
        raise values.wrong("pre", f"known are {', '.join(_PRE)}")
    parts = {"normalizer": None, "ignore_merges": False, "add_bos": False, **_PRE[pre]}
    vocabulary = _vocabulary(tokens)
    merges = _listed_merges(values, vocabulary)
    content = {name: parts[name] for name in ("normalizer", "pre_tokenizer")}
    content["decoder"] = {**_BYTES, "use_regex": True}
    content["model"] = _bpe(vocabulary, merges, None, ignore_merges=parts["ignore_merges"])
    return content, parts["add_bos"]


def _bpe(vocabulary, merges, unknown: str | None, **extra) -> dict:
    return {
        "type": "BPE",
        "unk_token": unknown,
        **dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": vocabulary,
        "merges": merges,
        **extra,
    }


def _sentencepiece(values: _Values, tokens: list[str], model_type: str) -> dict:
    """tokenizer.json of pieces with scores, in which a space is U+2581."""
    gemma = model_type.startswith("gemma")
    if gemma:  # its pieces of several spaces are stored as spaces
        tokens = ["▁" * len(t) if " " in t and not t.strip() else t for t in tokens]
    vocabulary = _vocabulary(tokens)
    if "merges" in values.all:
        merges = _listed_merges(values, vocabulary)
    elif gemma:  # its scores are not the order in which pieces were merged; their ids are
        merges = _merges_of(values, vocabulary, -np.arange(len(tokens)))
    else:
        merges = _merges_of(values, vocabulary, values.numbers("scores", len(tokens)))
    replaced = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer, pre_tokenizer = None, None
    prefix = not gemma and values.get("add_space_prefix", bool, True)
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if gemma:
        normalizer = space
        pre_tokenizer = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    elif model_type == "phi3" and prefix:
        steps = [{"type": "Prepend", "prepend": "▁"}, space]
        normalizer = {"type": "Sequence", "normalizers": steps}
    else:
        pre_tokenizer = {
            "type": "Metaspace",
            "replacement": "▁",
            "split": False,
            "prepend_scheme": "first" if prefix else "never",
        }
    options = dict(fuse_unk=True, byte_fallback=True)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, values.token("unknown_token_id"), **options),
    }


def _merges_of(values: _Values, vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple]:
    """The merges that make every piece of two others, the best piece first, as the converters of
    transformers derive them from a SentencePiece model."""
    if max(map(len, vocabulary)) > _LONGEST_PIECE or (sum(map(len, vocabulary)) > _MOST_CHARACTERS):
        raise values.wrong(
            "tokens", f"pieces of at most {_LONGEST_PIECE} characters, {_MOST_CHARACTERS} together"
        )
    merges = []
    for piece, number in vocabulary.items():
        cuts = [(piece[:index], piece[index:]) for index in range(1, len(piece))]
        cuts = [c for c in cuts if c[0] in vocabulary and c[1] in vocabulary]
        cuts.sort(key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
        merges += zip(itertools.repeat(scores[number].item()), cuts)
    merges.sort(key=lambda m: (m[0], len(m[1][0]), len(m[1][1])), reverse=True)
    return [cut for _, cut in merges]


def _added(values: _Values, tokens: list[str], vocabulary: dict, named_tokens: dict) -> list[dict]:
    """The tokens that are matched whole in a text: control tokens, those with a name, and those
    that the model's authors defined, which are not special."""
    kinds = values.numbers("token_type", len(tokens)) if "token_type" in values.all else []
    special = {i for i, kind in enumerate(kinds) if kind == _CONTROL}
    special |= {i for key in _NAMED.values() if (i := values.id(key)) is not None}
    plain = {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED} - special
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    return [
        {"id": i, "content": tokens[i], **flags, "special": i in special}
        for i in sorted(special | plain)
        if tokens[i] and vocabulary.get(tokens[i]) == i
    ]


def _ends_of_text(flags: dict, named_tokens: dict, values: _Values) -> dict | None:
    """The post-processor that puts BOS before and EOS behind a text, as far as `flags` say so."""
    names = {end: named_tokens[f"{end}_token"] for end in ("bos", "eos")}
    names = {end: text for end, text in names.items() if flags[end] and text is not None}
    if not names:
        return None

    def around(letter: str, type_id: int) -> list[dict]:
        tokens = {end: {"SpecialToken": {"id": t, "type_id": type_id}} for end, t in names.items()}
        middle = {"Sequence": {"id": letter, "type_id": type_id}}
        return [
            *([tokens["bos"]] if "bos" in tokens else []),
            middle,
            *([tokens["eos"]] if "eos" in tokens else []),
        ]

    ids = {end: values.id(f"{end}_token_id") for end in names}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [ids[end]], "tokens": [text]} for end, text in names.items()
        },
    }


def _templates(header: Header) -> dict:
    """chat_template: one text, or several with their names."""
    first, stem = header.metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named_templates = {
        k.removeprefix(stem): v for k, v in header.metadata.items() if k.startswith(stem)
    }
    texts = {**({"default": first} if first is not None else {}), **named_templates}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong:
        raise InputError(
            f"{header.path}: the chat template {wrong[0][:200]}", rule="a text", fix=_ANOTHER
        )
    if not named_templates:
        return {"chat_template": first} if first is not None else {}
    return {"chat_template": [{"name": n, "template": t} for n, t in texts.items()]}
