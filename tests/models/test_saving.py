"""Saving: in shards, from any mesh, in another dtype, killed half-way; transformers reads it."""

import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPO, lanes
from safetensors import safe_open
from tiny_folders import (
    CONFIGS,
    by_hand,
    by_hand_placed,
    same,
    tensors_of,
    tiny,  # noqa: F401  a fixture
    write_folder,
)
from tiny_refusal import refused

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model


def test_saved_in_shards(tiny, tmp_path):  # noqa: F811
    folder, model, tensors = tiny
    params, out = load_params(folder, model), tmp_path / "out"
    save_params(out, model, params, eos_ids=(1,), shard_bytes=12_000)
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            of_file = {name: file.get_tensor(name) for name in file.keys()}
            assert file.metadata() == {"format": "pt"}
        assert sum(t.nbytes for t in of_file.values()) <= 12_000
        assert {index["weight_map"][name] for name in of_file} == {path.name}
        found |= of_file
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, tensors[name])
    same(load_params(out, model), by_hand(model, tensors))
    # Saved again as one file: nothing of the shards is left to be loaded by mistake.
    save_params(out, model, params)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("dtype", lanes(["bfloat16"], ["float16"]))
def test_saved_in_two_bytes(tiny, tmp_path, dtype):  # noqa: F811
    folder, model, tensors = tiny
    params = load_params(folder, Model(model.config, make_mesh(1, 4, 2)))
    spread = Model(model.config, make_mesh(1, 4, 2))
    save_params(tmp_path / "out", spread, params, eos_ids=(1,), dtype=dtype)
    assert load_config(tmp_path / "out", weight_dtype=dtype).weight_dtype == dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    again = load_params(tmp_path / "out", model)
    rounded = {name: t.astype(jnp.dtype(dtype)) for name, t in tensors.items()}
    same(again, by_hand(model, rounded))
    for bad in (dict(dtype="int8"), dict(shard_bytes=0)):
        with pytest.raises(InputError, match=next(iter(bad))):
            save_params(tmp_path / "bad", spread, params, **bad)


SAVE = """
import sys, jax
from rljax.mesh import make_mesh
from rljax.models.huggingface import load as huggingface
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model
import os, signal
folder, out, name, at = *sys.argv[1:4], int(sys.argv[4])
model = Model(load_config(folder), make_mesh(devices=jax.devices()[:1]))
params = jax.tree.map(lambda x: x + 1, load_params(folder, model))
calls = 0
def dying(function):
    def run(*args, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return run
owner = os if name == "replace" else huggingface
setattr(owner, name, dying(getattr(owner, name)))
save_params(out, model, params, shard_bytes=12_000)
"""


@pytest.mark.parametrize(
    "name, at, old",
    [
        ("replace", 1, True),
        pytest.param("write_bytes", 9, True, marks=pytest.mark.slow),
        pytest.param("replace", 4, False, marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_no_folder_that_looks_whole(tiny, tmp_path, name, at, old):  # noqa: F811
    """Killed while writing, or while giving the files their names; over an old folder, or anew."""
    folder, model, tensors = tiny
    out = write_folder(tmp_path / "out", model, tensors) if old else tmp_path / "out"
    command = [sys.executable, "-c", SAVE, str(folder), str(out), name, str(at)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == -signal.SIGKILL, run.stderr
    if name == "write_bytes":  # the old weights are whole
        same(load_params(out, Model(load_config(out), model.mesh)), by_hand(model, tensors))
    else:
        refused(lambda: load_config(out), "config.json does not exist")
    save_params(out, model, by_hand_placed(model, tensors), eos_ids=(1,))  # clears it up
    assert not list(out.glob(".*")) and len(list(out.glob("*.safetensors"))) == 1
    same(load_params(out, Model(load_config(out), model.mesh)), by_hand(model, tensors))


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["gpt_oss"], [n for n in CONFIGS if n != "gpt_oss"]))
def test_transformers_loads_the_shards(tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = Model(CONFIGS[name], make_mesh(1, 2, expert=4))
    tensors = tensors_of(model)
    save_params(tmp_path, model, by_hand_placed(model, tensors), eos_ids=(1,), shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    got = theirs.state_dict()
    for tensor in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"):
        np.testing.assert_array_equal(got[tensor].numpy(), tensors[tensor])
