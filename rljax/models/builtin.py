"""Models that need no download: `model="decoder(layers=2, embed=128, ...)"`, random weights."""

from rljax.models.config import ModelConfig, Rope
from rljax.models.experts import ExpertsConfig


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
) -> ModelConfig:
    """A Qwen3-shaped decoder of any size; the vocabulary is the tokenizer's. With `experts` every
    layer is a mixture of so many of hidden size `mlp`, as in Qwen3-MoE."""
    return ModelConfig(
        family="qwen3_moe" if experts else "qwen3",
        experts=ExpertsConfig(experts, experts_per_token, mlp) if experts else None,
        vocab_size=vocab_size,
        embed=embed,
        mlp=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_tokens=max_tokens,
        ropes=(Rope(rope_theta),),
        init_std=init_std,
        qk_norm=True,
        tie_embeddings=tie_embeddings,
    )
