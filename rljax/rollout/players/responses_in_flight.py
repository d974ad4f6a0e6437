"""Responses in flight: those of a group are samples of one sampler that lives over steps."""

from collections.abc import Callable, Iterable

import numpy as np

from rljax import heartbeat, hosts
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rollout.players.clock import Clock
from rljax.rollout.rollout import RolloutConfig
from rljax.rollout.scoring.report import RewardReport
from rljax.rollout.scoring.reward import Reward
from rljax.sampler import Engine, Sampler
from rljax.sampler.host_rollout import batch_of, engine_of_rows
from rljax.sampler.inputs import request_keys
from rljax.sampler.prompt_images import of_prompt
from rljax.sampler.sample import Sample
from rljax.tracking import timing


class ResponsesInFlight:
    """The player of single responses that outlive their step, to prompts of `columns` tokens at
    most."""

    def __init__(self, reward: Reward, cfg: RolloutConfig, columns: int, clock: Clock):
        self.reward, self.cfg, self.columns, self.clock = reward, cfg, columns, clock
        self.n, self.pool = cfg.samples_per_prompt, reward.row_pool
        self.sampler: Sampler | None = None
        self._engine: Engine | None = None

    @property
    def scores_early(self) -> bool:
        """Returns whether a group's scores are known before it is taken."""
        return self.pool is not None

    @property
    def is_open(self) -> bool:
        """Returns whether there is a sampler."""
        return self.sampler is not None

    def make_sampler(self, actor, rows: int, groups: Iterable) -> None:
        """Makes the sampler, in which the samples of these groups go on."""
        decoding, sampling = actor.decoding, self.cfg.sampling
        if self._engine is None:
            tokens = self.columns + sampling.max_response_tokens
            model = decoding.of(actor.model)
            self._engine = engine_of_rows(model, rows, tokens, sampling, decoding)
        self.sampler = Sampler(self._engine, chunk_tokens=self.columns, decode=decoding.decode)
        samples = [sample for group in groups for sample in group.members]
        self.sampler.restore([sample for sample in samples if sample.finish_reason is None])

    def pause(self, groups: Iterable) -> None:
        """Lets the next sampler read all samples again."""
        self.sampler = None

    def begin(self, group) -> None:
        """Submits the samples of a group."""
        keys = fetch(request_keys(group.keys.root, self.cfg.prompts_per_step * self.n))
        keys = keys[group.at * self.n : (group.at + 1) * self.n]
        ids, prompts = range(group.ticket * self.n, (group.ticket + 1) * self.n), group.prompts
        prompt = prompts.tokens[0, : prompts.lengths[0]]
        options = dict(n=self.n, keys=keys, images=of_prompt(prompts.images, 0, len(prompt)))
        group.members = self.sampler.submit(prompt, self.cfg.sampling, request_ids=ids, **options)

    def dispatch(self, weights, version: int, keep_cache: bool, ended: Callable) -> bool:
        """Decodes one dispatch, or waits a little for scores if nothing is left to decode. Returns
        whether it decoded. Calls ended(ticket) for each sample that has ended."""
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
                ended(event.sample.id // self.n)
        return True

    # -- what a flight asks of a group

    def members(self, group) -> list[Sample]:
        """Returns the samples of a group."""
        return group.members

    def first(self, group) -> int:
        """Returns the number of a group's first member in a checkpoint."""
        return 0

    def has_ended(self, sample: Sample) -> bool:
        """Returns whether a sample has ended."""
        return sample.finish_reason is not None

    def wants_score(self, sample: Sample) -> bool:
        """Returns whether processes score it."""
        return self.scores_early

    def is_here(self, group, i: int) -> bool:
        """Returns whether this host has its member scored."""
        return group.ticket % hosts.count() == hosts.index()

    def fields(self, group, i: int, number: int):
        """Returns what the reward reads of sample i."""
        start, sample = int(group.prompts.response_starts[0]), group.members[i]
        ids, reason = sample.ids[start:].tolist(), int(sample.finish_reason)
        return self.reward.fields(group.prompts.records[0], ids, reason, number)

    def seat_values(self, group) -> set[tuple[int, float]]:
        """Returns the known scores, each with its seat."""
        return {(0, score.value) for score in group.scores.values() if score.status == "ok"}

    def tokens(self, group) -> int:
        """Counts the tokens of a group that the policy drew."""
        return sum(len(sample.tokens) for sample in group.members)

    def drop(self, group) -> None:
        """Does nothing: the samples have left the sampler."""

    def collect(self, groups: list, prompts: Prompts, mesh) -> tuple[Batch, RewardReport]:
        """Returns the batch of complete groups, in this order."""
        samples = [sample for group in groups for sample in group.members]
        tokens = self.columns + self.cfg.sampling.max_response_tokens
        batch = place(batch_of(samples, tokens, self.n, prompts.images), mesh)
        if not self.scores_early:
            return self.reward(batch, prompts)
        rows = [self.fields(group, i, p) for p, group in enumerate(groups) for i in range(self.n)]
        scores = [group.scores[i] for group in groups for i in range(self.n)]
        with timing.timed("reward"):
            return self.reward.rewarded(batch, prompts, rows, scores)

    # -- a checkpoint

    def get_state(self, group) -> dict:
        """Returns the samples of a group as JSON."""
        return {"samples": [sample.get_state() for sample in group.members]}

    def set_state(self, group, saved: dict) -> None:
        """Goes on from `get_state`. Raises InputError if the samples of a checkpoint are not of
        this run, and ValueError for what is no state."""
        sampling, prompts = self.cfg.sampling, group.prompts
        samples = group.members = [Sample.from_state(state, sampling) for state in saved["samples"]]
        for sample in samples:  # the state has no images: the data has them
            sample.images = of_prompt(prompts.images, 0, len(sample.prompt))
        if len(samples) != self.n:
            rule = f"the prompts in flight have {len(samples)} samples each"
            fix = f"as it was: {len(samples)}"
            raise InputError("batch.samples_per_prompt", value=self.n, rule=rule, fix=fix)
        most = max(sample.sampling.max_response_tokens for sample in samples)
        if most > sampling.max_response_tokens:
            value, rule = sampling.max_response_tokens, f"responses in flight have room for {most}"
            raise InputError("sampler.max_response_tokens", value=value, rule=rule, fix=f"{most}")
        prompt = prompts.tokens[0, : prompts.lengths[0]]
        if any(not np.array_equal(sample.prompt, prompt) for sample in samples):
            raise InputError(
                f"row {prompts.records[0].index} of the data is not the prompt of what is in "
                "flight",
                rule="a run goes on with the data and the tokenizer that it began with",
                fix="set data.train and tokenizer as they were, or begin a new run_dir",
            )
        ids = [group.ticket * self.n + i for i in range(self.n)]
        scored = all(0 <= i < self.n and samples[i].finish_reason is not None for i in group.scores)
        if not scored or [sample.id for sample in samples] != ids:
            raise ValueError(f"group {group.ticket} has other samples, or scores without samples")

    def versions(self, group) -> set[int]:
        """Returns the versions of all tokens of a group."""
        return {int(v) for sample in group.members for v in np.unique(sample.versions)}
