"""Cache of prefixes that were read before: system prompts, the turns so far, the same prompt again.

Finds the cached prefix with which a prompt shares the most tokens. A prefix is valid only for the
parameters that read it, so it is found by tokens and policy version.
"""

import collections
import dataclasses

import numpy as np

from rljax.models.config import ModelConfig
from rljax.sampler.engine import Prefix


@dataclasses.dataclass(frozen=True)
class Kept:
    """Row `row` of a prefix, and the tokens that were read into it."""

    tokens: np.ndarray
    prefix: Prefix
    row: int


class PrefixCache:
    """Prefixes with room for `tokens` tokens in all, the least recently used go first; 0 = off."""

    def __init__(self, config: ModelConfig, tokens: int):
        self.capacity, self.version = tokens, None
        self._kept: collections.OrderedDict[bytes, Kept] = collections.OrderedDict()
        windows = [kind.window for kind in config.kinds if kind.window]
        # The fewest tokens of a prefix that can only be continued where it ends; 0 = none.
        self._whole_from = 1 if config.recurrent else min(windows, default=0)
        self.hits = self.misses = self.reused_tokens = 0

    def set_version(self, version: int) -> None:
        """Drops what other parameters read."""
        if version != self.version:
            self._kept.clear()
            self.version = version

    def put(self, tokens: np.ndarray, prefix: Prefix, row: int) -> None:
        """Stores that `row` of `prefix` has read `tokens` [S] int32."""
        if not 0 < len(tokens) <= self.capacity:
            return
        self._kept[tokens.tobytes()] = Kept(tokens, prefix, row)
        self._kept.move_to_end(tokens.tobytes())
        while self.held_tokens > self.capacity:
            self._kept.popitem(last=False)

    @property
    def held_tokens(self) -> int:
        """Room, in tokens, that the kept prefixes take: all rows and columns of each, as one row
        keeps the arrays of all alive."""
        prefixes = {id(entry.prefix): entry.prefix for entry in self._kept.values()}
        return sum(prefix.rows * prefix.columns for prefix in prefixes.values())

    def find(self, tokens: np.ndarray) -> tuple[Kept, int] | None:
        """Returns (the prefix that shares the most leading tokens with `tokens` [S], how many of
        them), or None."""
        best_key, most_shared = None, 0
        for key, entry in self._kept.items():
            size = min(len(entry.tokens), len(tokens))
            differ = np.nonzero(entry.tokens[:size] != tokens[:size])[0]
            shared = int(differ[0]) if len(differ) else size
            # A sliding window's ring that has wrapped lacks tokens that a shorter prefix needs, and
            # a recurrent state is that of all tokens. (The token behind kept.tokens may have been
            # read, too, but into no state.)
            usable = shared == len(entry.tokens) or not 0 < self._whole_from <= len(entry.tokens)
            if shared > most_shared and usable:
                best_key, most_shared = key, shared
        self.note(most_shared)
        if best_key is None:
            return None
        self._kept.move_to_end(best_key)
        return self._kept[best_key], most_shared

    def note(self, tokens: int) -> None:
        """Counts a prompt of which `tokens` tokens were found."""
        self.hits, self.misses = self.hits + (tokens > 0), self.misses + (tokens == 0)
        self.reused_tokens += tokens
