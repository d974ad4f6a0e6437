"""Python as a tool: one expression, run in the sandbox, then its value as the answer.

rljax train agents/python

The task: "12+34*56=" -> a fenced block of Python with the expression, the sandbox says "1916", then
"1916". SFT teaches how a block is written and copied; a fifth of its examples write one.

Hardware: 2 CPU cores, shared with other work (load 7 to 15). Measured 2026-11-23, seed 0:
greedy accuracy 0.016 before GRPO, 1.000 after it (n=64), 138 CPU seconds.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=50))
    config.data.train = "expressions(call_share=0.2)"
    config.data.max_prompt_tokens = 48
    config.sampler.max_response_tokens = 28
    config.environment.function = "tools(functions=('python()',))"
    config.environment.calls = "python"
    config.environment.max_tokens = 72
    config.sft.steps = 600
    config.evaluate.prompts = 128
    return config
