"""Options of `rljax completion`."""

import dataclasses

from rljax.config.declare import Options, option

SHELLS = ("bash", "zsh", "fish")


@dataclasses.dataclass(frozen=True)
class CompletionOptions(Options):
    """rljax completion."""

    shell: str = option(
        "", f"Whose script: {', '.join(SHELLS)}", first=True, required=True,
        fits=lambda shell: shell in ("", *SHELLS), rule=f"one of {', '.join(SHELLS)}",
    )  # fmt: skip
