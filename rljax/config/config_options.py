"""Options of `rljax config show` and `rljax config diff`."""

import dataclasses

from rljax.config.declare import Options, option


@dataclasses.dataclass(frozen=True)
class ShowOptions(Options):
    """rljax config show."""

    yaml: bool = option(False, "Print it as YAML that --config reads")
    json: bool = option(False, "Print it as JSON that --config reads")
    changed: bool = option(False, "Only what differs from the defaults")

    def conflicts(self):
        if self.yaml and self.json:
            yield "json", True, "either --yaml or --json"


@dataclasses.dataclass(frozen=True)
class DiffOptions(Options):
    """rljax config diff."""

    configs: tuple[str, ...] = option(
        (), "Two of: a .py, .json or .yaml file, a run folder, a config that ships",
        required=True, positional=True,
    )  # fmt: skip
    json: bool = option(False, "Print {field: {a, b, default}} as JSON")

    def conflicts(self):
        if self.configs and len(self.configs) != 2:
            yield "configs", self.configs, "two configs are compared"
