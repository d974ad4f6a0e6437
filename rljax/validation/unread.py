"""Fields that a run does not read. There is one rule for all of them:

A switch that is on in vain (a KL coefficient, a filter, a reward model that the algorithm has no
use for) is an error. Any other field that was set and that nothing in the run reads (the learning
rate of a critic that does not exist, lora.alpha while lora.rank is 0) is a warning, because a
config is a base for runs that differ. rljax.validation.offline reports the errors; those of
`config.algorithm` come from the dry run, which traces the fields that a dataflow reads
(rljax.setup.dry_run).
"""

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.schema import FIELDS
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError
from rljax.setup.setup import rollout_of

_WITH_OPTIMIZER = {"critic", "cost_critic", "reward_model"}  # roles that critic_optimizer trains


def unread_fields(config: Config, dataflow: Component) -> dict[str, str]:
    """Returns {field: why the dataflow does not read it}, of all fields, whatever their values."""
    roles, samples = set(dataflow.parameters), spec(dataflow).data in SAMPLED
    if samples:
        try:
            roles |= set(rollout_of(config, dataflow).parameters)
        except InputError:  # of algorithm.collect, which is said elsewhere
            roles |= _WITH_OPTIMIZER
    reasons = {} if roles & _WITH_OPTIMIZER else {"a critic": "has no critic"}
    if "actor" not in roles:
        reasons["a policy"] = "trains no policy"
    if spec(dataflow).data not in ("stepwise", "trajectories"):
        reasons["steps"] = "learns from no steps"
    if samples:
        reasons["rows"] = "learns from samples, not from rows of a file"
        if not (config.sft.steps or config.pretraining.data):
            reasons["answers"] = "learns from samples, and from no answers of a file"
    else:
        reasons["samples"] = "learns from a file, not from samples"
    if not (samples or config.evaluate.prompts_from):
        reasons["sampling"] = (
            "learns from a file, and samples nothing while evaluate.prompts_from is off (commands "
            "that sample from the run later, such as rljax evaluate and serve, do)"
        )
        if not config.sft.steps:
            reasons["prompts"] = reasons["sampling"]
    beginning = f"nothing reads it: dataflow={config.dataflow!r}"
    return {
        name: f"{beginning} {reasons[field.read_by]}"
        for name, field in FIELDS.items()
        if field.read_by in reasons
    }


def behind_switches(config: Config) -> dict[str, str]:
    """Returns {field: why nothing reads it}, of the fields behind a switch that is off, whatever
    their values."""
    reasons = {}
    for name, field in FIELDS.items():
        off = [switch for switch in field.switches if not value_of(config, switch)]
        if off and name not in field.switches:
            reasons[name] = f"nothing reads it while {off[0]} is off"
    return reasons


def unread(config: Config) -> dict[str, str]:
    """Returns {field: why nothing in the run reads it}, of all fields, whatever their values."""
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    return {**behind_switches(config), **unread_fields(config, dataflow)}


def unread_warnings(config: Config, shipped: Config | None = None) -> list[str]:
    """Returns a warning for each reason why fields that were set are read by nothing. A field
    counts as set if its value is neither the default nor that of `shipped`, the config of the
    library from which this one was made."""
    bases, by_reason = [Config(), shipped or Config()], {}
    for name, reason in unread(config).items():
        value = value_of(config, name)
        if all(value != value_of(base, name) for base in bases):
            by_reason.setdefault(reason, []).append(f"{name}={value!r:.80}")
    return [f"{', '.join(fields)}: set, but {reason}" for reason, fields in by_reason.items()]
