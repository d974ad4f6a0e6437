"""Stop strings: where a response ends, to the token.

The response ends with the first token after which its text contains a stop string, however the
string is spread over tokens; the text given out ends before the string.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts
from rljax.arrays import fetch
from rljax.batch import Batch, FinishReason
from rljax.data.text.tokenizer import Tokenizer

HALF = "\ufffd"  # what decoders write for bytes that are no character, or not yet one
EDGE = 4  # characters at the beginning of a window that may be others than in the whole text


@functools.lru_cache(maxsize=8)
def special_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the texts of a tokenizer's special tokens, and their ids."""
    ids = sorted(tokenizer.special_ids)
    texts = {tokenizer.decode([i], skip_special_tokens=False): i for i in ids}
    return {text: i for text, i in texts.items() if text}


def stop_tokens(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of those stop strings that are one special token: they end a response as
    other stop ids do, without a look at its text."""
    special_ids = special_texts(tokenizer) if stops else {}
    return tuple(special_ids[stop] for stop in stops if stop in special_ids)


@functools.lru_cache(maxsize=64)
def holds_special(tokenizer: Tokenizer, stops: tuple[str, ...]) -> bool:
    """Returns whether the text of a special token is a part of a stop string."""
    return any(text in stop for stop in stops for text in special_texts(tokenizer))


def decoder_for(decode: Callable | None, stops: Sequence[str]) -> Callable | None:
    """Returns ids -> text in which these stop strings are looked for: with special tokens if one of
    them holds such a token's text, which a tokenizer's `decode` leaves out by itself."""
    tokenizer = decode.__self__ if inspect.ismethod(decode) else None
    has_tokenizer = stops and isinstance(tokenizer, Tokenizer)
    if has_tokenizer and holds_special(tokenizer, tuple(stops)):
        return functools.partial(decode, skip_special_tokens=False)
    return decode


def find_stop(
    ids: Sequence[int], stops: Sequence[str], decode: Callable, known_free: int = 0
) -> int | None:
    """Returns how many of `ids` to keep, or None where no stop string is in their text. The first
    `known_free` of them are known to have none; of these only the last few are decoded."""
    decode = decoder_for(decode, stops)
    start = _window(ids, decode, known_free, max(map(len, stops), default=0) + 2 * EDGE)

    def ended(count: int) -> bool:
        for trimmed in range(4):
            text = decode(ids[start : count - trimmed])
            if any(stop in text[EDGE if start else 0 :] for stop in stops):
                return True
            if not text.endswith(HALF):
                break  # else part of a character may hide what comes before it, see _window
        return False

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


def _window(ids: Sequence[int], decode: Callable, end: int, characters: int) -> int:
    """Returns the first of the tokens before `end` that hold at least so many characters."""
    size = characters
    while size < end:
        # The bytes of a character may be four tokens. Parts of one at either end are no text, and
        # spoil what is between for decoders that take bytes together.
        for trimmed, extra in itertools.product(range(4), repeat=2):
            start = max(end - size - extra, 0)
            text = decode(ids[start : end - trimmed])
            if not text.startswith(HALF) and not text.endswith(HALF):
                break
        if len(text) >= characters:
            return start
        size *= 2
    return 0


def cut_row(
    ids: list[int], reason: int, stops: Sequence[str], decode: Callable | None
) -> tuple[list[int], int]:
    """Returns one whole response and its finish reason, as `cut_at_stop_strings` leaves them."""
    count = find_stop(ids, stops, decode) if stops and ids else None
    return (ids, reason) if count is None else (ids[:count], int(FinishReason.STOP))


def cut_at_stop_strings(
    batch: Batch, starts: np.ndarray, stops: Sequence[str], decode: Callable, free=None
) -> Batch:
    """Ends responses [B, S], which begin at columns starts [B], with the token that completes a
    stop string; what came after is padding. The first free [B] tokens of each complete none (None:
    0). Each host looks for the strings in rows of its own."""
    lengths = jnp.sum(batch.segment_ids > 0, axis=1)
    tokens, lengths = fetch((batch.tokens, lengths))
    cuts = []
    for row in hosts.mine(len(tokens)):
        ids = tokens[row, starts[row] : lengths[row]].tolist()
        checked = 0 if free is None else int(free[row])
        count = find_stop(ids, stops, decode, checked) if len(ids) > checked else None
        if count is not None:
            cuts.append((row, int(starts[row]) + count))
    ends, stopped = lengths.copy(), np.zeros(len(tokens), bool)
    for row, end in itertools.chain(*hosts.gather(cuts)):
        ends[row], stopped[row] = end, True
    return _cut(batch, ends, stopped)


@jax.jit
def _cut(batch: Batch, ends: jax.Array, stopped: jax.Array) -> Batch:
    """Returns the batch without the tokens at columns ends [B] and behind."""
    before_end = jnp.arange(batch.tokens.shape[1])[None, :] < ends[:, None]
    names = ("tokens", "segment_ids", "positions", "mask", "policy_version")
    names += ("sampler_logprobs", "sampler_log_kept", "entropy")
    fields = {name: getattr(batch, name) for name in names}
    fields = {name: jnp.where(before_end, x, jnp.zeros_like(x)) for name, x in fields.items()}
    reason = jnp.where(stopped, FinishReason.STOP, batch.finish_reason)
    return batch.replace(**fields, finish_reason=reason.astype(batch.finish_reason.dtype))
