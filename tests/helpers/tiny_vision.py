"""A tiny model with images as a Hugging Face folder: random weights, a tokenizer of its own with
the tokens of images, a chat template that writes them."""

import base64
import dataclasses
import io
import json
from pathlib import Path

import jax
import numpy as np
from family_tokenizers import byte_level_bpe, write_folder

from rljax.data.images.patches import ImageProcessing, to_hf_processor
from rljax.mesh import make_mesh
from rljax.models.builtin import vision_decoder
from rljax.models.huggingface import save_params
from rljax.models.model import Model

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
IMAGES = ("image_pad", "video_pad", "vision_start", "vision_end")
SPECIAL = ["<|im_start|>", "<|im_end|>", *(f"<|{name}|>" for name in IMAGES)]
SIZES = dict(
    layers=2,
    embed=32,
    mlp=64,
    heads=2,
    kv_heads=2,
    head_dim=16,
    patch_size=4,
    vision_layers=2,
    vision_embed=32,
    vision_mlp=32,
    vision_heads=2,
    init_std=0.1,
)


def write_vision_folder(
    folder: Path, family: str = "qwen3_vl", *, weights: bool = True, layers: int = SIZES["layers"]
) -> Path:
    """Images of 8 x 8 pixels are one token, and larger ones 16 tokens at most."""
    library = byte_level_bpe(SPECIAL, size=320)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
    write_folder(folder, library, settings)
    ids = [library.token_to_id(token) for token in SPECIAL]
    plain = vision_decoder(library.get_vocab_size(), family=family, **SIZES | {"layers": layers})
    names = ("image_token_id", "video_token_id", "start_token_id", "end_token_id")
    vision = dataclasses.replace(plain.vision, **dict(zip(names, ids[2:], strict=True)))
    model = Model(
        dataclasses.replace(plain, vision=vision), make_mesh(1, 1, 1, devices=jax.devices()[:1])
    )
    if weights:
        params = model.init(jax.random.key(0))
        save_params(folder, model, params, bos_id=None, eos_ids=(ids[1],), pad_id=ids[1])
    processing = ImageProcessing(4, 2, 2, min_pixels=64, max_pixels=1024)
    (folder / "preprocessor_config.json").write_text(json.dumps(to_hf_processor(processing)))
    return folder


def picture(seed: int = 0, height: int = 16, width: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
