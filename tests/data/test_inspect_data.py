"""launchers/inspect_data.py: rows token by token, with the mask in colour and without."""

import io
import json

import pytest
from rich.console import Console
from tiny_tokenizer import FORGETFUL, write_tokenizer

from rljax.config import Config
from rljax.config.tiny import tiny_offline
from rljax.data.rows.show import config_of_data, data_page, load_shown, pieces, show, shown_rows
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.report.data_rows import data_rows
from rljax.report.run_folder import read_run

GREEN, DIM, LINE = "\x1b[1;32m", "\x1b[2m", "\x1b[2;4m"


def config_of(train="first_letter(letters=3, kinds=4)", sft=0, **data):
    config = Config(model="decoder(layers=1)")
    config.data.train, config.sft.steps = train, sft
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


def printed(config, *, colours=False, rows=2, split="train", ids=False):
    file = io.StringIO()
    console = Console(file=file, force_terminal=colours, no_color=not colours, width=100)
    show(config, console, rows=rows, split=split, ids=ids)
    return file.getvalue()


def test_prompts_and_the_mask_of_demonstrations_in_colour():
    text = printed(config_of(sft=1), colours=True, rows=1)
    prompt, example = [block for block in text.split("--- ") if "tokens" in block]
    assert (
        prompt.startswith("prompt ") and "4 tokens, 0 learned; data_source='first_letter'" in text
    )
    assert GREEN not in prompt.splitlines()[1] and LINE in prompt
    assert example.startswith("example 0: 6 tokens, 2 learned")
    line = example.splitlines()[1]
    # Four dim characters of the prompt, every second underlined; the answer and its end in green.
    assert line.count("\x1b[2m") == line.count(LINE) == 2
    assert line.count("\x1b[1;32m") == line.count("\x1b[1;4;32m") == 1
    assert line.index("\x1b[1;32m") > line.rindex(LINE) and "<eos>" in line.split("\x1b[1;4;32m")[1]


def test_without_colours_what_is_learned_stands_in_brackets():
    text = printed(config_of(sft=1), rows=1)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert "[[" not in lines[1] and lines[3][:4].endswith(">")
    assert lines[3][4:] == f"[[{lines[3][0]}<eos>]]"
    assert lines[-1].startswith("counts: total=48, kept=48, dropped_overlong=0")


@pytest.mark.parametrize(
    ("dataflow", "expected"),
    [
        ("sft", ["example 0: 6 tokens, 2 learned"]),
        ("preference", ["pair 0, chosen: 6 tokens, 2 learned", "pair 0, rejected: 6 tokens"]),
        ("kto", ["answer 0: 6 tokens, 2 learned; label=True"]),
        ("process_reward_model", ["solution 0: 8 tokens, 2 learned; labels=[1.0, 1.0]"]),
        ("dqo", ["trajectory 0: 6 tokens, 2 learned; reward=1.0"]),
    ],
)
def test_every_kind_of_offline_row(dataflow, expected):
    config = tiny_offline(Config(dataflow=dataflow))
    for split in ("train", "test"):
        text = printed(config, rows=1, split=split)
        for line in expected:
            assert line.replace("=True", "=").replace("0]", "") in text
    assert "[[" in text and "kept=" in text


def test_ids_are_a_table_and_chat_is_rendered(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "2 + 3 — é?"}], "ground_truth": "5"}
    rows.write_text(json.dumps(row) + "\n")
    config = config_of(str(rows))
    config.tokenizer = str(tmp_path / "tokenizer")
    (found,), counts = shown_rows(load_shown(config)[0], rows=1)
    rendered = tokenizer.render_chat(row["prompt"])
    assert tokenizer.decode(list(found.ids), skip_special_tokens=False) == rendered
    assert "".join(pieces(found.ids, tokenizer)) == rendered
    assert counts["dropped_overlong"] == 0
    table = printed(config, rows=1, ids=True)
    assert all(f" {int(i)} " in table for i in found.ids) and "'<|im_start|>'" in table
    # The mask of a demonstration stands in the table, and in its colours.
    table = printed(config_of(sft=1), rows=1, ids=True).split("--- example 0")[1]
    cells = [line.strip("\u2502 ").split("\u2502") for line in table.splitlines()]
    masks = [row[3].strip() for row in cells if len(row) == 4 and row[0].strip().isdecimal()]
    assert masks == ["0", "0", "0", "0", "1", "1"]
    table = printed(config_of(sft=1), rows=1, ids=True, colours=True).split("--- example 0")[1]
    styles = [GREEN in line for line in table.splitlines() if "'" in line and "\u2502" in line]
    assert styles == [False] * 4 + [True] * 2
    plain = printed(config, rows=1)
    assert "<|im_start|>user\u21b5\n" in plain and "ground_truth='5'" in plain


def test_rows_of_a_stream_the_test_split_and_what_is_not_there(tmp_path):
    config = config_of(
        "sorting(style='short', items=3, max_number=999, test=40)", max_prompt_tokens=11
    )
    text = printed(config, rows=40)
    assert text.count("--- prompt") == 40 and "dropped_overlong_of_stream=" in text
    assert "ground_truth='" in printed(config, rows=2, split="test")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "ground_truth": "b"}\n')
    config = config_of(str(rows))
    config.tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(InputError, match="no test rows"):
        printed(config, split="test")


def test_the_command_respects_no_color(rljax_command, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1"), monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = rljax_command("inspect", "quickstart", "--rows=1")
    assert code == 0, err
    assert "[[" in out and "32m" not in out and "counts: total=" in out


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "42"}]},
    {
        "messages": [
            *(
                {"role": r, "content": c}
                for r, c in (("user", "1"), ("assistant", "<think>x</think>2"))
            ),
            *({"role": r, "content": c} for r, c in (("user", "3"), ("assistant", "4"))),
        ]
    },
]


@pytest.mark.parametrize(
    ("row", "dataflow"),
    [
        (CONVERSATIONS[0], "sft"),
        ({"prompt": "a", "ground_truth": "b"}, "grpo"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "process_reward_model"),
        ({"prompt": "a", "completion": "b", "reward": 1.0}, "dqo"),
    ],
)
def test_the_kind_of_rows_is_read_off_their_columns(tmp_path, row, dataflow):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = config_of_data(str(tmp_path / "rows.jsonl"), "m", "", Config())
    assert (config.dataflow, config.tokenizer) == (dataflow, "m")
    assert (
        config_of_data(str(tmp_path / "rows.jsonl"), "m", "pairs", config).dataflow == "preference"
    )


def test_a_file_of_rows_and_a_model_are_enough(tmp_path, rljax_command, monkeypatch):
    """rljax inspect DATA --model=M: what is learned, what ends a turn, lengths, what was split."""
    folder = write_tokenizer(tmp_path / "tokenizer", FORGETFUL + "{% if greeting %}{% endif %}")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in CONVERSATIONS))
    monkeypatch.chdir(tmp_path), monkeypatch.setenv("NO_COLOR", "1")
    code, text, err = rljax_command(
        "inspect",
        str(tmp_path / "rows.jsonl"),
        f"--model={folder}",
        "--config.data.template_variables=greeting=true",
    )
    assert code == 0, err
    assert text.count("--- example") == 3 and "[[42<|im_end|>]]" in text
    assert "a turn ends with '<|im_end|>' of the chat template, learned last" in text
    assert "decoding stops at '<|im_end|>' '<|endoftext|>'" in text
    assert "the chat template is given greeting=True" in text
    assert "3 examples of 2 rows; 1 conversations make an example of each turn" in text
    assert "learned tokens of a row, percentiles: 50 %: 3" in text


def test_the_report_has_the_page_of_the_data(tmp_path):
    config = config_of(sft=1)
    data, tokenizer = load_shown(config)
    page = data_page(data, tokenizer)
    assert [row["title"] for row in page["rows"][3:]] == ["example 0", "example 1", "example 2"]
    answer = page["rows"][3]["pieces"][1]
    assert answer[1] is True and answer[0].endswith("<eos>")
    assert page["lengths"]["learned tokens of a demonstration"] == [2, 2, 2, 2]
    (tmp_path / "data.json").write_text(json.dumps(page))
    html = data_rows(read_run(tmp_path))
    assert f"<mark>{answer[0].replace('<', '&lt;').replace('>', '&gt;')}</mark>" in html
    assert "a response ends with &#x27;&lt;eos&gt;&#x27;, learned last" in html
