"""Pages of keys and values on the host: whose they are, which are free, and which hold the tokens
that a request begins with (arXiv 2309.06180).

A page has as many owners as there are samples that read it. It is written by one owner alone:
pages are shared once they are full, and a full one is not written again. A full page has a name,
which says its tokens and all before them; a page without owners keeps its name, and can be found,
until its room is needed: the one that was used least recently goes first.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

from rljax.models.cache_pages import Pool


class Pages:
    """The pages of a pool, those of each shard counted from its first."""

    def __init__(self, pool: Pool):
        self.page_tokens, self.shards = pool.page_tokens, pool.shards
        self.each = pool.count // pool.shards
        self._free = [list(range(self.each - 1, -1, -1)) for _ in range(self.shards)]
        self._owners = np.zeros((self.shards, self.each), np.int32)
        self._names: list[dict[int, bytes]] = [{} for _ in range(self.shards)]
        self._named: list[dict[bytes, int]] = [{} for _ in range(self.shards)]
        # Pages with a name and without an owner, least recently used first.
        self._idle = [collections.OrderedDict() for _ in range(self.shards)]

    def room(self, shard: int) -> int:
        """Pages that nobody owns."""
        return len(self._free[shard]) + len(self._idle[shard])

    @property
    def used(self) -> int:
        return int(np.count_nonzero(self._owners))

    @property
    def shared(self) -> int:
        """Pages of several owners."""
        return int(np.count_nonzero(self._owners > 1))

    def take(self, shard: int, count: int) -> list[int] | None:
        """So many pages for one owner, to be written; None where there are not as many."""
        if self.room(shard) < count:
            return None
        while len(self._free[shard]) < count:
            self._unname(shard, self._idle[shard].popitem(last=False)[0])
        pages = [self._free[shard].pop() for _ in range(count)]
        self._owners[shard, pages] = 1
        return pages

    def share(self, shard: int, pages: Sequence[int]) -> None:
        """One more owner of pages that were found."""
        for page in pages:
            self._idle[shard].pop(page, None)
            self._owners[shard, page] += 1

    def drop(self, shard: int, pages: Sequence[int]) -> None:
        """One owner less. (Last first: of a run that is found again the end goes first.)"""
        for page in reversed(pages):
            assert self._owners[shard, page] > 0, (shard, page)
            self._owners[shard, page] -= 1
            if not self._owners[shard, page]:
                if page in self._names[shard]:
                    self._idle[shard][page] = None
                else:
                    self._free[shard].append(page)

    def name(self, shard: int, pages: Sequence[int], tokens: np.ndarray, images=b"") -> None:
        """Says that a run of pages has read `tokens`, so that the full ones are found. `images`:
        the name of those that stand among the tokens."""
        for page, name in zip(pages, self._names_of(tokens, images), strict=False):
            if page not in self._names[shard] and name not in self._named[shard]:
                self._names[shard][page], self._named[shard][name] = name, page

    def find(self, shard: int, tokens: np.ndarray, images=b"") -> list[int]:
        """The pages that hold the first of `tokens`, as many as there are, among these images."""
        found = []
        for name in self._names_of(tokens, images):
            if name not in self._named[shard]:
                break
            found.append(self._named[shard][name])
        return found

    def forget_names(self) -> None:
        """No page is found any more: other parameters read them."""
        for shard in range(self.shards):
            self._free[shard] += reversed(self._idle[shard])
            self._idle[shard].clear()
            self._names[shard].clear()
            self._named[shard].clear()

    def _unname(self, shard: int, page: int) -> None:
        del self._named[shard][self._names[shard].pop(page)]
        self._free[shard].append(page)

    def _names_of(self, tokens: np.ndarray, images: bytes):
        """The name of each full page of tokens: a digest of all tokens up to its end."""
        digest, data = hashlib.blake2b(images, digest_size=16), np.asarray(tokens, np.int32)
        for end in range(self.page_tokens, len(data) + 1, self.page_tokens):
            digest.update(data[end - self.page_tokens : end].tobytes())
            yield digest.digest()
