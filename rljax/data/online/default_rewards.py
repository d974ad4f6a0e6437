"""The rewards of a run whose config names none: those of its tasks; for files, the evaluation that
belongs to each row's data source (rljax.rewards.mixing.SOURCES)."""

import collections
import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.data.rows.read import make_task
from rljax.errors import InputError
from rljax.hub.names import is_hub
from rljax.rewards.mixing import reward_of_source
from rljax.rewards.pool.calling import wanted_fields

LOG = logging.getLogger("rljax")
_UNKNOWN = "exact_match()"  # a task without a reward, a file whose data source nobody knows
OF_FILES = f"by_source(otherwise={_UNKNOWN!r})"


def reward_text(config: Config) -> str:
    """Returns the reward of the config as text: reward.function; if that is "", the reward of its
    tasks, for files that of each row's data source, and exact_match() for an unknown one."""
    files = any(is_path(spec) for spec in _specs(config))
    text = config.reward.function or _common_reward(_specs(config), _reward)
    return text or (OF_FILES if files else _UNKNOWN)


def training_text(config: Config) -> str:
    """Returns `reward_text`, or "" if the model of reward.model is the only reward."""
    return config.reward.function if config.reward.model else reward_text(config)


def reads_reference(texts: Iterable[str]) -> bool:
    """Returns whether rewards compare an answer with a reference. A reward model, whose text is "",
    does not, nor does a function without the parameter `ground_truth`."""
    texts = {*texts} - {""}
    if OF_FILES in texts:
        return True
    fields = [wanted_fields(resolve(text, NAMESPACES["reward"])) for text in texts]
    return any(names is None or "ground_truth" in required for names, required in fields)


def log_rewards_of_file(config: Config, spec: str, data_sources: Iterable[str]) -> None:
    """Logs the default reward of each data source of a file; warns of rows that name a source for
    which none is known."""
    if config.reward.function or config.reward.model or not is_path(spec):
        return
    counts = collections.Counter(data_sources)
    for name, count in sorted(counts.items()):
        source_reward = reward_of_source(name)
        if source_reward or _named_after(spec, name):
            note = " (no reward is known for this source: name one in reward.function)"
            reward = source_reward or f"{_UNKNOWN}{note}"
            LOG.info("%s, data source %r: reward %s", spec, name, reward)
            continue
        arguments = spec, name, f"{count:,}", f"{counts.total():,}", _UNKNOWN, name
        LOG.warning(
            "%s: no reward is known for data source %r of %s of the %s rows that were read: they "
            "are scored by %s. Fix: "
            "--config.reward.function=\"by_source(sources=((%r, 'my_module.my_reward()'),))\", or "
            "one reward for all rows",
            *arguments,
        )


def _named_after(spec: str, data_source: str) -> bool:
    """Returns whether a data source is the name that rows without one get: that of their file or
    repository."""
    if is_hub(spec):
        return data_source in spec
    parts = spec.replace("{split}", "*").split(",")
    return any(fnmatchcase(data_source, Path(part.strip()).stem) for part in parts)


def evaluation_text(config: Config) -> str:
    """Returns the reward of held-out answers: evaluate.reward; if that is "", the evaluation of the
    config's tasks, or the training reward ("" if reward.model is a part of it)."""
    text = config.evaluate.reward or _common_reward(_specs(config), _evaluation)
    return text or ("" if config.reward.model else reward_text(config))


def evaluation_of(spec: str, otherwise: str = "") -> str:
    """Returns the reward of answers to a task's prompts: its evaluation, else `otherwise`, else its
    reward."""
    return (
        _common_reward([spec], lambda task: _evaluation(task) or otherwise or _reward(task))
        or otherwise
    )


def _specs(config: Config) -> list[str]:
    return [spec for spec in (config.data.train, *config.data.sources) if spec]


def _reward(task) -> str:
    return vars(task).get("reward", "")


def _evaluation(task) -> str:
    return vars(task).get("evaluation", "")


def _common_reward(specs: Sequence[str], read) -> str:
    """Returns the one reward of all the specs, or `by_source` where they differ; "" if none has
    any."""
    rewards: dict[str, str] = {}  # data_source -> reward
    for spec in specs:
        if is_path(spec):
            continue
        name, task = make_task(spec)
        if isinstance(task, (list, tuple)):  # just rows: they bring no reward
            continue
        text = read(task) or (_reward(task) if len(specs) > 1 else "")
        for source in {row.get("data_source", name) for row in task.test} if text else ():
            if rewards.setdefault(source, text) != text:
                raise InputError(
                    f"two tasks call their data {source!r} and reward it differently",
                    value=[rewards[source], text],
                    fix="name one reward for both in reward.function and evaluate.reward",
                )
    texts = {*rewards.values()}
    files = any(is_path(spec) for spec in specs)
    if len(texts) > 1 or (texts and files):
        sources = (*sorted(rewards.items()), ("*", OF_FILES if files else _UNKNOWN))
        return f"by_source(sources={sources!r}, defaults=())"
    return texts.pop() if texts else ""
