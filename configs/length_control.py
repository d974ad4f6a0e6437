"""Responses of a requested length (L1-Exact, arXiv 2503.04697): SFT, then GRPO; no download.

rljax train length_control

The task: "dabca>6" -> ">>>2>", how often "a" occurs, at any place of a response of as many tokens
as the last digit says, 2 to 8, end token included. SFT knows of no length: it answers "2". GRPO is
rewarded for a right number and pays a fifth for each token of error. Held-out prompts are right
where number and length are.

Two shared CPU cores at load 8 to 10, 2026-11-25, seed 0: 0.000 of 128 held-out prompts before GRPO,
0.750 [0.672, 0.820] after it, greedy; 815 s.
"""

from rljax.config import Config


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same with two steps of each."""
    config = Config(dataflow="grpo", steps=200, samples_every_steps=10)
    config.model = (
        "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"
    )
    config.model_settings.remat = "none"
    config.data.train = "letter_count(letters=5, kinds=4, test=128)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 8, 10
    config.data.target_tokens, config.data.target_instruction = (2, 8), "{target_tokens}"
    config.sft.steps, config.sft.sequences_per_step, config.sft.optimizer.lr = 15, 64, 2e-3
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 8
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.algorithm.entropy_coef = 0.02
    config.actor_optimizer.lr, config.actor_optimizer.beta2 = 1e-3, 0.99
    config.reward.function = "l1_exact(alpha=0.2, correct='contains()')"
    config.reward.workers = 1
    config.evaluate.prompts = 128  # right, and of exactly the length that was asked for
    config.checkpoint.every_steps = 0
    if variant == "tiny":
        config.steps, config.sft.steps = 2, 2
        config.batch.prompts_per_step, config.batch.sequences_per_optimizer_step = 4, 32
    return config
