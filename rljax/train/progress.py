"""Progress: where a run is and what it has found so far, the JSON half of a checkpoint."""

import dataclasses


@dataclasses.dataclass
class Progress:
    """The JSON half of a checkpoint: where the run is, and what it has found so far."""

    sft_steps: int = 0
    rl_steps: int = 0
    phase: str = "sft"
    accuracy_before: dict | None = None
    accuracy: dict | None = None
    right_before: list | None = None  # per prompt, for the interval of the difference
    right: list | None = None
    held_out_before: dict | None = None  # eval/... of runs that learn from a file
    held_out: dict | None = None
    reference_file: str = ""  # stored log-probs of the reference, in offline.reference_logprobs
    best: float | None = None  # of the evaluations so far, for evaluate.patience
    since_best: int = 0  # evaluations
    prompts: int = 0
    completions: int = 0
    faults: dict[str, float] = dataclasses.field(default_factory=dict)
    equal_rewards_in_a_row: int = 0  # steps of which no reward differed from its siblings'
    elapsed_s: float = 0.0

    @property
    def step(self) -> int:
        return self.sft_steps + self.rl_steps


def bad_steps_in_a_row(metrics: dict) -> int:
    """Non-finite optimizer steps up to now without a good one between, of the worse of actor and
    critic."""
    return int(max(metrics.get(p + "skipped_in_a_row", 0.0) for p in ("", "critic/")))
