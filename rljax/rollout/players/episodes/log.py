"""The trajectory of an episode: the logs of its seats, their turns, and how it stands."""

import copy
import dataclasses

import numpy as np

from rljax import hosts
from rljax.batch import FinishReason
from rljax.data.online.prompts import PromptRecord
from rljax.environments.messages import EpisodeLimits, Step
from rljax.sampler import Sampling
from rljax.sampler.sample import Sample

# Fields of a trajectory that its state holds as they are.
_PLAIN = (
    "attempt",
    "outcome",
    "parts",
    "failure",
    "kind",
    "calls",
    "bad_turns",
    "unknown_calls",
    "failed_calls",
    "seconds",
    "waited_s",
    "drift",
    "call_seconds",
)


@dataclasses.dataclass
class Transition:
    """One turn: the reply, tokens [start, end) of its log, and what the environment said of it."""

    start: int
    end: int
    number: int = 0  # its number among the turns of the episode, from 1
    finish: str = "stop"  # why it ended
    reward: float = 0.0
    state: bytes = b""  # state of the world in which the reply was given
    bad: bool = False  # it has a tool call that could not be parsed
    observation: tuple[dict, ...] = ()  # the messages that it answers
    text: str = ""

    def get_state(self) -> dict:
        """Returns the turn as JSON."""
        return vars(self) | {"state": self.state.hex(), "observation": list(self.observation)}

    @classmethod
    def from_state(cls, state: dict) -> "Transition":
        """Returns the turn of a state."""
        decoded = {
            "state": bytes.fromhex(state["state"]),
            "observation": tuple(state["observation"]),
        }
        return cls(**(state | decoded))


@dataclasses.dataclass(eq=False)
class Log:
    """One row of the batch: what a seat has read and written."""

    seat: int
    sample: Sample  # its id: rows of an episode x its number, and the row in it
    turns: list[Transition] = dataclasses.field(default_factory=list)
    next_state: bytes = b""
    next_observation: tuple[dict, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of the log."""
        return len(self.sample.prompt) + len(self.sample.tokens)

    def get_state(self) -> dict:
        """Returns the log as JSON."""
        return {
            "seat": self.seat,
            "sample": self.sample.get_state(),
            "turns": [turn.get_state() for turn in self.turns],
            "next_state": self.next_state.hex(),
            "next_observation": list(self.next_observation),
        }

    @classmethod
    def from_state(cls, state: dict, sampling: Sampling) -> "Log":
        """Returns the log of a state, whose turns are sampled so."""
        turns = [Transition.from_state(turn) for turn in state["turns"]]
        sample = Sample.from_state(state["sample"], sampling)
        next_state, observation = (
            bytes.fromhex(state["next_state"]),
            tuple(state["next_observation"]),
        )
        return cls(state["seat"], sample, turns, next_state, observation)


@dataclasses.dataclass(eq=False)
class Trajectory:
    """One episode as the driver records it. `outcome` is {seat: score}, None where a reward
    function is to score the last turn. Seconds are the driver's."""

    number: int
    prompt: int  # equal for siblings
    record: PromptRecord
    start: dict  # arguments of EpisodeCrew.admit
    keys: np.ndarray  # keys of its rows: [R, 2]
    attempt: int = 0  # number of times that it has begun anew
    asked: int | None = None  # when its environment was, by the driver's clock; None: it owes none
    marks: list[bytes] = dataclasses.field(default_factory=list)  # marks of steps that were read
    logs: list[Log] = dataclasses.field(default_factory=list)
    speaker: Log | None = None  # whose turn it is, or was last
    finish: FinishReason | None = None
    outcome: dict | None = None
    parts: dict = dataclasses.field(default_factory=dict)
    failure: str = ""
    kind: str = ""
    calls: int = 0
    bad_turns: int = 0
    unknown_calls: int = 0
    failed_calls: int = 0
    begun_s: float | None = None
    seconds: float = 0.0  # from its first prompt to its end
    waited_s: float = 0.0  # seconds of the environment, out of `seconds`
    drift: list[str] = dataclasses.field(default_factory=list)
    call_seconds: list[float] = dataclasses.field(default_factory=list)  # of each answer to calls
    # The state where it branched off from its siblings, and the step that followed.
    origin: tuple[dict, Step] | None = None

    @property
    def turns(self) -> int:
        """Number of turns of the episode."""
        return sum(len(log.turns) for log in self.logs)

    @property
    def tokens(self) -> int:
        """Number of tokens of the episode."""
        return sum(log.tokens for log in self.logs)

    @property
    def is_here(self) -> bool:
        """Returns whether this host plays it."""
        return self.number % hosts.count() == hosts.index()

    def get_state(self, seconds: float) -> dict:
        """Returns the episode's state as JSON, when the driver's clock shows `seconds`."""
        reason = None if self.finish is None else int(self.finish)
        age_s = None if self.begun_s is None else seconds - self.begun_s
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "finish": reason,
            "age_s": age_s,
            "marks": [mark.hex() for mark in self.marks],
            "logs": [log.get_state() for log in self.logs],
            "speaker": self.logs.index(self.speaker) if self.speaker in self.logs else None,
        }

    def set_state(self, state: dict, sampling: Sampling) -> None:
        """Brings an episode that is to be played to where another stood, as the driver's clock
        begins."""
        for name in _PLAIN:
            setattr(self, name, copy.deepcopy(state[name]))
        self.finish = None if state["finish"] is None else FinishReason(state["finish"])
        self.begun_s = None if state["age_s"] is None else -state["age_s"]
        self.marks = [bytes.fromhex(mark) for mark in state["marks"]]
        self.logs = [Log.from_state(log, sampling) for log in state["logs"]]
        self.speaker = None if state["speaker"] is None else self.logs[state["speaker"]]

    def anew(self) -> "Trajectory":
        """Returns the same episode at its beginning; one with an origin is to be brought there."""
        identity = (self.number, self.prompt, self.record, self.start, self.keys)
        return Trajectory(*identity, self.attempt + 1, begun_s=self.begun_s, origin=self.origin)


@dataclasses.dataclass(frozen=True)
class EpisodeRules:
    """Rules of all episodes of a step. A seat's rows are `max_rows` of the batch; `sampling` is a
    turn's, with the stops of tool calls."""

    limits: EpisodeLimits
    sampling: Sampling
    seats: tuple[str, ...] = ("",)
    max_rows: int = 1
    episode_timeout_s: float = 0.0
    on_limit: float | None = 0.0

    @property
    def rows(self) -> int:
        """Rows of the batch that an episode may take."""
        return len(self.seats) * self.max_rows


def summed_parts(parts: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Returns the named parts of both; those of one name are added up, as scores are."""
    return parts | {name: parts.get(name, 0.0) + value for name, value in more.items()}


def limited_sampling(sampling: Sampling, step: Step, room: int) -> Sampling:
    """Returns how the turn that answers a step is sampled, with `room` for so many tokens."""
    step_limit = (step.max_tokens,) if step.max_tokens else ()
    stops = tuple(dict.fromkeys((*sampling.stop_strings, *step.stop)))
    most = min(sampling.max_response_tokens, room, *step_limit)
    return dataclasses.replace(sampling, max_response_tokens=most, stop_strings=stops)


def replies_of(episode: Trajectory, limits: EpisodeLimits) -> list[tuple]:
    """Returns what the environment of an episode was handed so far, in order."""
    turns = [(turn.number, log, turn) for log in episode.logs for turn in log.turns]
    turns.sort(key=lambda entry: entry[0])
    return [reply_of(log, turn, limits) for _, log, turn in turns]


def reply_of(log: Log, turn: Transition, limits: EpisodeLimits) -> tuple[list[int], str, int, int]:
    """Returns the tokens of a turn, why it ended, and how many turns and tokens were left then."""
    first = len(log.sample.prompt)
    ids = log.sample.tokens[turn.start - first : turn.end - first].tolist()
    return ids, turn.finish, limits.max_turns - turn.number, limits.max_tokens - turn.end
