"""GRPO teaches SmolLM2-135M-Instruct, a pretrained model, to write exactly as many words as asked.

rljax train real/format

The task: "Write exactly 6 words about a river." -> any six words. The reward is 1 where the
response has that many, counted by a program; nobody judges what it says. The rest is as in
real/sums, the model included. `rljax demo real/format --real` compares it with transformers.

Time, memory and accuracy: not measured.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same with two steps and few prompts."""
    sums = str(Path(__file__).with_name("sums.py"))
    config = load_config_file(f"{sums}:tiny" if variant == "tiny" else sums)
    config.data.train = "instructions(kind='words', chat=True, test=200)"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 40, 24  # 39 of them used
    return config
