"""Config diff: rljax config diff A B [--json]

The fields in which two configs differ, each with the default beside them. A and B are what every
command takes as a config: a .py, .json or .yaml file, a run folder, or a config that ships.

    rljax config diff presets/grpo presets/dapo
    rljax config diff runs/1 runs/2
"""

import json

from rljax.command.config_show import shown
from rljax.config import Config, field_names, value_of
from rljax.config.flags import load_config_file
from rljax.config.run_options import DiffOptions


def main(options: DiffOptions) -> None:
    """Prints the fields in which two configs differ."""
    configs = [load_config_file(path) for path in options.configs]
    default, rows = Config(), {}
    for name in field_names(Config):
        a, b = (value_of(config, name) for config in configs)
        if a != b:
            rows[name] = {"a": a, "b": b, "default": value_of(default, name)}
    if options.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        labels = (*options.configs, "default")
        width = max(map(len, labels))
        for name, values in rows.items():
            print(name)
            for label, value in zip(labels, values.values(), strict=True):
                print(f"  {label:<{width}}  {shown(value)}")
    else:
        print("no field differs")
