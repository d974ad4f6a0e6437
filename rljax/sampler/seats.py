"""Seats: which slot a sample gets, and the pages of samples in slots and beside them.

Without pages a sample gets the first free slot, and nothing else is asked. With them it needs a
slot whose device has pages for what it has read and what the next dispatch may add. Pages that
begin with the same tokens are shared. Where no layer has a sliding window, whose ring stays with
its slot, a sample that leaves its slot keeps its pages, and what it has read is found again.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from rljax.errors import InputError
from rljax.metric import Metric
from rljax.sampler.engine import Engine
from rljax.sampler.pages import Pages
from rljax.sampler.sample import Sample
from rljax.sampler.slots import Slots

METRICS = {
    "pages/occupancy": Metric(
        "pages of keys and values in use, mean over dispatches",
        "share",
        "far below 1: fewer pages, or more slots, would do",
    ),
    "pages/occupancy_max": Metric(
        "the same, at most", "share", "1 where samples had to wait for pages"
    ),
    "pages/fill": Metric(
        "tokens held, of what the pages in use have room for",
        "share",
        "above 0.8; below: smaller pages",
    ),
    "pages/shared": Metric(
        "pages in use that several samples read",
        "share",
        "the larger, the longer prompts are beside responses",
    ),
    "pages/preemptions": Metric(
        "samples that gave up their pages and were read again",
        "samples",
        "small beside the samples of a step; else more pages",
    ),
}


@dataclasses.dataclass
class _Run:
    """Pages in the order of a sample's tokens; the first `shared` tokens were read by others."""

    shard: int
    pages: list[int]
    shared: int
    version: int | None


class Seats:
    """The free slots' and the pages' book-keeping of one engine."""

    def __init__(self, engine: Engine):
        self.engine, self.version = engine, None
        pool = engine.pool
        self.pages = Pages(pool) if pool else None
        self.stays = pool is not None and not any(k.window for k in engine.model.config.kinds)
        self._runs: dict[Sample, _Run] = {}
        self._changed = False
        # Sums over dispatches, for the means that `metrics` gives.
        self.dispatches = self._used = self._tokens = self._shared = 0
        self.preemptions = self.most_used = 0
        if pool:
            room = (engine.slots, pool.pages_for(engine.tokens))
            self._none, self._table = pool.count, np.full(room, pool.count, np.int32)

    def check(self, tokens: int) -> None:
        """Raises InputError where a request of so many tokens needs more pages than there are."""
        if tokens > self.engine.request_tokens:
            raise InputError(
                "a prompt and its response need more pages than there are",
                value=f"{tokens} tokens",
                rule=f"{self.pages.each} pages of {self.pages.page_tokens} tokens on a device",
                fix="a shorter prompt, a lower max_response_tokens, or more pages",
            )

    def shard(self, at: int) -> int:
        """The part of the pool that slot `at` is in."""
        return at * self.pages.shards // self.engine.slots

    def has(self, sample: Sample, shard: int) -> bool:
        return sample in self._runs and self._runs[sample].shard == shard

    # -- samples come and go

    def take(
        self, sample: Sample, free: list[int], make_room: Callable[[int], bool], *, fresh=False
    ) -> int | None:
        """A slot of `free`, which becomes one less, with pages for the sample; None where no device
        has them, and make_room(shard) finds no more. `fresh`: it is about to be put there whole;
        else what it finds counts as cached."""
        if self.pages is None:
            return free.pop(0)
        shards = list(dict.fromkeys(self.shard(at) for at in free))
        own = self._runs.get(sample)
        shards.sort(key=lambda shard: own is not None and shard != own.shard)
        for shard in shards:
            at = next(at for at in free if self.shard(at) == shard)
            if own is not None and own.shard != shard:
                self.forget(sample)
            while not (there := self.grow(sample, at, fresh=fresh)) and make_room(shard):
                pass
            if there:
                free.remove(at)
                return at
        return None

    def grow(self, sample: Sample, at: int, *, fresh: bool = False) -> bool:
        """Gives the sample in slot `at` the pages that the next dispatch may need; whether there
        were as many."""
        if self.pages is None:
            return True
        shard, run = self.shard(at), self._runs.get(sample)
        new = run is None
        if new:
            own = (sample.ids[:-1], _images(sample))
            found = self.pages.find(shard, *own) if fresh or self.stays else []
            self.pages.share(shard, found)
            shared = len(found) * self.pages.page_tokens
            run = _Run(shard, found, shared, self.version)
        more = self.pages.take(shard, max(0, self._needed(sample) - len(run.pages)))
        if more is None:
            if new:
                self.pages.drop(shard, run.pages)
            return False
        if new:
            self._runs[sample] = run
            if self.stays and not fresh:
                sample.forget()
                sample.cached, sample.lost = run.shared, max(0, sample.lost - run.shared)
        run.pages += more
        if more or new or self._table[at, 0] != run.pages[0]:
            self._table[at, : len(run.pages)] = run.pages
            self._changed = True
        return True

    def _needed(self, sample: Sample) -> int:
        """Pages: for what is there, and what one dispatch may read."""
        left = sample.sampling.max_response_tokens - sample.drawn
        most = self.engine.steps * (1 + self.engine.draft_tokens) + self.engine.draft_tokens
        tokens = sample.size - 1 + min(most, left)
        return max(1, -(-tokens // self.pages.page_tokens))

    def shared(self, sample: Sample) -> int:
        """Tokens of a fresh sample that its pages hold already."""
        return self._runs[sample].shared if self.pages else 0

    def read(self, sample: Sample, tokens: int) -> None:
        """Lets others find what a sample has read: its first `tokens` tokens."""
        run = self._runs.get(sample)
        if run is not None and run.version == self.version:
            self.pages.name(run.shard, run.pages, sample.ids[:tokens], _images(sample))

    def leave(self, sample: Sample, at: int, *, keep: bool = False) -> None:
        """The sample is no longer in slot `at`, and has its pages still where `keep` says so."""
        if self.pages is None:
            return
        self._table[at] = self._none
        self._changed = True
        if not keep:
            self.drop(sample)

    def drop(self, sample: Sample) -> None:
        """Gives up the pages of a sample, if it has any."""
        if (run := self._runs.pop(sample, None)) is not None:
            self.pages.drop(run.shard, run.pages)

    def forget(self, sample: Sample) -> None:
        """The same, of one that will need what was read of it."""
        self.drop(sample)
        sample.forget()

    def at_version(self, version: int) -> None:
        """Sets the version of the parameters; pages that other parameters read are not found any
        more."""
        self.version = version
        if self.pages is not None:
            self.pages.forget_names()

    # -- the device

    def put(self, state: Slots) -> Slots:
        """The state with the table as it is now."""
        if self._changed:
            state, self._changed = self.engine.with_table(state, self._table.copy()), False
        return state

    def find(self, tokens: np.ndarray) -> tuple[int, np.ndarray, int]:
        """(shard, pages [P], how many tokens they hold) of the longest beginning of `tokens` that
        was read before."""
        found = [self.pages.find(shard, tokens) for shard in range(self.pages.shards)]
        shard = max(range(len(found)), key=lambda shard: len(found[shard]))
        row = np.full(self._table.shape[1], self._none, np.int32)
        row[: len(found[shard])] = found[shard]
        return shard, row, len(found[shard]) * self.pages.page_tokens

    def pages_of(self, sample: Sample) -> tuple[int, np.ndarray] | None:
        """(shard, pages [P]) of a sample that has some."""
        if (run := self._runs.get(sample)) is None:
            return None
        row = np.full(self._table.shape[1], self._none, np.int32)
        row[: len(run.pages)] = run.pages
        return run.shard, row

    # -- what is counted

    def count(self) -> None:
        """Notes how full the pages are at a dispatch."""
        if self.pages is None:
            return
        self.dispatches += 1
        used, page = self.pages.used, self.pages.page_tokens
        empty = sum(
            len(r.pages) * page - min(s.size - 1, len(r.pages) * page)
            for s, r in self._runs.items()
        )
        self._used, self._shared = self._used + used, self._shared + self.pages.shared
        self._tokens += used * page - empty
        self.most_used = max(self.most_used, used)

    def metrics(self) -> dict[str, float]:
        """Means over the dispatches so far; {} without pages."""
        if self.pages is None:
            return {}
        total, used = self.pages.each * self.pages.shards, max(1, self._used)
        times = max(1, self.dispatches)
        return {
            "pages/occupancy": self._used / times / total,
            "pages/occupancy_max": self.most_used / total,
            "pages/fill": self._tokens / (used * self.pages.page_tokens),
            "pages/shared": self._shared / used,
            "pages/preemptions": float(self.preemptions),
        }


def _images(sample: Sample) -> bytes:
    """Returns bytes that tell a sample's pages from those of the same tokens with other images."""
    return b"" if sample.images is None else sample.images.name


def highest(samples: Iterable[Sample]) -> Sample:
    """The sample with the highest request id, of several the last."""
    return max(reversed(list(samples)), key=lambda sample: sample.id)
