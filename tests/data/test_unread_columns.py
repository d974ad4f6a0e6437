"""What a row holds beside its prompt and is not read: parts of the question, and images."""

import json
import logging
import re

import pyarrow
import pyarrow.parquet
import pytest
from tiny_vision import picture, png

from rljax.config import Config
from rljax.config.data_options import PrepareOptions
from rljax.data.offline.rows import load_rows, load_stored_rows
from rljax.data.online.encoded import load_data
from rljax.data.rows.prepare import prepare
from rljax.data.rows.sources import load_demonstrations, load_endless_prompts, load_prompts
from rljax.data.rows.unread import unread_parts
from rljax.data.text.contents import texts_in
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError

U, A = {"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "Ann"}
B = {"role": "assistant", "content": "Bob"}
EARLIER = [["And where was she born?", "In Rome."]]
# What each kind of row has beside its prompt.
KINDS = {
    "examples": {"completion": "a"},
    "pairs": {"chosen": "a", "rejected": "b"},
    "safety": {
        "safer": "a",
        "more_harmful": "b",
        "safer_is_safe": True,
        "more_harmful_is_safe": False,
    },
    "unpaired": {"completion": "a", "label": True},
    "stepwise": {"completions": ["a"], "labels": [True]},
    "trajectories": {"completion": "a", "reward": 1.0},
}


@pytest.fixture
def warned(caplog):
    """A function that returns the warnings since its last call."""

    def messages():
        found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        caplog.clear()
        return found

    return messages


def stored(tmp_path, rows, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# The column that is not read, and its row.
PUBLISHED = [
    ("choices", {"question": "Which?", "choices": ["Rome", "Oslo"], "answer": 1}),
    ("choices", {"question": "Which?", "choices": [12, 40], "answer": "B"}),
    (
        "choices",
        {"question": "Which?", "choices": {"text": ["x-ray"], "label": ["A"]}, "answer": 0},
    ),
    ("options", {"question": "Which?", "options": {"A": "Rome", "B": "Oslo"}, "answer": "B"}),
    ("A", {"question": "Which?", "A": "Rome", "B": "Oslo", "answer": "B"}),
    ("opa", {"question": "Which?", "opa": "Rome", "opb": "Oslo", "answer": "B"}),
    ("option_1", {"question": "Which?", "option_1": "Rome", "answer": "1"}),
    ("optionA", {"question": "Which?", "optionA": "Rome", "answer": "1"}),
    ("article", {"question": "Who?", "article": "Ann went home.", "answer": "Ann"}),
    ("Passage", {"question": "Who?", "Passage": "Ann went home.", "answer": "Ann"}),
    ("context", {"question": "Who?", "context": {"sentences": [["Ann went."]]}, "answer": "Ann"}),
    ("documents", {"prompt": "Who?", "documents": [{"id": "7", "text": "Ann."}], "answer": "Ann"}),
    ("body", {"question": "How many?", "body": "Ann has 3.", "answer": "3"}),
    ("query", {"prompt": "Translate:", "query": "Ann went home.", "answer": "a"}),
    ("input", {"prompt": "Translate:", "input": "Ann went home.", "answer": "a"}),
    ("instruction", {"instruction": "Translate.", "question": "Ann went home.", "answer": "a"}),
    ("question", {"prompt": "Be brief.", "question": "How many?", "answer": "a"}),
    ("history", {"prompt": "And now?", "history": EARLIER, "answer": "a"}),
    ("chat_history", {"prompt": "And now?", "chat_history": [U, A], "answer": "a"}),
    ("system_message", {"prompt": [U], "system_message": "You are a pirate.", "answer": "a"}),
    ("messages", {"prompt": "And now?", "messages": [U], "answer": "a"}),
]


@pytest.mark.parametrize("column, row", PUBLISHED)
def test_a_part_of_a_question_that_is_not_asked_is_warned_of(tmp_path, warned, column, row):
    rows = [{**row, "answer": "none"}, row, {"prompt": "q", "question": "q", "answer": "a"}]
    records = load_prompts(rows, "train")
    (warning,) = warned()
    assert warning.startswith("the list of rows: 2 of 3 rows: ") and "row 0, " in warning
    assert f"{column!r}" in warning and "Fix: write it into the prompt" in warning
    assert records[0]["extra_info"][column] == row[column]  # a reward reads it as before
    for suffix in (".jsonl", ".parquet") if column in ("choices", "context", "history") else ():
        load_endless_prompts(stored(tmp_path, [row] * 3, suffix), stored=True).first(3)
        assert len(warned()) == 1


@pytest.mark.parametrize("column, row", PUBLISHED)
def test_rows_that_ask_all_of_it_are_not_warned_of(warned, column, row):
    texts = [text for n, v in row.items() if n != "answer" for text in texts_in(v)]
    numbers = [str(x) for x in row["choices"]] if column == "choices" else []
    prompt = "\n".join([*texts, *numbers])
    load_prompts([{n: v for n, v in row.items() if n != "question"} | {"prompt": prompt}], "train")
    assert not warned()


NOTHING_LOST = [
    {"prompt": "q", "choices": [], "options": "", "context": None, "input": " ", "answer": "a"},
    {"question": "It was Bob, who went home.", "choices": ["bob", "home"], "answer": "0"},
    {"question": "2+2?", "context": 7, "document": 3, "num_choices": 4, "answer": "4"},
    {"prompt": "2+2?", "text": "User: 2+2?\nAssistant: 4", "answer": "4"},
    {"prompt": [U], "messages": [U, A], "answer": "Ann"},
    {"prompt": "2+2?", "A": "a grade", "subject": "sums", "solution": "so 4", "answer": "4"},
    {"prompt": "2+2?", "instruction_id_list": ["punctuation:no_comma"], "answer": "4"},
    {"prompt": "2+2?", "extra_info": {"choices": ["5"]}, "reward_model": {"ground_truth": "4"}},
]


@pytest.mark.parametrize("row", NOTHING_LOST)
def test_columns_that_ask_nothing_are_not_warned_of(warned, row):
    load_prompts([row], "train")
    assert not warned()


def test_a_short_choice_is_a_word_of_its_own():
    """`b` stands in `about` by chance."""
    row = {"choices": ["a", "b"]}
    assert unread_parts(row, "Who is it about?") == {"choices": "a"}
    assert not unread_parts(row, "Who is it about?\n(A) he (B) she")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asks", ["prompt", "question"])
def test_turns_before_a_prompt_are_refused_where_an_answer_is_learned(tmp_path, kind, asks):
    if kind == "examples" and asks == "question":
        row = {"question": "And now?", "answer": "a"}
    else:
        row = {asks: "And now?", **KINDS[kind]}
    for name, value in (
        ("history", EARLIER),
        ("Conversation_History", [U, A]),
        ("trajectory", "First we add."),
        ("initial_reason_steps", ["First we add."]),
    ):
        file = stored(tmp_path, [{**row, name: value}] * 2, ".jsonl")
        for load in (
            lambda file=file: load_rows(file, "train", kind),
            lambda file=file: load_stored_rows(file, kind),
        ):
            with pytest.raises(InputError, match=f"row [01].*, column '{name}' is not read"):
                load()
        if kind == "examples":
            with pytest.raises(InputError, match=f"column '{name}' is not read"):
                load_demonstrations(file, "train")
        load_rows([{**row, name: None}, {**row, name: []}], "train", kind)
    said = {**row, asks: "First we add.  And now?", "trajectory": "First we\nadd."}
    assert load_rows([said], "train", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_question_are_warned_of_in_every_kind(tmp_path, warned, kind):
    row = {"prompt": "Who?", **KINDS[kind], "context": "Ann went home."}
    load_rows([row, {**row, "context": ""}], "train", kind)
    (warning,) = warned()
    assert "1 of 2 rows" in warning and "'context'" in warning and "'Ann went home.'" in warning
    load_stored_rows(stored(tmp_path, [row] * 3, ".parquet"), kind).first(3)
    assert len(warned()) == 1
    load_rows([{**row, "prompt": "Ann went home.\nWho?"}], "train", kind)
    assert not warned()


def test_whole_conversations_bring_what_is_asked(warned):
    for kind, row in (
        ("examples", {"messages": [U, A]}),
        ("pairs", {"chosen": [U, A], "rejected": [U, B]}),
    ):
        load_rows([{**row, "history": EARLIER, "id": "7"}], "train", kind)
        assert ["'history'" in warning for warning in warned()] == [True]
        load_rows([{**row, "prompt": U["content"], "question": "who is it?"}], "train", kind)
        load_rows([{**row, "text": "<user>Who is it?<assistant>Ann"}], "train", kind)
        assert not warned()
    load_rows([{"text": "all of it", "context": "another", "img": "a.png"}], "train", "examples")
    assert not warned()


RENDERED = "<|im_start|>user\nWho is it?<|im_end|>\n<|im_start|>assistant\n"
LATER = {"role": "user", "content": "Where was she born?"}


@pytest.mark.parametrize(
    "text, is_warned",
    [
        ("Answer in French. Passage: Ada won the race of 1843.", True),
        ("Answer in French. Who is it?", True),
        (f"<|im_start|>system\nAnswer in French.<|im_end|>\n{RENDERED}", True),
        ("Who is it?", False),
        ("who is  it?", False),
        (RENDERED, False),
        ("\n\nHuman: Who is it?\n\nAssistant:", False),
        ("[INST] Who is it? [/INST]", False),
        (LATER["content"], False),  # of a later turn of both
        ("", False),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "question"])
def test_a_text_beside_whole_conversations_is_compared_with_them(warned, text, is_warned, column):
    pair = dict(chosen=[U, A, LATER, B], rejected=[U, B, LATER, A])
    (record,) = load_rows([{column: text, **pair}], "train", "pairs")
    found = warned()
    assert record["prompt"] == [U] and len(found) == is_warned
    assert all("1 of 1 rows: columns that look like a part" in one for one in found)
    assert all(f"prompt does not say it: '{column}'" in one for one in found)
    safety = dict(safer=pair["chosen"], more_harmful=pair["rejected"], safer_is_safe=1)
    load_rows([{column: text, **safety, "more_harmful_is_safe": 0}], "train", "safety")
    assert len(warned()) == len(found)
    if column == "prompt":  # beside the messages of a demonstration, too
        load_demonstrations([dict(prompt=text, messages=[U, A])], "train")
        assert len(warned()) == (is_warned or text == LATER["content"])


def test_the_columns_of_a_form_do_not_take_the_place_of_a_prompt(warned):
    row = {"instruction": "Be brief.", "response": "a"}
    for form, own in (
        (row, "How many?"),
        ({"question": "How?", "response": "a"}, "Be brief."),
        ({"conversations": [U, A], "chosen": [A], "rejected": [B]}, "Be brief."),
    ):
        kind = "pairs" if "chosen" in form else "examples"
        with pytest.raises(InputError, match="row 1, column 'prompt' is not read.*'Be|row 1.*'How"):
            load_rows([form, {**form, "prompt": own}], "train", kind)
    rendered = {**row, "prompt": "### Instruction: Be brief. ### Response: a"}
    assert load_rows([rendered], "train", "examples")[0]["prompt"] == "Be brief."
    with pytest.raises(InputError, match="column 'messages' is not read"):
        load_rows(
            [{"conversations": [U, A], "messages": [{**U, "content": "x"}, A]}], "train", "examples"
        )
    assert not warned()


@pytest.mark.parametrize("answer", ["answer", "ground_truth", "solution"])
def test_an_alpaca_instruction_with_an_answer_in_our_columns_is_asked(warned, answer):
    row = {"instruction": "Translate:", "input": "hello", answer: "bonjour"}
    (record,) = load_prompts([row], "train")
    assert (record["prompt"], record["ground_truth"]) == ("Translate:\n\nhello", "bonjour")
    (record,) = load_prompts([{"prompt": None, **row, "question": None}], "train")
    assert record["prompt"] == "Translate:\n\nhello"
    (record,) = load_prompts([{**row, "history": EARLIER}], "train")
    assert [m["role"] for m in record["prompt"]] == ["user", "assistant", "user"]
    assert not warned()


def test_prepared_rows_are_warned_of_after_the_map(tmp_path, warned):
    file = stored(tmp_path, [PUBLISHED[0][1]] * 2, ".jsonl")
    prepare(PrepareOptions(source=file, out=str(tmp_path / "out")))
    assert ["'choices'" in warning for warning in warned()] == [True]
    load_prompts(str(tmp_path / "out"), "train")
    assert not warned()


# -- images --

PNG = png(picture(1))
HELD = {
    "img": {"bytes": PNG, "path": "1.png"},
    "image_1": {"bytes": None, "path": "1.png"},
    "jpg": b"\xff\xd8\xff\xe0 a photo",
    "scan": PNG,
    "pictures": [PNG, PNG],
    "media": {"first": {"bytes": PNG}},
    "shown": "data:image/png;base64,AAAA",
}
NAMED = {"image_path": "a/1.PNG", "imageUrl": "https://x.org/1.jpg", "photos": ["1.webp"]}


@pytest.mark.parametrize("name", [*HELD, *NAMED])
def test_an_image_in_another_column_is_not_left_out_without_a_word(warned, name):
    value = (HELD | NAMED)[name]
    for asked in ("What is it?", "<image>What is it?", "See <image 1>."):
        load_prompts(
            [{name: value, "prompt": asked, "answer": "3"}, {"prompt": "q", "answer": "3"}], "train"
        )
        (warning,) = warned()
        assert "1 of 2 rows" in warning and f"image that is not read: {name!r}" in warning
    for kind, more in KINDS.items():
        row = {"prompt": "What is it?", name: value, **more}
        if name in HELD:
            with pytest.raises(
                InputError, match=f"column '{name}' holds an image that is not read"
            ):
                load_rows([row], "train", kind)
        else:
            load_rows([row], "train", kind)
            assert f"{name!r}" in warned()[0]
    if name in HELD:
        with pytest.raises(InputError, match="rename .* to 'images'"):
            load_demonstrations([{"messages": [U, A], name: value}], "train")


def test_a_mark_without_an_image_is_warned_of(warned):
    load_prompts(
        [{"prompt": "<image>What?", "answer": "3"}, {"prompt": "q", "answer": "3"}], "train"
    )
    load_rows([{"messages": [{**U, "content": "See <image 2>"}, A]}], "train", "examples")
    assert ["has no image" in warning for warning in warned()] == [True, True]
    code = {"prompt": "Draw a logo.", "completion": "<svg><image/></svg>", "image": "a logo"}
    load_rows([code, {**code, "embedding": [0.5] * 9, "image_sha": "0f" * 32}], "train", "examples")
    read = {"prompt": "<image>What?", "image": PNG, "preview": PNG, "answer": "3"}
    assert not warned()
    assert len(load_prompts([read], "train")[0]["images"]) == 1
    assert "'preview'" in warned()[0]


# -- bytes --

OTHERS = {
    "embedding": b"\x9a\xff\x00\x01",
    "audio": {"bytes": b"RIFF\xff\xfe", "path": "a.wav"},
    "hashes": [b"\xff", b"\xfe"],
}


@pytest.mark.parametrize("suffix", [".parquet", "list"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_in_a_column_that_is_not_read_are_left_alone(tmp_path, warned, kind, suffix):
    row = {"prompt": "q", **KINDS[kind]}
    rows = [row | OTHERS] * 2
    spec = rows if suffix == "list" else stored(tmp_path, rows, suffix)
    assert load_rows(spec, "train", kind) == load_rows([row] * 2, "train", kind)
    if suffix != "list":
        assert load_stored_rows(spec, kind).first(1) == load_rows([row], "train", kind)
    for name in ("prompt", next(iter(KINDS[kind]))):
        bad = stored(tmp_path, [{**row, name: b"\xff\xfe"}], ".parquet")
        with pytest.raises(InputError, match=f"column '{name}' holds bytes that are not UTF-8"):
            load_rows(bad, "train", kind)
    texts = {n: v.encode() if isinstance(v, str) else v for n, v in row.items()}
    assert load_rows([texts], "train", kind) == load_rows([row], "train", kind)
    assert not warned()


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "dataflow, loss, more, names",
    [
        ("reward_model", "bradley_terry(center=0.01)", dict(margin=2.0), "'margin'"),
        ("reward_model", "bradley_terry(margin=True)", dict(margin=2.0), ""),
        ("reward_model", "bradley_terry()", dict(margin=0), ""),
        (
            "reward_model",
            "bradley_terry()",
            dict(score_chosen=5, score_rejected=3),
            "'score_chosen', 'score_rejected'",
        ),
        (
            "reward_model",
            "bradley_terry()",
            dict(chosen_rating=5, rejected_rating=3),
            "'chosen_rating', 'rejected_rating'",
        ),
        ("reward_model", "bradley_terry()", dict(reference="c"), "'reference'"),
        ("preference", "dpo()", dict(margin=2.0), "'margin'"),
        ("preference", "dpo()", dict(score_chosen=5, score_rejected=3), ""),  # they say what ties
        ("preference", "dpo()", dict(reference="c"), "'reference'"),
        ("preference", "tpo()", dict(reference="c"), ""),
        ("preference", "dpo()", {}, ""),
    ],
)
def test_a_column_of_pairs_that_the_loss_does_not_read_is_warned_of(
    tmp_path, warned, dataflow, loss, more, names, stream
):
    config = Config(dataflow=dataflow)
    stage = "reward_loss" if dataflow == "reward_model" else "preference_loss"
    setattr(config.algorithm, stage, loss)
    config.data.train, config.data.stream = (
        stored(tmp_path, [{**PAIR, **more}] * 3, ".jsonl"),
        stream,
    )
    load_data(config, CharTokenizer("abcq"), "pairs")
    found = [one for one in warned() if "loss of this run" in one]
    assert len(found) == bool(names) and all(names in one and "Fix: " in one for one in found)
    assert all("3 of 3 rows" in one for one in found if not stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dataflow", "reward", "count", "text"),
    [
        ("dro(tau=1.0)", 0.5, "3 of 3 rows", "this run learns from the reward.*'process_scores'"),
        ("dqo()", 0.5, "2 of 3 rows", "learned in its place: 'reward'"),
        ("dqo()", 1.75, "", ""),  # the sum of the scores
    ],
)
def test_a_reward_or_process_scores_that_are_not_read_are_warned_of(
    tmp_path, warned, dataflow, reward, count, text, stream
):
    row = {"prompt": "q", "steps": ["a", "b"], "process_scores": [2.0, -0.25], "reward": reward}
    rows = [row, {**row, "reward": 1.75}, row]
    config = Config(dataflow=dataflow)
    config.data.train, config.data.stream = stored(tmp_path, rows, ".jsonl"), stream
    load_data(config, CharTokenizer("abcq\n"), "trajectories")
    lines = [line for line in warned() if "process_scores" in line]
    assert len(lines) == bool(text)
    if text:
        assert re.search(text, lines[0]) and (stream or count in lines[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_margin_that_the_loss_reads_and_rows_lack_is_an_error_or_counted(
    tmp_path, warned, stream
):
    config = Config(dataflow="reward_model")
    config.algorithm.reward_loss = "bradley_terry(margin=True)"

    def load(*rows, loss="bradley_terry(margin=True)", test=()):
        config.algorithm.reward_loss, config.data.stream = loss, stream
        config.data.train = stored(tmp_path, [PAIR | row for row in rows], ".jsonl")
        config.data.test = ""
        if test:
            (tmp_path / "test").mkdir(exist_ok=True)
            config.data.test = stored(tmp_path / "test", [PAIR | row for row in test], ".jsonl")
        return load_data(config, CharTokenizer("abcq"), "pairs")

    tie, scored, null = {"tie": True}, {"chosen_score": 3, "rejected_score": 1}, {"margin": None}
    with pytest.raises(InputError, match="no row has a margin: got .*without margin=True"):
        load({}, null)
    load({}, null, loss="bradley_terry()")
    load(tie, {"margin": 0}, scored)
    assert not warned()
    load(scored, {}, tie, null)
    (line,) = warned()
    assert "2 of 4 rows have no margin" in line and "row 1" in line
    if not stream:
        with pytest.raises(InputError, match="data.test: .*no row has a margin"):
            load(scored, scored, test=({}, {}))


@pytest.mark.parametrize("is_stream", [False, True])
def test_labels_of_0_and_1_say_which_answers_are_bad_and_classes_do_not(
    tmp_path, warned, is_stream
):
    def load(*labels):
        rows = [{"prompt": "q", "completion": "a", "label": label} for label in labels]
        if not is_stream:
            return load_rows(stored(tmp_path, rows, ".jsonl"), "train", "examples")
        stream = load_stored_rows(stored(tmp_path, rows, ".jsonl"), "examples")
        return [stream[index] for index in range(len(labels))]

    load(*[2, 0, 1, 0] * 16)
    assert warned() == []
    load(*[1, 0] * 32)
    (line,) = warned()
    assert "columns that say of some answers that they are bad" in line and "'label'" in line
    assert is_stream or "32 of 64 rows" in line


@pytest.mark.parametrize(
    "bad", [{"label": False}, {"kto_tag": False}, {"reward": -1.0}], ids=["label", "tag", "reward"]
)
def test_answers_that_are_said_to_be_bad_are_counted_where_they_are_learned(tmp_path, warned, bad):
    good = {name: True if value is False else 1.0 for name, value in bad.items()}
    rows = [{"prompt": f"q{i}", "completion": "a", **(bad if i % 2 else good)} for i in range(6)]
    load_rows(stored(tmp_path, rows, ".jsonl"), "train", "examples")
    (line,) = warned()
    assert "3 of 6 rows: columns that say of some answers that they are bad" in line
    assert repr(*bad) in line and "dataflow='kto'" in line
    plain = [{"prompt": "q", "completion": "a", "label": 0}]  # a class
    load_rows(stored(tmp_path, plain, ".jsonl"), "train", "examples")
    assert warned() == []


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("unpaired", {"prompt": "q", "completion": "a", "label": False}),
        ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "label": False}),
        ("trajectories", {"prompt": "q", "completion": "a", "reward": -1.0}),
    ],
)
def test_labels_that_a_run_learns_from_are_no_mistake(tmp_path, warned, kind, row):
    load_rows(stored(tmp_path, [row] * 3, ".jsonl"), "train", kind)
    assert warned() == []


@pytest.mark.parametrize("value", [-3.5, [-1.0, -2.5]])
@pytest.mark.parametrize(
    ("dataflow", "kind", "row", "names"),
    [
        ("preference", "pairs", PAIR, ("ref_chosen_logps", "ref_rejected_logps")),
        ("preference", "pairs", PAIR, ("reference_chosen_logps", "reference_rejected_logps")),
        ("kto", "unpaired", {"prompt": "q", "completion": "a", "label": True}, ("ref_logps",)),
    ],
)
def test_log_probs_of_a_reference_that_are_computed_anew_are_said(
    tmp_path, warned, dataflow, kind, row, names, value
):
    config = Config(dataflow=dataflow)
    config.data.train = stored(tmp_path, [row | dict.fromkeys(names, value)] * 3, ".jsonl")
    load_data(config, CharTokenizer("abcq"), kind)
    (line,) = warned()
    assert "3 of 3 rows" in line and ", ".join(map(repr, names)) in line
    assert "computes itself" in line and "offline.reference_logprobs=FOLDER" in line
