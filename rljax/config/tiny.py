"""The `:tiny` variant of a config: the same algorithm on an embedded task, in seconds on two cores.

The variant changes the model, the data, sizes and learning rates. The algorithm stays as the config
says, and so do limits in tokens (TOKENS is the longest response).
"""

from rljax.config import Config

_SCORES = ("reward_model", "cost_model", "process_reward_model")  # dataflows without a policy
_WITH_CRITIC = ("ppo", "pf_ppo", "vapo", "safe_rlhf", "expert_iteration", "dqo", "dro", *_SCORES)
TOKENS = 3  # an answer is one letter and the end token: there is room to be too long


def tiny(config: Config) -> Config:
    """Sets model, data, batch, lengths and optimizers; changes nothing of `config.algorithm`."""
    single = config.batch.samples_per_prompt == 1
    _tiny_model(config)
    config.data.train, config.data.test = "first_letter(letters=3, kinds=4)", ""
    config.data.max_prompt_tokens = 4
    config.sampler.max_response_tokens = TOKENS
    config.reward.function, config.reward.workers = "exact_match()", 1
    config.evaluate.reward, config.evaluate.correct_at = "", 1.0
    config.evaluate.every_steps, config.evaluate.prompts = 0, 16
    # Supervised steps teach the form of an answer, not which letter is right.
    config.sft.steps, config.sft.sequences_per_step = 5, 48
    config.sft.optimizer.lr = 5e-3
    config.batch.prompts_per_step = 128 if single else 16
    config.batch.samples_per_prompt = 1 if single else 8
    config.batch.sequences_per_optimizer_step = 128
    config.batch.epochs = 1
    config.samples_every_steps = 20
    return config


def tiny_offline(config: Config) -> Config:
    """Does the same for a dataflow that learns from a file: embedded rows of its kind, 60 steps."""
    _tiny_model(config)
    config.data.train = config.data.test = "letter_feedback(letters=3, kinds=4)"
    config.offline.examples_per_step, config.offline.max_tokens = 16, 8
    config.evaluate.every_steps, config.evaluate.prompts = 20, 16
    return config


def tiny_agent(config: Config) -> Config:
    """Sets the model, the optimizers and the batch of configs/agents: seconds a step on two cores.
    A short supervised phase teaches how calls and moves are written."""
    config.model = (
        "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"
    )
    config.model_settings.remat = "none"
    config.sft.sequences_per_step = 64
    config.sft.optimizer.lr, config.sft.optimizer.beta2 = 2e-3, 0.99
    config.sft.optimizer.warmup_steps = 5
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 8
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.advantage = "group_relative(std='sample')"
    config.actor_optimizer.lr, config.actor_optimizer.beta2 = 5e-4, 0.99
    config.actor_optimizer.warmup_steps = 3
    config.environment.max_turns, config.environment.max_reply_tokens = 3, 16
    config.checkpoint.every_steps = 0
    config.samples_every_steps = 10
    return config


def _tiny_model(config: Config) -> None:
    """Sets the model and the optimizers that the dataflow of the config reads, for 60 steps."""
    config.model = (
        "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
    )
    config.model_settings.dtype = "float32"
    config.model_settings.remat = "none"
    config.batch.tokens_per_microbatch = 1024
    name = config.dataflow.partition("(")[0]
    actor = [config.actor_optimizer] * (name not in _SCORES)
    for optimizer in actor + [config.critic_optimizer] * (name in _WITH_CRITIC):
        optimizer.lr, optimizer.schedule, optimizer.warmup_steps = 3e-3, "constant", 0
        optimizer.weight_decay = 0.0
    config.steps = 60
    config.checkpoint.every_steps = 20
