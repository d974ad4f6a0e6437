"""Samples in flight (rollouts.max_staleness above 0): their settings, and what learns from old
tokens as if they were new."""

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.config.checks import Problems
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rollout.flight import Clock


def check_flight_ranges(config: Config, problems: Problems) -> None:
    """The settings of samples in flight, each by itself."""
    settings = config.rollouts
    most = settings.max_staleness
    if most > 0:
        rule = f"how many steps' prompts begin before their step: from 0 to max_staleness, {most}"
        fits = -1 <= settings.ahead <= most
        problems.check(fits, "rollouts.ahead", settings.ahead, rule, "-1: half of max_staleness")
    try:
        Clock.parsed(settings.clock)
    except InputError as error:
        problems.add("rollouts.clock", settings.clock, error)


def flight_warnings(config: Config) -> list[str]:
    """Returns warnings of a run in flight before it begins."""
    settings = config.rollouts
    if not settings.max_staleness:
        return []
    found = []
    if settings.ahead == 0:
        found.append(
            "rollouts.ahead=0: no prompt begins before its step, so rollouts.max_staleness="
            f"{settings.max_staleness} changes nothing"
        )
    if not _weighs_old_tokens(config):
        found.append(
            f"rollouts.max_staleness={settings.max_staleness}, and neither "
            f"policy_loss={config.algorithm.policy_loss!r} nor a correction weighs what older "
            "weights sampled: without a weight training collapses within hundreds of steps, with "
            "one it is stable to 8 or 16 steps (NeMo-RL PR 1098); "
            "algorithm.correction=\"rollout_correction(level='token', upper=2.0)\", "
            "policy_loss='decoupled_ppo()', or \"cispo(behaviour='sampler')\""
        )
    return found


def _weighs_old_tokens(config: Config) -> bool:
    """Returns whether what is learned from a token depends on the log-prob with which it was drawn,
    or the samples may be any policy's: pairs that are compared, and texts that a teacher reads,
    too."""
    algorithm, dataflow = config.algorithm, resolve(config.dataflow, NAMESPACES["dataflow"])
    loss = resolve(algorithm.policy_loss, NAMESPACES["policy_loss"])
    anyones = spec(dataflow).compares_samples or spec(dataflow).data != "rollouts"
    weighs = "sampler_logprobs" in spec(loss).reads or algorithm.old_logprobs == "sampler"
    if anyones or weighs:
        return True
    if not algorithm.correction:
        return False
    options = resolve(algorithm.correction, NAMESPACES["correction"]).options
    return options.get("mode") != "off" or bool(options.get("reject"))
