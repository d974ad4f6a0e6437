"""The setup of a config for a plan: no data, tokenizer or weight is read, and of a model's folder
only config.json."""

import dataclasses

import jax

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.online.encoded import Data, load_run_tokenizer
from rljax.setup.decode_layout import with_decode_layout
from rljax.setup.placement import divided
from rljax.setup.setup import Setup, assemble, load_model


class _AnyTokenizer:
    """Stands in for a folder's tokenizer: an id per letter, more than any tokenizer makes."""

    vocab_size, eos_ids = 0, ()

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids, **_) -> str:
        return "?" * len(ids)


def abstract_setup(config: Config, devices=None) -> Setup:
    """Returns the setup of `config` on `devices` (default: all), with rows as long as the config
    allows. Raises InputError for a mesh, placement or layout that does not fit the devices, and for
    a model whose config.json cannot be read."""
    tokenizer = _AnyTokenizer() if is_path(config.model) else load_run_tokenizer(config)
    kind = spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data
    prompt = config.data.max_prompt_tokens
    row = prompt + config.sampler.max_response_tokens
    data = Data([[]], [], [], {}, prompt, row, digest="", kind=kind)
    data = dataclasses.replace(data, pretraining_tokens=config.pretraining.max_tokens)
    devices, groups = divided(config, jax.devices() if devices is None else devices)
    model = load_model(config, tokenizer, devices)
    row = row if kind in SAMPLED else config.offline.max_tokens
    return with_decode_layout(assemble(config, tokenizer, data, model, row, groups))
