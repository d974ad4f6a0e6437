"""States of samples: how they come into slots, leave them and come back.

A sample is in one of these states:

| state | it is in | what was read of it |
|---|---|---|
| waiting | `Prompts` | nothing, or its prompt |
| live | `slots` | all but its last token |
| unread | `slots` and `unread`: live once its new tokens are read | `cached` tokens |
| held | `slots` and `held`: finished, until `deliver` or `release` | `cached` tokens |
| parked | `beside`: held without a slot | in its pages, a row of `parked`, or gone |
| returning | `returns`: goes on in any slot | the same, or in a Partial |
| done | nowhere | in a Partial, if it was asked to keep it |
"""

import itertools
from collections.abc import Iterable

import numpy as np

from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.sample import Sample
from rljax.sampler.seats import Seats, highest
from rljax.sampler.turns import Parked, Return, put_back, read_together, reread_nothing

FREE_SHARE = 8  # while requests wait, a dispatch ends when slots / FREE_SHARE of them are free


class Places:
    """The samples of an engine's slots and those that left them, and the decode state."""

    def __init__(self, engine: Engine, parked_tokens: int):
        self.engine, self.seats = engine, Seats(engine)
        self.slots: list[Sample | None] = [None] * engine.slots
        self.held: dict[Sample, int] = {}  # samples that wait for `deliver`, and their slots
        self.unread: dict[int, Sample] = {}  # slots whose samples have tokens that were not read
        self.beside: dict[Sample, None] = {}  # parked; as ordered on all hosts, which no set is
        self.returns: list[Return] = []  # what goes on in any slot, first come first
        self.parked = Parked(engine, parked_tokens)
        self.state = engine.init_state()
        self.version: int | None = None
        self.reread_tokens = 0  # read again, as their caches had to go

    @property
    def live(self) -> int:
        """Samples that decode."""
        return len(self.slots) - self.slots.count(None) - len(self.held)

    def free(self) -> list[int]:
        return [at for at, sample in enumerate(self.slots) if sample is None]

    def padded(self, some: list[int]) -> np.ndarray:
        """Slots as the argument of an engine's verb."""
        slots = np.full(len(self.slots), len(self.slots), np.int32)
        slots[: len(some)] = some
        return slots

    def at_version(self, version: int, keep_cache: bool) -> None:
        """Other parameters from here on: what the last ones read stays, or is read again."""
        self.seats.at_version(version)
        if self.version is not None and not keep_cache:
            for at, sample in enumerate(self.slots):
                if sample is None:
                    continue
                if sample not in self.held and at not in self.unread:
                    sample.cached = sample.size - 1
                    self.unread[at] = sample
                self.seats.leave(sample, at)
                sample.forget()
            for sample in [*self.beside, *(one.sample for one in self.returns)]:
                self.parked.drop(sample)
                self.seats.forget(sample)
        self.version = version

    def warm_up(self, params) -> None:
        """Compiles what is needed where pages are short, or found again."""
        none = self.padded([])
        self.state = self.engine.release(self.state, none)
        self.state = reread_nothing(self.engine, params, self.state)
        if self.seats.stays:
            self.engine.gather(self.state, *self.seats.find(none[:0]))

    def take_unseen(self) -> list[Sample]:
        """Takes out samples that go on and whose images have to be read again: nothing of them is
        kept, and what reads on behind a slot's tokens reads text. They wait as new prompts do."""
        slots = [at for at, s in self.unread.items() if s.images is not None and not s.cached]
        samples = [self.unread.pop(at) for at in slots]
        for at in slots:
            self.leave(at)
        if slots:
            self.state = self.engine.release(self.state, self.padded(slots))
        unseen = [one.sample for one in self.returns if self._unseen(one)]
        self.returns = [one for one in self.returns if one.sample not in unseen]
        for sample in unseen:
            self.parked.drop(sample)
            self.seats.forget(sample)
        for sample in [*samples, *unseen]:
            self.reread_tokens += sample.lost
            sample.cached = sample.lost = 0
        return sorted([*samples, *unseen], key=lambda sample: sample.id)

    def _unseen(self, one: Return) -> bool:
        """Returns whether a sample has images and comes back without all that was read of them.
        (Pages may be found that end inside of an image.)"""
        kept = one.partial is None
        if not kept:
            kept = one.partial.prefix is not None and one.partial.version == self.version
        kept = kept and one.sample.cached > 0 and not self.seats.stays
        return one.sample.images is not None and not kept

    # -- out of slots

    def remove(self, sample: Sample) -> bool:
        """Takes a sample out; whether it was here."""
        if sample in self.slots:
            at = self.slots.index(sample)
            self.unread.pop(at, None)
            if self.held.pop(sample, None) is None:
                self.state = self.engine.release(self.state, np.array([at], np.int32))
            self.leave(at)
            return True
        if sample in self.beside or any(one.sample is sample for one in self.returns):
            self.beside.pop(sample, None)
            self.returns = [one for one in self.returns if one.sample is not sample]
            self.parked.drop(sample)
            self.seats.forget(sample)
            return True
        return False

    def leave(self, at: int, *, keep: bool = False) -> None:
        """Slot `at` is free, and its sample has its pages still where `keep` says so."""
        self.seats.leave(self.slots[at], at, keep=keep)
        self.slots[at] = None

    def kept(self, at: int) -> Prefix | None:
        """Copies what the sample in slot `at`, which is not held, has read, as `copied`."""
        sample = self.slots[at]
        if at not in self.unread:
            sample.cached = sample.size - 1
        self.seats.read(sample, sample.cached)
        return self.copied(at)

    def copied(self, at: int) -> Prefix | None:
        """Copies what the sample in slot `at` has read, to go on from; None where its pages are
        found again."""
        if self.seats.stays or not self.slots[at].cached:
            return None
        return self.engine.extract(self.state, np.array([at], np.int32))

    def read_of(self, sample: Sample) -> tuple[Prefix | None, int]:
        """Returns what was read of a finished sample, as a prefix of one row, and how many of its
        tokens that are; (None, 0) where it is gone."""
        prefix, read = None, sample.cached
        if sample in self.held:
            if read:
                prefix = self.engine.extract(self.state, np.array([self.held[sample]], np.int32))
        elif sample in self.beside:
            prefix = self.parked.copied(sample)
            if self.seats.stays and read and (pages := self.seats.pages_of(sample)):
                prefix = self.engine.gather(self.state, *pages, read)
        elif sample.partial is not None and sample.partial.version == self.version:
            prefix, read = sample.partial.prefix, sample.partial.then.cached
            if self.seats.stays:  # all but the end of them, less than a page
                shard, pages, read = self.seats.find(sample.ids[:read])
                prefix = self.engine.gather(self.state, shard, pages, read) if read else None
        return (prefix, read) if prefix is not None else (None, 0)

    def make_room(self, prompts: Iterable[Sample]) -> None:
        """Takes slots from held samples for others that wait for one: from the held sample with the
        highest request id, as long as that is above the id of the one that waits. Where all slots
        are held, also from lower ones: what they wait for may depend on what waits here."""
        free, held = self.slots.count(None), sorted(self.held, key=lambda sample: sample.id)
        self.returns.sort(key=lambda one: one.sample.id)
        waiting = itertools.chain((one.sample for one in self.returns), prompts)
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
            self.park(chosen)

    def park(self, samples: list[Sample]) -> None:
        """Takes held samples out of their slots."""
        moved = {self.held.pop(sample): sample for sample in samples}
        if not self.seats.stays:
            self.parked.put(self.state, moved)
        for at, sample in moved.items():
            self.leave(at, keep=self.seats.stays)
            self.beside[sample] = None

    # -- into slots

    def bring_back(self) -> bool:
        """Puts samples that go on into free slots, with what is kept of them; whether none of them
        waits for pages."""
        free, placed, prefixes = self.free(), {}, {}
        while free and self.returns:
            one = self.returns.pop(0)
            at = self.seats.take(one.sample, free, self.evict)
            if at is None:
                self.returns.insert(0, one)
                break
            sample = self.slots[at] = self.unread[at] = placed[at] = one.sample
            if self.seats.stays or one.partial is None and sample.cached:
                continue
            if one.partial is not None and one.partial.prefix is not None:
                if one.partial.version == self.version:
                    prefixes[at] = one.partial.prefix
                    continue
            sample.forget()
        self.state = self.seats.put(self.state)
        self.state = self.parked.take(self.state, placed)
        self.state = put_back(self.engine, self.state, prefixes)
        return not (free and self.returns)

    def read(self, params) -> None:
        """Reads what is new of samples that go on."""
        for sample in self.unread.values():
            self.reread_tokens += sample.lost
            sample.lost = 0
        self.state = read_together(self.engine, params, self.state, self.unread)
        self.unread = {}

    # -- where pages are short

    def evict(self, shard: int, held: bool = False) -> bool:
        """Takes the pages of a sample that does not decode, the one with the highest request id;
        of `held` ones in their slots, too, or where nothing decodes. Whether there was one."""
        chosen = [*self.beside, *(one.sample for one in self.returns)]
        chosen = [sample for sample in chosen if self.seats.has(sample, shard)]
        seated = [s for s in self.slots if s is not None and self.seats.has(s, shard)]
        if not chosen and (held or all(sample in self.held for sample in seated)):
            chosen = [sample for sample in self.held if self.seats.has(sample, shard)]
        if not chosen:
            return False
        sample = highest(chosen)
        if sample in self.held:
            self.park([sample])
        self.parked.drop(sample)
        self.seats.forget(sample)
        return True

    def grow(self) -> None:
        """Gives every sample that decodes the pages of the next dispatch, the lowest request id
        first. Where there are too few, the one with the highest waits, and is read again."""
        if self.seats.pages is None:
            return
        live = {at: s for at, s in enumerate(self.slots) if s is not None and s not in self.held}
        preempted: list[int] = []
        for at, sample in sorted(live.items(), key=lambda one: (one[1].id, one[0])):
            shard = self.seats.shard(at)
            while at in live and not self.seats.grow(sample, at):
                if self.evict(shard, held=True):
                    continue
                others = [other for other in live if self.seats.shard(other) == shard]
                last = max(others, key=lambda other: (live[other].id, other))
                self._preempt(last, live.pop(last))
                preempted.append(last)
        if preempted:
            self.state = self.engine.release(self.state, self.padded(preempted))
        self.state = self.seats.put(self.state)

    def _preempt(self, at: int, sample: Sample) -> None:
        if self.unread.pop(at, None) is None:
            sample.cached = sample.size - 1
        self.leave(at)
        sample.forget()
        self.returns.append(Return(sample))
        self.seats.preemptions += 1
