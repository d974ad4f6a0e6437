"""Decides which request sits in which slot, for how long, and which pages it has.

`Pages` counts whose a page is, `PageTables` gives slots their pages, `PromptQueue` reads the
prompts of requests that wait, and `Scheduler` moves samples into slots, out of them and back. A
sample is in one of these states:

| state | it is in | what was read of it |
|---|---|---|
| waiting | `queue` | nothing, or its prompt |
| live | `slots` | all but its last token |
| unread | `slots` and `unread`: live once its new tokens are read | `cached` tokens |
| held | `slots` and `held`: finished, until `deliver` or `release` | `cached` tokens |
| parked | `parked`: held without a slot | in its pages, a row of `parked_caches`, or gone |
| returning | `returning`: goes on in any slot | the same, or in a Partial |
| done | nowhere | in a Partial, if it was asked to keep it |

Without pages a sample gets the first free slot. With them it needs a slot whose device has pages
for what it has read and what the next dispatch may add. Pages that begin with the same tokens are
shared (arXiv 2309.06180).

Axes: B slots, P pages of a slot, M slots or samples of a call, S tokens of a sample.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rljax.errors import InputError
from rljax.metric import Metric
from rljax.models.cache_pages import Pool
from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.inputs import slot_inputs
from rljax.sampler.prefix_cache import PrefixCache
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.resume import (
    ParkedCaches,
    Returning,
    compile_reads,
    read_together,
    restore_prefixes,
)
from rljax.sampler.sample import Sample
from rljax.sampler.slots import Slots

FREE_SHARE = 8  # while requests wait, a dispatch ends when slots / FREE_SHARE of them are free
STEPS_BETWEEN_CHUNKS = 8  # decode steps at most between two chunks of a prompt that has a slot

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


class Pages:
    """The pages of a pool on the host; those of each shard are counted from its first.

    A page has as many owners as there are samples that read it. One owner alone writes it: pages
    are shared once they are full, and a full one is not written again. A full page is named by a
    digest of its tokens and all before them. A page without owners keeps its name, and is found by
    it, until its room is needed; the least recently used one goes first.
    """

    def __init__(self, pool: Pool):
        self.page_tokens, self.shards = pool.page_tokens, pool.shards
        self.each = pool.count // pool.shards
        self._free = [list(range(self.each - 1, -1, -1)) for _ in range(self.shards)]
        self._owners = np.zeros((self.shards, self.each), np.int32)
        self._names: list[dict[int, bytes]] = [{} for _ in range(self.shards)]
        self._named: list[dict[bytes, int]] = [{} for _ in range(self.shards)]
        # Pages with a name and without an owner, least recently used first.
        self._idle = [collections.OrderedDict() for _ in range(self.shards)]

    def room(self, shard: int) -> int:
        """Returns how many pages of a shard nobody owns."""
        return len(self._free[shard]) + len(self._idle[shard])

    @property
    def used(self) -> int:
        """Pages with an owner."""
        return int(np.count_nonzero(self._owners))

    @property
    def shared(self) -> int:
        """Pages with several owners."""
        return int(np.count_nonzero(self._owners > 1))

    def take(self, shard: int, count: int) -> list[int] | None:
        """Takes `count` free pages for one owner, to be written. None: there are fewer."""
        if self.room(shard) < count:
            return None
        while len(self._free[shard]) < count:
            self._unname(shard, self._idle[shard].popitem(last=False)[0])
        pages = [self._free[shard].pop() for _ in range(count)]
        self._owners[shard, pages] = 1
        return pages

    def share(self, shard: int, pages: Sequence[int]) -> None:
        """Adds one owner to pages that `find` returned."""
        for page in pages:
            self._idle[shard].pop(page, None)
            self._owners[shard, page] += 1

    def drop(self, shard: int, pages: Sequence[int]) -> None:
        """Removes one owner. (Last page first: of a run that is found again the end goes first.)"""
        for page in reversed(pages):
            assert self._owners[shard, page] > 0, (shard, page)
            self._owners[shard, page] -= 1
            if not self._owners[shard, page]:
                if page in self._names[shard]:
                    self._idle[shard][page] = None
                else:
                    self._free[shard].append(page)

    def name(self, shard: int, pages: Sequence[int], tokens: np.ndarray, images=b"") -> None:
        """Names the full ones of `pages`, which have read tokens [S], so that `find` returns them.
        `images`: the digest of the images among the tokens."""
        for page, name in zip(pages, self._names_of(tokens, images), strict=False):
            if page not in self._names[shard] and name not in self._named[shard]:
                self._names[shard][page], self._named[shard][name] = name, page

    def find(self, shard: int, tokens: np.ndarray, images=b"") -> list[int]:
        """Returns the pages that hold the longest known beginning of tokens [S]
        with these images."""
        pages = []
        for name in self._names_of(tokens, images):
            if name not in self._named[shard]:
                break
            pages.append(self._named[shard][name])
        return pages

    def forget_names(self) -> None:
        """Makes `find` return nothing from here on: other parameters read these pages."""
        for shard in range(self.shards):
            self._free[shard] += reversed(self._idle[shard])
            self._idle[shard].clear()
            self._names[shard].clear()
            self._named[shard].clear()

    def _unname(self, shard: int, page: int) -> None:
        del self._named[shard][self._names[shard].pop(page)]
        self._free[shard].append(page)

    def _names_of(self, tokens: np.ndarray, images: bytes):
        """Yields the name of each full page: a digest of all tokens up to its end."""
        digest, data = hashlib.blake2b(images, digest_size=16), np.asarray(tokens, np.int32)
        for end in range(self.page_tokens, len(data) + 1, self.page_tokens):
            digest.update(data[end - self.page_tokens : end].tobytes())
            yield digest.digest()


@dataclasses.dataclass
class _Owned:
    """Pages in the order of a sample's tokens; the first `shared` tokens were read by others."""

    shard: int
    pages: list[int]
    shared: int
    version: int | None


class PageTables:
    """The pages of each sample, and the table of pages of each slot, of one engine.

    `keeps_pages`: no layer has a sliding window or a recurrent state, which stay with their slot,
    so a sample that leaves its slot keeps its pages, and what it has read is found again. `pages`
    is None for an engine without pages: then every method does nothing, and slots are given in
    their order.
    """

    def __init__(self, engine: Engine):
        self.engine, self.version = engine, None
        pool = engine.pool
        self.pages = Pages(pool) if pool else None
        kinds = engine.model.config.kinds
        self.keeps_pages = pool is not None and not any(k.window or k.recurrent for k in kinds)
        self._owned: dict[Sample, _Owned] = {}
        self._changed = False
        # Sums over dispatches, for the means that `metrics` gives.
        self.dispatches = self._used = self._tokens = self._shared = 0
        self.preemptions = self.most_used = 0
        if pool:
            room = (engine.slots, pool.pages_for(engine.tokens))
            self._none, self._table = pool.count, np.full(room, pool.count, np.int32)

    def check(self, tokens: int) -> None:
        """Raises InputError if a request of `tokens` tokens needs more pages than there are."""
        if tokens > self.engine.request_tokens:
            raise InputError(
                "a prompt and its response need more pages than there are",
                value=f"{tokens} tokens",
                rule=f"{self.pages.each} pages of {self.pages.page_tokens} tokens on a device",
                fix="a shorter prompt, a lower max_response_tokens, or more pages",
            )

    def shard(self, slot: int) -> int:
        """Returns the part of the pool that a slot reads: the one on its device."""
        return slot * self.pages.shards // self.engine.slots

    def has(self, sample: Sample, shard: int) -> bool:
        """Returns whether a sample owns pages of a shard."""
        return sample in self._owned and self._owned[sample].shard == shard

    # -- samples come and go

    def allocate(
        self, sample: Sample, free: list[int], make_room: Callable[[int], bool], *, fresh=False
    ) -> int | None:
        """Takes a slot out of `free` and gives it pages for the sample. Returns the slot, or
        None if no device has enough pages and make_room(shard) frees no more. `fresh`: the
        sample's whole prefix is about to be written there; otherwise pages that are found
        count as cached."""
        if self.pages is None:
            return free.pop(0)
        shards = list(dict.fromkeys(self.shard(slot) for slot in free))
        owned = self._owned.get(sample)
        shards.sort(key=lambda shard: owned is not None and shard != owned.shard)
        for shard in shards:
            slot = next(slot for slot in free if self.shard(slot) == shard)
            if owned is not None and owned.shard != shard:
                self.forget(sample)
            while not (grown := self.grow(sample, slot, fresh=fresh)) and make_room(shard):
                pass
            if grown:
                free.remove(slot)
                return slot
        return None

    def grow(self, sample: Sample, slot: int, *, fresh: bool = False) -> bool:
        """Gives the sample in a slot the pages that the next dispatch may need. Returns whether
        there were enough."""
        if self.pages is None:
            return True
        shard, owned = self.shard(slot), self._owned.get(sample)
        is_new = owned is None
        if is_new:
            prefix = (sample.ids[:-1], _image_digest(sample))
            shared_pages = self.pages.find(shard, *prefix) if fresh or self.keeps_pages else []
            self.pages.share(shard, shared_pages)
            shared = len(shared_pages) * self.pages.page_tokens
            owned = _Owned(shard, shared_pages, shared, self.version)
        added = self.pages.take(shard, max(0, self._needed(sample) - len(owned.pages)))
        if added is None:
            if is_new:
                self.pages.drop(shard, owned.pages)
            return False
        if is_new:
            self._owned[sample] = owned
            if self.keeps_pages and not fresh:
                sample.forget()
                sample.cached, sample.lost = owned.shared, max(0, sample.lost - owned.shared)
        owned.pages += added
        if added or is_new or self._table[slot, 0] != owned.pages[0]:
            self._table[slot, : len(owned.pages)] = owned.pages
            self._changed = True
        return True

    def _needed(self, sample: Sample) -> int:
        """Returns how many pages hold a sample's tokens and those that one dispatch may read."""
        tokens_left = sample.sampling.max_response_tokens - sample.drawn
        dispatch_tokens = (
            self.engine.steps * (1 + self.engine.draft_tokens) + self.engine.draft_tokens
        )
        tokens = sample.size - 1 + min(dispatch_tokens, tokens_left)
        return max(1, -(-tokens // self.pages.page_tokens))

    def shared(self, sample: Sample) -> int:
        """Returns how many tokens of a fresh sample its pages hold already."""
        return self._owned[sample].shared if self.pages else 0

    def publish(self, sample: Sample, tokens: int) -> None:
        """Lets other samples find the pages of the first `tokens` tokens of a sample."""
        owned = self._owned.get(sample)
        if owned is not None and owned.version == self.version:
            self.pages.name(owned.shard, owned.pages, sample.ids[:tokens], _image_digest(sample))

    def leave(self, sample: Sample, slot: int, *, keep: bool = False) -> None:
        """Empties the table of a slot. The sample gives up its pages unless `keep`."""
        if self.pages is None:
            return
        self._table[slot] = self._none
        self._changed = True
        if not keep:
            self.drop(sample)

    def drop(self, sample: Sample) -> None:
        """Gives up the pages of a sample, if it has any."""
        if (owned := self._owned.pop(sample, None)) is not None:
            self.pages.drop(owned.shard, owned.pages)

    def forget(self, sample: Sample) -> None:
        """Gives up the pages of a sample that goes on later: what it has read is read again."""
        self.drop(sample)
        sample.forget()

    def set_version(self, version: int) -> None:
        """Sets the version of the parameters. What others read is found no more."""
        self.version = version
        if self.pages is not None:
            self.pages.forget_names()

    # -- the device

    def upload(self, state: Slots) -> Slots:
        """Returns the decode state with the table [B, P] as it is now."""
        if self._changed:
            state, self._changed = self.engine.with_table(state, self._table.copy()), False
        return state

    def find(self, tokens: np.ndarray) -> tuple[int, np.ndarray, int]:
        """Returns (shard, pages [P], number of tokens in them) of the longest beginning of `tokens`
        that was read before."""
        pages_by_shard = [self.pages.find(shard, tokens) for shard in range(self.pages.shards)]
        shard = max(range(len(pages_by_shard)), key=lambda shard: len(pages_by_shard[shard]))
        return (
            shard,
            self._row(pages_by_shard[shard]),
            len(pages_by_shard[shard]) * self.pages.page_tokens,
        )

    def pages_of(self, sample: Sample) -> tuple[int, np.ndarray] | None:
        """Returns (shard, pages [P]) of a sample; None if it has no pages."""
        owned = self._owned.get(sample)
        return None if owned is None else (owned.shard, self._row(owned.pages))

    def _row(self, pages: Sequence[int]) -> np.ndarray:
        row = np.full(self._table.shape[1], self._none, np.int32)
        row[: len(pages)] = pages
        return row

    # -- metrics

    def count(self) -> None:
        """Records how full the pages are at a dispatch."""
        if self.pages is None:
            return
        self.dispatches += 1
        used, page_tokens = self.pages.used, self.pages.page_tokens
        unused_tokens = sum(
            len(owned.pages) * page_tokens - min(sample.size - 1, len(owned.pages) * page_tokens)
            for sample, owned in self._owned.items()
        )
        self._used, self._shared = self._used + used, self._shared + self.pages.shared
        self._tokens += used * page_tokens - unused_tokens
        self.most_used = max(self.most_used, used)

    def metrics(self) -> dict[str, float]:
        """Returns means over the dispatches so far; {} without pages."""
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


def _image_digest(sample: Sample) -> bytes:
    """Returns bytes that tell a sample's pages from those of the same tokens with other images."""
    return b"" if sample.images is None else sample.images.name


@dataclasses.dataclass(eq=False)
class _Group:
    """Samples that begin with the same tokens, or with a part of them."""

    ids: np.ndarray
    waiting: collections.deque  # of Sample
    images: PromptImages | None = None  # of the prompt that ids begin with
    prefix: Prefix | None = None  # all but the last of ids were read into its row
    row: int = 0
    partial: Prefix | None = None  # a long prompt so far
    read: int = 0  # tokens that `partial` holds, the last of them still to be read
    whole: bool = False  # to be read in one step, as an update dropped what was read


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A sample that goes into a slot with row `row` of a prefix."""

    sample: Sample
    slot: int
    row: int


class PromptQueue:
    """Requests that wait for slots, in the order in which they came, and the reading of their
    prompts: short ones together, long ones in chunks, and a beginning that several share once."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        tables: PageTables,
        chunk_tokens: int,
        prefill_rows: int,
    ):
        self.engine, self.cache, self.tables = engine, cache, tables
        self.chunk_tokens, self.prefill_rows = chunk_tokens, prefill_rows
        self._groups: collections.deque[_Group] = collections.deque()

    def add(
        self,
        ids: np.ndarray,
        samples: list[Sample],
        *,
        first: bool = False,
        prefix: Prefix | None = None,
        read: int = 0,
    ) -> None:
        """Puts samples whose tokens are `ids` [S], or a beginning of them, at the end of the queue,
        or `first`. `prefix`, if it is given, has read the first `read` tokens."""
        group = _Group(ids, collections.deque(samples), samples[0].images)
        if prefix is not None and read >= len(ids) - 1:
            group.prefix = prefix
        elif prefix is not None:
            group.partial, group.read = prefix, read
        (self._groups.appendleft if first else self._groups.append)(group)

    def remove(self, sample: Sample) -> bool:
        """Takes a sample out of the queue. Returns whether it was there."""
        for group in self._groups:
            if sample in group.waiting:
                group.waiting.remove(sample)
                if not group.waiting:
                    self._groups.remove(group)
                return True
        return False

    def __iter__(self) -> Iterator[Sample]:
        for group in self._groups:
            yield from group.waiting

    def __len__(self) -> int:
        return sum(len(group.waiting) for group in self._groups)

    def set_version(self, version: int) -> None:
        """Drops what other parameters have read."""
        for group in self._groups:
            group.whole |= group.partial is not None
            group.prefix = group.partial = None
            group.read = 0
        self.cache.set_version(version)

    def read(self, params, state: Slots, free: int) -> None:
        """Reads prompts for `free` slots: all short ones that come first, several in one pass, and
        one chunk of a long one. What pages of `state` hold of them is not read again."""
        ready_count = sum(len(g.waiting) for g in self._groups if g.prefix is not None)
        unread = [group for group in self._groups if group.prefix is None]
        short_groups, slots_left = [], free - ready_count
        for group in unread:
            if slots_left <= 0:
                break
            slots_left -= len(group.waiting)
            if group.images is not None and group.partial is None:
                self._read_images(params, group)
                if group.prefix is not None:
                    continue
            elif group.partial is None and not self._shares(state, group):
                if len(group.ids) <= self.chunk_tokens:
                    short_groups.append(group)
                    continue
                group.partial = self.engine.empty_prefix()
            if group.prefix is None and not group.whole:
                self._read_chunk(params, group)
                break
            while group.prefix is None:
                self._read_chunk(params, group)
        for start in range(0, len(short_groups), self.prefill_rows):
            self._read_short(params, short_groups[start : start + self.prefill_rows])

    def unread(self, free: int) -> bool:
        """Returns whether a prompt that is not read to its end would get one of `free` slots."""
        for group in self._groups:
            if free <= 0 or group.prefix is None:
                return free > 0
            free -= len(group.waiting)
        return False

    def _shares(self, state: Slots, group: _Group) -> bool:
        """Starts from a cached beginning. Returns whether there is one that is long enough."""
        if not self.cache.capacity or len(group.ids) < 2:
            return False
        if self.tables.keeps_pages:
            return self._shares_pages(state, group)
        hit = self.cache.find(group.ids[:-1])
        if hit is None:
            return False
        entry, shared = hit
        if 4 * shared < len(group.ids):
            return False  # not worth a pass of its own
        if shared == len(group.ids) - 1 == len(entry.tokens):
            group.prefix, group.row = entry.prefix, entry.row
        elif shared == len(group.ids) - 1:
            group.prefix = self.engine.widen(entry.prefix, entry.row, shared)
        else:
            group.partial = self.engine.widen(entry.prefix, entry.row, shared)
            group.read = shared
        return True

    def _shares_pages(self, state: Slots, group: _Group) -> bool:
        shard, pages, shared = self.tables.find(group.ids[:-1])
        if 4 * shared < len(group.ids):
            self.cache.note(0)
            return False
        self.cache.note(shared)
        group.partial, group.read = self.engine.gather(state, shard, pages, shared), shared
        if shared == len(group.ids) - 1:
            group.prefix, group.partial = group.partial, None
        return True

    def _read_images(self, params, group: _Group) -> None:
        """Reads a prompt up to its last image at least, in one pass: the vision tower runs once for
        all samples of a prompt. The rest is read in chunks."""
        config, max_columns = self.engine.model.config, self.engine.tokens
        arguments = (config, group.ids, self.chunk_tokens, max_columns)
        tokens, size, images = group.images.padded(*arguments)
        prefix = self.engine.prefill(params, tokens, np.array([size], np.int32), images)
        if size == len(group.ids):
            group.prefix, group.row = prefix, 0
        else:
            group.partial, group.read = self.engine.widen(prefix, 0, size - 1), size - 1

    def _read_chunk(self, params, group: _Group) -> None:
        chunk = group.ids[group.read : group.read + self.chunk_tokens]
        if len(chunk):
            padded = np.zeros((1, self.chunk_tokens), np.int32)
            padded[0, : len(chunk)] = chunk
            counts = np.array([len(chunk)], np.int32)
            group.partial = self.engine.append(params, group.partial, padded, counts)
            group.read += len(chunk)
        if group.read == len(group.ids):
            group.prefix, group.row, group.partial = group.partial, 0, None
            self._keep(group)

    def _read_short(self, params, groups: list[_Group]) -> None:
        """Reads prompts of at most one chunk each in one pass."""
        if len(groups) == 1:  # alone it is read faster than as one row of many
            groups[0].partial = self.engine.empty_prefix()
            self._read_chunk(params, groups[0])
            return
        rows = self.prefill_rows
        tokens = np.zeros((rows, self.chunk_tokens), np.int32)
        lengths = np.ones(rows, np.int32)
        for row, group in enumerate(groups):
            tokens[row, : len(group.ids)], lengths[row] = group.ids, len(group.ids)
        prefix = self.engine.prefill(params, tokens, lengths)
        for row, group in enumerate(groups):
            group.prefix, group.row = prefix, row
            self._keep(group)

    def _keep(self, group: _Group) -> None:
        if not self.tables.keeps_pages and group.images is None:  # else its pages are found
            self.cache.put(group.ids[:-1], group.prefix, group.row)

    def admit(
        self, free: list[int], make_room: Callable[[int], bool]
    ) -> list[tuple[Prefix, list[Admitted]]]:
        """Takes samples whose prompt is read out of the queue, in its order, for the slots `free`
        (which become fewer). Returns them by prefix, so that each prefix is put into all its slots
        at once. Ends at the first sample that no device has pages for."""
        placed: dict[int, tuple[Prefix, list[Admitted]]] = {}
        for group in list(self._groups):
            while group.prefix is not None and group.waiting and free:
                slot = self.tables.allocate(group.waiting[0], free, make_room, fresh=True)
                if slot is None:
                    return list(placed.values())
                admission = Admitted(group.waiting.popleft(), slot, group.row)
                self.tables.publish(admission.sample, admission.sample.size - 1)
                placed.setdefault(id(group.prefix), (group.prefix, []))[1].append(admission)
            if not group.waiting:
                self._groups.remove(group)
            if not free:
                break
        return list(placed.values())


class Scheduler:
    """The samples of an engine: those in its slots, those beside them, those that wait, and the
    decode state.

    `cache`: prefixes that were read before. Prompts are read `chunk_tokens` tokens at a time,
    short ones `prefill_rows` together. `parked_tokens`: room, in tokens, for what was read of
    held samples whose slots others need. On several hosts all of them schedule alike: nothing but
    the requests decides.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        chunk_tokens: int,
        prefill_rows: int,
        parked_tokens: int,
    ):
        self.engine, self.tables = engine, PageTables(engine)
        self.queue = PromptQueue(engine, cache, self.tables, chunk_tokens, prefill_rows)
        self.slots: list[Sample | None] = [None] * engine.slots
        self.held: dict[Sample, int] = {}  # samples that wait for `deliver`, and their slots
        self.unread: dict[int, Sample] = {}  # slots whose samples have tokens that were not read
        self.parked: dict[Sample, None] = {}  # no set, as its order must be the same on all hosts
        self.returning: list[Returning] = []  # what goes on in any slot, first come first
        self.parked_caches = ParkedCaches(engine, parked_tokens)
        self.state = engine.init_state()
        self.version: int | None = None
        self.reread_tokens = 0  # read again, as their caches had to go

    @property
    def live(self) -> int:
        """Number of samples that decode."""
        return len(self.slots) - self.slots.count(None) - len(self.held)

    @property
    def pending(self) -> int:
        """Number of samples that are not finished."""
        return len(self.queue) + len(self.returning) + self.live

    def free(self) -> list[int]:
        """Returns the free slots."""
        return [slot for slot, sample in enumerate(self.slots) if sample is None]

    def padded(self, slots: list[int]) -> np.ndarray:
        """Returns slots [M] padded to [B] for a verb of the engine; the padding is out of range."""
        padded = np.full(len(self.slots), len(self.slots), np.int32)
        padded[: len(slots)] = slots
        return padded

    def set_version(self, version: int, keep_cache: bool) -> None:
        """Begins another version of the parameters. What the last one read of live and held samples
        stays with `keep_cache`; otherwise it is read again."""
        self.queue.set_version(version)
        self.tables.set_version(version)
        if self.version is not None and not keep_cache:
            for slot, sample in enumerate(self.slots):
                if sample is None:
                    continue
                if sample not in self.held and slot not in self.unread:
                    sample.cached = sample.size - 1
                    self.unread[slot] = sample
                self.tables.leave(sample, slot)
                sample.forget()
            for sample in [*self.parked, *(entry.sample for entry in self.returning)]:
                self._drop_cache(sample)
        self.version = version

    def warm_up(self, params) -> None:
        """Compiles what is needed where pages are short, or found again."""
        no_slots = self.padded([])
        self.state = self.engine.release(self.state, no_slots)
        self.state = compile_reads(self.engine, params, self.state)
        if self.tables.keeps_pages:
            self.engine.gather(self.state, *self.tables.find(no_slots[:0]))

    def schedule(self, params) -> tuple[int, int | None] | None:
        """Prepares the next dispatch: moves samples into slots and reads what is new with `params`.
        Returns (decode steps at most, number of free slots at which it ends, or None), or None if
        nothing is left to decode."""
        for sample in reversed(self._take_unseen()):
            self.queue.add(sample.ids, [sample], first=True)
        self._make_room()
        if self._bring_back():
            self.queue.read(params, self.state, self.slots.count(None))
            self._admit()
        self._grow()
        for sample in self.unread.values():
            self.reread_tokens += sample.lost
            sample.lost = 0
        self.state = read_together(self.engine, params, self.state, self.unread)
        self.unread = {}
        if not self.live:
            return None
        self.tables.count()
        steps, enough_free = self.engine.steps, None
        if self.returning or len(self.queue):
            enough_free = len(self.slots) - self.live + max(1, len(self.slots) // FREE_SHARE)
        if self.queue.unread(self.slots.count(None)):
            steps = min(steps, STEPS_BETWEEN_CHUNKS)
        return steps, enough_free

    def _take_unseen(self) -> list[Sample]:
        """Takes out samples that go on and whose images have to be read again: nothing of them is
        kept, and what reads on behind a slot's tokens reads text. They wait as new prompts do."""
        slots = [slot for slot, s in self.unread.items() if s.images is not None and not s.cached]
        samples = [self.unread.pop(slot) for slot in slots]
        for slot in slots:
            self.leave(slot)
        if slots:
            self.state = self.engine.release(self.state, self.padded(slots))
        unseen = [entry.sample for entry in self.returning if self._is_unseen(entry)]
        self.returning = [entry for entry in self.returning if entry.sample not in unseen]
        for sample in unseen:
            self._drop_cache(sample)
        for sample in [*samples, *unseen]:
            self.reread_tokens += sample.lost
            sample.cached = sample.lost = 0
        return sorted([*samples, *unseen], key=lambda sample: sample.id)

    def _is_unseen(self, entry: Returning) -> bool:
        """Returns whether a sample has images and comes back without all that was read of them.
        (Pages may be found that end inside of an image.)"""
        is_cached = entry.partial is None
        if not is_cached:
            is_cached = entry.partial.prefix is not None and entry.partial.version == self.version
        is_cached = is_cached and entry.sample.cached > 0 and not self.tables.keeps_pages
        return entry.sample.images is not None and not is_cached

    # -- out of slots

    def remove(self, sample: Sample) -> bool:
        """Takes a sample out, wherever it is. Returns whether it was there."""
        if sample in self.slots:
            slot = self.slots.index(sample)
            self.unread.pop(slot, None)
            if self.held.pop(sample, None) is None:
                self.state = self.engine.release(self.state, np.array([slot], np.int32))
            self.leave(slot)
            return True
        if sample in self.parked or any(entry.sample is sample for entry in self.returning):
            self.parked.pop(sample, None)
            self.returning = [entry for entry in self.returning if entry.sample is not sample]
            self._drop_cache(sample)
            return True
        return self.queue.remove(sample)

    def leave(self, slot: int, *, keep: bool = False) -> None:
        """Makes a slot free. Its sample gives up its pages unless `keep`."""
        self.tables.leave(self.slots[slot], slot, keep=keep)
        self.slots[slot] = None

    def _drop_cache(self, sample: Sample) -> None:
        """Gives up what was read of a sample that is in no slot."""
        self.parked_caches.drop(sample)
        self.tables.forget(sample)

    def extract_live(self, slot: int) -> Prefix | None:
        """Returns a copy of what the sample in a slot, which is not held, has read, to go on from;
        None where its pages are found again."""
        sample = self.slots[slot]
        if slot not in self.unread:
            sample.cached = sample.size - 1
        self.tables.publish(sample, sample.cached)
        return self.extract(slot)

    def extract(self, slot: int) -> Prefix | None:
        """Returns a copy of what the sample in a slot has read, to go on from; None where its pages
        are found again."""
        if self.tables.keeps_pages or not self.slots[slot].cached:
            return None
        return self.engine.extract(self.state, np.array([slot], np.int32))

    def _make_room(self) -> None:
        """Takes slots from held samples for others that wait for one: from the held sample with the
        highest request id, as long as that is above the id of the one that waits. Where all slots
        are held, also from lower ones: what they wait for may depend on what waits here."""
        free, held = self.slots.count(None), sorted(self.held, key=lambda sample: sample.id)
        self.returning.sort(key=lambda entry: entry.sample.id)
        waiting = itertools.chain((entry.sample for entry in self.returning), self.queue)
        chosen: list[Sample] = []
        for sample in itertools.islice(waiting, free, free + len(held)):
            if held[-1].id <= sample.id:
                break
            chosen.append(held.pop())
        else:
            sample = None
        if len(self.held) == len(self.slots) and not chosen and sample is not None:
            chosen = held[-max(1, len(self.slots) // FREE_SHARE) :]
        if chosen:
            self._park(chosen)

    def _park(self, samples: list[Sample]) -> None:
        """Takes held samples out of their slots."""
        moved = {self.held.pop(sample): sample for sample in samples}
        if not self.tables.keeps_pages:
            self.parked_caches.put(self.state, moved)
        for slot, sample in moved.items():
            self.leave(slot, keep=self.tables.keeps_pages)
            self.parked[sample] = None

    # -- into slots

    def _bring_back(self) -> bool:
        """Puts samples that go on into free slots, with what is kept of them. Returns whether none
        of them waits for pages."""
        free, placed, prefixes = self.free(), {}, {}
        while free and self.returning:
            entry = self.returning.pop(0)
            slot = self.tables.allocate(entry.sample, free, self._evict)
            if slot is None:
                self.returning.insert(0, entry)
                break
            sample = self.slots[slot] = self.unread[slot] = placed[slot] = entry.sample
            if self.tables.keeps_pages or entry.partial is None and sample.cached:
                continue
            if entry.partial is not None and entry.partial.prefix is not None:
                if entry.partial.version == self.version:
                    prefixes[slot] = entry.partial.prefix
                    continue
            sample.forget()
        self.state = self.tables.upload(self.state)
        self.state = self.parked_caches.take(self.state, placed)
        self.state = restore_prefixes(self.engine, self.state, prefixes)
        return not (free and self.returning)

    def _admit(self) -> None:
        """Fills free slots with samples whose prompts are read, by one insert for each prefix."""
        admitted, count = self.queue.admit(self.free(), self._evict), len(self.slots)
        self.state = self.tables.upload(self.state)
        for prefix, group in admitted:
            slots, rows = (
                self.padded([admission.slot for admission in group]),
                np.zeros(count, np.int32),
            )
            shared_counts = np.zeros(count, np.int32) if self.tables.pages else None
            for i, admission in enumerate(group):
                self.slots[admission.slot], rows[i] = admission.sample, admission.row
                if shared_counts is not None:
                    shared_counts[i] = self.tables.shared(admission.sample)
            samples = [admission.sample for admission in group]
            lengths = [sample.size - 1 for sample in samples]
            token = [sample.ids[-1] for sample in samples]
            inputs = slot_inputs(self.engine, samples, lengths, token, count)
            self.state = self.engine.insert(prefix, self.state, slots, rows, inputs, shared_counts)

    def add_branches(self, sample: Sample, children: list[Sample]) -> None:
        """Puts continuations of a finished sample into the queue with what was read of it: as one
        group if what is read of the longest one serves the shorter ones, too."""
        prefix, read_count = self._cache_of(sample)
        sizes = sorted({child.size for child in children})
        groups = [children]
        goes_back = self.engine.can_go_back(max(read_count, sizes[-1] - 1))
        if not goes_back:
            groups = [[child for child in children if child.size == size] for size in sizes]
        for group in groups:
            ids = max(group, key=lambda child: child.size).ids
            cached = read_count if goes_back or read_count <= len(ids) - 1 else 0
            reread = min(len(ids), sample.size) - 1 - cached  # what is behind the sample is new
            self.reread_tokens += max(0, reread)
            cached_prefix = prefix if cached else None
            if (
                cached_prefix is not None and cached < len(ids) - 1
            ):  # what is appended goes behind it
                cached_prefix = self.engine.widen(cached_prefix, 0, cached)
            self.queue.add(ids, group, prefix=cached_prefix, read=cached)

    def _cache_of(self, sample: Sample) -> tuple[Prefix | None, int]:
        """Returns what was read of a finished sample, as a prefix of one row, and how many of its
        tokens that are; (None, 0) if it is gone."""
        prefix, read_count = None, sample.cached
        if sample in self.held:
            if read_count:
                prefix = self.engine.extract(self.state, np.array([self.held[sample]], np.int32))
        elif sample in self.parked:
            prefix = self.parked_caches.copy(sample)
            if self.tables.keeps_pages and read_count and (pages := self.tables.pages_of(sample)):
                prefix = self.engine.gather(self.state, *pages, read_count)
        elif sample.partial is not None and sample.partial.version == self.version:
            prefix, read_count = sample.partial.prefix, sample.partial.then.cached
            if self.tables.keeps_pages:  # all but the end of them, less than a page
                shard, pages, read_count = self.tables.find(sample.ids[:read_count])
                prefix = (
                    self.engine.gather(self.state, shard, pages, read_count) if read_count else None
                )
        return (prefix, read_count) if prefix is not None else (None, 0)

    # -- where pages are short

    def _evict(self, shard: int, from_held: bool = False) -> bool:
        """Takes the pages of a shard from a sample that does not decode, the one with the highest
        request id; with `from_held`, or where nothing decodes there, also from held samples in
        slots. Returns whether there was one."""
        chosen = [*self.parked, *(entry.sample for entry in self.returning)]
        chosen = [sample for sample in chosen if self.tables.has(sample, shard)]
        in_slots = [s for s in self.slots if s is not None and self.tables.has(s, shard)]
        if not chosen and (from_held or all(sample in self.held for sample in in_slots)):
            chosen = [sample for sample in self.held if self.tables.has(sample, shard)]
        if not chosen:
            return False
        sample = max(reversed(chosen), key=lambda sample: sample.id)  # of equal ids the last
        if sample in self.held:
            self._park([sample])
        self._drop_cache(sample)
        return True

    def _grow(self) -> None:
        """Gives every sample that decodes the pages of the next dispatch, the lowest request id
        first. Where there are too few, the one with the highest waits, and is read again."""
        if self.tables.pages is None:
            return
        live = {i: s for i, s in enumerate(self.slots) if s is not None and s not in self.held}
        preempted: list[int] = []
        for slot, sample in sorted(live.items(), key=lambda item: (item[1].id, item[0])):
            shard = self.tables.shard(slot)
            while slot in live and not self.tables.grow(sample, slot):
                if self._evict(shard, from_held=True):
                    continue
                slots = [other for other in live if self.tables.shard(other) == shard]
                victim = max(slots, key=lambda other: (live[other].id, other))
                self._preempt(victim, live.pop(victim))
                preempted.append(victim)
        if preempted:
            self.state = self.engine.release(self.state, self.padded(preempted))
        self.state = self.tables.upload(self.state)

    def _preempt(self, slot: int, sample: Sample) -> None:
        """Takes a live sample out of its slot. It comes back later and is read again."""
        if self.unread.pop(slot, None) is None:
            sample.cached = sample.size - 1
        self.leave(slot)
        sample.forget()
        self.returning.append(Returning(sample))
        self.tables.preemptions += 1
