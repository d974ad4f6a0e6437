"""Stop strings: where a response ends, to the token.

The response ends with the first token after which its text contains a stop string, however the
string is spread over tokens; the text given out ends before the string.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch, FinishReason


def find_stop(
    ids: Sequence[int], stops: Sequence[str], decode: Callable, known_free: int = 0
) -> int | None:
    """How many of `ids` to keep, or None where no stop string is in their text. The first
    `known_free` of them are known to have none."""

    def ended(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    if not ended(len(ids)):
        return None
    # Text only grows with tokens, so the first count that contains a stop is found by halving.
    low, high = known_free, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        if ended(middle):
            high = middle
        else:
            low = middle
    return high


def cut_row(
    ids: list[int], reason: int, stops: Sequence[str], decode: Callable | None
) -> tuple[list[int], int]:
    """One whole response and its finish reason, as `cut_at_stop_strings` leaves them."""
    kept = find_stop(ids, stops, decode) if stops and ids else None
    return (ids, reason) if kept is None else (ids[:kept], int(FinishReason.STOP))


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    starts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(starts)] if starts else text


def cut_at_stop_strings(
    batch: Batch, starts: np.ndarray, stops: Sequence[str], decode: Callable
) -> Batch:
    """Responses [B, S] from columns starts [B] on end with the token that completes a stop string;
    what came after is padding."""
    host = fetch(batch)
    lengths = (host.segment_ids > 0).sum(axis=1)
    reason, ends = np.array(host.finish_reason), lengths.copy()
    for row in np.nonzero(lengths > starts)[0]:
        ids = host.tokens[row, starts[row] : lengths[row]].tolist()
        kept = find_stop(ids, stops, decode)
        if kept is not None:
            ends[row], reason[row] = starts[row] + kept, FinishReason.STOP
    inside = np.arange(host.tokens.shape[1])[None, :] < ends[:, None]
    cut = {
        name: np.where(inside, getattr(host, name), 0)
        for name in (
            "tokens", "segment_ids", "positions", "mask", "sampler_logprobs", "sampler_log_kept",
            "entropy", "policy_version",
        )
    }  # fmt: skip
    placed = {
        name: jax.device_put(value.astype(getattr(host, name).dtype), getattr(batch, name).sharding)
        for name, value in (cut | {"finish_reason": reason}).items()
    }
    return batch.replace(**placed)
