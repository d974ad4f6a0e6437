"""Models that need no download: `model="decoder(layers=2, embed=128, ...)"`, random weights."""

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.models.config import DeltaConfig, LayerKind, ModelConfig, Rope
from rljax.models.experts import ExpertsConfig
from rljax.models.families import from_hf_config


@contract(safe=True)
def decoder(
    vocab_size: int,
    *,
    layers: int = 2,
    embed: int = 128,
    mlp: int = 384,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 32,
    max_tokens: int = 2048,
    rope_theta: float = 10_000.0,
    init_std: float = 0.02,
    tie_embeddings: bool = False,
    experts: int = 0,
    experts_per_token: int = 2,
    full_attention_interval: int = 0,
) -> ModelConfig:
    """Returns a Qwen3-shaped decoder of any size; the vocabulary is the tokenizer's. With `experts`
    every layer is a mixture of so many of hidden size `mlp`, as in Qwen3-MoE. With
    `full_attention_interval` only every such layer has attention, and the others are gated delta
    nets, as in Qwen3.5, where it is 4; 0 = all have attention. Raises InputError for an interval
    below 0 or above `layers`, in which no layer would have attention."""
    if not 0 <= full_attention_interval <= layers:
        raise InputError(
            "full_attention_interval of decoder()",
            value=full_attention_interval,
            rule=f"0 (off), or 1 to layers={layers}: one layer or more has attention",
            fix=f"layers={max(full_attention_interval, 1)}, or full_attention_interval={layers}",
        )
    sizes = dict(vocab_size=vocab_size, embed=embed, mlp=mlp, layers=layers, heads=heads)
    sizes |= dict(kv_heads=kv_heads, head_dim=head_dim, max_tokens=max_tokens)
    sizes |= dict(init_std=init_std, tie_embeddings=tie_embeddings)
    if experts:
        sizes["experts"] = ExpertsConfig(experts, experts_per_token, mlp)
    if full_attention_interval:
        kinds = [
            LayerKind(experts=experts > 0)
            if (layer + 1) % full_attention_interval == 0
            else LayerKind(rope=None, experts=experts > 0, recurrent=True)
            for layer in range(layers)
        ]
        sizes |= dict(kinds=tuple(kinds), delta=DeltaConfig(heads, heads, head_dim, head_dim))
        sizes |= dict(norm_offset=1.0, attention_gate=True)
        family = "qwen3_5_moe_text" if experts else "qwen3_5_text"
    else:
        family = "qwen3_moe" if experts else "qwen3"
    return ModelConfig(family=family, ropes=(Rope(rope_theta),), qk_norm=True, **sizes)


@contract(safe=True)
def vision_decoder(
    vocab_size: int,
    *,
    family: PlainText = "qwen3_vl",
    layers: int = 2,
    embed: int = 128,
    mlp: int = 384,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 32,
    max_tokens: int = 2048,
    rope_theta: float = 10_000.0,
    init_std: float = 0.02,
    patch_size: int = 8,
    vision_layers: int = 2,
    vision_embed: int = 64,
    vision_mlp: int = 128,
    vision_heads: int = 4,
) -> ModelConfig:
    """Returns a model with images of any size, qwen3_vl or qwen2_5_vl, for a task whose alphabet
    begins with IMAGE_CHARACTERS of rljax.tasks.pictures; sizes of patches are in pixels, 2 x 2
    patches are a token."""
    third = head_dim // 8  # rotary pairs that rotate with rows, and as many with columns
    text = {
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_tokens,
        "rope_theta": rope_theta,
        "initializer_range": init_std,
        "head_dim": head_dim,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [head_dim // 2 - 2 * third, third, third],
        },
    }
    vision = {
        "depth": vision_layers,
        "hidden_size": vision_embed,
        "intermediate_size": vision_mlp,
        "num_heads": vision_heads,
        "out_hidden_size": embed,
        "patch_size": patch_size,
        "initializer_range": init_std,
    }
    if family == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"fullatt_block_indexes": [vision_layers - 1], "window_size": 8 * patch_size}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: 2 + number for number, name in enumerate(names)}
    return from_hf_config(
        {"model_type": family, "text_config": text, "vision_config": vision, **tokens}
    )
