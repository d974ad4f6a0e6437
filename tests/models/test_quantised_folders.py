"""FP8 and MXFP4 checkpoints: decoded exactly, on any mesh, as transformers decodes them; and what
cannot be decoded is refused by name."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import golden, lanes
from safetensors.numpy import load_file, save_file
from test_loading import MESHES, small_blocks  # noqa: F401  a fixture
from tiny_folders import CONFIGS, by_hand, one_device, same, tensors_of, write_folder
from tiny_refusal import refused

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config
from rljax.models.huggingface import load_config, load_params, load_with_report
from rljax.models.huggingface.quantised import E2M1
from rljax.models.model import Model

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def told(folder, **settings):
    """Writes quantization_config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


def fp8(tensors: dict, block, dtype) -> tuple[dict, dict]:
    """(the file's tensors, what they mean): linear maps as codes and scales, by the definition, one
    number after the other."""
    on_disk, meant, rng = {}, {}, np.random.default_rng(1)
    for name, x in tensors.items():
        on_disk[name] = meant[name] = x
        if not name.endswith("_proj.weight"):
            continue
        codes = x.astype(E4M3)
        tall, wide = block or x.shape
        shape = (-(-x.shape[0] // tall), -(-x.shape[1] // wide)) if block else ()
        scales = (2.0 ** rng.integers(-3, 3, shape) * rng.uniform(1, 2, shape)).astype(dtype)
        on_disk |= {name: codes, f"{name}_scale_inv": np.asarray(scales)}
        meant[name] = np.empty(x.shape, np.float32)
        for i, j in itertools.product(*map(range, x.shape)):
            scale = scales[i // tall, j // wide] if block else scales
            meant[name][i, j] = np.float32(codes[i, j]) * np.float32(scale)
    return on_disk, meant


BLOCKS = [(24, 12), (16, 16), None]


@pytest.mark.parametrize(
    "dtype", lanes([np.float32, E8M0], [ml_dtypes.bfloat16]), ids=lambda d: d.__name__
)
@pytest.mark.parametrize("name", lanes(["qwen3_moe"], ["qwen3"]))
@pytest.mark.parametrize("meshes", lanes([MESHES[1:2]], [MESHES[::2]]), ids=str)
def test_fp8_is_code_times_scale_on_any_mesh(
    tmp_path,
    small_blocks,  # noqa: F811
    name,
    dtype,
    meshes,
):
    """Blocks of 24 x 12 divide no weight: the last row and column of blocks are cut."""
    for mesh, block in itertools.product(meshes, BLOCKS):
        model = Model(CONFIGS[name], make_mesh(**mesh))
        on_disk, meant = fp8(tensors_of(model), block, dtype)
        folder = write_folder(tmp_path / str(block), model, on_disk, files=3)
        told(folder, quant_method="fp8", weight_block_size=block and list(block))
        assert load_config(folder).layers == model.config.layers
        params, report = load_with_report(folder, model)
        same(params, by_hand(model, meant))
        assert len(report.files) == 3 and report.unexpected == report.ignored == ()


def mxfp4(tensors: dict) -> tuple[dict, dict]:
    """The same for experts: groups of 32 inputs, the lower half of a byte first."""
    on_disk, meant, rng = {}, {}, np.random.default_rng(2)
    for name, x in tensors.items():
        on_disk[name] = meant[name] = x
        if not name.endswith(("gate_up_proj", "down_proj")) or x.ndim != 3:
            continue
        experts, ins, outs = x.shape
        codes = rng.integers(0, 16, (experts, outs, ins))
        exponents = rng.integers(120, 130, (experts, outs, ins // 32))
        halves = codes.reshape(experts, outs, ins // 32, 16, 2)
        del on_disk[name]
        on_disk[f"{name}_blocks"] = (halves[..., 0] | halves[..., 1] << 4).astype(np.uint8)
        on_disk[f"{name}_scales"] = exponents.astype(np.uint8)
        scale = np.repeat(2.0 ** (exponents - 127), 32, axis=-1)
        meant[name] = np.swapaxes(E2M1[codes] * scale, 1, 2).astype(np.float32)
    return on_disk, meant


def gpt_oss(mesh) -> Model:
    config = CONFIGS["gpt_oss"]
    experts = dataclasses.replace(config.experts, mlp=64)  # groups of 32 have to divide
    return Model(dataclasses.replace(config, experts=experts), mesh)


@pytest.mark.parametrize("mesh", lanes([MESHES[2]], MESHES[:2]), ids=str)
def test_mxfp4_is_code_times_power_of_two_on_any_mesh(tmp_path, small_blocks, mesh):  # noqa: F811
    # The eight E2M1 magnitudes of the specification, and their negatives.
    np.testing.assert_array_equal(E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(E2M1[8:], -E2M1[:8])
    model = gpt_oss(make_mesh(**mesh))
    on_disk, meant = mxfp4(tensors_of(model))
    assert sum(name.endswith("_blocks") for name in on_disk) == 2 * model.config.layers
    folder = write_folder(tmp_path, model, on_disk, files=2)
    told(folder, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    same(load_params(folder, model), by_hand(model, meant))


# -- transformers --


def of_transformers(folder, **options):
    """Its logits for one row."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        return model(ids).logits[0].float().numpy()


def ours(folder):
    from rljax.batch import batch_from_rows

    model = Model(load_config(folder, weight_dtype="float32"), one_device())
    params = load_params(folder, model)
    ids = np.arange(5, 15)[None].astype(np.int32)
    batch = batch_from_rows(ids, np.array([10], np.int32), np.ones((1, 10), np.float32))
    return np.asarray(model.logits(params, batch))[0]


@pytest.mark.slow
def test_transformers_decodes_fp8_alike(tmp_path):
    """Codes and scales that transformers itself makes of a golden model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    source = golden("hf", "qwen3")
    settings = dict(weight_block_size=(8, 8))
    config = transformers.FineGrainedFP8Config(**settings)
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors = {}
    for name, x in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made = quantise._quantize_one(name, torch.tensor(np.asarray(x, np.float32)))
            assert len(made) == 2, name
            x = made[name].view(torch.uint8).numpy().view(E4M3)
            tensors[f"{name}_scale_inv"] = made[f"{name}_scale_inv"].numpy()
        tensors[name] = x
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    told(tmp_path, quant_method="fp8", weight_block_size=[8, 8], activation_scheme="dynamic")
    plain = transformers.FineGrainedFP8Config(**settings, dequantize=True)
    logits = of_transformers(tmp_path, quantization_config=plain)
    np.testing.assert_allclose(ours(tmp_path), logits, atol=2e-5)


def test_transformers_decodes_mxfp4_alike(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = gpt_oss(one_device())
    on_disk, meant = mxfp4(tensors_of(model))
    for name in (n.removesuffix("_blocks") for n in on_disk if n.endswith("_blocks")):
        pair = (torch.tensor(on_disk[f"{name}_{part}"]) for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(*pair).float().numpy()
        np.testing.assert_array_equal(meant[name], theirs)


# -- what is refused --


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ("quant_method", "gptq", "bfloat16")),
        ({"quant_method": "awq"}, ("awq",)),
        ({"quant_method": "compressed-tensors"}, ("compressed-tensors",)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes",)),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ("e5m2",)),
        ({"bits": 4}, ("quant_method",)),
    ],
)
def test_other_codes_are_refused_by_name(settings, words):
    config = json.loads((golden("hf", "qwen3") / "config.json").read_text())
    with pytest.raises(InputError) as error:
        from_hf_config({**config, "quantization_config": settings})
    assert all(word in str(error.value) for word in words)


def test_scales_that_do_not_fit_are_refused_by_name(tmp_path):
    model, name = Model(CONFIGS["qwen3"], one_device()), "model.layers.0.mlp.up_proj.weight"
    on_disk, _ = fp8(tensors_of(model), (16, 16), np.float32)
    scales = on_disk[f"{name}_scale_inv"]

    def folder(block, **changes):
        made = {k: v for k, v in {**on_disk, **changes}.items() if v is not None}
        path = write_folder(tmp_path, model, made)
        told(path, quant_method="fp8", weight_block_size=block)
        return path

    def load(*a, **k):
        return load_params(folder(*a, **k), model)

    refused(lambda: load([16, 16], **{f"{name}_scale_inv": None}), name, "scale")
    refused(lambda: load([16, 16], **{f"{name}_scale_inv": scales[:1]}), name, "(16, 16)")
    whole = scales.astype(np.int32)
    refused(lambda: load([16, 16], **{f"{name}_scale_inv": whole}), name, "I32")
    for block in ([16], [0, 16], "16", [16, True]):
        refused(lambda block=block: load(block), "config.json", "weight_block_size")
    refused(lambda: load([8, 8]), "(8, 8)")
    jax.block_until_ready(load([16, 16]))


def test_mxfp4_codes_that_do_not_fit_are_refused_by_name(tmp_path):
    model, stem = gpt_oss(one_device()), "model.layers.0.mlp.experts.down_proj"
    on_disk, _ = mxfp4(tensors_of(model))

    def load(**changes):
        made = {k: v for k, v in {**on_disk, **changes}.items() if v is not None}
        return load_params(write_folder(tmp_path, model, made), model)

    codes, scales = on_disk[f"{stem}_blocks"], on_disk[f"{stem}_scales"]
    refused(lambda: load(**{f"{stem}_scales": None}), stem, "scales")
    refused(lambda: load(**{f"{stem}_scales": scales[..., :1]}), stem)
    refused(lambda: load(**{f"{stem}_blocks": codes[..., :8].copy()}), stem)
    fewer = {f"{stem}_blocks": codes[:4].copy(), f"{stem}_scales": scales[:4].copy()}
    refused(lambda: load(**fewer), stem, "shape")
