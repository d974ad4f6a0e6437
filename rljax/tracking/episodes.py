"""episodes.jsonl of a run folder: what was read and written in some episodes of a logged step.

One JSON object a line, for one seat of one episode:

    {"step": 20, "episode": 7, "group": 1, "seat": "", "status": "ok", "finish": "stop",
     "return": 0.9, "turns": [{"observation": "Guess my number, 1 to 16.", "tokens": [41, 2],
     "pieces": ["8", "<|im_end|>"], "logprobs": [-2.7, -0.01], "chosen": [1, 1],
     "versions": [19, 19], "text": "8", "reward": 0.0, "bad": false}, ...]}

Records are made of the episodes that `shown_episodes` picks, at the steps at which samples are
recorded; rljax.report.transcripts shows them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

MOST_EPISODES = 24  # of a logged step
MOST_TOKENS = 4096  # tokens of an episode that its record has numbers for
MOST_CHARACTERS = 20_000  # of an observation and of a reply


@dataclasses.dataclass(frozen=True)
class EpisodeSummary:
    """One seat of an episode. `record` is called for those that are recorded.

    `group` is equal for siblings: the same seat of the same prompt. `status` is "ok", or the kind
    of failure; `total` is the return, None for a failed one; `tokens` counts the whole log.
    """

    episode: int
    group: int
    status: str
    total: float | None
    tokens: int
    record: Callable[[], dict]


def turn_record(
    *,
    observation: str,
    tokens: Sequence[int],
    pieces: Sequence[str],
    logprobs: Sequence[float],
    chosen: Sequence[float],
    versions: Sequence[int] = (),
    text: str = "",
    reward: float = 0.0,
    bad: bool = False,
) -> dict:
    """Returns one turn: what the policy read and the N tokens behind it, with one entry each.

    `pieces` are the texts of the tokens, `logprobs` the sampler's in nats, `chosen` 0 for a token
    that was forced, `text` the reply as it was parsed; `bad`: a call in it could not be parsed.
    """
    return {
        "observation": _cut(observation),
        "text": _cut(text),
        "tokens": [int(i) for i in tokens],
        "pieces": [str(piece) for piece in pieces],
        "logprobs": [round(float(x), 4) for x in logprobs],
        "chosen": [int(x > 0) for x in chosen],
        "versions": [int(v) for v in versions],
        "reward": float(reward),
        "bad": bool(bad),
    }


def episode_record(
    *,
    episode: int,
    group: int,
    turns: Sequence[dict],
    seat: str = "",
    status: str = "ok",
    finish: str = "stop",
    total: float | None = None,
    message: str = "",
) -> dict:
    """Returns a line of episodes.jsonl; `turns` are `turn_record`s, the first with the prompt as
    its observation.

    `finish` is the name of a FinishReason in small letters, `message` says why an episode failed.
    In an episode of more than MOST_TOKENS tokens the later turns keep only their texts.
    """
    turn_records, tokens_left = [], MOST_TOKENS
    for turn in turns:
        token_fields = ("tokens", "pieces", "logprobs", "chosen", "versions")
        turn_records.append(turn | {name: turn[name][:tokens_left] for name in token_fields})
        tokens_left -= min(tokens_left, len(turn["tokens"]))
    return {
        "episode": int(episode),
        "group": int(group),
        "seat": seat,
        "status": status,
        "finish": finish,
        "return": None if total is None else float(total),
        "message": _cut(message),
        "turns": turn_records,
    }


def shown_episodes(
    episodes: Sequence[EpisodeSummary], most: int = MOST_EPISODES
) -> list[EpisodeSummary]:
    """Returns at most `most` of the episodes, in their order: the best, the worst and the longest,
    one of each kind of failure, then the siblings of the best, the worst and so on, while a whole
    group fits."""
    ok = [e for e in episodes if e.status == "ok" and e.total is not None]
    scored = [e for e in ok if math.isfinite(e.total)]
    first: list[EpisodeSummary] = []
    if scored:
        first = [max(scored, key=lambda e: e.total), min(scored, key=lambda e: e.total)]
    if episodes:
        first.append(max(episodes, key=lambda e: e.tokens))
    kinds = {e.status: e for e in reversed(episodes) if e.status != "ok"}
    first += [kinds[kind] for kind in sorted(kinds)]
    picked = {id(e) for e in first[:most]}
    for group in dict.fromkeys(e.group for e in first):
        siblings = [e for e in episodes if e.group == group and id(e) not in picked]
        if len(picked) + len(siblings) <= most:
            picked |= {id(e) for e in siblings}
    return [e for e in episodes if id(e) in picked]


def _cut(text: str) -> str:
    """The head and the tail of a text that is too long."""
    half = MOST_CHARACTERS // 2
    omitted = len(text) - 2 * half
    return text if omitted <= 0 else f"{text[:half]} [{omitted} characters cut] {text[-half:]}"
