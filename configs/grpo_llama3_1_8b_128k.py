"""GRPO on Llama-3.1-8B with rows of 131,072 tokens on a TPU pod, GSM8K's rule reward.

rljax plan grpo_llama3_1_8b_128k --topology=v5p:4x4x4
rljax train grpo_llama3_1_8b_128k --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

As it stands `model` names the published sizes alone (configs/models/): enough to plan, not to
train. Eight chips share the tokens of a row, in a ring; mesh.fsdp takes the other chips: 8 of
v5p:4x4x4.

Batch: 8 prompts x 8 samples of 2,048 + 129,024 tokens per step, two optimizer steps of 32
sequences.
Hardware: docs/guides/meshes.md, "Rows of 131,072 tokens": compiled ahead of time, never run. Time
and accuracy: not measured.
"""

from pathlib import Path

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="grpo", steps=200)
    config.model = str(Path(__file__).parent / "models" / "llama3_1_8b")
    config.model_settings.dtype = config.model_settings.head_dtype = "bfloat16"
    config.model_settings.context_attention = "ring"
    config.mesh.context = 8
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = 129_024
    config.sampler.layout, config.sampler.weight_dtype = "auto", "bfloat16"
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step = 32
    config.batch.tokens_per_microbatch = 0  # as many as fit, by the plan
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    return config
