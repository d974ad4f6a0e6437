"""Samples a policy on a list of prompts, in calls of one shape."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import LIMITS, FinishReason
from rljax.data.images.encode import ImageLayout
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.keys import fold_in
from rljax.reasoning import response_of
from rljax.rewards.pool.jobs import counted_failures
from rljax.roles import Actor
from rljax.rollout import Player, Reward, ScoredRow, make_sample, player_of
from rljax.sampler import Sampling, held_weights

LOG = logging.getLogger("rljax")
ROWS_PER_CALL = 256  # sampled at once, where nobody says how many


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy that `sample_all` samples: an actor, the tokenizer of its texts, its sampling
    rules, the columns that prompts are padded to, and the layout of their images."""

    actor: Actor
    tokenizer: Tokenizer
    sampling: Sampling
    prompt_tokens: int
    images: ImageLayout | None = None  # layout of the prompts' images, if they have any

    def greedy(self) -> "Policy":
        """Returns the policy with greedy sampling."""
        return dataclasses.replace(self, sampling=self.sampling.greedy())

    def continuing(self, prompt_tokens: int) -> "Policy":
        """Returns the policy for prompts that end with the beginning of a response. It has no
        thinking budget, which would be counted anew there."""
        sampling = dataclasses.replace(self.sampling, thinking_tokens=())
        return dataclasses.replace(self, sampling=sampling, prompt_tokens=prompt_tokens)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completion of a prompt; `prompt` is an index into the prompts that were sampled.

    logprobs: of the sampler in nats, one per id, NaN if the token was forced. reward: NaN if it
    failed, or if there is none. parts: the named parts of its score.
    """

    prompt: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # the name of a FinishReason: stop, length, turns, ...
    reward: float = float("nan")
    failure: str = ""  # why the reward failed
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    turns: int = 1  # replies of the policy in an episode, and tool calls in them
    calls: int = 0

    @property
    def truncated(self) -> bool:
        """Returns whether anything but the end of the response ended it."""
        return self.finish_reason != "stop"

    @property
    def cut_off(self) -> bool:
        """Returns whether a limit ended it: of tokens, or of an episode's turns or seconds."""
        return FinishReason[self.finish_reason.upper()] in LIMITS


def filled_chunks(items: Sequence, size: int) -> Iterator[tuple[int, list]]:
    """Yields (index of the first, items) of every chunk of `size`; the last one is filled up with
    its last item, so that all have one shape and one compiled program."""
    for start in range(0, len(items), size):
        chunk = list(items[start : start + size])
        yield start, chunk + [chunk[-1]] * (size - len(chunk))


def _per_call(prompts: int, most: int) -> int:
    """Returns the number of prompts of each call if none holds more than `most`; calls are
    as equal as possible."""
    return -(-prompts // -(-prompts // most))


@held_weights()
def sample_all(
    policy: Policy,
    prompts: Sequence[PromptRecord],
    n: int = 1,
    scorer: Reward | Player | None = None,
    *,
    key: jax.Array,
    starts: Sequence[int] | None = None,
    prompts_per_call: int | None = None,
) -> list[Completion]:
    """Samples n completions of every prompt, those of one prompt after another, and scores them if
    a `scorer` is given. Raises InputError for no prompts. `key`: a scalar random key.

    `prompts` are encoded records. `starts`, in tokens, says where the response begins that the
    reward reads: before the prompt's end if a prompt ends with the beginning of a response.
    `prompts_per_call` bounds memory; None: so many that about ROWS_PER_CALL rows are sampled by one
    call. With a player of episodes a completion is an episode: its first seat's row, and the text
    of its last turn.
    """
    if not prompts:
        raise InputError("there are no prompts to sample", fix="check the data and its split")
    size = prompts_per_call or _per_call(len(prompts), max(ROWS_PER_CALL // n, 1))
    begins = [len(prompt.token_ids) for prompt in prompts] if starts is None else starts
    player, samples = player_of(scorer), []
    sample = make_sample(policy.actor, player, policy.sampling)
    for first, chunk in filled_chunks(list(zip(prompts, begins, strict=True)), size):
        shape = dict(length=policy.prompt_tokens, images=policy.images)
        part = Prompts.from_records([p for p, _ in chunk], **shape)
        part = dataclasses.replace(part, starts=np.array([b for _, b in chunk], np.int32))
        batch, report = sample(part, fold_in(key, first), n=n * player.rows)
        live = min(size, len(prompts) - first) * n  # the rows that do not just fill the shape
        batch, lengths, scored = player.completions(batch, report, part, n)
        records = [prompt for prompt, _ in chunk for _ in range(n)]
        rows = _read_rows(batch, lengths[:live], policy.tokenizer, records)
        for row, ((text, *fields), score) in enumerate(
            zip(rows, _scores(scored, live, player), strict=True)
        ):
            text = scored[row].sample["response"] if player.has_turns else text
            samples.append(Completion(first + row // n, text, *fields, *score))
    return samples


def _scores(scored: Sequence[ScoredRow], count: int, player: Player) -> list[tuple]:
    """Returns of each of the first samples the reward, why it failed, its parts, and the turns and
    calls of an episode."""
    if not scored:
        return [(float("nan"),)] * count
    names = ("turns", "calls") if player.has_turns else ()
    return [
        (row.score.value, row.score.failure, row.score.parts, *(row.sample[name] for name in names))
        for row in scored[:count]
    ]


def warn_of_failed_rewards(samples: Sequence[Completion], prompts: Sequence[PromptRecord]) -> None:
    """Warns of samples of these prompts whose rewards failed: how many, why, and the first one."""
    failed = [sample for sample in samples if sample.failure]
    if failed:
        LOG.warning(
            "%s of %s rewards failed, and their samples are left out: %s. The first is of the "
            "prompt %.80r",
            f"{len(failed):,}",
            f"{len(samples):,}",
            counted_failures([sample.failure for sample in failed]),
            prompts[failed[0].prompt].prompt_text,
        )


def _read_rows(
    batch, lengths: np.ndarray, tokenizer: Tokenizer, records: Sequence[PromptRecord]
) -> Iterator[tuple]:
    """Yields (text, ids, logprobs, finish_reason) of the responses of the first rows, which begin
    after `lengths` tokens and answer `records`."""
    fields = (batch.tokens, batch.mask, batch.segment_ids, batch.finish_reason)
    tokens, mask, segments, finish = fetch(fields)
    logprobs = np.full(tokens.shape, np.nan)
    if batch.sampler_logprobs is not None:
        logprobs = np.where(mask > 0, fetch(batch.sampler_logprobs), np.nan)
    for row, (start, record) in enumerate(zip(lengths, records, strict=False)):
        span = slice(int(start), int(np.sum(segments[row] > 0)))
        ids = tokens[row, span].tolist()
        yield (
            response_of(tokenizer, ids, record.prompt_text, record.messages),
            tuple(ids),
            tuple(logprobs[row, span].tolist()),
            FinishReason(int(finish[row])).name.lower(),
        )
