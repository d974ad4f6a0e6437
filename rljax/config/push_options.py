"""The options of `rljax push`."""

import dataclasses

from rljax.config.declare import Options, option


@dataclasses.dataclass(frozen=True)
class PushOptions(Options):
    """rljax push."""

    run: str = option("", "A run folder", required=True, first=True)
    to: str = option("", "OWNER/NAME, or hf://OWNER/NAME", required=True, first=True)
    part: str = option(
        "", "policy, adapter or reward_model; default: the adapter, if the run has one",
        choices=("", "policy", "adapter", "reward_model"),
    )  # fmt: skip
    public: bool = option(False, "A new repository is for all to see; default: private")
    evaluations: tuple[str, ...] = option((), "Files of rljax evaluate --out, for the card")
    base: str = option("", "OWNER/NAME of the base model, where the run read it from a folder")
    license: str = option("", "Of the card; default: the base's")
    report: bool = option(True, "Push report.html, too: curves, samples, config")
    out: str = option("", "Write the folder here and push nothing")
