"""Python as a tool: one expression, run in the sandbox, then its value as the answer.

python launchers/train.py --config=configs/agents/python.py

The task: "12+34*56=" -> a fenced block of Python with the expression, the sandbox says "1916", then
"1916". SFT teaches how a block is written and copied; a fifth of its examples write one.

Not measured yet.
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
