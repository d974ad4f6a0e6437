"""Episodes of a step: the policy's turns decode in slots, the environments answer in their workers.

An episode is a log of tokens for each seat that only grows: a prompt, a reply, what the environment
said, a reply. What was sampled is what is learned from, id by id. Between two dispatches whatever
environments have said is put behind the logs, all of it at once; the turns that ended go to their
workers. A limit ends an episode before what no longer fits is read, so that the last token of a log
is always the policy's.

On several hosts every one runs the same sampler on the same rows; episode e is played by host
e mod count, and what environments say is exchanged once per dispatch.
"""

import dataclasses
import time

from rljax import beats, hosts
from rljax.batch import FinishReason
from rljax.environments.crew import EpisodeCrew
from rljax.environments.messages import Limits, Step
from rljax.sampler import Sampler, Sampling
from rljax.sampler.sample import Sample
from rljax.tracking import timing

_NOTHING_S = 0.02  # how long news are waited for where nothing decodes


@dataclasses.dataclass
class Turn:
    """One reply: tokens [start, end) of its log, and what the environment said of it."""

    start: int
    end: int
    reward: float = 0.0
    state: bytes = b""  # of the world that the reply was given in
    bad: bool = False  # it has a tool call that could not be parsed
    observation: tuple[dict, ...] = ()  # the messages that it answers
    text: str = ""


@dataclasses.dataclass
class Log:
    """One row of the batch: what a seat has read and written."""

    seat: int
    row: int
    sample: Sample
    turns: list[Turn] = dataclasses.field(default_factory=list)
    next_state: bytes = b""
    next_observation: tuple[dict, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.sample.prompt) + len(self.sample.tokens)


@dataclasses.dataclass
class Episode:
    """One episode as the driver knows it. `outcome` is {seat: score}, None where a reward function
    is to score the last turn."""

    number: int
    prompt: int  # index into the prompts of the step
    logs: list[Log] = dataclasses.field(default_factory=list)
    speaker: Log | None = None  # whose turn it is, or was last
    finish: FinishReason | None = None
    outcome: dict | None = None
    parts: dict = dataclasses.field(default_factory=dict)
    failure: str = ""
    kind: str = ""
    calls: int = 0
    bad_turns: int = 0
    unknown_calls: int = 0
    failed_calls: int = 0
    begun_s: float = 0.0
    seconds: float = 0.0  # from its first prompt to its end
    waited_s: float = 0.0  # of these, those of the environment
    drift: list[str] = dataclasses.field(default_factory=list)
    call_seconds: list[float] = dataclasses.field(default_factory=list)  # of answers to calls

    @property
    def turns(self) -> int:
        return sum(len(log.turns) for log in self.logs)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Of all episodes of a step. A seat's rows are `max_rows` of the batch; `sampling` is a turn's,
    with the stops of tool calls."""

    limits: Limits
    sampling: Sampling
    seats: tuple[str, ...] = ("",)
    max_rows: int = 1
    episode_timeout_s: float = 0.0
    on_limit: float | None = 0.0

    @property
    def rows(self) -> int:
        """Rows of the batch that an episode may take."""
        return len(self.seats) * self.max_rows


class Driver:
    """Plays the episodes that `admit` was called for, with the slots of a sampler."""

    def __init__(self, sampler: Sampler, crew: EpisodeCrew, rules: Rules):
        self.sampler, self.crew, self.rules = sampler, crew, rules
        self.episodes: dict[int, Episode] = {}
        self._of_sample: dict[int, Episode] = {}  # by the id of its sample, which is its row
        self._deliveries: list[tuple[Sample, tuple[int, ...], Sampling]] = []
        # What begins with the same prompt and limit: (episode, seat, row, step) of each.
        self._prompts: dict[tuple, list[tuple[Episode, int, int, Step]]] = {}
        self._left = 0
        self.held = self.parked = self.live = self.dispatches = 0

    def admit(self, number: int, prompt: int, fields: dict, **start) -> None:
        """Begins an episode; `start`: seed, sample_seed, prompt_ids, messages."""
        self.episodes[number] = Episode(number, prompt)
        self._left += 1
        if number in hosts.mine(number + 1):
            self.crew.admit(number, fields, **start)

    def run(self, params, version: int, ended=lambda episode: None) -> list[Episode]:
        """Plays all episodes to their ends; `ended` is called with each as it ends."""
        while self._left:
            steps, now = self._news()
            for step in steps:
                self._act(step, now, ended)
            self._check_clocks(now, ended)
            self._submit()
            if self.sampler.pending:
                self._dispatch(params, version)
        return list(self.episodes.values())

    def close(self) -> None:
        """Drops what is still played, after a Ctrl-C, say."""
        for episode in self.episodes.values():
            if episode.finish is None:
                self.crew.drop(episode.number)

    # -- what has happened

    def _news(self) -> tuple[list[Step], float]:
        """What environments have said since the last look, in the order of episodes, the same on
        every host; and the first host's clock."""
        mine = self.crew.news(0.0 if self.sampler.pending else _NOTHING_S)
        if hosts.count() == 1:
            return sorted(mine, key=lambda step: step.episode), time.monotonic()
        told = [dataclasses.asdict(step) | {"state": step.state.hex()} for step in mine]
        everyone = hosts.gather({"steps": told, "now": time.monotonic()})
        steps = [_step_of(one) for host in everyone for one in host["steps"]]
        return sorted(steps, key=lambda step: step.episode), everyone[0]["now"]

    def _dispatch(self, params, version: int) -> None:
        live = min(self.sampler.engine.slots, self.sampler.pending)
        timing.decoding(live)
        events = self.sampler.step(params, version=version)
        beats.beat()
        self.dispatches += 1
        self.live += live
        self.held, self.parked = self.held + self.sampler.held, self.parked + self.sampler.parked
        for event in events:
            sample = event.sample
            if sample.finish_reason is not None and sample.id in self._of_sample:
                self._turn_ended(self._of_sample[sample.id], sample)

    def _turn_ended(self, episode: Episode, sample: Sample) -> None:
        """Hands a finished turn to the environment."""
        log = episode.speaker
        self._close_turn(log)
        if sample.finish_reason == FinishReason.ABORT:
            self._drop(episode)
            self._fail(episode, sample.error or "the model's logits are not finite", "not finite")
            return
        turn = log.turns[-1]
        ids = [int(i) for i in sample.tokens[turn.start - len(sample.prompt) :]]
        if episode.number in hosts.mine(episode.number + 1):
            self.crew.reply(
                episode.number, ids, sample.finish_reason.name.lower(),
                self.rules.limits.max_turns - episode.turns,
                self.rules.limits.max_tokens - log.tokens,
            )  # fmt: skip

    def _close_turn(self, log: Log) -> None:
        """The tokens behind the last observation are a turn."""
        start = self._begins(log)
        log.turns.append(
            Turn(start, log.tokens, state=log.next_state, observation=log.next_observation)
        )

    def _begins(self, log: Log) -> int:
        """Where the turn that is being written begins, in tokens of the log."""
        return len(log.sample.prompt) + log.sample.begun

    def _act(self, step: Step, now: float, ended) -> None:
        episode = self.episodes[step.episode]
        if episode.finish is not None:
            return  # a limit has ended it meanwhile
        if step.restart:
            self._release(episode)
            episode = self.episodes[step.episode] = Episode(
                episode.number, episode.prompt, begun_s=episode.begun_s
            )
        episode.begun_s = episode.begun_s or now
        episode.waited_s += step.seconds
        if step.drift:
            episode.drift.append(step.drift)
        self._credit(episode, step)
        if step.failure:
            self._fail(episode, step.failure, step.kind)
        elif step.ended:
            self._end(episode, self._reason(episode, step), step)
        else:
            self._go_on(episode, step)
        if episode.finish is not None:
            episode.seconds = now - episode.begun_s
            ended(episode)

    def _credit(self, episode: Episode, step: Step) -> None:
        """What a step says of the reply before it."""
        episode.calls += step.calls
        if step.calls:
            episode.call_seconds.append(step.seconds / step.calls)
        episode.bad_turns += step.bad_turn
        episode.unknown_calls += step.unknown_calls
        episode.failed_calls += step.failed_calls
        for name, value in step.parts.items():
            episode.parts[name] = episode.parts.get(name, 0.0) + value
        if episode.speaker is not None and episode.speaker.turns:
            turn = episode.speaker.turns[-1]
            turn.reward, turn.bad, turn.text = step.reward, step.bad_turn, step.text

    def _reason(self, episode: Episode, step: Step) -> FinishReason:
        """Of an episode that its environment ended. One that is scored by its last turn ended as
        that turn did: a cut answer is a cut episode."""
        if step.limit:
            return FinishReason.LENGTH if step.limit == "tokens" else FinishReason.TURNS
        if step.outcome is not None or episode.speaker is None:
            return FinishReason.STOP
        return FinishReason(int(episode.speaker.sample.finish_reason))

    # -- what follows

    def _go_on(self, episode: Episode, step: Step) -> None:
        """Puts what the environment said before the policy, unless a limit ends the episode."""
        rules, seat = self.rules, self.rules.seats.index(step.seat)
        if episode.turns >= rules.limits.max_turns:
            self._end(episode, FinishReason.TURNS)
            return
        logs = [log for log in episode.logs if log.seat == seat]
        begins = step.new_row or not logs
        room = rules.limits.max_tokens - len(step.ids) - (0 if begins else logs[-1].tokens)
        if room < 1 and not episode.turns:
            self._drop(episode)
            what = f"the prompt has {len(step.ids)} tokens, and max_tokens is"
            self._fail(episode, f"{what} {rules.limits.max_tokens}", "too long")
            return
        if room < 1 or begins and len(logs) == rules.max_rows:
            self._end(episode, FinishReason.LENGTH)
            return
        most = min(rules.sampling.max_response_tokens, room)
        if begins:
            if logs:
                self.sampler.release(logs[-1].sample)
            row = episode.number * rules.rows + seat * rules.max_rows + len(logs)
            self._prompts.setdefault((step.ids, most), []).append((episode, seat, row, step))
            return
        episode.speaker = logs[-1]
        episode.speaker.next_state, episode.speaker.next_observation = step.state, step.messages
        sampling = dataclasses.replace(rules.sampling, max_response_tokens=most)
        self._deliveries.append((logs[-1].sample, step.ids, sampling))

    def _submit(self) -> None:
        """Hands the sampler what is new: observations all at once, and each prompt once for all
        that begin with it, as siblings do."""
        if self._deliveries:
            self.sampler.deliver(self._deliveries)
        for (ids, most), begun in self._prompts.items():
            begun = [one for one in begun if one[0].finish is None]
            sampling = dataclasses.replace(self.rules.sampling, max_response_tokens=most)
            rows = [row for _, _, row, _ in begun]
            options = dict(n=len(rows), request_ids=rows, hold=True)
            samples = self.sampler.submit(ids, sampling, **options) if rows else []
            for sample, (episode, seat, row, step) in zip(samples, begun, strict=True):
                episode.speaker = Log(seat, row, sample, [], step.state, step.messages)
                episode.logs.append(episode.speaker)
                self._of_sample[row] = episode
        self._deliveries, self._prompts = [], {}

    def _end(self, episode: Episode, reason: FinishReason, step: Step | None = None) -> None:
        """Ends an episode: with its own outcome, or by a limit."""
        rules, said = self.rules, step is not None and step.returned
        episode.finish = reason
        if said:
            episode.outcome = step.outcome
            episode.parts |= step.outcome_parts
        elif rules.on_limit is not None:
            episode.outcome = {seat: rules.on_limit for seat in rules.seats}
        if step is None:
            self._drop(episode)
        self._release(episode)
        self._left -= 1

    def _fail(self, episode: Episode, why: str, kind: str) -> None:
        episode.finish, episode.failure, episode.kind = FinishReason.ABORT, why, kind or "other"
        self._release(episode)
        self._left -= 1

    def _drop(self, episode: Episode) -> None:
        if episode.number in hosts.mine(episode.number + 1):
            self.crew.drop(episode.number)

    def _release(self, episode: Episode) -> None:
        for log in episode.logs:
            self._deliveries = [one for one in self._deliveries if one[0] is not log.sample]
            if log.sample.finish_reason is None:
                self.sampler.abort(log.sample)
            else:
                self.sampler.release(log.sample)
            self._of_sample.pop(log.row, None)

    def _check_clocks(self, now: float, ended) -> None:
        """Ends episodes that are over episode_timeout_s, in the middle of a turn, too."""
        limit = self.rules.episode_timeout_s
        if not limit:
            return
        for episode in self.episodes.values():
            if episode.finish is not None or not episode.begun_s or now - episode.begun_s <= limit:
                continue
            log = episode.speaker
            if log is not None and log.tokens > self._begins(log) and not _waits(log):
                self._close_turn(log)
            self._end(episode, FinishReason.TIME)
            episode.seconds = now - episode.begun_s
            ended(episode)


def _waits(log: Log) -> bool:
    """Whether the log's last turn has ended, and its environment is at work."""
    return bool(log.turns) and log.turns[-1].end == log.tokens


def _step_of(told: dict) -> Step:
    """A step as another host has told it."""
    lists = {name: tuple(told[name]) for name in ("ids", "messages")}
    return Step(**{**told, **lists, "state": bytes.fromhex(told["state"])})
