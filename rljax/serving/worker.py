"""The decode thread. It alone calls the Sampler; every other thread sends it commands.

It hands new tokens to the request that they belong to, and changes the parameters between
two dispatches.
"""

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.sampler import Sampler, Sampling
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.sample import Event, Sample
from rljax.serving.prompts import likeliest, prompt_logprobs

_LOG = logging.getLogger(__name__)


class Overloaded(Exception):
    """An error for a full queue; the same request may be served later."""


class Failed(Exception):
    """An error for a decode thread that has ended; nothing can be served any more."""


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """New tokens of one sample of a ticket. `finish_reason` comes with the last ones."""

    sample: int  # prompt * n + i
    tokens: list[int]
    logprobs: list[float]  # of the model: log softmax(logits), at every temperature
    version: int  # of the parameters that drew the last of them
    finish_reason: FinishReason | None = None
    error: str = ""


class Ticket:
    """A request's handle. `deliver` is called on the decode thread with each TokenChunk."""

    def __init__(self, deliver: Callable[[TokenChunk], None]):
        self.deliver = deliver
        self.unfinished: dict[int, Sample] = {}  # the decode thread's


class Worker:
    """One thread that owns a Sampler and the parameters it decodes with."""

    def __init__(
        self,
        sampler: Sampler,
        params,
        *,
        version: int = 0,
        max_waiting: int = 256,
        weights: Callable = lambda params: params,
    ):
        """At most `max_waiting` samples wait beyond those in the slots; raises InputError if
        it is below 0. `weights` makes the parameters that the sampler reads from those of
        training (rljax.sampler.layout)."""
        if max_waiting < 0:
            raise InputError("max_waiting", value=max_waiting, fix="give max_waiting=0 or more")
        self.sampler, self.version = sampler, version
        self.room = sampler.engine.slots + max_waiting
        self.failure: Exception | None = None
        self._weights, self._params, self._keep_cache = weights, weights(params), True
        self._tickets: dict[int, tuple[Ticket, int]] = {}  # by id() of a sample
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._scoring = threading.Lock()  # who reads the parameters beside the decode thread
        self._thread = threading.Thread(target=self._run, name="rljax-decode", daemon=True)
        self._thread.start()

    # -- from any thread

    def submit(
        self,
        ticket: Ticket,
        requests: Sequence[tuple[Sequence[int], Sampling]],
        n: int,
        images: PromptImages | None = None,
    ) -> Future:
        """Submits n samples of each (prompt, sampling), all or none; `images` are those of each
        prompt. The result of the future is None. It raises InputError for a request that can never
        be served, Overloaded for a full queue, and Failed."""
        return self._call(lambda: self._submit(ticket, requests, n, images))

    def abort(self, ticket: Ticket) -> Future:
        """Frees the samples that a ticket still holds. No effect on a ticket that is done."""
        return self._call(lambda: self._abort(ticket))

    def swap(self, params, version: int | None = None, *, keep_cache: bool = True) -> int:
        """Decodes with `params` from the next dispatch on, and returns their version: `version`, by
        default the next number. After it nothing reads the old parameters. keep_cache is as in
        Sampler.step. The parameters are brought to the layout of decoding on the caller's thread.
        Raises InputError for a version that is not above that of the last ones, and Failed."""
        params = self._weights(params)
        with self._scoring:
            return self._call(lambda: self._swap(params, version, keep_cache)).result()

    def prompt_logprobs(
        self, requests: Sequence[tuple[Sequence[int], Sampling]]
    ) -> list[list[float]]:
        """Returns the log-probs, in nats, of each prompt's tokens after those before them, of the
        model itself, whatever the Sampling, as for sampled tokens; the first is 0. It takes one
        forward pass for each prompt on the caller's thread, while decoding goes on."""
        model, room = self.sampler.engine.model, self.sampler.engine.tokens
        with self._scoring:
            return [prompt_logprobs(model, self._params, ids, room) for ids, _ in requests]

    def likeliest(self, sequences: Sequence[tuple[Sequence[int], Sampling]], count: int) -> list:
        """Returns `prompts.likeliest` of each sequence, as `prompt_logprobs`, with the parameters
        that are served now. It computes on the caller's thread."""
        model, room = self.sampler.engine.model, self.sampler.engine.tokens
        with self._scoring:
            return [likeliest(model, self._params, ids, room, count) for ids, _ in sequences]

    def statistics(self) -> dict[str, float]:
        """Returns counters since the start, read while decoding goes on."""
        sampler = self.sampler
        return {
            "slots": sampler.engine.slots,
            "slot_tokens": sampler.engine.tokens,
            "pending_samples": sampler.pending,
            "room_samples": self.room,
            "tokens": sampler.live_slot_steps + sampler.kept_drafts,
            "slot_occupancy": sampler.live_slot_steps / max(1, sampler.slot_steps),
            "dispatches": sampler.dispatches,
            "host_s": sampler.host_s,
            "device_s": sampler.device_s,
            "prefix_cache_hits": sampler.cache.hits,
            "prefix_cache_reused_tokens": sampler.cache.reused_tokens,
            "version": self.version,
            **sampler.page_metrics(),
            **sampler.draft_metrics(),
        }

    def close(self) -> None:
        """Ends the thread; unfinished requests fail."""
        self._commands.put(None)
        self._thread.join()

    def _call(self, function: Callable) -> Future:
        future: Future = Future()
        self._commands.put((future, function))
        if not self._thread.is_alive():
            self._refuse_all()
        return future

    def _refuse_all(self) -> None:
        """Fails all commands that are still queued."""
        while not self._commands.empty():
            with contextlib.suppress(queue.Empty):  # another thread may have taken it
                _refuse(self._commands.get(block=False), "the decode thread has ended")

    # -- on the decode thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                if not self.sampler.pending:
                    continue
                events = self.sampler.step(
                    self._params,
                    version=self.version,
                    keep_cache=self._keep_cache,
                    raw_logprobs=True,  # the model's own, as vLLM gives them
                )
                self._keep_cache = True
                for event in events:
                    self._hand_out(event)
        except Exception as error:  # any device error: fail all that wait, serve no more
            _LOG.exception("the decode thread failed")
            self.failure = error
            self._end("the decoder failed")
            while (command := self._commands.get()) is not None:
                _refuse(command, f"the decoder failed: {error}")
        else:
            self._end("the server is shutting down")
        self._refuse_all()

    def _run_commands(self) -> bool:
        """Runs the commands that came since the last dispatch; waits for one where nothing is
        decoding. False when the worker is closed."""
        while True:
            try:
                command = self._commands.get(block=not self.sampler.pending)
            except queue.Empty:
                return True
            if command is None:
                return False
            future, function = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # the caller's to handle: the others go on
                future.set_exception(error)

    def _submit(self, ticket: Ticket, requests, n: int, images: PromptImages | None) -> None:
        count = len(requests) * max(1, n)
        if count > self.room:
            rule, fix = f"at most {self.room}", "lower n, or send several requests"
            raise InputError("samples of one request", value=count, rule=rule, fix=fix)
        if self.sampler.pending + count > self.room:
            raise Overloaded(f"{self.room} samples are decoding or waiting already; try again")
        try:
            for prompt, sampling in requests:
                for sample in self.sampler.submit(prompt, sampling, n=n, images=images):
                    index = len(ticket.unfinished)
                    ticket.unfinished[index] = sample
                    self._tickets[id(sample)] = ticket, index
        except Exception:
            self._abort(ticket)
            raise

    def _abort(self, ticket: Ticket) -> None:
        for sample in ticket.unfinished.values():
            del self._tickets[id(sample)]
            self.sampler.abort(sample)
        ticket.unfinished.clear()

    def _swap(self, params, version: int | None, keep_cache: bool) -> int:
        version = self.version + 1 if version is None else version
        if version <= self.version:
            # A cache of an earlier number would pass for one that the new parameters have filled.
            rule = f"a number above that of the last ones, which is {self.version}"
            fix = f"give {self.version + 1} or more, or None"
            raise InputError("version of the new parameters", value=version, rule=rule, fix=fix)
        self._params, self.version = params, version
        self._keep_cache &= keep_cache  # the wish of an earlier swap, before any dispatch, stands
        return version

    def _hand_out(self, event: Event) -> None:
        sample, count = event.sample, event.count
        ticket, index = self._tickets[id(sample)]
        start = len(sample.tokens) - count
        tokens, logprobs = sample.tokens[start:].tolist(), sample.logprobs[start:].tolist()
        if sample.finish_reason is not None:
            del self._tickets[id(sample)], ticket.unfinished[index]
        outcome = sample.finish_reason, sample.error
        ticket.deliver(TokenChunk(index, tokens, logprobs, self.version, *outcome))

    def _end(self, reason: str) -> None:
        for ticket, index in self._tickets.values():
            ticket.deliver(TokenChunk(index, [], [], self.version, FinishReason.ABORT, reason))
        self._tickets.clear()


def _refuse(command: tuple[Future, Callable] | None, reason: str) -> None:
    if command is not None and command[0].set_running_or_notify_cancel():
        command[0].set_exception(Failed(reason))
