"""Nothing passes in silence: warnings before the first step, and counted ones of steps."""

import json
import logging
import math
import os
import types

import jax
import numpy as np
import optax
import pytest
from tiny_gsm8k import TINY, write_model
from tiny_run import summary, tiny_config, train_on_one

from rljax.command import evaluate
from rljax.config import Config, with_overrides
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.report.page import write_report
from rljax.report.run_warnings import fault_lines, is_said
from rljax.report.watch import watch
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward, player_of
from rljax.setup import build
from rljax.setup.weights import check_weights
from rljax.tracking.console import Console
from rljax.training.bad_batch import of_taken_steps
from rljax.training.progress import Progress
from rljax.training.run import Run
from rljax.training.scores import try_rewards
from rljax.training.setup_warnings import setup_warnings


def run_without_devices() -> Run:
    """A run of which there is the progress alone: what counts warnings reads nothing else."""
    run = object.__new__(Run)
    run.progress, run.warnings, run.logs_warnings = Progress(phase="rl"), [], True
    return run


def test_a_warning_is_said_at_1_10_100_and_counted_in_between(caplog):
    run = run_without_devices()
    with caplog.at_level(logging.WARNING, "rljax"):
        for _ in range(250):
            run.warn("skipped_steps", "something")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "step 0: something",
        "step 0: something (so far 10 times)",
        "step 0: something (so far 100 times)",
    ]
    assert run.progress.faults == {"skipped_steps": 250.0}
    assert run.all_warnings()[0].startswith("250 optimizer steps whose loss or gradient")


def test_what_must_hold_for_three_steps_in_a_row_begins_anew_after_a_good_one(caplog):
    run = run_without_devices()
    with caplog.at_level(logging.WARNING, "rljax"):
        for holds in (True, True, False, True, True):
            run.warn_in_a_row("truncated", holds, lambda steps: f"for {steps}")
        assert run.progress.faults == {} and not caplog.records
        for _ in range(9):
            run.warn_in_a_row("truncated", True, lambda steps: f"for {steps}")
    assert run.progress.faults == {"truncated": 11.0}
    run.progress.taken["rl"] = 5
    run.progress.count_fault("reward/errors", 2.0)
    assert run.progress.fault_steps == {"truncated": 0, "reward/errors": 5}
    for line, step in zip(run.all_warnings(), (0, 5), strict=True):
        assert line.endswith(f" (the last at step {step} of 5)")
    assert len(caplog.records) == 2  # at 3 steps in a row, and as the tenth was counted
    # A resumed run goes on counting.
    saved = json.loads(json.dumps(vars(run.progress)))
    assert Progress.from_dict(saved).in_a_row == {"truncated": 11}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0, 1, True),
        (0, 3, True),
        (1, 2, False),
        (9, 10, True),
        (8, 30, True),
        (10, 99, False),
        (99, 100, True),
        (0, 0, False),
    ],
)
def test_when_a_counted_warning_is_said(before, after, said):
    assert is_said(before, after) is said


def test_faults_in_words():
    faults = {"equal_rewards": 4.0, "unhealthy/mismatch/ess": 2.0, "reward/errors": 0.0, "own": 3.0}
    lines = fault_lines(faults, {}, 9)
    assert len(lines) == 2 and lines[0].startswith("4 steps whose rewards were all equal")
    assert "2 steps with mismatch/ess outside of its healthy range" in lines
    lines = fault_lines(faults, {"equal_rewards": 7}, 9)
    assert lines[0].endswith("nothing was learned from them (the last at step 7 of 9)")
    assert "the last" not in lines[1]


def test_a_skipped_step_has_no_loss_and_the_others_their_mean():
    whole = {"loss": 0.0, "grad_norm": 0.0, "skipped_steps": 2.0, "optimizer_steps": 2.0}
    found = of_taken_steps({**whole, "critic/vf_loss": 3.0, "critic/skipped_steps": 0.0})
    assert math.isnan(found["loss"]) and math.isnan(found["grad_norm"])
    assert found["critic/vf_loss"] == 3.0
    half = of_taken_steps({**whole, "loss": 1.5, "skipped_steps": 1.0})
    assert half["loss"] == 3.0
    fine = {**whole, "loss": 1.5, "skipped_steps": 0.0}
    assert of_taken_steps(fine) == fine


def test_the_panel_shows_the_last_warnings():
    console = Console(4, live=True)
    console.warnings = lambda: [f"warning {i}" for i in range(5)]
    with console.console.capture() as captured:
        console.console.print(console._render())
    text = captured.get()
    assert "! warning 4" in text and "! warning 0" not in text and "2 earlier warnings" in text


def test_evaluate_says_that_responses_were_cut_off(capsys):
    evaluate._print("a run", {"pass@1": 0.5, "truncated_fraction": 0.75})
    assert "warning: 75% of the responses were cut off" in capsys.readouterr().err
    evaluate._print("a run", {"pass@1": 0.5, "truncated_fraction": 0.25})
    assert "warning" not in capsys.readouterr().err


def test_a_folder_without_a_run_has_no_report_and_nothing_to_watch(tmp_path):
    for ask in (lambda: write_report(tmp_path), lambda: watch([tmp_path], once=True)):
        with pytest.raises(InputError, match="no run has begun in this folder"):
            ask()
    assert list(tmp_path.iterdir()) == []


# -- before the first step --


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


def rows_file(path, prompts) -> str:
    rows = [{"prompt": f"What is {p}?", "ground_truth": str(p)} for p in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def warned(tmp_path, folder, prompts, **changes) -> list[str]:
    fields = {
        **TINY,
        "model": str(folder),
        "data.train": rows_file(tmp_path / "train.jsonl", prompts),
        "reward.function": "exact_match()",
        "trackers": (),
        **changes,
    }
    return setup_warnings(build(with_overrides(Config(), fields, "test"), jax.devices()[:1]))


def test_rows_that_are_trained_on_and_held_out_are_said_with_their_share(tmp_path, folder):
    train = rows_file(tmp_path / "train.jsonl", range(20))
    (found,) = warned(tmp_path, folder, range(20), **{"data.test": train})
    assert "4 of 4 held-out rows (100%)" in found  # evaluate.prompts of them
    some = rows_file(tmp_path / "some.jsonl", [0, 1, 100, 101])
    (found,) = warned(tmp_path, folder, range(20), **{"data.test": some})
    assert "2 of 4 held-out rows (50%)" in found
    none = rows_file(tmp_path / "none.jsonl", [100, 101])
    assert warned(tmp_path, folder, range(20), **{"data.test": none}) == []
    assert warned(tmp_path, folder, range(40), **{"data.test_fraction": 0.2}) == []
    streamed = {"data.test": train, "data.stream": True}
    (found,) = warned(tmp_path, folder, range(20), **streamed)
    assert "is data.train, too" in found


def test_held_out_examples_are_found_in_packed_rows(tmp_path, folder):
    """Other examples share the rows of the one file than of the other."""
    files = {}
    for name, numbers in dict(train=range(12), test=range(4, 8)).items():
        rows = [dict(prompt=f"What is {i}?", completion="no " * (1 + i % 4)) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        files[f"data.{name}"] = str(tmp_path / f"{name}.jsonl")
    fields = dict(TINY, **files, model=str(folder), dataflow="sft", trackers=())
    fields |= {"offline.max_tokens": 64, "offline.examples_per_step": 8}
    found = {}
    for packing in (False, True):
        changes = {**fields, "offline.packing": packing}
        setup = build(with_overrides(Config(), changes, "test"), jax.devices()[:1])
        found[packing] = setup_warnings(setup)
    (held_out,) = found[False]
    assert held_out.startswith("4 of 4 held-out rows (100%) of data.test")
    packed, few = found[True]
    assert packed == held_out
    assert f"the data has {len(setup.data.prompts)} packed rows that differ" in few


def test_fewer_prompts_than_a_step_draws_are_said(tmp_path, folder):
    (found,) = warned(tmp_path, folder, [1])
    assert "batch.prompts_per_step=8: the data has 1 prompt that differ" in found
    (found,) = warned(tmp_path, folder, [1, 2, 2, 2, 1, 2, 1, 1, 1])
    assert "has 2 prompts" in found


@contract(steps_of_one_size=True)
def signs(learning_rate, weight_decay):
    """An update rule of one's own."""
    return optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actor_optimizer.lr": 0.0}, "actor_optimizer.lr=0: nothing is learned by it"),
        ({"actor_optimizer.lr": 0.5}, "changes every weight by about as much"),
        ({"actor_optimizer.lr": 0.5, "actor_optimizer.name": "sgd"}, ""),
        (
            {"actor_optimizer.lr": 0.5, "actor_optimizer.name": "test_run_warnings.signs()"},
            "a step of test_run_warnings.signs() changes every weight by about as much",
        ),
        ({"actor_optimizer.warmup_steps": 4}, "rl has 4 optimizer steps"),
        ({"actor_optimizer.warmup_steps": 3}, "the first of 4 optimizer steps changes nothing"),
        ({"actor_optimizer.warmup_steps": 3, "actor_optimizer.warmup_from": 0.1}, ""),
        ({"actor_optimizer.warmup_steps": 3, "steps": 30}, ""),
        ({"critic_optimizer.lr": 0.0}, ""),  # there is none
    ],
)
def test_learning_rates_that_teach_nothing_are_said(changes, says, tmp_path, folder):
    found = warned(tmp_path, folder, range(20), **changes)
    assert [says in text for text in found] == ([True] if says else [])


def test_a_warm_up_of_a_config_that_ships_is_not_said(tmp_path, folder):
    fields = {
        **TINY,
        "model": str(folder),
        "data.train": rows_file(tmp_path / "a.jsonl", range(20)),
        "reward.function": "exact_match()",
        "trackers": (),
        "actor_optimizer.warmup_steps": 4,
    }
    setup = build(with_overrides(Config(), fields, "test"), jax.devices()[:1])
    shipped = with_overrides(Config(), {"actor_optimizer.warmup_steps": 4}, "test")
    assert setup_warnings(setup, shipped) == []
    assert len(setup_warnings(setup, Config())) == len(setup_warnings(setup)) == 1


def test_adapters_wider_than_the_model_are_refused(tmp_path, folder):
    with pytest.raises(InputError, match="lora.rank: got 1000"):
        warned(tmp_path, folder, range(20), **{"lora.rank": 1000})


# -- rewards, as they are tried --

REWARDS = """
import time
def constant(response, ground_truth): return 0.0
def hashes(response, ground_truth): return float(response == f"#### {ground_truth}")
def tagged(response, ground_truth): return float(f"<answer>{ground_truth}</answer>" in response)
def good(response, ground_truth): return float(ground_truth in response)
def negative(response): return -1.0
def slow(response, ground_truth): time.sleep(60)
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tried")
    (folder / "warned_rewards.py").write_text(REWARDS)
    built = build(tiny_config(folder), jax.devices()[:1])

    def trial(name: str, timeout_s: float = 30.0) -> list[str]:
        text = name if "(" in name else f"{folder / 'warned_rewards.py'}:{name}"
        with RewardPool(text, workers=1, timeout_s=timeout_s) as pool:
            reward = Reward(pool, built.tokenizer, built.model.mesh)
            run = dict(setup=built, player=player_of(reward), reward=reward, eval_player=None)
            return try_rewards(types.SimpleNamespace(**run))

    return trial


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("constant", "gives a right answer 0 at most"),
        ("hashes", "where it is written '#### "),
        ("tagged", "which the prompt does not ask for"),
        ("good", ""),
        ("negative", ""),  # it reads no ground truth
        ("exact_match()", ""),
        ("boxed()", "where it is written"),
        ("countdown()", ""),  # of what stands in the column, not of an answer
        ("regex_match(pattern='x')", ""),
        ("mixture(rewards=('exact_match()', 'boxed()'))", ""),
    ],
)
def test_a_right_answer_that_is_worth_nothing_is_said(name, says, tried):
    try:
        found = tried(name)
    except InputError as error:  # the column does not fit: refused, as before
        assert name == "countdown()", error
        return
    assert [says in text for text in found] == ([True] if says else []), found


def test_a_reward_over_its_limit_on_every_row_is_refused(tried):
    with pytest.raises(InputError, match=r"reward.timeout_s=0.3 for each of.*Fix: make it faster"):
        tried("slow", timeout_s=0.3)


# -- weights --


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda file: os.remove(file), "has no [*].safetensors file"),
        (lambda file: os.rename(file, file.with_name("pytorch_model.bin")), "pytorch_model.bin"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "its header describes"),
        (lambda file: file.write_bytes(file.read_bytes()[:5]), "has 5 bytes"),
        (lambda file: file.write_bytes(b""), "has 0 bytes"),
    ],
)
def test_weights_that_are_not_there_or_not_whole_are_found_without_reading_them(
    break_it, says, tmp_path
):
    folder = write_model(tmp_path / "qwen3", "qwen3")
    data = rows_file(tmp_path / "rows.jsonl", range(20))
    fields = {**TINY, "model": str(folder), "data.train": data, "teacher_model": str(folder)}
    config = with_overrides(Config(), fields, "test")
    model = build(config, jax.devices()[:1]).model
    check_weights(config, model)
    break_it(folder / "model.safetensors")
    with pytest.raises(InputError, match=says):
        check_weights(config, model)
    config.model = ""  # and of the other models of a run
    with pytest.raises(InputError, match=says):
        check_weights(config, model)


# -- a run --


@pytest.mark.slow
def test_a_run_tells_its_warnings_in_log_summary_starts_and_report(tmp_path, caplog):
    config = tiny_config(
        tmp_path / "run",
        model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
        sft__steps=0,
        steps=4,
        sampler__max_response_tokens=1,
        evaluate__every_steps=0,
        evaluate__prompts=4,
        checkpoint__every_steps=0,
        export=False,
        critic_optimizer__lr=1e-3,
    )
    with caplog.at_level(logging.WARNING, "rljax"):
        train_on_one(config)
    said = [record.getMessage() for record in caplog.records]
    assert sum("were cut off at sampler.max_response_tokens" in text for text in said) == 1
    assert sum("critic_optimizer.lr=0.001: set, but nothing reads it" in t for t in said) == 1
    written = summary(tmp_path / "run")
    assert written["faults"]["truncated"] == 4.0
    assert written["fault_steps"]["truncated"] == written["steps"] == 4
    assert any("has no critic" in text for text in written["warnings"])
    start = json.loads((tmp_path / "run" / "starts.jsonl").read_text())
    assert start["warnings"] == written["warnings"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "4 steps in which more than 50% of the responses were cut off" in page
    assert "sampler.max_response_tokens (the last at step 4 of 4)" in page
    assert "has no critic" in page
    assert np.isfinite(written["wall_s"])
