"""Tokenizers: round trips, BOS and stop rules, and what malformed model folders say."""

import json
import threading

import pytest
from tiny_tokenizer import LLAMA_LIKE, QWEN_LIKE, write_json, write_tokenizer

from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer, load_tokenizer
from rljax.errors import InputError

USER = [{"role": "user", "content": "hi"}]


def edit(path, **changes):
    """Changes fields of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    write_json(path, {name: item for name, item in value.items() if item is not None})


def test_round_trip_of_any_text(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    for text in ("the answer is 42", " \n\t x", "é😀 漢字", "", "\u2028"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert offsets == sorted(offsets) and all(0 <= a <= b <= len(text) for a, b in offsets)
    assert tokenizer.vocab_size <= 320


@pytest.mark.slow
def test_a_long_text_is_encoded_while_other_threads_run(tmp_path):
    """The ids are the same, and a server answers meanwhile."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    text = "the answer is 漢字 <|im_end|>, " * 15_000
    ticks, most, done = [0], 0, threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):  # until the machine lets the other thread run
            before = ticks[0]
            ids = tokenizer.encode(text)
            most = max(most, ticks[0] - before)
            if most > 10:
                break
    finally:
        done.set()
        thread.join()
    assert ids == tokenizer.encode_with_offsets(text)[0]
    assert most > 10  # one or none, where the library keeps the interpreter


def test_decode_skips_specials_only_on_request(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("42<|im_end|>")
    assert tokenizer.decode(ids) == "42"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "42<|im_end|>"


def test_the_stop_set_is_all_of_generation_config_and_pad_may_be_in_it(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    end, text = (tokenizer.encode(t)[0] for t in ("<|im_end|>", "<|endoftext|>"))
    assert tokenizer.eos_ids == (end, text)
    assert tokenizer.pad_id == text


@pytest.mark.parametrize(
    ("generation", "config", "own", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 5}, None, (2,)),
        ({"eos_token_id": [2, 7, 2]}, {}, None, (2, 7)),
        ({"eos_token_id": [2, 7]}, {}, "<|im_end|>", (1, 2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, None, (5, 6)),
        (None, {"text_config": {"eos_token_id": 6}}, None, (6,)),
        (None, None, {"content": "<|im_end|>", "lstrip": False}, (1,)),
    ],
)
def test_where_the_stop_set_comes_from(tmp_path, generation, config, own, expected):
    write_tokenizer(tmp_path, "{{ messages[0].content }}")  # which ends no turn
    edit(tmp_path / "tokenizer_config.json", eos_token=own)
    (tmp_path / "generation_config.json").unlink()
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            write_json(tmp_path / name, value)
    assert HuggingFaceTokenizer(tmp_path).eos_ids == expected


def test_special_tokens_map_is_the_fallback(tmp_path):
    write_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {})
    tokens = {"pad_token": "<|im_start|>", "bos_token": {"content": "<|endoftext|>"}}
    write_json(tmp_path / "special_tokens_map.json", tokens | {"additional_special_tokens": []})
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.bos_id) == (0, 2)


def test_pad_without_a_pad_token_is_the_end_token(tmp_path):
    write_tokenizer(tmp_path)
    edit(tmp_path / "tokenizer_config.json", pad_token=None)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.pad_id == tokenizer.eos_ids[0]


def test_bos_once_in_text_and_once_in_chat(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, LLAMA_LIKE, bos="<s>"))
    bos = tokenizer.bos_id
    assert tokenizer.encode("42").count(bos) == 0
    assert tokenizer.encode("42", add_special_tokens=True) == [bos, *tokenizer.encode("42")]
    assert tokenizer.encode("<s>42", add_special_tokens=True).count(bos) == 1
    chat = tokenizer.encode_chat(USER)
    assert chat.count(bos) == 1 and chat[0] == bos


@pytest.mark.parametrize(("rule", "expected"), [(True, 1), (False, 0), (None, 1)])
def test_add_bos_token_overrules_the_library_file(tmp_path, rule, expected):
    write_tokenizer(tmp_path, bos="<s>")
    edit(tmp_path / "tokenizer_config.json", add_bos_token=rule)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.encode("42", add_special_tokens=True).count(tokenizer.bos_id) == expected


def test_no_end_token_is_ever_added_to_text(tmp_path):
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "E", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"E": {"id": "E", "ids": [1], "tokens": ["<|im_end|>"]}},
    }
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.encode("42", add_special_tokens=True) == tokenizer.encode("42")


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    write_tokenizer(tmp_path)
    expected = HuggingFaceTokenizer(tmp_path).encode("the answer is 42")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    write_json(tmp_path / "tokenizer.json", content)
    assert HuggingFaceTokenizer(tmp_path).encode("the answer is 42") == expected


def test_chat_template_sources(tmp_path):
    named = {"default": "d", "tool_use": "t"}
    write_tokenizer(tmp_path, [{"name": n, "template": text} for n, text in named.items()])
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.render_chat(USER) == "d"
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "t"
    (tmp_path / "chat_template.jinja").write_text("from the file\n")
    assert HuggingFaceTokenizer(tmp_path).render_chat(USER) == "from the file"


def test_a_saved_folder_is_the_same_tokenizer(tmp_path):
    first = HuggingFaceTokenizer(write_tokenizer(tmp_path / "a", LLAMA_LIKE, bos="<s>"))
    first.save(tmp_path / "b")
    first.save(tmp_path / "a")  # exporting over its own folder changes nothing
    second = load_tokenizer(tmp_path / "b")
    assert second.fingerprint() == first.fingerprint()
    assert second.eos_ids == first.eos_ids
    assert second.encode_chat(USER) == first.encode_chat(USER)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token": "<|endoftext|>"},
        {"chat_template": QWEN_LIKE + "x"},
        {"bos_token": "<|im_start|>"},
    ],
)
def test_fingerprint_sees_every_change(tmp_path, change):
    before = HuggingFaceTokenizer(write_tokenizer(tmp_path)).fingerprint()
    assert HuggingFaceTokenizer(tmp_path).fingerprint() == before
    edit(tmp_path / "tokenizer_config.json", **change)
    assert HuggingFaceTokenizer(tmp_path).fingerprint() != before


def test_char_tokenizer(tmp_path):
    tokenizer = CharTokenizer("0123 >")
    assert tokenizer.encode("01 3", add_special_tokens=True) == [2, 3, 6, 5]
    assert tokenizer.decode([2, 3, 1, 0, 0]) == "01"
    assert tokenizer.decode([2, 1, 0], skip_special_tokens=False) == "0<eos><pad>"
    assert tokenizer.decode([2, 300, 3]) == "0\ufffd1"  # an id of the model, not of the alphabet
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (8, 0, (1,))
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer.fingerprint()
    assert CharTokenizer("123 >").fingerprint() != tokenizer.fingerprint()


@pytest.mark.parametrize("alphabet", ["", "aba", None, "\ud800"])
def test_char_tokenizer_refuses_an_alphabet(alphabet):
    with pytest.raises(InputError):
        CharTokenizer(alphabet)


def test_char_tokenizer_names_the_character():
    with pytest.raises(InputError, match="'x' is not in the alphabet"):
        CharTokenizer("abc").encode("abxc")
    with pytest.raises(InputError, match="no chat template"):
        CharTokenizer("abc").encode_chat(USER)


# -- malformed folders: file to break, how, what the message must also say --


def text(content):
    return lambda path: path.write_text(content, encoding="utf-8")


def raw(content):
    return lambda path: path.write_bytes(content)


def fields(**changes):
    return lambda path: edit(path, **changes)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, MAP = "generation_config.json", "special_tokens_map.json"
MALFORMED = [
    (TOKENIZER, lambda path: path.unlink(), "does not exist"),
    (TOKENIZER, cut_in_half, "not valid JSON"),
    (TOKENIZER, text(""), "ends too early"),
    (TOKENIZER, text("{}"), "model"),
    (TOKENIZER, text("[]"), "model"),
    (TOKENIZER, text("<html>404</html>"), "not valid JSON"),
    (TOKENIZER, text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    (TOKENIZER, raw(b"\xff\xfe{}"), "not UTF-8"),
    (TOKENIZER, text('{"model": {"type": "Nonsense", "vocab": {}}}'), "not a tokenizer"),
    (TOKENIZER, fields(model={"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}), "tokenizer"),
    (TOKENIZER, fields(model={"type": "BPE", "vocab": {"a": "0"}, "merges": []}), "tokenizer"),
    (TOKENIZER, fields(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]), "empty"),
    (TOKENIZER, fields(model="BPE"), "model"),
    (TOKENIZER, fields(added_tokens="none"), "not a tokenizer"),
    (TOKENIZER, fields(decoder={"type": "Nonsense"}), "not a tokenizer"),
    (TOKENIZER, as_folder, "folder"),
    (CONFIG, cut_in_half, "not valid JSON"),
    (CONFIG, text("[]"), "JSON object"),
    (CONFIG, text("null"), "JSON object"),
    (CONFIG, raw(b'{"eos_token": "\xe9"}'), "not UTF-8"),
    (CONFIG, text('{"a": ' + "[" * 100_000), "not"),
    (CONFIG, fields(eos_token=5), "'eos_token'"),
    (CONFIG, fields(eos_token=["<|im_end|>"]), "'eos_token'"),
    (CONFIG, fields(eos_token={"text": "<|im_end|>"}), "'eos_token'"),
    (CONFIG, fields(eos_token="</s>"), "'</s>'"),
    (CONFIG, fields(bos_token="<s>"), "'<s>'"),
    (CONFIG, fields(pad_token="<pad>"), "'<pad>'"),
    (CONFIG, fields(bos_token="<|im_start|>", add_bos_token="yes"), "'add_bos_token'"),
    (CONFIG, fields(chat_template=7), "'chat_template'"),
    (CONFIG, fields(chat_template={"default": "x"}), "'chat_template'"),
    (CONFIG, fields(chat_template=["x"]), "'chat_template'"),
    (CONFIG, fields(chat_template=[{"name": "default"}]), "'chat_template'"),
    (CONFIG, fields(chat_template=[{"name": 1, "template": "x"}]), "'chat_template'"),
    (MAP, text('{"pad_token": 3}'), "'pad_token'"),
    (MAP, text('{"pad_token"'), "not valid JSON"),
    (MAP, as_folder, "folder"),
    (GENERATION, cut_in_half, "not valid JSON"),
    (GENERATION, text("3"), "JSON object"),
    (GENERATION, fields(eos_token_id=310), "outside the vocabulary"),
    (GENERATION, fields(eos_token_id=-1), "outside the vocabulary"),
    (GENERATION, fields(eos_token_id=[1, 151643]), "151643"),
    (GENERATION, fields(eos_token_id="1"), "not an id"),
    (GENERATION, fields(eos_token_id=[1, None]), "not an id"),
    (GENERATION, fields(eos_token_id=1.5), "not an id"),
    (GENERATION, fields(eos_token_id=True), "not an id"),
    (GENERATION, fields(eos_token_id={"a": 1}), "not an id"),
    (GENERATION, text('{"eos_token_id": ' + "9" * 5000 + "}"), "not usable JSON"),
]


@pytest.mark.parametrize(("name", "breaks", "says"), MALFORMED)
def test_malformed_folder(tmp_path, name, breaks, says):
    write_tokenizer(tmp_path)
    breaks(tmp_path / name)
    with pytest.raises(InputError) as caught:
        HuggingFaceTokenizer(tmp_path)
    assert type(caught.value) is InputError
    message = str(caught.value).replace(str(tmp_path), "")
    assert name in message and says in message and "Fix: " in message


def test_no_end_token_anywhere(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / GENERATION).unlink()
    edit(tmp_path / CONFIG, eos_token=None)
    with pytest.raises(InputError, match="names no end-of-text token"):
        HuggingFaceTokenizer(tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a folder"):
        HuggingFaceTokenizer(tmp_path / "nowhere")
    write_json(tmp_path / "char_tokenizer.json", {"alphabet": 3})
    with pytest.raises(InputError, match="char_tokenizer.json: 'alphabet'"):
        load_tokenizer(tmp_path)


def test_text_that_the_tokenizer_cannot_encode(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    with pytest.raises(InputError, match="tokenizer.json cannot encode"):
        tokenizer.encode("half a pair: \ud800")
