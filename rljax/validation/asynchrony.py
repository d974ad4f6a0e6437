"""Samples in flight (rollouts.max_staleness above 0): what does not go with them, and what learns
from old tokens as if they were new."""

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config
from rljax.config.checks import Problems
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rollout.flight import Clock
from rljax.rollout.rules.search import SEARCHES
from rljax.setup.setup import rollout_of, sampled_prompts

_OFF = "rollouts.max_staleness=0"


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


def check_in_flight(
    config: Config, problems: Problems, dataflow: Component, collect: Component
) -> None:
    """A rollout of the policy's own samples, whose dead groups, if it replaces any, are known as
    soon as they have ended."""
    most, field = config.rollouts.max_staleness, "rollouts.max_staleness"
    if most <= 0:
        return
    try:
        rollout = rollout_of(config, dataflow)
    except InputError:  # of algorithm.collect, which is said elsewhere
        return
    rule = f"{rollout.text!r} draws half of a prompt's samples from an opponent, at one moment"
    problems.check(rollout.short_name != "against", field, most, rule, _OFF)
    rule = f"{rollout.text!r} scores a round of samples before it draws the next one"
    problems.check(rollout.short_name != "special_token", field, most, rule, _OFF)
    rule = f"{rollout.text!r} searches the responses of a step together, to their ends"
    problems.check(rollout.function not in SEARCHES, field, most, rule, _OFF)
    rule = f"{rollout.text!r} plays the trees of a step at once"
    problems.check(rollout.short_name != "turn_tree", field, most, rule, _OFF)
    rule = f"dataflow={config.dataflow!r} compares samples of one version of the policy"
    problems.check(not spec(dataflow).one_version, field, most, rule, _OFF)
    rule = "rollouts.replay_share=1.0: nothing is sampled"
    problems.check(sampled_prompts(config) > 0, field, most, rule, _OFF)
    needs, drops = spec(collect).needs_groups, spec(collect).drops_dead
    rule = "it chooses groups, and does not say how many may be dropped for one step in flight"
    fix = f"@contract(needs_groups=True, drops_dead=(10, 'error')), or {_OFF}"
    problems.check(not needs or drops is not None, "algorithm.collect", collect.text, rule, fix)
    reward, early = config.reward, spec(dataflow).data == "rollouts"
    for name, value in (("model", reward.model), ("judge_model", reward.judge_model)):
        rule = "it scores the groups of a step at once, on the mesh, and "
        rule += f"algorithm.collect={collect.text!r} replaces dead ones as soon as they have ended"
        fits = drops is None or not value
        problems.check(fits, f"reward.{name}", value, rule, f"'once()', or {_OFF}")
    rule = f"dataflow={config.dataflow!r} reads no reward: no group is known to be dead"
    problems.check(drops is None or early, "algorithm.collect", collect.text, rule, "'once()'")


def flight_warnings(config: Config) -> list[str]:
    """What a run in flight should know before it begins."""
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
