"""Packages of the services that can track a run, each imported when its service is chosen."""

import importlib
import types
from collections.abc import Sequence

from rljax.errors import InputError

# Service -> the module that it is imported as, and what pip installs.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX>=2.6"),
    "wandb": ("wandb", "wandb>=0.20"),
    "mlflow": ("mlflow", "mlflow-skinny>=3"),
    "swanlab": ("swanlab", "swanlab>=0.10"),
    "trackio": ("trackio", "trackio>=0.20"),
}


def require_packages(trackers: Sequence[str]) -> None:
    """Imports the packages of the services among config.trackers. Raises InputError for one that is
    not installed."""
    for text in trackers:
        if (name := text.partition("(")[0].strip()) in PACKAGES:
            require(name)


def require(service: str) -> types.ModuleType:
    """Returns the module of a service's package. Raises InputError if it is not installed."""
    package, install = PACKAGES[service]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        problem = f"tracking {service!r} needs the package {package!r}"
        fix = f"pip install {install!r}, or remove {service!r} from the config's trackers"
        raise InputError(problem, rule=str(error), fix=fix) from error
