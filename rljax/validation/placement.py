"""Checks of roles, and of sampling, on devices of their own: they can be placed, exist, and leave
the others room."""

from collections import Counter

from rljax.config import Config, value_of
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError
from rljax.setup.placement import PLACED, check_room, devices_apart, parsed
from rljax.setup.role_table import own_roles
from rljax.setup.setup import sampled_prompts
from rljax.validation.problems import ConfigProblems, resolved


def check_placement(config: Config, problems: ConfigProblems) -> None:
    """Checks memory.scorers_on_host, and of config.placement what needs no devices."""
    scored = any(field and value_of(config, field) for field in PLACED.values())
    field, rule = "memory.scorers_on_host", "there is no reward.model, judge or process model"
    problems.check_field(
        scored or not config.memory.scorers_on_host, field, rule, "memory.scorers_on_host=False"
    )
    _check_sampler_devices(config, problems)
    try:
        declared_roles = tuple(own_roles(config))
        roles = [role for text in config.placement for role in parsed(text, declared_roles)[0]]
    except InputError as error:
        problems.add("placement", config.placement, error)
        return
    for role, count in Counter(roles).items():
        rule = f"{role} is in {count} places"
        problems.check_field(count == 1, "placement", rule, "name each role once")
        field = PLACED[role]
        rule = f"{role} is the model of {field}, which is not set"
        is_set = not field or bool(value_of(config, field))
        problems.check_field(is_set, "placement", rule, f"leave {role} out")
    if "reference" in roles:
        rule = "the reference's log-probs are stored by offline.reference_logprobs: no role "
        rule += "computes them"
        stored = config.offline.reference_logprobs
        problems.check_field(not stored, "placement", rule, "leave reference out")


def _check_sampler_devices(config: Config, problems: ConfigProblems) -> None:
    """Checks of rollouts.sampler_devices what needs no devices."""
    dataflow = resolved(config.dataflow, "dataflow")
    if config.rollouts.sampler_devices > 0 and dataflow is not None:
        fits = spec(dataflow).data in SAMPLED and sampled_prompts(config)
        rule = "no policy samples: the batches come from a file"
        problems.check_field(fits, "rollouts.sampler_devices", rule, "0")


def devices_left(config: Config, devices: int, problems: ConfigProblems) -> int:
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
