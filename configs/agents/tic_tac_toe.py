"""Tic-tac-toe against oneself: both seats are the policy.

rljax train agents/tic_tac_toe
rljax evaluate RUN_DIR

The task: "....x....o" -> "1", the board and the mark of who moves. SFT teaches moves that are
legal; a fifth of its examples complete or block a line. The advantage compares returns from the
same board (gigpo). `:random` is the same game against a random player, for evaluation.

Time and strength after training: not measured.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=40))
    config.data.train = "tic_tac_toe(games=256)"
    config.data.max_prompt_tokens = 56
    config.sampler.max_response_tokens = 1
    opponent = variant or "self"
    config.environment.function = f"tic_tac_toe(style='short', opponent={opponent!r})"
    config.environment.max_turns = 9
    config.environment.max_tokens = 64
    config.sft.steps = 600
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 64
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "gigpo(gamma=1.0, omega=3.0, std='none')"
    config.algorithm.entropy_coef = 0.02
    config.actor_optimizer.lr = 5e-4
    config.evaluate.prompts, config.evaluate.correct_at = 256, 0.0
    return config
