"""Which rewards a run uses where its config names none: those of its tasks.

What lives here: the choice. What does not: the rewards (rljax.rewards), what a task says
(rljax.data.tasks).
"""

from collections.abc import Sequence

from rljax.config import Config, is_path
from rljax.data.rows.read import make_task
from rljax.errors import InputError

_OF_FILES = "exact_match()"


def reward_text(config: Config) -> str:
    """reward.function; where it is "", the reward of the config's tasks, exact_match() of files."""
    return config.reward.function or _own(_specs(config), _reward) or _OF_FILES


def evaluation_text(config: Config) -> str:
    """What judges held-out answers: evaluate.reward; where it is "", the evaluation of the config's
    tasks, or the training reward ("" where a model rewards)."""
    found = config.evaluate.reward or _own(_specs(config), _evaluation)
    return found or ("" if config.reward.model else reward_text(config))


def evaluation_of(spec: str, otherwise: str = "") -> str:
    """What judges the answers to a task's prompts: its evaluation, else `otherwise`, else its
    reward."""
    return _own([spec], lambda task: _evaluation(task) or otherwise or _reward(task)) or otherwise


def _specs(config: Config) -> list[str]:
    return [spec for spec in (config.data.train, *config.data.sources) if spec]


def _reward(task) -> str:
    return vars(task).get("reward", "")


def _evaluation(task) -> str:
    return vars(task).get("evaluation", "")


def _own(specs: Sequence[str], read) -> str:
    """The one reward of all the specs, or `by_source` where they differ; "" if none has any."""
    found: dict[str, str] = {}  # data_source -> reward
    for spec in specs:
        if is_path(spec):
            continue
        name, task = make_task(spec)
        if isinstance(task, (list, tuple)):  # just rows: they bring no reward
            continue
        text = read(task) or (_reward(task) if len(specs) > 1 else "")
        for source in {row.get("data_source", name) for row in task.test} if text else ():
            if found.setdefault(source, text) != text:
                raise InputError(
                    f"two tasks call their data {source!r} and reward it differently",
                    value=[found[source], text],
                    fix="name one reward for both in reward.function and evaluate.reward",
                )
    texts = {*found.values()}
    files = any(is_path(spec) for spec in specs)
    if len(texts) > 1 or (texts and files and texts != {_OF_FILES}):
        sources = (*sorted(found.items()), ("*", _OF_FILES))
        return f"by_source(sources={sources!r}, defaults=())"
    return texts.pop() if texts else ""
