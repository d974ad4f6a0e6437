"""The tool `search`: BM25 over a file of texts, by the library bm25s (the extra `agents`)."""

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np

from rljax.contracts import contract
from rljax.errors import InputError
from rljax.files import parse_json, read_lines

_FIELDS = ("text", "contents", "content", "passage")  # fields that may hold the text
_WORD = r"(?u)\b\w+\b"
_LONGEST_QUERY = 2_000  # characters


@contract()
def search(*, corpus: str, k: int = 3) -> Callable:
    """A tool that answers a query with the `k` texts of `corpus` that BM25 ranks first.

    `corpus`: a .txt file, a text in each line, or a .jsonl file of objects with "text" (or
    "contents", "content", "passage") and, where it has one, "title". A tie goes to the earlier
    text. The index is made once in a process. Raises InputError for k below 1, and for a file that
    cannot be read.
    """
    if k < 1:
        raise InputError(
            "search: k is the number of texts of an answer",
            value=k,
            rule="above 0",
            fix="set k to at least 1",
        )
    index = _index(os.path.abspath(corpus))

    def search(query: str) -> str:
        """Searches a collection of texts and returns those that fit the query best.

        Args:
            query: A few words to search for.
        """
        indices = index.best(query[:_LONGEST_QUERY], k)
        texts = [f"[{rank}] {index.texts[i]}" for rank, i in enumerate(indices, 1)]
        return "\n".join(texts) or "Nothing was found."

    return search


class _Index:
    """The texts of a file and their BM25 scores."""

    def __init__(self, path: str):
        try:
            import bm25s
        except ImportError:
            raise InputError(
                "the tool search needs the library bm25s", fix="pip install 'bm25s>=0.2.14'"
            ) from None
        self.texts = _texts_of(path)
        options = dict(token_pattern=_WORD, stopwords=None, show_progress=False)
        self._split = functools.partial(bm25s.tokenize, **options)
        self._scores = bm25s.BM25()
        self._scores.index(self._split(self.texts), show_progress=False)

    def best(self, query: str, k: int) -> Sequence[int]:
        """The indices of the k texts with the highest score above 0, in this order."""
        words = self._split([query], return_ids=False)[0]
        if not words:
            return ()
        scores = self._scores.get_scores(words)
        border = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        candidates = np.flatnonzero((scores >= border) & (scores > 0))
        return candidates[np.argsort(-scores[candidates], kind="stable")][:k]


_index = functools.lru_cache(maxsize=4)(_Index)  # each process makes it once


def _texts_of(path: str) -> list[str]:
    """Returns every text of a corpus, titles in front. Raises InputError for a file of another
    kind, or without texts."""
    lines = ((f"{path}:{n}", line) for n, line in read_lines(path) if line.strip())
    if path.endswith(".txt"):
        texts = [line.strip() for _, line in lines]
    elif path.endswith(".jsonl"):
        texts = [_text_of(parse_json(line, location), location) for location, line in lines]
    else:
        raise InputError(
            "search: unknown kind of corpus",
            value=path,
            rule="a .txt or a .jsonl file",
            fix='write the texts one to a line in a .txt file, or as objects with "text" in a '
            ".jsonl file",
        )
    if not texts:
        raise InputError(f"{path} has no text", fix="write a text in each line")
    return texts


def _text_of(row: object, location: str) -> str:
    fields = row if isinstance(row, dict) else {}
    text = next((fields[name] for name in _FIELDS if isinstance(fields.get(name), str)), None)
    if text is None:
        rule = f"one of {', '.join(_FIELDS)}"
        fix = 'rename the field that holds the text to "text"'
        raise InputError(f"{location}: this row has no text", value=row, rule=rule, fix=fix)
    title = fields.get("title")
    return f"{title}: {text}" if isinstance(title, str) and title else text
