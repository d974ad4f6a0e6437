"""Pipelines: what is checked before they run, what a kill at any moment leaves, what has changed,
and what their lineage says."""

import ast
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import REPO, one_device_environment

from rljax.arrays import place
from rljax.batch import Batch
from rljax.config import Config
from rljax.config.declare import declared
from rljax.config.flags import listed, load_config_file
from rljax.config.policy_options import PreferenceOptions
from rljax.config.schema import FIELDS
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.errors import InputError
from rljax.evaluation.process_models import load_scorer
from rljax.experiments.lineage import digest, inputs_of
from rljax.experiments.pipeline import record_of, run_stages, write_lineage
from rljax.experiments.stages import make_stages
from rljax.rollout import ModelScorer

TASK = "first_letter(letters=3, kinds=4)"


def base(**fields) -> Config:
    config = Config(dataflow="sft", trackers=(), steps=3, **fields)
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.model_settings.remat = "none"
    config.mesh.data, config.mesh.fsdp = 1, 8  # weights that are split are saved as they are
    config.data.train, config.data.max_prompt_tokens = TASK, 4
    config.sampler.max_response_tokens, config.reward.workers = 3, 1
    config.offline.examples_per_step, config.offline.max_tokens = 16, 8
    config.actor_optimizer.lr = config.critic_optimizer.lr = 5e-3
    config.checkpoint.every_steps = 2
    config.compilation_cache = jax.config.jax_compilation_cache_dir or ""
    return config


SAMPLE = {
    "command": "sample",
    "data": TASK,
    "reward": "exact_match()",
    "samples": 4,
    "prompts": 16,
    "max_prompt_tokens": 4,
    "max_response_tokens": 3,
    "pairs": "pairs.jsonl",
}


def evaluated(name: str) -> dict:
    return {
        "stage": f"evaluate_{name}",
        "command": "evaluate",
        "checkpoint": f"{{{name}}}/policy",
        "data": TASK,
        "samples": 0,
        "prompts": 16,
        "max_prompt_tokens": 4,
        "max_response_tokens": 3,
    }


RL = {
    "stage": "rl",
    "command": "train",
    "dataflow": "grpo",
    "model": "{sft}/policy",
    "reward.model": "{scorer}/reward_model",
    "evaluate.reward": "exact_match()",
    "evaluate.prompts": 16,
    "batch.prompts_per_step": 4,
    "batch.samples_per_prompt": 4,
    "batch.sequences_per_optimizer_step": 16,
}


def chain(sft_steps: int = 3) -> list[dict]:
    """SFT, its samples, a reward model of them, and SFT on the samples that the model chooses."""
    return [
        {"stage": "sft", "command": "train", "steps": sft_steps},
        {"stage": "pairs", "checkpoint": "{sft}/policy", **SAMPLE},
        {
            "stage": "scorer",
            "command": "train",
            "dataflow": "reward_model",
            "model": "{sft}/policy",
            "data.train": "{pairs}/pairs.jsonl",
        },
        {
            "stage": "chosen",
            "checkpoint": "{sft}/policy",
            **SAMPLE,
            "reward": None,
            "reward_model": "{scorer}/reward_model",
            "pairs": "",
        },
        {
            "stage": "best",
            "command": "train",
            "model": "{sft}/policy",
            "data.train": "{chosen}/samples.jsonl",
        },
        evaluated("sft"),
        evaluated("best"),
    ]


def short_chain() -> list[dict]:
    """SFT, its samples, and SFT on them: what the normal lane makes."""
    sft, pairs, *_, best = chain()[:5]
    return [sft, pairs, {**best, "data.train": "{pairs}/samples.jsonl"}]


def stages_in(folder, listed=None, **fields):
    return make_stages(base(**fields), chain() if listed is None else listed, Path(folder), "x.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished pipeline."""
    folder = tmp_path_factory.mktemp("pipeline") / "whole"
    done = [(stage.name, old) for stage, _, old in run_stages(stages_in(folder), "x.py")]
    assert done == [(item["stage"], False) for item in chain()]
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a finished pipeline of three stages."""
    folder = tmp_path_factory.mktemp("pipeline") / "short"
    done = [(s.name, old) for s, _, old in run_stages(stages_in(folder, short_chain()), "x.py")]
    assert done == [("sft", False), ("pairs", False), ("best", False)]
    return folder


# -- what is checked before anything runs --


def problems(tmp_path, *listed) -> str:
    with pytest.raises(InputError) as error:
        make_stages(base(), list(listed), tmp_path / "p", "x.py")
    assert not (tmp_path / "p").exists()
    return str(error.value)


def test_a_typo_in_a_file_of_data_is_no_code_of_others(tmp_path):
    """Whoever is told to trust a file because of a typo learns to trust files."""
    config = base()
    config.compilation_cache = ""  # a file of data may name none
    sft = {"stage": 1, "command": "train"}  # what YAML makes of '1'
    sample = {"stage": "s", **SAMPLE, "checkpoint": "{1}/policy", "data": "sort_digits(prompts=9)"}
    for changes, says in (
        ({"dta": "sort_digits()"}, "did you mean data?"),
        ({"samples": "two"}, "--samples=two: must be a whole number"),
        ({"reward": "my_module.f"}, "runs no code of others"),
        ({"trust_code": "true"}, "give --trust_code on the command line"),
    ):
        with pytest.raises(InputError) as error:
            listed = [sft, sample | changes]
            make_stages(config, listed, tmp_path / "p", "x.yaml", trusted=False)
        assert says in str(error.value), changes
    stages = make_stages(config, [sft, sample], tmp_path / "p", "x.yaml", trusted=False)
    assert [stage.name for stage in stages] == ["1", "s"]


SFT = {"stage": "sft", "command": "train"}
SCORER = {
    "stage": "scorer",
    "command": "train",
    "dataflow": "reward_model",
    "model": "{sft}/policy",
    "data.train": "letter_feedback()",
}


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([], "pipeline() yields nothing"),
        ([3], "stage 0 of pipeline(): a stage is a dict"),
        ([{"command": "train"}], "it is the name of a folder"),
        ([{"stage": "../up", "command": "train"}], "it is the name of a folder"),
        ([{"stage": "a", "command": "trian"}], "one of train, sample, label preferences"),
        ([SFT, SFT], "two stages have this name"),
        ([{**SFT, "stpes": 3}], "stage 'sft': "),
        ([{**SFT, "stpes": 3}], "did you mean steps?"),
        ([{**SFT, "steps": -1}], "steps=-1"),
        ([{**SFT, "run_dir": "x"}], "it is the stage's"),
        ([{**SFT, "model": "{base}/policy"}], "no earlier stage is called 'base'"),
        ([SCORER], "no earlier stage is called 'sft'"),
        ([SFT, {**SCORER, "model": "{sft}/polcy"}], "stage 'sft' makes policy"),
        (
            [SFT, SCORER, {**SFT, "stage": "b", "model": "{scorer}/policy"}],
            "stage 'scorer' makes reward_model",
        ),
        ([{**SFT, "export": False}, SCORER], "its export is off"),
        ([SFT, {**SCORER, "algorithm.reward_loss": "bradly_terry()"}], "bradley_terry"),
        (
            [SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}/policy", "samplse": 4}],
            "did you mean samples?",
        ),
        (
            [SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}/policy", "samples": 0}],
            "--samples=0",
        ),
        ([SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}/policy", "samples": "many"}], "many"),
        (
            [SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}", "out": "/tmp/x.jsonl"}],
            "it is made in the stage's folder",
        ),
        (
            [SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}", "iterations": 2}],
            "yield a stage for each",
        ),
        ((1 / 0 for _ in "x"), "pipeline() failed; ZeroDivisionError"),
    ],
)
def test_stages_are_checked_before_anything_runs(listed, says, tmp_path):
    if isinstance(listed, list):
        assert says in problems(tmp_path, *listed)
    else:
        with pytest.raises(InputError, match="ZeroDivisionError"):
            make_stages(base(), listed, tmp_path / "p", "x.py")


def test_all_problems_come_at_once_and_speak_of_stages_not_of_folders(tmp_path):
    text = problems(
        tmp_path,
        {**SFT, "steps": -1},
        {**SFT, "stage": "b", "batch.epochs": 0, "seed": -2},
        {**SFT, "stage": "c", "model": "{b}/policy", "data.test": "{b}/policy/x.jsonl"},
    )
    assert all(part in text for part in ("steps=-1", "batch.epochs=0", "seed=-2"))
    assert "{b}/policy/x.jsonl" in text and "/tmp" not in text


def test_what_stages_get_from_the_file_and_the_command_line(tmp_path):
    other = {"stage": "other", "command": "train", "config": "quickstart:tiny", "steps": 5}
    item = {"stage": "pairs", **SAMPLE, "checkpoint": "{sft}/policy"}
    (tmp_path / "own.py").write_text(CONFIG.format(tests=str(Path(__file__).parent)))
    given = dataclasses.replace(load_config_file(f"{tmp_path}/own.py"), seed=7)
    listed, where = [SFT, item, other], f"{tmp_path}/own.py"
    sft, pairs, other = make_stages(given, listed, tmp_path, where, flags=["seed"])
    assert pairs.settings.seed == 7 and sft.config.seed == 7 and other.config.seed == 7
    assert other.config.steps == 5 and other.config.dataflow == "grpo"
    assert pairs.settings.out == "{pairs}/samples.jsonl" and pairs.needs() == ("sft",)
    assert pairs.outputs() == ("samples.jsonl", "pairs.jsonl")
    line = pairs.command_line()
    assert line[1:4] == ["-m", "rljax", "sample"]
    assert f"--checkpoint={tmp_path}/sft/policy" in line
    assert f"--pairs={tmp_path}/pairs/pairs.jsonl" in line
    assert "--config=quickstart:tiny" in other.command_line()


def test_a_stage_learns_from_the_files_of_several(tmp_path):
    drawn = [{"stage": f"s{i}", **SAMPLE, "checkpoint": "{sft}/policy", "seed": i} for i in (1, 2)]
    both = "{s1}/samples.jsonl,{s2}/samples.jsonl"
    last = {**SFT, "stage": "last", "dataflow": "sft", "data.train": both}
    stages = make_stages(base(), [SFT, *drawn, last], tmp_path, "x.py")
    files = ",".join(f"{tmp_path}/s{i}/samples.jsonl" for i in (1, 2))
    assert stages[-1].needs() == ("s1", "s2")
    assert f"--config.data.train={files}" in stages[-1].command_line()


# -- what a finished pipeline says --


def records(folder) -> dict[str, dict]:
    lineage = json.loads((Path(folder) / "lineage.json").read_text())
    return {record["stage"]: record for record in lineage["stages"]}


@pytest.mark.slow
def test_the_lineage_names_every_input_and_output_by_its_hash(whole):
    of = records(whole)
    assert list(of) == [item["stage"] for item in chain()]
    made = {name: record["outputs"] for name, record in of.items()}
    assert of["pairs"]["inputs"] == {"checkpoint": {"{sft}/policy": made["sft"]["policy"]}}
    assert of["scorer"]["inputs"] == {
        "model": {"{sft}/policy": made["sft"]["policy"]},
        "data.train": {"{pairs}/pairs.jsonl": made["pairs"]["pairs.jsonl"]},
    }
    assert of["chosen"]["inputs"]["reward_model"] == {
        "{scorer}/reward_model": made["scorer"]["reward_model"]
    }
    for name, record in of.items():
        assert record["status"] == "finished" and record["versions"]["jax"] == jax.__version__
        assert record["by_hand"] and record["process"] and len(record["settings_sha256"]) == 64
        for output, sha in record["outputs"].items():
            assert digest(whole / name / output) == sha
    assert made["sft"]["policy"] != made["best"]["policy"]
    assert of["evaluate_sft"]["metrics"]["greedy_accuracy"]["n"] == 16
    assert "loss" in of["sft"]["metrics"]["last_step"]
    assert not [k for k in of["sft"]["metrics"]["last_step"] if k.startswith("time/")]
    assert of["pairs"]["metrics"]["rows of pairs"] > 0


@pytest.mark.slow
def test_a_reward_model_chooses_among_samples_by_its_own_score(whole):
    """The best of each prompt's samples is the one that the model itself likes best."""
    rows = [json.loads(line) for line in (whole / "chosen/samples.jsonl").read_text().splitlines()]
    saved = load_scorer(whole / "scorer/reward_model")
    scorer = ModelScorer(saved.model, saved.params, 16)
    made = [dict(prompt=r["prompt"], completion=r["completion"], label=True) for r in rows]
    items, _ = encode_rows(
        load_rows(made, "train", "unpaired"), saved.tokenizer, "unpaired", max_tokens=8
    )
    batch = Batch(**batch_arrays("unpaired", items, length=8))
    scores = [score.value for score in scorer.score(place(batch, saved.model.mesh))]
    # A policy of three steps writes <pad> now and then, which its text does not show.
    same = np.isclose([row["reward"] for row in rows], scores, rtol=1e-4, atol=1e-5)
    assert same.sum() >= len(rows) - 1 > 8
    assert len({row["reward"] for row in rows}) > 1
    meta = json.loads((whole / "chosen/samples.meta.json").read_text())
    assert meta["reward"] == "reward_model()"
    assert meta["metrics"]["mean_reward_selected"] > meta["metrics"]["mean_reward_all"]


@pytest.mark.slow
def test_the_page_shows_the_same_prompts_answered_by_several_stages(whole):
    (suite,) = json.loads((whole / "lineage.json").read_text())["same_prompts"]
    assert suite["stages"] == ["evaluate_sft", "evaluate_best"] and len(suite["prompts"]) == 16
    rights = [[row["right"][i] for row in suite["prompts"]] for i in (0, 1)]
    means = [sum(r) / 16 for r in rights]
    values = [suite["accuracy"][name]["value"] for name in suite["stages"]]
    assert values == pytest.approx(means)
    assert suite["difference"]["evaluate_best"]["value"] == pytest.approx(means[1] - means[0])
    page = (whole / "pipeline.html").read_text()
    assert "evaluate_sft and evaluate_best" in page and 'href="best/report.html"' in page
    assert records(whole)["sft"]["outputs"]["policy"][:8] in page
    assert suite["prompts"][0]["prompt"].replace(">", "&gt;") in page


def test_answers_of_another_name_are_compared_too(tmp_path):
    stages = stages_in(
        tmp_path,
        [
            {**evaluated("sft"), "checkpoint": str(REPO), "stage": name, "answers": f"{name}.jsonl"}
            for name in ("one", "two")
        ]
        + [{**evaluated("sft"), "checkpoint": str(REPO), "answers": ""}],
    )
    shown = {"started": 1.0, "ended": 2.0, "by_hand": "", "outputs": {}, "settings_sha256": ""}
    write_records(stages, metrics={"reward": "exact_match()"}, **shown)
    for right, stage in enumerate(stages[:2]):
        answer = {"prompt": "ab>", "response": "a", "score": right, "right": right}
        (stage.folder / f"{stage.name}.jsonl").write_text(json.dumps(answer) + "\n")
    write_lineage(stages, "x.py")
    (suite,) = json.loads((tmp_path / "lineage.json").read_text())["same_prompts"]
    assert suite["stages"] == ["one", "two"] and suite["prompts"][0]["right"] == [0, 1]
    assert "one and two" in (tmp_path / "pipeline.html").read_text()


def test_a_digest_is_of_names_and_bytes_and_of_what_a_run_hands_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("1")
    first = digest(tmp_path / "a")
    (tmp_path / "a/.hidden").write_text("2")
    assert digest(tmp_path / "a") == first
    (tmp_path / "a/x").rename(tmp_path / "a/y")
    assert digest(tmp_path / "a") != first
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (run / "policy/model.safetensors").write_bytes(b"weights")
    for name in ("metrics.jsonl", "report.html", "config.json"):
        (run / name).write_text("{}")
    before = digest(run)
    (run / "report.html").write_text("anew")
    assert digest(run) == before
    weights = next((run / "policy").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b"x")
    assert digest(run) != before
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(split)
    (tmp_path / "own.py").write_text("")
    found = inputs_of(
        {
            "data.train": f"{tmp_path}/{{split}}.jsonl",
            "policy": f"{run}@3",
            "model": "decoder()",
            "judge": f"{tmp_path}/own.py:judge(noise=0.1)",
            "run_dir": str(run),
            "seed": 3,
        },
        FIELDS | declared(PreferenceOptions),
    )
    assert {k: len(v) for k, v in found.items()} == {"data.train": 2, "policy": 1, "judge": 1}


# -- going on --


@pytest.mark.slow
def test_a_finished_pipeline_is_kept_also_where_its_folder_has_moved(short, tmp_path):
    moved = shutil.copytree(short, tmp_path / "moved")
    before = {path: path.stat().st_mtime_ns for path in moved.glob("*/stage.json")}
    assert all(old for _, _, old in run_stages(stages_in(moved, short_chain()), "x.py"))
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_what_has_changed_is_refused_by_name(short, tmp_path):
    home = shutil.copytree(short, tmp_path / "p")

    def refused(*listed, **fields) -> str:
        with pytest.raises(InputError) as error:
            list(run_stages(stages_in(home, list(listed) or short_chain(), **fields), "x.py"))
        return str(error.value)

    assert "sft holds this stage with other settings" in (text := refused(seed=1))
    assert "['seed']" in text and "--redo=sft" in text
    sft, pairs, best = short_chain()
    assert "['samples']" in refused(sft, {**pairs, "samples": 5}, best)
    assert "['actor_optimizer.lr']" in refused({**sft, "actor_optimizer.lr": 1e-4}, pairs)
    # A file that another stage has made.
    with (home / "pairs/pairs.jsonl").open("a") as file:
        file.write("\n")
    text = refused()
    assert "pairs.jsonl has changed since it was made" in text and "--redo=pairs" in text
    text = refused(sft, {**best, "data.train": str(home / "pairs/samples.jsonl")})
    assert "['data.train']" in text
    shutil.rmtree(home / "sft/policy")
    assert "policy is gone" in refused()


def write_records(stages, **fields) -> None:
    for stage in stages:
        record = {"stage": stage.name, "command": stage.command, "status": "finished", **fields}
        stage.folder.mkdir(parents=True)
        text = json.dumps(record | {"compared": stage.compared(), "inputs": {}})
        (stage.folder / "stage.json").write_text(text)


def refusal(stages, **options) -> str:
    """The error before anything has run."""
    with pytest.raises(InputError) as error:
        next(run_stages(stages, "x.py", **options))
    return str(error.value)


def test_stages_that_have_changed_are_refused_before_another_one_runs(tmp_path):
    sft, pairs, best = short_chain()
    write_records(stages_in(tmp_path, [sft, pairs, best])[1:])
    changed = [sft, {**pairs, "samples": 5}, {**best, "actor_optimizer.lr": 1e-4}]
    text = refusal(stages_in(tmp_path, changed))
    assert "['samples']" in text and "['actor_optimizer.lr']" in text
    assert f"--redo=pairs,{best['stage']}, which" in text and not (tmp_path / "sft").exists()
    text = refusal(stages_in(tmp_path, [*changed[:2], best]))
    assert "--redo=pairs, which" in text and "cannot go on:" not in text


@pytest.mark.parametrize("text", ["", '{"stage"', "[]", "{}", None])
def test_a_stage_without_its_record_is_refused_before_another_one_runs(text, tmp_path):
    stages = stages_in(tmp_path, short_chain())
    write_records(stages[2:])
    (stages[2].folder / "checkpoints/00000002").mkdir(parents=True)
    file = stages[2].folder / "stage.json"
    file.unlink() if text is None else file.write_text(text)
    error = refusal(stages)
    says = "has checkpoints, and no stage.json" if text is None else "is no record of a stage"
    assert says in error and f"Fix: restore it, or --redo={stages[2].name}" in error
    assert not stages[0].folder.exists()


@pytest.mark.slow
def test_a_stage_without_its_record_is_made_again(short, tmp_path):
    home = shutil.copytree(short, tmp_path / "p")
    (home / "sft/stage.json").unlink()
    (home / "sft/left").touch()
    done = run_stages(stages_in(home, short_chain()[:1]), "x.py", redo=("sft",))
    assert [(s.name, old) for s, _, old in done] == [("sft", False)]
    assert records(home)["sft"]["outputs"] == records(short)["sft"]["outputs"]
    assert not (home / "sft/left").exists()


@pytest.mark.slow
def test_a_stage_is_made_again_with_all_that_reads_it(whole, tmp_path):
    """The same bytes come out; what does not read it is kept."""
    home = shutil.copytree(whole, tmp_path / "p")
    with pytest.raises(InputError, match="stages: sft, pairs"):
        list(run_stages(stages_in(home), "x.py", redo=("sfft",)))
    old = [s.name for s, _, kept in run_stages(stages_in(home), "x.py", redo=("pairs",)) if kept]
    assert old == ["sft", "evaluate_sft"]
    assert {n: r["outputs"] for n, r in records(home).items()} == {
        n: r["outputs"] for n, r in records(whole).items()
    }


@pytest.mark.slow
def test_a_run_may_go_on_with_what_allow_changed_names(short, tmp_path):
    home = shutil.copytree(short, tmp_path / "p")
    more = {**SFT, "steps": 5, "checkpoint.allow_changed": ("steps",)}
    ((_, record, old),) = run_stages(stages_in(home, [more]), "x.py")
    assert not old and record["metrics"]["steps"] == 5
    assert record["outputs"] != records(short)["sft"]["outputs"]
    with pytest.raises(InputError, match=r"pairs holds this stage.*'checkpoint'"):
        list(run_stages(stages_in(home, [more, chain()[1]]), "x.py"))


@pytest.mark.slow
def test_an_export_that_is_asked_for_later_is_made(short, tmp_path):
    def run(export: bool):
        ((_, record, old),) = run_stages(stages_in(tmp_path, [{**SFT, "export": export}]), "x.py")
        return record["outputs"], old

    assert run(False) == ({}, False) and run(False) == ({}, True)
    assert run(True) == (records(short)["sft"]["outputs"], False)
    assert run(True) == (records(short)["sft"]["outputs"], True)


CONFIG = """
import sys
sys.path.insert(0, {tests!r})
import test_pipeline

def get_config(variant=""):
    config = test_pipeline.base()
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.checkpoint.keep = 100
    return config

def pipeline():
    return [*test_pipeline.chain(sft_steps=40), test_pipeline.RL]
"""


# Imports once and forks for each start, before JAX has devices. argv: the config, then PATH=SIGNAL:
# when that path is there, the start gets the signal. The last start of each folder is left alone.
KILLED = """
import os, signal, sys, time, warnings
from pathlib import Path
import rljax.experiments.pipeline
from rljax.command import run

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads

def started(out):
    if pid := os.fork():
        return pid
    try:
        run("pipeline", [sys.argv[1], f"--out={out}"])
    except SystemExit as end:
        os._exit(end.code or 0)
    os._exit(99)

codes = []
for kill in sys.argv[2:]:
    path, _, number = kill.partition("=")
    pid, deadline, state = started("killed"), time.monotonic() + 900, (0, 0)
    while not Path("killed", path).exists() and state == (0, 0):
        assert time.monotonic() < deadline, path
        time.sleep(0.002)
        state = os.waitpid(pid, os.WNOHANG)
    assert state == (0, 0), f"{path}: a start ended by itself, {state}"
    os.kill(pid, int(number))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for out in ("killed", "whole"):
    codes.append(os.waitstatus_to_exitcode(os.waitpid(started(out), 0)[1]))
print(codes)
"""


@pytest.mark.slow
def test_a_pipeline_killed_again_and_again_ends_in_the_same_bytes(tmp_path):
    """SIGKILL in the middle of training, of sampling, at the end of a run; SIGTERM once. The same
    command goes on each time."""
    tests = str(REPO / "tests" / "experiments")
    (tmp_path / "own.py").write_text(CONFIG.format(tests=tests))
    environment = one_device_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), str(REPO / "tests"), tests])
    kills = {
        "sft/checkpoints/00000002": signal.SIGKILL,  # in the middle of a run
        "sft/checkpoints/00000008": signal.SIGTERM,
        "pairs/stage.json": signal.SIGKILL,  # in the middle of sampling
        "scorer/summary.json": signal.SIGKILL,  # of a run that ends, before its record is written
        "rl/checkpoints/00000002": signal.SIGKILL,
    }
    arguments = [f"{path}={int(number)}" for path, number in kills.items()]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "own.py", *arguments],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    # SIGTERM: 3 from a run, which saves, -15 from a stage that is made anew.
    assert codes in ([-9, code, -9, -9, -9, 0, 0] for code in (3, -15)), done.stdout + done.stderr
    one, other = records(tmp_path / "whole"), records(tmp_path / "killed")
    assert list(one) == [*(item["stage"] for item in chain()), "rl"]
    for name in one:
        for part in ("outputs", "inputs", "metrics", "settings"):
            assert one[name][part] == other[name][part], (name, part)


@pytest.mark.slow
def test_the_record_of_a_stage_that_has_begun_is_no_finished_one(short, tmp_path):
    """A kill while samples are written: the stage is made anew."""
    home = shutil.copytree(short, tmp_path / "p")
    for stage in stages_in(home, short_chain())[1:]:
        shutil.rmtree(stage.folder)
    (home / "pairs").mkdir()
    (home / "pairs/stage.json").write_text(
        '{"stage": "pairs", "status": "begun", "command": "sample", "inputs": {}, "by_hand": "",'
        ' "settings_sha256": ""}'
    )
    (home / "pairs/pairs.jsonl").write_text("half")
    listed = short_chain()[:2]
    done = [(s.name, old) for s, _, old in run_stages(stages_in(home, listed), "x.py")]
    assert done == [("sft", True), ("pairs", False)]
    assert record_of(stages_in(home, listed)[1])["outputs"] == records(short)["pairs"]["outputs"]


SHIPPED = [
    f"{path}{variant}"
    for path in sorted((REPO / "configs" / "pipelines").glob("*.py"))
    for variant in ("", ":tiny", ":teacher")
    if variant != ":tiny" or '== "tiny"' in path.read_text()
    if variant != ":teacher" or path.stem == "why_rl"
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: Path(path).name)
def test_the_pipelines_that_ship_are_valid(path, tmp_path):
    entries = listed(path, "pipeline", "", path.partition(":")[2])
    stages = make_stages(load_config_file(path), entries, tmp_path, path)
    assert len(stages) > 3 and any(stage.needs() for stage in stages)
    text = ast.get_docstring(ast.parse(Path(path.partition(":")[0]).read_text()))
    assert f"rljax pipeline pipelines/{Path(path.partition(':')[0]).stem}" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("why_rl", "one of teacher, objective, on_distribution"),
        ("proxy_gold", "has no variants"),
        ("rounds", "has no variants"),
        ("post_training", "has no variant 'teeny'"),
    ],
)
def test_an_unknown_variant_is_refused_with_those_that_there_are(name, says):
    with pytest.raises(InputError, match=says) as error:
        load_config_file(f"{REPO}/configs/pipelines/{name}.py:teeny")
    assert "teeny" in str(error.value) and "Error" not in str(error.value)


def test_inputs_are_files_that_a_field_names_and_no_words(tmp_path, monkeypatch):
    """A path inside of a call is one, a name for which the working folder has a folder is none."""
    monkeypatch.chdir(tmp_path)
    for name in ("sft", "wandb", "data/gsm", "model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file.txt").write_text(name)
    found = inputs_of(
        {
            "dataflow": "sft",
            "trackers": ("wandb",),
            "model": "model",
            "data.train": "gsm8k(path='data/gsm')",
            "reward.function": "regex_match(pattern='..')",
            "roles": ("guide=value_model(folder='data/gsm', reads='outcome')",),
        },
        FIELDS,
    )
    assert sorted(found) == ["data.train", "model", "roles"]
    assert set(found["roles"]) == set(found["data.train"]) == {"data/gsm"}


EVALUATE = {"stage": "s", "command": "evaluate", "checkpoint": "{sft}", "data": TASK}


@pytest.mark.parametrize(
    ("search", "says"), [("mtcs()", "mcts"), ("mcts(simulation=3)", "simulation")]
)
def test_a_search_is_checked_before_anything_runs(tmp_path, search, says):
    assert says in problems(tmp_path, SFT, {**EVALUATE, "search": search})
    labels = {"stage": "s", "command": "label steps", "checkpoints": ("{sft}",), "search": search}
    assert says in problems(tmp_path, SFT, labels)


def test_a_stage_may_name_the_runs_of_earlier_ones(tmp_path):
    critic = {"search": "mcts()", "search_model": "{sft}", "search_reads": "critic"}
    for more in ({"against": "{sft}"}, critic):
        (_, made) = stages_in(tmp_path, [SFT, {**EVALUATE, **more}])
        assert made.fields()["trust_code"]
    labels = {"stage": "s", "command": "label steps", "checkpoints": ("{sft}@1",)}
    stages_in(tmp_path, [SFT, {**labels, "completer": "{sft}"}])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": "exact_mtach()"}, "exact_match"),
        ({"data": "no_such_task()"}, "no_such_task"),
        ({"checkpoint": "/no/such/folder"}, "/no/such/folder"),
        ({"reward_model": "/no/such"}, "/no/such"),
        ({"checkpoint": "{sft}/policy/../../x"}, "inside of the folder"),
        ({"data": {1, 2}}, "a text, a number"),
        ({"checkpoint": Path("{sft}")}, "a text, a number"),
        ({"command": ["sample"]}, "one of train"),
        ({"stage": "lineage.json"}, "not lineage.json"),
    ],
    ids=str,
)
def test_options_of_every_command_are_checked_before_anything_runs(changes, says, tmp_path):
    stage = {"stage": "s", **SAMPLE, "checkpoint": "{sft}", **changes}
    assert says in problems(tmp_path, SFT, stage)


def test_where_a_function_is_named_from_is_no_other_setting(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(response, ground_truth):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    compared = [
        stages_in(tmp_path, [SFT, {"stage": "s", **SAMPLE, "checkpoint": "{sft}", "reward": text}])[
            1
        ].compared()
        for text in ("own.py:score", f"{tmp_path}/own.py:score")
    ]
    assert compared[0] == compared[1]
