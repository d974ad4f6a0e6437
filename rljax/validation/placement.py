"""Checks of roles, and of sampling, on devices of their own: they can be placed, exist, and leave
the others room."""

from collections import Counter

from rljax.config import Config, value_of
from rljax.config.checks import Problems
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError
from rljax.setup.placement import PLACED, check_room, devices_apart, parsed
from rljax.setup.role_table import own_roles
from rljax.setup.setup import sampled_prompts
from rljax.validation.problems import resolved


def check_placement(config: Config, problems: Problems) -> None:
    """Checks memory.scorers_on_host, and of config.placement what needs no devices."""
    scorers = [field for field in PLACED.values() if field and value_of(config, field)]
    moves, rule = config.memory.scorers_on_host, "there is no reward.model, judge or process model"
    fix = "memory.scorers_on_host=False"
    problems.check(bool(scorers) or not moves, "memory.scorers_on_host", moves, rule, fix)
    _check_sampler_devices(config, problems)
    try:
        declared_roles = tuple(own_roles(config))
        roles = [role for text in config.placement for role in parsed(text, declared_roles)[0]]
    except InputError as error:
        problems.add("placement", config.placement, error)
        return
    for role, count in Counter(roles).items():
        rule = f"{role} is in {count} places"
        problems.check(count == 1, "placement", config.placement, rule, "name each role once")
        field = PLACED[role]
        rule = f"{role} is the model of {field}, which is not set"
        is_set = not field or bool(value_of(config, field))
        problems.check(is_set, "placement", config.placement, rule, f"leave {role} out")
    if "reference" in roles:
        rule = "the reference's log-probs are stored by offline.reference_logprobs: no role "
        rule += "computes them"
        computed = not config.offline.reference_logprobs
        problems.check(computed, "placement", config.placement, rule, "leave reference out")


def _check_sampler_devices(config: Config, problems: Problems) -> None:
    """Checks of rollouts.sampler_devices what needs no devices."""
    name, count = "rollouts.sampler_devices", config.rollouts.sampler_devices
    if count <= 0:
        return
    dataflow = resolved(config.dataflow, "dataflow")
    if dataflow is None:
        return
    if spec(dataflow).data not in SAMPLED or not sampled_prompts(config):
        problems.check(False, name, count, "no policy samples: the batches come from a file", "0")


def devices_left(config: Config, devices: int, problems: Problems) -> int:
    """Returns the number of devices that the groups of config.placement leave to config.mesh; 0,
    and a problem, if they do not fit."""
    try:
        check_room(config, devices)
        return devices - devices_apart(config)
    except InputError as error:
        sampling = config.rollouts.sampler_devices
        field = "rollouts.sampler_devices" if sampling >= devices else "placement"
        if not any(problem.startswith(f"{field}=") for problem in problems):
            problems.add(field, value_of(config, field), error)
        return 0
