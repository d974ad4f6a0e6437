"""`rljax train --dry_run`, and what attempts that fail leave behind: nothing."""

import json

import pytest

from rljax.command import main
from rljax.config import with_overrides
from rljax.config.flags import load_config_file
from rljax.errors import InputError
from rljax.runs.folder import removed_if_empty
from rljax.training import train

REWARDS = """
def raises(response, ground_truth):
    raise KeyError("answer")


def length(response):
    return float(len(response))
"""
SMALL = (
    "--config.model=decoder(layers=1, embed=16, mlp=16, heads=1, kv_heads=1, head_dim=16)",
    "--config.sft.steps=0",
)


@pytest.fixture
def dry_run(capsys, tmp_path, monkeypatch):
    """rljax train CONFIG --dry_run in an empty folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["train", *arguments, "--dry_run", "--config.compilation_cache="])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return call


@pytest.mark.slow
def test_a_dry_run_shows_plan_rows_and_rewards_and_leaves_nothing(dry_run, tmp_path):
    code, out, err = dry_run("quickstart")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    lines = out.splitlines()
    assert lines[0].startswith("plan: ") and "--- prompt" in out and "--- example" in out
    rewards = [line for line in lines if line.startswith("reward ")]
    assert [line.split()[1] for line in rewards] == ["1.0", "0.0"] * 2
    truths = [line.partition("ground_truth='")[2][:1] for line in lines if "--- prompt" in line]
    assert [line[-2] for line in rewards[::2]] == truths
    assert lines[-1] == "dry run: nothing was trained"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config.steps=-1"], "steps=-1: must be >= 0"),
        (["--config.mesh.fsdp=3"], "needs 3 devices"),
        (["--config.data.train=rows.jsonl"], "rows.jsonl"),
        (["--config.reward.function=own.py:raises", *SMALL], "KeyError"),
    ],
)
def test_a_dry_run_finds_what_would_end_a_run(dry_run, tmp_path, flags, says):
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1", "answer": 2}) + "\n")
    before = {path.name for path in tmp_path.iterdir()} | {"__pycache__"}
    code, _, err = dry_run("quickstart", *flags)
    assert code == 2 and says in err and "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} <= before


def test_a_dry_run_of_rows_of_a_file_has_no_reward(dry_run):
    code, out, err = dry_run("offline/dpo:tiny")
    assert code == 0, err
    assert "--- pair 0" in out and "reward " not in out


@pytest.mark.slow
def test_an_attempt_that_fails_leaves_no_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1", "answer": 2}) + "\n")
    before = sorted(tmp_path.iterdir())
    for name, value, run_dir in (
        ("mesh.fsdp", 3, ""),
        ("data.train", "rows.jsonl", "a/new/folder"),
        ("sampler.max_response_tokens", 10**6, ""),
        ("reward.function", "own.py:raises", "a/new/folder"),
    ):
        config = with_overrides(
            load_config_file("quickstart:tiny"),
            {
                name: value,
                "run_dir": run_dir,
                "trackers": (),
                "compilation_cache": "",
                "batch.tokens_per_microbatch": 2 * 10**6,
            },
            "test",
        )
        with pytest.raises(InputError):
            train(config)
        assert set(tmp_path.iterdir()) <= {*before, tmp_path / "__pycache__"}, name


@pytest.mark.parametrize("written", [None, "checkpoints/1/state.json", "rewards.log"])
def test_what_an_attempt_has_written_stays(tmp_path, written):
    folder = tmp_path / "runs" / "one"
    with pytest.raises(ZeroDivisionError), removed_if_empty(folder):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
        if written is not None:
            (folder / written).parent.mkdir(exist_ok=True)
            (folder / written).write_text("x")
        raise ZeroDivisionError
    assert (tmp_path / "runs").exists() == (written is not None)
    assert written is None or (folder / written).read_text() == "x"
    (tmp_path / "runs").mkdir(exist_ok=True)
    with pytest.raises(ZeroDivisionError), removed_if_empty(tmp_path / "runs"):
        raise ZeroDivisionError  # a folder that was there before
    assert (tmp_path / "runs").is_dir()


def test_a_name_that_is_too_long_is_the_error_that_is_said(tmp_path):
    with pytest.raises(ZeroDivisionError), removed_if_empty(tmp_path / ("x" * 300)):
        _ = 1 / 0
