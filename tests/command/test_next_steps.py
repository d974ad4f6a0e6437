"""What a run says at its end: every path is there, and every command is one that exists."""

import shlex

import pytest

from rljax.command.commands import COMMANDS
from rljax.command.launch import ConfigSource
from rljax.command.train import measured_lines, next_steps
from rljax.config import Config, DataConfig, RewardConfig, to_dict, with_overrides
from rljax.config.declare import define_flags, parsed_options
from rljax.config.flags import config_flags
from rljax.errors import InputError
from rljax.files import write_json
from rljax.policies import load_policy

PARTS = (
    "report.html",
    "policy",
    "reward_model",
    "rewards.log",
    "checkpoints/00000008",
    "checkpoints/00000012",
)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("missing", [(), ("checkpoints",), ("policy", "report.html"), PARTS])
def test_lines_name_what_is_there_and_commands_that_exist(tmp_path, finished, missing):
    folder = tmp_path / "my runs" / "it's"
    folder.mkdir(parents=True)
    there = [name for name in PARTS if not name.startswith(tuple(missing) or "-")]
    for name in there:
        (folder / name).mkdir(parents=True)
    write_json(folder / "config.json", to_dict(Config(data=DataConfig("sort_digits()"))))
    source = ConfigSource(
        "quickstart:tiny", {"run_dir": "other", "seed": "1", "notes": "a b"}, Config()
    )
    lines = dict(line.split(":", 1) for line in next_steps(folder, source, finished))
    lines = {name: text.strip().partition("  (")[0] for name, text in lines.items()}
    names = ("report", "policy", "reward model", "rewards said")
    paths = {lines[name] for name in names if name in lines}
    assert paths == {str(folder / name) for name in there if "/" not in name}
    assert lines.get("checkpoint", "").endswith("00000012") == ("checkpoints/00000012" in there)
    assert ("resume" in lines) == (not finished)
    if not finished:
        program, command, *words = shlex.split(lines["resume"])
        assert (program, command) == ("rljax", "train")
        path, fields, others = config_flags(words)
        assert (path, dict(fields), others) == (
            "quickstart:tiny",
            {"seed": "1", "notes": "a b", "run_dir": str(folder)},
            [],
        )
    for name in {"evaluate", "serve"} & lines.keys():
        program, command, *words = shlex.split(lines[name])
        assert program == "rljax" and words == [str(folder)] and {"policy"} <= set(there)
        options = COMMANDS[command].options
        flags = __import__("absl.flags", fromlist=["FlagValues"]).FlagValues()
        define_flags(options, flags)
        assert (
            str(folder) in vars(parsed_options(options, flags(["x", *words])[1:], flags)).values()
        )


@pytest.mark.parametrize(
    ("data", "reward", "flags"),
    [
        (DataConfig("sort_digits()"), RewardConfig(), []),
        (DataConfig("rows.jsonl", test="other.jsonl"), RewardConfig(), []),
        (DataConfig("rows.jsonl", test_fraction=0.1), RewardConfig(), []),
        (DataConfig("rows.jsonl"), RewardConfig(), ["--data=FILE"]),
        (DataConfig("rows.jsonl", test="other.jsonl"), RewardConfig(model="it"), ["--reward="]),
        (DataConfig("rows.jsonl"), RewardConfig(model="it"), ["--data=FILE", "--reward="]),
    ],
)
def test_the_command_to_evaluate_says_what_the_run_does_not(tmp_path, data, reward, flags):
    for name in ("policy", "checkpoints/00000008"):
        (tmp_path / name).mkdir(parents=True)
    config = Config(data=data, reward=reward)
    write_json(tmp_path / "config.json", to_dict(config))
    lines = dict(line.split(":", 1) for line in next_steps(tmp_path, None, True))
    command, _, why = lines["evaluate"].partition("  (")
    given = [word for word in shlex.split(command)[3:] if word.startswith(("--data", "--reward"))]
    assert len(given) == len(flags) and all(map(str.startswith, given, flags))
    assert bool(why) == ("--data=FILE" in flags)


ANSWERED = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
PAIR = '{"prompt": "q", "chosen": "a", "rejected": "b"}'


@pytest.mark.parametrize(
    ("row", "fields", "flags"),
    [
        (PAIR, {"dataflow": "preference"}, ["--data=FILE"]),
        (PAIR, {"dataflow": "preference", "evaluate.prompts_from": "sort_digits()"}, []),
        (PAIR, {"dataflow": "kto"}, ["--data=FILE"]),
        (PAIR, {"dataflow": "dqo"}, ["--data=FILE"]),
        (ANSWERED, {"dataflow": "sft"}, []),
        ('{"text": "whole"}', {"dataflow": "sft"}, ["--data=FILE"]),
        (PAIR, {"dataflow": "preference", "data.train": "letter_feedback()"}, ["--data=FILE"]),
    ],
)
def test_a_run_that_learned_from_rows_without_answers_asks_for_prompts(
    tmp_path, row, fields, flags
):
    for name in ("policy", "checkpoints/00000008"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    write_json(tmp_path / "policy/config.json", {"max_position_embeddings": 512})
    rows = {"data.train": str(tmp_path / "rows.jsonl"), "data.test": str(tmp_path / "rows.jsonl")}
    config = with_overrides(Config(), {**rows, **fields}, "test")
    if "letter_feedback" in config.data.train:
        config.data.test = ""
    write_json(tmp_path / "config.json", to_dict(config))
    lines = dict(line.split(":", 1) for line in next_steps(tmp_path, None, True))
    words = shlex.split(lines["evaluate"].partition("  (")[0])
    assert [word for word in words if word.startswith("--data")] == flags
    # 512 + 512 tokens, the defaults, which the run did not read, are above the context.
    limits = [] if config.evaluate.prompts_from else ["256", "256"]
    assert [word.partition("=")[2] for word in words if "_tokens=" in word] == limits


def test_a_model_that_an_earlier_end_has_exported_is_said_to_be_of_its_step(tmp_path):
    for name in ("policy", "reward_model"):
        (tmp_path / name).mkdir()
    exported = {"policy": 3, "reward_model": 7}
    write_json(tmp_path / "summary.json", {"steps": 7, "exported": exported})
    lines = list(next_steps(tmp_path, ConfigSource("my.yaml", {}, Config()), False))
    assert lines[0].endswith("/policy  (of step 3)") and lines[1].endswith("/reward_model")


def test_the_command_to_resume_has_the_trust_that_the_run_had(tmp_path):
    source = ConfigSource("my.yaml", {"seed": "1"}, Config())
    for trust_code in (False, True):
        (line,) = next_steps(tmp_path, source, False, trust_code)
        assert ("--trust_code" in shlex.split(line)) == trust_code


ESTIMATE = {"value": 0.125, "low": 0.0625, "high": 0.25, "n": 100}
LATER = ESTIMATE | {"value": 0.5, "high": 0.75}
SUMMARY = dict(
    sft_steps=2,
    steps=9,
    accuracy_before=None,
    accuracy_after=None,
    eval_before=None,
    last_evaluation=None,
)


def evaluated(step, accuracy=None, metrics=None):
    return {"last_evaluation": {"step": step, "accuracy": accuracy, "eval": metrics}}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        (
            {"accuracy_before": ESTIMATE, "accuracy_after": LATER} | evaluated(9, LATER),
            [
                "accuracy_before: 0.125 [0.062, 0.250], n=100, at step 2",
                "accuracy_after: 0.500 [0.062, 0.750], n=100, at step 9",
            ],
        ),
        (  # stopped, and evaluated before the first step alone
            {"accuracy_before": ESTIMATE} | evaluated(2, ESTIMATE),
            [
                "accuracy_before: 0.125 [0.062, 0.250], n=100, at step 2",
                "accuracy_after: not measured after the last update",
            ],
        ),
        (  # stopped behind an evaluation
            {"accuracy_before": ESTIMATE} | evaluated(6, LATER),
            [
                "accuracy_before: 0.125 [0.062, 0.250], n=100, at step 2",
                "accuracy: 0.500 [0.062, 0.750], n=100, at step 6, the last evaluation; steps "
                "taken "
                "since: 3",
            ],
        ),
        (
            {"accuracy_before": ESTIMATE, "steps": 2} | evaluated(2, ESTIMATE),
            ["accuracy_before: 0.125 [0.062, 0.250], n=100, at step 2"],
        ),
        (
            {"eval_before": {"eval/loss": 0.6931, "eval/x": 1.0}}
            | evaluated(9, None, {"eval/loss": 0.375, "eval/rewards/accuracies": 1.0}),
            [
                "held-out rows: loss 0.6931, at step 2",
                "held-out rows: loss 0.375, rewards/accuracies 1, at step 9",
            ],
        ),
        (
            {"eval_before": {"eval/loss": 0.6931}} | evaluated(6, None, {"eval/loss": 0.5}),
            [
                "held-out rows: loss 0.6931, at step 2",
                "held-out rows: loss 0.5, at step 6, the last evaluation; steps taken since: 3",
            ],
        ),
    ],
)
def test_each_number_that_is_printed_has_the_step_at_which_it_was_measured(changes, lines):
    assert list(measured_lines(SUMMARY | changes)) == lines


OWN = {"reward.function": "mine.score"}


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        (OWN, True),
        (OWN | {"dataflow": "mine.method", "evaluate.reward": "mine.other"}, True),
        ({"environment.function": "mine.game"}, True),
        ({"data.train": "mine.rows()"}, True),
        ({"model": "mine.model()"}, True),
        ({"run_dir": "/elsewhere", "profile_port": 9999}, False),  # nothing is written
        ({"trackers": ("console", "mine.tracker()")}, True),
    ],
)
def test_the_commands_ask_for_trust_where_they_run_what_the_user_wrote(
    tmp_path, monkeypatch, fields, needed
):
    """As printed they work, also where no note of the run could be written into the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from rljax.tasks import sort_digits\n"
        "def score(response): return 1.0\n"
        "def rows(): return sort_digits()\n"
    )
    for name in ("policy", "checkpoints/00000008"):
        (tmp_path / name).mkdir(parents=True)
    usual = {"data.train": "sort_digits()", "model": "decoder(layers=1)"}
    config = with_overrides(Config(), usual | fields, "test")
    write_json(tmp_path / "config.json", to_dict(config))
    lines = dict(line.split(":", 1) for line in next_steps(tmp_path, None, True))
    # (The server calls no reward.)
    by_name = {"evaluate": needed, "serve": needed and fields != OWN}
    assert {name: "--trust_code" in lines[name] for name in by_name} == by_name
    (tmp_path / "checkpoints/00000008").rmdir()
    # Trusted, or asked for no trust: what is wrong is that the folder has no checkpoint.
    for trust_code in {needed, True}:
        with pytest.raises(InputError) as error:
            load_policy(tmp_path, trust_code=trust_code)
        assert "--trust_code" not in str(error.value)
    if needed:
        with pytest.raises(InputError, match="--trust_code"):
            load_policy(tmp_path)
