"""The typed config: what an experiment is. Imports no model code, so that --help is instant.

Rules are checked by rljax.validation. Components are calls written as text (rljax.components).
"Off" is spelled 0 for a coefficient, "" for a text, () for a list.
"""

import dataclasses
from collections.abc import Container
from typing import NamedTuple

from rljax.config.data_settings import DataConfig, OfflineConfig, PretrainingSettings, SFTConfig
from rljax.config.declare import WORD, declared, is_count_or_rest, is_interval, option, section
from rljax.config.learn_settings import AlgorithmConfig, BatchConfig, OptimizerConfig
from rljax.config.model_settings import LoraSettings, MemoryConfig, MeshConfig, ModelSettings
from rljax.config.names import Settings
from rljax.config.rollout_settings import (
    EnvironmentConfig,
    RewardConfig,
    RolloutSettings,
    SamplerConfig,
)
from rljax.config.values import of_config_dict


@dataclasses.dataclass
class EvaluateConfig(Settings):
    """Greedy accuracy on held-out prompts: before, after, and every `every_steps` (0 = only
    those two).

    A reward of at least `correct_at` counts as right.
    """

    every_steps: int = option(
        0, "Steps from one evaluation to the next; 0 = only before and after the run.", low=0
    )
    prompts: int = option(256, "Number of held-out prompts, the first ones of the data.", low=1)
    samples: int = option(
        0,
        "Drawn responses per prompt at every evaluation, sampled as in rollouts: eval/pass@k for "
        "k = 1, 2, 4, ... up to this number; 0 = the greedy response only.",
        low=0,
        read_by="sampling",
    )
    correct_at: float = option(1.0, "Smallest reward that counts as right.", learn=True)
    reward: str = option(
        "",
        'Reward function of evaluations; "" = the evaluation of the task, or the training reward.',
        component="reward",
        read_by="sampling",
    )
    prompts_from: str = option(
        "",
        "Prompts for the greedy accuracy of a dataflow that learns from a file: a path or a task; "
        '"" = none: such a run samples nothing.',
        component="data",
        read_by="rows",
        refused=True,
    )
    patience: int = option(
        0,
        "Number of evaluations in a row without a better eval/loss (eval/accuracy in runs that "
        "learn from samples) after which the run stops; 0 = never.",
        low=0,
    )


@dataclasses.dataclass
class CheckpointConfig(Settings):
    """Checkpoints, which hold everything that a run needs to go on bitwise. every_steps=0 saves
    only at the end and on SIGTERM."""

    every_steps: int = option(
        50, "Steps from one checkpoint to the next; 0 = only at the end.", low=0, may_change=True
    )
    keep: int = option(2, "Number of newest checkpoints that are kept.", low=1, may_change=True)
    best_metric: str = option(
        "",
        "Metric whose best step is kept, too: the step with its highest value or, with a minus "
        'before the name, its lowest ("-eval/loss"); "" = off.',
        safe=WORD,
        may_change=True,
    )
    allow_changed: tuple[str, ...] = option(
        (),
        'Config fields (or "data") that may differ from the checkpoint\'s.',
        holds="field",
        may_change=True,
    )


@dataclasses.dataclass
class HostsConfig(Settings):
    """Times for which the processes of one run wait for each other; with one process nothing reads
    them. The hosts are found by their environment: see docs/pods/tpu_vm.md."""

    init_timeout_s: float = option(
        1800.0, "Longest time until all hosts have started, in seconds.", low=1, may_change=True
    )
    heartbeat_s: float = option(
        30.0,
        "Longest time without a heartbeat of a host, in seconds; then the host is lost, and the "
        "others end.",
        low=1,
        may_change=True,
    )
    stall_s: float = option(
        0.0,
        "Longest time without any progress, in seconds: then the hosts write their stacks into "
        "the run folder, and end at twice that. 0 = learned from the phases of the run so far.",
        low=0,
        may_change=True,
    )


@dataclasses.dataclass
class Config(Settings):
    """The config of one experiment."""

    model: str = option(
        "",
        'Model: a folder, OWNER/NAME of the hub, or "decoder(layers=...)" with random weights.',
        component="model",
        path="model",
    )
    tokenizer: str = option(
        "",
        'Folder of the tokenizer; "" = that of the model, or the alphabet of the task.',
        path="tokenizer",
    )
    critic_model: str = option(
        "",
        'Folder of a reward model from which the critic starts; "" = the policy, with a head of '
        "zeros.",
        path="model",
        read_by="a critic",
    )
    teacher_model: str = option(
        "",
        'Folder of the teacher in distillation, a model with the same vocabulary; "" = none, or, '
        "with algorithm.collect='with_hint(...)', the policy itself.",
        path="model",
    )
    teachers: tuple[str, ...] = option(
        (),
        "Folders of further teachers, each for the prompts of its pattern in teacher_sources.",
        path="model",
        read_by="samples",
        refused=True,
    )
    teacher_sources: tuple[str, ...] = option(
        (),
        "Patterns of data_source, one for each of `teachers`: the first that fits a prompt chooses "
        'its teacher, ("math*", "code"). Other prompts have teacher_model; if that is "", nobody '
        "teaches them.",
        read_by="samples",
        safe="(?s:.*)",
    )
    dataflow: str = option(
        "grpo", "Algorithm: a dataflow of rljax.dataflows.", component="dataflow"
    )
    steps: int = option(
        100, "Number of steps of the dataflow, which come after those of sft.steps.", low=0
    )
    program_steps: int = option(
        1,
        "Steps of a phase that one compiled program takes at most, with sampling, scoring and "
        "learning, and without the host between them. The samples and the policy are those of one "
        "step at a time. It needs a reward with a form for the device.",
        low=1,
        may_change=True,
        read_by="samples",
        refused=True,
    )
    seed: int = option(0, "Seed of weights, data order and samples.", low=0)
    run_dir: str = option(
        "", 'Folder of the run; "" = a new one under runs/.', path="written_folder", may_change=True
    )
    trackers: tuple[str, ...] = option(
        ("console",),
        "Trackers beside the jsonl files: console, tensorboard, wandb, mlflow, swanlab, trackio, "
        "and your own.",
        component="tracker",
        safe="console",
        may_change=True,
    )
    samples_every_steps: int = option(
        20, "Steps from one record of example completions to the next.", low=1, may_change=True
    )
    report_every_minutes: float = option(
        5.0,
        "Minutes from one writing of report.html to the next; 0 = only at the end.",
        low=0,
        may_change=True,
    )
    max_skipped_in_a_row: int = option(
        5,
        "Largest number of non-finite optimizer steps in a row; then the run goes back to its "
        "last checkpoint.",
        low=1,
    )
    export: bool = option(
        True, "Writes the final policy as a Hugging Face folder.", may_change=True
    )
    compilation_cache: str = option(
        "~/.cache/rljax/jax",
        'Folder of compiled programs; "" = off.',
        needs_trust=True,  # they are read back and run
        may_change=True,
    )
    profile_steps: tuple[int, ...] = option(
        (),
        "(first, last): steps, as metrics.jsonl counts them, that jax.profiler records into "
        "RUN_DIR/profile for xprof; () = off.",
        fits=is_interval,
        rule="(first, last) with 1 <= first <= last, or () = off",
        fix="write (3, 5)",
        may_change=True,
    )
    profile_port: int = option(
        0,
        "Port for live captures by xprof or TensorBoard; 0 = none.",
        low=0,
        high=2**16 - 1,
        rule="from 0 (off) to 65535",
        fix="write 9012, or 0",
        needs_trust=True,
        may_change=True,
    )
    profile_hosts: int = option(
        1,
        "Number of hosts that are profiled, the first ones; -1 = all.",
        fits=is_count_or_rest,
        rule="at least 1, or -1 = all hosts",
        fix="write 1",
        may_change=True,
    )
    model_settings: ModelSettings = section(ModelSettings)
    memory: MemoryConfig = section(MemoryConfig)
    lora: LoraSettings = section(LoraSettings)
    mesh: MeshConfig = section(MeshConfig)
    hosts: HostsConfig = section(HostsConfig)
    data: DataConfig = section(DataConfig)
    sft: SFTConfig = section(SFTConfig, needs="steps")
    pretraining: PretrainingSettings = section(PretrainingSettings, needs="data")
    offline: OfflineConfig = section(OfflineConfig, read_by="rows")
    batch: BatchConfig = section(BatchConfig)
    sampler: SamplerConfig = section(SamplerConfig, read_by="sampling")
    reward: RewardConfig = section(RewardConfig, read_by="sampling")
    environment: EnvironmentConfig = section(EnvironmentConfig, needs="function", read_by="samples")
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    rollouts: RolloutSettings = section(RolloutSettings, read_by="samples")
    roles: tuple[str, ...] = option(
        (),
        'Roles beside the built-in ones, "name=maker(...)": a maker of rljax.setup.role_makers or '
        "your own, for a dataflow or rollout that names them: "
        '("implicit=trained_policy(lr=1e-6)",).',
        holds="role",
    )
    placement: tuple[str, ...] = option(
        (),
        'Roles on devices of their own, "ROLE+ROLE=group(devices=4, tensor=2)": reference, and '
        "the models of `reward`: reward_model, cost_model, judge, process_model. Groups take the "
        "last devices, in this order; what is before them is the mesh's. () = all roles on one "
        "mesh.",
        holds="placement",
    )
    actor_optimizer: OptimizerConfig = section(OptimizerConfig, read_by="a policy")
    critic_optimizer: OptimizerConfig = section(
        lambda: OptimizerConfig(lr=1e-5), read_by="a critic"
    )
    evaluate: EvaluateConfig = section(EvaluateConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    def to_config_dict(self):
        """Returns the fields as a locked ml_collections.ConfigDict, of which `from_config_dict`
        makes an equal config."""
        from ml_collections import ConfigDict

        return ConfigDict(dataclasses.asdict(self)).lock()

    @classmethod
    def from_config_dict(
        cls, values, where: str = "the ConfigDict", *, later: Container[str] = ()
    ) -> "Config":
        """Returns the config of an ml_collections.ConfigDict of all fields or some.

        The others, and those that are None, have their defaults. References are resolved, and a
        function is named by its text. Raises InputError, which begins with `where`, for unknown
        fields, values of wrong types, and required placeholders that are not set, except for fields
        that are set `later`.
        """
        return of_config_dict(values, cls(), where, later)


FIELDS = declared(Config)  # {dotted name: its declaration}
DATA = tuple(name for name, spec in FIELDS.items() if spec.component == "data")
OPTIMIZERS = tuple(  # sections
    name.rpartition(".")[0] for name, spec in FIELDS.items() if spec.component == "optimizer"
)
MODELS = tuple(
    name for name, spec in FIELDS.items() if spec.path in ("model", "tokenizer", "adapter")
)


class Stage(NamedTuple):
    """A kind of component: the module in which a bare name is looked up, the arguments that it is
    called with (all others are options), and the forms and axes of what a dataflow gets of it."""

    module: str
    called_with: tuple[str, ...] = ()
    returns: tuple[str, ...] = ("array",)
    axes: str = ""  # those that it may have: T [B, S], R [B], E [B / rows of an example]


_BATCH, _POLICY, _LOSS = ("batch",), ("policy", "batch"), ("loss, metrics",)
STAGES = {
    "dataflow": Stage("rljax.dataflows", ("batch", "key", "cfg")),
    "data": Stage("rljax.tasks"),
    "reward": Stage("rljax.rewards"),
    "environment": Stage("rljax.environments"),
    "tool": Stage("rljax.environments.functions"),
    "rubrics": Stage("rljax.rewards.judges.rubric_buffer", ("workers",)),
    "process_reward": Stage("rljax.shaping.steps", _BATCH),
    "advantage": Stage("rljax.advantages", _BATCH, ("array", "advantages, returns"), "T"),
    "policy_loss": Stage("rljax.losses.policy", _POLICY, _LOSS, "TR"),
    "value_loss": Stage("rljax.losses.value", ("values", "batch"), _LOSS, "TR"),
    "preference_loss": Stage("rljax.losses.preference", _POLICY, _LOSS, "TE"),
    "preference": Stage("rljax.shaping.pairs"),
    "constrained": Stage("rljax.shaping.constrained"),
    "reward_loss": Stage("rljax.losses.reward_model", ("scores", "batch"), _LOSS, "TE"),
    "reduction": Stage("rljax.learn.reductions", _BATCH, axes="T"),
    "correction": Stage("rljax.correction", _BATCH, ("batch, metrics",)),
    "collect": Stage("rljax.rollout", ("prompts", "key", "cfg")),
    "hint": Stage("rljax.rollout.rules.hints", ("prompt", "samples", "number")),
    "search": Stage("rljax.search"),
    "role": Stage("rljax.setup.role_makers", ("inputs",)),
    "placement": Stage("rljax.setup.placement"),
    "layout": Stage("rljax.sampler.layout"),
    "calls": Stage("rljax.environments.calls"),
    "shaping": Stage("rljax.shaping.scores", _BATCH, axes="R"),
    "filter": Stage("rljax.shaping.filters", _BATCH, axes="R"),
    "model": Stage("rljax.models.builtin"),
    "optimizer": Stage("rljax.learn.update_rules"),
    "schedule": Stage("rljax.learn.schedules"),
    "tracker": Stage("rljax.tracking.services"),
}
NAMESPACES = {name: stage.module for name, stage in STAGES.items()}
