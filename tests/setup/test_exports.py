"""Ends of a run's responses are the ends of what it exports: in transformers, as its folder and
its card say it, and in rljax. What else the base says of generation is kept."""

import dataclasses
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from tiny_tokenizer import write_tokenizer
from tool_families import write_tool_family

from rljax import setup as build
from rljax.config import Config
from rljax.data.text.tokenizer import load_tokenizer
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model
from rljax.policies import load_policy
from rljax.sampler import generate

PROMPT, MOST = [40, 41, 42, 43], 24


def written_base(folder, family="qwen3"):
    """A tokenizer beside the config.json of a family."""
    shutil.copy(golden("hf", family) / "config.json", write_tokenizer(folder))
    return folder


def rewritten(folder, name, **fields):
    path = folder / name
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **fields}))


def exported(folder, model, params, tokenizer_folder, **fields):
    """The folder of a policy, as a run writes it (rljax.training.run.Run.export)."""
    tokenizer = load_tokenizer(tokenizer_folder)
    config = Config(model=f"{tokenizer_folder}/", **fields)
    ends = build.stop_ids(config, tokenizer)
    ids = dict(bos_id=tokenizer.bos_id, eos_ids=ends, pad_id=tokenizer.pad_id)
    save_params(folder, model, params, **ids)
    build.save_tokenizer(folder, config, tokenizer)
    return folder, ends


def written(folder, **how) -> list[int]:
    """Generates by transformers from a folder, with nothing but what lies there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=MOST, do_sample=False, **how)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", lanes(["qwen3"], ["gemma2", "llama3", "qwen2", "mixtral", "gpt_oss"])
)
def test_transformers_stops_where_the_run_stopped(family, tmp_path):
    """The base's generation_config.json names another end than the tokenizer, as of a base model
    whose owner has given it a chat template."""
    base = written_base(tmp_path / "base", family)
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(golden("hf", family), remat="none"), mesh)
    params = load_params(golden("hf", family), model)
    folder, _ = exported(tmp_path / "whole", model, params, base)
    free = written(folder, eos_token_id=None)
    assert len(free) == MOST
    tokenizer = load_tokenizer(base)
    new = [i for at, i in enumerate(free) if i not in free[:at] and i < tokenizer.vocab_size]
    end = new[len(new) // 2]  # a token that greedy decoding comes to
    text = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    rewritten(base, "tokenizer_config.json", eos_token={i: t for t, i in text.items()}[end])
    other = next(i for i in range(50, 300) if i not in free)
    rewritten(
        base,
        "generation_config.json",
        eos_token_id=other,
        repetition_penalty=1.0,
        pad_token_id=7,
        transformers_version="4.0",
        _from_model_config=True,
    )
    folder, ends = exported(tmp_path / "policy", model, params, base)
    assert ends == (end, other, *(one.id for one in load_tokenizer(base).turn_ends))
    assert written(folder) == free[: free.index(end) + 1]
    told = json.loads((folder / "generation_config.json").read_text())
    assert told == {
        "eos_token_id": list(ends),
        "repetition_penalty": 1.0,
        "pad_token_id": 7,
        "bos_token_id": None,
        "transformers_version": "4.0",
    }
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == list(ends)
    assert load_tokenizer(folder).eos_ids == ends
    # And rljax, which a server and an evaluation read the folder by.
    saved = load_policy(folder)
    sampling = dataclasses.replace(saved.sampling(temperature=0.0), max_response_tokens=MOST)
    assert set(sampling.stop_ids) == set(ends)
    prompt = np.array([PROMPT], np.int32)
    batch = generate(saved.model, saved.params, prompt, [len(PROMPT)], jax.random.key(0), sampling)
    ours = np.asarray(batch.tokens)[0, len(PROMPT) : int(jnp.sum(batch.segment_ids[0] > 0))]
    assert ours.tolist() == free[: free.index(end) + 1]


@pytest.mark.parametrize("wish", [dict(temperature=0.6, top_k=20), None], ids=["settings", "none"])
def test_what_the_base_says_of_generation_is_kept(wish, tmp_path):
    base = written_base(tmp_path / "base")
    (base / "generation_config.json").unlink()
    if wish:
        rewritten(base, "generation_config.json", **wish)
    tokenizer = load_tokenizer(base)
    folder = tmp_path / "policy"
    build.save_tokenizer(folder, Config(model=f"{base}/"), tokenizer)
    told = json.loads((folder / "generation_config.json").read_text())
    assert tuple(told["eos_token_id"]) == tokenizer.eos_ids and len(tokenizer.eos_ids) == 2
    assert (wish or {}).items() <= told.items()


def test_of_another_tokenizer_s_folder_the_model_s_settings_are_kept(tmp_path):
    base, other = written_base(tmp_path / "base"), write_tokenizer(tmp_path / "other")
    rewritten(base, "generation_config.json", top_p=0.8)
    (other / "generation_config.json").unlink()
    config = Config(model=f"{base}/", tokenizer=str(other))
    build.save_tokenizer(tmp_path / "policy", config, load_tokenizer(other))
    told = json.loads((tmp_path / "policy/generation_config.json").read_text())
    assert told["top_p"] == 0.8 and told["eos_token_id"] == load_tokenizer(other).eos_ids[0]
    (base / "generation_config.json").write_text("{")  # no reason to lose an export
    build.save_tokenizer(tmp_path / "again", config, load_tokenizer(other))


def test_ends_of_an_episode_s_turns_are_exported(tmp_path):
    """A call that ends a turn of the run ends what others generate, too."""
    base = write_tool_family(tmp_path / "base", "gpt_oss")
    (base / "generation_config.json").unlink()
    tokenizer = load_tokenizer(base)
    ends = tokenizer.encode("<|return|><|call|>")
    config = Config(model="decoder()", tokenizer=str(base))
    assert build.stop_ids(config, tokenizer) == tuple(ends)  # both of the chat template
    config.environment.function, config.environment.calls = "tools()", "harmony"
    build.save_tokenizer(tmp_path / "policy", config, tokenizer)
    told = json.loads((tmp_path / "policy/generation_config.json").read_text())
    assert told["eos_token_id"] == ends
