"""What a dataflow reads: its first parameter says it, and everything else follows.

prompts       to sample from (online)
examples      worked examples: text, prompt and completion, conversations (SFT)
pairs         a better and a worse completion, maybe a reference one (DPO, reward models)
labelled      a completion and whether it is good (KTO)
steps         steps of a solution, each right or wrong (process reward models)
trajectories  a completion and its reward, maybe step by step (DQO, DRO)
"""

from rljax.components import Component

OFFLINE = ("examples", "pairs", "labelled", "steps", "trajectories")


def data_kind(dataflow: Component) -> str:
    """The kind of data that a dataflow names by its first parameter; prompts if it names none."""
    first = dataflow.parameters[0] if dataflow.parameters else ""
    return first if first in OFFLINE else "prompts"
