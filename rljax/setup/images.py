"""Runs whose data have images: settings that they exclude are refused before anything is compiled.
Also writes what lies beside an exported model: its tokenizer, what ends a response, and how it
reads images."""

import contextlib
from pathlib import Path

from rljax import hub
from rljax.config import Config, is_path, model_fields
from rljax.config.values import texts_of
from rljax.data.images.encode import PROCESSOR, image_reader
from rljax.data.images.patches import to_hf_processor
from rljax.data.online.encoded import Data
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import read_json_object, write_json
from rljax.models.huggingface import load_config
from rljax.setup.features import Parts, violations
from rljax.setup.scoring import turn_sampling
from rljax.setup.setup import make_sampling

_GENERATION = "generation_config.json"


def check_images(config: Config, data: Data) -> None:
    """Raises InputError for a setting that images exclude, if rows of the data have images."""
    if data.images is None:
        return
    for rule, field, value, why in violations(Parts(config, images=True)):
        if rule.b == "images":
            raise InputError(
                f"{field} with images in the data", value=value, rule=why, fix=rule.fix
            )
    for field in ("teacher_model", "teachers", "critic_model"):
        for folder in texts_of(config, field):
            if load_config(folder, **model_fields(config)).vision is None:
                text = f"{field} with images in the data"
                rule = "the model reads text alone, and it is given the rows of the policy"
                fix = f"a vision model as {field}, or rows of text alone"
                raise InputError(text, value=folder, rule=rule, fix=fix)


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a response of the run, or a turn of its episodes."""
    sampling = make_sampling(config, tokenizer)
    if config.environment.function:
        sampling = turn_sampling(config, sampling, tokenizer)
    return sampling.stop_ids


def _of_model(config: Config) -> dict:
    """Returns generation_config.json of the model's folder; {} if there is none that can be read,
    as the export at the end of a run must not fail for it."""
    with contextlib.suppress(InputError):
        if is_path(config.model):
            path = hub.model_folder(config.model, hub.CONFIG) / _GENERATION
            return read_json_object(path) if path.exists() else {}
    return {}


def save_tokenizer(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer of a run into the folder of a model or an adapter, with what ends its
    responses, and how its model reads images.

    generation_config.json is the base model's, except for what ends a response: the base may name
    the end of a text where the run has learned the end of a turn.
    """
    path = folder / _GENERATION
    exported = read_json_object(path) if path.exists() else {}
    path.unlink(missing_ok=True)
    tokenizer.save(folder)  # with the generation_config.json that lies beside it, if there is one
    base = read_json_object(path) if path.exists() else _of_model(config)
    base.pop("_from_model_config", None)  # transformers would make it anew from config.json
    ends = list(stop_ids(config, tokenizer))
    ids = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    ends = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    write_json(path, {**ids, **exported, **base, **ends})
    reader = image_reader(config, tokenizer)
    if reader is not None:
        write_json(folder / PROCESSOR, to_hf_processor(reader.processing))
