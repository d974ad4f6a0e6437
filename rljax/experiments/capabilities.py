"""Needs and abilities of an algorithm, derived from its dataflow's parameters: the table of the
comparison in arXiv 2410.09302, for any dataflow, the user's own included."""

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED

PROPERTIES = ("no reward model", "no online sampling", "unbalanced samples", "process supervision")


def capabilities(dataflow: str) -> dict[str, bool]:
    """Returns {property: whether the dataflow has it} of `PROPERTIES`.

    no reward model      it has no role that scores what was sampled, and does not train one
    no online sampling   it reads rows of a file, not prompts to sample from
    unbalanced samples   a prompt with only good or only bad completions teaches it: its rows are
                         completions with a reward or a label, not pairs of a better and a worse one
    process supervision  rewards of single steps reach its loss: its rows can hold them, or it takes
                         the rewards token by token from the sampler on; of trajectories only where
                         its contract says token_rewards: others read the sum
    """
    component = resolve(dataflow, NAMESPACES["dataflow"])
    declared, roles = spec(component), set(component.parameters)
    kind = declared.data
    dense = kind in ("rollouts", "stepwise")
    dense |= kind == "trajectories" and declared.token_rewards is True
    flags = (
        "reward_model" not in roles and kind != "rollouts",
        kind not in SAMPLED,
        kind in (*SAMPLED, "unpaired", "trajectories", "stepwise"),
        dense,
    )
    return dict(zip(PROPERTIES, flags, strict=True))


def capability_table(dataflows: dict[str, str]) -> list[dict]:
    """Returns one row per {name: dataflow}: {"method": name, property: bool, ...}."""
    return [{"method": name, **capabilities(text)} for name, text in dataflows.items()]
