"""Episodes: the policy's turns decode in slots, the environments answer in their workers.

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
from collections.abc import Callable

from rljax import heartbeat, hosts
from rljax.batch import FinishReason
from rljax.environments.crew import EpisodeCrew
from rljax.environments.messages import Step
from rljax.metric import Metric
from rljax.rollout.players.clock import Clock
from rljax.rollout.players.episodes.log import (
    EpisodeRules,
    Log,
    Trajectory,
    Transition,
    limited_sampling,
    replies_of,
    reply_of,
    summed_parts,
)
from rljax.sampler import Sampler, Sampling
from rljax.sampler.sample import Sample
from rljax.tracking import timing

METRICS = {
    "slots/live": Metric(
        "slots of the sampler that decode, mean over dispatches",
        "slots",
        "most of all slots; the others wait for tools or for the last episodes",
    ),
    "slots/held": Metric(
        "slots whose episode waits for the environment, mean over dispatches",
        "slots",
        "below a third of slots/live; more: more slots, or faster tools",
    ),
    "slots/parked": Metric(
        "episodes put aside while others decode in their slots, mean", "episodes"
    ),
}

_NOTHING_S = 0.02  # seconds to wait for news while nothing decodes
_LATE_S = 1.0  # seconds to wait at a time for news that are due

# The numbers, in the crew, of episodes that are played at once, and of those in flight.
AT_ONCE, IN_FLIGHT = range(2**30, 2**31 - 1), range(2**30)


class Driver:
    """Plays the episodes that were admitted, with the slots of a sampler. Until none is `left`:
    `look`, then `dispatch`. `numbers` are those of its episodes in the crew, in their order.

    `branches(episode)` is asked where a turn has ended and the episode goes on: the episodes that
    it returns, new ones, go on from there as well. Each has the same turns so far and draws by its
    own keys; its environment is played again from the recorded replies."""

    def __init__(
        self,
        sampler: Sampler,
        crew: EpisodeCrew,
        rules: EpisodeRules,
        numbers: range = AT_ONCE,
        clock: Clock | None = None,
        branches: Callable[[Trajectory], list[Trajectory]] | None = None,
    ):
        self.sampler, self.crew, self.rules, self.numbers = sampler, crew, rules, numbers
        self.clock, self.branches = clock or Clock(), branches
        self.episodes: dict[int, Trajectory] = {}
        self._of_sample: dict[int, Trajectory] = {}  # by the id of its sample
        self._deliveries: list[tuple[Sample, tuple[int, ...], Sampling]] = []
        # Logs that begin with the same prompt and limits: (episode, seat, row, step) of each.
        self._prompts: dict[tuple, list[tuple[Trajectory, int, int, Step]]] = {}
        self._came: list[Step] = []  # steps that have come and do not count yet
        self._ended: list[Trajectory] = []  # since the last look
        self.left = 0
        self.seconds = 0.0  # seconds of playing, the same on all hosts
        self._now: float | None = None  # the first host's clock at the last look
        self._held = self._parked = self._live = self._dispatches = self._reread = 0

    def admit(self, episode: Trajectory) -> None:
        """Begins an episode, or goes on with one where it stands: its samples are the caller's to
        bring into the sampler."""
        self.episodes[episode.number] = episode
        if episode.finish is not None:
            return
        self.left += 1
        self._open(episode)

    def _open(self, episode: Trajectory) -> None:
        """Has the environment of an episode played up to where the episode stands."""
        self._of_sample |= {log.sample.id: episode for log in episode.logs}
        replies = replies_of(episode, self.rules.limits)
        if len(episode.marks) <= len(replies):
            episode.asked = self.clock.now
        if episode.is_here:
            self.crew.admit(
                self.numbers[episode.number],
                attempt=episode.attempt,
                marks=episode.marks,
                replies=replies,
                **episode.start,
            )

    def run(self, params, version: int, ended=lambda episode: None) -> list[Trajectory]:
        """Plays all episodes to their ends; `ended` is called with each as it
        ends. Returns them."""
        while self.left:
            for episode in self.look():
                ended(episode)
            self.dispatch(params, version)
        return list(self.episodes.values())

    def look(self) -> list[Trajectory]:
        """Acts on what environments have said. Returns the episodes that ended since
        the last look."""
        for step in self._news():
            self._act(step)
        self._check_clocks()
        self._submit()
        ended, self._ended = self._ended, []
        return ended

    def rest(self) -> None:
        """Stops the clock until the next look: the seconds until then count for no episode."""
        self._now = None

    def close(self) -> None:
        """Drops what is still played, after a Ctrl-C, say."""
        for episode in self.episodes.values():
            if episode.finish is None:
                self._drop(episode)

    def take_use(self) -> dict[str, float]:
        """Returns how slots were used since the last call, means over dispatches; tokens read
        again."""
        count = max(self._dispatches, 1)
        use = {"live": self._live, "held": self._held, "parked": self._parked}
        reread, self._reread = self._reread, self.sampler.reread_tokens
        self._held = self._parked = self._live = self._dispatches = 0
        means = {f"slots/{name}": number / count for name, number in use.items()}
        return means | {"slots/reread_tokens": float(self._reread - reread)}

    # -- what has happened

    def _news(self) -> list[Step]:
        """Gathers the steps of environments that count now, in the order of episodes, the same on
        every host."""
        steps, now = self._own_news(), time.monotonic()
        if hosts.count() > 1:
            records = [
                dataclasses.asdict(step) | {"state": step.state.hex(), "mark": step.mark.hex()}
                for step in steps
            ]
            host_news = hosts.gather({"steps": records, "now": now})
            steps = [_step_of(record) for host in host_news for record in host["steps"]]
            now = host_news[0]["now"]
        self.seconds += 0.0 if self._now is None else now - self._now
        self._now = now
        return sorted(steps, key=lambda step: step.episode)

    def _own_news(self) -> list[Step]:
        """Returns the steps of this host's environments that count now. What is due is waited
        for."""
        logical, numbers = self.clock.dispatches, self.numbers
        wait_s = 0.0 if self.sampler.pending or logical else _NOTHING_S
        steps = [step for step in self._came if self._is_open(step)]
        steps += self.crew.news(wait_s, numbers)
        due = set()
        for episode in self.episodes.values() if logical else ():
            if episode.asked is not None and episode.is_here:
                if self.clock.now >= episode.asked + logical:
                    due.add(numbers[episode.number])
        while due - {step.episode for step in steps}:
            steps += self.crew.news(_LATE_S, numbers)
        counts = [self._counts(step) for step in steps]
        self._came = [
            step for step, counts_now in zip(steps, counts, strict=True) if not counts_now
        ]
        return [step for step, counts_now in zip(steps, counts, strict=True) if counts_now]

    def _is_open(self, step: Step) -> bool:
        """Returns whether the episode of a step that came before has not been ended by a limit."""
        episode = self.episodes.get(step.episode - self.numbers.start)
        return episode is not None and episode.finish is None

    def _counts(self, step: Step) -> bool:
        """Returns whether a step that has come counts now. One that nobody has asked for, of an
        episode that begins anew, always does."""
        asked_at = self.episodes[step.episode - self.numbers.start].asked
        return asked_at is None or self.clock.due(asked_at, lambda: True)

    def dispatch(self, params, version: int, keep_cache: bool = True) -> bool:
        """Decodes one dispatch, if there is something to decode. Returns whether there was."""
        self.clock.tick()
        if not self.sampler.pending:
            return False
        live = min(self.sampler.engine.slots, self.sampler.pending)
        timing.decoding(live)
        events = self.sampler.step(params, version=version, keep_cache=keep_cache)
        heartbeat.beat()
        self._dispatches += 1
        self._live += live
        self._held += self.sampler.held
        self._parked += self.sampler.parked
        for event in events:
            sample = event.sample
            if sample.finish_reason is not None and sample.id in self._of_sample:
                self._turn_ended(self._of_sample[sample.id], sample)
        return True

    def _turn_ended(self, episode: Trajectory, sample: Sample) -> None:
        """Hands a finished turn to the environment."""
        self._close_turn(episode)
        if sample.finish_reason == FinishReason.ABORT:
            self._drop(episode)
            self._fail(episode, sample.error or "the model's logits are not finite", "not finite")
            return
        episode.asked = self.clock.now
        if episode.is_here:
            reply = reply_of(episode.speaker, episode.speaker.turns[-1], self.rules.limits)
            self.crew.reply(self.numbers[episode.number], *reply)

    def _close_turn(self, episode: Trajectory) -> None:
        """Records the tokens behind the last observation as a turn."""
        log, reason = episode.speaker, episode.speaker.sample.finish_reason
        turn = Transition(self._begins(log), log.tokens, episode.turns + 1)
        turn.finish = "stop" if reason is None else reason.name.lower()
        turn.state, turn.observation = log.next_state, log.next_observation
        log.turns.append(turn)

    def _begins(self, log: Log) -> int:
        """Returns where the turn that is being written begins, in tokens of the log."""
        return len(log.sample.prompt) + log.sample.begun

    def _act(self, step: Step) -> None:
        episode = self.episodes[step.episode - self.numbers.start]
        if episode.finish is not None:
            return  # a limit has ended it meanwhile
        if step.restart:
            self._release(episode)
            episode = self.episodes[episode.number] = episode.anew()
            if episode.origin is not None:
                self._drop(episode)
                self._return_to_origin(episode)
                return
        episode.asked = None
        episode.marks.append(step.mark)
        if episode.begun_s is None:
            episode.begun_s = self.seconds
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

    def _credit(self, episode: Trajectory, step: Step) -> None:
        """Credits a step's reward to the reply before it."""
        episode.calls += step.calls
        if step.calls:
            episode.call_seconds.append(step.seconds / step.calls)
        episode.bad_turns += step.bad_turn
        episode.unknown_calls += step.unknown_calls
        episode.failed_calls += step.failed_calls
        episode.parts = summed_parts(episode.parts, step.parts)
        if episode.speaker is not None and episode.speaker.turns:
            turn = episode.speaker.turns[-1]
            turn.reward, turn.bad, turn.text = step.reward, step.bad_turn, step.text

    def _reason(self, episode: Trajectory, step: Step) -> FinishReason:
        """Returns the finish reason of an episode that its environment ended. One that is scored by
        its last turn ended as that turn did: a cut answer is a cut episode."""
        if step.limit:
            return FinishReason.LENGTH if step.limit == "tokens" else FinishReason.TURNS
        if step.outcome is not None or episode.speaker is None:
            return FinishReason.STOP
        return FinishReason(int(episode.speaker.sample.finish_reason))

    # -- what follows

    def _go_on(self, episode: Trajectory, step: Step) -> None:
        """Puts what the environment said before the policy, unless a limit ends the episode."""
        rules = self.rules
        if episode.turns >= rules.limits.max_turns:
            self._end(episode, FinishReason.TURNS)
            return
        logs, begins, room = self._logs_of(episode, step)
        if room < 1 and not episode.turns:
            self._drop(episode)
            problem = f"the prompt has {len(step.ids)} tokens, and max_tokens is"
            self._fail(episode, f"{problem} {rules.limits.max_tokens}", "too long")
            return
        if room < 1 or begins and len(logs) == rules.max_rows:
            self._end(episode, FinishReason.LENGTH)
            return
        self._branched(episode, step)
        self._put(episode, step)

    def _logs_of(self, episode: Trajectory, step: Step) -> tuple[list[Log], bool, int]:
        """Returns the logs of the seat that plays next, whether it begins another log, and how many
        tokens its turn may have."""
        seat = self.rules.seats.index(step.seat)
        logs = [log for log in episode.logs if log.seat == seat]
        begins = step.new_row or not logs
        log_tokens = 0 if begins else logs[-1].tokens
        return logs, begins, self.rules.limits.max_tokens - len(step.ids) - log_tokens

    def _branched(self, episode: Trajectory, step: Step) -> None:
        """Has new episodes go on from where this one stands, with what `step` says. Nothing that
        was read of the log that grows is read again."""
        branches = [] if self.branches is None else self.branches(episode)
        if not branches:
            return
        rules, seat = self.rules, self.rules.seats.index(step.seat)
        logs, begins, room = self._logs_of(episode, step)
        row, samples = seat * rules.max_rows + len(logs) - 1, []
        if not begins:
            samples = self.sampler.branch(
                logs[-1].sample,
                len(logs[-1].sample.tokens),
                len(branches),
                hold=True,
                more=step.ids,
                sampling=limited_sampling(rules.sampling, step, room),
                request_ids=[branch.number * rules.rows + row for branch in branches],
            )
        episode.origin = episode.get_state(self.seconds), step
        for index, branch in enumerate(branches):
            # The seeds of the environment are its siblings': the same replies lead to the same.
            branch.start, branch.begun_s, branch.origin = (
                episode.start,
                episode.begun_s,
                episode.origin,
            )
            self.episodes[branch.number] = branch
            self.left += 1
            if begins:
                self._return_to_origin(branch)
            else:
                branch.keys[row] = samples[index].key
                self._return_to_origin(branch, samples[index])

    def _return_to_origin(self, episode: Trajectory, branch: Sample | None = None) -> None:
        """Brings an episode to where it branched off, its sample `branch` behind what its
        environment says there; without one, what was read before is read again."""
        state, step = episode.origin
        attempt, begun_s = episode.attempt, episode.begun_s
        episode.set_state(state, self.rules.sampling)
        episode.attempt, episode.begun_s = attempt, begun_s
        counts: dict[int, int] = {}
        for log in episode.logs:
            row = log.seat * self.rules.max_rows + counts.get(log.seat, 0)
            counts[log.seat] = counts.get(log.seat, 0) + 1
            log.sample.id = episode.number * self.rules.rows + row
            log.sample.key = episode.keys[row]
        speaker = None
        if branch is not None:
            speaker = next(log for log in episode.logs if log.sample.id == branch.id)
            speaker.sample = branch
            self._speaks(episode, speaker, step)
        self.sampler.restore([log.sample for log in episode.logs if log is not speaker])
        self._open(episode)
        if branch is None:
            self._put(episode, step)

    def _put(self, episode: Trajectory, step: Step) -> None:
        """Puts what the environment said, for which there is room, before the policy."""
        rules, seat = self.rules, self.rules.seats.index(step.seat)
        logs, begins, room = self._logs_of(episode, step)
        sampling = limited_sampling(rules.sampling, step, room)
        if begins:
            if logs:
                self.sampler.release(logs[-1].sample)
            row = episode.number * rules.rows + seat * rules.max_rows + len(logs)
            self._prompts.setdefault((step.ids, sampling), []).append((episode, seat, row, step))
            return
        self._speaks(episode, logs[-1], step)
        self._deliveries.append((logs[-1].sample, step.ids, sampling))

    def _speaks(self, episode: Trajectory, log: Log, step: Step) -> None:
        """Notes which log goes on, and what it answers."""
        episode.speaker, log.next_state, log.next_observation = log, step.state, step.messages

    def _submit(self) -> None:
        """Hands the sampler what is new: observations all at once, and each prompt once for all
        that begin with it, as siblings do."""
        rules = self.rules
        if self._deliveries:
            self.sampler.deliver(self._deliveries)
        for (ids, sampling), starts in self._prompts.items():
            starts = [start for start in starts if start[0].finish is None]
            rows = [row for _, _, row, _ in starts]
            keys = [episode.keys[row % rules.rows] for episode, _, row, _ in starts]
            options = dict(n=len(rows), request_ids=rows, keys=keys, hold=True)
            samples = self.sampler.submit(ids, sampling, **options) if rows else []
            for sample, (episode, seat, row, step) in zip(samples, starts, strict=True):
                episode.speaker = Log(seat, sample, [], step.state, step.messages)
                episode.logs.append(episode.speaker)
                self._of_sample[row] = episode
        self._deliveries, self._prompts = [], {}

    def _end(self, episode: Trajectory, reason: FinishReason, step: Step | None = None) -> None:
        """Ends an episode with the outcome of its environment, or by a limit."""
        rules, returned = self.rules, step is not None and step.returned
        episode.finish = reason
        if returned:
            episode.outcome = step.outcome
            episode.parts = summed_parts(episode.parts, step.outcome_parts)
        elif rules.on_limit is not None:
            episode.outcome = {seat: rules.on_limit for seat in rules.seats}
        if step is None:
            self._drop(episode)
        self._over(episode)

    def _fail(self, episode: Trajectory, message: str, kind: str) -> None:
        episode.finish, episode.failure, episode.kind = FinishReason.ABORT, message, kind or "other"
        self._over(episode)

    def _over(self, episode: Trajectory) -> None:
        self._release(episode)
        episode.seconds = self.seconds - episode.begun_s
        self.left -= 1
        self._ended.append(episode)

    def _drop(self, episode: Trajectory) -> None:
        if episode.is_here:
            self.crew.drop(self.numbers[episode.number])

    def _release(self, episode: Trajectory) -> None:
        for log in episode.logs:
            self._deliveries = [
                delivery for delivery in self._deliveries if delivery[0] is not log.sample
            ]
            if log.sample.finish_reason is None:
                self.sampler.abort(log.sample)
            else:
                self.sampler.release(log.sample)
            self._of_sample.pop(log.sample.id, None)

    def _check_clocks(self) -> None:
        """Ends episodes that are over episode_timeout_s, in the middle of a turn, too."""
        limit = self.rules.episode_timeout_s
        if not limit:
            return
        for episode in self.episodes.values():
            if episode.finish is not None or episode.begun_s is None:
                continue
            if self.seconds - episode.begun_s <= limit:
                continue
            log = episode.speaker
            if log is not None and log.tokens > self._begins(log) and not _waits(log):
                self._close_turn(episode)
            self._end(episode, FinishReason.TIME)


def _waits(log: Log) -> bool:
    """Returns whether the log's last turn has ended, and its environment is at work."""
    return bool(log.turns) and log.turns[-1].end == log.tokens


def _step_of(record: dict) -> Step:
    """Returns the Step that another host has sent as JSON."""
    lists = {name: tuple(record[name]) for name in ("ids", "messages", "stop")}
    texts = {name: bytes.fromhex(record[name]) for name in ("state", "mark")}
    return Step(**{**record, **lists, **texts})
