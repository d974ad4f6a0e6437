"""Runs whose model, data and adapter are named on a hub: of which commits, resumed and offline."""

import copy
import json

import huggingface_hub.constants
import jax
import pytest
from hub_server import forget, running_hub, use
from test_hub_datasets import jsonl
from test_hub_models import log_in
from tiny_folders import config as tiny_config
from tiny_folders import one_device, same, tensors_of, write_folder
from tiny_tokenizer import write_tokenizer

from rljax.config import Config
from rljax.config.declare import declared
from rljax.config.policy_options import RejectionOptions
from rljax.data.online.encoded import load_run_tokenizer
from rljax.errors import InputError
from rljax.evaluation.process_models import load_scorer
from rljax.experiments.stages import _check_option
from rljax.files import file_sha256
from rljax.hub import model_folder
from rljax.models.huggingface.peft import load_adapter
from rljax.models.model import Model
from rljax.policies import load_named_policy, load_policy
from rljax.report.publish import publish
from rljax.setup.abstract import abstract_setup
from rljax.setup.rewards import text_scorer
from rljax.training import train
from rljax.training.hub_commits import with_commits


@pytest.fixture
def server(tmp_path, monkeypatch):
    with running_hub() as running:
        use(running, tmp_path / "home", monkeypatch)
        model = Model(tiny_config(vocab_size=320, layers=1), one_device())
        folder = write_folder(tmp_path / "model", model, tensors_of(model))
        running.first = running.put_folder("me/tiny", write_tokenizer(folder))
        running.rows = running.put(
            "me/rows", {"train.jsonl": jsonl(8), "test.jsonl": jsonl(2, 20)}, "dataset"
        )
        yield running


def config(run_dir, **fields) -> Config:
    made = Config(dataflow="sft", model="me/tiny", steps=1, trackers=(), run_dir=str(run_dir))
    made.data.train = made.data.test = "hf://datasets/me/rows"
    made.offline.examples_per_step, made.offline.max_tokens = 8, 128
    made.lora.rank, made.lora.targets, made.lora.base = 2, ("q_proj",), "float32"
    made.compilation_cache, made.evaluate.prompts = "", 2
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.slow
def test_a_run_keeps_the_commits_that_it_began_with(server, tmp_path, monkeypatch):
    run_dir, pinned = tmp_path / "run", f"hf://me/tiny@{server.first}"
    asked = config(run_dir)
    run = train(copy.deepcopy(asked), devices=jax.devices()[:1])
    told = json.loads((run_dir / "model.json").read_text())
    weights = tmp_path / "model" / "model.safetensors"
    assert (told["folder"], told["revision"]) == (pinned, server.first)
    assert told["files"]["model.safetensors"]["sha256"] == file_sha256(weights)
    data = f"hf://datasets/me/rows@{server.rows}"
    assert json.loads((run_dir / "hub.json").read_text()) == {
        "me/tiny": pinned,
        "hf://datasets/me/rows": data,
    }
    saved = json.loads((run_dir / "config.json").read_text())
    assert (saved["model"], saved["data"]["train"], saved["data"]["test"]) == (pinned, data, data)
    adapter = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    named = adapter["base_model_name_or_path"], adapter["revision"]
    assert named == ("me/tiny", server.first)

    # Its owner goes on; the run does not.
    server.put("me/tiny", {"config.json": "{}"})
    server.put("me/rows", {"train.jsonl": jsonl(1)}, "dataset")
    forget()
    server.requests.clear()
    asked.steps = 2
    assert train(copy.deepcopy(asked), devices=jax.devices()[:1]).summary["steps"] == 2
    assert load_policy(run.folder).config.model == pinned
    assert server.requests == []  # all of it is here

    elsewhere = copy.deepcopy(asked)
    elsewhere.steps, elsewhere.model = 3, "hf://me/tiny@main"
    with pytest.raises(InputError, match="me/tiny@.*has no|model"):
        train(elsewhere, devices=jax.devices()[:1])
    assert json.loads((run_dir / "config.json").read_text())["model"] == pinned
    # What it has trained goes to the hub, and a run goes on from there.
    log_in()
    publish(str(run_dir), "me/out")
    forget()
    model = load_policy(run.folder).model
    began = load_adapter(run_dir / "adapter", model, model.init(jax.random.key(0)))
    same(load_adapter("me/out", model, model.init(jax.random.key(0))), began)
    # Without a network a new run takes what was here at last.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    forget()
    new, commits = with_commits(config(tmp_path / "other"), tmp_path / "other")
    assert commits["hf://datasets/me/rows"].partition("@")[2] == server.rows
    assert new.model.startswith("hf://me/tiny@")


def test_a_plan_downloads_the_config_alone(server, tmp_path):
    made = config(tmp_path / "run", critic_model="hf://me/tiny", dataflow="grpo")
    made.lora.rank, made.data.max_prompt_tokens, made.sampler.max_response_tokens = 0, 16, 16
    setup = abstract_setup(made)
    assert setup.model.config.vocab_size == 320
    files = {path.rpartition("/")[2] for path in server.paths("GET") if "resolve" in path}
    assert files == {"config.json"} and not any("/store/" in path for path in server.paths())


def test_every_text_that_names_a_repository_gets_its_commit(server, tmp_path):
    made = config(tmp_path / "run", critic_model="me/tiny", teacher_model="hf://me/tiny@main")
    made.reward.model = made.reward.judge_model = made.tokenizer = "me/tiny"
    made.lora.adapter = "hf://me/tiny/adapters/one"
    made.data.sources = ("hf://datasets/me/rows/{split}.jsonl", "sort_digits()")
    made.roles = (
        "x=frozen_policy(folder='hf://me/tiny')",
        "y=frozen_policy(folder='hf://me/tiny/b')",
    )
    new, commits = with_commits(made, tmp_path)
    at = f"hf://me/tiny@{server.first}"
    assert {new.critic_model, new.reward.model, new.reward.judge_model, new.tokenizer} == {at}
    assert new.teacher_model == at and new.lora.adapter == f"{at}/adapters/one"
    rows = f"hf://datasets/me/rows@{server.rows}"
    assert new.data.sources == (f"{rows}/{{split}}.jsonl", "sort_digits()")
    assert new.roles == tuple(
        f"{n}=frozen_policy(folder='{at}{p}')" for n, p in (("x", ""), ("y", "/b"))
    )
    assert with_commits(new, tmp_path)[0] == new
    assert [p for p in server.paths() if "/api/models/me/tiny" in p] != []
    plain = config(tmp_path / "run", model="decoder(layers=1)")
    plain.data.train = plain.data.test = "sort_digits()"
    assert with_commits(plain, tmp_path) == (plain, {})


def test_saved_policies_and_stages_take_names(server, tmp_path):
    policy = load_named_policy("me/tiny@main")
    assert policy.step is None and policy.model.config.vocab_size == 320
    with pytest.raises(InputError, match="me/tiny has no revision 'best'"):
        load_named_policy("me/tiny@best")
    with pytest.raises(InputError, match="no such folder.*hf://OWNER/NAME"):
        load_policy("runs/no/such")
    options = declared(RejectionOptions)
    _check_option("checkpoint", options["checkpoint"], "hf://me/tiny")
    _check_option("reward_model", options["reward_model"], "me/tiny")
    with pytest.raises(InputError, match="model of the hub"):
        _check_option("checkpoint", options["checkpoint"], "no/such/folder")
    tokenizer = load_run_tokenizer(config(tmp_path))
    assert tokenizer.fingerprint() == policy.tokenizer.fingerprint()
    assert model_folder("me/tiny").is_dir()


def test_an_unknown_name_ends_a_run_before_anything_else(server, tmp_path):
    with pytest.raises(InputError, match="me/nobody is no folder here, and as a name on the hub"):
        train(config(tmp_path / "run", model="me/nobody"))
    assert not (tmp_path / "run").exists()


def test_reward_models_are_read_by_name(server, tmp_path):
    model = Model(tiny_config(vocab_size=320, layers=1), one_device(), "scalar")
    folder = write_tokenizer(write_folder(tmp_path / "reward", model, tensors_of(model)))
    commit = server.put_folder("me/reward", folder)
    local = load_scorer(folder)
    for spec in ("me/reward", f"hf://me/reward@{commit}"):
        scorer = load_scorer(spec)
        assert scorer.model.head == "scalar"
        same(scorer.params, local.params)
    judge = config(tmp_path / "run")
    judge.reward.judge_model, judge.reward.function = (
        f"hf://me/tiny@{server.first}",
        "judge(scale=9)",
    )
    scorer = text_scorer(judge, "judge(scale=9)", one_device())
    assert scorer.model.config.vocab_size == 320
