"""validate(config): every problem of a config at once, each with its fix, before any model loads.

What lives here: types, ranges, batch arithmetic, and whether components exist and fit together.
"""

from rljax.config import Config, is_path
from rljax.errors import InputError
from rljax.validation.fields import (
    check_batch,
    check_names,
    check_paths,
    check_ranges,
    check_types,
)
from rljax.validation.problems import Problems
from rljax.validation.stages import check_components


def validate(config: Config) -> list[str]:
    """All problems of the config at once, as one InputError; returns warnings. Runs before any
    model loads."""
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise InputError("a config is a rljax.config.Config", value=kind, fix="build one")
    problems = Problems()
    check_types(config, problems)
    if not problems:
        check_ranges(config, problems)
    if not problems:
        check_batch(config, problems)
        problems.check(
            bool(config.model),
            "model",
            config.model,
            "is not set",
            "a Hugging Face folder, or 'decoder(...)'",
        )
        problems.check(
            bool(config.data.train),
            "data.train",
            config.data.train,
            "is not set",
            "a path, or a task",
        )
        problems.check(
            config.steps + config.sft.steps > 0,
            "steps",
            config.steps,
            "nothing to train: sft.steps is 0 too",
        )
        check_paths(config, problems)
        check_names(config, problems)
        check_components(config, problems)
    if problems:
        listed = "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))
        raise InputError(
            f"the config has {len(problems)} problem{'s' * (len(problems) > 1)}:\n{listed}"
        )
    return _warnings(config)


_SEQUENCE_LOSSES = ("gspo", "gspo_token", "gmpo")


def _warnings(config: Config) -> list[str]:
    found = []
    if config.sampler.top_p < 1 or config.sampler.top_k > 0:
        found.append(
            "sampler.top_p or top_k truncates what is sampled, which the trainer's log-probs "
            "cannot represent: "
            "ratios are biased (ALGORITHMS 0.1 rule 7)"
        )
    if config.algorithm.kl_in_reward > 0 and config.algorithm.kl_in_loss > 0:
        found.append(
            "algorithm.kl_in_reward and kl_in_loss are both on: the KL penalty counts twice"
        )
    if config.batch.samples_per_prompt == 1 and config.algorithm.advantage.startswith(
        "group_relative"
    ):
        found.append("batch.samples_per_prompt=1 with a group advantage: every advantage is 0")
    algorithm, loss = config.algorithm, config.algorithm.policy_loss.split("(")[0]
    if loss in _SEQUENCE_LOSSES and not algorithm.reduction.startswith("seq_mean_token_mean"):
        found.append(
            f"policy_loss={loss} is one value per sequence, repeated on its tokens: with reduction="
            f"{algorithm.reduction!r} long sequences weigh more; the paper's is seq_mean_token_mean"
        )
    weighs = loss == "decoupled_ppo" or "behaviour='sampler'" in algorithm.policy_loss
    if weighs and algorithm.correction and "mode='off'" not in algorithm.correction:
        found.append(
            f"policy_loss={algorithm.policy_loss} weighs by the sampler's log-probs itself: "
            "algorithm.correction counts the mismatch twice"
        )
    held_out = config.data.test or not is_path(config.data.train)
    if not held_out and (config.evaluate.every_steps or config.sft.stop_at_accuracy):
        found.append(
            "data.test is not set, so nothing is held out: evaluate.every_steps and "
            "sft.stop_at_accuracy do nothing"
        )
    return found
