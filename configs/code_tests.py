"""Code judged by unit tests: SFT on demonstrations, then GRPO, in the sandbox; no download.

rljax train code_tests

The task: "+3,*2;4=14>" -> "def f(x):return((x+3)*2)", a Python function of which six calls are
tested. SFT stops when half of the functions are right; GRPO, whose reward is the share of the
tests that pass, does the rest.

Two shared CPU cores at load 8 to 11, 2026-11-25, seed 0: 0.594 [0.508, 0.672] of 128 held-out
functions pass all tests after SFT, 0.875 [0.812, 0.930] after GRPO, greedy; 713 s.
"""

from rljax.config import Config


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same with two steps of each."""
    config = Config(dataflow="grpo", steps=120, samples_every_steps=10)
    config.model = (
        "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"
    )
    config.model_settings.remat = "none"
    config.data.train = "code_tests(steps=2, style='short', worked_examples=4096)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 16, 28
    config.sft.steps, config.sft.sequences_per_step = 300, 64
    config.sft.stop_at_accuracy, config.sft.check_every_steps = 0.5, 10
    config.sft.optimizer.lr, config.sft.optimizer.beta2 = 2e-3, 0.99
    config.sft.optimizer.warmup_steps = 5
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 8
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.actor_optimizer.lr, config.actor_optimizer.beta2 = 5e-4, 0.99
    config.reward.function, config.reward.workers = "code_tests(scale='fraction')", 2
    config.evaluate.reward, config.evaluate.prompts = "code_tests(scale='binary')", 128
    config.checkpoint.every_steps = 0
    if variant == "tiny":
        config.steps, config.sft.steps, config.sft.stop_at_accuracy = 2, 2, 0.0
        config.batch.prompts_per_step, config.batch.sequences_per_optimizer_step = 4, 32
        config.evaluate.prompts = 16
    return config
