"""Records to arrays: prompts, demonstrations, their masks and their padding."""

import json

import numpy as np
import pytest
from tiny_tokenizer import write_json, write_tokenizer

from rljax.data.online.prompts import Prompts, encode_demonstrations, encode_prompts, pad_examples
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer
from rljax.errors import InputError

CHARS = CharTokenizer("0123456789 >")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def texts(*prompts):
    return [
        dict(prompt=p, ground_truth="1", data_source="t", extra_info={}, index=i)
        for i, p in enumerate(prompts)
    ]


def test_prompts_are_padded_to_the_length_asked_for():
    encoded, counts = encode_prompts(texts("12", "3"), CHARS, max_prompt_tokens=4)
    prompts = Prompts.from_records(encoded, length=4)
    assert prompts.tokens.tolist() == [[3, 4, 0, 0], [5, 0, 0, 0]]
    assert prompts.lengths.tolist() == [2, 1]
    assert prompts.tokens.dtype == prompts.lengths.dtype == np.int32
    assert counts == dict(total=2, kept=2, dropped_overlong=0, truncated=0)
    fields = {k: v for k, v in vars(prompts.records[0]).items() if k != "token_ids"}
    expected = dict(prompt_text="12", ground_truth="1", data_source="t", extra_info={}, index=0)
    assert fields == expected | dict(messages=None, prompt_id=None, source="", images=())
    assert prompts.starts is None and prompts.response_starts is prompts.lengths
    with pytest.raises(InputError, match="row 0 has 2 tokens"):
        Prompts.from_records(encoded, length=1)


def test_chat_prompts_are_rendered(tokenizer):
    records = texts([{"role": "user", "content": "42"}])
    ((record,), _) = encode_prompts(records, tokenizer, max_prompt_tokens=99)
    assert record.prompt_text == "<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    assert record.token_ids.tolist() == tokenizer.encode(record.prompt_text)


@pytest.mark.parametrize(
    ("overlong", "expected", "dropped", "truncated"),
    [
        ("drop", ["123", "9"], 1, 0),
        ("left", ["123", "345", "9"], 0, 1),
        ("right", ["123", "123", "9"], 0, 1),
    ],
)
def test_overlong_prompts(overlong, expected, dropped, truncated):
    encoded, counts = encode_prompts(
        texts("123", "12345", "9"), CHARS, max_prompt_tokens=3, overlong=overlong
    )
    assert [CHARS.decode(record.token_ids) for record in encoded] == expected
    assert (counts["dropped_overlong"], counts["truncated"]) == (dropped, truncated)


def test_overlong_errors():
    with pytest.raises(InputError, match="row 1 is too long: 5 tokens"):
        encode_prompts(texts("123", "12345"), CHARS, max_prompt_tokens=3, overlong="error")
    several, limit = texts("1234", "123", "123456"), dict(max_prompt_tokens=3)
    says = (
        "2 of 3 rows are too long: row 0 has 4 tokens, row 2 has 6 tokens; the longest is row 2 "
        "with 6; max_prompt_tokens is 3. Fix: a limit of 6, "
    )
    with pytest.raises(InputError, match=says):
        encode_prompts(several, CHARS, **limit, overlong="error")
    with pytest.raises(InputError, match="no prompt is left: all 2"):
        encode_prompts(texts("123", "12345"), CHARS, max_prompt_tokens=2)
    with pytest.raises(InputError, match="'overlong'"):
        encode_prompts(texts("1"), CHARS, max_prompt_tokens=2, overlong="cut")
    for limit in (0, -1, 1.5, True, None):
        with pytest.raises(InputError, match="max_prompt_tokens"):
            encode_prompts(texts("1"), CHARS, max_prompt_tokens=limit)


def test_a_prompt_without_tokens_needs_a_bos(tmp_path, tokenizer):
    for without_bos in (CHARS, tokenizer):
        with pytest.raises(InputError, match="row 1 has no tokens"):
            encode_prompts(texts("1", ""), without_bos, max_prompt_tokens=9)
    write_tokenizer(tmp_path, bos="<s>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "tokenizer_config.json", {**config, "add_bos_token": False})
    with_bos = HuggingFaceTokenizer(tmp_path)
    encoded, _ = encode_prompts(texts("1", ""), with_bos, max_prompt_tokens=9)
    assert encoded[0].token_ids.tolist() == with_bos.encode("1")
    assert encoded[1].token_ids.tolist() == [with_bos.bos_id]


def test_bos_survives_a_cut_on_the_left(tmp_path):
    with_bos = HuggingFaceTokenizer(write_tokenizer(tmp_path, bos="<s>"))
    encoded, _ = encode_prompts(texts("12345"), with_bos, max_prompt_tokens=3, overlong="left")
    assert with_bos.decode(encoded[0].token_ids, skip_special_tokens=False) == "<s>45"


def test_prompts_that_cannot_be_encoded_name_the_row(tokenizer):
    with pytest.raises(InputError, match="row 1 cannot be encoded: character 'x'"):
        encode_prompts(texts("1", "x"), CHARS, max_prompt_tokens=9)
    with pytest.raises(InputError, match="row 0 cannot be encoded: .*no chat template"):
        encode_prompts(texts([{"role": "user", "content": "1"}]), CHARS, max_prompt_tokens=9)


# -- demonstrations --


def test_completion_and_its_end_are_learned():
    examples, counts = encode_demonstrations(
        [dict(prompt="12", completion="34", index=0)], CHARS, max_tokens=9
    )
    ids, mask = examples[0]
    assert ids.tolist() == [3, 4, 5, 6, CHARS.eos_ids[0]]
    assert mask.tolist() == [0, 0, 1, 1, 1]
    assert counts == dict(total=1, kept=1, dropped_empty=0, truncated=0)


def test_the_prompt_of_an_example_is_encoded_as_when_sampling(tokenizer):
    # "of" + " her" keep their borders; "an" + "s" + "wer" would merge across ours.
    for prompt, completion in (("the answer", " is 42"), ("the a", "nswer"), ("42 ", "is")):
        record = dict(prompt=prompt, completion=completion, index=0)
        ((ids, mask),), _ = encode_demonstrations([record], tokenizer, max_tokens=99)
        n = int((mask == 0).sum())
        assert ids[:n].tolist() == tokenizer.encode(prompt)
        assert tokenizer.decode(ids[n:]) == completion
        assert ids[-1] == tokenizer.eos_ids[0] and mask[n:].all()


def test_text_is_learned_whole_but_for_its_first_token(tmp_path, tokenizer):
    ((ids, mask),), _ = encode_demonstrations([dict(text="12", index=0)], CHARS, max_tokens=9)
    assert (ids.tolist(), mask.tolist()) == ([3, 4, 1], [0, 1, 1])
    with_bos = HuggingFaceTokenizer(write_tokenizer(tmp_path, bos="<s>"))
    ((ids, mask),), _ = encode_demonstrations([dict(text="1", index=0)], with_bos, max_tokens=9)
    assert ids.tolist() == [with_bos.bos_id, *with_bos.encode("1"), with_bos.eos_ids[0]]
    assert mask.tolist() == [0, 1, 1]


def test_an_end_token_in_the_text_is_not_doubled(tokenizer):
    record = dict(prompt="4", completion="2<|endoftext|>", index=0)
    ((ids, _),), _ = encode_demonstrations([record], tokenizer, max_tokens=9)
    assert ids.tolist() == tokenizer.encode("42<|endoftext|>")


def test_truncated_and_emptied_examples_are_counted(tokenizer):
    records = [
        dict(prompt="12", completion="34", index=0),
        dict(prompt="123", completion="4", index=1),
        dict(prompt="1", completion="4", index=2),
    ]
    examples, counts = encode_demonstrations(records, CHARS, max_tokens=3)
    assert counts == dict(total=3, kept=2, dropped_empty=1, truncated=2)
    assert [mask.tolist() for _, mask in examples] == [[0, 0, 1], [0, 1, 1]]
    with pytest.raises(InputError, match="no demonstration is left of 3"):
        encode_demonstrations(records, CHARS, max_tokens=1)
    with pytest.raises(InputError, match="row 0 has no tokens"):
        encode_demonstrations([dict(prompt="", completion="4", index=0)], CHARS, max_tokens=9)


def test_chat_examples_use_the_conversation_mask(tokenizer):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "42"}]
    ((ids, mask),), _ = encode_demonstrations(
        [dict(messages=messages, index=0)], tokenizer, max_tokens=99
    )
    learned = tokenizer.decode(ids[mask == 1], skip_special_tokens=False)
    assert learned == "42<|im_end|>"


def test_padding_of_examples():
    records = [dict(prompt="1", completion="2", index=0), dict(prompt="1", completion="", index=1)]
    examples, _ = encode_demonstrations(records, CHARS, max_tokens=9)
    batch = pad_examples(examples, length=4)
    assert batch["tokens"].tolist() == [[3, 4, 1, 0], [3, 1, 0, 0]]
    assert batch["mask"].tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    kinds = {name: value.dtype.name for name, value in batch.items()}
    assert kinds == dict(tokens="int32", mask="float32", segment_ids="int32", positions="int32")
    with pytest.raises(InputError, match="3 tokens"):
        pad_examples(examples, length=2)


def test_a_table_fills_calls_and_tools_of_prompts_and_demonstrations_and_it_is_taken_out(tmp_path):
    """All structs of a column of a parquet file have one list of keys."""
    import pyarrow.parquet

    def call(name, **arguments):
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    def tool(name, **properties):
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q {name}"},
                call(name, **given),
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [tool(name, **{key: {"type": "string"} for key in given})],
            "extra_info": {"level": level},
        }
        for name, given, level in (("f", {"a": "1"}, 1), ("g", {"b": 2}, None))
    ]
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for load in (load_prompts, load_demonstrations):
        written, filled = (load(str(path), "train") for path in (lines, table))
        for one, other in zip(written, filled, strict=True):
            assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    # What a reward may ask for stays, null or not.
    asked = load_prompts(str(table), "train")
    assert [record["extra_info"]["level"] for record in asked] == [1, None]


def answers(tmp_path, *rows) -> list[tuple]:
    """(prompt, ground truth) of each row of a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return [(r["prompt"], r["ground_truth"]) for r in load_prompts(str(path), "train")]


ASKED, SOLVED = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "so 4"}


def test_a_solution_holds_the_answer_also_beside_a_conversation(tmp_path):
    """NuminaMath-CoT as it ships: `messages` end with the worked solution."""
    solution = "We add, and get $\\boxed{4}$."
    row = dict(problem="2+2", solution=solution, messages=[ASKED, SOLVED])
    alone = {name: value for name, value in row.items() if name != "messages"}
    assert [truth for _, truth in answers(tmp_path, row)] == ["4"]
    assert [truth for _, truth in answers(tmp_path, alone)] == ["4"]
    assert answers(tmp_path, dict(messages=[ASKED, SOLVED])) == [([ASKED], "so 4")]


@pytest.mark.parametrize(
    "other, asked, truth",
    [
        (dict(prompt="b", answer=None, solution="so \\boxed{4}"), "b", "4"),
        (dict(prompt="b", ground_truth=None, answer="4"), "b", "4"),
        (dict(prompt=None, question="b", answer="4"), "b", "4"),
        (dict(prompt=None, messages=[ASKED], answer="4"), [ASKED], "4"),
        (dict(prompt="b", reward_model=None, ground_truth="4"), "b", "4"),
        (dict(prompt=None, problem="b", answer="4"), "b", "4"),
    ],
)
def test_a_null_of_a_table_hides_no_other_column(tmp_path, other, asked, truth):
    """Two data sets in one table: what one lacks is null."""
    first = dict.fromkeys(other) | dict(prompt="a", answer="5")
    assert answers(tmp_path, first, other) == [("a", "5"), (asked, truth)]
    with pytest.raises(InputError, match="null|lacks"):
        answers(tmp_path, dict(prompt="a", answer=None, solution=None))


def test_a_null_of_a_table_hides_no_demonstration(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = ("prompt", "completion", "response", "question", "answer")
    rows = [dict(prompt="a", completion="1"), dict(prompt="b", response="2")]
    rows += [dict(question="c", answer="3")]
    path.write_text("\n".join(json.dumps(dict.fromkeys(names) | row) for row in rows))
    found = load_demonstrations(str(path), "train")
    assert [(x["prompt"], x["completion"]) for x in found] == [("a", "1"), ("b", "2"), ("c", "3")]
    with pytest.raises(InputError, match="null"):
        path.write_text(json.dumps(dict.fromkeys(names)))
        load_demonstrations(str(path), "train")
