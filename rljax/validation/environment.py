"""The environment of a config: whether it can be called, and what does not go with turns."""

import inspect

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, row_tokens
from rljax.config.checks import Problems
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rollout import turn_tree
from rljax.rollout.players.episodes.tree import Tree
from rljax.rollout.rules.search import SEARCHES
from rljax.validation.problems import resolve_field


def check_environment(config: Config, problems: Problems, kind: str) -> None:
    """A generator function that its rows can call, limits that fit, and nothing beside it that
    reads single responses."""
    own, text = config.environment, config.environment.function
    _check_tree(config, problems)
    if not text:
        return
    component = resolve_field(problems, "environment.function", text, "environment")
    if component is None:
        return
    function = inspect.unwrap(component.function)
    plays = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    rule = "an environment is a generator function: it yields what the policy reads next"
    problems.check(plays, "environment.function", text, rule, "reply = yield observation")
    rule = f"dataflow={config.dataflow!r} learns from {kind}, and episodes are rollouts"
    problems.check(
        kind == "rollouts",
        "environment.function",
        text,
        rule,
        fix="dataflow='grpo', or environment.function=''",
    )
    _check_rows(config, problems, spec(component).seats)
    name = config.algorithm.collect.partition("(")[0]
    rule = "it continues single responses, and an environment plays episodes of several turns"
    fits = name not in ("vine", "special_token", *(one.__name__ for one in SEARCHES))
    problems.check(fits, "algorithm.collect", config.algorithm.collect, rule, "turn_tree()")
    prompt, columns = config.data.max_prompt_tokens, row_tokens(config)
    rule = f"an episode begins with up to data.max_prompt_tokens={prompt} tokens"
    problems.check(
        columns > prompt,
        "environment.max_tokens",
        own.max_tokens,
        rule,
        fix=f"environment.max_tokens={2 * prompt}, or a smaller data.max_prompt_tokens",
    )
    for field, value in (
        ("reward.process_model", config.reward.process_model),
        ("reward.model", config.reward.model),
        ("reward.judge_model", config.reward.judge_model),
        ("evaluate.reward", config.evaluate.reward),
        ("rollouts.replay", config.rollouts.replay),
    ):
        rule = "it reads single responses, and an environment plays episodes of several turns"
        problems.check(not value, field, value, rule, f"{field}='' beside environment.function")


def _check_rows(config: Config, problems: Problems, seats: tuple[str, ...]) -> None:
    """A prompt's rows are whole episodes, as many as are compared, and what would take each row for
    one is not used where an episode has several."""
    own, samples = config.environment, config.batch.samples_per_prompt
    rows = len(seats) * own.max_rows
    rule = f"an episode takes {len(seats)} seats x {own.max_rows} rows"
    field = "batch.samples_per_prompt"
    problems.check(samples % rows == 0, field, samples, rule, f"a multiple of {rows}")
    try:
        advantage = resolve(config.algorithm.advantage, NAMESPACES["advantage"])
        compares = spec(advantage).compares_samples
    except InputError:  # which is said elsewhere
        compares = False
    rule = f"algorithm.advantage={config.algorithm.advantage!r} compares the episodes of a prompt"
    problems.check(not compares or samples > rows, field, samples, rule, f"{2 * rows} or more")
    for field, value, names, fix in (
        ("algorithm.collect", config.algorithm.collect, ("first_live",), "dynamic()"),
        ("algorithm.advantage", config.algorithm.advantage, ("optimal_token_baseline",), "rloo()"),
        ("dataflow", config.dataflow, ("remax",), "grpo"),
    ):
        rule = "compares single rows, and an episode has several here"
        name = value.partition("(")[0]
        problems.check(rows == 1 or name not in names, field, value, rule, fix)


def _check_tree(config: Config, problems: Problems) -> None:
    """A tree of episodes has an environment that can be played again, whole trees of rows, and
    turns to branch at."""
    field, text, own = "algorithm.collect", config.algorithm.collect, config.environment
    try:
        collect = resolve(text, NAMESPACES["collect"])
        dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
        played = spec(resolve(own.function, NAMESPACES["environment"])) if own.function else None
    except InputError:  # which is said elsewhere
        return
    if collect.function is not turn_tree:
        return
    try:
        tree = Tree(**collect.options)
    except InputError as error:
        problems.add(field, text, error)
        return
    rule = "episodes branch where turns of an environment end, and environment.function is ''"
    if not problems.check(played is not None, field, text, rule, "once()"):
        return
    rule = "a branch of a turn_tree is played again from recorded replies, and "
    rule += f"environment.function={own.function!r} declares repeatable=False"
    problems.check(played.repeatable, field, text, rule, "once()")
    rule = f"dataflow={config.dataflow!r} compares all rows of a prompt, and those of a turn_tree "
    rule += "begin at different turns"
    problems.check(not spec(dataflow).compares_samples, field, text, rule, "once()")
    rule = f"episodes branch after turn {tree.at[-1]}, and end after {own.max_turns} turns"
    problems.check(
        tree.at[-1] < own.max_turns,
        "environment.max_turns",
        own.max_turns,
        rule,
        fix=f"environment.max_turns={tree.at[-1] + 1}, or an earlier turn in turn_tree(at=...)",
    )
    samples, unit = config.batch.samples_per_prompt, tree.nodes * len(played.seats) * own.max_rows
    rule = f"a multiple of {unit}: a root of a turn_tree has {tree.nodes} nodes"
    problems.check(
        samples % unit == 0,
        "batch.samples_per_prompt",
        samples,
        rule,
        fix=f"batch.samples_per_prompt={-(-max(samples, 1) // unit) * unit}",
    )
