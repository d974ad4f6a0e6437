"""PPO on GSM8K: actor, critic and reference; GAE; rule reward minus KL to the starting policy.

rljax train ppo_gsm8k --config.model=MODEL_FOLDER \
    --config.data.train=train.parquet --config.data.test=test.parquet

MODEL_FOLDER and the files: as in configs/grpo_gsm8k.py. The critic starts from the policy's weights
with a head of zeros.

Batch: 256 prompts x 1 sample = 256 sequences per step, 4 optimizer steps of 64 sequences for actor
and critic each, in microbatches of at most 16384 padded tokens. 435 steps are 15 passes over the
7473 questions. The numbers: gamma = lambda = 1, clip
0.2, KL 0.001 in the reward, 512 + 256 tokens, lr 1e-6 (actor) and 1e-5 (critic).

Hardware: sized for one accelerator of 80 GB and a model of up to 0.6B parameters: not measured.
Time and accuracy: not measured. The test suite runs this file with a model of 0.1M parameters.
"""

from rljax.config import Config


def get_config() -> Config:
    config = Config(dataflow="ppo", steps=435)
    config.model_settings.dtype = "bfloat16"
    config.data.max_prompt_tokens = 512
    config.sampler.max_response_tokens = 256
    config.batch.prompts_per_step = 256
    config.batch.samples_per_prompt = 1
    config.batch.sequences_per_optimizer_step = 64
    config.batch.tokens_per_microbatch = 16384
    config.algorithm.advantage = "gae(gamma=1.0, lam=1.0)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"
    config.algorithm.value_loss = "squared_error(clip=0.5)"
    config.algorithm.reduction = "token_mean"
    config.algorithm.kl_in_reward = 0.001
    config.actor_optimizer.lr = 1e-6
    config.critic_optimizer.lr = 1e-5
    config.reward.function = "gsm8k()"
    config.evaluate.every_steps = 25
    config.evaluate.prompts = 1319  # all of the published test split
    return config
