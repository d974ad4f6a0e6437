"""GRPO on Llama-3-70B on a TPU pod, GSM8K's rule reward, KL in the loss.

rljax plan grpo_llama3_70b --topology=v5p:8x8x8
rljax train grpo_llama3_70b --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

As it stands `model` names the published sizes alone (configs/models/): enough to plan, not to
train. mesh.fsdp takes what the tensor axis leaves of the chips: 64 of v5p:8x8x8.

Batch: 128 prompts x 8 samples of 1024 + 3072 tokens per step, two optimizer steps of 512 sequences.
Hardware: docs/guides/memory.md: compiled ahead of time, never run. Time and accuracy: not measured.
"""

from pathlib import Path

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="grpo", steps=200)
    config.model = str(Path(__file__).parent / "models" / "llama3_70b")
    config.model_settings.dtype = config.model_settings.head_dtype = "bfloat16"
    config.mesh.tensor = 8
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 3072
    config.sampler.layout, config.sampler.weight_dtype = "auto", "bfloat16"
    config.batch.prompts_per_step = 128
    config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step = 512
    config.batch.tokens_per_microbatch = 0  # as many as fit, by the plan
    config.algorithm.kl_in_loss = 0.001
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    return config
