"""Responses in flight: groups of samples of one response each, which began at different steps."""

import dataclasses
from collections.abc import Callable

import numpy as np

from rljax import heartbeat, hosts
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.errors import InputError
from rljax.rewards.pool.pool import Pending, Score
from rljax.rollout.players.clock import Clock
from rljax.rollout.rollout import RolloutConfig
from rljax.rollout.scoring.report import RewardReport
from rljax.rollout.scoring.reward import Reward
from rljax.sampler import Engine, Sampler
from rljax.sampler.host_rollout import batch_of, engine_of_rows
from rljax.sampler.keys import request_keys
from rljax.sampler.prompt_images import of_prompt
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
    asked: set[int] = dataclasses.field(default_factory=set)  # samples that have a score, or wait

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

    def __init__(self, reward: Reward, cfg: RolloutConfig, columns: int, clock: Clock):
        self.reward, self.cfg, self.columns, self.clock = reward, cfg, columns, clock
        self.n = cfg.samples_per_prompt
        self.pool = reward.row_pool
        self.sampler: Sampler | None = None
        self._engine: Engine | None = None
        self._groups: dict[int, _Group] = {}
        # What this host's processes were asked for: group, samples, and when.
        self._asked: list[tuple[_Group, list[int], Pending, int]] = []
        self._complete: list[int] = []

    @property
    def scores_early(self) -> bool:
        """Whether a group's scores are known before it is taken."""
        return self.pool is not None

    def prepare(self, actor, rows: int) -> None:
        """Makes the sampler where there is none: slots for `rows` samples, or as many as the config
        says. What is in flight goes on there."""
        if self.sampler is not None:
            return
        decoding, sampling = actor.decoding, self.cfg.sampling
        if self._engine is None:
            tokens = self.columns + sampling.max_response_tokens
            model = decoding.of(actor.model)
            self._engine = engine_of_rows(model, rows, tokens, sampling, decoding)
        self.sampler = Sampler(self._engine, chunk_tokens=self.columns, decode=decoding.decode)
        self._use = SlotUse(self.sampler)
        samples = [sample for group in self._groups.values() for sample in group.samples]
        self.sampler.restore([one for one in samples if one.finish_reason is None])
        for group in self._groups.values():
            self._ended(group)
            if len(group.scores) == self.n:
                self._complete.append(group.ticket)

    # -- groups come

    def begin(self, ticket: int, at: int, prompts: Prompts, key) -> None:
        """Begins the group of a ticket: prompt number `at` of the step that has this key."""
        keys = fetch(request_keys(key, self.cfg.prompts_per_step * self.n))
        keys = keys[at * self.n : (at + 1) * self.n]
        ids = range(ticket * self.n, (ticket + 1) * self.n)
        prompt = prompts.tokens[0, : prompts.lengths[0]]
        options = dict(n=self.n, keys=keys, images=of_prompt(prompts.images, 0, len(prompt)))
        samples = self.sampler.submit(prompt, self.cfg.sampling, request_ids=ids, **options)
        self._groups[ticket] = _Group(ticket, prompts, samples)

    def dispatch(self, weights, version: int, keep_cache: bool) -> bool:
        """Decodes one dispatch, or waits a little for scores where nothing is left to decode ->
        whether it decoded."""
        sampler = self.sampler
        if not sampler.pending:
            self.clock.idle()
            return False
        timing.decoding(min(sampler.engine.slots, sampler.pending))
        events = sampler.step(weights, version=version, keep_cache=keep_cache)
        self.clock.tick()
        heartbeat.beat()
        if not sampler.pending:
            timing.decoding(0)
        for event in events:
            if event.sample.finish_reason is not None:
                self._ended(self._groups[event.sample.id // self.n])
        return True

    def _ended(self, group: _Group) -> None:
        """Asks for the scores of samples that have ended, where nobody did. (Several may have ended
        in one dispatch.)"""
        if self.scores_early and not self.pool.grouped:
            for i, sample in enumerate(group.samples):
                if sample.finish_reason is not None and i not in group.asked:
                    self._ask(group, [i])
        elif group.ended and not group.asked:
            group.asked.update(range(self.n))
            if self.scores_early:
                self._ask(group, list(range(self.n)))
            else:
                self._complete.append(group.ticket)

    def _ask(self, group: _Group, which: list[int]) -> None:
        group.asked.update(which)
        if group.ticket % hosts.count() == hosts.index():
            rows = [self._row(group, i, group.ticket) for i in which]
            self._asked.append((group, which, self.pool.submit(rows), self.clock.now))

    def _row(self, group: _Group, i: int, number: int):
        """What the reward reads of sample i."""
        start, sample = int(group.prompts.response_starts[0]), group.samples[i]
        ids, reason = sample.ids[start:].tolist(), int(sample.finish_reason)
        return self.reward.fields(group.prompts.records[0], ids, reason, number)

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
        batch = place(batch_of(samples, tokens, self.n, prompts.images), mesh)
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

    def set_state(self, state: dict, find: Callable[[dict], Prompts]) -> None:
        """Goes on from `get_state` with a sampler that will have read nothing. `find` brings the
        prompt of a saved record."""
        for _, _, pending, _ in self._asked:
            pending.cancel()
        self._groups, self._asked = {}, []
        for ticket, saved in sorted((int(ticket), saved) for ticket, saved in state.items()):
            prompts = find(saved["record"])
            samples = [Sample.from_state(one, self.cfg.sampling) for one in saved["samples"]]
            for sample in samples:  # the state has no images: the data has them
                sample.images = of_prompt(prompts.images, 0, len(sample.prompt))
            scores = {int(i): score_of(told) for i, told in saved["scores"].items()}
            group = self._groups[ticket] = _Group(ticket, prompts, samples, scores, set(scores))
            self._check(group)
        self.read_again()

    def _check(self, group: _Group) -> None:
        """Raises InputError where the samples of a checkpoint are not of this run."""
        samples, sampling, record = group.samples, self.cfg.sampling, group.prompts.records[0]
        if len(samples) != self.n:
            rule = f"the prompts in flight have {len(samples)} samples each"
            fix = f"as it was: {len(samples)}"
            raise InputError("batch.samples_per_prompt", value=self.n, rule=rule, fix=fix)
        most = max(sample.sampling.max_response_tokens for sample in samples)
        if most > sampling.max_response_tokens:
            value, rule = sampling.max_response_tokens, f"responses in flight have room for {most}"
            raise InputError("sampler.max_response_tokens", value=value, rule=rule, fix=f"{most}")
        prompt = group.prompts.tokens[0, : group.prompts.lengths[0]]
        if any(not np.array_equal(sample.prompt, prompt) for sample in samples):
            raise InputError(
                f"row {record.index} of the data is not the prompt of what is in flight",
                rule="a run goes on with the data and the tokenizer that it began with",
                fix="set data.train and tokenizer as they were, or begin a new run_dir",
            )
        ids = [group.ticket * self.n + i for i in range(self.n)]
        scored = all(0 <= i < self.n and samples[i].finish_reason is not None for i in group.scores)
        if not scored or [sample.id for sample in samples] != ids:
            raise ValueError(f"group {group.ticket} has other samples, or scores without samples")

    def read_again(self) -> None:
        """What was decoded is read again, by a sampler that has read nothing."""
        self.sampler, self.clock.now, self._complete = None, 0, []
        for group in self._groups.values() if not self.scores_early else ():
            group.asked.clear()
        # Scores that are asked for count as if they were asked for now.
        self._asked = [(group, which, pending, 0) for group, which, pending, _ in self._asked]

    def versions(self) -> set[int]:
        """Of all tokens in flight."""
        samples = [sample for group in self._groups.values() for sample in group.samples]
        return {int(version) for sample in samples for version in np.unique(sample.versions)}


def saved_record(record: PromptRecord) -> dict:
    """What finds a record in the data again."""
    return {"prompt_id": record.prompt_id, "index": record.index, "source": record.source}


def told_score(score: Score) -> list:
    """A score as JSON, to other hosts and in checkpoints. When it was known is of a clock here."""
    return [*(getattr(score, name) for name in _OF_SCORE), score.over_limit]


def score_of(told: list) -> Score:
    value, parts, status, seconds, message, over_limit = told
    return Score(
        float(value), dict(parts), str(status), float(seconds), str(message), over_limit=over_limit
    )
