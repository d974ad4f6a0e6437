"""Settings of what a run reads: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import ANY, LIMITS, option, section
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
        filled = instruction.format(target_tokens=1)
    except (KeyError, IndexError, ValueError, AttributeError):
        return False
    return "{target_tokens}" in instruction and bool(filled)


@dataclasses.dataclass
class DataConfig(Settings):
    """A path (.parquet, .jsonl, ...), hf://datasets/OWNER/NAME, or a task, "sort_digits(...)".

    `sources` mixes further ones in: every prompt comes from train or one of them, with chances
    proportional to `weights` (train first), which move to `final_weights` over the run.
    """

    train: str = option(
        "", "Prompts, or rows of the dataflow's kind: a path or a task.", component="data"
    )
    sources: tuple[str, ...] = option(
        (), "Further paths or tasks, mixed with train.", component="data"
    )
    weights: tuple[float, ...] = option(
        (), "Relative chances of train and of each source, train first; () = equal."
    )
    final_weights: tuple[float, ...] = option(
        (), "Weights at the end of the run, to which `weights` move; () = no change."
    )
    retire_at_pass_rate: float = option(
        0.0,
        "Pass rate over all samples of a prompt from which it is no longer drawn, beginning with "
        "the next epoch (ScaleRL's No-Positive-Resampling); 0 = off.",
        read_by="samples",
        refused=True,
        **_PASS_RATE,
    )
    drop_above_pass_rate: float = option(
        0.0,
        "Largest pass rate of a prompt over pass_rate_samples samples, measured before the first "
        "step; easier prompts are dropped (OlmoRL's offline filter); 0 = off.",
        read_by="samples",
        refused=True,
        **_PASS_RATE,
    )
    pass_rate_samples: int = option(
        8,
        "Samples per prompt that drop_above_pass_rate is measured on.",
        low=1,
        needs="drop_above_pass_rate",
    )
    target_tokens: tuple[int, ...] = option(
        (),
        "(low, high): range of lengths in tokens. A length is drawn for every prompt, which asks "
        "for it by target_instruction; the rewards l1_exact and l1_max read it. () = off.",
        read_by="samples",
        refused=True,
        **LIMITS,
    )
    target_instruction: str = option(
        " Think for {target_tokens} tokens.",
        "Text appended to a prompt that asks for a length.",
        fits=_takes_target,
        rule="a text that holds {target_tokens}, and no other braces",
        fix="'Think for {target_tokens} tokens.'",
        needs="target_tokens",
        safe=ANY,
    )
    test: str = option(
        "",
        'Held-out data, a path or a task; "" = the test splits of the tasks, and test_fraction of '
        "files.",
        component="data",
    )
    test_fraction: float = option(
        0.0,
        "Share of the rows of every file that are held out, chosen by a hash of their prompts; 0 "
        "= none.",
        low=0,
        below=1,
        rule="from 0 (off) to below 1",
        fix="write 0.05",
    )
    stream: bool = option(False, "Reads rows of files as they are drawn, not all at once.")
    max_prompt_tokens: int = option(
        512,
        "Largest length of a prompt, in tokens; data.overlong says what happens to longer ones.",
        low=1,
        read_by="prompts",
    )
    overlong: str = option(
        "drop",
        "Treatment of prompts over max_prompt_tokens: they are dropped (drop), end the run "
        "(error), or are cut on the left or on the right (left, right).",
        choices=("drop", "error", "left", "right"),
    )
    turns: str = option(
        "auto",
        "Supervised examples of a conversation with several turns of the assistant. auto: one "
        "with all turns, or one for each turn if the chat template rewrites earlier turns; each: "
        "one for each turn, as the policy is asked for it; last: one, for the last turn. Of the "
        "completions of pairs, labels and trajectories, which are judged as a whole, last learns "
        "the last turn, and each is an error.",
        choices=("auto", "each", "last"),
        read_by="answers",
    )
    template_variables: tuple[str, ...] = option(
        (),
        'Variables of the chat template, NAME=VALUE, as "enable_thinking=false", in every '
        "rendering of the run; those of a row (chat_template_kwargs) override them.",
        safe=r"(?s:\w+=.*)",
    )
    max_image_pixels: int = option(
        0,
        "Largest number of pixels of an image; a larger one is scaled down, so that it takes "
        "fewer tokens. 0 = as the model's preprocessor_config.json says.",
    )


@dataclasses.dataclass
class SFTConfig(Settings):
    """Supervised steps before the dataflow; steps=0 takes none."""

    steps: int = option(0, "Number of supervised steps; 0 = none.", low=0)
    data: str = option(
        "", 'Demonstrations, a path or a task; "" = those of the task.', component="data"
    )
    sequences_per_step: int = option(64, "Demonstrations in one optimizer step.", low=1)
    stop_at_accuracy: float = option(
        0.0,
        "Greedy accuracy on held-out prompts at which this phase ends early; 0 = never.",
        low=0,
        read_by="sampling",
    )
    check_every_steps: int = option(
        20, "Steps from one measurement of the accuracy for stop_at_accuracy to the next.", low=1
    )
    optimizer: OptimizerConfig = section(lambda: OptimizerConfig(lr=1e-5))


@dataclasses.dataclass
class PretrainingSettings(Settings):
    """Examples whose loss is added to that of the actor, beside its rollouts (PPO-ptx, CHORD): coef
    x the mean loss of their target tokens. Read by dataflows that take `pretraining`: grpo, ppo,
    safe_rlhf."""

    data: str = option(
        "",
        'Examples, a path or a task with rows as in sft.data (texts, conversations, ...); "" = '
        "off.",
        component="data",
        read_by="samples",
        refused=True,
    )
    coef: float = option(
        1.0,
        "Coefficient of the examples' loss; that of algorithm.policy_loss is 1.",
        above=0,
        fix="pretraining.data='' (off)",
    )
    loss: str = option(
        "negative_log_likelihood",
        "Loss of the examples: negative_log_likelihood, chord_phi, dynamic_fine_tuning, or another "
        "function of rljax.losses.policy that reads the log-probs alone.",
        component="policy_loss",
    )
    mixed: bool = option(
        False,
        "Multiplies the loss of the samples by 1 - coef, so that coef is a share (CHORD's mu).",
    )
    schedule: str = option(
        "constant",
        "Schedule of coef, of rljax.learn.schedules: constant | linear | cosine | wsd with "
        'options, "cosine(final=0.1)".',
        component="schedule",
    )
    warmup_steps: int = option(
        0, "Optimizer steps in which coef rises linearly from 0; 0 = none.", low=0
    )
    schedule_steps: int = option(
        0,
        "Optimizer steps after warm-up over which the schedule is laid out; 0 = all that are left.",
        low=0,
    )
    sequences_per_optimizer_step: int = option(
        64, "Examples in every optimizer step of the actor.", low=1
    )
    max_tokens: int = option(
        1024, "Largest length of an example, in tokens; a longer one is cut on the right.", low=1
    )


@dataclasses.dataclass
class OfflineConfig(Settings):
    """Settings of dataflows that learn from a file (sft, preference, kto, reward_model, dqo, ...),
    the rows of data.train: every step is one optimizer step on examples_per_step of them."""

    examples_per_step: int = option(
        64,
        "Examples in one step; a pair is one example, and with packing a full row is one.",
        low=1,
    )
    max_tokens: int = option(
        1024,
        "Largest length of a row (prompt and completion), in tokens; data.overlong says what "
        "happens to longer ones.",
        low=1,
    )
    packing: bool = option(False, "Packs supervised examples, several in a row.", refused=True)
    ties: str = option(
        "drop",
        "Treatment of pairs that are ties. drop: they are removed; both_orders: each is learned "
        "from in both orders, which is label smoothing of 1/2.",
        choices=("drop", "both_orders"),
        refused=True,
    )
    step_separator: str = option(
        "\n",
        "Text between two steps of a response, for process reward models and trajectories.",
        safe=ANY,
        read_by="steps",
    )
    reference_logprobs: str = option(
        "",
        "Folder into which the reference's log-probs of every example are written once and from "
        'which they are read, so that training holds no reference model; "" = computed at each '
        "step.",
        path="written_folder",
        may_change=True,
        refused=True,
    )
