"""Checks of the environment of a config: it can be called, and rows and limits fit its
episodes."""

import inspect

from rljax.components import Component
from rljax.config import Config, row_tokens
from rljax.contracts import spec
from rljax.rollout.players.episodes.tree import TurnTree
from rljax.validation.problems import ConfigProblems, resolve_field, resolved


def check_environment(config: Config, problems: ConfigProblems, collect: Component | None) -> None:
    """Checks that the environment is a generator function, that rows and limits fit its episodes,
    and that rows are whole trees of episodes where the rollout plays trees."""
    text = config.environment.function
    if not text:
        return
    component = resolve_field(problems, "environment.function", text, "environment")
    if component is None:
        return
    function = inspect.unwrap(component.function)
    plays = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    rule = "an environment is a generator function: it yields what the policy reads next"
    problems.check_field(plays, "environment.function", rule, "reply = yield observation")
    seats = spec(component).seats
    _check_rows(config, problems, seats)
    if collect is not None and spec(collect).tree is not None:
        _check_tree(config, problems, spec(collect).tree, len(seats))
    prompt_tokens, max_tokens = config.data.max_prompt_tokens, row_tokens(config)
    rule = f"an episode begins with up to data.max_prompt_tokens={prompt_tokens} tokens"
    fix = f"environment.max_tokens={2 * prompt_tokens}, or a smaller data.max_prompt_tokens"
    problems.check_field(max_tokens > prompt_tokens, "environment.max_tokens", rule, fix)


def _check_rows(config: Config, problems: ConfigProblems, seats: tuple[str, ...]) -> None:
    """Checks that a prompt's rows are whole episodes, two or more where they are compared."""
    settings, samples = config.environment, config.batch.samples_per_prompt
    rows = len(seats) * settings.max_rows
    rule = f"an episode takes {len(seats)} seats x {settings.max_rows} rows"
    field = "batch.samples_per_prompt"
    problems.check_field(samples % rows == 0, field, rule, f"a multiple of {rows}")
    advantage = resolved(config.algorithm.advantage, "advantage")
    compares = advantage is not None and spec(advantage).compares_samples
    rule = f"algorithm.advantage={config.algorithm.advantage!r} compares the episodes of a prompt"
    problems.check_field(not compares or samples > rows, field, rule, f"{2 * rows} or more")


def _check_tree(config: Config, problems: ConfigProblems, tree: TurnTree, seats: int) -> None:
    """Checks that episodes have turns to branch at, and that a prompt's rows are whole trees."""
    settings = config.environment
    rule = f"episodes branch after turn {tree.at[-1]}, and end after {settings.max_turns} turns"
    fix = f"environment.max_turns={tree.at[-1] + 1}, or an earlier turn in turn_tree(at=...)"
    problems.check_field(tree.at[-1] < settings.max_turns, "environment.max_turns", rule, fix)
    samples, unit = config.batch.samples_per_prompt, tree.nodes * seats * settings.max_rows
    rule = f"a multiple of {unit}: a root of a turn_tree has {tree.nodes} nodes"
    fix = f"batch.samples_per_prompt={-(-max(samples, 1) // unit) * unit}"
    problems.check_field(samples % unit == 0, "batch.samples_per_prompt", rule, fix)
