"""What a run has trained, put on a hub by the real client; its card, and what it hides."""

import dataclasses
import json
import re
import resource
from pathlib import Path

import huggingface_hub.constants
import jax
import pytest
from hub_server import Fault, give_up_soon, running_hub, use
from test_hub_models import log_in
from tiny_folders import config as tiny_config
from tiny_folders import one_device, same, tensors_of, write_folder
from tiny_tokenizer import write_tokenizer

from rljax.command import COMMANDS
from rljax.command.launch import launch
from rljax.config import Config, to_dict
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.model import Model
from rljax.report.card import front_matter
from rljax.report.publish import publish
from rljax.report.redacted import HIDDEN, redacted, redacted_values

BASE = "a" * 40
SECRETS = (
    "hf_" + "A1b2" * 8,
    "sk-" + "Zz9_" * 8,
    "ghp_" + "q" * 30,
    "AKIA" + "Q" * 16,
    "hunter2",
    "s3cr3t",
    "alice:pw",
)
COMMAND = (
    f"python launchers/train.py --config=x.py --config.model=Qwen/Q --token={SECRETS[0]} "
    f"--config.reward.function=\"judge(api_key='{SECRETS[4]}', base_url='https://alice:pw@x.org/v1')\""
    f" --run=https://b.org/r?X-Amz-Signature={SECRETS[5]}&n=1 "
)


def write_run(folder: Path, **changes) -> Path:
    """A run folder as a run leaves it: what it exported, what it said, and what must stay here."""
    config = to_dict(Config(model=f"hf://Qwen/Tiny@{BASE}", dataflow="grpo", steps=9))
    config["data"]["train"] = f"hf://datasets/openai/gsm8k@{BASE}/main"
    config["lora"]["rank"], config["reward"]["function"] = 2, f"judge(api_key='{SECRETS[4]}')"
    config |= changes
    model = Model(tiny_config(vocab_size=320, layers=1), one_device())
    write_tokenizer(write_folder(folder / "policy", model, tensors_of(model), files=2))
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",), base="float32")
    adapted = Model(dataclasses.replace(model.config, lora=lora), one_device())
    params = adapted.init(jax.random.key(0))
    save_adapter(folder / "adapter", adapted, params, base=config["model"])
    (folder / "policy" / "optimizer.pt").write_text("state")
    (folder / "policy" / "notes.py").write_text("code")
    (folder / "checkpoints" / "9").mkdir(parents=True)
    (folder / "checkpoints" / "9" / "state.json").write_text("{}")
    summary = {
        "status": "finished",
        "steps": 9,
        "seed": 3,
        "wall_s": 61.0,
        "device": "1 x TPU v5e",
        "accuracy_before": {"value": 0.25, "low": 0.2, "high": 0.3, "n": 200},
        "accuracy_after": {"value": 0.5, "low": 0.44, "high": 0.56, "n": 200},
        "difference": {"value": 0.25, "low": 0.18, "high": 0.32, "n": 200},
        "eval_before": {"eval/loss": 2.0, "eval/x": None},
        "eval_after": {"eval/loss": 1.5},
        "score_before": {"value": 1.0, "low": 0.9, "high": 1.1, "n": 200},
        "completions": 72,
        "score_after": {"value": 1.05, "low": 0.95, "high": 1.15, "n": 200},
        "versions": {"python": "3.11", "jax": "0.10"},
        "started": 1.0,
        "sft_steps": 0,
        "unread": ["offline.examples_per_step", "critic_optimizer.lr", "critic_optimizer.name"],
    }
    start = {
        "time": 1.0,
        "command": COMMAND,
        "host": "secret-machine",
        "pid": 7,
        "step": 0,
        "working_folder": str(Path.home() / "work"),
        "git": {"commit": "c" * 40, "dirty": True},
        "rljax": "0.1",
        "python": "3.11",
        "device": "1 x TPU v5e",
        "memory": "1 GB",
    }
    model_json = {"files": {"model.safetensors": {"bytes": 1, "sha256": "b" * 64}}}
    for name, value in (("config", config), ("summary", summary), ("model", model_json)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 9, "phase": "rl", "reward/mean": 0.5}\n')
    return folder


@pytest.fixture
def server(tmp_path, monkeypatch):
    with running_hub() as running:
        use(running, tmp_path / "home", monkeypatch)
        yield running


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize("harm", [Path.unlink, halve])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("policy", "config.json"),
        ("policy", "model.safetensors.index.json"),
        ("policy", "model-00002-of-00002.safetensors"),
        ("policy", "tokenizer.json"),
        ("adapter", "adapter_config.json"),
        ("adapter", "adapter_model.safetensors"),
    ],
)
def test_a_folder_that_nobody_could_load_is_not_pushed(run, tmp_path, harm, part, name):
    require_refused(run, tmp_path, harm, part, name)


def test_an_index_of_nothing_is_not_pushed(run, tmp_path):
    require_refused(run, tmp_path, empty, "policy", "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_cut_short_is_not_pushed(run, tmp_path, name):
    (run / "policy" / name).write_text(json.dumps({"a": "b" * 99}))
    require_refused(run, tmp_path, halve, "policy", name)


@pytest.mark.parametrize("harm", [Path.unlink, halve, empty])
def test_a_run_without_its_config_is_not_pushed(run, tmp_path, harm):
    harm(run / "config.json")
    with pytest.raises(InputError, match=r"run/config.json .*Fix: copy config.json of the run"):
        publish(str(run), "me/out", part="policy", out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def require_refused(run, tmp_path, harm, part, name):
    harm(run / part / name)
    with pytest.raises(InputError) as error:
        publish(str(run), "me/out", part=part, out=str(tmp_path / "out"))
    # Without the index the weights are one file.
    named = "model.safetensors" if harm is Path.unlink and name.endswith("index.json") else name
    assert named in str(error.value) and f"copy {part}/ again" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_was_measured_and_how(server, run, tmp_path):
    result = {
        "checkpoint": str(run),
        "step": 9,
        "data": "rows.parquet",
        "reward": "gsm8k()",
        "samples": 4,
        "temperature": 0.7,
        "max_response_tokens": 64,
        "metrics": {"pass@1": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 50}, "wall": "x"},
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    done = publish(
        str(run),
        "me/out",
        out=str(tmp_path / "out"),
        license="apache-2.0",
        evaluations=(str(tmp_path / "result.json"),),
    )
    assert (done.part, done.url) == ("adapter", "")
    assert done.files == (
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "report.html",
        "training_config.json",
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert front_matter(card) == {
        "license": "apache-2.0",
        "base_model": "Qwen/Tiny",
        "base_model_relation": "adapter",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["rljax", "grpo", "lora"],
    }
    for line in (
        "| accuracy | 25 % [20, 30] | 50 % [44, 56] | 25 % [18, 32] | 200 | improved |",
        "| score | 1 [0.9, 1.1] | 1.05 [0.95, 1.15] | 0.05 [-0.09142, 0.1914] | 200 | no ",
        "| eval/loss | 2 | 1.5 |",
        ": GRPO of Tiny on gsm8k.",
        "`rljax evaluate` of `run`, step 9, on `rows.parquet`",
        "| pass@1 | 0.5 [0.4, 0.6] | 50 |",
        "4 samples at temperature 0.7",
        "| seed | `3` |",
        f"commit `{BASE}`",
        f"SHA-256 `{'b' * 64}`",
        f"commit {'c' * 40} with changes",
        "[report.html](report.html)",
        'PeftModel.from_pretrained(model, "me/out")',
        "--config.lora.adapter=me/out",
        "launchers/train.py --config=x.py",
        "| time | `1 min",
    ):
        assert line in card, line
    assert "offline.examples" not in card and "batch.prompts_per_step" in card
    assert "critic_optimizer" not in card and "| lora.alpha |" in card
    assert card.count("before and after training (at steps 0 and 9)") == 2
    assert "wall" not in card.partition("pass@1")[2].partition("## Training")[0]
    # The library's own check of a card's front matter.
    huggingface_hub.ModelCard(card).data.to_dict()


def test_scores_of_another_policy_are_said_to_be_its(server, run, tmp_path, caplog):
    caplog.set_level("WARNING", "rljax")
    beside = tmp_path / f"{run.name}2"  # begins as the run's own name does
    for checkpoint, warned in ((run / "policy", 0), (beside, 1), ("hf://me/third", 2)):
        result = {"checkpoint": str(checkpoint), "metrics": {"gsm8k/avg@1": 0.5}}
        result |= {"suites": [{"suite": "gsm8k", "metrics": {"avg@1": 0.5}}]}
        (tmp_path / "result.json").write_text(json.dumps(result))
        out = tmp_path / f"out{warned}"
        publish(str(run), "me/x", out=str(out), evaluations=(str(tmp_path / "result.json"),))
        assert len([r for r in caplog.records if "has the scores of" in r.message]) == warned
        name = "hf://me/third" if warned == 2 else checkpoint.name
        assert f"`rljax evaluate --suite=gsm8k` of `{name}` on" in (out / "README.md").read_text()


def test_without_a_measurement_the_card_says_so(server, tmp_path):
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_text("{}")
    publish(str(run), "me/out", out=str(tmp_path / "out"), part="policy", report=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured." in card and "improved" not in card and "report.html" not in card
    assert front_matter(card)["base_model_relation"] == "finetune"
    assert not (tmp_path / "out" / "report.html").exists()


def test_nothing_that_is_secret_or_of_this_machine_leaves_it(server, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    start = json.loads((run / "starts.jsonl").read_text())
    start["command"] += "--data=/home/somebody/rows.jsonl"
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    for part in ("adapter", "policy"):
        done = publish(str(run), "me/out", out=str(tmp_path / part), part=part)
        for name in done.files:
            data = (tmp_path / part / name).read_bytes()
            for secret in (*SECRETS, "secret-machine", "/home/somebody", str(run)):
                assert secret.encode() not in data, (name, secret)
        assert not {"optimizer.pt", "notes.py", "checkpoints", "state.json"} & {*done.files}
        assert HIDDEN in (tmp_path / part / "README.md").read_text()
    assert "~/rows.jsonl" in (tmp_path / "policy" / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("judge(api_key_env='OPENAI_API_KEY')", "judge(api_key_env='OPENAI_API_KEY')"),
        (
            "max_tokens=5, tokenizer='x', stop_tokens=3",
            "max_tokens=5, tokenizer='x', stop_tokens=3",
        ),
        ("judge(api_key='x', model='m')", f"judge(api_key='{HIDDEN}', model='m')"),
        ("PASSWORD: abc, n=1", f"PASSWORD: {HIDDEN}, n=1"),
        ('{"hf_token": "abc"}', f'{{"hf_token": "{HIDDEN}"}}'),
        ("api_key=&#x27;abc&#x27;)", f"api_key=&#x27;{HIDDEN}&#x27;)"),
        ("https://u:p@h.org/x?sig=abc&n=1", f"https://h.org/x?sig={HIDDEN}&n=1"),
        ("gs://bucket/run@3", "gs://bucket/run@3"),
        ("hf://a/b@" + BASE, "hf://a/b@" + BASE),
    ],
)
def test_what_is_hidden_and_what_is_not(text, shown):
    assert redacted(text) == shown
    assert redacted_values({"a": [text], "password": "x"}) == {"a": [shown], "password": HIDDEN}


@pytest.mark.parametrize("public", [False, True])
def test_a_policy_is_pushed_and_loaded_again(server, run, public):
    log_in()
    done = publish(str(run), "hf://me/new", part="policy", public=public)
    repo = server.repositories["model", "me/new"]
    assert repo.private is not public and done.url.endswith(repo.refs["main"])
    files = repo.commits[repo.refs["main"]]
    assert (
        {*files}
        == {*done.files, ".gitattributes"}
        == {
            ".gitattributes",
            "README.md",
            "report.html",
            "training_config.json",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        }
    )
    model = Model(load_config("me/new"), one_device())
    same(load_params("me/new", model), load_params(run / "policy", model))
    assert all("authorization" not in r.headers for r in server.requests if r.method == "PUT")
    # Once more with one shard: those of the push before are gone.
    write_folder(run / "policy", model, tensors_of(model))
    for stale in (run / "policy").glob("model*0000*"):
        stale.unlink()
    (run / "policy" / "model.safetensors.index.json").unlink()
    publish(str(run), "me/new", part="policy", public=not public)
    files = repo.commits[repo.refs["main"]]
    assert [name for name in files if "safetensors" in name] == ["model.safetensors"]
    assert repo.private is not public  # as it was


def test_an_adapter_is_pushed_with_the_base_that_others_can_load(server, tmp_path):
    run = write_run(tmp_path / "run", model="/somewhere/of/mine")
    with pytest.raises(InputError, match="belongs to a model of this machine.*--base=OWNER/NAME"):
        publish(str(run), "me/new", out=str(tmp_path / "no"))
    log_in()
    publish(str(run), "me/new", base="Qwen/Tiny")
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",), base="float32")
    model = Model(tiny_config(vocab_size=320, layers=1, lora=lora), one_device())
    fresh = model.init(jax.random.key(1))
    same(load_adapter("me/new", model, fresh), load_adapter(run / "adapter", model, fresh))
    repo = server.repositories["model", "me/new"]
    told = json.loads(repo.commits[repo.refs["main"]]["adapter_config.json"])
    assert told["base_model_name_or_path"] == "Qwen/Tiny"


@pytest.mark.parametrize("labels_tokens", [False, True])
def test_an_adapter_of_a_reward_model_is_no_text_generator(server, tmp_path, labels_tokens):
    scorer = "hf://Qwen/Scorer"
    run = write_run(tmp_path / "run", critic_model=scorer, dataflow="reward_model")
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",), base="float32")
    config = tiny_config(vocab_size=320, layers=1, lora=lora, head_bias=labels_tokens)
    model = Model(config, one_device(), "scalar")
    save_adapter(run / "adapter", model, model.init(jax.random.key(0)), base=scorer)
    publish(str(run), "me/new", part="adapter", out=str(tmp_path / "card"))
    card = (tmp_path / "card" / "README.md").read_text()
    kind = "Token" if labels_tokens else "Sequence"
    tag = "token-classification" if labels_tokens else "text-classification"
    head = card.split("---")[1]
    assert f"pipeline_tag: {tag}" in head and "base_model: Qwen/Scorer" in head
    assert f'AutoModelFor{kind}Classification.from_pretrained("Qwen/Scorer", num_labels=1)' in card
    assert "A LoRA adapter of a reward model" in card
    assert "generate(" not in card and "lora.adapter" not in card and "In rljax" not in card


def test_the_license_is_that_of_the_base(server, run, tmp_path):
    server.put("Qwen/Tiny", {"README.md": "---\nlicense: mit\n---\n", "config.json": "{}"})
    commit = server.repositories["model", "Qwen/Tiny"].refs["main"]
    config = json.loads((run / "config.json").read_text())
    config["model"] = f"hf://Qwen/Tiny@{commit}"
    (run / "config.json").write_text(json.dumps(config))
    publish(str(run), "me/out", out=str(tmp_path / "out"))
    assert front_matter((tmp_path / "out" / "README.md").read_text())["license"] == "mit"


def test_a_full_disk_is_said_and_no_half_folder_is_left(run, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as a full disk to a writer
    try:
        with pytest.raises(InputError, match="out/.* cannot be written; File too large"):
            publish(str(run), "me/out", out=str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    publish(str(run), "me/out", out=str(tmp_path / "out"))


def test_a_policy_of_an_earlier_end_of_the_run_is_not_pushed(run, tmp_path):
    def note(**changes):
        path = run / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    note(exported={"policy": 9, "adapter": 4})  # it went on without its adapter
    with pytest.raises(InputError, match="adapter is not of the end.*step 4, and the run is at st"):
        publish(str(run), "me/new", out=str(tmp_path / "out"))
    publish(str(run), "me/new", part="policy", out=str(tmp_path / "out"))
    note(exported={"policy": 4}, steps=4)
    publish(str(run), "me/new", part="policy", out=str(tmp_path / "rolled back to 4"))
    with (run / "starts.jsonl").open("a") as file:  # it goes on, or was killed: no summary of it
        file.write('{"time": 2.0}\n')
    with pytest.raises(InputError, match="step 4, and the run is at step 9.*hf upload OWNER/NAME"):
        publish(str(run), "me/new", part="policy", out=str(tmp_path / "new"))


def test_what_cannot_be_pushed_is_said(server, run, tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match="nobody is logged in.*token that may write.*hf auth login"
    ):
        publish(str(run), "me/new")
    log_in("hf_other")
    with pytest.raises(InputError, match="status 401.*token is not valid"):
        publish(str(run), "me/new")
    log_in()
    server.faults = [Fault("POST /api/repos/create", 403)]
    with pytest.raises(InputError, match="status 403.*no right"):
        publish(str(run), "me/new")
    server.faults = [Fault("PUT /put", 403, times=9)]
    with pytest.raises(InputError, match="status 403.*no right"):
        publish(str(run), "me/other")
    server.faults = [Fault("GET /api/models", "silent", times=9)]
    with monkeypatch.context() as patch:
        give_up_soon(patch)
        with pytest.raises(InputError, match="could not be pushed.*Timeout.*--out=FOLDER"):
            publish(str(run), "me/new")
    for wrong in ("me", "hf://datasets/me/new", "me/new@v1", "me/new/x", "/tmp/x"):
        with pytest.raises(InputError, match="hf://OWNER/NAME|OWNER/NAME of a model"):
            publish(str(run), wrong)
    with pytest.raises(InputError, match="no such run folder"):
        publish(str(tmp_path / "none"), "me/new")
    with pytest.raises(InputError, match="not the folder of a run.*hf upload OWNER/NAME FOLDER"):
        publish(str(run / "adapter"), "me/new")
    with pytest.raises(InputError, match="has no reward_model.*--part=adapter"):
        publish(str(run), "me/new", part="reward_model")
    with pytest.raises(InputError, match="--out.*an empty folder"):
        publish(str(run), "me/new", out=str(run))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(InputError, match="--evaluations.*rljax evaluate --out"):
        publish(str(run), "me/new", evaluations=(str(tmp_path / "x.json"),))
    assert ("model", "me/new") not in server.repositories


def test_a_server_in_trouble_does_not_lose_a_push(server, run):
    log_in()
    server.faults = [Fault("POST /api/models/me/new/commit", 503), Fault("PUT /put", 503)]
    publish(str(run), "me/new")
    repo = server.repositories["model", "me/new"]
    assert "adapter_model.safetensors" in repo.commits[repo.refs["main"]]


def test_the_command(server, run, tmp_path, capsys):
    assert launch(COMMANDS["push"], [str(run), "--to=me/new", f"--out={tmp_path / 'o'}"], "x") == 0
    assert "nothing is pushed" in capsys.readouterr().out
    assert launch(COMMANDS["push"], [str(run)], "x") == 2
    assert "--to" in capsys.readouterr().err
    log_in()
    assert launch(COMMANDS["push"], [str(run), "hf://me/new", "--part=policy"], "x") == 0
    assert f"pushed: {server.url}/me/new/commit/" in capsys.readouterr().out


def test_a_card_of_an_alphabet_offers_no_tokenizer_of_transformers(tmp_path):
    run = write_run(tmp_path / "run")
    with_one = publish(run, "ada/x", part="policy", out=tmp_path / "one")
    assert "AutoTokenizer" in (tmp_path / "one" / "README.md").read_text() and with_one.files
    (run / "policy" / "tokenizer.json").rename(run / "policy" / "char_tokenizer.json")
    publish(run, "ada/x", part="policy", out=tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "AutoTokenizer" not in card and "rljax alone reads" in card


@pytest.mark.parametrize("part, conversations", [("policy", True), ("adapter", False)])
def test_the_example_of_a_card_asks_and_ends_as_the_run_did(
    server, tmp_path, part, conversations, capsys
):
    """By stop ids of the folder, and by stop strings of the run, which transformers takes from the
    call alone."""
    pytest.importorskip("peft")
    config = to_dict(Config())["sampler"] | {"stop_strings": ["</answer>"]}
    run = write_run(tmp_path / "run", sampler=config)
    model = Model(tiny_config(vocab_size=320, layers=1), one_device())
    save_params(run / "policy", model, model.init(jax.random.key(0)))
    write_tokenizer(run / part)  # beside an adapter too, as a run exports it
    told = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if conversations:
        told["chat_template"] = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
        (run / "data.json").write_text('{"conversations": true}')
    (run / part / "tokenizer_config.json").write_text(json.dumps(told))
    ends = list(load_tokenizer(run / part).eos_ids)
    publish(run, "ada/x", part=part, base="Qwen/Tiny", out=tmp_path / "out")
    code = (tmp_path / "out" / "README.md").read_text()
    code = code.partition("```python\n")[2].partition("```")[0]
    assert "stop_strings=['</answer>'], tokenizer=tokenizer" in code
    assert ("apply_chat_template" in code) == conversations
    code = code.replace('"ada/x"', repr(str(tmp_path / "out")))
    here = f"from_pretrained({str(run / 'policy')!r})"
    code = re.sub(r'from_pretrained\("Qwen/Tiny".*\)', here, code)
    names: dict = {}
    exec(code.replace("max_new_tokens=512", "max_new_tokens=8"), names)
    assert names["model"].generation_config.eos_token_id == ends and capsys.readouterr().out
    (run / part / "generation_config.json").unlink()
    publish(run, "ada/x", part=part, base="Qwen/Tiny", out=tmp_path / "other")
    assert "generate" not in (tmp_path / "other" / "README.md").read_text()
