"""Folders of models that score: a reward model for the words of tiny_run's task, a judge."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from tiny_run import tiny_config
from tiny_tokenizer import write_tokenizer

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.setup import build

TEXT = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"


def write_scorer(folder: Path) -> str:
    """A scalar head on random weights; the folder's name."""
    folder.mkdir(exist_ok=True)
    words = build(tiny_config(folder), jax.devices()[:1]).tokenizer.vocab_size
    facts = dataclasses.replace(resolve(TEXT, NAMESPACES["model"])(words), labels=1)
    model = Model(facts, make_mesh(1, 1, 1, devices=jax.devices()[:1]), "scalar")
    rng = np.random.default_rng(7)  # a new head is zero: its scores are made to differ
    params = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), model.init(jax.random.key(3))
    )
    save_params(folder, model, params, bos_id=None, eos_ids=(1,), pad_id=0)
    return str(folder)


def write_judge(folder: Path) -> str:
    """A chat model of random weights whose words are far from equally likely; the folder's
    name."""
    folder = write_tokenizer(folder)
    words = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.5)"
    model = Model(resolve(text, NAMESPACES["model"])(words), make_mesh())
    save_params(folder, model, model.init(jax.random.key(3)), bos_id=None, eos_ids=(1,), pad_id=0)
    return str(folder)
