"""Inspect data: rljax inspect --config=configs/quickstart.py [--rows=5 --ids]

Prints the first rows of a config's data as the model reads them, token by token: learned tokens
green, the others dim, every second token underlined; without colours (NO_COLOR, a pipe) what is
learned stands in [[ ]]. Prompts, demonstrations, pairs, labelled answers, steps: whatever the
dataflow reads. Reads a tokenizer and the data, no weights; ends with what was dropped, counted.
"""

from rljax.command.launch import Given
from rljax.config.checks import refuse_early
from rljax.config.options import InspectOptions


def main(options: InspectOptions, given: Given) -> None:
    refuse_early(given.config)  # before JAX is imported
    from rich.console import Console

    from rljax.data.rows.show import show
    from rljax.validation import validate

    validate(given.config)
    show(given.config, Console(), rows=options.rows, split=options.split, ids=options.ids)
