"""GRPO on GSM8K: your model, your data, rule reward, KL to the starting policy in the loss.

rljax train grpo_gsm8k --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

MODEL_FOLDER: a Hugging Face folder (config.json, *.safetensors, tokenizer.json) of a Llama, Qwen2
or Qwen3 chat model, or its name on the hub; the files may be hf://datasets/openai/gsm8k
(docs/guides/hub.md). The files: columns prompt (chat messages), reward_model.ground_truth,
data_source, extra_info, as verl's GSM8K script writes them; or .jsonl with question and answer.

Batch: 128 prompts x 8 samples = 1024 sequences per step, 4 optimizer steps of 256 sequences, in
microbatches of at most 16384 padded tokens. 500 steps are 8.6 passes over the 7473 questions.

Hardware: sized for one accelerator of 80 GB and a model of up to 1.5B parameters: not measured.
Time and accuracy: not measured. The test suite runs this file with a model of 0.1M parameters.
"""

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="grpo", steps=500)
    config.model_settings.dtype = "bfloat16"
    config.data.max_prompt_tokens = 512
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step = 128
    config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step = 256
    config.batch.tokens_per_microbatch = 16384
    config.algorithm.advantage = "group_relative(std='sample')"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"
    config.algorithm.reduction = "token_mean"
    config.algorithm.kl_in_loss = 0.001
    config.algorithm.kl_estimator = "k3"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    config.evaluate.prompts = 1319  # all of the published test split
    return config
