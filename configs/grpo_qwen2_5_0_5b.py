"""GRPO on Qwen2.5-0.5B on one TPU chip or a few, GSM8K's rule reward, KL in the loss.

rljax plan grpo_qwen2_5_0_5b --topology=v5e:2x4
rljax train grpo_qwen2_5_0_5b --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

As it stands `model` names the published sizes alone (configs/models/): enough to plan, not to
train. Its two kv heads leave nothing for a tensor axis to split: all chips are mesh.fsdp.

Batch: 32 prompts x 8 samples of 512 + 1024 tokens per step, two optimizer steps of 128 sequences;
256 rows are decoded at a time. Hardware: docs/guides/memory.md: compiled ahead of time, never run.
Time and accuracy: not measured.
"""

from pathlib import Path

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="grpo", steps=500)
    config.model = str(Path(__file__).parent / "models" / "qwen2_5_0_5b")
    config.model_settings.dtype = config.model_settings.head_dtype = "bfloat16"
    config.data.max_prompt_tokens = 512
    config.sampler.max_response_tokens = 1024
    config.sampler.slots = 256
    config.sampler.layout, config.sampler.weight_dtype = "auto", "bfloat16"
    config.batch.prompts_per_step = 32
    config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step = 128
    config.batch.tokens_per_microbatch = 0  # as many as fit, by the plan
    config.algorithm.kl_in_loss = 0.001
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    return config
