"""Demo: rljax demo [--real]

Trains a small policy on this machine in a minute or three, and writes its report.

It is `rljax train quickstart:demo`: two layers learn to count letters, from demonstrations and then
by GRPO. Nothing is downloaded; the run folder is made under runs/ in the working folder.

With --real a pretrained model, SmolLM2-135M-Instruct, learns to add numbers, `rljax train
real/sums`; another config may be named, `rljax demo CONFIG --real`. Then the exported policy
answers held-out prompts three times, greedily: in rljax, in transformers, and through `rljax serve`
by the client of OpenAI; different answers are counted. What is not installed is named and left out.
The figures are printed as a table and written to demo.json in the run folder.
"""

import dataclasses

from rljax.command import train
from rljax.command.launch import ConfigSource
from rljax.config.flags import load_config_file
from rljax.config.run_options import DemoOptions, TrainOptions
from rljax.config.texts import with_texts

SHORT = "quickstart:demo"  # the config where none is given


def main(options: DemoOptions, source: ConfigSource) -> int:
    """Trains the demo; returns the exit code."""
    fields = {**source.fields, **options.fields()}
    path = "real/sums" if options.real and source.path == SHORT else source.path
    loaded = load_config_file(path)
    config = with_texts(loaded, fields, "these flags cannot be used", "--config.")
    source = dataclasses.replace(source, path=path, fields=fields, config=config, loaded=loaded)
    if options.real:
        from rljax.command.real_demo import run_real  # with JAX: --help answers without it

        return run_real(source, options.answers)
    from rljax.data.rows.sources import load_prompts

    row = load_prompts(source.config.data.train, "test")[0]
    print(
        f'The task: how often is there an "a"? {row["prompt"]!r} is answered by '
        f"{row['ground_truth']!r}. A small model is shown some examples (SFT), then learns from "
        "its own answers by a reward for the right ones (GRPO).",
        flush=True,
    )
    return train.main(TrainOptions(), source)
