"""Inspect data: rljax inspect DATA --model=MODEL, or rljax inspect CONFIG [--rows=3 --ids]

Prints the first rows as the model reads them, token by token: learned tokens green, the others dim,
every second token underlined; without colours (NO_COLOR, a pipe) what is learned stands in [[ ]].
Special tokens are shown. Prompts, demonstrations, pairs, labelled answers, steps: whatever the
dataflow reads, or the columns of DATA say. Behind the rows: what ends a turn and stops decoding,
the variables of the chat template, lengths in percentiles, and what was dropped, counted. Reads a
tokenizer and the data, no weights.
"""

from rljax.command.launch import ConfigSource
from rljax.config.checks import refuse_early
from rljax.config.data_options import InspectOptions
from rljax.errors import InputError


def main(options: InspectOptions, source: ConfigSource) -> None:
    """Prints rows of the data as the model reads them. Raises InputError for --kind without
    --model, and for a config that `validate` refuses."""
    if options.kind and not options.model:
        raise InputError(
            "--kind is read with --model alone", fix="rljax inspect DATA --model=MODEL"
        )
    if not options.model:
        refuse_early(source.config)  # before JAX is imported
    from rljax.data.rows.show import config_of_data, show
    from rljax.tracking.screen import Terminal
    from rljax.validation import validate

    config = source.config
    if options.model:
        config = config_of_data(source.data, options.model, options.kind, source.config)
    else:
        validate(config)
    show(config, Terminal(), rows=options.rows, split=options.split, ids=options.ids)
