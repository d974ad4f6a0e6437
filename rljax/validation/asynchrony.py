"""Checks of samples in flight (rollouts.max_staleness above 0): their settings, and losses that
learn from old tokens as if they were new."""

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rollout.flight import Clock
from rljax.validation.problems import ConfigProblems


def check_flight_ranges(config: Config, problems: ConfigProblems) -> None:
    """Checks the settings of samples in flight, each by itself."""
    settings = config.rollouts
    limit = settings.max_staleness
    if limit > 0:
        rule = f"how many steps' prompts begin before their step: from 0 to max_staleness, {limit}"
        fits = -1 <= settings.ahead <= limit
        problems.check_field(fits, "rollouts.ahead", rule, "-1: half of max_staleness")
    try:
        Clock.parsed(settings.clock)
    except InputError as error:
        problems.add("rollouts.clock", settings.clock, error)


def flight_warnings(config: Config) -> list[str]:
    """Returns the warnings about samples in flight that a run gives before it begins."""
    settings = config.rollouts
    if not settings.max_staleness:
        return []
    warnings = []
    if settings.ahead == 0:
        warnings.append(
            "rollouts.ahead=0: no prompt begins before its step, so rollouts.max_staleness="
            f"{settings.max_staleness} changes nothing"
        )
    if not _accounts_for_old_tokens(config):
        warnings.append(
            f"rollouts.max_staleness={settings.max_staleness}, and neither "
            f"policy_loss={config.algorithm.policy_loss!r} nor a correction weighs what older "
            "weights sampled: without a weight training collapses within hundreds of steps, with "
            "one it is stable to 8 or 16 steps (NeMo-RL PR 1098); "
            "algorithm.correction=\"rollout_correction(level='token', upper=2.0)\", "
            "policy_loss='decoupled_ppo()', or \"cispo(behaviour='sampler')\""
        )
    return warnings


def _accounts_for_old_tokens(config: Config) -> bool:
    """Returns whether the weight of a token in the loss depends on the log-prob with which it was
    drawn, or the samples may come from any policy, as pairs that are compared and texts that a
    teacher reads may."""
    algorithm, dataflow = config.algorithm, resolve(config.dataflow, NAMESPACES["dataflow"])
    loss = resolve(algorithm.policy_loss, NAMESPACES["policy_loss"])
    of_any_policy = spec(dataflow).compares_samples or spec(dataflow).data != "rollouts"
    weighs = "sampler_logprobs" in spec(loss).reads or algorithm.old_logprobs == "sampler"
    if of_any_policy or weighs:
        return True
    if not algorithm.correction:
        return False
    options = resolve(algorithm.correction, NAMESPACES["correction"]).options
    return options.get("mode") != "off" or bool(options.get("reject"))
