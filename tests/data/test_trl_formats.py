"""Each of TRL's data set formats and types, as its documentation has them, read from a file by what
trains on it."""

import json

import pytest
from tiny_tokenizer import write_tokenizer

from rljax.config import Config
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.errors import InputError

U = {"role": "user", "content": "What color is the sky?"}
A = {"role": "assistant", "content": "It is blue."}
G = {"role": "assistant", "content": "It is green."}
STEPS = dict(
    prompt="Which number is larger, 9.8 or 9.11?",
    completions=["The fraction of 9.8 is 0.8.", "0.11 is greater than 0.8.", "So 9.11."],
    labels=[True, False, False],
)
# (type, format, dataflow, row)
FORMS = [
    ("language modeling", "standard", "sft", {"text": "The sky is blue."}),
    ("language modeling", "conversational", "sft", {"messages": [U, A]}),
    ("prompt-only", "standard", "grpo", {"prompt": "The sky is"}),
    ("prompt-only", "conversational", "grpo", {"prompt": [U]}),
    ("prompt-completion", "standard", "sft", {"prompt": "The sky is", "completion": " blue."}),
    ("prompt-completion", "conversational", "sft", {"prompt": [U], "completion": [A]}),
    (
        "preference, explicit",
        "standard",
        "preference",
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    ),
    (
        "preference, explicit",
        "conversational",
        "preference",
        {"prompt": [U], "chosen": [A], "rejected": [G]},
    ),
    (
        "preference, implicit",
        "standard",
        "preference",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    ),
    (
        "preference, implicit",
        "conversational",
        "preference",
        {"chosen": [U, A], "rejected": [U, G]},
    ),
    (
        "preference, explicit",
        "conversational",
        "reward_model",
        {"prompt": [U], "chosen": [A], "rejected": [G]},
    ),
    (
        "unpaired",
        "standard",
        "kto",
        {"prompt": "The sky is", "completion": " blue.", "label": True},
    ),
    ("unpaired", "conversational", "kto", {"prompt": [U], "completion": [A], "label": False}),
    ("stepwise", "standard", "process_reward_model", STEPS),
]


def config_of(tmp_path, dataflow, rows, suffix=".jsonl"):
    config = Config(model="decoder(layers=1)", dataflow=dataflow)
    config.tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.train, config.reward.function = str(path), "length_under(max_tokens=5)"
    return config


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("kind", "form", "dataflow", "row"), FORMS)
def test_a_form_is_read_and_its_answer_is_what_is_learned(
    tmp_path, kind, form, dataflow, row, suffix
):
    from rljax.data.rows.show import load_shown, shown_rows

    config = config_of(tmp_path, dataflow, [row, row], suffix)
    tokenizer = load_run_tokenizer(config)
    found, counts = shown_rows(load_shown(config)[0], rows=1)
    assert counts["total"] == 2 == counts["kept"]
    texts = [tokenizer.decode([i for i, m in zip(s.ids, s.mask, strict=True) if m]) for s in found]
    if kind == "prompt-only":
        assert texts == [""] and "sky" in tokenizer.decode(list(found[0].ids))
    elif kind == "stepwise":
        assert found[0].metadata["labels"] == [1.0, -1.0, -1.0]
    elif kind.startswith("preference"):
        assert "blue" in texts[0] and "green" in texts[1]
        assert "sky" not in texts[0] + texts[1]
    else:
        assert "blue" in texts[0]
        assert ("sky" in texts[0]) == ("text" in row)


def test_prompts_alone_need_a_reward_that_compares_with_nothing(tmp_path):
    config = config_of(tmp_path, "grpo", [{"prompt": "The sky is"}])
    assert load_data(config, load_run_tokenizer(config)).prompts[0].ground_truth == ""
    config.reward.function = ""  # exact_match
    with pytest.raises(InputError, match="row 0 .*lacks the column 'ground_truth'"):
        load_data(config, load_run_tokenizer(config))
    config.reward.model = "folder"
    assert len(load_data(config, load_run_tokenizer(config)).prompts) == 1
    config.evaluate.reward = "exact_match()"
    with pytest.raises(InputError, match="ground_truth"):
        load_data(config, load_run_tokenizer(config))


@pytest.mark.parametrize(
    ("dataflow", "row", "says"),
    [
        (
            "grpo",
            {"promt": "x", "ground_truth": "1"},
            "lacks the column 'prompt'.*rename 'promt' to 'prompt'",
        ),
        ("grpo", {"prompt": "x", "groundtruth": "1"}, "'ground_truth'.*rename 'groundtruth'"),
        ("preference", {"prompt": "x", "choosen": "a", "rejected": "b"}, "rename 'choosen'"),
        ("kto", {"prompt": "x", "completion": "a", "lable": True}, "rename 'lable'"),
        ("grpo", {"prompt": "x", "ground_truth": None}, "'ground_truth' is null"),
    ],
)
def test_a_wrong_column_is_found_before_the_model_is_opened(tmp_path, dataflow, row, says):
    """The row and the near match are named while the weights are not there to read."""
    from rljax.setup import build

    good = dict(row)
    config = config_of(tmp_path, dataflow, [good])
    config.reward.function, config.model = "exact_match()", str(tmp_path / "no_such_model")
    with pytest.raises(InputError, match=r"row 0 \(line 1\).*" + says):
        build(config)
