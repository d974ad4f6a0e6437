"""Settings of learning from the samples of a step: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import option
from rljax.config.names import Settings


@dataclasses.dataclass
class OptimizerConfig(Settings):
    """An optimizer and its learning rate, by name. Before it the gradient is clipped to a global
    norm of `clip_norm` (0 = not)."""

    name: str = option(
        "adamw",
        "Optimizer of rljax.learn.update_rules: adamw | adafactor | lion | sgd | muon with "
        'options, "lion(beta2=0.98)"; or the dotted name of a function (learning_rate, options) '
        "-> an optax transformation.",
        component="optimizer",
    )
    lr: float = option(1e-6, "Learning rate after warm-up.", low=0, per_run=True)
    schedule: str = option(
        "constant",
        "Schedule of rljax.learn.schedules after warm-up: constant | linear | cosine | wsd with "
        'options, "cosine(final=0.1)"; or the dotted name of a function (lr, steps, options) -> a '
        "function of the step.",
        component="schedule",
    )
    warmup_steps: int = option(
        0, "Optimizer steps in which the learning rate rises linearly to lr; 0 = none.", low=0
    )
    warmup_from: float = option(
        0.0,
        "Share of lr at which warm-up starts. At 0 the first optimizer step changes nothing, as "
        "with the schedulers of optax and transformers.",
        low=0,
        needs="warmup_steps",
        per_run=True,
    )
    beta1: float = option(
        0.9,
        "Decay rate of AdamW's mean of the gradient; other optimizers have such numbers as "
        "options of `name`.",
        low=0,
        below=1,
        rule="0 <= beta < 1",
        fix="write 0.9, the default",
        per_run=True,
    )
    beta2: float = option(
        0.999,
        "Decay rate of AdamW's mean of the squared gradient.",
        low=0,
        below=1,
        rule="0 <= beta < 1",
        fix="write 0.999, the default",
        per_run=True,
    )
    eps: float = option(
        1e-8, "Number that AdamW adds to the denominator.", above=0, fix="write 1e-8", per_run=True
    )
    weight_decay: float = option(
        0.0,
        "Coefficient of the weight decay of matrices; it is multiplied by the learning rate. 0 = "
        "off.",
        low=0,
        per_run=True,
    )
    clip_norm: float = option(
        1.0,
        "Largest global norm of the gradient; a larger gradient is scaled down. 0 = off.",
        low=0,
        per_run=True,
    )


@dataclasses.dataclass
class BatchConfig(Settings):
    """Sizes of a batch: prompts_per_step x samples_per_prompt sequences are generated; each
    optimizer step takes sequences_per_optimizer_step of them, computed at most
    tokens_per_microbatch (padded) at a time."""

    prompts_per_step: int = option(128, "Prompts drawn for a step.", low=1, read_by="samples")
    samples_per_prompt: int = option(
        8,
        "Responses per prompt: the group that GRPO compares.",
        low=1,
        learn=True,
        read_by="samples",
    )
    sequences_per_optimizer_step: int = option(
        256,
        "Sequences in one optimizer step; must divide prompts_per_step x samples_per_prompt.",
        low=1,
        read_by="samples",
    )
    tokens_per_microbatch: int = option(
        16384,
        "Largest number of tokens, padding included, that are computed at a time; lower it where "
        "memory is short. 0 = the largest number that a TPU surely holds by the estimate of rljax "
        "plan, so that weights are gathered as seldom as possible; 16384 on other devices.",
        low=0,
    )
    packing: bool = option(
        True,
        "Packs several sequences into a row in every pass of learning, and computes a prompt once "
        "for all its samples.",
    )
    epochs: int = option(
        1, "Passes over the sequences of a step.", low=1, read_by="samples", refused=True
    )


@dataclasses.dataclass
class AlgorithmConfig(Settings):
    """Functions of the parts of an algorithm. With KL coefficients of 0 no reference model
    is loaded."""

    advantage: str = option(
        "group_relative",
        "Advantage estimator: a function of rljax.advantages.",
        component="advantage",
        learn=True,
        per_run=True,
    )
    policy_loss: str = option(
        "ppo_clip",
        "Loss of the policy: a function of rljax.losses.policy.",
        component="policy_loss",
        learn=True,
        per_run=True,
    )
    value_loss: str = option(
        "squared_error",
        "Loss of the critic: a function of rljax.losses.value.",
        component="value_loss",
        learn=True,
        per_run=True,
    )
    preference_loss: str = option(
        "dpo",
        "Loss of pairs, triples or labels: a function of rljax.losses.preference.",
        component="preference_loss",
        learn=True,
    )
    reward_loss: str = option(
        "bradley_terry",
        "Loss of reward models: a function of rljax.losses.reward_model.",
        component="reward_loss",
        learn=True,
    )
    reduction: str = option(
        "token_mean",
        "Weight of each token in the loss: a function of rljax.learn.reductions.",
        component="reduction",
        learn=True,
    )
    kl_in_reward: float = option(
        0.0,
        "Coefficient of the KL penalty in the reward; 0 = off.",
        low=0,
        learn=True,
        per_run=True,
    )
    kl_in_loss: float = option(
        0.0, "Coefficient of the KL penalty in the loss; 0 = off.", low=0, learn=True, per_run=True
    )
    kl_estimator: str = option(
        "k3",
        'Estimator of the KL in the loss: k1 | abs | k2 | k3, or with "+" the value of that one '
        "and the gradient of k2.",
        choices=("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
        learn=True,
    )
    kl_reward_estimator: str = option(
        "k1",
        "Estimator of the KL in the reward: k1 | abs | k2 | k3.",
        choices=("k1", "abs", "k2", "k3"),
        learn=True,
    )
    kl_importance: bool = option(
        False,
        "Multiplies the KL in the loss by pi / pi_old, with the gradient through both: unbiased "
        "when the policy is no longer the one that sampled.",
        learn=True,
    )
    kl_target: float = option(
        0.0, "KL that the coefficients adapt to keep; 0 = they are fixed.", low=0
    )
    kl_horizon: float = option(
        10_000.0,
        "Number of sequences over which the coefficients adapt to kl_target; more is slower.",
        above=0,
        rule="must be > 0 sequences",
        fix="write 10000",
    )
    entropy_coef: float = option(
        0.0,
        "Coefficient of the entropy bonus; 0 = off. With entropy_target or entropy_schedule: the "
        "one to start from.",
        low=0,
        learn=True,
        per_run=True,
    )
    entropy_schedule: str = option(
        "",
        "Schedule of entropy_coef over the steps of the RL phase, of rljax.learn.schedules: linear "
        '| cosine | wsd with options, "linear(final=0.1)"; "" = the coefficient is fixed.',
        component="schedule",
    )
    entropy_target: float = option(
        0.0,
        "Entropy of the samples, in nats per token, that the coefficient adapts to keep; above it "
        "there is no bonus. 0 = the coefficient is fixed.",
        low=0,
    )
    entropy_coef_step: float = option(
        0.005,
        "Change of the coefficient per step: up below entropy_target, down above it.",
        above=0,
        fix="write 0.005",
        needs="entropy_target",
    )
    entropy_coef_max: float = option(
        1.0,
        "Largest coefficient that entropy_target leads to.",
        above=0,
        fix="write 1.0",
        needs="entropy_target",
    )
    observation_coef: float = option(
        0.0,
        "Coefficient of the cross-entropy of what the environment said between the turns of an "
        "episode (ECHO); 0 = off.",
        low=0,
        learn=True,
        per_run=True,
    )
    teacher_coef: float = option(
        0.0,
        "Coefficient of log teacher - log policy of each sampled token in its advantage: "
        "distillation beside the reward; 0 = off.",
        low=0,
        learn=True,
        per_run=True,
    )
    teacher_rate: float = option(
        0.0,
        "Share of the policy's weights that a teacher which is the policy itself takes after each "
        "step: 0 = as the phase began, 1 = the policy as it is, between them a moving mean.",
        low=0,
        high=1,
    )
    correction: str = option(
        "",
        'Correction of the mismatch between sampler and trainer: "rollout_correction(...)" '
        'weights tokens; "" = metrics only.',
        component="correction",
        learn=True,
    )
    old_logprobs: str = option(
        "recomputed",
        'Source of the old log-probs: "recomputed" by the trainer, or those that the "sampler" '
        "recorded (bypass).",
        choices=("recomputed", "sampler"),
        learn=True,
    )
    collect: str = option(
        "once",
        "Rollout of a step, which chooses its trajectories: once | dynamic(...) | active(...) | "
        "first_live(...), or makes them in another way: vine(...) | turn_tree(...) | "
        "special_token(...) | search(...).",
        component="collect",
    )
    reward_shaping: tuple[str, ...] = option(
        (),
        "Functions of rljax.shaping.scores that change the scores, in this order.",
        component="shaping",
        learn=True,
        per_run=True,
    )
    baseline_filters: tuple[str, ...] = option(
        (),
        "Functions of rljax.shaping.filters; rows that they reject leave loss and baseline.",
        component="filter",
        learn=True,
    )
    filters: tuple[str, ...] = option(
        (),
        "Functions of rljax.shaping.filters; rows that they reject leave the loss only.",
        component="filter",
        learn=True,
    )
    trust_region: float = option(
        0.0,
        "Largest ppo_k3 of a batch; above it, its remaining optimizer steps are left out. 0 = off.",
        low=0,
        learn=True,
        per_run=True,
    )
