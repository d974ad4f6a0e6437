"""Models that need no download: `model="decoder(layers=2, embed=128, ...)"`, random weights."""

from rljax.models.config import ModelConfig, Rope


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
) -> ModelConfig:
    """A Qwen3-shaped decoder of any size; the vocabulary is the tokenizer's."""
    return ModelConfig(
        family="qwen3",
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
