"""Continuous batching on the host: requests come in at any time, samples go out as they finish.

`Sampler` is what callers see; which sample is in which slot is decided in `scheduler`, and the
device programs are in `engine`.

A step is: make room for what waits, read a chunk of it, put it into free slots, decode until enough
slots are free, hand out what finished. Parameters are an argument of every step and are never kept;
each token carries the version that drew it. A draw depends on the parameters, the tokens before it,
and the request's key alone.
"""

import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts
from rljax.arrays import fetch, told_to_stop
from rljax.batch import FinishReason
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.sampler import speculation
from rljax.sampler.engine import Engine
from rljax.sampler.inputs import RequestKeys, branch_keys, check_request, request_key
from rljax.sampler.memory import check_memory, check_whole
from rljax.sampler.prefix_cache import PrefixCache
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.requests import Sampling
from rljax.sampler.resume import Returning, check_branch
from rljax.sampler.sample import RECORD, Event, Partial, Sample
from rljax.sampler.scheduler import Scheduler
from rljax.tracking import timing


def _of_known_ids(engine: Engine, decode: Callable | None) -> Engine:
    """Returns the engine, whose model draws no id that the tokenizer of `decode` has not. A model
    that a config loads knows that already, as training does (ModelConfig.known_ids)."""
    method = decode.func if isinstance(decode, functools.partial) else decode
    tokenizer = method.__self__ if inspect.ismethod(method) else None
    config = engine.model.config
    if not isinstance(tokenizer, Tokenizer) or tokenizer.vocab_size >= config.ids:
        return engine
    config = dataclasses.replace(config, known_ids=tokenizer.vocab_size)
    return dataclasses.replace(engine, model=dataclasses.replace(engine.model, config=config))


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
        read of held samples whose slots others need. `decode`: ids -> text, for stop strings; of a
        tokenizer that has fewer ids than the model, the others are never drawn."""
        for name, value, minimum in (
            ("chunk_tokens", chunk_tokens, 1),
            ("prefill_rows", prefill_rows, 1),
            ("parked_tokens", parked_tokens, 0),
            ("prefix_cache_tokens", prefix_cache_tokens, 0),
        ):
            check_whole(name, value, minimum)
        engine = _of_known_ids(engine, decode)
        self.engine, self.decode = engine, decode
        self.cache = PrefixCache(engine.model.config, prefix_cache_tokens)
        chunk_tokens = min(chunk_tokens, engine.tokens)
        self._scheduler = Scheduler(engine, self.cache, chunk_tokens, prefill_rows, parked_tokens)
        if not self._scheduler.tables.keeps_pages:  # else pages hold what is kept
            cached_rows = -(-prefix_cache_tokens // engine.tokens) + parked_tokens // engine.tokens
            arguments = (engine.model, engine.slots + cached_rows, engine.tokens, engine.kv_dtype)
            check_memory(*arguments, engine.pool, cached_rows)
        self._keys = RequestKeys(jax.random.key(0) if key is None else key)
        self._ids = itertools.count()
        # Counts of the decode steps done so far: slot-steps, those that gave a token, dispatches.
        self.slot_steps = self.live_slot_steps = self.dispatches = 0
        self.drafted = self.kept_drafts = 0  # tokens; each that is kept is one more of its step
        self.host_s = self.device_s = 0.0

    # -- requests

    def _checked(self, prompt: Sequence[int], sampling: Sampling, n: int) -> np.ndarray:
        ids = check_request(self.engine, prompt, sampling, n, self.decode)
        self._scheduler.tables.check(len(ids) + sampling.max_response_tokens)
        return ids

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        request_ids: Sequence[int] | None = None,
        keys: np.ndarray | None = None,
        keep: bool = False,
        hold: bool = False,
        images: PromptImages | None = None,
    ) -> list[Sample]:
        """Submits n samples of one prompt, which is read once; returns them.

        Args:
          prompt: token ids [S].
          sampling: the options of the request.
          n: samples.
          request_ids: n numbers from 0 to 2**31 - 1; lower ones come first where slots are short.
            None: the next free ones.
          keys: [n, 2] uint32, which decide the draws. None: sample i draws with fold_in(key,
            request_ids[i]), with a seed with fold_in(key(seed), i).
          keep: finished samples can go on (`resume`) without being read again.
          hold: finished samples keep their slots, or are parked beside them while others need
            these, until `deliver` or `release`.
          images: those of the prompt.

        Raises InputError for a request that cannot be served, and leaves the others alone.
        """
        ids = self._checked(prompt, sampling, n)
        if images is not None:
            images.check(self.engine.model.config, ids)
        if keep and hold:
            raise InputError(
                "keep and hold", value=(keep, hold), rule="one of both", fix="set one of the two"
            )
        if request_ids is None and sampling.seed is not None:
            request_ids = range(n)
        request_ids = self._numbers(request_ids, n)
        if keys is None:
            keys = [self._key(i, sampling.seed) for i in request_ids]
        now, options = time.monotonic(), dict(keep=keep, hold=hold, images=images)
        samples = [
            Sample(i, ids, sampling, key, submitted_s=now, **options)
            for i, key in zip(request_ids, keys, strict=True)
        ]
        self._scheduler.queue.add(ids, samples)
        return samples

    def _numbers(self, request_ids: Sequence[int] | None, n: int) -> list[int]:
        """Returns the ids of n requests: those that are given, or the next free ones."""
        if request_ids is None:
            return list(itertools.islice(self._ids, n))
        if len(request_ids) != n or not all(0 <= i < 2**31 for i in request_ids):
            rule = f"one per sample, {n}, from 0 to 2**31 - 1"
            raise InputError(
                "request_ids",
                value=list(request_ids)[:8],
                rule=rule,
                fix="give a different number for each sample, or None",
            )
        return list(request_ids)

    def _key(self, request_id: int, seed: int | None) -> np.ndarray:
        if seed is None:
            return self._keys.of(request_id)
        return fetch(request_key(jax.random.key(seed), request_id))

    def restore(self, samples: Sequence[Sample]) -> None:
        """Takes over samples of another sampler, such as those of a checkpoint, each at the
        point where it stands: what they have read is read again. A finished one is held, if
        it says so."""
        groups: dict[tuple, list[Sample]] = {}
        for sample in samples:
            sample.cached, sample.lost = 0, sample.size - 1 if len(sample.tokens) else 0
            if sample.finish_reason is not None:
                self._scheduler.parked[sample] = None
            elif len(sample.tokens):
                self._scheduler.returning.append(Returning(sample))
            else:
                group_key = (sample.prompt.tobytes(), sample.images and sample.images.name)
                groups.setdefault(group_key, []).append(sample)
        for group in groups.values():
            self._scheduler.queue.add(group[0].prompt, group)

    @property
    def pending(self) -> int:
        """Samples that are not finished."""
        return self._scheduler.pending

    @property
    def held(self) -> int:
        """Samples that keep a slot for their next turn."""
        return len(self._scheduler.held)

    @property
    def parked(self) -> int:
        """Samples that wait for their next turn without a slot."""
        return len(self._scheduler.parked)

    @property
    def reread_tokens(self) -> int:
        """Tokens that were read again, as what was read of them had to go."""
        return self._scheduler.reread_tokens

    def page_metrics(self) -> dict[str, float]:
        """Returns how full the pages were, by dispatch; {} without pages."""
        return self._scheduler.tables.metrics()

    def warm_up_pages(self, params) -> None:
        """Compiles what is needed where pages are short, or found again."""
        self._scheduler.warm_up(params)

    def draft_metrics(self) -> dict[str, float]:
        """Returns metrics of drafts so far; {} without drafts."""
        steps = self.live_slot_steps if self.engine.draft_tokens else 0
        return timing.draft_metrics(steps, self.drafted, self.kept_drafts)

    def abort(self, sample: Sample, error: str = "aborted by the caller") -> Sample:
        """Ends a sample where it stands. Raises InputError if it is not in the sampler."""
        self._remove(sample)
        sample.finish_reason, sample.error = FinishReason.ABORT, error
        return sample

    def pause(self, sample: Sample) -> Partial:
        """Takes a sample out of its slot; `resume` goes on as if it had stayed. Raises InputError
        if it is not in the sampler."""
        prefix, slots = None, self._scheduler.slots
        if sample in slots:
            prefix = self._scheduler.extract_live(slots.index(sample))
        self._remove(sample)
        return Partial(sample, prefix, self._scheduler.version, sample.copy())

    def resume(
        self, partial: Partial, more: Sequence[int] = (), sampling: Sampling | None = None
    ) -> Sample:
        """Goes on with a paused or finished sample, behind the token ids `more` that the policy did
        not choose (a tool's reply). What the parameters of another version have read is read again.

        Stop strings are looked for in what is new. Resumed again, a partial gives a second
        sample of the same request and the same draws. Raises InputError if the longer request
        cannot be served.
        """
        sample = partial.take()
        limits = sampling or dataclasses.replace(
            sample.sampling, max_response_tokens=sample.sampling.max_response_tokens - sample.drawn
        )
        ids = self._checked([*sample.ids.tolist(), *more], limits, 1)
        sample.append_observation(more, self._scheduler.version or 0)
        if sampling is not None:
            sample.limit(sampling)
        sample.cached = partial.then.cached
        if sample.cached or len(sample.tokens):
            self._scheduler.returning.insert(0, Returning(sample, partial))
        else:
            self._scheduler.queue.add(ids, [sample], first=True)
        return sample

    def deliver(self, replies: Sequence[tuple[Sample, Sequence[int], Sampling]]) -> None:
        """Goes on with held samples, each behind the token ids of its reply, which the policy did
        not choose, with the limits of its next turn.

        What is new is read in the next step, by a few programs whatever the number of
        replies. Raises InputError, and changes nothing, if a sample is not held, or a request
        cannot be served.
        """
        delivered, scheduler = set(), self._scheduler
        for sample, reply, sampling in replies:
            is_held = sample in scheduler.held or sample in scheduler.parked
            if sample in delivered or not is_held:
                rule = "samples that are held, once each"
                raise InputError(
                    "deliver",
                    value=f"sample {sample.id}",
                    rule=rule,
                    fix="deliver to samples that were submitted with hold=True and have ended "
                    "their turn",
                )
            delivered.add(sample)
            self._checked(np.concatenate([sample.ids, np.asarray(reply, np.int32)]), sampling, 1)
        for sample, reply, sampling in replies:
            sample.append_observation(reply, scheduler.version or 0)
            sample.limit(sampling)
            if sample in scheduler.held:
                scheduler.unread[scheduler.held.pop(sample)] = sample
            else:
                del scheduler.parked[sample]
                scheduler.returning.append(Returning(sample))

    def branch(
        self,
        sample: Sample,
        at: int | Sequence[int],
        n: int = 1,
        *,
        sampling: Sampling | None = None,
        more: Sequence[int] = (),
        request_ids: Sequence[int] | None = None,
        keep: bool = False,
        hold: bool = False,
    ) -> list[Sample]:
        """Submits n new samples that go on behind the first `at` tokens of a finished sample's
        response; returns them. Of several `at` n each, those of one after those of another.

        Args:
          sample: a finished one. It stays as it is. What was read of it, if it is held or kept, is
            not read again, but for a window that went round, and with pages the last, partial page
            of a kept one; of another sample the longest prefix is read once.
          at: tokens of its response that are kept, with their records (`branched`).
          n: continuations. Continuation i draws with fold_in(key of the sample, (at, i)), whatever
            the slots and what is cached.
          sampling: a new turn begins at `at`, with these limits. None: of all limits what the
            sample had left there.
          more: token ids behind `at` that the policy did not choose (a tool's reply); with
            `sampling` alone.
          request_ids: as in `submit`, like `keep` and `hold`.

        Raises InputError for a sample with images or one that is not finished, and for tokens that
        are not in its last turn (with `sampling`: in its response).
        """
        ends = [at] if np.ndim(at) == 0 else list(at)
        check_branch(sample, ends, n, sampling, more, keep and hold)
        for end in ends if sampling is not None else ():
            kept_ids = sample.ids[: len(sample.prompt) + end]
            self._checked(np.concatenate([kept_ids, np.asarray(more, np.int32)]), sampling, n)
        ids = iter(self._numbers(request_ids, len(ends) * n))
        now, children = time.monotonic(), []
        options = dict(keep=keep, hold=hold, submitted_s=now)
        for end in ends:
            keys = fetch(branch_keys(sample.key[None], np.array([end], np.int32), n))[0]
            children += [sample.continued(end, next(ids), key, sampling, **options) for key in keys]
        if len(more):
            for child in children:
                child.append_observation(more, self._scheduler.version or 0)
                child.limit(sampling)
        self._scheduler.add_branches(sample, children)
        return children

    def release(self, sample: Sample) -> None:
        """Lets go of a finished sample: frees the slot, or the room beside the slots, that it holds
        if it does. Raises InputError for one that is not finished."""
        if sample in self._scheduler.held or sample in self._scheduler.parked:
            self._remove(sample)
        elif sample.finish_reason is None:
            raise InputError("release", value=f"sample {sample.id}", rule="finished", fix="abort")

    def _remove(self, sample: Sample) -> None:
        if not self._scheduler.remove(sample):
            raise InputError(
                "this sample is not in the sampler",
                value=sample.id,
                fix="cancel samples that are not finished",
            )

    # -- steps

    def step(
        self, params, *, version: int = 0, keep_cache: bool = True, raw_logprobs: bool = False
    ) -> list[Event]:
        """Admits what waits, decodes one dispatch with `params`, and returns the new
        tokens as events.

        `version` names the parameters. Where it changed, samples in flight go on over keys and
        values that older parameters wrote (PipelineRL, arXiv 2509.19128), or with keep_cache=False
        over new ones of their tokens so far (AReaL, arXiv 2505.24298).

        The log-probs are of softmax(logits / temperature), which a trainer compares; with
        `raw_logprobs` of softmax(logits), whatever the temperature.
        """
        started_s, scheduler = time.perf_counter(), self._scheduler
        if version != scheduler.version:
            scheduler.set_version(version, keep_cache)
        dispatch = scheduler.schedule(params)
        if dispatch is None:
            return []
        ready_s = time.perf_counter()
        scheduler.state, tokens, steps_done = self.engine.generate(
            params, scheduler.state, *dispatch, raw_logprobs=raw_logprobs
        )
        must_stop = told_to_stop(self.engine.model.mesh)
        must_stop = None if must_stop is None else _any(must_stop)
        drafts = speculation.totals(scheduler.state.drafts)
        outputs = (
            tokens,
            steps_done,
            scheduler.state.live,
            scheduler.state.reason,
            must_stop,
            drafts,
        )
        tokens, steps_done, live, reason, must_stop, drafts = fetch(outputs)
        if must_stop:
            hosts.stop_here()
        if drafts is not None:
            self.drafted += int(drafts[1])
            self.kept_drafts += int(drafts[2])
            self.live_slot_steps -= int(drafts[2])
        decoded_s = time.perf_counter()
        events = self._collect(tokens, int(steps_done), live, reason, version)
        self.host_s += ready_s - started_s + time.perf_counter() - decoded_s
        self.device_s += decoded_s - ready_s
        return events

    def run(self, params, *, version: int = 0, raw_logprobs: bool = False) -> Iterator[Sample]:
        """Yields each submitted sample as it finishes. The options are those of `step`."""
        while self.pending:
            for event in self.step(params, version=version, raw_logprobs=raw_logprobs):
                if event.sample.finish_reason is not None:
                    yield event.sample

    def _collect(self, tokens, steps_done: int, live, reason, version: int) -> list[Event]:
        """Hands each slot's new tokens to its sample, and frees the slots of finished samples."""
        self.dispatches += 1
        self.slot_steps += steps_done * len(self._scheduler.slots)
        counts, now, events = tokens.valid.sum(axis=0), time.monotonic(), []
        self.live_slot_steps += int(counts.sum())
        max_count = int(counts.max())
        records = np.zeros((len(self._scheduler.slots), max_count), RECORD)
        for name, values in (
            ("ids", tokens.ids),
            ("logprobs", tokens.logp),
            ("log_kept", tokens.log_kept),
            ("entropy", tokens.entropy),
            ("chosen", tokens.chosen),
        ):
            records[name] = values[:max_count].T
        records["versions"] = version
        forced = (tokens.valid & ~tokens.chosen).sum(axis=0).tolist()
        counts, live, reason = counts.tolist(), live.tolist(), reason.tolist()
        freed: list[int] = []
        for slot, sample in enumerate(self._scheduler.slots):
            if sample is None or sample in self._scheduler.held:
                continue
            count = counts[slot]
            sample.drawn += count
            sample.record(records[slot, :count])
            sample.interrupted += forced[slot]
            if count and not sample.first_token_s:
                sample.first_token_s = now
            if not live[slot]:
                sample.finish_reason = FinishReason(reason[slot])
            not_finite = sample.finish_reason == FinishReason.ABORT
            read_tokens = sample.size - 1
            count -= sample.cut(count, self.decode)
            if sample.finish_reason == FinishReason.ABORT:
                sample.error = "the model's logits are not finite"
            if not_finite:
                self._scheduler.state = self.engine.clear(
                    self._scheduler.state, np.array([slot], np.int32)
                )
            if sample.finish_reason is not None:
                if live[slot]:
                    freed.append(slot)
                self._finish(sample, slot, 0 if not_finite else read_tokens)
            events.append(Event(sample, count))
        if freed:
            self._scheduler.state = self.engine.release(
                self._scheduler.state, self._scheduler.padded(freed)
            )
        return events

    def _finish(self, sample: Sample, slot: int, read_tokens: int) -> None:
        """Frees the slot of a finished sample, which has read `read_tokens` tokens, or holds it."""
        sample.cached = sample.size - 1
        overran = read_tokens > sample.cached and not self.engine.can_go_back(read_tokens)
        if overran or read_tokens < sample.cached:
            sample.forget()  # the slot went further than the sample, over what it needs
        self._scheduler.tables.publish(sample, sample.cached)
        if sample.keep:
            prefix = self._scheduler.extract(slot)
            sample.partial = Partial(sample, prefix, self._scheduler.version, sample.copy())
        if sample.hold and sample.finish_reason != FinishReason.ABORT:
            if sample.cached:
                self._scheduler.held[sample] = slot
                return
            self._scheduler.parked[sample] = None
        self._scheduler.leave(slot)


_any = jax.jit(jnp.any)
