"""Patterns of files as fsspec reads them, matched in time that is linear in the path.

`*` stays in a folder, `**` does not, `**/` may be no folder at all, `?` and `[a-z]` are one
character. A regular expression would try all ways to share a path among the stars of an
untrusted pattern.
"""

import bisect
import functools
import re
from collections.abc import Callable, Sequence

from rljax.errors import InputError

LONGEST = 1_000  # characters of a pattern
MOST_LETTERS = 10**9  # of the files that the patterns of a data set are compared with: a minute
_MOST_MOVES = 100_000  # that are kept of a pattern
_TOKEN = re.compile(r"\*\*/?|\*|\?|\[[^\]]+\]")
_GLOB = re.compile(r"[*?\[]")


def is_glob(pattern: str) -> bool:
    """Returns whether a pattern has wildcards."""
    return bool(_GLOB.search(pattern))


class Files:
    """The files of a data set, in which patterns are looked up."""

    def __init__(self, paths: Sequence[str]):
        self.paths = sorted(paths)
        self._known = set(paths)
        self._letters = 0  # that patterns were compared with

    def matching(self, pattern: str) -> list[str]:
        """Returns the paths that a pattern fits, in order; a folder stands for the files in it.
        Raises InputError for a pattern that is too long, and if the patterns so far were compared
        with too many letters of names."""
        if pattern in self._known:
            return [pattern]
        if not is_glob(pattern):
            return self._below(f"{pattern.rstrip('/')}/")
        if len(pattern) > LONGEST:
            rule = f"at most {LONGEST} letters"
            fix = "name the files, or the folder that they are in"
            raise InputError("a pattern of files", value=pattern, rule=rule, fix=fix)
        candidates = self._below(pattern[: _GLOB.search(pattern).start()])
        self._letters += sum(map(len, candidates))
        if self._letters > MOST_LETTERS:
            raise InputError(
                f"patterns are compared with more than {MOST_LETTERS} letters of names of files",
                rule="a data set has so many patterns or files",
                fix="name the files themselves",
            )
        return list(filter(matcher(pattern), candidates))

    def _below(self, beginning: str) -> list[str]:
        """Returns the paths that begin so and go on after it."""
        first = bisect.bisect_left(self.paths, beginning)

        def ends(path):
            return not path.startswith(beginning)

        return self.paths[first : bisect.bisect_left(self.paths, True, lo=first, key=ends)]


@functools.lru_cache(maxsize=256)
def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns a function of a path: whether it fits the pattern.

    It walks through the path with the set of states that the pattern may be in, as the bits of a
    number; transitions are cached, so that most take one look into a dictionary.
    """
    steps = _steps(pattern)
    moves: dict[tuple[int, str], int] = {}

    def closed(states: int) -> int:
        for state, (kind, _) in enumerate(steps):
            if states >> state & 1:
                # A star may stand for nothing, and **/ for no folder.
                states |= {"star": 2, "folders": 6}.get(kind, 0) << state
        return states

    def next_states(states: int, character: str) -> int:
        out = 0
        for state, (kind, fits) in enumerate(steps):
            if states >> state & 1 and fits(character):
                stays = kind in ("star", "through")
                goes = kind == "one" or (kind == "through" and character == "/")
                out |= stays << state | goes << state + 1
        return closed(out)

    begin, end = closed(1), len(steps)

    def fits(path: str) -> bool:
        states = begin
        for character in path:
            move = states, character
            if move not in moves:
                if len(moves) >= _MOST_MOVES:
                    moves.clear()
                moves[move] = next_states(*move)
            states = moves[move]
        return bool(states >> end & 1)

    return fits


def _steps(pattern: str) -> list[tuple[str, Callable[[str], bool]]]:
    """Returns [(kind, whether it fits a character)]. "one" takes a character, "star" any number of
    them; "folders" takes none and stands before "through", which takes them up to a slash."""
    steps, begin = [], 0
    for match in [*_TOKEN.finditer(pattern), None]:
        until = match.start() if match else len(pattern)
        steps += [("one", letter.__eq__) for letter in pattern[begin:until]]
        if match is None:
            return steps
        begin, token = match.end(), match[0]
        if token == "**/":
            steps += [("folders", lambda _: False), ("through", lambda _: True)]
        elif token == "**":
            steps.append(("star", lambda _: True))
        elif token == "*":
            steps.append(("star", lambda letter: letter != "/"))
        elif token == "?":
            steps.append(("one", lambda letter: letter != "/"))
        else:
            steps += _class(token)


def _class(token: str) -> list[tuple[str, Callable[[str], bool]]]:
    """Returns the step for one character of those in brackets, or a step for each character of the
    token where the brackets are no range."""
    inner = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
    try:
        compiled = re.compile(f"[{'^' + inner[1:] if inner[0] == '!' else inner}]", re.DOTALL)
    except re.error:
        return [("one", letter.__eq__) for letter in token]
    return [("one", lambda letter: compiled.fullmatch(letter) is not None)]
