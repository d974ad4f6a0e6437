"""Episodes as the rows of a batch, and as metrics.

Axes: B rows, `EpisodeRules.rows` to an episode (max_rows for each seat in turn), S tokens. A row
that an episode did not need, and all rows of a failed one, have mask 0.
"""

import functools
from collections.abc import Sequence

import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.metric import Metric
from rljax.rollout.players.episodes.log import EpisodeRules, Log, Trajectory
from rljax.tracking.episodes import EpisodeSummary, episode_record, turn_record

METRICS = {
    "episode/turns": Metric(
        "replies of the policy in an episode, mean",
        "turns",
        "falls or rises to what the task needs; at environment.max_turns: cut off",
    ),
    "episode/tokens": Metric(
        "tokens of an episode with prompt and observations, mean",
        "tokens",
        "well below environment.max_tokens",
    ),
    "episode/seconds": Metric("an episode from its first token to its end, mean", "seconds"),
    "episode/return": Metric(
        "rewards of the turns and the outcome together, mean", "score", "rises, with noise"
    ),
    "episode/success": Metric(
        "episodes whose return is at least algorithm.correct_at", "share", "rises"
    ),
    "episode/ended/stop": Metric("episodes that the environment ended", "share", "near 1"),
    "episode/ended/length": Metric(
        "episodes that ran out of tokens",
        "share",
        "below 0.1; more: a higher environment.max_tokens, or the end is not learned",
    ),
    "episode/ended/turns": Metric(
        "episodes that used up environment.max_turns", "share", "falls as it learns to end"
    ),
    "episode/ended/time": Metric(
        "episodes that ran past environment.episode_timeout_s",
        "share",
        "near 0; they depend on the speed of the machine",
    ),
    "episode/ended/failed": Metric(
        "episodes that failed: masked, and never scored",
        "share",
        "0; above environment.max_failed the run ends",
    ),
    "calls/per_episode": Metric("tool calls of an episode, mean", "calls"),
    "calls/bad": Metric(
        "calls that could not be parsed",
        "share",
        "falls to 0; near 1: the format is not the one of environment.calls",
    ),
    "calls/unknown": Metric("calls of a tool that there is not", "share", "falls to 0"),
    "calls/failed": Metric("calls that a tool answered with an error", "share", "small"),
    "calls/seconds_p50": Metric(
        "an environment's answer to a tool call, median",
        "seconds",
        "below the time of a turn's decoding",
    ),
    "calls/seconds_p99": Metric(
        "the slowest hundredth of the answers to tool calls",
        "seconds",
        "well below environment.turn_timeout_s",
    ),
    "env/seconds": Metric(
        "time inside the environment of an episode, mean", "seconds", "small beside episode/seconds"
    ),
    "env/failed": Metric(
        "episodes that failed for good",
        "episodes",
        "0; tracebacks are in episodes.jsonl and the report",
    ),
    "group/partial": Metric(
        "prompts that have lost some of their episodes by failures", "share", "0"
    ),
    "group/dead": Metric(
        "groups whose episodes all failed, or are all worth the same", "share", "below 0.7"
    ),
    "drift/same": Metric(
        "turns at which the template writes the very tokens that were sampled",
        "share",
        "near 1, of those that were looked at",
    ),
    "drift/retokenized": Metric(
        "turns at which the same text would be other tokens",
        "share",
        "any: what was sampled is what is trained",
    ),
    "drift/rewritten": Metric(
        "turns at which the template shows another history",
        "share",
        "0; else environment.history='rewrite'",
    ),
    "drift/new_rows": Metric(
        "rows of an episode, all seats together, mean",
        "rows",
        "the number of seats with environment.history='append'",
    ),
}

_PER_TOKEN = (
    ("mask", "chosen"),
    ("sampler_logprobs", "logprobs"),
    ("sampler_log_kept", "log_kept"),
    ("entropy", "entropy"),
    ("policy_version", "versions"),
)
_NUMBERS = ("mask", "sampler_logprobs", "sampler_log_kept", "entropy", "rewards")
_TOKEN_FIELDS = {
    **dict.fromkeys(("tokens", "policy_version", "step_ids", "state_ids"), np.int32),
    **dict.fromkeys(_NUMBERS, np.float32),
}


def rows_of(
    episodes: Sequence[Trajectory],
    rules: EpisodeRules,
    scores: np.ndarray,
    parts: np.ndarray | None,
    groups: Sequence[int],
    *,
    mask_bad_turns: bool,
) -> Batch:
    """Returns a host batch of the episodes, in their order: B = episodes x `EpisodeRules.rows`.

    Args:
      episodes: those that have ended.
      rules: of the rollout.
      scores: [B], of every row the total return of its seat; a failed row's is not read.
      parts: [B, K], its named parts, or None.
      groups: equal for the episodes that are compared, from 0.
      mask_bad_turns: turns with a bad call are not learned from.

    A turn's reward stands on its last token that is learned from, the rest of the return on the
    last one of the seat. group = that of the episode x seats + seat; the rows of a failed episode
    are groups of their own.
    """
    rows, columns = len(episodes) * rules.rows, rules.limits.max_tokens
    fields = {name: np.zeros((rows, columns), dtype) for name, dtype in _TOKEN_FIELDS.items()}
    lengths = np.ones(rows, np.int32)  # a row that nobody needed holds one token of mask 0
    finish = np.full(rows, FinishReason.ABORT, np.int32)
    every_row = np.arange(rows, dtype=np.int32)
    seat = every_row // rules.max_rows % len(rules.seats)
    states: dict[bytes, int] = {}
    first_own_group = (max(groups) + 1) * len(rules.seats)
    group = first_own_group + every_row
    for index, episode in enumerate(episodes):
        seat_rows: dict[int, list[int]] = {}  # the rows of each
        played = dict.fromkeys(range(len(rules.seats)), 0)  # turns
        for log in episode.logs:
            own_rows = seat_rows.setdefault(log.seat, [])
            row = index * rules.rows + log.seat * rules.max_rows + len(own_rows)
            own_rows.append(row)
            _fill(fields, row, log, states, mask_bad_turns, played[log.seat])
            played[log.seat] += len(log.turns)
            lengths[row] = log.tokens
            finish[row] = episode.finish
        span = slice(index * rules.rows, (index + 1) * rules.rows)
        if episode.failure:
            fields["mask"][span] = fields["rewards"][span] = 0.0
            continue
        group[span] = groups[index] * len(rules.seats) + seat[span]
        for own_rows in seat_rows.values():
            learned = [row for row in own_rows if fields["mask"][row].any()]
            last = learned[-1] if learned else own_rows[-1]
            paid = sum(fields["rewards"][row].sum() for row in own_rows)
            _reward(fields, last, lengths[last], scores[own_rows[0]] - paid)
    seat_learned = fields["mask"].reshape(-1, rules.max_rows * columns).any(axis=1)
    # A row counts if any row of the same episode and seat is learned from.
    is_learned = np.repeat(seat_learned, rules.max_rows)
    batch = batch_from_rows(
        fields.pop("tokens"),
        lengths,
        fields.pop("mask"),
        group=np.where(is_learned, group, first_own_group + every_row).astype(np.int32),
        finish_reason=finish,
        scores=np.where(is_learned, scores, 0.0).astype(np.float32),
        reward_parts=None if parts is None else parts.astype(np.float32),
        episode=(every_row // rules.max_rows).astype(np.int32),
        seat=seat.astype(np.int32),
        **fields,
    )
    return fetch(batch)


def _fill(
    fields: dict, row: int, log: Log, states: dict[bytes, int], mask_bad_turns: bool, played: int
) -> None:
    """Writes the tokens of a row and the results of its turns into the fields. `played`: the number
    of turns of the seat in earlier rows."""
    sample, start = log.sample, len(log.sample.prompt)
    end = log.tokens
    fields["tokens"][row, :end] = sample.ids
    for name, attribute in _PER_TOKEN:
        fields[name][row, start:end] = getattr(sample, attribute)
    mask = fields["mask"][row]
    last = log.turns[-1].end if log.turns else start
    mask[last:] = 0.0  # the turn that a limit cut off is not learned from
    fields["policy_version"][row] *= mask > 0
    for number, turn in enumerate(log.turns, played + 1):
        span = slice(turn.start, turn.end)
        if turn.bad and mask_bad_turns:
            mask[span] = 0.0
        fields["step_ids"][row, span] = number
        if turn.state:  # 0 where the environment names none
            fields["state_ids"][row, span] = states.setdefault(turn.state, len(states) + 1)
    for turn in log.turns:
        _reward(fields, row, turn.end, turn.reward)


def _reward(fields: dict, row: int, end: int, reward: float) -> None:
    """Adds a reward at the last token before column `end` that is learned from; where there is
    none, at the first one after it."""
    chosen = np.flatnonzero(fields["mask"][row])
    if len(chosen):
        before = chosen[chosen < end]
        fields["rewards"][row, before[-1] if len(before) else chosen[0]] += reward


def summaries(
    episodes: Sequence[Trajectory],
    rules: EpisodeRules,
    groups: Sequence[int],
    totals: Sequence,
    tokenizer,
) -> tuple[EpisodeSummary, ...]:
    """Returns each seat of each episode, for the transcripts. groups: those of `rows_of`; totals:
    the return of each [E][seats]."""
    entries = []
    for index, episode in enumerate(episodes):
        for seat in sorted({log.seat for log in episode.logs}):
            logs = [log for log in episode.logs if log.seat == seat]
            total = None if episode.failure else float(totals[index][seat])
            group = groups[index] * len(rules.seats) + seat
            record = functools.partial(
                _record, index, episode, logs, group, rules.seats[seat], total, tokenizer
            )
            tokens = sum(log.tokens for log in logs)
            status = episode.kind or "ok"
            entries.append(EpisodeSummary(index, group, status, total, tokens, record))
    return tuple(entries)


def _record(
    index: int,
    episode: Trajectory,
    logs: list[Log],
    group: int,
    seat: str,
    total: float | None,
    tokenizer,
) -> dict:
    def text(ids) -> str:
        return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    turns = []
    for log in logs:
        sample, read, start = log.sample, 0, len(log.sample.prompt)
        for turn in log.turns:
            span = slice(turn.start - start, turn.end - start)
            ids = [int(i) for i in sample.tokens[span]]
            turns.append(
                turn_record(
                    observation=text(sample.ids[read : turn.start]),
                    tokens=ids,
                    pieces=[text([i]) for i in ids],
                    logprobs=sample.logprobs[span],
                    chosen=sample.chosen[span],
                    versions=sample.versions[span],
                    text=turn.text,
                    reward=turn.reward,
                    bad=turn.bad,
                )
            )
            read = turn.end
    return episode_record(
        episode=index,
        group=group,
        turns=turns,
        seat=seat,
        status=episode.kind or "ok",
        finish=episode.finish.name.lower(),
        total=total,
        message=episode.failure,
    )


def episode_metrics(
    episodes: Sequence[Trajectory],
    groups: Sequence[int],
    returns: Sequence[float],
    correct_at: float,
) -> dict[str, float]:
    """Returns metrics of a step's episodes; `groups` are those of `rows_of`, `returns` those of
    each one's first seat."""
    live = [episode for episode in episodes if not episode.failure]
    count = max(len(episodes), 1)
    ends = {"stop": 0, "length": 0, "turns": 0, "time": 0, "failed": len(episodes) - len(live)}
    for episode in live:
        name = episode.finish.name.lower()
        ends[name if name in ends else "stop"] += 1
    metrics = {f"episode/ended/{name}": number / count for name, number in ends.items()}
    metrics |= {
        "env/failed": float(len(episodes) - len(live)),
        "calls/per_episode": _mean([episode.calls for episode in live]),
        "env/seconds": _mean([episode.waited_s for episode in live]),
    }
    calls = sum(episode.calls for episode in live)
    for name in ("bad", "unknown", "failed"):
        field = "bad_turns" if name == "bad" else f"{name}_calls"
        number = sum(getattr(episode, field) for episode in live)
        metrics[f"calls/{name}"] = number / max(calls + (number if name == "bad" else 0), 1)
    seconds = [call_s for episode in live for call_s in episode.call_seconds]
    for share in (50, 99) if seconds else ():
        metrics[f"calls/seconds_p{share}"] = float(np.percentile(seconds, share))
    drift = [kind for episode in live for kind in episode.drift]
    for name in ("same", "retokenized", "rewritten") if drift else ():
        metrics[f"drift/{name}"] = drift.count(name) / len(drift)
    failed, totals = np.array([bool(e.failure) for e in episodes]), np.asarray(returns)
    number = np.asarray(groups)
    group_values = [(totals[number == g], failed[number == g]) for g in dict.fromkeys(groups)]
    metrics["group/partial"] = _mean(
        [failures.any() and not failures.all() for _, failures in group_values]
    )
    metrics["group/dead"] = _mean(
        [len({*values[~failures].tolist()}) < 2 for values, failures in group_values]
    )
    if live:
        scored = [x for x, episode in zip(returns, episodes, strict=True) if not episode.failure]
        metrics |= {
            "episode/turns": _mean([episode.turns for episode in live]),
            "episode/tokens": _mean([e.tokens for e in live]),
            "episode/seconds": _mean([episode.seconds for episode in live]),
            "episode/return": _mean(scored),
            "episode/success": _mean([x >= correct_at for x in scored]),
            "drift/new_rows": _mean([len(e.logs) for e in live]),
        }
    return metrics


def _mean(values: Sequence) -> float:
    return float(np.mean(values)) if len(values) else 0.0
