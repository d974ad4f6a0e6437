"""Kinds of tokenizer.json and of the files beside it: the same as `transformers` reads of them."""

import json

import pytest
import tokenizers
from family_tokenizers import WORDS, byte_level_bpe, sentencepiece_bpe, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import write_json
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from rljax.data.text.tokenizer import HuggingFaceTokenizer, load_tokenizer
from rljax.errors import InputError

TEXTS = (
    "the answer is 42",
    "",
    " ",
    "\n",
    "  two  spaces ",
    "\n\na\r\n\tb",
    "<s>",
    "a<s>b",
    "a <s> b</s>",
    "</s></s>",
    "é😀 漢字 שלום",
    "e\u0301",
    "<s",
    "▁x ▁",
    "\u2028\x00",
    "THE Answer",
    "<0x41>",
    "[X] [x]",
    "a [X]  b",
    "<mask> a<mask>b",
    "don't 1234567 !?..",
    "\u00a0a\u3000b",
)
SPECIAL = ["<s>", "</s>", "<unk>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def trained(library, trainer):
    library.train_from_iterator(WORDS, trainer)
    return library


def metaspace_bpe(scheme):
    model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return trained(library, trainer)


def unigram(normalizer=None):
    library = tokenizers.Tokenizer(models.Unigram())
    if normalizer:
        library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    return trained(library, trainer)


def word_level():
    library = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    return trained(library, trainer)


def word_piece():
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return trained(library, trainer)


def with_added_tokens(library):
    """Added tokens that swallow space, are normalized, stand alone, or are not special."""
    library.add_tokens(
        [
            AddedToken("[X]", lstrip=True, rstrip=True, normalized=False),
            AddedToken("answer is", normalized=True),
            AddedToken("ab", single_word=True),
            AddedToken("😀", normalized=False),
        ]
    )
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return library


def lower(library):
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return library


KINDS = {
    "byte_level": lambda: byte_level_bpe(SPECIAL),
    "gemma": lambda: sentencepiece_bpe(["<s>", "</s>"]),
    "llama2": lambda: sentencepiece_bpe(["<s>", "</s>"], llama2=True),
    "metaspace_first": lambda: metaspace_bpe("first"),
    "metaspace_always": lambda: metaspace_bpe("always"),
    "metaspace_never": lambda: metaspace_bpe("never"),
    "unigram": unigram,
    "unigram_nfkc": lambda: unigram(normalizers.NFKC()),
    "word_level": word_level,
    "word_piece": word_piece,
    "added_byte_level": lambda: with_added_tokens(byte_level_bpe(SPECIAL)),
    "added_normalized": lambda: with_added_tokens(lower(byte_level_bpe(SPECIAL))),
    "added_gemma": lambda: with_added_tokens(sentencepiece_bpe(["<s>", "</s>"])),
    "added_unigram": lambda: with_added_tokens(unigram()),
}


def their(folder):
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    return library.PreTrainedTokenizerFast.from_pretrained(folder)


def same(ours, theirs, texts):
    for text in texts:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids == ours.encode_with_offsets(text)[0], text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    folders = {name: write_folder(root / name, make(), NAMED) for name, make in KINDS.items()}
    return {name: (HuggingFaceTokenizer(f), their(f)) for name, f in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_of_every_kind(pairs, kind):
    ours, theirs = pairs[kind]
    same(ours, theirs, TEXTS)
    assert (ours.bos_id, ours.eos_ids[0]) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    added = theirs.added_tokens_decoder.items()
    assert ours.special_ids == {i for i, token in added if token.special} | {ours.pad_id}


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), text=st.text(max_size=30), ids=st.lists(st.integers(0)))
def test_any_text_and_any_ids(pairs, kind, text, ids):
    ours, theirs = pairs[kind]
    same(ours, theirs, [text])
    ids = [i % ours.vocab_size for i in ids]
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "single", ["$A", "<s> $A", "<s> $A </s>", "$A </s>", "[G] <s> $A", "[G] <s> $A </s>"]
)
def test_what_the_post_processor_adds_in_front(tmp_path, single):
    library = byte_level_bpe([*SPECIAL, "[G]"])
    tokens = [(t, library.token_to_id(t)) for t in ("<s>", "</s>", "[G]")]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    ours = HuggingFaceTokenizer(write_folder(tmp_path, library, NAMED))
    theirs = their(tmp_path)
    # The end token that some files add is left out: a prompt goes on.
    end = [theirs.eos_token_id] if single.endswith("</s>") else []
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        if single.startswith("<s>") and text.startswith("<s>"):
            assert ids == ours.encode(text)  # a BOS that the text has is not doubled
        else:
            assert ids + end == theirs(text)["input_ids"], text


@pytest.mark.parametrize("in_config", [True, False, None])
def test_a_bos_that_the_template_writes_is_not_doubled(tmp_path, in_config):
    library = byte_level_bpe(SPECIAL)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    template = "{{ bos_token }}{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}"
    config = {**NAMED, "chat_template": template}
    if in_config is not None:
        config["add_bos_token"] = in_config
    ours, messages = HuggingFaceTokenizer(write_folder(tmp_path, library, config)), USER
    ids = ours.encode_chat(messages)
    assert ids == their(tmp_path).apply_chat_template(messages)["input_ids"]
    assert ids.count(ours.bos_id) == 1 and ids[0] == ours.bos_id
    once = ours.encode(ours.render_chat(messages), add_special_tokens=True)
    assert once == ids


def test_a_special_token_that_is_only_a_word_of_the_vocabulary(tmp_path):
    library = byte_level_bpe(SPECIAL)
    content = json.loads(library.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] == "<unk>"]
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert len(library.encode("</s>").ids) > 1
    folder = write_folder(tmp_path, library, NAMED)
    ours, theirs = HuggingFaceTokenizer(folder), their(folder)
    same(ours, theirs, TEXTS)
    assert ours.encode("</s>") == [ours.eos_ids[0]]
    assert ours.decode(ours.encode("a</s>")) == "a"


def test_an_end_token_that_is_added_but_not_special(tmp_path):
    library = byte_level_bpe(["<s>"])
    library.add_tokens([AddedToken("</s>", lstrip=True), "<unk>", "<extra>"])
    config = {**NAMED, "additional_special_tokens": ["<extra>"]}
    folder = write_folder(tmp_path, library, config)
    ours, theirs = HuggingFaceTokenizer(folder), their(folder)
    same(ours, theirs, [*TEXTS, "a </s> <extra> b"])
    # Only tokens with a name, as eos_token is, become special.
    assert ours.decode(ours.encode("a</s><extra>")) == "a<extra>"


def test_tokens_that_only_the_config_lists(tmp_path):
    library = byte_level_bpe(SPECIAL)
    size = library.get_vocab_size()
    entry = {"content": "<call>", "lstrip": False, "rstrip": True, "normalized": False}
    listed = {str(size): {**entry, "single_word": False, "special": False}}
    folder = write_folder(tmp_path, library, {**NAMED, "added_tokens_decoder": listed})
    ours, theirs = HuggingFaceTokenizer(folder), their(folder)
    same(ours, theirs, [*TEXTS, "a<call>  b"])
    assert ours.encode("<call>") == [size] and ours.vocab_size == size + 1
    write_json(tmp_path / "tokenizer_config.json", NAMED)
    assert HuggingFaceTokenizer(tmp_path).fingerprint() != ours.fingerprint()
    for wrong, says in (({str(size + 5): listed[str(size)]}, "disagree"), ([1], "malformed")):
        write_json(tmp_path / "tokenizer_config.json", {**NAMED, "added_tokens_decoder": wrong})
        with pytest.raises(InputError, match=says):
            HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("old_config", [True, False])
def test_which_file_names_the_end_token(tmp_path, old_config):
    library = byte_level_bpe([*SPECIAL, "<end>"])
    config = dict(NAMED)
    if not old_config:
        tokens = json.loads(library.to_str())["added_tokens"]
        config["added_tokens_decoder"] = {str(t.pop("id")): t for t in tokens}
    folder = write_folder(tmp_path, library, config)
    write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "<end>"}})
    ours, theirs = HuggingFaceTokenizer(folder), their(folder)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.decode([theirs.eos_token_id], False) == ("<end>" if old_config else "</s>")


def test_no_pad_token(tmp_path):
    folder = write_folder(tmp_path, byte_level_bpe(SPECIAL), NAMED, {"eos_token_id": [2, 1]})
    ours, theirs = HuggingFaceTokenizer(folder), their(folder)
    assert theirs.pad_token_id is None and ours.pad_id == theirs.eos_token_id
    assert ours.eos_ids == (1, 2)
    template = "{{ pad_token is defined }} {{ pad_token }} {{ eos_token }}"
    (folder / "chat_template.jinja").write_text(template)
    assert HuggingFaceTokenizer(folder).render_chat(USER) == "False  </s>"
    assert their(folder).apply_chat_template(USER, tokenize=False) == "False  </s>"


USER = [{"role": "user", "content": "hi"}]
NAMED_TEMPLATES = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("in_config", "files"),
    [
        ("one {{ messages[0].content }}", {}),
        (NAMED_TEMPLATES, {}),
        (NAMED_TEMPLATES, {"chat_template.jinja": "file {{ eos_token }}\n"}),
        ("c", {"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "x"}),
        (None, {"additional_chat_templates/default.jinja": "d"}),
        (None, {"additional_chat_templates/rag.jinja": "r"}),
        ([{"name": "rag", "template": "r"}], {}),
        (None, {}),
        ({"name": "default"}, {"chat_template.jinja": "f"}),
    ],
)
@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f"}}]])
def test_where_templates_are_found(tmp_path, in_config, files, tools):
    config = {**NAMED, "chat_template": in_config}
    folder = write_folder(tmp_path / "a", byte_level_bpe(SPECIAL), config)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    ours = HuggingFaceTokenizer(folder)
    ours.save(tmp_path / "b")
    for tokenizer in (ours, load_tokenizer(tmp_path / "b")):
        try:
            expected = their(folder).apply_chat_template(USER, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(InputError, match="no chat template"):
                tokenizer.render_chat(USER, tools=tools)
        else:
            assert tokenizer.render_chat(USER, tools=tools) == expected
    assert ours.fingerprint() == load_tokenizer(tmp_path / "b").fingerprint()
