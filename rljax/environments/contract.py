"""The contract of an environment: what it yields, receives and returns.

An environment is a generator function: it yields what the policy reads next, receives what the
policy wrote, and returns the reward.

    def guess_number(secret, high=64, turns=7):   # `secret`: a field of the row
        told = f"Guess my number, 1 to {high}."
        for turn in range(turns):
            reply = yield told
            guess = int(reply) if reply.strip().isdecimal() else 0
            if guess == secret:
                return 1.0 - 0.05 * turn
            told = "higher" if guess < secret else "lower"
        return 0.0

It is called with the fields of the row that it declares, as a reward is, and where it declares them
with `seed` (equal for all samples of a prompt) and `sample_seed` (another for each). It draws from
nothing else: an episode is a function of (row, seeds, replies), so that it can be played again.

It yields a text (a user's message), a message {"role", "content"}, a list of messages, a `Turn`, or
first an `Opening`; None first is the prompt of the row. It returns a number, named parts with
"score", a dict by seat, or None: then `reward.function` scores the last turn. An `async def`
generator yields a last `Done(outcome)` instead. What it raises makes the episode a failed one,
which is masked and counted and never scored.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from rljax.reasoning import Response, answer_of

__all__ = ["Call", "Done", "Opening", "Reply", "Turn"]


@dataclasses.dataclass(frozen=True)
class Turn:
    """The next text that the policy reads, with what its last reply has earned.

    `reward`, `parts` belong to the reply before it, so a first turn has none. `state`: any value;
    equal values are the same state of the world (GiGPO). `seat`: who plays next, one of the names
    that the environment declares by @contract(seats=(...)). `stop`: texts that end the reply,
    beside those of sampler.stop_strings; it holds the one that came. `max_tokens`: of the reply,
    where that is fewer than sampler.max_response_tokens; 0 = that.
    """

    observation: object  # text, a message, or a list of messages; None: nothing new
    reward: float = 0.0
    state: object = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seat: str = ""
    stop: Sequence[str] = ()
    max_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Opening:
    """The first yield of an environment with tools: `messages` (None: the prompt of the row) and
    the JSON schemas that the chat template shows.

    A later one begins another row (environment.max_rows): what is read then is this alone, and
    `reward` belongs to the reply before it.
    """

    messages: object = None
    tools: Sequence[Mapping] = ()
    reward: float = 0.0
    state: object = None
    seat: str = ""
    stop: Sequence[str] = ()  # as in Turn
    max_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Done:
    """The last yield of an asynchronous environment: the outcome, which another environment
    would return."""

    outcome: object = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call that the policy wrote."""

    name: str
    arguments: dict
    id: str = ""  # where the format has one


class Reply(Response):
    """A turn of the policy: its text without end tokens and without what was parsed as calls.

    answer   what stands behind its reasoning, without calls

    calls    the tool calls in it, in their order
    problem  why a call could not be parsed; "" where all is well
    finish   "stop" | "length" | "interrupt": why the turn ended
    turns_left, tokens_left   what is left of the episode's budget
    whole    the text with its calls
    num_tokens, prompt_tokens   tokens of the reply, and those before it in its row; 0: not known
    """

    calls: tuple[Call, ...]
    problem: str
    finish: str
    turns_left: int
    tokens_left: int
    whole: str
    num_tokens: int
    prompt_tokens: int

    def __new__(
        cls,
        text: str,
        *,
        calls: Sequence[Call] = (),
        problem: str = "",
        finish: str = "stop",
        turns_left: int = 0,
        tokens_left: int = 0,
        whole: str | None = None,
        answer: str | None = None,
        num_tokens: int = 0,
        prompt_tokens: int = 0,
    ) -> "Reply":
        self = super().__new__(cls, text, answer_of(text) if answer is None else answer)
        self.calls, self.problem, self.finish = tuple(calls), problem, finish
        self.turns_left, self.tokens_left = turns_left, tokens_left
        self.whole = text if whole is None else whole
        self.num_tokens, self.prompt_tokens = num_tokens, prompt_tokens
        return self
