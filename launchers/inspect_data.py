"""Inspect data: python launchers/inspect_data.py --config=configs/quickstart.py [--rows=5 --ids]

Prints the first rows of a config's data as the model reads them, token by token: learned tokens
green, the others dim, every second token underlined; without colours (NO_COLOR, a pipe) what is
learned stands in [[ ]]. Prompts, demonstrations, pairs, labelled answers, steps: whatever the
dataflow reads. Reads a tokenizer and the data, no weights; ends with what was dropped, counted.
"""

from absl import flags

from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 5, "Rows of each source", lower_bound=1)
flags.DEFINE_enum("split", "train", ["train", "test"], "Which rows")
flags.DEFINE_boolean("ids", False, "A table of position, id, token and mask instead")


def main(_: list[str]) -> int:
    from rich.console import Console

    from rljax.data.rows.show import show
    from rljax.validation import validate

    config = launch.parsed_config()
    validate(config)
    show(config, Console(), rows=_FLAGS.rows, split=_FLAGS.split, ids=_FLAGS.ids)
    return 0


if __name__ == "__main__":
    launch.run(main)
