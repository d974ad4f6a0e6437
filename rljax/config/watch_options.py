"""Options of `rljax watch`."""

import dataclasses

from rljax.config.declare import Options, option


@dataclasses.dataclass(frozen=True)
class WatchOptions(Options):
    """rljax watch."""

    runs: tuple[str, ...] = option((), "Run folders", required=True, positional=True)
    metrics: tuple[str, ...] = option((), "Names or patterns, such as 'reward/*'")
    every_s: float = option(2.0, "Seconds from one look to the next", low=0.1)
    once: bool = option(False, "Print one picture and end")
