"""The rewards of several tasks behind one name: a run that mixes tasks scores each by its own.

What lives here: the dispatch by data_source. Which reward a task has is its own to say
(rljax.data.tasks).
"""

from rljax.components import resolve
from rljax.rewards.worker import HOME, call_reward


def own_rewards(
    data_source, *, rewards: tuple = (), otherwise: str = "exact_match()", **sample
) -> dict:
    """The reward that stands beside the sample's data_source in `rewards`, pairs of (data_source,
    reward); `otherwise` for a data_source that is not listed."""
    text = dict(rewards).get(data_source, otherwise)
    return call_reward(resolve(text, HOME), {**sample, "data_source": data_source})[1]
