"""Demo: rljax demo

Trains a small policy on this machine in a minute or three, and writes its report.

It is `rljax train quickstart:demo`: two layers learn to count letters, from demonstrations and then
by GRPO. Nothing is downloaded; the run folder is made under runs/ in the working folder.
"""

from rljax.command import train
from rljax.command.launch import Given
from rljax.config.declare import Options
from rljax.config.options import TrainOptions


def main(_: Options, given: Given) -> int:
    from rljax.data.rows.sources import load_prompts  # with JAX: --help answers without it

    row = load_prompts(given.config.data.train, "test")[0]
    print(
        f'The task: how often is there an "a"? {row["prompt"]!r} is answered by '
        f"{row['ground_truth']!r}. A small model is shown some examples (SFT), then learns from "
        "its own answers by a reward for the right ones (GRPO).",
        flush=True,
    )
    return train.main(TrainOptions(), given)
