"""Settings of what a run reads: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import LIMITS, option, section
from rljax.config.learn_settings import OptimizerConfig
from rljax.config.names import Settings

_PASS_RATE = {
    "low": 0,
    "high": 1,
    "rule": "from 0 to 1 (0 = off)",
    "fix": "write a share such as 0.9, or 0",
}


def _takes_target(instruction: str) -> bool:
    try:
        asked = instruction.format(target_tokens=1)
    except (KeyError, IndexError, ValueError, AttributeError):
        return False
    return "{target_tokens}" in instruction and bool(asked)


@dataclasses.dataclass
class DataConfig(Settings):
    """A path (.parquet, .jsonl, ...), hf://datasets/OWNER/NAME, or a task, "sort_digits(...)".

    `sources` mixes further ones in: every prompt comes from train or one of them, with chances
    proportional to `weights` (train first), which move to `final_weights` over the run.
    """

    train: str = option(
        "", "prompts, or rows of the dataflow's kind: a path or a task", component="data"
    )
    sources: tuple[str, ...] = option((), "further paths or tasks beside train", component="data")
    weights: tuple[float, ...] = option((), "() = equal")
    final_weights: tuple[float, ...] = option((), "() = weights")
    retire_at_pass_rate: float = option(
        0.0,
        "From the epoch after a prompt's pass rate over all its samples has reached this, it is "
        "no longer drawn (ScaleRL's No-Positive-Resampling); 0 = off.",
        **_PASS_RATE,
    )
    drop_above_pass_rate: float = option(
        0.0,
        "Before the first step, prompts whose pass rate over pass_rate_samples is above this are "
        "dropped (OlmoRL's offline filter); 0 = off.",
        **_PASS_RATE,
    )
    pass_rate_samples: int = option(
        8, "samples per prompt of drop_above_pass_rate", low=1, needs="drop_above_pass_rate"
    )
    target_tokens: tuple[int, ...] = option(
        (),
        "(low, high): every prompt asks for a length in tokens drawn from this range, by "
        "target_instruction; the rewards l1_exact and l1_max read it. () = off.",
        **LIMITS,
    )
    target_instruction: str = option(
        " Think for {target_tokens} tokens.",
        "behind such a prompt",
        fits=_takes_target,
        rule="a text that holds {target_tokens}, and no other braces",
        fix="'Think for {target_tokens} tokens.'",
        needs="target_tokens",
        safe="any",
    )
    test: str = option(
        "", '"" = the tasks\' own test splits, and test_fraction of files', component="data"
    )
    test_fraction: float = option(
        0.0,
        "of every file's rows, by a hash of their prompts: never trained",
        low=0,
        below=1,
        rule="from 0 (off) to below 1",
        fix="write 0.05",
    )
    stream: bool = option(False, "rows of files are read as they are drawn, not all at once")
    max_prompt_tokens: int = option(512, "longer ones: data.overlong", low=1)
    overlong: str = option(
        "drop",
        "prompts over the limit: drop | error | left | right",
        choices=("drop", "error", "left", "right"),
    )
    turns: str = option(
        "auto",
        "Supervised examples of a conversation with several turns of the assistant: auto = one "
        "with all turns, or, where the chat template rewrites earlier turns, one for each turn; "
        "each = one for each turn, as the policy is asked for it; last = one, for the last turn.",
        choices=("auto", "each", "last"),
    )
    template_variables: tuple[str, ...] = option(
        (),
        'Variables of the chat template, NAME=VALUE, as "enable_thinking=false", in every '
        "rendering of the run; a row's own (chat_template_kwargs) override them.",
    )
    max_image_pixels: int = option(
        0,
        "An image of more is scaled down, so that it takes fewer tokens; 0 = as the model's "
        "preprocessor_config.json says.",
    )


@dataclasses.dataclass
class SFTConfig(Settings):
    """Supervised steps before the dataflow; steps=0 takes none."""

    steps: int = option(0, "0 = none", low=0)
    data: str = option("", '"" = the task\'s demonstrations', component="data")
    sequences_per_step: int = option(64, "demonstrations of one optimizer step", low=1)
    stop_at_accuracy: float = option(
        0.0, "held-out greedy accuracy that ends it early; 0 = never", low=0
    )
    check_every_steps: int = option(20, "how often it is measured", low=1)
    optimizer: OptimizerConfig = section(lambda: OptimizerConfig(lr=1e-5))


@dataclasses.dataclass
class PretrainingSettings(Settings):
    """Examples whose loss is added to that of the actor, beside its rollouts (PPO-ptx): coef x the
    mean NLL of their target tokens. Read by dataflows that take `pretraining`: ppo, safe_rlhf."""

    data: str = option(
        "",
        'a path or a task, rows as of sft.data (texts, conversations, ...); "" = off',
        component="data",
    )
    coef: float = option(
        1.0,
        "of that loss; that of algorithm.policy_loss counts once",
        above=0,
        fix="pretraining.data='' (off)",
    )
    sequences_per_optimizer_step: int = option(
        64, "examples that every optimizer step of the actor takes", low=1
    )
    max_tokens: int = option(1024, "of an example; a longer one is cut on the right", low=1)


@dataclasses.dataclass
class OfflineConfig(Settings):
    """Settings of dataflows that learn from a file (sft, preference, kto, reward_model, dqo, ...),
    the rows of data.train: every step is one optimizer step on examples_per_step of them."""

    examples_per_step: int = option(
        64, "a pair is one example; with packing a full row is one", low=1
    )
    max_tokens: int = option(
        1024, "of a row: prompt and completion; data.overlong says what if longer", low=1
    )
    packing: bool = option(False, "supervised examples share rows")
    ties: str = option(
        "drop",
        "Pairs that are ties leave the data, or stand in both orders: label smoothing of 1/2. "
        "drop | both_orders",
        choices=("drop", "both_orders"),
    )
    step_separator: str = option(
        "\n", "between the steps of process reward models and trajectories", safe="any"
    )
    reference_logprobs: str = option(
        "",
        "Where the reference's log-probs of every example are written once and read from then on, "
        'so that training holds no reference model; "" = computed at each step.',
        path="written",
        may_change=True,
    )
