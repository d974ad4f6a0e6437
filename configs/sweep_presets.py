"""A sweep: every preset that needs no teacher, on the same embedded task, and a table.

rljax sweep sweep_presets

Another seed for all of them: --config.seed=1 --out=runs/presets_seed1. The same command goes on
after an interruption. Measured: docs/methods/presets.md.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

PRESETS = Path(__file__).with_name("presets")


def get_config(variant: str = "") -> Config:
    """What --config.field=value changes for every member."""
    return load_config_file(f"{PRESETS / 'grpo.py'}:tiny")


def sweep():
    """Each member: its config file, and dotted fields of rljax.config.Config."""
    for path in sorted(PRESETS.glob("*.py")):
        if path.stem != "distil":  # its teacher is a folder that another run writes
            yield {"config": f"{path}:tiny"}
