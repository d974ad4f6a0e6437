"""Quickstart: SFT on a few worked examples, then GRPO, on an embedded task; no download.

python launchers/train.py --config=configs/quickstart.py
"""

from rljax.config import Config


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same experiment cut to a few steps, for tests."""
    config = Config(
        model="decoder(layers=2, embed=96, mlp=288, heads=3, kv_heads=3, head_dim=32, init_std=0.05)",
        dataflow="grpo",
        steps=120,
        samples_every_steps=10,
    )
    config.model_settings.remat = "none"
    config.data.train = "sort_digits(digits=5)"
    config.data.max_prompt_tokens = 8
    config.sampler.max_response_tokens = 7
    config.sft.steps = 60
    config.sft.stop_at_accuracy = 0.2
    config.sft.check_every_steps = 10
    config.sft.sequences_per_step = 64
    config.sft.optimizer.lr = 2e-3
    config.sft.optimizer.warmup_steps = 5
    config.batch.prompts_per_step = 32
    config.batch.samples_per_prompt = 16
    config.batch.sequences_per_optimizer_step = 512
    config.batch.tokens_per_microbatch = 8192
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.actor_optimizer.lr = 5e-4
    config.actor_optimizer.warmup_steps = 5
    config.reward.function = "sequence_match(partial=0.5)"
    config.evaluate.every_steps = 20
    config.checkpoint.every_steps = 20
    if variant == "tiny":
        config.sft.steps = 6
        config.sft.stop_at_accuracy = 0.0
        config.steps = 6
        config.batch.prompts_per_step = 4
        config.batch.samples_per_prompt = 4
        config.batch.sequences_per_optimizer_step = 8
        config.evaluate.prompts = 16
        config.evaluate.every_steps = 2
        config.checkpoint.every_steps = 2
        config.samples_every_steps = 2
    return config
