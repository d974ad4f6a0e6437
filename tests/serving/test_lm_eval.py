"""The public harness lm-eval asks our server: log-likelihoods of choices and generated answers are
the model's own. Skipped where `pip install "lm-eval[api]"` was not run."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny_server import NAME, tiny_server
from tiny_tokenizer import write_json, write_tokenizer

from rljax.batch import batch_from_rows
from rljax.data.text.tokenizer import load_tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("lm_eval", "tenacity"))),
        reason="lm-eval[api] is not installed",
    ),
]

ROWS = [
    {"question": "how many apples are left?", "choices": ["42", "the clips", "no"], "gold": 0},
    {"question": "the answer is", "choices": ["left", "40 2"], "gold": 1},
    {"question": "sort the digits: 3 1 2 ->", "choices": ["1 2 3", "3 2 1", "2"], "gold": 0},
]
STOP, TOKENS = "\n\n", 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer that transformers reads, too, the rows, and the two tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    write_tokenizer(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer_config.json"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    write_json(path, json.loads(path.read_text()) | named)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    tasks = {
        "rljax_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}],
        },
        "rljax_generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[gold]}}",
            "generation_kwargs": {"until": [STOP], "max_gen_toks": TOKENS, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "tokenizer")


@pytest.fixture(scope="module")
def served(tokenizer):
    with tiny_server(tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def scores(served):
    """ids -> log softmax of the logits after ids[:t + 1], [t, V]."""
    engine, params, *_ = served

    @jax.jit
    def all_scores(tokens, lengths):
        batch = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
        return jax.nn.log_softmax(engine.model.logits(params, batch))

    def of(ids):
        row = np.zeros((1, engine.tokens), np.int32)
        row[0, : len(ids)] = ids
        # Column t of the logits says what comes after tokens[:t + 1]; one more is asked for.
        return np.asarray(all_scores(row, np.array([len(ids) + 1], np.int32))[0])[: len(ids)]

    return of


def harness(folder, model: str, address: str, task: str, **more) -> tuple[dict, list[dict]]:
    """(metrics of the task, its samples) of a run of lm-eval's own command."""
    out = folder / f"out_{model}_{task}"
    path = "chat/completions" if "chat" in model else "completions"
    options = {
        "model": NAME,
        "base_url": f"{address}/v1/{path}",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 90,
        **more,
    }
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        model,
        "--tasks",
        task,
        "--model_args",
        ",".join(f"{name}={value}" for name, value in options.items()),
        "--include_path",
        str(folder),
        "--output_path",
        str(out),
        "--log_samples",
    ]
    command += ["--apply_chat_template"] if "chat" in model else []
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "OPENAI_API_KEY": "none",
        "HF_HOME": str(folder / "home"),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,), (samples,) = list(out.rglob("results_*.json")), list(out.rglob("samples_*.jsonl"))
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    metrics = json.loads(result.read_text())["results"][task]
    return metrics, sorted(rows, key=lambda row: row["doc_id"])


def tokenised(folder, tokenized: bool) -> dict:
    """Prompts as ids of the model's own tokenizer, or as text."""
    if tokenized:
        return {"tokenizer": folder / "tokenizer", "tokenizer_backend": "huggingface"}
    return {"tokenizer_backend": "none"}


def greedy(scores, tokenizer, ids: list[int]) -> str:
    """The greedy response, up to an end token or the stop string."""
    made = []
    while len(made) < TOKENS:
        token = int(scores([*ids, *made])[-1].argmax())
        if token in tokenizer.eos_ids:
            break
        made.append(token)
    return tokenizer.decode(made).split(STOP)[0]


def test_log_likelihoods_are_the_models_own(folder, served, scores, tokenizer):
    metrics, samples = harness(
        folder, "local-completions", served[3], "rljax_choice", **tokenised(folder, True)
    )
    right = []
    for row, sample in zip(ROWS, samples, strict=True):
        want = []
        for choice, response in zip(row["choices"], sample["filtered_resps"], strict=True):
            context = tokenizer.encode(row["question"])
            ids = tokenizer.encode(f"{row['question']} {choice}")
            assert ids[: len(context)] == context  # else the harness cuts elsewhere
            logp, at = scores(ids), range(len(context), len(ids))
            want.append(sum(float(logp[t - 1, ids[t]]) for t in at))
            greedily = all(logp[t - 1].argmax() == ids[t] for t in at)
            logprob, is_greedy = float(response[0]), str(response[1]) == "True"
            np.testing.assert_allclose(logprob, want[-1], atol=1e-3)
            assert is_greedy == greedily
        right.append(int(np.argmax(want)) == row["gold"])
    assert metrics["acc,none"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("tokenized", [True, False])
def test_generated_answers_are_the_models_own(folder, served, scores, tokenizer, tokenized):
    _, samples = harness(
        folder, "local-completions", served[3], "rljax_generate", **tokenised(folder, tokenized)
    )
    for row, sample in zip(ROWS, samples, strict=True):
        want = greedy(scores, tokenizer, tokenizer.encode(row["question"]))
        assert sample["resps"] == [[want]]


def test_chats_are_answered_by_the_models_template(folder, served, scores, tokenizer):
    _, samples = harness(folder, "local-chat-completions", served[3], "rljax_generate")
    for row, sample in zip(ROWS, samples, strict=True):
        ids = tokenizer.encode_chat([{"role": "user", "content": row["question"]}])
        assert sample["resps"] == [[greedy(scores, tokenizer, ids)]]
