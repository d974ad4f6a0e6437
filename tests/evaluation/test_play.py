"""rljax play: an episode in the process, shown with what would be learned in [[ ]]."""

import io
import json
import sys

import pytest
from conftest import REPO
from rich.console import Console

from rljax.command import main
from rljax.config.flags import load_config_file
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.evaluation.play import by_hand, play, replies_in, row_of, scripted, turn_ids
from rljax.sampler import Sampling
from rljax.tasks.tool_questions import fact_lines
from rljax.validation import validate


def played(config, replies, row=0, **changes):
    """(what was played, what was printed) of a config of configs/agents and a script."""
    config = load_config_file(str(REPO / f"configs/agents/{config}.py"))
    for name, value in changes.items():
        setattr(config.environment, name, value)
    tokenizer, out = load_run_tokenizer(config), io.StringIO()
    record = row_of(config, tokenizer, row, "test")
    player = scripted(replies, tokenizer)
    made = play(config, tokenizer, record, player, Console(file=out, width=200), seed=3)
    return made, out.getvalue(), tokenizer


def test_a_game_by_a_script_shows_what_is_learned():
    made, text, tokenizer = played("guess_number", ["8", "4", "6"], row=5)
    assert made.ended == "stop" and made.outcome == {"": pytest.approx(0.9)} and made.turns == 3
    (log,) = made.logs.values()
    chosen = [i for i, m in zip(log.ids, log.mask, strict=True) if m]
    assert tokenizer.decode(chosen) == "8\n4\n6\n"
    assert tokenizer.decode(log.ids) == "Guess my number, 1 to 16.8\nlower4\nhigher6\n"
    lines = text.splitlines()
    assert lines[:4] == ["Guess my number, 1 to 16.", "[[8\u21b5", "]]", "lower"]
    assert "score 0.9; 3 turns" in lines[-1] and "6 learned" in lines[-1]


@pytest.mark.slow
def test_seats_and_limits():
    made, text, _ = played("tic_tac_toe", ["1", "4", "2", "5", "3"])
    assert made.outcome == {"x": 1.0, "o": -1.0} and set(made.logs) == {"x", "o"}
    assert text.count("--- x") == 3 and text.count("--- o") == 2
    assert played("tic_tac_toe", ["1", "4"], max_turns=2)[0].ended == "turns"
    assert played("tic_tac_toe", ["1", "4"], max_tokens=15)[0].ended == "length"
    with pytest.raises(InputError, match="too few replies"):
        played("tic_tac_toe", ["1"])


def test_tools_and_the_reward_of_the_last_turn():
    config = load_config_file(str(REPO / "configs/agents/calculator.py"))
    record = row_of(config, load_run_tokenizer(config), 0, "test")
    asked = record.prompt_text.removesuffix("=")
    replies = [f"<calc>{asked}</calc> and more", record.ground_truth]
    made, text, tokenizer = played("calculator", replies)
    assert made.outcome == {"": 1.0} and "(tool calls: 1)" in text
    (log,) = made.logs.values()
    assert "and more" not in tokenizer.decode(log.ids)  # the turn ends with the tag
    wrong = ["<calc>1/0</calc>", "7"]
    made, text, _ = played("calculator", wrong, max_reply_tokens=64, max_tokens=128)
    assert made.outcome == {"": 0.0} and "failed: 1" in text and "division by zero" in text


def test_a_person_may_mistype_go_on_in_the_next_line_and_leave():
    tokenizer = CharTokenizer("ab\n")
    out = io.StringIO()
    left = iter(["no\u00e9", "a\\", "b"])
    player = by_hand(tokenizer, lambda asked: next(left), Console(file=out))
    sampling = Sampling(max_response_tokens=8, stop_ids=(1,))
    assert player([], sampling) == ([2, 4, 3, 1], "stop")
    assert "not in the alphabet" in out.getvalue()

    def gone(asked):
        raise EOFError

    with pytest.raises(InputError, match="before its end"):
        by_hand(tokenizer, gone, Console(file=out))([], sampling)


def test_a_text_as_a_turn():
    tokenizer = CharTokenizer("ab;\n")
    plain = Sampling(max_response_tokens=4, stop_ids=(1,))
    assert turn_ids("ab", plain, tokenizer) == ([2, 3, 1], "stop")
    assert turn_ids("ababab", plain, tokenizer) == ([2, 3, 2, 3], "length")
    stops = Sampling(max_response_tokens=4, stop_ids=(1,), stop_strings=(";", "\n"))
    assert turn_ids("a;b", stops, tokenizer) == ([2, 4], "stop")
    assert turn_ids("a", stops, tokenizer) == ([2, 5], "stop")
    assert replies_in("a\nb\n---\nc\n") == ["a\nb", "c"]


def test_the_command_by_a_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "replies.txt"
    script.write_text("x*3\n---\nx+3\n---\nx-3\n")
    line = ["play", str(REPO / "configs/agents/repair.py"), f"--script={script}", "--row=1"]
    with pytest.raises(SystemExit) as end:
        main(line)
    out = capsys.readouterr().out
    assert end.value.code == 0 and "[[x*3]]" in out and "first_try" in out
    for flags, says in (
        (["--human", f"--script={script}"], "exactly one of --human"),
        (["--human", "--greedy"], "read with --policy alone"),
        ([f"--script={script}", "--row=100000", "--split=test"], "below"),
        ([f"--script={script}", "--config.environment.function="], "no environment to play"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*line[:2], *flags])
        assert end.value.code == 2 and says in capsys.readouterr().err


def test_the_search_tool_of_dr_tulu(tmp_path, monkeypatch):
    """The preset's own environment over a corpus of the working folder; rubrics may evolve."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": line}) + "\n" for line in fact_lines()]
    (tmp_path / "corpus.jsonl").write_text("".join(rows))
    config = load_config_file(str(REPO / "configs/presets/dr_tulu.py:search"))
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.data.train, config.environment.calls = "facts()", "tag(name='search')"
    config.reward.rubrics = "evolving_rubrics(generator='rubric_generators.two_by_visit')"
    config.reward.function = "rubric(base_url='http://127.0.0.1:1/v1', model='m')"
    validate(config)
    config.reward.function = "exact_match()"
    tokenizer, out = load_run_tokenizer(config), io.StringIO()
    record = row_of(config, tokenizer, 0, "test")
    word = record.prompt_text.removesuffix("?")
    player = scripted([f"<search>{word}</search>", record.ground_truth], tokenizer)
    made = play(config, tokenizer, record, player, Console(file=out, width=200))
    assert made.outcome == {"": 1.0} and f"[1] {word} {record.ground_truth}" in out.getvalue()
