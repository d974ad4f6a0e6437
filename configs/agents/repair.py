"""Repair: a broken line of Python and a test that it fails; a try that fails reads the next one.

rljax train agents/repair

The task: "x+3 2:6>" -> "x*3": the line should return 6 for x = 2. Several lines do; which one is
meant the other tests say, so that the second try has something to learn from the first. The tests
run in the sandbox. SFT teaches the form of a line, not which one is right.

Hardware: 2 CPU cores, shared with other work. Measured 2026-11-23, seed 0: sampled 0.27 in the
first steps and 0.38 in the last, greedy 0.18 after; 105 CPU seconds. It learns too little so far.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=150))
    around = "def f(x):\n    return $line"
    config.data.train = "broken_lines()"
    config.data.max_prompt_tokens = 12
    config.sampler.max_response_tokens = 3
    config.environment.function = f"repair(tries=3, style='short', around={around!r})"
    config.environment.max_tokens = 32
    config.sft.steps = 60
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.algorithm.entropy_coef = 0.005
    config.actor_optimizer.lr = 2e-3
    config.evaluate.prompts = 128
    return config
