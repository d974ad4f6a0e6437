"""The typed config: what an experiment is. Imports no model code, so that --help is instant.

Rules are checked by rljax.validation. Components are calls written as text (rljax.components).
"Off" is spelled 0 for a coefficient, "" for a text, () for a list.
"""

import dataclasses

from rljax.config.model_settings import LoraSettings, MemoryConfig, MeshConfig, ModelSettings
from rljax.config.names import Settings
from rljax.config.pretraining_settings import PretrainingSettings
from rljax.config.rollout_settings import RolloutSettings


@dataclasses.dataclass
class OptimizerConfig(Settings):
    """An optimizer and its learning rate, by name; the gradient is clipped before, to a global norm
    of `clip_norm` (0 = not)."""

    # Of rljax.learn.update_rules: adamw | adafactor | lion | sgd | muon with options,
    # "lion(beta2=0.98)", or dotted: a function (learning_rate, options) -> an optax transformation.
    name: str = "adamw"
    lr: float = 1e-6  # learning rate after warm-up
    # Of rljax.learn.schedules, after warm-up: constant | linear | cosine | wsd with options,
    # "cosine(final=0.1)", or dotted: a function (lr, steps, options) -> a function of the step.
    schedule: str = "constant"
    warmup_steps: int = 0  # optimizer steps of a linear rise to lr
    # Share of lr that warm-up starts at. At 0 the first optimizer step changes nothing, as with the
    # schedulers of optax and transformers.
    warmup_from: float = 0.0
    # AdamW's; other optimizers have such numbers as options of `name`.
    beta1: float = 0.9
    beta2: float = 0.999  # as beta1, of the squared gradient
    eps: float = 1e-8  # AdamW's, in the denominator
    weight_decay: float = 0.0  # of matrices, times the learning rate
    clip_norm: float = 1.0  # 0 = off


@dataclasses.dataclass
class DataConfig(Settings):
    """A path (.parquet, .jsonl, ...), hf://datasets/OWNER/NAME, or a task, "sort_digits(...)".

    `sources` mixes further ones in: every prompt comes from train or one of them, with chances
    proportional to `weights` (train first), which move to `final_weights` over the run.
    """

    train: str = ""  # prompts, or rows of the dataflow's kind: a path or a task
    sources: tuple[str, ...] = ()  # further paths or tasks beside train
    weights: tuple[float, ...] = ()  # () = equal
    final_weights: tuple[float, ...] = ()  # () = weights
    # From the epoch after a prompt's pass rate over all its samples has reached this, it is no
    # longer drawn (ScaleRL's No-Positive-Resampling); 0 = off.
    retire_at_pass_rate: float = 0.0
    # Before the first step, prompts whose pass rate over pass_rate_samples is above this are
    # dropped (OlmoRL's offline filter); 0 = off.
    drop_above_pass_rate: float = 0.0
    pass_rate_samples: int = 8  # samples per prompt of drop_above_pass_rate
    # (low, high): every prompt asks for a length in tokens drawn from this range, by
    # target_instruction; the rewards l1_exact and l1_max read it. () = off.
    target_tokens: tuple[int, ...] = ()
    target_instruction: str = " Think for {target_tokens} tokens."  # behind such a prompt
    test: str = ""  # "" = the tasks' own test splits, and test_fraction of files
    test_fraction: float = 0.0  # of every file's rows, by a hash of their prompts: never trained
    stream: bool = False  # rows of files are read as they are drawn, not all at once
    max_prompt_tokens: int = 512  # longer ones: data.overlong
    overlong: str = "drop"  # prompts over the limit: drop | error | left | right
    # Supervised examples of a conversation with several turns of the assistant: auto = one with all
    # turns, or, where the chat template rewrites earlier turns, one for each turn; each = one for
    # each turn, as the policy is asked for it; last = one, for the last turn.
    turns: str = "auto"
    # Variables of the chat template, NAME=VALUE, as "enable_thinking=false", in every rendering of
    # the run; a row's own (chat_template_kwargs) override them.
    template_variables: tuple[str, ...] = ()
    # An image of more is scaled down, so that it takes fewer tokens; 0 = as the model's
    # preprocessor_config.json says.
    max_image_pixels: int = 0


@dataclasses.dataclass
class SFTConfig(Settings):
    """Supervised steps before the dataflow. steps 0 = none."""

    steps: int = 0  # 0 = none
    data: str = ""  # "" = the task's demonstrations
    sequences_per_step: int = 64  # demonstrations of one optimizer step
    stop_at_accuracy: float = 0.0  # held-out greedy accuracy that ends it early; 0 = never
    check_every_steps: int = 20  # how often it is measured
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclasses.dataclass
class OfflineConfig(Settings):
    """Of dataflows that learn from a file (sft, preference, kto, reward_model, dqo, ...), the rows
    of data.train: every step is one optimizer step on examples_per_step of them."""

    examples_per_step: int = 64  # a pair is one example; with packing a full row is one
    max_tokens: int = 1024  # of a row: prompt and completion; data.overlong says what if longer
    packing: bool = False  # supervised examples share rows
    # Pairs that are ties leave the data, or stand in both orders: label smoothing of 1/2.
    ties: str = "drop"  # drop | both_orders
    step_separator: str = "\n"  # between the steps of process reward models and trajectories
    # Where the reference's log-probs of every example are written once and read from then on, so
    # that training holds no reference model; "" = computed at each step.
    reference_logprobs: str = ""


@dataclasses.dataclass
class BatchConfig(Settings):
    """prompts_per_step x samples_per_prompt sequences are generated; each optimizer step takes
    sequences_per_optimizer_step of them, computed at most tokens_per_microbatch (padded) at a
    time."""

    prompts_per_step: int = 128  # prompts drawn for a step
    samples_per_prompt: int = 8  # responses to each: the group that GRPO compares
    sequences_per_optimizer_step: int = 256  # divides the product of the two above
    # Padded; lower it where memory is short. 0: as many as the estimate of the plan says a TPU can
    # surely hold, so that weights are gathered as seldom as can be; on other devices 16384.
    tokens_per_microbatch: int = 16384
    # Sequences share rows in every pass of learning, and a prompt is computed once for its samples.
    packing: bool = True
    epochs: int = 1  # passes over the sequences of a step


@dataclasses.dataclass
class SamplerConfig(Settings):
    """temperature is that of the sampler and of every log-prob of the trainer."""

    # What decoding computes in: float32 | bfloat16 | float16, "" = model_settings.dtype, as the
    # trainer does. The log-probs that it records are its own.
    dtype: str = ""
    # Whether its logits are a float32 product: on | off, "" = model_settings.head_in_float32.
    head_in_float32: str = ""
    temperature: float = 1.0  # above 0
    top_k: int = 0  # sample from the so many likeliest tokens; 0 = off
    top_p: float = 1.0  # sample from the likeliest tokens of this mass; 1 = off
    min_p: float = 0.0  # drop tokens less likely than min_p x the top token; 0 = off
    max_response_tokens: int = 512  # where a response is cut
    stop_strings: tuple[str, ...] = ()  # besides the tokenizer's end-of-sequence ids
    # The mesh of decoding, over the same devices: "" = training's own, "mesh(data=4, tensor=2)", or
    # "auto" = what the plan finds fastest within memory. Another one is a copy of the weights, made
    # after each update and dropped after the rollout (docs/guides/sampler.md). With
    # rollouts.sampler_devices it is over those, and "" = weights whole on each of them.
    layout: str = ""
    # How decoding holds the weights: float32 | bfloat16 | float16 | int8, "" = as they are. int8:
    # codes of the linear maps, of a quantised base its own; the rest is in sampler.dtype.
    weight_dtype: str = ""
    # Rows decoded at a time, refilled as they end. 0: all of a round; in flight those of 1 + ahead.
    slots: int = 0
    # Where slots are refilled: on the "device", inside one program, or by the "host", between
    # dispatches (docs/guides/sampler.md).
    loop: str = "device"
    # How keys and values are held: float32 | bfloat16 | float16 | int8, "" = as decoding computes.
    kv_dtype: str = ""
    # Tokens of a page of keys and values: slots take pages of a pool as they grow, and share those
    # of a prompt (with loop="host", and in environments). 0 = each slot has its columns to itself.
    page_tokens: int = 0
    pages: int = 0  # of all slots together; 0 = as many as their columns take
    # Speculative decoding: so many tokens, copied from where the newest ones have stood before, are
    # read in a step and kept where they are what is drawn; samples stay what they are. 0 = off.
    draft_tokens: int = 0
    # Rollout routing replay of a mixture of experts (arXiv 2510.11370): the experts that the
    # sampler chose for each token are recorded, and the policy's passes in training send it there
    # again, with weights by its router as it is. With loop="device", without environments.
    router_replay: bool = False
    # (low, high): each sample may think for a number of tokens drawn from this range; where
    # end_of_thinking has not come by then, interrupt_phrase is forced (mask 0) and the answer goes
    # on. () = off.
    thinking_tokens: tuple[int, ...] = ()
    end_of_thinking: str = "</think>"  # the text that ends thinking
    # Forced where thinking is over.
    interrupt_phrase: str = (
        "Okay, time is up. Let me stop thinking and formulate a final answer now.</think>"
    )


@dataclasses.dataclass
class RewardConfig(Settings):
    """function: of rljax.rewards, dotted, or "file.py:function"; a call ends at timeout_s."""

    # "" = the task's own; of a file by its data_source (by_source), else exact_match.
    function: str = ""
    # A reward model's folder (outcome scores): the only reward where function is "", else its score
    # is reward_model() in a mixture, or the parameter model_score of your own function.
    model: str = ""
    # A cost model's folder (configs/offline/cost_model.py), for dataflow="safe_rlhf": its score is
    # the cost of a response, above 0 = unsafe. "" = the part `cost` of the reward is.
    cost_model: str = ""
    judge_model: str = ""  # a chat model's folder, which judge() and rubric() ask, on the mesh
    judge_grades: tuple[str, ...] = ()  # its answers, a token each, worst first; () = 0 to scale
    rubrics: str = ""  # "evolving_rubrics(generator='...')": of each prompt; "" = off
    # A process reward model's folder: its scores of the lines of a response are added to the
    # outcome, by functions of rljax.shaping.steps or your own; "" = off.
    process_model: str = ""
    # How scores of lines become rewards.
    process_reward: str = "dense_step_rewards(lambda_fail=0.25, lambda_pass=0.025)"
    process_lines: str = "line_ids()"  # "line_ids(code_only=True)": of the last fenced block alone
    # Processes that score at once, on each host; of a reward that asks a server, on all together.
    workers: int = 2
    timeout_s: float = 10.0  # seconds of one call; each member of a mixture has them anew
    memory_gb: float = 8.0  # of a worker (RLIMIT_DATA): more is a MemoryError; 0 = no limit


@dataclasses.dataclass
class EnvironmentConfig(Settings):
    """What the policy plays with, over several turns: a generator function
    (docs/guides/environments.md). Limits end an episode; it is scored as it stands."""

    # Of rljax.environments, dotted, or "file.py:function": "tools(functions=('python()',))". "" =
    # the policy answers once.
    function: str = ""
    max_turns: int = 8  # replies of the policy; sampler.max_response_tokens limits each
    max_calls: int = 0  # tool calls of an episode; 0 = no limit
    # Of an episode: prompt, replies and observations, the columns of a row. 0 = the most that
    # data.max_prompt_tokens, max_turns replies and the observations between them may take.
    max_tokens: int = 0
    max_reply_tokens: int = 1024  # of an observation; a longer one keeps its head and its tail
    # Whether a text that the environment yields may hold a control token, such as <|im_end|>. Else
    # such a text gets a space and is read as ordinary tokens. Answers of tools never hold one.
    control_tokens: bool = False
    turn_timeout_s: float = 10.0  # of one step of the environment
    episode_timeout_s: float = 0.0  # of a whole episode, decoding included; 0 = no limit
    # How tool calls are written: a format of rljax.environments.calls; "auto" = as the chat
    # template writes them; "" = none are looked for.
    calls: str = "auto"
    # What the policy gets for a call that cannot be parsed: the reason, at most three times in a
    # row ("reply"), or the end of the episode ("end").
    on_bad_call: str = "reply"
    mask_bad_turns: bool = False  # turns with such a call are not learned from
    # Where a chat template drops old reasoning: "append" keeps what was read, "rewrite" begins
    # another row with what the template shows.
    history: str = "append"
    # Rows that a seat of an episode may take: one for each history that "rewrite" begins, or that a
    # later Opening of the environment does.
    max_rows: int = 1
    workers: int = 2  # processes that play, on each host; each holds hundreds of episodes
    memory_gb: float = 8.0  # of a worker (RLIMIT_DATA); 0 = no limit
    retries: int = 1  # how often a failed episode is played again before it is masked
    # Share of a step's episodes; a run ends where more fail (but not for one of several, unless 0).
    max_failed: float = 0.05


@dataclasses.dataclass
class AlgorithmConfig(Settings):
    """Which function fills each stage. KL coefficients of 0 mean that no reference model is
    loaded."""

    advantage: str = "group_relative"  # of rljax.advantages
    policy_loss: str = "ppo_clip"  # of rljax.losses.policy
    value_loss: str = "squared_error"  # of rljax.losses.value: of a critic
    preference_loss: str = "dpo"  # of rljax.losses.preference: of pairs, triples or labels
    reward_loss: str = "bradley_terry"  # of rljax.losses.reward_model
    reduction: str = "token_mean"  # of rljax.learn.reductions: the weight of each token
    kl_in_reward: float = 0.0  # coefficient of the KL penalty in the reward; 0 = off
    kl_in_loss: float = 0.0  # coefficient of the KL penalty in the loss; 0 = off
    kl_estimator: str = "k3"  # of kl_in_loss
    kl_reward_estimator: str = "k1"  # of kl_in_reward
    # kl_in_loss times pi / pi_old, gradient through both: unbiased off the sampling policy.
    kl_importance: bool = False
    kl_target: float = 0.0  # the coefficients adapt so that the KL stays near this; 0 = fixed
    kl_horizon: float = 10_000.0  # sequences; how slowly they adapt
    entropy_coef: float = 0.0  # of the entropy bonus; 0 = off
    # Sampler against trainer: "rollout_correction(...)" weighs tokens; "" = metrics only.
    correction: str = ""
    old_logprobs: str = "recomputed"  # or "sampler": the sampler's own (bypass)
    # Which trajectories fill a step: once | dynamic(...) | active(...) | first_live(...), or how
    # they are made: vine(...) | turn_tree(...) | special_token(...) | search(...).
    collect: str = "once"
    reward_shaping: tuple[str, ...] = ()  # of rljax.shaping.scores, in this order
    baseline_filters: tuple[
        str, ...
    ] = ()  # of rljax.shaping.filters: rows that leave loss and baseline
    filters: tuple[str, ...] = ()  # rows that leave the loss only
    # Stop a batch's optimizer steps once its ppo_k3 exceeds this; 0 = off.
    trust_region: float = 0.0


@dataclasses.dataclass
class EvaluateConfig(Settings):
    """Greedy accuracy on held-out prompts: before, after, and every `every_steps` (0 = only those
    two).

    A reward of at least `correct_at` counts as right.
    """

    every_steps: int = 0  # 0 = before and after alone
    prompts: int = 256  # the first so many held-out prompts
    # Drawn responses to each of them at every evaluation, as rollouts are drawn: eval/pass@k for
    # k = 1, 2, 4, ... up to it; 0 = the greedy one alone.
    samples: int = 0
    correct_at: float = 1.0  # the least reward that counts as right
    reward: str = ""  # "" = the evaluation of the task, or the training reward
    # Prompts for the greedy accuracy of a dataflow that learns from a file, a path or a task; ""
    # = none: such a run samples nothing.
    prompts_from: str = ""
    # Stop after so many evaluations in a row without a better eval/loss (of runs that learn from a
    # file; else eval/accuracy); 0 = never.
    patience: int = 0


@dataclasses.dataclass
class CheckpointConfig(Settings):
    """Everything that the run needs to go on bitwise. every_steps 0 = only at the end and on
    SIGTERM."""

    every_steps: int = 50  # 0 = only at the end
    keep: int = 2  # how many of the newest are kept
    # Keep the step with the highest value of this metric, too, or with a minus before it the
    # lowest ("-eval/loss"); "" = off.
    best_metric: str = ""
    # Config fields (or "data") that may differ from the checkpoint's.
    allow_changed: tuple[str, ...] = ()


@dataclasses.dataclass
class HostsConfig(Settings):
    """Several processes that make one run: how long they wait for each other. With one process
    nothing of it is read. The hosts are found by their environment: see docs/pods/tpu_vm.md."""

    init_timeout_s: float = 1800.0  # until all hosts have started
    heartbeat_s: float = 30.0  # without a heartbeat a host is lost, and the others end
    # Without any progress for so long the hosts write their stacks into the run folder, and end at
    # twice that; 0: learned from the phases of the run so far.
    stall_s: float = 0.0


@dataclasses.dataclass
class Config(Settings):
    """One experiment."""

    model: str = ""  # a folder, OWNER/NAME of the hub, or "decoder(layers=...)": random weights
    tokenizer: str = ""  # a folder; "" = the model's folder, or the task's own alphabet
    critic_model: str = ""  # a reward model's folder; "" = the policy, with a head of zeros
    teacher_model: str = ""  # of distillation: a folder, same vocabulary
    dataflow: str = "grpo"  # of rljax.dataflows: the algorithm, as a page of code
    steps: int = 100  # steps of the dataflow, after sft.steps
    seed: int = 0  # of weights, data order and samples
    run_dir: str = ""  # "" = a fresh folder under runs/
    # Beside the jsonl files: console, tensorboard, wandb, mlflow, swanlab, trackio, and your own.
    trackers: tuple[str, ...] = ("console",)
    samples_every_steps: int = 20  # how often example completions are recorded
    report_every_minutes: float = 5.0  # how often report.html is written meanwhile; 0 = at the end
    # Non-finite optimizer steps in a row before a rollback to the last checkpoint.
    max_skipped_in_a_row: int = 5
    export: bool = True  # write the final policy as a Hugging Face folder
    compilation_cache: str = "~/.cache/rljax/jax"  # "" = off
    # (first, last): steps, as metrics.jsonl counts them, that jax.profiler records into
    # RUN_DIR/profile for xprof; () = off.
    profile_steps: tuple[int, ...] = ()
    profile_port: int = 0  # where live captures by xprof or TensorBoard are answered; 0 = nowhere
    profile_hosts: int = 1  # the first so many hosts are profiled; -1 = all
    model_settings: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    pretraining: PretrainingSettings = dataclasses.field(default_factory=PretrainingSettings)
    offline: OfflineConfig = dataclasses.field(default_factory=OfflineConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    rollouts: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    # Roles beside the built-in ones, "name=maker(...)": a maker of rljax.setup.role_makers or your
    # own, for a dataflow or rollout that names them: ("implicit=trained_policy(lr=1e-6)",).
    roles: tuple[str, ...] = ()
    # Roles on devices of their own, "ROLE+ROLE=group(devices=4, tensor=2)": reference, and the
    # models of `reward`: reward_model, cost_model, judge, process_model. Groups take the last
    # devices, in this order; what is before them is the mesh's. () = all roles on one mesh.
    placement: tuple[str, ...] = ()
    actor_optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    critic_optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(lr=1e-5)
    )
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)


# The module in which a bare component name is looked up.
NAMESPACES = {
    "dataflow": "rljax.dataflows",
    "data": "rljax.tasks",
    "reward": "rljax.rewards",
    "environment": "rljax.environments",
    "tool": "rljax.environments.functions",
    "rubrics": "rljax.rewards.judges.rubric_buffer",
    "process_reward": "rljax.shaping.steps",
    "advantage": "rljax.advantages",
    "policy_loss": "rljax.losses.policy",
    "value_loss": "rljax.losses.value",
    "preference_loss": "rljax.losses.preference",
    "preference": "rljax.shaping.pairs",
    "constrained": "rljax.shaping.constrained",
    "reward_loss": "rljax.losses.reward_model",
    "reduction": "rljax.learn.reductions",
    "correction": "rljax.correction",
    "collect": "rljax.rollout",
    "search": "rljax.search",
    "role": "rljax.setup.role_makers",
    "placement": "rljax.setup.placement",
    "shaping": "rljax.shaping.scores",
    "filter": "rljax.shaping.filters",
    "model": "rljax.models.builtin",
    "optimizer": "rljax.learn.update_rules",
    "schedule": "rljax.learn.schedules",
    "tracker": "rljax.tracking.services",
}
