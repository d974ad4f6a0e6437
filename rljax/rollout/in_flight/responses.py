"""Responses in flight: groups of samples of one response each, which began at different steps."""

import dataclasses
from collections.abc import Callable

from rljax import beats, hosts
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.rewards.pool.pool import Pending, RewardPool, Score
from rljax.rollout.clock import Clock
from rljax.rollout.report import RewardReport
from rljax.rollout.reward import Reward
from rljax.rollout.rollout import RolloutConfig
from rljax.sampler import Sampler
from rljax.sampler.host_rollout import batch_of, engine_of_rows
from rljax.sampler.keys import request_keys
from rljax.sampler.sample import Sample
from rljax.tracking import timing

_OF_SCORE = ("value", "parts", "status", "seconds", "message")


@dataclasses.dataclass(eq=False)
class _Group:
    """The samples of one prompt, and the scores of those that have one."""

    ticket: int
    prompts: Prompts  # one
    samples: list[Sample]
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)  # by sample
    told: bool = False  # that all have ended, where that counts and not each sample

    @property
    def ended(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)


class SlotUse:
    """How busy the slots of a sampler are between two looks."""

    def __init__(self, sampler: Sampler):
        self.sampler, self._seen = sampler, (0, 0, 0, 0)

    def taken(self) -> dict[str, float]:
        """Since the last call; how full pages and drafts were so far."""
        sampler, (dispatches, steps, live, reread) = self.sampler, self._seen
        self._seen = (
            sampler.dispatches, sampler.slot_steps, sampler.live_slot_steps, sampler.reread_tokens
        )  # fmt: skip
        return {
            "slots/live_share": (sampler.live_slot_steps - live)
            / max(sampler.slot_steps - steps, 1),
            "slots/dispatches": float(sampler.dispatches - dispatches),
            "slots/decode_steps": float((sampler.slot_steps - steps) // sampler.engine.slots),
            "slots/reread_tokens": float(sampler.reread_tokens - reread),
            **sampler.page_metrics(),
            **sampler.draft_metrics(),
        }


class Responses:
    """What a source in flight decodes where an episode is one response.

    `reward` scores them: functions in processes as they end, on the host that owns the group; what
    computes on the mesh, all groups of a step at once.
    """

    def __init__(self, reward: Callable, cfg: RolloutConfig, columns: int, clock: Clock):
        self.reward, self.cfg, self.columns, self.clock = reward, cfg, columns, clock
        self.n = cfg.samples_per_prompt
        pool = reward.pool if isinstance(reward, Reward) and reward.model is None else None
        self.pool = pool if isinstance(pool, RewardPool) else None
        self.sampler: Sampler | None = None
        self._groups: dict[int, _Group] = {}
        # What this host's processes were asked for: group, samples, and when.
        self._asked: list[tuple[_Group, list[int], Pending, int]] = []
        self._complete: list[int] = []

    @property
    def scores_early(self) -> bool:
        """Whether a group's scores are known before it is taken."""
        return self.pool is not None

    def prepare(self, actor, rows: int) -> None:
        """Makes the sampler, once: slots for `rows` samples, or as many as the config says."""
        if self.sampler is None:
            decoding, sampling = actor.decoding, self.cfg.sampling
            tokens = self.columns + sampling.max_response_tokens
            model = decoding.of(actor.model)
            engine = engine_of_rows(model, rows, tokens, sampling, decoding)
            self._new_sampler(engine, decoding.decode)

    def _new_sampler(self, engine, decode) -> None:
        self.sampler = None  # before the new one takes its memory
        self.sampler = Sampler(engine, chunk_tokens=self.columns, decode=decode)
        self._use = SlotUse(self.sampler)

    # -- groups come

    def begin(self, ticket: int, at: int, prompts: Prompts, key) -> None:
        """Begins the group of a ticket: prompt number `at` of the step that has this key."""
        keys = fetch(request_keys(key, (at + 1) * self.n))[at * self.n :]
        ids = range(ticket * self.n, (ticket + 1) * self.n)
        prompt, options = prompts.tokens[0, : prompts.lengths[0]], dict(n=self.n, keys=keys)
        samples = self.sampler.submit(prompt, self.cfg.sampling, request_ids=ids, **options)
        self._groups[ticket] = _Group(ticket, prompts, samples)

    def dispatch(self, weights, version: int, keep_cache: bool) -> None:
        """Decodes one dispatch, or waits a little for scores where nothing is left to decode."""
        sampler = self.sampler
        if not sampler.pending:
            self.clock.idle()
            return
        timing.decoding(min(sampler.engine.slots, sampler.pending))
        events = sampler.step(weights, version=version, keep_cache=keep_cache)
        self.clock.tick()
        beats.beat()
        for event in events:
            if event.sample.finish_reason is not None:
                self._sample_ended(self._groups[event.sample.id // self.n], event.sample)

    def _sample_ended(self, group: _Group, sample: Sample) -> None:
        if self.scores_early and not self.pool.grouped:
            self._ask(group, [sample.id % self.n])
        elif group.ended and not group.told:  # several may have ended in one dispatch
            group.told = True
            if self.scores_early:
                self._ask(group, list(range(self.n)))
            else:
                self._complete.append(group.ticket)

    def _ask(self, group: _Group, which: list[int]) -> None:
        if group.ticket % hosts.count() == hosts.index():
            rows = [self._row(group, i, group.ticket) for i in which]
            self._asked.append((group, which, self.pool.submit(rows), self.clock.now))

    def _row(self, group: _Group, i: int, number: int):
        """What the reward reads of sample i."""
        start, sample = int(group.prompts.response_starts[0]), group.samples[i]
        ids, reason = sample.ids[start:].tolist(), int(sample.finish_reason)
        return self.reward.sample(group.prompts.records[0], ids, reason, number)

    # -- groups go

    def ended(self) -> list[int]:
        """The tickets whose samples have all ended and been scored since the last call: the same on
        every host."""
        told, waiting = [], []
        for asked in self._asked:
            group, which, pending, since = asked
            if group.ticket not in self._groups:
                continue  # it was dropped
            if not self.clock.due(since, pending.done):
                waiting.append(asked)
                continue
            for i, score in zip(which, pending.result(), strict=True):
                told.append((group.ticket, i, told_score(score)))
        self._asked = waiting
        for ticket, i, score in (one for host in hosts.gather(told) for one in host):
            group = self._groups[ticket]
            group.scores[i] = score_of(score)
            if len(group.scores) == self.n:
                self._complete.append(ticket)
        complete, self._complete = sorted(self._complete), []
        return complete

    def is_live(self, ticket: int) -> bool:
        """Whether the scores of a complete group differ."""
        scores = self._groups[ticket].scores.values()
        return len({score.value for score in scores if score.status == "ok"}) > 1

    def tokens(self, ticket: int) -> int:
        """How many tokens the responses of a group have."""
        return sum(len(sample.tokens) for sample in self._groups[ticket].samples)

    def drop(self, ticket: int) -> None:
        """Nobody learns from a complete group."""
        del self._groups[ticket]

    def collect(self, tickets: list[int], mesh) -> tuple[Batch, RewardReport, Prompts]:
        """The batch of complete groups, in this order."""
        groups = [self._groups.pop(ticket) for ticket in tickets]
        prompts = groups[0].prompts
        for group in groups[1:]:
            prompts = prompts.joined(group.prompts)
        samples = [sample for group in groups for sample in group.samples]
        tokens = self.columns + self.cfg.sampling.max_response_tokens
        batch = place(batch_of(samples, tokens, self.n), mesh)
        if not self.scores_early:
            return (*self.reward(batch, prompts), prompts)
        rows = [self._row(group, i, p) for p, group in enumerate(groups) for i in range(self.n)]
        scores = [group.scores[i] for group in groups for i in range(self.n)]
        with timing.timed("reward"):
            return (*self.reward.rewarded(batch, prompts, rows, scores), prompts)

    def metrics(self) -> dict[str, float]:
        """How busy the slots were since the last call, and how full pages and drafts were."""
        return self._use.taken()

    # -- a checkpoint

    @property
    def tickets(self) -> set[int]:
        """Of the groups that began and were not taken."""
        return set(self._groups)

    def get_state(self) -> dict:
        """Every group that began and was not taken, as JSON."""
        return {
            str(ticket): {
                "record": saved_record(group.prompts.records[0]),
                "samples": [sample.get_state() for sample in group.samples],
                "scores": {str(i): told_score(score) for i, score in group.scores.items()},
            }
            for ticket, group in self._groups.items()
        }

    def set_state(self, state: dict, prompts: Callable[[dict], Prompts]) -> None:
        """Goes on from `get_state` with a sampler that has read nothing. `prompts` finds the prompt
        of a saved record."""
        for _, _, pending, _ in self._asked:
            pending.cancel()
        self._new_sampler(self.sampler.engine, self.sampler.decode)
        self.clock.now, self._groups, self._asked, self._complete = 0, {}, [], []
        unfinished = []
        for ticket, saved in sorted((int(ticket), saved) for ticket, saved in state.items()):
            samples = [Sample.from_state(one, self.cfg.sampling) for one in saved["samples"]]
            group = self._groups[ticket] = _Group(ticket, prompts(saved["record"]), samples)
            group.scores = {int(i): score_of(told) for i, told in saved["scores"].items()}
            for i, sample in enumerate(samples):
                if sample.finish_reason is None:
                    unfinished.append(sample)
                elif i not in group.scores and not (self.scores_early and self.pool.grouped):
                    self._sample_ended(group, sample)
            if group.ended and not group.scores and self.scores_early and self.pool.grouped:
                self._ask(group, list(range(self.n)))
            if len(group.scores) == self.n:
                self._complete.append(ticket)
        self.sampler.restore(unfinished)


def saved_record(record: PromptRecord) -> dict:
    """What finds a record in the data again."""
    return {"prompt_id": record.prompt_id, "index": record.index, "source": record.source}


def told_score(score: Score) -> list:
    """A score as JSON, to other hosts and in checkpoints. When it was known is of a clock here."""
    return [*(getattr(score, name) for name in _OF_SCORE), score.over_limit]


def score_of(told: list) -> Score:
    *fields, over_limit = told
    return Score(*fields, over_limit=over_limit)
