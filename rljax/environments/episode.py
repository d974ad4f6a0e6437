"""One episode: the generator that plays it, and the conversation of each seat.

It runs inside a worker (play_worker) or in the process that asks. Any fault of an environment ends
in a `Step` with `failure` and `kind`; only a field that rows lack raises InputError.
"""

import asyncio
import contextlib
import dataclasses
import signal
import time
import traceback
import zlib
from collections.abc import Coroutine, Mapping, Sequence

from rljax.components import Component
from rljax.contracts import spec
from rljax.data.rows.columns import variables_of
from rljax.data.text.control_tokens import parted_messages
from rljax.environments.calls import Parsed, parser
from rljax.environments.contract import Call, Done, Opening, Reply, Turn
from rljax.environments.conversation import CHARACTERS_PER_TOKEN, Conversation
from rljax.environments.messages import EpisodeLimits, Step
from rljax.environments.yields import (
    BadYield,
    outcome_of,
    refuse_early_reward,
    shown,
    state_hash,
    turn_of,
)
from rljax.errors import InputError, location_in
from rljax.rewards.pool.calling import describe
from rljax.rewards.pool.foreign import GroundTruth

LOOKED_AT = 64  # the drift of one turn of so many is looked at, and that of each whole episode
_UNREADABLE = "The call cannot be read: "
BAD_CALLS = 3  # in a row that are answered; one more ends the episode
TRACEBACK_CHARS = 4_000
DRIFTS = ("", "same", "retokenized", "rewritten")  # the worst last


def chosen_fields(component: Component, fields: Mapping, **seeds: int) -> dict:
    """Returns the arguments of the environment: the fields of the row, keys of its extra_info, the
    column of the ground truth by its own name, and seeds that it declares. Raises InputError for a
    field that the row lacks."""
    extra, truth = fields.get("extra_info"), fields.get("ground_truth")
    columns = truth.columns if isinstance(truth, GroundTruth) else {}
    available = {**(extra if isinstance(extra, Mapping) else {}), **columns, **fields, **seeds}
    chosen = {}
    for name, parameter in component.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            row_fields = {k: v for k, v in available.items() if k not in seeds}
            chosen |= {k: v for k, v in row_fields.items() if k not in component.options}
        elif name in component.options or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(
                f"environment {component.name!r} takes {name!r} by position only",
                rule="an environment is called with keywords",
                fix="remove the '/' from its signature",
            )
        elif name in available:
            chosen[name] = available[name]
        elif parameter.default is parameter.empty:
            raise InputError(
                f"environment {component.name!r} needs {name!r}, which this row lacks",
                value=sorted(map(str, available.keys() - seeds.keys())),
                fix=f"add {name!r} to the data, give the parameter a default, or bind it: "
                f"'{component.name}({name}=...)'",
            )
    return chosen


class Episode:
    """Plays one episode: `begin()`, then `reply(...)` until a Step has `ended`.

    `fields` are those of the row, `prompt_ids` [n] and `messages` its prompt, which is read where
    the first yield is None. `seed` is equal for all samples of a prompt, `sample_seed` is another
    for each. `start()` and the asynchronous methods are for generators that share a loop. Raises
    InputError for a field that the row lacks.
    """

    def __init__(
        self,
        number: int,
        component: Component,
        fields: Mapping,
        tokenizer,
        limits: EpisodeLimits,
        *,
        seed: int,
        sample_seed: int,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping] | None = None,
    ):
        self.number, self.component, self.limits = number, component, limits
        self.tokenizer, self.sample_seed = tokenizer, sample_seed
        self.seats = spec(component).seats
        self.ended = False
        self.overlong = ""  # length of a first prompt that does not fit
        self._prompt = (prompt_ids, messages)
        extra = fields.get("extra_info")
        self._variables = variables_of(extra if isinstance(extra, dict) else {}, "the row")
        self._arguments = chosen_fields(component, fields, seed=seed, sample_seed=sample_seed)
        self._generator = None
        self._loop: asyncio.AbstractEventLoop | None = None  # loop of a generator that shares none
        self._conversations: dict[str, Conversation] = {}
        self._schemas: dict[str, Sequence[Mapping]] = {}  # schemas of the tools, by seat
        self._seat, self._state = "", b""
        self._stop, self._max_tokens = (), 0  # limits of the turn that is being written
        self._turns = self._calls = self._bad_in_a_row = 0
        self._untold = ""  # problem of a call whose reply had good calls as well
        self._said: dict = {}  # fields of the next Step about the reply before
        self._limit = ""  # limit that was passed: the environment is asked for the last time
        self._format = None
        if limits.calls not in ("", "auto"):
            self._format = parser(limits.calls, tokenizer)

    # -- verbs

    def begin(self) -> Step:
        """Returns the first Step: the whole prompt of the first seat."""
        return self.start() or self.run(self.begin_async())

    def reply(
        self, ids: Sequence[int], finish: str = "stop", turns_left: int = 0, tokens_left: int = 0
    ) -> Step:
        """Returns the Step that follows the turn `ids` [n] of the policy; `finish` is the reason
        of its end."""
        return self.run(self.reply_async(ids, finish, turns_left, tokens_left))

    def close(self) -> None:
        """Ends the generator, whose `finally` runs. Never raises; may be called again."""
        self.ended = True
        generator, self._generator = self._generator, None
        try:
            if self._loop is not None:
                self._loop.run_until_complete(generator.aclose())
            elif generator is not None and not hasattr(generator, "asend"):
                generator.close()
        except BaseException as error:
            _let_through(error)
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def start(self) -> Step | None:
        """Calls the environment's function. Returns None, or a failed Step for an error in it and
        for a function that is no generator function."""
        try:
            generator = self.component(**self._arguments)
            if not (hasattr(generator, "send") or hasattr(generator, "asend")):
                raise BadYield(
                    f"environment {self.component.name!r} returned {shown(generator)}: it is no "
                    "generator function, one that yields what the policy reads"
                )
        except BaseException as error:
            kind = "not a generator" if isinstance(error, BadYield) else "raised"
            return self._failed(error, kind)
        self._generator = generator
        return None

    @property
    def messages(self) -> list[dict] | None:
        """The conversation of the seat that played last; None without a chat template."""
        conversation = self._conversations.get(self._seat)
        return conversation and conversation.messages

    @property
    def waits(self) -> bool:
        """Returns whether the generator is asynchronous."""
        return hasattr(self._generator, "asend")

    @property
    def finished(self) -> bool:
        """Returns whether the generator has run to its end, so that nothing of it is left to
        close."""
        generator = self._generator
        return generator is None or None in (
            getattr(generator, "gi_frame", 0),
            getattr(generator, "ag_frame", 0),
        )

    async def close_async(self) -> None:
        """Closes the episode on the loop of the caller."""
        self.ended = True
        generator, self._generator = self._generator, None
        with contextlib.suppress(BaseException):
            await generator.aclose()

    async def begin_async(self) -> Step:
        """Begins an episode that was started."""
        return await self._advance(None)

    async def reply_async(
        self, ids: Sequence[int], finish: str, turns_left: int, tokens_left: int
    ) -> Step:
        """Replies on the loop of the caller."""
        assert not self.ended, "a reply to an episode that has ended"
        try:
            budget = dict(finish=finish, turns_left=turns_left, tokens_left=tokens_left)
            reply = self._read([int(i) for i in ids], budget)
            if reply.problem and reply.calls:  # the next observation tells of it
                self._untold = f"{_UNREADABLE}{reply.problem}"
            elif reply.problem and not self._limit:
                messages = [{"role": "user", "content": f"{_UNREADABLE}{reply.problem}"}]
                try:
                    limits = dict(stop=self._stop, max_tokens=self._max_tokens)
                    step = self._step(Turn(messages, seat=self._seat, **limits))
                    return dataclasses.replace(step, state=self._state)  # the world has not moved
                except InputError:  # an alphabet without these letters; no way to hide from a score
                    self._limit = "bad calls"
        except Exception as error:
            return self._failed(error, "unreadable")
        return await self._advance(reply)

    def run(self, playing: Coroutine) -> Step:
        """Returns the result of an asynchronous method, on a loop of this episode's own if the
        generator is asynchronous. A synchronous one that waits is an AssertionError."""
        if self.waits:
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(playing)
        try:
            playing.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a synchronous environment waited")

    # -- the environment's turn

    async def _advance(self, reply: Reply | None) -> Step:
        """Returns the generator's next yield, or its end, as a Step."""
        began = time.perf_counter()
        returned, done = None, False
        try:
            try:
                if self.waits:
                    yielded = await self._generator.asend(reply)
                else:
                    yielded = self._generator.send(reply)
                if isinstance(yielded, Done):
                    returned, done = yielded, True
            except StopIteration as end:
                returned, done = end.value, True
            except StopAsyncIteration:
                done = True
            seconds = time.perf_counter() - began
        except BaseException as error:
            return self._failed(error, "raised", time.perf_counter() - began)
        try:
            if done:
                return self._end(returned, seconds, self._limit, returned=True)
            if yielded is None and self._conversations:
                raise BadYield("it yielded nothing; Turn(None) is: nothing new to read")
            turn, opening = turn_of(yielded), isinstance(yielded, Opening)
            if reply is None:
                refuse_early_reward(turn)
            if self._limit:  # it has been told that this was the last reply
                return self._end(None, seconds, self._limit)
            return self._step(turn, seconds, yielded.tools if opening else None)
        except BadYield as error:
            bad_outcome = done and self._turns
            return self._failed(error, "bad outcome" if bad_outcome else "bad yield", seconds)
        except Exception as error:  # an error of the tokenizer, or of the chat template
            return self._failed(error, "bad yield", seconds)

    def _step(self, turn: Turn, seconds: float = 0.0, tools: Sequence | None = None) -> Step:
        """Returns the next Step of the player whose turn it is."""
        if turn.seat not in self.seats:
            raise BadYield(f"it yielded a turn of seat {turn.seat!r}; its seats are {self.seats}")
        self._seat = turn.seat
        conversation, drift, new_row = self._conversations.get(turn.seat), "", True
        failures: list[str] = []
        if conversation is None or tools is not None:
            try:
                ids, messages = self._first(turn, tools or ())
            except _TooLong as error:
                if not self._turns:
                    self.overlong = error.size
                    raise BadYield(str(error)) from None
                return self._end(None, seconds, "tokens")
        else:
            observation = self._without_control(self._with_problem(turn.observation or ()))
            messages = conversation.shortened(observation)
            # "failed" or "unknown", by Toolbox.answer: for the counts, not for the template.
            failures = [message.pop("failure", "") for message in messages]
            look = zlib.crc32(b"%d %d" % (self.sample_seed, self._turns)) % LOOKED_AT == 0
            ids, new_row, drift = conversation.append(messages, look=look)
        self._state = state_hash(turn.state)
        read_fields = dict(
            messages=tuple(messages), drift=drift, failed_calls=failures.count("failed")
        )
        reply_fields = dict(reward=turn.reward, parts=dict(turn.parts), state=self._state)
        self._stop, self._max_tokens = tuple(turn.stop), turn.max_tokens
        limits = dict(stop=self._stop, max_tokens=self._max_tokens)
        fields = dict(seconds=seconds, **read_fields, **reply_fields, **limits, **self._told())
        return Step(self.number, turn.seat, tuple(ids), new_row, **fields)

    def _with_problem(self, messages: Sequence[Mapping]) -> list[Mapping]:
        """Returns an observation that also says which call of the reply before could not be read.
        The last message says so, since templates differ in what they let follow it."""
        problem, self._untold = self._untold, ""
        if not problem:
            return list(messages)
        *others, last = messages or [{"role": "user", "content": ""}]
        content = "\n".join(filter(None, (last.get("content") or "", problem)))
        return [*others, {**last, "content": content}]

    def _without_control(self, messages: Sequence[Mapping]) -> list[dict]:
        """Returns what the environment yielded, without control tokens in texts that are not the
        assistant's, unless they are meant."""
        if self.limits.control_tokens:
            return [dict(message) for message in messages]
        roles = {message["role"] for message in messages} - {"assistant"}
        ids = self.tokenizer.special_ids
        return parted_messages(self.tokenizer, messages, ids, roles)

    def _first(self, turn: Turn, tools: Sequence[Mapping]) -> tuple[list[int], list[dict]]:
        """Returns the first prompt of a seat: its ids and its messages."""
        ids, messages = None, turn.observation
        if messages is not None:
            messages = self._without_control(messages)
        else:
            ids, messages = self._prompt
            if ids is None and messages is None:
                raise BadYield("it first yielded None, the prompt of the row, which has none")
        limit = self.limits.max_tokens
        size = sum(len(message.get("content") or "") for message in messages or ())
        if ids is None and size > CHARACTERS_PER_TOKEN * limit:
            raise _TooLong(f"{size} characters", limit)
        conversation = Conversation(
            self.tokenizer,
            self.limits.max_reply_tokens,
            rewrite=self.limits.history == "rewrite",
            variables=self._variables,
        )
        self._schemas[turn.seat] = tools
        if tools and self.limits.calls == "auto" and self._format is None:
            self._format = parser("auto", self.tokenizer)
            if not self._format.name:
                raise InputError(
                    "the chat template renders no tool calls that are known here",
                    rule="an environment with tools reads calls from what the policy writes",
                    fix="set environment.calls (--calls of rljax chat), for instance 'hermes', "
                    "\"tag(name='search')\" or 'python', and tell of the tools in a system message",
                )
        ids = conversation.begin(messages, ids, tools)
        if not ids:
            raise BadYield("the first prompt has no tokens")
        if len(ids) >= limit:
            raise _TooLong(f"{len(ids)} tokens", limit)
        self._conversations[turn.seat] = conversation
        return ids, [dict(message) for message in messages or ()]

    def _end(
        self, outcome: object, seconds: float, limit: str = "", *, returned: bool = False
    ) -> Step:
        if not self._turns:
            raise BadYield("it returned before the policy wrote anything")
        outcome, parts = outcome_of(outcome, self.seats)
        drift = max((c.final_drift() for c in self._conversations.values()), key=DRIFTS.index)
        fields = dict(limit=limit, returned=returned, drift=drift)
        return self._over(seconds, outcome=outcome, outcome_parts=parts, **fields)

    def _failed(self, error: BaseException, kind: str, seconds: float = 0.0) -> Step:
        """Returns the Step of an episode that fails, which is not the policy's fault and has no
        score."""
        _let_through(error)
        failure = describe(error)
        if kind in ("raised", "unreadable"):
            failure += location_in(error, [self.component.function])
            trace = "".join(traceback.format_exception(error))
            failure += f"\n{trace[-TRACEBACK_CHARS:]}"
        return self._over(seconds, failure=failure, kind=kind)

    def _over(self, seconds: float, **fields) -> Step:
        """Returns the last Step."""
        self.ended = True
        fields |= self._told()
        return Step(self.number, self._seat, ended=True, seconds=seconds, **fields)

    def _told(self) -> dict:
        fields, self._said = self._said, {}
        return fields

    # -- the policy's turn

    def _read(self, ids: list[int], budget: Mapping) -> Reply:
        """Appends what the policy wrote, with the calls in it, to its player's log."""
        self._turns += 1
        ends = ids[-1:] and ids[-1] in self.tokenizer.eos_ids
        reply_ids = ids[:-1] if ends else ids
        conversation = self._conversations[self._seat]
        raw_text, opening = self.tokenizer.decode(reply_ids), conversation.begun
        counts = dict(num_tokens=len(ids), prompt_tokens=len(conversation.ids))
        parsed = Parsed(conversation.answer(reply_ids), said=raw_text)
        if self._format is not None:
            raw_text = self._format.decode(self.tokenizer, ids)
            parsed = self._format.parse(raw_text, self._schemas[self._seat], begun=opening)
            calls = tuple(self._with_id(i, call) for i, call in enumerate(parsed.calls))
            parsed = dataclasses.replace(parsed, calls=calls)
        text, calls, problem = parsed.said, parsed.calls, parsed.problem
        if problem and not calls:
            text = raw_text
        conversation.said(ids, raw_text, parsed)
        names = {schema.get("function", schema).get("name") for schema in self._schemas[self._seat]}
        unknown = sum(call.name not in names for call in calls) if names else 0
        self._said = dict(
            text=text, calls=len(calls), unknown_calls=unknown, bad_turn=bool(problem)
        )
        return Reply(
            text,
            calls=self._allowed(calls, bool(problem)),
            problem=problem,
            whole=raw_text,
            answer=parsed.content,
            **counts,
            **budget,
        )

    def _with_id(self, index: int, call: Call) -> Call:
        """Templates that write an id want nine letters and digits."""
        return call if call.id else dataclasses.replace(call, id=f"call{self._calls + index:05d}")

    def _allowed(self, calls: tuple[Call, ...], bad: bool) -> tuple[Call, ...]:
        """Returns the calls that the environment is handed: none if this reply is the last."""
        self._calls += len(calls)
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        most = BAD_CALLS if self.limits.on_bad_call == "reply" else 0
        if 0 < self.limits.max_calls < self._calls:
            self._limit = "calls"
        elif self._bad_in_a_row > most:
            self._limit = "bad calls"
        return () if self._limit else calls


class _TooLong(Exception):
    """A prompt that does not fit an episode. `size` is its length with the unit."""

    def __init__(self, size: str, limit: int):
        rule = f"environment.max_tokens={limit}: raise it, or shorten the prompt"
        super().__init__(f"the first prompt has {size}; {rule}")
        self.size = size


def _let_through(error: BaseException) -> None:
    """Raises what the person at the keyboard means; in a worker a Ctrl-C reaches nobody."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if isinstance(error, KeyboardInterrupt) and not ignored:
        raise error
