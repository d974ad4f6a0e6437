"""A calculator as a tool: products of two numbers of two digits, which the model cannot compute.

rljax train agents/calculator
rljax train agents/calculator:tree

The task: "37*58=" -> "<calc>37*58</calc>", the tool says "2146", then "2146". SFT teaches how a
call is written and copied; a fifth of its examples call, the others answer with any number. GRPO
raises the share of episodes that call. The variant `tree` plays four first turns of each prompt and
goes on twice from each call.

Hardware: 2 CPU cores, shared with other work. Measured 2026-11-23: greedy accuracy above 0.95 after
50 steps (seed 0, n=128), and below 0.3 where the tool's answers are shuffled; from 0.58 to 1.00
and from 0.73 to 1.00 on seeds 1 and 2, in 69 and 38 s. `tree`, 2026-11-24, n=128: from 0.05 to
1.00, 0.66 to 1.00 and 0.05 to 0.98 on seeds 0, 1 and 2.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=50))
    config.data.train = "products(call_share=0.2)"
    config.data.max_prompt_tokens = 48
    config.sampler.max_response_tokens = 20
    config.environment.function = "tools(functions=('calc',))"
    config.environment.calls = "tag(name='calc')"
    config.environment.max_tokens = 64
    config.sft.steps = 300
    config.evaluate.prompts = 128
    if variant == "tree":
        config.algorithm.collect, config.algorithm.advantage = "turn_tree(branches=2)", "rloo()"
        config.algorithm.reduction = "token_sum_norm(max_tokens=2048)"
        config.batch.samples_per_prompt = 12  # 4 roots of 3 nodes
        config.batch.sequences_per_optimizer_step = 192
    return config
