"""Messages between the driver and the processes in which episodes are played: plain records.

Indices and counts are in tokens of one seat's log, the prompt included.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    max_turns: int = 8  # replies of the policy
    max_tokens: int = 4096  # tokens of a log: prompt, replies and observations
    max_reply_tokens: int = 1024  # tokens of an observation; a longer one keeps head and tail
    max_calls: int = 0  # tool calls; 0 = no limit
    turn_timeout_s: float = 10.0  # seconds of one step of the environment
    calls: str = "auto"  # format of tool calls (rljax.environments.calls), "" = none
    control_tokens: bool = False  # texts of the environment may hold control tokens
    on_bad_call: str = "reply"  # a call that cannot be parsed gets a reply; or "end"
    history: str = "append"  # "rewrite": where the template rewrites history, a new row begins


@dataclasses.dataclass(frozen=True)
class Step:
    """The answer of an environment to a reply: what the policy reads next, or the end.

    `ids` are appended to the log of `seat`; with `new_row` they are a whole new prompt (the first
    step of a seat, and a rewritten history). `reward` and `parts` belong to the reply before, of
    whoever gave it. `state` is equal for equal states. With `ended` there are no ids, and `outcome`
    is {seat: score} or None for an episode that `reward.function` scores.
    """

    episode: int
    seat: str = ""
    ids: tuple[int, ...] = ()
    new_row: bool = False
    restart: bool = False  # the episode is played again from its beginning: forget its rows
    reward: float = 0.0
    parts: dict = dataclasses.field(default_factory=dict)
    state: bytes = b""
    ended: bool = False
    limit: str = ""  # limit that ended it, if known here: "calls", "bad calls", "tokens"
    returned: bool = False  # the environment has come to its end by itself, maybe at a limit
    outcome: dict | None = None
    outcome_parts: dict = dataclasses.field(default_factory=dict)
    failure: str = ""  # why the episode failed; "" = it did not
    kind: str = ""  # kind of failure: raised, timeout, killed, not repeatable, bad yield, ...
    bad_turn: bool = False  # the reply before had a call that could not be parsed
    calls: int = 0  # calls in the reply before
    unknown_calls: int = 0
    failed_calls: int = 0
    seconds: float = 0.0  # seconds of the environment alone
    drift: str = ""  # "same" | "retokenized" | "rewritten", where it was looked at
    messages: tuple[dict, ...] = ()  # the messages behind `ids`, for transcripts and rewards
    text: str = ""  # the reply before, as it was parsed
    stop: tuple[str, ...] = ()  # texts that end the next reply, beside those of the run
    max_tokens: int = 0  # limit of the next reply below that of the run; 0 = that of the run
    mark: bytes = b""  # equal for steps that say the same: compared where it is played again


def failed_step(number: int, kind: str, why: str, seconds: float = 0.0) -> Step:
    """Returns the last Step of an episode that failed."""
    return Step(number, ended=True, failure=why, kind=kind, seconds=seconds)


_OTHER_KINDS = {  # types of fields of a Step that differ from the class of the default
    "episode": (int,),
    "reward": (int, float),
    "seconds": (int, float),
    "outcome": (dict, type(None)),
    "parts": (dict,),
    "outcome_parts": (dict,),
}


def is_step(value: object) -> bool:
    """Returns whether a value from a worker is a Step whose fields have valid types."""
    fields = Step.__dataclass_fields__
    if type(value) is not Step or vars(value).keys() != fields.keys():
        return False
    for name, field in fields.items():
        if type(vars(value)[name]) not in _OTHER_KINDS.get(name, (type(field.default),)):
            return False
    numbers = (*value.parts.items(), *(value.outcome or {}).items(), *value.outcome_parts.items())
    return (
        all(type(i) is int and 0 <= i < 2**31 for i in value.ids)
        and all(type(message) is dict for message in value.messages)
        and all(type(text) is str and text for text in value.stop)
        and value.max_tokens >= 0
        and all(type(name) is str and type(number) in (int, float) for name, number in numbers)
    )
