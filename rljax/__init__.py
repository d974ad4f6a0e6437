"""rljax: RL post-training of language models in JAX."""
