"""A sweep: how old tokens may be, with and without a weight for it; three seeds.

rljax sweep sweep_staleness

The task: "bcaf>" -> "b". A step takes four optimizer steps, so that tokens which are 4 steps old
were drawn 16 updates ago. There are slots for all that is in flight, which is decoded when the
queue is empty: a token is 0 to max_staleness steps old when it is learned from.

Hardware: 2 CPU cores, shared with other work. Results: docs/guides/asynchronous.md, "Measured".
"""

from rljax.config import Config
from rljax.config.tiny import tiny

WEIGHT = "rollout_correction(level='token', upper=2.0)"


def get_config() -> Config:
    config = tiny(Config(dataflow="grpo"))
    config.steps = 120
    config.data.train, config.data.max_prompt_tokens = (
        "first_letter(letters=4, kinds=6, test=128)",
        5,
    )
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.batch.sequences_per_optimizer_step = 32
    config.actor_optimizer.lr, config.actor_optimizer.schedule = 2e-3, "linear"
    config.sampler.loop, config.sampler.slots = "host", 9 * 128
    config.evaluate.prompts = 128
    config.checkpoint.every_steps, config.export = 0, False
    return config


def sweep():
    for seed in (0, 1, 2):
        for eta in (0, 1, 2, 4, 8):
            for weight in ("", WEIGHT):
                yield {
                    "rollouts.max_staleness": eta,
                    "rollouts.ahead": eta,
                    "algorithm.correction": weight,
                    "seed": seed,
                }
