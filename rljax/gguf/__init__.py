"""GGUF files as folders of Hugging Face: `folder` writes config and tokenizer into a cache, `rows`
decodes weights from the file while they are loaded. Names alone need no NumPy."""

from pathlib import Path

from rljax.gguf.names import is_gguf, names_the_file, weights_file

__all__ = ["gguf_folder", "is_gguf", "names_the_file", "weights_file"]


def gguf_folder(path: str | Path) -> Path:
    """Returns the Hugging Face folder of a GGUF file, from the cache if it is there, else written.
    Raises InputError for a file that is not read."""
    from rljax.gguf.folder import cached_folder  # a command that looks at names imports no NumPy

    return cached_folder(path)
