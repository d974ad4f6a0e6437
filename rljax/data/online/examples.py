"""The examples of the supervised phase and of pretraining.data, read whole or as they are drawn."""

from collections.abc import Callable
from typing import NamedTuple

from rljax.config import Config, is_path
from rljax.data.images.encode import ImageReader
from rljax.data.online.kept import kept_line, warn_unread
from rljax.data.online.prompts import Example, encode_demonstrations, encode_example
from rljax.data.online.stream import CountedStream, Stream
from rljax.data.rows.columns import rows_of
from rljax.data.rows.sources import load_demonstrations
from rljax.data.rows.split import held_out_fraction
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError

STREAM_ITEMS = 32  # the first records of a stream, which stand for it in the digest
# By the prefix of their counts.
_NAMES_OF_ROWS = {"examples": "demonstrations", "pretraining": "pre-training examples"}


def in_source(spec: str, encode: Callable, *inputs, **options):
    """Returns encode(*inputs, **options). An InputError that it raises names the source
    `spec`, too."""
    try:
        return encode(*inputs, **options)
    except InputError as error:
        raise error if spec in str(error) else error.within(f"{spec}: ") from None


def digested(records: Stream) -> list[dict]:
    """Returns the part of a stream that the digest covers."""
    return [*records.first(STREAM_ITEMS), {"rows": records.rows}]


class Examples(NamedTuple):
    """The encoded examples of a supervised phase, or of pretraining.data, with the part of their
    records that the digest covers, counts, and the tokens of the longest one."""

    items: list | Stream = []
    digested: list = []
    counts: dict = {}
    tokens: int = 1


def demonstrations_of(
    config: Config, tokenizer: Tokenizer, spec: str, notes: list[str], reader: ImageReader | None
) -> Examples:
    """Returns the examples of the supervised phase; none if sft.steps is 0. Raises InputError for
    bad rows."""
    if not config.sft.steps:
        return Examples()
    total = config.data.max_prompt_tokens + config.sampler.max_response_tokens
    other = "--config.sft.data=FILE of demonstrations, or --config.sft.steps=0"
    with rows_of("sft.data" if config.sft.data else "sft.steps reads data.train", other):
        return _examples(config, tokenizer, spec, notes, total, reader, "examples")


def pretraining_of(
    config: Config, tokenizer: Tokenizer, notes: list[str], reader: ImageReader | None
) -> Examples:
    """Returns the examples of pretraining.data; none if that is "". Raises InputError for bad
    rows."""
    spec, limit = config.pretraining.data, config.pretraining.max_tokens
    if not spec:
        return Examples()
    with rows_of("pretraining.data", "--config.pretraining.data=FILE of demonstrations"):
        return _examples(config, tokenizer, spec, notes, limit, reader, "pretraining")


def _examples(
    config: Config,
    tokenizer: Tokenizer,
    spec: str,
    notes: list[str],
    limit: int,
    reader: ImageReader | None,
    name: str,
) -> Examples:
    stored = config.data.stream and is_path(spec)
    records = load_demonstrations(spec, "train", notes, held_out_fraction(config, spec), stored)
    options = dict(max_tokens=limit, images=reader, turns=config.data.turns)
    sample = records.first(STREAM_ITEMS) if isinstance(records, Stream) else records
    warn_unread(spec, sample, tokenizer)
    if isinstance(records, Stream):

        def encoded(index: int) -> tuple[Example | None, dict[str, int]]:
            return in_source(spec, encode_example, records[index], tokenizer, **options)

        stream = CountedStream(encoded, rows=records.rows)
        return Examples(stream, digested(records), {}, limit)
    examples, counts = in_source(spec, encode_demonstrations, records, tokenizer, **options)
    notes.append(kept_line(spec, _NAMES_OF_ROWS[name], counts, limit))
    counts = {f"{name}_{reason}": count for reason, count in counts.items()}
    return Examples(examples, records, counts, max(len(example.ids) for example in examples))
