"""PPO on Llama-3-8B (actor, critic, reference) on a TPU pod, GSM8K's rule reward.

rljax plan ppo_llama3_8b --topology=v5p:4x4x4
rljax train ppo_llama3_8b --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

As it stands `model` names the published sizes alone (configs/models/): enough to plan, not to
train. mesh.fsdp takes what the tensor axis leaves of the chips: 16 of v5p:4x4x4, 32 of v5e:8x16.

Batch: 512 prompts x 1 sample of 1024 + 1024 tokens per step, two optimizer steps of 256 sequences.
Hardware: docs/guides/memory.md: compiled ahead of time, never run. Time and accuracy: not measured.
"""

from pathlib import Path

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="ppo", steps=435)
    config.model = str(Path(__file__).parent / "models" / "llama3_8b")
    config.model_settings.dtype = config.model_settings.head_dtype = "bfloat16"
    config.mesh.tensor = 4
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.sampler.layout, config.sampler.weight_dtype = "auto", "bfloat16"
    config.batch.prompts_per_step = 512
    config.batch.samples_per_prompt = 1
    config.batch.sequences_per_optimizer_step = 256
    config.batch.tokens_per_microbatch = 0  # as many as fit, by the plan
    config.algorithm.advantage = "gae(gamma=1.0, lam=1.0)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"
    config.algorithm.value_loss = "squared_error(clip=0.5)"
    config.algorithm.kl_in_reward = 0.001
    config.actor_optimizer.lr = 1e-6
    config.critic_optimizer.lr = 1e-5
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    return config
