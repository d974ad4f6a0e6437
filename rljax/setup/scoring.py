"""The players of a run: responses that a reward of its config scores, or episodes of its
environment, with their limits."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, row_tokens
from rljax.contracts import spec
from rljax.data.online.default_rewards import evaluation_text, reward_text, training_text
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import parser
from rljax.environments.crew import EpisodeCrew
from rljax.environments.messages import EpisodeLimits
from rljax.rollout import EpisodeRules, Episodes, Player, Reward, player_of
from rljax.sampler import Sampling
from rljax.setup.rewards import reward_role
from rljax.setup.setup import Setup


def limits_of(config: Config) -> EpisodeLimits:
    """Returns the limits of an episode, and how its texts are read."""
    environment = config.environment
    names = {field.name for field in dataclasses.fields(EpisodeLimits)}
    fields = {name: value for name, value in vars(environment).items() if name in names}
    return EpisodeLimits(**{**fields, "max_tokens": row_tokens(config)})


def turn_sampling(config: Config, sampling: Sampling, tokenizer: Tokenizer) -> Sampling:
    """Returns the sampling of a turn: it also ends where a tool call does."""
    call_format = parser(config.environment.calls, tokenizer)
    ids = dict.fromkeys((*sampling.stop_ids, *call_format.stop_ids(tokenizer)))
    texts = dict.fromkeys((*sampling.stop_strings, *call_format.stop_strings))
    return dataclasses.replace(sampling, stop_ids=tuple(ids), stop_strings=tuple(texts))


def make_episodes(
    config: Config,
    tokenizer: Tokenizer,
    mesh,
    sampling: Sampling,
    open_reward: Callable[[], Reward],
    log: Path | None = None,
) -> Episodes:
    """Makes the player of config.environment and starts its workers. What an environment
    prints goes to the file `log`, or to stderr. `open_reward` makes the reward of episodes
    that return None."""
    environment = config.environment
    declared = spec(resolve(environment.function, NAMESPACES["environment"]))
    limits = limits_of(config)
    rules = EpisodeRules(
        limits,
        turn_sampling(config, sampling, tokenizer),
        declared.seats,
        environment.max_rows,
        environment.episode_timeout_s,
        declared.on_limit,
    )
    crew = EpisodeCrew(
        environment.function,
        tokenizer,
        limits,
        workers=environment.workers,
        retries=environment.retries,
        memory_gb=environment.memory_gb,
        log=log,
    )
    crew.start()
    return Episodes(
        crew,
        rules,
        tokenizer,
        mesh,
        open_reward,
        mask_bad_turns=environment.mask_bad_turns,
        max_failed=environment.max_failed,
        correct_at=config.evaluate.correct_at,
    )


def open_players(setup: Setup, log: Path) -> list[Player]:
    """Opens the players of a run: for training first, and for evaluation last if its reward
    differs. Episodes serve both. What functions print goes to the file `log`. Raises InputError
    as `reward_role`."""
    config = setup.config
    if config.environment.function:
        return [_episodes(setup, log)]
    text = training_text(config) if setup.needs_reward else reward_text(config)
    opened = [reward_role(setup, text, dense=setup.needs_reward, log=log)]
    try:
        if (evaluation := evaluation_text(config)) not in ("", text):
            opened.append(reward_role(setup, evaluation, log=log))
    except BaseException:
        opened[0].close()
        raise
    return [player_of(reward) for reward in opened]


def _episodes(setup: Setup, log: Path) -> Episodes:
    """Makes the player of episodes. The reward that scores episodes without an outcome is opened
    now if the config names one, else before the first such episode."""
    config, reward = setup.config, setup.config.reward
    text = training_text(config)
    opened = functools.partial(reward_role, setup, text, dense=True, log=log)
    sampling, mesh = setup.rollouts.sampling, setup.model.mesh
    player = make_episodes(config, setup.tokenizer, mesh, sampling, opened, log)
    if reward.function or reward.rubrics:
        player.open_reward()
    return player
