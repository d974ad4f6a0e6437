"""data.turns and data.template_variables as a run reads them: offline rows, supervised steps,
streams; and prompts that end with a begun turn."""

import json
import types

import pytest
from conversations import assistant, user
from family_tokenizers import write_family

from rljax.config import Config
from rljax.data.images.encode import ImageReader
from rljax.data.online.encoded import load_data, load_run_tokenizer, with_target_length
from rljax.data.online.prompts import encode_prompts
from rljax.data.rows.sources import load_prompts
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError

TWO = [user("2+3?"), assistant("5"), user("2+2?"), assistant("4")]
MODEL = "decoder(layers=1, embed=16, mlp=16, heads=1, kv_heads=1, head_dim=16)"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("qwen") / "qwen3", "qwen3", marked=False)


def config_of(tmp_path, qwen, dataflow="sft", **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": TWO}) + "\n" for _ in range(3)))
    config = Config(dataflow=dataflow, model=MODEL, tokenizer=str(qwen))
    config.data.train = str(path)
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


def learned(tokenizer, example):
    return tokenizer.decode([i for i, m in zip(example.ids, example.mask, strict=True) if m], False)


def loaded(config, kind):
    tokenizer = load_run_tokenizer(config)
    return tokenizer, load_data(config, tokenizer, kind)


NONE = "<think>\n\n</think>\n\n"
FIVE, FOUR = NONE + "5<|im_end|>", NONE + "4<|im_end|>"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [("auto", [FIVE, FOUR] * 3), ("each", [FIVE, FOUR] * 3), ("last", [FOUR] * 3)],
)
def test_offline_rows_and_supervised_steps_take_the_turns_that_the_config_names(
    tmp_path, qwen, turns, expected
):
    config = config_of(tmp_path, qwen, turns=turns)
    tokenizer, data = loaded(config, "examples")
    assert [learned(tokenizer, row["item"]) for row in data.prompts] == expected
    assert data.counts.get("split_conversations", 0) == (3 if turns == "auto" else 0)
    online = config_of(tmp_path, qwen, "grpo", turns=turns)
    online.sft.steps = 1
    tokenizer, data = loaded(online, "rollouts")
    assert [learned(tokenizer, example) for example in data.examples] == expected
    assert [prompt.ground_truth for prompt in data.prompts] == ["4"] * 3  # of the last turn


def test_a_stream_has_one_example_of_a_row(tmp_path, qwen):
    tokenizer, data = loaded(config_of(tmp_path, qwen, turns="last", stream=True), "examples")
    assert learned(tokenizer, data.sources[0][0]["item"]) == FOUR
    with pytest.raises(InputError, match="makes 2 examples, one of each turn"):
        loaded(config_of(tmp_path, qwen, turns="auto", stream=True), "examples")[1].sources[0][0]


def test_variables_of_a_run_are_in_every_rendering(tmp_path, qwen):
    config = config_of(tmp_path, qwen, template_variables=("enable_thinking=false",), turns="last")
    tokenizer, data = loaded(config, "examples")
    assert learned(tokenizer, data.prompts[0]["item"]) == "4<|im_end|>"  # what it is given is read
    with pytest.raises(InputError, match="NAME=VALUE"):
        load_run_tokenizer(config_of(tmp_path, qwen, template_variables=("enable_thinking",)))


def test_a_target_length_is_asked_for_before_a_begun_turn(tmp_path, qwen):
    config = config_of(tmp_path, qwen, "grpo", target_tokens=(7, 7))
    rows = [{"prompt": [user("2+2?"), assistant("It is")], "answer": "4"}]
    (record,) = load_prompts(rows, "train")
    asked = with_target_length(record, config, "train")
    ((prompt,), _) = encode_prompts([asked], load_tokenizer(qwen), max_prompt_tokens=99)
    assert "2+2? Think for 7 tokens.<|im_end|>" in prompt.prompt_text
    assert prompt.prompt_text.endswith("It is")


class TwoTokens(ImageReader):
    """A reader of images of two tokens each, of which every one is the token 9."""

    def tokens(self, image):
        return 2


@pytest.mark.parametrize(
    ("ids", "mask", "count"),
    [
        ([1, 9, 9, 2], [0, 0, 0, 1], 1),
        ([1, 9, 9, 9, 9], [0] * 5, 2),
        ([1, 2], [0, 1], 0),
        ([9, 9, 9, 9], [0, 0, 1, 1], 1),
    ],
)
def test_an_example_of_an_earlier_turn_has_the_images_in_it(ids, mask, count):
    """A token that the policy wrote is no image."""
    images = ("a", "b", "c")
    reader = TwoTokens(types.SimpleNamespace(image_token_id=9), None, "", "", "")
    assert reader.beginning(ids, mask, images) == images[:count]
