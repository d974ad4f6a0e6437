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
        "Of rljax.learn.update_rules: adamw | adafactor | lion | sgd | muon with options, "
        '"lion(beta2=0.98)", or dotted: a function (learning_rate, options) -> an optax '
        "transformation.",
        component="optimizer",
    )
    lr: float = option(1e-6, "learning rate after warm-up", low=0)
    schedule: str = option(
        "constant",
        "Of rljax.learn.schedules, after warm-up: constant | linear | cosine | wsd with options, "
        '"cosine(final=0.1)", or dotted: a function (lr, steps, options) -> a function of the '
        "step.",
        component="schedule",
    )
    warmup_steps: int = option(0, "optimizer steps of a linear rise to lr", low=0)
    warmup_from: float = option(
        0.0,
        "Share of lr that warm-up starts at. At 0 the first optimizer step changes nothing, as "
        "with the schedulers of optax and transformers.",
        low=0,
        needs="warmup_steps",
    )
    beta1: float = option(
        0.9,
        "AdamW's; other optimizers have such numbers as options of `name`.",
        low=0,
        below=1,
        rule="0 <= beta < 1",
        fix="write 0.9, the default",
    )
    beta2: float = option(
        0.999,
        "as beta1, of the squared gradient",
        low=0,
        below=1,
        rule="0 <= beta < 1",
        fix="write 0.999, the default",
    )
    eps: float = option(1e-8, "AdamW's, in the denominator", above=0, fix="write 1e-8")
    weight_decay: float = option(0.0, "of matrices, times the learning rate", low=0)
    clip_norm: float = option(1.0, "0 = off", low=0)


@dataclasses.dataclass
class BatchConfig(Settings):
    """Sizes of a batch: prompts_per_step x samples_per_prompt sequences are generated; each
    optimizer step takes sequences_per_optimizer_step of them, computed at most
    tokens_per_microbatch (padded) at a time."""

    prompts_per_step: int = option(128, "prompts drawn for a step", low=1)
    samples_per_prompt: int = option(
        8, "responses to each: the group that GRPO compares", low=1, learn=True
    )
    sequences_per_optimizer_step: int = option(256, "divides the product of the two above", low=1)
    tokens_per_microbatch: int = option(
        16384,
        "Padded; lower it where memory is short. 0: as many as the estimate of the plan says a "
        "TPU can surely hold, so that weights are gathered as seldom as can be; on other devices "
        "16384.",
        low=0,
    )
    packing: bool = option(
        True,
        "Sequences share rows in every pass of learning, and a prompt is computed once for its "
        "samples.",
    )
    epochs: int = option(1, "passes over the sequences of a step", low=1)


@dataclasses.dataclass
class AlgorithmConfig(Settings):
    """Functions of the parts of an algorithm. With KL coefficients of 0 no reference model
    is loaded."""

    advantage: str = option(
        "group_relative", "of rljax.advantages", component="advantage", learn=True
    )
    policy_loss: str = option(
        "ppo_clip", "of rljax.losses.policy", component="policy_loss", learn=True
    )
    value_loss: str = option(
        "squared_error", "of rljax.losses.value: of a critic", component="value_loss", learn=True
    )
    preference_loss: str = option(
        "dpo",
        "of rljax.losses.preference: of pairs, triples or labels",
        component="preference_loss",
        learn=True,
    )
    reward_loss: str = option(
        "bradley_terry", "of rljax.losses.reward_model", component="reward_loss", learn=True
    )
    reduction: str = option(
        "token_mean",
        "of rljax.learn.reductions: the weight of each token",
        component="reduction",
        learn=True,
    )
    kl_in_reward: float = option(
        0.0, "coefficient of the KL penalty in the reward; 0 = off", low=0, learn=True
    )
    kl_in_loss: float = option(
        0.0, "coefficient of the KL penalty in the loss; 0 = off", low=0, learn=True
    )
    kl_estimator: str = option(
        "k3",
        "of kl_in_loss",
        choices=("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
        learn=True,
    )
    kl_reward_estimator: str = option(
        "k1", "of kl_in_reward", choices=("k1", "abs", "k2", "k3"), learn=True
    )
    kl_importance: bool = option(
        False,
        "kl_in_loss times pi / pi_old, gradient through both: unbiased off the sampling policy.",
        learn=True,
    )
    kl_target: float = option(
        0.0, "the coefficients adapt so that the KL stays near this; 0 = fixed", low=0
    )
    kl_horizon: float = option(
        10_000.0,
        "sequences; how slowly they adapt",
        above=0,
        rule="must be > 0 sequences",
        fix="write 10000",
    )
    entropy_coef: float = option(0.0, "of the entropy bonus; 0 = off", low=0, learn=True)
    correction: str = option(
        "",
        'Sampler against trainer: "rollout_correction(...)" weighs tokens; "" = metrics only.',
        component="correction",
        learn=True,
    )
    old_logprobs: str = option(
        "recomputed",
        'or "sampler": the sampler\'s own (bypass)',
        choices=("recomputed", "sampler"),
        learn=True,
    )
    collect: str = option(
        "once",
        "Which trajectories fill a step: once | dynamic(...) | active(...) | first_live(...), or "
        "how they are made: vine(...) | turn_tree(...) | special_token(...) | search(...).",
        component="collect",
    )
    reward_shaping: tuple[str, ...] = option(
        (), "of rljax.shaping.scores, in this order", component="shaping", learn=True
    )
    baseline_filters: tuple[str, ...] = option(
        (),
        "of rljax.shaping.filters: rows that leave loss and baseline",
        component="filter",
        learn=True,
    )
    filters: tuple[str, ...] = option(
        (), "rows that leave the loss only", component="filter", learn=True
    )
    trust_region: float = option(
        0.0,
        "Stop a batch's optimizer steps once its ppo_k3 exceeds this; 0 = off.",
        low=0,
        learn=True,
    )
