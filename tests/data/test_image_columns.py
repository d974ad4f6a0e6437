"""Rows with images in the forms of the datasets library, TRL and verl: one form, the same tokens
and patches; what does not fit is refused with its row."""

import base64
import json

import numpy as np
import pyarrow.parquet
import pytest
from tiny_vision import data_url, picture, png, write_vision_folder

from rljax.config import Config
from rljax.data.images.columns import MARK, with_images
from rljax.data.images.encode import image_reader, layout_of
from rljax.data.offline.batches import batch_arrays, longest_row
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import Prompts, encode_demonstrations, encode_prompts, pad_examples
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError

pytest.importorskip("PIL")
FIRST, SECOND = picture(1), picture(2, 8, 8)  # 6 tokens, 1 token
IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    folder = write_vision_folder(tmp_path_factory.mktemp("vl"), weights=True)
    tokenizer = load_tokenizer(folder)
    return tokenizer, image_reader(Config(model=str(folder)), tokenizer), str(folder)


@pytest.fixture
def written(tmp_path):
    """A function that writes rows as a file, with both pictures beside it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.png").write_bytes(png(FIRST))
    (tmp_path / "second.png").write_bytes(png(SECOND))

    def write(*rows, suffix=".jsonl"):
        path = tmp_path / f"rows{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


PATHS = ["a/first.png", "second.png"]
BYTES = [{"bytes": png(FIRST), "path": None}, {"bytes": None, "path": "second.png"}]
BASE64 = [base64.b64encode(png(x)).decode() for x in (FIRST, SECOND)]
URLS = [data_url(FIRST), data_url(SECOND)]
SAID = "Which <image> is like <image>?"
PARTS = [text("Which "), IMAGE, text(" is like "), IMAGE, text("?")]
TRUTH = {"ground_truth": "both"}
FORMS = {
    "paths, marks (verl)": dict(prompt=[{"role": "user", "content": SAID}], images=PATHS),
    "base64": dict(prompt=[{"role": "user", "content": SAID}], images=BASE64),
    "data URLs": dict(prompt=[{"role": "user", "content": SAID}], images=URLS),
    "bytes, parts (TRL)": dict(prompt=[{"role": "user", "content": PARTS}], images=BYTES),
    "images in the messages": dict(
        prompt=[
            {
                "role": "user",
                "content": [
                    text("Which "),
                    {"type": "image_url", "image_url": {"url": URLS[0]}},
                    text(" is like "),
                    {"type": "image", "image": URLS[1]},
                    text("?"),
                ],
            }
        ]
    ),
    "half and half": dict(
        prompt=[
            {
                "role": "user",
                "content": [
                    text("Which "),
                    IMAGE,
                    text(" is like "),
                    {"type": "image", "image": URLS[1]},
                    text("?"),
                ],
            }
        ],
        images=PATHS[:1],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_prompt(scene, written, form):
    tokenizer, reader, _ = scene
    row = {**FORMS[form], **TRUTH}
    suffix = ".parquet" if form.startswith("bytes") else ".jsonl"
    notes = []
    records = load_prompts(written(row, suffix=suffix), "train", notes=notes)
    assert "with images" in notes[0] and records[0]["prompt"][0]["content"] == SAID
    (prompt,), counts = encode_prompts(records, tokenizer, max_prompt_tokens=64, images=reader)
    assert counts["kept"] == 1
    start, pad, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    seen = f"Which {start}{pad * 6}{end} is like {start}{pad}{end}?"
    whole = f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids.tolist() == tokenizer.encode(whole)
    assert prompt.prompt_text == whole.replace(pad * 6, pad)
    layout = layout_of(reader, [prompt.images])
    prompts = Prompts.from_records([prompt, prompt], length=60, images=layout)
    want = [
        image.read()
        for image in reader.opened(
            with_images({"prompt": SAID, "images": [FIRST, SECOND]}, "here", None)["images"]
        )
    ]
    np.testing.assert_array_equal(prompts.images["pixels"][1], np.concatenate(want))
    assert layout.patches == 28 and prompts.images["shift"].tolist() == [-3, -3]  # 2 x 3 -> 3


def test_a_conversation_without_places_begins_with_its_images(scene, written):
    row = {
        "messages": [{"role": "user", "content": "Alike?"}, {"role": "assistant", "content": "no"}],
        "images": PATHS,
    }
    (record,) = load_demonstrations(written(row), "train")
    assert record["messages"][0]["content"] == MARK * 2 + "Alike?"


def test_rows_without_images_among_others(scene, written):
    tokenizer, reader, _ = scene
    rows = [
        {"prompt": "Two <image>?", **TRUTH, "images": PATHS[1:]},
        {"prompt": "A literal <image>?", **TRUTH, "images": []},
        {"prompt": "No image?", **TRUTH, "images": None},
    ]
    records = load_prompts(written(*rows), "train")
    prompts, _ = encode_prompts(records, tokenizer, max_prompt_tokens=64, images=reader)
    assert [len(p.images) for p in prompts] == [1, 0, 0]
    assert tokenizer.decode(prompts[1].token_ids) == "A literal <image>?"
    assert "images" not in prompts[1].extra_info
    batch = Prompts.from_records(prompts, length=32, images=layout_of(reader, [prompts[0].images]))
    assert batch.images["patch_coords"][:, :, 0].max(axis=1).tolist() == [1, 0, 0]
    with pytest.raises(InputError, match="row 0 has images"):
        Prompts.from_records(prompts, length=32)


def test_demonstrations_learn_the_answer_alone_and_are_cut_before_an_image(scene, written):
    tokenizer, reader, _ = scene
    turns = [
        ("user", "A <image>?"),
        ("assistant", "one"),
        ("user", "And <image>?"),
        ("assistant", "two"),
    ]
    row = {"messages": [{"role": r, "content": c} for r, c in turns], "images": PATHS[::-1]}
    records = load_demonstrations(written(row), "train")
    (whole,), _ = encode_demonstrations(records, tokenizer, max_tokens=99, images=reader)
    learned = tokenizer.decode(whole.ids[whole.mask > 0], skip_special_tokens=False)
    assert learned == "one<|im_end|>two<|im_end|>"
    pad = reader.vision.image_token_id
    places = np.flatnonzero(whole.ids == pad)
    assert len(places) == 7 and not whole.mask[places].any()
    arrays = pad_examples([whole], length=99, images=layout_of(reader, [whole.images]))
    assert arrays["patch_coords"][0, :, 0].tolist() == [1] * 4 + [2] * 24
    for limit in (places[1] + 1, places[-1], places[-1] + 1):
        (cut,), counts = encode_demonstrations(
            records, tokenizer, max_tokens=int(limit), images=reader
        )
        kept = 2 if limit > places[-1] else 1
        assert len(cut.images) == kept and np.sum(cut.ids == pad) == (7 if kept == 2 else 1)
        assert counts["truncated"] == 1
        row_of = load_rows(records and written(row), "train", "examples")
        (item,), _ = encode_rows(
            row_of, tokenizer, "examples", max_tokens=int(limit), overlong="right", images=reader
        )
        np.testing.assert_array_equal(item.ids, cut.ids)
        assert item.images and [i.grid for i in item.images] == [i.grid for i in cut.images]


ASKED = {"prompt": [{"role": "user", "content": "A <image>?"}], "images": PATHS[:1]}
WHOLE = [{"role": "user", "content": [text("A "), IMAGE, text("?")]}]
KINDS = {
    "pairs": {**ASKED, "chosen": "yes", "rejected": "no"},
    "implicit pairs": {
        "images": PATHS[:1],
        **{
            name: [*WHOLE, {"role": "assistant", "content": said}]
            for name, said in (("chosen", "yes"), ("rejected", "no"))
        },
    },
    "unpaired": {**ASKED, "completion": "yes", "label": True},
    "safety": {
        **ASKED,
        "safer": "yes",
        "more_harmful": "no",
        "safer_is_safe": True,
        "more_harmful_is_safe": False,
    },
    "stepwise": {**ASKED, "completions": ["a", "b"], "labels": [True, False]},
    "trajectories": {**ASKED, "completion": "yes", "reward": 1.0},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_row_carries_its_images(scene, written, name):
    tokenizer, reader, _ = scene
    kind = name.split()[-1]
    records = load_rows(written(KINDS[name]), "train", kind)
    items, _ = encode_rows(records, tokenizer, kind, max_tokens=60, images=reader)
    layout, length = layout_of(reader, [items[0].images]), longest_row(kind, items)
    arrays = batch_arrays(kind, items, length=length, images=layout)
    rows = 2 if "pairs" in name or kind == "safety" else 1
    assert arrays["pixels"].shape == (rows, 24, reader.vision.patch_values)
    np.testing.assert_array_equal(arrays["pixels"][-1], arrays["pixels"][0])
    places = arrays["tokens"] == reader.vision.image_token_id
    assert places.sum() == 6 * rows and not arrays["mask"][places].any()
    with pytest.raises(InputError, match="rows is left"):  # cut on the left: an image is lost
        encode_rows(records, tokenizer, kind, max_tokens=12, overlong="left", images=reader)


def user(content):
    return [{"role": "user", "content": content}]


BAD = {
    "too few": (dict(prompt=user("<image><image>"), images=PATHS[:1]), "more places for images"),
    "too many": (dict(prompt=user("<image>"), images=PATHS), "2 images, and places for 1"),
    "text without places": (dict(prompt="What?", images=PATHS[:1]), "places for 0.*write <image>"),
    "remote": (dict(prompt=user("<image>"), images=["https://x.org/a.png"]), "URL.*download it"),
    "lost": (dict(prompt=user("<image>"), images=["b.png"]), "image 0.*does not exist"),
    "not base64": (dict(prompt=user("<image>"), images=["data:image/png;base64,!!!"]), "base64"),
    "not an image": (dict(prompt=user("<image>"), images=[{"bytes": None}]), "is no image"),
    "a video": (dict(prompt=user([{"type": "video"}, IMAGE]), images=PATHS[:1]), "neither text"),
    "the policy draws": (
        dict(prompt=[*user("Hi"), {"role": "assistant", "content": [IMAGE]}], images=PATHS[:1]),
        "the policy writes text",
    ),
    "forged": (dict(prompt=user("<image> and <|image_pad|>"), images=PATHS[:1]), "no image stands"),
    "forged alone": (dict(prompt=user("<|image_pad|>")), "1 tokens of images, its 0 images"),
    "ribbon": (
        dict(prompt=user("<image>"), images=[data_url(np.zeros((1, 999, 3), np.uint8))]),
        "image 0.*200 times",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_its_row(scene, written, name):
    tokenizer, reader, _ = scene
    row, says = BAD[name]
    path = written({"prompt": "Fine?", **TRUTH}, {**row, **TRUTH})
    with pytest.raises(InputError, match=f"row 1.*{says}"):
        records = load_prompts(path, "train")
        encode_prompts(records, tokenizer, max_prompt_tokens=64, images=reader)


def test_a_model_of_text_and_a_missing_processor(scene, written, tmp_path):
    tokenizer, _, folder = scene
    records = load_prompts(written({**FORMS["base64"], **TRUTH}), "train")
    with pytest.raises(InputError, match="row 0.*image 0.*the model reads no images"):
        encode_prompts(records, tokenizer, max_prompt_tokens=64)
    assert image_reader(Config(model="decoder()"), tokenizer) is None
    config = Config(model=folder)
    config.data.max_image_pixels = 256
    small = image_reader(config, tokenizer)
    assert small.opened(records[0]["images"])[0].patches == 8  # 8 x 16 of 16 x 24 pixels
    config.data.max_image_pixels = 10
    with pytest.raises(InputError, match="data.max_image_pixels.*64"):
        image_reader(config, tokenizer)
    bare = write_vision_folder(tmp_path / "bare")
    settings = json.loads((bare / "preprocessor_config.json").read_text())
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="preprocessor_config.json does not exist"):
        image_reader(Config(model=str(bare)), tokenizer)
    # As transformers 5 saves a processor: one file for all of its parts.
    whole = {"processor_class": "Qwen3VLProcessor", "image_processor": settings}
    (bare / "processor_config.json").write_text(json.dumps(whole))
    config.data.max_image_pixels = 0
    read = [image_reader(Config(model=str(one)), tokenizer) for one in (bare, folder)]
    assert read[0].processing == read[1].processing


def test_what_writes_rows_of_text_refuses_images(written, tmp_path):
    from rljax.config.data_options import PrepareOptions
    from rljax.data.rows.prepare import prepare

    path = written({**FORMS["base64"], **TRUTH})
    with pytest.raises(InputError, match="row 0.*image 0: rljax data prepare writes rows of text"):
        prepare(PrepareOptions(source=path, out=str(tmp_path / "out")))


@pytest.mark.parametrize("value", ["a/first.png", "base64", "data URL"])
def test_one_image_in_a_column_of_its_own_is_a_text_that_names_it(written, tmp_path, value):
    """LLaVA's rows: `image`, a path, beside a conversation in ShareGPT's columns."""
    encoded = base64.b64encode(png(FIRST)).decode()
    value = {"base64": encoded, "data URL": data_url(FIRST)}.get(value, value)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a picture"}]
    (shown,) = load_demonstrations(written({"image": value, "conversations": turns}), "train")
    asked = {"image": value, "prompt": "What? <image>", "ground_truth": "1"}
    (prompt,) = load_prompts(written(asked), "train")
    spoken = {**asked, "prompt": [{"role": "user", "content": "What?"}]}  # no place for it
    if value == "a/first.png" or value.startswith("data:"):
        (first,) = load_prompts(written(spoken), "train")
        assert len(first["images"]) == 1
    for record in (shown, prompt):
        (source,) = record["images"]
        np.testing.assert_array_equal(source.pixels(), FIRST)
    assert "image" not in prompt["extra_info"]
    # A text about an image is none.
    about = {"prompt": "1+1", "ground_truth": "2", "image": "a drawing of two apples"}
    (record,) = load_prompts(written(about), "train")
    assert "images" not in record and record["extra_info"]["image"] == about["image"]


def test_videos_are_refused_by_their_column(written):
    row = {"prompt": "<video>what", "ground_truth": "1", "videos": ["a.mp4"]}
    with pytest.raises(InputError, match="row 0.*column 'videos' is not read.*frames"):
        load_prompts(written(row), "train")
    (record,) = load_prompts(written({**row, "prompt": "1", "videos": []}), "train")
    assert record["prompt"] == "1"
