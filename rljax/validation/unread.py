"""Fields that a run does not read. There is one rule for all of them:

What would be switched on in vain (a KL coefficient, a filter, a reward model that the algorithm
has no use for) is an error. Any other field that was set and that nothing in the run reads (the
learning rate of a critic that is not there, lora.alpha while lora.rank is 0) is a warning, because
a config is a base for runs that differ. Errors are said by rljax.validation.offline, and of
`config.algorithm` by the dry run, which traces what a dataflow reads (rljax.setup.dry_run).
"""

import fnmatch
from collections.abc import Iterable

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.names import field_names
from rljax.config.schema import FIELDS
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.errors import InputError
from rljax.setup.setup import rollout_of

OPTIMIZERS = ("actor_optimizer", "critic_optimizer", "sft.optimizer")
# Patterns of fields, and why a dataflow does not read them: of those that learn from a file, of
# those that sample, and where a role is missing. What `rljax evaluate` and `rljax serve` read of
# the config of a run, such as `sampler`, is not here.
_OF_SAMPLES = (
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "batch.sequences_per_optimizer_step",
    "environment.*",
    "rollouts.*",
    "reward.*",
)
_OF_A_CRITIC = ("critic_optimizer.*", "critic_model")
_WITH_OPTIMIZER = {"critic", "cost_critic", "reward_model"}  # roles that critic_optimizer trains


def unread_fields(config: Config, dataflow: Component) -> dict[str, str]:
    """{field: why the dataflow does not read it}, of all fields, whatever they hold."""
    roles, samples = set(dataflow.parameters), spec(dataflow).data in SAMPLED
    if samples:
        try:
            roles |= set(rollout_of(config, dataflow).parameters)
        except InputError:  # of algorithm.collect, which is said elsewhere
            roles |= _WITH_OPTIMIZER
    out: dict[str, str] = {}
    if samples:
        out |= _matching(("offline.*",), "learns from samples, not from rows of a file")
    else:
        patterns = [p for p in _OF_SAMPLES if p != "reward.*" or not config.evaluate.prompts_from]
        out |= _matching(patterns, "learns from a file, not from samples")
    if not roles & _WITH_OPTIMIZER:
        out |= _matching(_OF_A_CRITIC, "has no critic")
    if "actor" not in roles:
        out |= _matching(("actor_optimizer.*",), "trains no policy")
    of = f"nothing reads it: dataflow={config.dataflow!r}"
    return {name: f"{of} {why}" for name, why in out.items()}


def _matching(patterns: Iterable[str], why: str) -> dict[str, str]:
    names = field_names(Config)
    return {n: why for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)}


def behind_switches(config: Config) -> dict[str, str]:
    """{field: why nothing reads it}, of fields behind a switch that is off, whatever they hold."""
    out = {}
    for name, field in FIELDS.items():
        off = [switch for switch in field.switches if not value_of(config, switch)]
        if off and name not in field.switches:
            out[name] = f"nothing reads it while {off[0]} is off"
    return out


def unread(config: Config) -> dict[str, str]:
    """{field: why nothing in the run reads it}, of all fields, whatever they hold."""
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    return {**behind_switches(config), **unread_fields(config, dataflow)}


def unread_warnings(config: Config, shipped: Config | None = None) -> list[str]:
    """A warning for each reason why fields that were set are read by nothing. What holds the value
    of the config that `shipped` with the library, from which this one was made, nobody has set."""
    usual, by_reason = [Config(), shipped or Config()], {}
    for name, why in unread(config).items():
        value = value_of(config, name)
        if all(value != value_of(one, name) for one in usual):
            by_reason.setdefault(why, []).append(f"{name}={value!r:.80}")
    return [f"{', '.join(fields)}: set, but {why}" for why, fields in by_reason.items()]
