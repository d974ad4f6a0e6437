"""Answers as JSON: SFT on demonstrations, then GRPO; no download.

rljax train json_output

The task: "c=41;a=7>" -> '{"a":7,"c":41}', the facts of a text as one JSON object with sorted keys.
SFT stops when a fifth of the objects are right; GRPO, which is paid for all values or nothing, does
the rest. (With a share for one right value it learns to write that one twice.)

Two shared CPU cores at load 5 to 11, 2026-11-25, greedy accuracy on 128 held-out prompts after SFT
and after GRPO: 0.305, 0.969; 0.305, 0.820; 0.414, 0.922 (seeds 0 to 2; 242, 387 and 536 s).
"""

from rljax.config import Config


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same with two steps of each."""
    config = Config(dataflow="grpo", steps=200, samples_every_steps=10)
    config.model = (
        "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"
    )
    config.model_settings.remat = "none"
    config.data.train = "json_extraction(fields=2, style='short', worked_examples=4096)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 12, 18
    config.sft.steps, config.sft.sequences_per_step = 300, 64
    config.sft.stop_at_accuracy, config.sft.check_every_steps = 0.2, 10
    config.sft.optimizer.lr, config.sft.optimizer.beta2 = 2e-3, 0.99
    config.sft.optimizer.warmup_steps = 5
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 8
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.actor_optimizer.lr, config.actor_optimizer.beta2 = 1e-3, 0.99
    config.reward.function, config.reward.workers = "json_match(partial=False)", 1
    config.evaluate.prompts = 128
    config.checkpoint.every_steps = 0
    if variant == "tiny":
        config.steps, config.sft.steps, config.sft.stop_at_accuracy = 2, 2, 0.0
        config.batch.prompts_per_step, config.batch.sequences_per_optimizer_step = 4, 32
        config.evaluate.prompts = 16
    return config
