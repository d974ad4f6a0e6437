"""Continuous batching on the host: requests come in at any time, samples go out as they finish.

Keeps the queue and the owners of the slots; the device programs are in `engine`.

A step is: read a chunk of what waits, put it into free slots, decode until enough slots are free,
hand out what finished. Parameters are an argument of every step and are never kept; each token
carries the version that drew it. A draw depends on the parameters, the prompt, and the request's
key alone.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.keys import budgets, request_key
from rljax.sampler.memory import check_memory
from rljax.sampler.prefix_cache import PrefixCache
from rljax.sampler.requests import Sampling
from rljax.sampler.sample import Event, Partial, Sample
from rljax.sampler.slots import Entry
from rljax.sampler.stop_strings import find_stop

FREE_SHARE = 8  # while requests wait, a dispatch ends when slots / FREE_SHARE of them are free


@dataclasses.dataclass(eq=False)
class _Group:
    """Samples that wait behind the same tokens."""

    ids: np.ndarray
    waiting: collections.deque  # of Sample
    prefix: Prefix | None = None  # all but the last of ids were read into its row
    row: int = 0
    partial: Prefix | None = None  # a long prompt so far
    read: int = 0  # tokens that `partial` holds, the last of them still to be read
    whole: bool = False  # to be read in one step: an update took what was read
    shared: bool = True  # read by this version alone, so that others may start from it


class Sampler:
    """Continuous batching over an engine's slots. One thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        key: jax.Array | None = None,
        chunk_tokens: int = 256,
        prefill_rows: int = 8,
        prefix_cache_tokens: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        """`key` decides the draws of requests without a seed. Prompts are read `chunk_tokens` at a
        time, short ones `prefill_rows` together. `decode`: ids -> text, for stop strings."""
        for name, value in (("chunk_tokens", chunk_tokens), ("prefill_rows", prefill_rows)):
            if value < 1:
                raise InputError(f"sampler {name}", value=value, rule=">= 1")
        self.engine, self.decode = engine, decode
        self.chunk_tokens = min(chunk_tokens, engine.tokens)
        self.prefill_rows = prefill_rows
        beside = -(-prefix_cache_tokens // engine.tokens)
        check_memory(engine.model, engine.slots + beside, engine.tokens, engine.kv_dtype)
        self.cache = PrefixCache(engine.model.config, prefix_cache_tokens)
        self._key = jax.random.key(0) if key is None else key
        self._ids = itertools.count()
        self._queue: collections.deque[_Group] = collections.deque()
        self._slots: list[Sample | None] = [None] * engine.slots
        self._state = engine.init_state()
        self._version: int | None = None
        # Of the decode steps done so far: slot-steps, and how many of them gave a token.
        self.slot_steps = self.live_slot_steps = self.dispatches = 0
        self.host_s = self.device_s = 0.0

    # -- requests

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        request_ids: Sequence[int] | None = None,
        keep: bool = False,
    ) -> list[Sample]:
        """Submits n samples of one prompt, which is read once; returns them.

        Sample i draws with fold_in(key, request_ids[i]), by default the next free numbers; with a
        seed, fold_in(key(seed), i). `keep`: finished samples can go on (`resume`) without being
        read again. A request that cannot be served raises InputError and leaves the others alone.
        """
        ids = self._check(prompt, sampling, n)
        if request_ids is None:
            taken = range(n) if sampling.seed is not None else itertools.islice(self._ids, n)
            request_ids = list(taken)
        elif len(request_ids) != n or not all(0 <= i < 2**31 for i in request_ids):
            rule = f"one per sample, {n}, from 0 to 2**31 - 1"
            raise InputError("request_ids", value=list(request_ids)[:8], rule=rule)
        root = self._key if sampling.seed is None else jax.random.key(sampling.seed)
        now = time.monotonic()
        samples = [
            Sample(i, ids, sampling, np.asarray(request_key(root, i)), submitted_s=now, keep=keep)
            for i in request_ids
        ]
        self._queue.append(_Group(ids, collections.deque(samples)))
        return samples

    def _check(self, prompt: Sequence[int], sampling: Sampling, n: int) -> np.ndarray:
        """The ids of a request that can be served."""
        try:
            ids = np.asarray(prompt)
        except ValueError:
            raise InputError("prompt", value=type(prompt), rule="one list of token ids") from None
        vocab_size, room = self.engine.model.config.vocab_size, self.engine.tokens
        if n < 1:
            raise InputError("samples per prompt", value=n, rule=">= 1")
        if ids.ndim != 1 or not len(ids):
            raise InputError("prompt", value=ids.shape, rule="at least one token id")
        if not np.issubdtype(ids.dtype, np.integer):
            raise InputError("prompt", value=ids.dtype, rule="token ids, which are integers")
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise InputError("prompt", value=int(bad), rule=f"ids from 0 to {vocab_size - 1}")
        if len(ids) + sampling.max_response_tokens > room:
            raise InputError(
                "a prompt and its response do not fit a slot",
                value=f"{len(ids)} + {sampling.max_response_tokens} tokens",
                rule=f"at most the {room} of a slot",
                fix="a shorter prompt, a lower max_response_tokens, or longer slots",
            )
        if sampling.stop_strings and self.decode is None:
            raise InputError("sampler stop_strings need a tokenizer", fix="pass decode=")
        self.engine.rules([sampling])
        return ids.astype(np.int32)

    @property
    def pending(self) -> int:
        """Samples that are not finished."""
        waiting = sum(len(group.waiting) for group in self._queue)
        return waiting + sum(sample is not None for sample in self._slots)

    def abort(self, sample: Sample, error: str = "aborted by the caller") -> Sample:
        """End a sample where it stands."""
        self._remove(sample)
        sample.finish_reason, sample.error = FinishReason.ABORT, error
        sample.finished_s = time.monotonic()
        return sample

    def pause(self, sample: Sample) -> Partial:
        """Take a sample out of its slot; `resume` goes on as if it had stayed."""
        prefix = None
        if sample in self._slots:
            at = np.array([self._slots.index(sample)], np.int32)
            prefix = self.engine.extract(self._state, at)
        self._remove(sample)
        return Partial(sample, prefix, self._version, sample.copy())

    def resume(
        self, partial: Partial, more: Sequence[int] = (), sampling: Sampling | None = None
    ) -> Sample:
        """Go on with a paused or finished sample, behind `more` tokens that the policy did not
        choose (a tool's reply). What the parameters of another version have read is read again.

        Stop strings are looked for in what is new. Resumed again, a partial gives a second sample
        of the same request and the same draws.
        """
        sample = partial.take()
        ids = [*sample.ids.tolist(), *more]
        left = sampling or dataclasses.replace(
            sample.sampling,
            max_response_tokens=sample.sampling.max_response_tokens - sample.drawn,
        )
        ids = self._check(ids, left, 1)
        if sampling is not None:
            sample.sampling, sample.drawn, sample.turn = sampling, 0, len(sample.tokens)
            sample.begun, sample.interrupted = len(sample.tokens) + len(more), 0
        own = all(version == self._version for version in sample.versions)
        sample.append_observation(more, self._version or 0)
        group = _Group(ids, collections.deque([sample]))
        if partial.prefix is not None and partial.version == self._version:
            # A copy: reading more writes in place, and a partial may be resumed again.
            group.partial = jax.tree.map(jnp.copy, partial.prefix)
            group.read, group.shared = len(ids) - len(more), own
        self._queue.appendleft(group)
        return sample

    def _remove(self, sample: Sample) -> None:
        if sample in self._slots:
            at = self._slots.index(sample)
            self._slots[at] = None
            self._state = self.engine.release(self._state, np.array([at], np.int32))
            return
        for group in self._queue:
            if sample in group.waiting:
                group.waiting.remove(sample)
                if not group.waiting:
                    self._queue.remove(group)
                return
        raise InputError("this sample is not in the sampler", value=sample.id)

    # -- steps

    def step(self, params, *, version: int = 0, keep_cache: bool = True) -> list[Event]:
        """Admits what waits, decodes one dispatch with `params`, and returns the new tokens
        as events.

        `version` names the parameters. Where it changed, samples in flight go on over keys and
        values that older parameters wrote (PipelineRL, arXiv 2509.19128), or with keep_cache=False
        over new ones of their tokens so far (AReaL, arXiv 2505.24298).
        """
        started = time.perf_counter()
        if version != self._version:
            self._on_new_version(params, version, keep_cache)
        self._read(params)
        self._admit()
        if not any(self._slots):
            return []
        waiting = bool(self._queue)
        free = self._slots.count(None)
        enough = free + max(1, len(self._slots) // FREE_SHARE) if waiting else None
        ready = time.perf_counter()
        self._state, tokens, done = self.engine.generate(
            params, self._state, self.engine.steps, enough
        )
        ended = (tokens, done, self._state.live, self._state.reason)
        tokens, done, live, reason = fetch(ended)
        decoded = time.perf_counter()
        events = self._collect(tokens, int(done), live, reason, version)
        self.host_s += ready - started + time.perf_counter() - decoded
        self.device_s += decoded - ready
        return events

    def run(self, params, *, version: int = 0) -> Iterator[Sample]:
        """Yields each submitted sample as it finishes."""
        while self.pending:
            for event in self.step(params, version=version):
                if event.sample.finish_reason is not None:
                    yield event.sample

    def _on_new_version(self, params, version: int, keep_cache: bool) -> None:
        for group in self._queue:
            group.whole |= group.partial is not None
            group.prefix = group.partial = None
            group.read, group.shared = 0, True
        self.cache.at_version(version)
        live = [sample for sample in self._slots if sample is not None]
        if self._version is not None and not keep_cache and live:
            for sample in reversed(live):
                self._remove(sample)
                group = _Group(sample.ids, collections.deque([sample]), whole=True)
                self._queue.appendleft(group)
        self._version = version

    def _read(self, params) -> None:
        """Read prompts: the short ones that come first together, or one chunk of a long one."""
        free = self._slots.count(None)
        ready = sum(len(g.waiting) for g in self._queue if g.prefix is not None)
        unread = [group for group in self._queue if group.prefix is None]
        short, slots_left = [], free - ready
        for group in unread:
            if slots_left <= 0 or len(short) == self.prefill_rows:
                break
            slots_left -= len(group.waiting)
            if group.partial is None and not self._shares(group):
                if len(group.ids) <= self.chunk_tokens:
                    short.append(group)
                    continue
                group.partial = self.engine.empty_prefix()
            if group.prefix is None and not group.whole:
                self._read_chunk(params, group)
                break
            while group.prefix is None:
                self._read_chunk(params, group)
        if len(short) == 1:  # alone it is read faster than as one row of many
            short[0].partial = self.engine.empty_prefix()
            self._read_chunk(params, short[0])
        elif short:
            self._read_together(params, short)

    def _shares(self, group: _Group) -> bool:
        """Start from a cached beginning, if there is one."""
        if not self.cache.capacity or len(group.ids) < 2:
            return False
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
            if group.shared:
                self.cache.put(group.ids[:-1], group.prefix, 0)

    def _read_together(self, params, groups: list[_Group]) -> None:
        rows = self.prefill_rows
        tokens = np.zeros((rows, self.chunk_tokens), np.int32)
        lengths = np.ones(rows, np.int32)
        for row, group in enumerate(groups):
            tokens[row, : len(group.ids)], lengths[row] = group.ids, len(group.ids)
        prefix = self.engine.prefill(params, tokens, lengths)
        for row, group in enumerate(groups):
            group.prefix, group.row = prefix, row
            self.cache.put(group.ids[:-1], prefix, row)

    def _admit(self) -> None:
        """Fill free slots in the order of the queue, one insert per prefix."""
        free = [at for at, sample in enumerate(self._slots) if sample is None]
        placed: dict[int, list] = {}
        for group in list(self._queue):
            while group.prefix is not None and group.waiting and free:
                sample, at = group.waiting.popleft(), free.pop(0)
                self._slots[at] = sample
                placed.setdefault(id(group.prefix), [group.prefix]).append((at, group, sample))
            if not group.waiting:
                self._queue.remove(group)
            if not free:
                break
        for prefix, *entries in placed.values():
            self._insert(prefix, entries)

    def _insert(self, prefix: Prefix, entries: list) -> None:
        count = len(self._slots)
        slots, source = np.full(count, count, np.int32), np.zeros(count, np.int32)
        length, token, limit = (np.zeros(count, np.int32) for _ in range(3))
        key = np.zeros((count, 2), np.uint32)
        requests: list[Sampling] = [Sampling()] * count
        for i, (at, group, sample) in enumerate(entries):
            slots[i], source[i], key[i] = at, group.row, sample.key
            length[i], token[i] = len(group.ids) - 1, group.ids[-1]
            left = sample.sampling.max_response_tokens - sample.drawn
            limit[i], requests[i] = len(group.ids) + left, sample.sampling
        entry = Entry(
            length, token, limit, np.zeros(count, np.int32), key, self.engine.rules(requests),
            self._forcing(requests, entries),
        )  # fmt: skip
        self._state = self.engine.insert(prefix, self._state, slots, source, entry)

    def _forcing(self, requests: list[Sampling], entries: list):
        """The state of each sample's interruption; None where this engine has none."""
        if not self.engine.forcing_tokens:
            return None
        spent, start = np.full(len(requests), -1, np.int32), np.zeros(len(requests), np.int32)
        for i, (_, _, sample) in enumerate(entries):
            start[i] = len(sample.prompt) + sample.begun
            if sample.sampling.thinking_tokens:
                spent[i] = budgets(sample.key[None], sample.sampling)[0]
        forcing = self.engine.forcing(requests, spent, start)
        thinking, recent = np.array(forcing.thinking), forcing.recent
        for i, (_, _, sample) in enumerate(entries):
            newest = sample.tokens[sample.begun :][: -recent.shape[1] - 1 : -1]
            recent[i, : len(newest)] = newest
            forcing.forced[i] = sample.interrupted
            ended = sample.contains(sample.sampling.end_of_thinking_ids)
            thinking[i] &= not (sample.interrupted or ended)
        return dataclasses.replace(forcing, thinking=thinking)

    def _collect(self, tokens, done: int, live, reason, version: int) -> list[Event]:
        """Hand each slot's new tokens to its sample, and free the slots of what finished."""
        self.dispatches += 1
        self.slot_steps += done * len(self._slots)
        self.live_slot_steps += int(tokens.valid.sum())
        counts, now, events = tokens.valid.sum(axis=0), time.monotonic(), []
        by_slot = jax.tree.map(lambda x: x[:done].T.tolist(), tokens)
        for at, sample in enumerate(self._slots):
            if sample is None:
                continue
            count = int(counts[at])
            sample.drawn += count
            for name, values in (
                ("tokens", by_slot.ids), ("logprobs", by_slot.logp), ("chosen", by_slot.chosen),
                ("log_kept", by_slot.log_kept), ("entropy", by_slot.entropy),
            ):  # fmt: skip
                getattr(sample, name).extend(values[at][:count])
            sample.versions += [version] * count
            sample.interrupted += sum(not chosen for chosen in by_slot.chosen[at][:count])
            if count and not sample.first_token_s:
                sample.first_token_s = now
            if not live[at]:
                sample.finish_reason = FinishReason(int(reason[at]))
            broken = sample.finish_reason == FinishReason.ABORT
            count -= self._cut(sample, count)
            if sample.finish_reason == FinishReason.ABORT:
                sample.error = "the model's logits are not finite"
            if sample.finish_reason is not None:
                self._finish(sample, at, bool(live[at]), now)
            if broken:
                self._state = self.engine.clear(self._state, np.array([at], np.int32))
            events.append(Event(sample, count))
        return events

    def _cut(self, sample: Sample, new: int) -> int:
        """Ends a sample at a stop string; returns how many of its `new` tokens are beyond it."""
        stops, ids = sample.sampling.stop_strings, sample.tokens[sample.turn :]
        if not stops or not new:
            return 0
        kept = find_stop(ids, stops, self.decode, len(ids) - new)
        if kept is None:
            return 0
        sample.drop_last(len(ids) - kept)
        sample.finish_reason = FinishReason.STOP
        return len(ids) - kept

    def _finish(self, sample: Sample, at: int, live: bool, now: float) -> None:
        sample.finished_s = now
        slots = np.array([at], np.int32)
        if sample.keep:
            prefix = self.engine.extract(self._state, slots)
            # After a stop string the slot went further than the sample.
            read = np.array([len(sample.ids) - 1], np.int32)
            overrun = int(prefix.length[0]) > read[0]
            prefix = dataclasses.replace(
                prefix, length=jnp.asarray(read), token=jnp.asarray(sample.ids[-1:])
            )
            lost = overrun and any(kind.window for kind in self.engine.model.config.kinds)
            held = None if lost else prefix
            sample.partial = Partial(sample, held, self._version, sample.copy())
        if live:
            self._state = self.engine.release(self._state, slots)
        self._slots[at] = None
