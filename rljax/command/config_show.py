"""Config show: rljax config show CONFIG [--yaml | --json] [--changed] [--config.FIELD=VALUE ...]

Prints the resolved config: a table of fields, values and the defaults that they differ from, or
YAML or JSON that --config reads again. CONFIG is what every command takes: a .py, .json or .yaml
file, a run folder, or a config that ships. Nothing that it names is run, checked or downloaded.

    rljax config show presets/dapo:tiny --yaml --changed > my.yaml
    rljax train my.yaml
"""

import json

from rljax.command.launch import ConfigSource, config_as_data
from rljax.config import Config, changed_fields, field_names, value_of
from rljax.config.data_files import to_yaml
from rljax.config.run_options import ShowOptions


def main(options: ShowOptions, source: ConfigSource) -> None:
    """Prints the fields of a config."""
    if options.yaml or options.json:
        values = config_as_data(source.config, only_changed=options.changed)
        print(to_yaml(values).rstrip() if options.yaml else json.dumps(values, indent=2))
        return
    changed, default = changed_fields(source.config), Config()
    names = list(changed) if options.changed else field_names(Config)
    width = max(map(len, names), default=0)
    for name in names:
        text = f"{name:<{width}}  {shown(value_of(source.config, name))}"
        if name in changed:
            text += f"  (default: {shown(value_of(default, name))})"
        print(text)


def shown(value: object) -> str:
    """Returns a value as JSON writes it."""
    return json.dumps(value, ensure_ascii=False)
