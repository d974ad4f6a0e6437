"""Search as a tool: facts that no prompt holds, by BM25 over the 500 lines of facts.txt.

rljax train agents/search

The task: "bak?" -> "<search>bak</search>", the tool says "[1] bak 417", then "417". SFT teaches how
a search is written and copied; 3 in 100 of its examples search, the others answer with any number.
Held-out questions are about words that training never asks for. Needs the extra `agents` (bm25s).

Hardware: 2 CPU cores, shared with other work (load 7). Measured 2026-11-23, seed 0: greedy accuracy
0.000 before GRPO, 1.000 after it (n=64), 113 CPU seconds, 240 s by the clock.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=50))
    search = f"search(corpus={str(Path(__file__).with_name('facts.txt'))!r}, k=1)"
    config.data.train = "facts(call_share=0.03)"
    config.data.max_prompt_tokens = 48
    config.sampler.max_response_tokens = 22
    config.environment.function = f"tools(functions=({search!r},))"
    config.environment.calls = "tag(name='search')"
    config.environment.max_tokens = 64
    config.sft.steps = 300
    config.evaluate.prompts = 128
    return config
