"""Continuous batching on the host: requests come in at any time, samples go out as they finish.

Keeps the owners of the slots; the device programs are in `engine`, the queue of prompts in
`prompts`, what samples that go on need in `turns`.

A step is: make room for what waits, read a chunk of it, put it into free slots, decode until enough
slots are free, hand out what finished. Parameters are an argument of every step and are never kept;
each token carries the version that drew it. A draw depends on the parameters, the tokens before it,
and the request's key alone.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts
from rljax.arrays import fetch, told_to_stop
from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.sampler.engine import Engine
from rljax.sampler.entries import entry_of
from rljax.sampler.keys import Keys, request_key
from rljax.sampler.memory import check_memory
from rljax.sampler.prefix_cache import PrefixCache
from rljax.sampler.prompts import Prompts
from rljax.sampler.requests import Sampling
from rljax.sampler.sample import RECORD, Event, Partial, Sample
from rljax.sampler.turns import Parked, Return, put_back, read_together

FREE_SHARE = 8  # while requests wait, a dispatch ends when slots / FREE_SHARE of them are free


class Sampler:
    """Continuous batching over an engine's slots. One thread. On several hosts all of them make the
    same calls on a Sampler of their own; what one of them alone knows, it tells the others first
    (rljax.hosts)."""

    def __init__(
        self,
        engine: Engine,
        *,
        key: jax.Array | None = None,
        chunk_tokens: int = 256,
        prefill_rows: int = 8,
        prefix_cache_tokens: int = 0,
        parked_tokens: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        """`key` decides the draws of requests without a seed. Prompts are read `chunk_tokens` at a
        time, short ones `prefill_rows` together. `parked_tokens`: room, in tokens, for what was
        read of held samples whose slots others need. `decode`: ids -> text, for stop strings."""
        for name, value, least in (
            ("chunk_tokens", chunk_tokens, 1), ("prefill_rows", prefill_rows, 1),
            ("parked_tokens", parked_tokens, 0),
        ):  # fmt: skip
            if value < least:
                raise InputError(f"sampler {name}", value=value, rule=f">= {least}")
        self.engine, self.decode = engine, decode
        beside = -(-prefix_cache_tokens // engine.tokens) + parked_tokens // engine.tokens
        check_memory(engine.model, engine.slots + beside, engine.tokens, engine.kv_dtype)
        self.cache = PrefixCache(engine.model.config, prefix_cache_tokens)
        self._keys = Keys(jax.random.key(0) if key is None else key)
        self._ids = itertools.count()
        chunk_tokens = min(chunk_tokens, engine.tokens)
        self._prompts = Prompts(engine, self.cache, chunk_tokens, prefill_rows)
        self._returns: list[Return] = []  # what goes on in any slot, first come first
        self._slots: list[Sample | None] = [None] * engine.slots
        self._held: dict[Sample, int] = {}  # samples that wait for `deliver`, and their slots
        self._beside: set[Sample] = set()  # as well, without a slot
        self._unread: dict[int, Sample] = {}  # slots whose samples have tokens that were not read
        self._parked = Parked(engine, parked_tokens)
        self._state = engine.init_state()
        self._version: int | None = None
        # Of the decode steps done so far: slot-steps, and how many of them gave a token.
        self.slot_steps = self.live_slot_steps = self.dispatches = 0
        self.reread_tokens = 0  # read again, as their caches had to go
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
        hold: bool = False,
    ) -> list[Sample]:
        """Submits n samples of one prompt, which is read once; returns them.

        Sample i draws with fold_in(key, request_ids[i]), by default the next free numbers; with a
        seed, fold_in(key(seed), i). `keep`: finished samples can go on (`resume`) without being
        read again. `hold`: finished samples keep their slots, or a place beside the slots while
        others need these, until `deliver` or `release`. A request that cannot be served raises
        InputError and leaves the others alone.
        """
        ids = self._check(prompt, sampling, n)
        if keep and hold:
            raise InputError("keep and hold", value=(keep, hold), rule="one of both")
        if request_ids is None:
            taken = range(n) if sampling.seed is not None else itertools.islice(self._ids, n)
            request_ids = list(taken)
        elif len(request_ids) != n or not all(0 <= i < 2**31 for i in request_ids):
            rule = f"one per sample, {n}, from 0 to 2**31 - 1"
            raise InputError("request_ids", value=list(request_ids)[:8], rule=rule)
        keys = self._keys.of
        if sampling.seed is not None:
            root = jax.random.key(sampling.seed)
            keys = lambda i: fetch(request_key(root, i))  # noqa: E731
        now, how = time.monotonic(), dict(keep=keep, hold=hold)
        samples = [Sample(i, ids, sampling, keys(i), submitted_s=now, **how) for i in request_ids]
        self._prompts.add(ids, samples)
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
        self.engine.check(sampling)
        return ids.astype(np.int32)

    @property
    def pending(self) -> int:
        """Samples that are not finished."""
        slots = sum(sample is not None for sample in self._slots)
        return len(self._prompts) + len(self._returns) + slots - len(self._held)

    @property
    def held(self) -> int:
        """Samples that keep a slot for their next turn."""
        return len(self._held)

    @property
    def parked(self) -> int:
        """Samples that wait for their next turn without a slot."""
        return len(self._beside)

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
            at = self._slots.index(sample)
            prefix = self.engine.extract(self._state, np.array([at], np.int32))
            if at not in self._unread:
                sample.cached = sample.size - 1
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
        left = sampling or dataclasses.replace(
            sample.sampling,
            max_response_tokens=sample.sampling.max_response_tokens - sample.drawn,
        )
        ids = self._check([*sample.ids.tolist(), *more], left, 1)
        sample.append_observation(more, self._version or 0)
        if sampling is not None:
            sample.limit(sampling)
        sample.cached = partial.then.cached
        if sample.cached or len(sample.tokens):
            self._returns.insert(0, Return(sample, partial))
        else:
            self._prompts.add(ids, [sample], first=True)
        return sample

    def deliver(self, replies: Sequence[tuple[Sample, Sequence[int], Sampling]]) -> None:
        """Goes on with held samples, each behind the tokens of its reply, which the policy did not
        choose, with the limits of its next turn. Nothing is changed if one of them cannot be.

        What is new is read in the next step, by a few programs whatever the number of replies."""
        given: set[Sample] = set()
        for sample, more, sampling in replies:
            if sample in given or sample not in self._held and sample not in self._beside:
                rule = "samples that are held, once each"
                raise InputError("deliver", value=f"sample {sample.id}", rule=rule)
            given.add(sample)
            self._check(np.concatenate([sample.ids, np.asarray(more, np.int32)]), sampling, 1)
        for sample, more, sampling in replies:
            sample.append_observation(more, self._version or 0)
            sample.limit(sampling)
            if sample in self._held:
                self._unread[self._held.pop(sample)] = sample
            else:
                self._beside.remove(sample)
                self._returns.append(Return(sample))

    def release(self, sample: Sample) -> None:
        """Lets go of a finished sample: frees the slot, or the room beside the slots, that it holds
        if it does."""
        if sample in self._held or sample in self._beside:
            self._remove(sample)
        elif sample.finish_reason is None:
            raise InputError("release", value=f"sample {sample.id}", rule="finished", fix="abort")

    def _remove(self, sample: Sample) -> None:
        if sample in self._slots:
            at = self._slots.index(sample)
            self._slots[at] = None
            self._unread.pop(at, None)
            if self._held.pop(sample, None) is None:
                self._state = self.engine.release(self._state, np.array([at], np.int32))
            return
        if sample in self._beside or any(one.sample is sample for one in self._returns):
            self._beside.discard(sample)
            self._returns = [one for one in self._returns if one.sample is not sample]
            self._parked.drop(sample)
            sample.forget()
        elif not self._prompts.remove(sample):
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
            self._on_new_version(version, keep_cache)
        self._make_room()
        self._return()
        self._prompts.read(params, self._slots.count(None))
        self._admit()
        self._read_unread(params)
        live = len(self._slots) - self._slots.count(None) - len(self._held)
        if not live:
            return []
        waiting = bool(self._returns) or len(self._prompts) > 0
        idle = len(self._slots) - live
        enough = idle + max(1, len(self._slots) // FREE_SHARE) if waiting else None
        ready = time.perf_counter()
        self._state, tokens, done = self.engine.generate(
            params, self._state, self.engine.steps, enough
        )
        told = told_to_stop(self.engine.model.mesh)
        told = None if told is None else _any(told)
        ended = (tokens, done, self._state.live, self._state.reason, told)
        tokens, done, live, reason, told = fetch(ended)
        if told:
            hosts.stop_here()
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

    def _on_new_version(self, version: int, keep_cache: bool) -> None:
        self._prompts.at_version(version)
        if self._version is not None and not keep_cache:
            for at, sample in enumerate(self._slots):
                if sample is None:
                    continue
                if sample not in self._held and at not in self._unread:
                    sample.cached = sample.size - 1
                    self._unread[at] = sample
                sample.forget()
            for sample in [*self._beside, *(one.sample for one in self._returns)]:
                self._parked.drop(sample)
                sample.forget()
        self._version = version

    def _make_room(self) -> None:
        """Takes slots from held samples for others that wait for one: from the held sample with the
        highest request id, as long as that is above the id of the one that waits. Where all slots
        are held, also from lower ones: what they wait for may depend on what waits here."""
        free, held = self._slots.count(None), sorted(self._held, key=lambda sample: sample.id)
        self._returns.sort(key=lambda one: one.sample.id)
        waiting = itertools.chain((one.sample for one in self._returns), self._prompts)
        chosen: list[Sample] = []
        for sample in itertools.islice(waiting, free, free + len(held)):
            if held[-1].id <= sample.id:
                break
            chosen.append(held.pop())
        else:
            sample = None
        if len(self._held) == len(self._slots) and not chosen and sample is not None:
            chosen = held[-max(1, len(self._slots) // FREE_SHARE) :]
        if chosen:
            self._park(chosen)

    def _park(self, samples: list[Sample]) -> None:
        moved = {self._held.pop(sample): sample for sample in samples}
        self._parked.put(self._state, moved)
        for at, sample in moved.items():
            self._slots[at] = None
            self._beside.add(sample)

    def _return(self) -> None:
        """Puts samples that go on into free slots, with what is kept of them."""
        free = [at for at, sample in enumerate(self._slots) if sample is None]
        count = min(len(free), len(self._returns))
        some, self._returns = self._returns[:count], self._returns[count:]
        placed, prefixes = {}, {}
        for at, one in zip(free, some, strict=False):
            sample = self._slots[at] = self._unread[at] = placed[at] = one.sample
            if one.partial is None and sample.cached:
                continue
            if one.partial is not None and one.partial.prefix is not None:
                if one.partial.version == self._version:
                    prefixes[at] = one.partial.prefix
                    continue
            sample.forget()
        self._state = self._parked.take(self._state, placed)
        self._state = put_back(self.engine, self._state, prefixes)

    def _read_unread(self, params) -> None:
        """Reads what is new of samples that go on."""
        for sample in self._unread.values():
            self.reread_tokens += sample.lost
            sample.lost = 0
        self._state = read_together(self.engine, params, self._state, self._unread)
        self._unread = {}

    def _admit(self) -> None:
        """Fills free slots with prompts that were read, one insert per prefix."""
        free = [at for at, sample in enumerate(self._slots) if sample is None]
        rows = len(self._slots)
        for prefix, some in self._prompts.admit(free):
            slots, source = np.full(rows, rows, np.int32), np.zeros(rows, np.int32)
            for i, one in enumerate(some):
                slots[i], source[i] = one.at, one.row
                self._slots[one.at] = one.sample
            samples = [one.sample for one in some]
            length = [sample.size - 1 for sample in samples]
            token = [sample.ids[-1] for sample in samples]
            entry = entry_of(self.engine, samples, length, token, rows)
            self._state = self.engine.insert(prefix, self._state, slots, source, entry)

    def _collect(self, tokens, done: int, live, reason, version: int) -> list[Event]:
        """Hand each slot's new tokens to its sample, and free the slots of what finished."""
        self.dispatches += 1
        self.slot_steps += done * len(self._slots)
        counts, now, events = tokens.valid.sum(axis=0), time.monotonic(), []
        self.live_slot_steps += int(counts.sum())
        records = np.zeros((len(self._slots), done), RECORD)
        for name, values in (
            ("ids", tokens.ids), ("logprobs", tokens.logp), ("log_kept", tokens.log_kept),
            ("entropy", tokens.entropy), ("chosen", tokens.chosen),
        ):  # fmt: skip
            records[name] = values[:done].T
        records["versions"] = version
        forced = (tokens.valid & ~tokens.chosen).sum(axis=0).tolist()
        counts, live, reason = counts.tolist(), live.tolist(), reason.tolist()
        freed: list[int] = []
        for at, sample in enumerate(self._slots):
            if sample is None or sample in self._held:
                continue
            count = counts[at]
            sample.drawn += count
            sample.record(records[at, :count])
            sample.interrupted += forced[at]
            if count and not sample.first_token_s:
                sample.first_token_s = now
            if not live[at]:
                sample.finish_reason = FinishReason(reason[at])
            broken = sample.finish_reason == FinishReason.ABORT
            reached = sample.size - 1
            count -= sample.cut(count, self.decode)
            if sample.finish_reason == FinishReason.ABORT:
                sample.error = "the model's logits are not finite"
            if broken:
                self._state = self.engine.clear(self._state, np.array([at], np.int32))
            if sample.finish_reason is not None:
                if live[at]:
                    freed.append(at)
                self._finish(sample, at, 0 if broken else reached, now)
            events.append(Event(sample, count))
        if freed:
            slots = np.full(len(self._slots), len(self._slots), np.int32)
            slots[: len(freed)] = freed
            self._state = self.engine.release(self._state, slots)
        return events

    def _finish(self, sample: Sample, at: int, reached: int, now: float) -> None:
        """Frees the slot of a finished sample, which has read `reached` tokens, or holds it."""
        sample.finished_s = now
        sample.cached = sample.size - 1
        beyond = reached > sample.cached and not self.engine.can_go_back(reached)
        if beyond or reached < sample.cached:
            sample.forget()  # the slot went further than the sample, over what it needs
        if sample.keep:
            prefix = None
            if sample.cached:
                prefix = self.engine.extract(self._state, np.array([at], np.int32))
            sample.partial = Partial(sample, prefix, self._version, sample.copy())
        if sample.hold and sample.finish_reason != FinishReason.ABORT:
            if sample.cached:
                self._held[sample] = at
                return
            self._beside.add(sample)
        self._slots[at] = None


_any = jax.jit(jnp.any)
