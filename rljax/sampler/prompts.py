"""Prompts that wait for slots, and how they are read: short ones together, long ones in chunks,
beginnings that others share once."""

import collections
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.prefix_cache import PrefixCache
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.sample import Sample
from rljax.sampler.seats import Seats
from rljax.sampler.slots import Slots


@dataclasses.dataclass(eq=False)
class _Group:
    """Samples that wait behind the same tokens, or behind the first of them."""

    ids: np.ndarray
    waiting: collections.deque  # of Sample
    images: PromptImages | None = None  # of the prompt that ids begin with
    prefix: Prefix | None = None  # all but the last of ids were read into its row
    row: int = 0
    partial: Prefix | None = None  # a long prompt so far
    read: int = 0  # tokens that `partial` holds, the last of them still to be read
    whole: bool = False  # to be read in one step: an update took what was read


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A sample that goes into a slot: row `row` of a prefix."""

    sample: Sample
    at: int
    row: int


class Prompts:
    """The queue of prompts, in the order in which they came."""

    def __init__(
        self, engine: Engine, cache: PrefixCache, seats: Seats, chunk_tokens: int, prefill_rows: int
    ):
        self.engine, self.cache, self.seats = engine, cache, seats
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
        """Puts samples whose tokens are `ids`, or the first of them, at the end of the queue, or
        first. `read` tokens of them were read into `prefix`, if it is given."""
        group = _Group(ids, collections.deque(samples), samples[0].images)
        if prefix is not None and read >= len(ids) - 1:
            group.prefix = prefix
        elif prefix is not None:
            group.partial, group.read = prefix, read
        (self._groups.appendleft if first else self._groups.append)(group)

    def remove(self, sample: Sample) -> bool:
        """Takes a sample out; whether it was here."""
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

    def at_version(self, version: int) -> None:
        """Drops what other parameters read."""
        for group in self._groups:
            group.whole |= group.partial is not None
            group.prefix = group.partial = None
            group.read = 0
        self.cache.at_version(version)

    def read(self, params, state: Slots, free: int) -> None:
        """Reads prompts for `free` slots: all short ones that come first, some together, and one
        chunk of a long one. What pages of `state` hold of them is not read again."""
        ready = sum(len(g.waiting) for g in self._groups if g.prefix is not None)
        unread = [group for group in self._groups if group.prefix is None]
        short, slots_left = [], free - ready
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
                    short.append(group)
                    continue
                group.partial = self.engine.empty_prefix()
            if group.prefix is None and not group.whole:
                self._read_chunk(params, group)
                break
            while group.prefix is None:
                self._read_chunk(params, group)
        for at in range(0, len(short), self.prefill_rows):
            self._read_short(params, short[at : at + self.prefill_rows])

    def unread(self, free: int) -> bool:
        """Returns whether a prompt that was not read to its end would get one of `free` slots."""
        for group in self._groups:
            if free <= 0 or group.prefix is None:
                return free > 0
            free -= len(group.waiting)
        return False

    def _shares(self, state: Slots, group: _Group) -> bool:
        """Start from a cached beginning, if there is one."""
        if not self.cache.capacity or len(group.ids) < 2:
            return False
        if self.seats.stays:
            return self._shares_pages(state, group)
        hit = self.cache.find(group.ids[:-1])
        if hit is None:
            return False
        kept, shared = hit
        if 4 * shared < len(group.ids):
            return False  # not worth a pass of its own
        if shared == len(group.ids) - 1 == len(kept.tokens):
            group.prefix, group.row = kept.prefix, kept.row
        elif shared == len(group.ids) - 1:
            group.prefix = self.engine.widen(kept.prefix, kept.row, shared)
        else:
            group.partial = self.engine.widen(kept.prefix, kept.row, shared)
            group.read = shared
        return True

    def _shares_pages(self, state: Slots, group: _Group) -> bool:
        shard, pages, shared = self.seats.find(group.ids[:-1])
        if 4 * shared < len(group.ids):
            self.cache.note(0)
            return False
        self.cache.note(shared)
        group.partial, group.read = self.engine.gather(state, shard, pages, shared), shared
        if shared == len(group.ids) - 1:
            group.prefix, group.partial = group.partial, None
        return True

    def _read_images(self, params, group: _Group) -> None:
        """Reads a prompt to its last image at least, in one pass: the vision tower runs once for
        all samples of it. What is behind is read in chunks."""
        config, most = self.engine.model.config, self.engine.tokens
        how = (config, group.ids, self.chunk_tokens, most)
        tokens, size, images = group.images.padded(*how)
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
        """Reads prompts of a chunk at most in one pass."""
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
        if not self.seats.stays and group.images is None:  # else its pages are found
            self.cache.put(group.ids[:-1], group.prefix, group.row)

    def admit(
        self, free: list[int], make_room: Callable[[int], bool]
    ) -> list[tuple[Prefix, list[Admitted]]]:
        """Takes samples whose prompt was read out of the queue, in its order, for the slots `free`
        (which become fewer): by prefix, so that each is put into all its slots at once. Ends at the
        first one that no device has pages for (`Seats.take`)."""
        placed: dict[int, tuple[Prefix, list[Admitted]]] = {}
        for group in list(self._groups):
            while group.prefix is not None and group.waiting and free:
                at = self.seats.take(group.waiting[0], free, make_room, fresh=True)
                if at is None:
                    return list(placed.values())
                one = Admitted(group.waiting.popleft(), at, group.row)
                self.seats.read(one.sample, one.sample.size - 1)
                placed.setdefault(id(group.prefix), (group.prefix, []))[1].append(one)
            if not group.waiting:
                self._groups.remove(group)
            if not free:
                break
        return list(placed.values())
