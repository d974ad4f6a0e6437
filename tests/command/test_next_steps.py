"""What a run says at its end: every path is there, and every command is one that exists."""

import shlex

import pytest

from rljax.command.commands import COMMANDS
from rljax.command.launch import Given
from rljax.command.train import next_steps
from rljax.config import Config, DataConfig, RewardConfig, to_dict
from rljax.config.declare import define_flags, parsed_options
from rljax.config.flags import config_flags
from rljax.files import write_json

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
    given = Given("quickstart:tiny", {"run_dir": "other", "seed": "1", "notes": "a b"}, Config())
    lines = dict(line.split(":", 1) for line in next_steps(folder, given, finished))
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
            "quickstart:tiny", {"seed": "1", "notes": "a b", "run_dir": str(folder)}, [],
        )  # fmt: skip
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
