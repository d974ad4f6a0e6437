"""Quickstart: SFT on 256 worked examples, then GRPO, on an embedded task; no download.

python launchers/train.py --config=configs/quickstart.py

The task: "dabcab>" -> "22", how often "a" and "b" occur. SFT stops once it knows the format and is
right a third of the time; GRPO with a rule reward does the rest.

Hardware: 2 CPU cores. Measured 2026-11-21 on a machine that other work shared (load 4 to 12):
six seeds (0 to 5), accuracy before 0.30 to 0.42; after, 1.00 on seeds 0, 1, 2 and 3, but 0.60 on
seed 4, and 1.00 at step 100 of 120 of seed 5, which was not run to its end.
118 to 177 s with a warm compilation cache; not measured on an idle machine, nor with a cold cache.
"""

from rljax.config import Config


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same experiment cut to a few steps, for tests."""
    config = Config(
        model="decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, "
        "init_std=0.05)",
        dataflow="grpo",
        steps=120,
        samples_every_steps=10,
    )
    config.model_settings.remat = "none"
    config.data.train = "letter_counts(letters=6)"
    config.data.max_prompt_tokens = 10
    config.sampler.max_response_tokens = 3
    config.sft.steps = 60
    config.sft.stop_at_accuracy = 0.3
    config.sft.check_every_steps = 2
    config.sft.sequences_per_step = 64
    config.sft.optimizer.lr = 1e-3
    config.sft.optimizer.warmup_steps = 5
    config.sft.optimizer.beta2 = 0.99
    config.batch.prompts_per_step = 96
    config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step = 768
    config.batch.tokens_per_microbatch = 16384
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.algorithm.kl_in_loss = 0.001
    config.actor_optimizer.lr = 1e-3
    config.actor_optimizer.schedule = "linear"
    config.actor_optimizer.warmup_steps = 5
    config.actor_optimizer.beta2 = 0.99
    config.reward.function = "sequence_match(partial=0.3)"
    config.evaluate.prompts = 512
    config.evaluate.every_steps = 20
    config.checkpoint.every_steps = 25
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
