"""Safe-RLHF (PPO-Lagrangian, arXiv 2310.12773): the reward of one model under a constraint on the
cost of another, weighed by a multiplier that learns, as in the published script.

GAE with gamma 1 and lambda 0.95, not whitened, of rewards and of costs; clip 0.2, value clip 5; KL
in both (k1, 0.01). The multiplier: threshold 0, from 1 to at most 5, rate 0.1, the mean cost of 128
episodes. configs/offline/reward_model.py and configs/offline/cost_model.py train the two models;
critics may start from them (critic_model, and folder= of the role cost_critic).

rljax train presets/safe_rlhf:tiny
rljax train presets/safe_rlhf --config.model=MODEL_FOLDER \\
    --config.reward.model=REWARD_FOLDER --config.reward.cost_model=COST_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: the script also steps on the loss of demonstrations, with coefficient 16; here it is a
term of the actor's loss, --config.pretraining.data=demonstrations.jsonl
--config.pretraining.coef=16.

Other settings are the published ones; hardware, time and accuracy at full size: not measured.
`:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="safe_rlhf(kl_split=1.0, clip=50.0)", steps=500)
    config.roles = (
        "cost_critic=trained_values(lr=5e-6)",
        "multiplier=lagrange_multiplier(initial=1.0, lr=0.1, threshold=0.0, maximum=5.0, "
        "window=128)",
    )
    config.data.max_prompt_tokens = 256
    config.sampler.max_response_tokens = 256  # 512 in all
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 1
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.advantage = "gae(gamma=1.0, lam=0.95, whiten=False)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.value_loss = "squared_error(clip=5.0)"
    config.algorithm.kl_in_reward, config.algorithm.kl_reward_estimator = 0.01, "k1"
    config.actor_optimizer = OptimizerConfig(
        lr=1e-5, schedule="cosine", warmup_steps=15, weight_decay=0.01
    )
    config.critic_optimizer.lr = 5e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.actor_optimizer.lr = 1e-3  # advantages are not whitened: three times that collapses
        config.roles = ("cost_critic=trained_values(lr=3e-3)", config.roles[1])
        # Unsafe is whatever says more than one letter.
        config.reward.function = (
            "with_cost(reward='exact_match()', cost=\"regex_match(pattern='..')\", scale=2.0, "
            "shift=-1.0)"
        )
    return config
