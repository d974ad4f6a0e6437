"""PPO for human preferences, as in OpenRLHF's script: scores of a reward model, normalised over
the batch.

GAE with gamma 1, whitened; clip 0.2; KL in the reward (k1, 0.01). Give the reward model's folder,
as --config.reward.model=FOLDER (configs/offline/reward_model.py trains one) and maybe as
--config.critic_model; without one the rule reward stands in.

rljax train presets/ppo_reward_model:tiny
rljax train presets/ppo_reward_model \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="ppo", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024  # 2048 in all
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 1024, 1
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.reward_shaping = ("normalised()",)
    config.algorithm.advantage = "gae(gamma=1.0, lam=0.95, whiten=True)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.value_loss = "squared_error(clip=0.2)"
    config.algorithm.kl_in_reward, config.algorithm.kl_reward_estimator = 0.01, "k1"
    config.actor_optimizer.lr, config.critic_optimizer.lr = 5e-7, 9e-6
    config.reward.function = "exact_match()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
