"""Runs whose data have images: what they cannot do is refused with the field that asks for it,
before anything is compiled; and what an exported model needs to read images."""

from pathlib import Path

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.contracts import spec
from rljax.data.images.encode import PROCESSOR, image_reader
from rljax.data.images.patches import to_hf_processor
from rljax.data.online.encoded import Data
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import write_json

_BRANCHES = ("vine", "special_token")  # rollouts that continue rows from within

_SEARCHES = ("search", "critic_search", "guided_search")


def check_images(config: Config, data: Data) -> None:
    """Raises InputError for a setting that images exclude, where rows of the data have some."""
    if data.images is None:
        return
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    rollout = spec(dataflow).rollout or config.algorithm.collect
    refused = (
        ("rollouts.replay", config.rollouts.replay, bool(config.rollouts.replay),
         "stored rollouts hold no images", "rollouts.replay=''"),
        ("environment.function", config.environment.function, bool(config.environment.function),
         "episodes are of text", "rows of text alone"),
        ("algorithm.collect", rollout, rollout.partition("(")[0] in _BRANCHES,
         "its samples go on from within others, which are of text", "algorithm.collect='once'"),
        ("algorithm.collect", rollout, rollout.partition("(")[0] in _SEARCHES,
         "a search reads text", "algorithm.collect='once'"),
    )  # fmt: skip
    for field, value, wrong, rule, fix in refused:
        if wrong:
            raise InputError(f"{field} with images in the data", value=value, rule=rule, fix=fix)


def save_tokenizer(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer of a run into a model folder, and how its model reads images."""
    tokenizer.save(folder)
    reader = image_reader(config, tokenizer)
    if reader is not None:
        write_json(folder / PROCESSOR, to_hf_processor(reader.processing))
