"""One episode of a config's environment, played in this process and shown as it goes.

A player is a function (the log's ids, how a turn is sampled) -> (the turn's ids, why it ended): a
person, replies from a file, or a policy. Tokens that would be learned stand in [[ ]], or are green.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.online.default_rewards import training_text
from rljax.data.online.encoded import load_data
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.show import Shown, coloured
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits, Step
from rljax.errors import InputError
from rljax.keys import fold_in
from rljax.policies import Policy, SavedPolicy, sample_all
from rljax.reasoning import response_of
from rljax.rewards.pool.calling import HOME, Abstained, call_reward
from rljax.rollout.players.episodes.log import limited_sampling
from rljax.sampler import Sampling
from rljax.setup.scoring import limits_of, turn_sampling
from rljax.setup.setup import make_sampling

Player = Callable[[Sequence[int], Sampling], tuple[list[int], str]]
_FIELDS = ("prompt", "ground_truth", "data_source", "extra_info")


@dataclasses.dataclass
class Log:
    """The tokens of one seat, and a mask: 1 where it chose them."""

    ids: list[int]
    mask: list[int]


@dataclasses.dataclass
class Played:
    """An episode that has ended. `outcome` is {seat: score}. `ended` is the reason: "stop",
    "turns", "length", a limit, or "failed: ..."."""

    logs: dict[str, Log]
    ended: str
    turns: int
    rewards: list[float]  # of each turn, in the order of play
    outcome: dict[str, float]
    parts: dict[str, float]


def play(
    config: Config,
    tokenizer: Tokenizer,
    record: PromptRecord,
    player: Player,
    console: Console,
    *,
    seed: int = 0,
) -> Played:
    """Plays one episode of the row `record` and prints every turn. Raises InputError for a row that
    lacks a field of the environment, and what the player raises."""
    component = resolve(config.environment.function, NAMESPACES["environment"])
    limits = limits_of(config)
    sampling = turn_sampling(config, make_sampling(config, tokenizer), tokenizer)
    record_fields = {name: getattr(record, name) for name in _FIELDS}
    messages = None if record.messages is None else list(record.messages)
    prompt = dict(prompt_ids=record.token_ids.tolist(), messages=messages)
    seeds = dict(seed=seed, sample_seed=seed + 1)
    fields = {**record.extra_info, **record_fields}
    episode = Episode(0, component, fields, tokenizer, limits, **seeds, **prompt)
    try:
        played = _Table(tokenizer, limits, sampling, console).play(episode, player)
    finally:
        episode.close()
    if played.ended == "stop" and not played.outcome:
        _score(config, tokenizer, record, played)
    _show_end(played, console)
    return played


class _Table:
    """One episode as it is played: the logs of its players, and the limits."""

    def __init__(self, tokenizer, limits: EpisodeLimits, sampling: Sampling, console: Console):
        self.tokenizer, self.limits, self.sampling = tokenizer, limits, sampling
        self.console = console
        self.played = Played({}, "", 0, [], {}, {})

    def play(self, episode: Episode, player: Player) -> Played:
        step, played = episode.begin(), self.played
        while not step.ended:
            if played.turns >= self.limits.max_turns:
                played.ended = "turns"
                return played
            log, room = self._read(step)
            if room < 1:
                played.ended = "length"
                return played
            ids, finish = player(log.ids, limited_sampling(self.sampling, step, room))
            self._show(ids, 1)
            log.ids, log.mask = [*log.ids, *ids], [*log.mask, *[1] * len(ids)]
            played.turns += 1
            remaining = self.limits.max_turns - played.turns, self.limits.max_tokens - len(log.ids)
            step = episode.reply(ids, finish, *remaining)
            self._credit(step)
        played.ended = f"failed: {step.kind}: {step.failure}" if step.failure else "stop"
        played.ended = step.limit or played.ended
        played.outcome = dict(step.outcome or {})
        played.parts |= step.outcome_parts
        return played

    def _read(self, step: Step) -> tuple[Log, int]:
        """Appends what a step says to the log of its seat; returns that log, and the number of
        tokens that are left."""
        logs = self.played.logs
        if step.new_row and step.seat in logs:
            self.console.print(Text("--- the history is rewritten: a new row", style="bold"))
        log = Log([], []) if step.new_row else logs[step.seat]
        room = self.limits.max_tokens - len(log.ids) - len(step.ids)
        if room >= 1:
            if step.seat:
                self.console.print(Text(f"--- {step.seat}", style="bold"))
            self._show(step.ids, 0)
            log.ids, log.mask = [*log.ids, *step.ids], [*log.mask, *[0] * len(step.ids)]
            logs[step.seat] = log
        return log, room

    def _show(self, ids: Sequence[int], mask: int) -> None:
        colours = self.console.is_terminal and not self.console.no_color
        tokens = Shown("", np.asarray(ids, np.int32), np.full(len(ids), mask), {})
        self.console.print(coloured(tokens, self.tokenizer, colours=colours), soft_wrap=True)

    def _credit(self, step: Step) -> None:
        """Prints reward, parts and tool calls that a step reports of the reply before it."""
        self.played.rewards.append(step.reward)
        for name, value in step.parts.items():
            self.played.parts[name] = self.played.parts.get(name, 0.0) + value
        notes = [f"reward {step.reward:g}"] if step.reward else []
        notes += [f"{name} {value:g}" for name, value in step.parts.items()]
        notes += [f"tool calls: {step.calls}"] if step.calls else []
        notes += ["a call that cannot be read"] if step.bad_turn else []
        notes += [f"failed: {step.failed_calls}"] if step.failed_calls else []
        if notes:
            self.console.print(Text(f"    ({', '.join(notes)})", style="italic"))


def _score(config: Config, tokenizer, record: PromptRecord, played: Played) -> None:
    """The score that reward.function gives the last turn."""
    text = training_text(config)
    ((seat, log),) = played.logs.items()
    begin = len(log.mask)
    while begin and log.mask[begin - 1]:
        begin -= 1
    ids = log.ids[begin:]
    sample = {name: getattr(record, name) for name in (*_FIELDS, "messages")}
    sample |= dict(token_ids=ids, num_tokens=len(ids), finish_reason="stop")
    sample["response"] = response_of(tokenizer, ids, record.prompt_text, record.messages)
    try:
        score, parts = call_reward(resolve(text, HOME), sample)
    except Abstained as error:
        problem = f"reward {text!r} has no score for this response"
        fix = "write a response that the reward can read, or name another reward"
        raise InputError(problem, rule=str(error), fix=fix) from None
    extra_parts = {name: value for name, value in parts.items() if name != "score"}
    played.outcome, played.parts = {seat: score}, {**played.parts, **extra_parts}


def _show_end(played: Played, console: Console) -> None:
    tokens = sum(len(log.ids) for log in played.logs.values())
    learned_tokens = sum(sum(log.mask) for log in played.logs.values())
    scores = [
        f"{name or 'score'} {value + sum(played.rewards):g}"
        for name, value in played.outcome.items()
    ]
    parts = [f"{name} {value:g}" for name, value in played.parts.items()]
    summary = [
        *scores,
        *parts,
        f"{played.turns} turns",
        f"{tokens} tokens, {learned_tokens} learned",
    ]
    console.print(Text(f"--- {played.ended}: {'; '.join(summary)}", style="bold"), soft_wrap=True)


def row_of(config: Config, tokenizer: Tokenizer, number: int, split: str) -> PromptRecord:
    """Row `number`, from 0, of a split, in the order of a run. Raises InputError if the split has
    fewer rows."""
    data = load_data(config, tokenizer)
    if split == "test":
        rows = data.test_prompts[: number + 1]
    else:
        loader = Loader(data.sources[0], batch_size=1, seed=config.seed, repeat=False)
        rows = loader.take(number + 1)
    if len(rows) <= number:
        rule = f"below {len(rows)}"
        fix = "--row=0, or another number below that"
        raise InputError(f"--row of the {split} rows", value=number, rule=rule, fix=fix)
    return rows[number]


# -- who plays --


def turn_ids(text: str, sampling: Sampling, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """A text as a turn of the policy: cut behind the first stop string or at the limit, else with
    the end token, or the stop string that is white space. Raises InputError for text that the
    tokenizer cannot write."""
    stops = [s for s in sampling.stop_strings if s in text]
    if not stops:
        stops = [s for s in sampling.stop_strings if not s.strip()][:1]
        text += "".join(stops)
    end = min((text.index(s) + len(s) for s in stops), default=len(text))
    ids = tokenizer.encode(text[:end])
    if len(ids) >= sampling.max_response_tokens:
        return ids[: sampling.max_response_tokens], "length"
    return (ids, "stop") if stops else ([*ids, tokenizer.eos_ids[0]], "stop")


def replies_in(text: str) -> list[str]:
    """The replies of a script, which are parted by lines of ---."""
    lines = text.removesuffix("\n").split("\n")
    borders = [-1, *(i for i, line in enumerate(lines) if line == "---"), len(lines)]
    return ["\n".join(lines[a + 1 : b]) for a, b in itertools.pairwise(borders)]


def scripted(replies: Sequence[str], tokenizer: Tokenizer) -> Player:
    """Plays the replies one after the other. The player raises InputError if there are too few, and
    for one that the tokenizer cannot write."""
    remaining = list(replies)

    def player(log: Sequence[int], sampling: Sampling) -> tuple[list[int], str]:
        if not remaining:
            problem = "the script has too few replies"
            rule = "one for each turn, parted by lines of ---"
            fix = "add the missing replies to the script, each behind a line of ---"
            raise InputError(problem, value=len(replies), rule=rule, fix=fix)
        return turn_ids(remaining.pop(0), sampling, tokenizer)

    return player


def by_hand(tokenizer: Tokenizer, ask: Callable[[str], str], console: Console) -> Player:
    """Asks a person for every turn; a line that ends with a backslash goes on in the next. The
    player raises InputError if the input ends before the episode does."""

    def player(log: Sequence[int], sampling: Sampling) -> tuple[list[int], str]:
        while True:
            try:
                text = ask("> ")
                while text.endswith("\\"):
                    text = text[:-1] + "\n" + ask(". ")
            except EOFError:
                fix = "reply until it ends, or give all replies in a file: --script=FILE"
                raise InputError("the episode was left before its end", fix=fix) from None
            try:
                return turn_ids(text, sampling, tokenizer)
            except InputError as error:
                console.print(Text(str(error)), soft_wrap=True)

    return player


def of_policy(saved: SavedPolicy, config: Config, *, greedy: bool, seed: int) -> Player:
    """Samples every turn from a policy, as the config says, and cuts it where the episode ends."""
    tokenizer = saved.tokenizer
    base_sampling = turn_sampling(config, make_sampling(config, tokenizer), tokenizer)
    base_sampling = base_sampling.greedy() if greedy else base_sampling
    policy = Policy(saved.actor(), tokenizer, base_sampling, limits_of(config).max_tokens)
    key, logs = jax.random.key(seed), []

    def player(log: Sequence[int], sampling: Sampling) -> tuple[list[int], str]:
        record = PromptRecord("", np.asarray(log, np.int32), "", "", {}, 0)
        logs.append(log)
        stops = dataclasses.replace(base_sampling, stop_strings=sampling.stop_strings)
        turn_policy = dataclasses.replace(policy, sampling=stops)
        (sample,) = sample_all(turn_policy, [record], key=fold_in(key, len(logs)))
        max_tokens = sampling.max_response_tokens
        truncated = len(sample.ids) > max_tokens
        return list(sample.ids[:max_tokens]), "length" if truncated else sample.finish_reason

    return player
