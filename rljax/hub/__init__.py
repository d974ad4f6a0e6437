"""Models and data sets of the Hugging Face Hub: read into its own cache, and models written."""

from rljax.hub.client import page
from rljax.hub.datasets import files_by_split, split_files
from rljax.hub.models import (
    ADAPTER,
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    digests,
    model_card,
    model_folder,
    pinned,
)
from rljax.hub.names import HubName, is_hub, model_name, names_in, parse
from rljax.hub.upload import upload

__all__ = [
    "ADAPTER",
    "CONFIG",
    "TOKENIZER",
    "WEIGHTS",
    "HubName",
    "digests",
    "files_by_split",
    "is_hub",
    "model_card",
    "model_folder",
    "model_name",
    "names_in",
    "page",
    "parse",
    "pinned",
    "split_files",
    "upload",
]
