"""A second batch for the actor, beside its rollouts: a part of rljax.config.schema."""

import dataclasses

from rljax.config.names import Settings


@dataclasses.dataclass
class PretrainingSettings(Settings):
    """Examples whose loss is added to that of the actor, beside its rollouts (PPO-ptx): coef x the
    mean NLL of their target tokens. Of dataflows that take `pretraining`: ppo, safe_rlhf."""

    data: str = ""  # a path or a task, rows as of sft.data (texts, conversations, ...); "" = off
    coef: float = 1.0  # of that loss; that of algorithm.policy_loss counts once
    sequences_per_optimizer_step: int = 64  # examples that every optimizer step of the actor takes
    max_tokens: int = 1024  # of an example; a longer one is cut on the right
