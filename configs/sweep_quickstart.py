"""A sweep: the quickstart with three learning rates and two seeds.

rljax sweep sweep_quickstart

Six runs, one after the other; the same command goes on after an interruption. Hardware, time and
results are those of configs/quickstart.py, six times; the comparison is not measured.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file


def get_config(variant: str = "") -> Config:
    quickstart = Path(__file__).with_name("quickstart.py")
    return load_config_file(f"{quickstart}:{variant}" if variant else str(quickstart))


def sweep():
    """Each member: dotted fields of rljax.config.Config and their values."""
    for lr in (2e-4, 5e-4, 1e-3):
        for seed in (0, 1):
            yield {"actor_optimizer.lr": lr, "seed": seed}
