"""The progress of a run: its position and what it has measured so far, the JSON half of
a checkpoint."""

import dataclasses
import types
import typing

from rljax.errors import InputError

# Fields that checkpoints of earlier versions do not have: a run that goes on has their defaults.
_ADDED = {"pass_at_k_before", "pass_at_k"}


@dataclasses.dataclass
class Progress:
    """The position of a run and what it has measured so far: the JSON half of a checkpoint."""

    phase: str  # rljax.setup.Phase.name
    taken: dict[str, int] = dataclasses.field(default_factory=dict)  # steps of each phase
    accuracy_before: dict | None = None
    accuracy: dict | None = None
    right_before: list | None = None  # per prompt, for the interval of the difference
    right: list | None = None
    pass_at_k_before: dict | None = None  # {"pass@K": estimate} of drawn responses
    pass_at_k: dict | None = None
    held_out_before: dict | None = None  # eval/... of runs that learn from a file
    held_out: dict | None = None
    evaluated_step: int | None = None  # after which `accuracy` and `held_out` were measured
    reference_file: str = ""  # stored log-probs of the reference, in offline.reference_logprobs
    best: float | None = None  # of the evaluations so far, for evaluate.patience
    since_best: int = 0  # evaluations
    prompts: int = 0
    completions: int = 0
    faults: dict[str, float] = dataclasses.field(default_factory=dict)
    fault_steps: dict[str, int] = dataclasses.field(default_factory=dict)  # the last of each fault
    in_a_row: dict[str, int] = dataclasses.field(default_factory=dict)  # steps, by their warning
    elapsed_s: float = 0.0

    @property
    def step(self) -> int:
        """Number of steps of all phases."""
        return sum(self.taken.values())

    @property
    def sft_steps(self) -> int:
        """Number of supervised steps before the last phase."""
        return self.taken.get("sft", 0)

    @property
    def rl_steps(self) -> int:
        """Number of steps of the last phase, whatever its dataflow."""
        return self.taken.get("rl", 0)

    @property
    def measured(self) -> bool:
        """Returns whether the last evaluation came after the last step of the dataflow, and so is
        of the current policy."""
        return self.rl_steps > 0 and self.evaluated_step == self.step

    def count_fault(self, name: str, count: float = 1.0) -> None:
        """Adds to the count of a fault, and notes the last step as its latest."""
        self.faults[name] = self.faults.get(name, 0.0) + count
        self.fault_steps[name] = self.step

    @classmethod
    def from_dict(cls, saved: dict) -> "Progress":
        """Reads the progress of a checkpoint. Raises InputError for one of another version
        of rljax."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not names - _ADDED <= saved.keys() <= names:
            raise InputError(
                "this checkpoint was written by another version of rljax",
                value=sorted((saved.keys() ^ names) - _ADDED),
                rule="its progress has other fields than this version's",
                fix="resume with the version that wrote it, or start a new run_dir from its export",
            )
        hints = typing.get_type_hints(cls)
        wrong = sorted(name for name, value in saved.items() if not _is_a(value, hints[name]))
        if not wrong:
            counters = ("taken", "in_a_row", "faults", "fault_steps")
            kinds = {name: float if name == "faults" else int for name in counters}
            wrong = [n for n in counters for x in saved[n].values() if not _is_a(x, kinds[n])]
        if wrong:
            raise InputError(
                "a checkpoint's progress has values of other types than a run writes",
                value={name: saved[name] for name in wrong},
                fix="use the checkpoint before it, or start a new run_dir",
            )
        return cls(**saved)


def _is_a(value: object, hint) -> bool:
    """Returns whether a value of JSON is of a type such as float, dict[str, int] or list | None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
    kinds += (int,) if float in kinds else ()
    return isinstance(value, kinds) and not isinstance(value, bool)


def bad_steps_in_a_row(metrics: dict) -> int:
    """Returns the number of non-finite optimizer steps since the last good one, of the worst of the
    trained roles."""
    counts = [v for name, v in metrics.items() if name.endswith("skipped_in_a_row")]
    return int(max(counts, default=0))
