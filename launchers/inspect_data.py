"""Inspect data: python launchers/inspect_data.py --config=configs/quickstart.py [--rows=5 --ids]

Prints the first rows of a config's data as the model reads them, token by token: learned tokens
green, the others dim, every second token underlined; without colours (NO_COLOR, a pipe) what is
learned stands in [[ ]]. Prompts, demonstrations, pairs, labelled answers, steps: whatever the
dataflow reads. Reads a tokenizer and the data, no weights; ends with what was dropped, counted.
"""

from rljax.config import flags as launch
from rljax.config.options import InspectOptions


def main(options: InspectOptions) -> None:
    from rich.console import Console

    from rljax.data.rows.show import show
    from rljax.validation import validate

    config = launch.parsed_config()
    validate(config)
    show(config, Console(), rows=options.rows, split=options.split, ids=options.ids)


if __name__ == "__main__":
    launch.command(main, InspectOptions, needs_config=True)
