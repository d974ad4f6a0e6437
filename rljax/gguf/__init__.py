"""GGUF files as Hugging Face folders: config and tokenizer are written into a cache once, weights
are decoded from the file while they are loaded."""

from rljax.gguf.folder import gguf_folder, tensors_of, weights_file
from rljax.gguf.header import is_gguf
from rljax.gguf.rows import Rows, decoded

__all__ = ["Rows", "decoded", "gguf_folder", "is_gguf", "tensors_of", "weights_file"]
