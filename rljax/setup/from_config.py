"""`build`: the setup of a config with its data read."""

import datetime

import jax

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, row_tokens
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.offline.batches import longest_row
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.setup.decode_layout import with_decode_layout
from rljax.setup.images import check_images
from rljax.setup.placement import divided
from rljax.setup.setup import Setup, assemble, check_context, load_model
from rljax.setup.teachers import check_teachers


def build(config: Config, devices=None, now: datetime.datetime | None = None) -> Setup:
    """Returns everything that a run needs but its weights, on `devices` (default: all); `now` is
    the date that chat templates write. Raises InputError for bad data, tokenizer or model
    folders."""
    devices, groups = divided(config, jax.devices() if devices is None else devices)
    tokenizer = load_run_tokenizer(config, now)
    kind = spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data
    data = load_data(config, tokenizer, kind)
    check_images(config, data)
    check_teachers(config, data)
    model = load_model(config, tokenizer, devices)
    row = data.prompt_tokens + config.sampler.max_response_tokens
    if config.environment.function:
        row = row_tokens(config)
        check_context("episode", row, model, "lower environment.max_tokens or max_turns")
    if kind not in SAMPLED:
        items = [x["item"] for x in [*data.prompts, *data.held_out]]
        # (The longest row of a stream is not known.)
        row = config.offline.max_tokens if data.endless else longest_row(kind, items)
    return with_decode_layout(assemble(config, tokenizer, data, model, row, groups))
