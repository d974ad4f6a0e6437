"""Models and data sets of the Hugging Face Hub: read into its own cache, and models written."""

from rljax.hub.datasets import SplitFiles, split_files
from rljax.hub.models import (
    ADAPTER,
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    digests,
    model_folder,
    pinned,
)
from rljax.hub.names import HubName, is_hub, model_name, names_in, parse

__all__ = [
    "ADAPTER",
    "CONFIG",
    "TOKENIZER",
    "WEIGHTS",
    "HubName",
    "SplitFiles",
    "digests",
    "is_hub",
    "model_folder",
    "model_name",
    "names_in",
    "parse",
    "pinned",
    "split_files",
]
