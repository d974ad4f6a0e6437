"""Patterns of `re` as automata: a table of states, so that a program matches texts by them.

Supported are literals, classes, `.` (any character: the patterns of rewards are DOTALL), groups,
alternatives and repeats, `^`, `$`, `\\A` and `\\Z` at the ends of the pattern. What looks around
or back is refused by name. Patterns are over UTF-8, whose characters are sequences of bytes.

Axes: B texts, N bytes, Q states.
"""

import dataclasses
import functools
import re
from re import _constants as sre
from re import _parser

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import InputError

MOST_STATES = 2_000
_MOST_PARTS = 20_000  # states of the automaton before it is made deterministic
_MOST_CODE = 0x10FFFF


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over bytes: `table` [Q, 256] has the next state, `accepts` [Q] says
    whether a text that ends there matches. State 0 is the first one."""

    table: np.ndarray
    accepts: np.ndarray

    def matches(self, text: jax.Array, length: jax.Array) -> jax.Array:
        """Returns whether texts [B, N] of `length` [B] bytes match: [B] bool."""
        table, accepts = jnp.asarray(self.table), jnp.asarray(self.accepts)

        def step(state, inputs):
            byte, column = inputs
            return jnp.where(column < length, table[state, byte], state), None

        columns = jnp.arange(text.shape[1])
        state, _ = jax.lax.scan(step, jnp.zeros_like(length), (text.T, columns))
        return accepts[state]


@functools.lru_cache(maxsize=64)
def compile_pattern(pattern: str, whole: bool) -> Automaton:
    """Returns the automaton of texts in which the pattern is found, or that it fits as a `whole`.
    Raises InputError for a pattern that cannot be compiled, that uses what no automaton has, or
    that needs more than MOST_STATES states."""
    try:
        parsed = _parser.parse(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(
            "regex_match: the pattern is none",
            value=pattern,
            rule=str(error),
            fix=r"correct it; brackets and stars that mean themselves are written \( and \*",
        ) from None
    flags = parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.ASCII | re.LOCALE)
    if flags:
        raise _refusal(pattern, f"flags {re.RegexFlag(flags)!r}")
    items = list(parsed)
    begins = bool(items) and items[0] in (
        (sre.AT, sre.AT_BEGINNING),
        (sre.AT, sre.AT_BEGINNING_STRING),
    )
    items = items[1:] if begins else items
    ending = items[-1] if items else None
    ends = ending in ((sre.AT, sre.AT_END), (sre.AT, sre.AT_END_STRING))
    items = items[:-1] if ends else items
    graph = _Graph(pattern)
    any_byte = [(0, 255)]
    first = graph.state()
    state = first
    if not (begins or whole):
        graph.edge(first, any_byte, first)
    state = graph.sequence(state, items)
    last = graph.state()
    graph.empty(state, last)
    if ending == (sre.AT, sre.AT_END) and not whole:  # also before a line break at the end
        graph.edge(state, [(10, 10)], last)
    if not (ends or whole):
        graph.edge(last, any_byte, last)
    return graph.deterministic(first, last)


def _refusal(pattern: str, feature: str) -> InputError:
    return InputError(
        f"regex_match: the pattern uses {feature}",
        value=pattern,
        rule="on the device a pattern is an automaton: literals, classes, groups, alternatives and "
        "repeats, and ^ and $ at its ends",
        fix="another pattern, or program_steps=1",
    )


class _Graph:
    """An automaton with several next states, which is built from a parsed pattern."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.edges: list[list[tuple[int, int, int]]] = []  # (low, high, next) of each state
        self.empties: list[list[int]] = []

    def state(self) -> int:
        """Returns a new state. Raises InputError for a pattern that needs too many."""
        if len(self.edges) >= _MOST_PARTS:
            raise self._too_large()
        self.edges.append([])
        self.empties.append([])
        return len(self.edges) - 1

    def _too_large(self) -> InputError:
        return InputError(
            "regex_match: the pattern is too large for the device",
            value=self.pattern,
            rule=f"its automaton has at most {MOST_STATES} states",
            fix="smaller counts in {}, or program_steps=1",
        )

    def edge(self, source: int, ranges, target: int) -> None:
        """Adds the bytes of `ranges` from one state to another."""
        self.edges[source] += [(low, high, target) for low, high in ranges]

    def empty(self, source: int, target: int) -> None:
        """Adds a step without a byte."""
        self.empties[source].append(target)

    def sequence(self, at: int, items) -> int:
        """Adds parsed items behind a state. Returns the last state."""
        for item in items:
            at = self._item(at, *item)
        return at

    def _item(self, source: int, kind, value) -> int:
        if kind is sre.LITERAL:
            return self._characters(source, [(value, value)])
        if kind is sre.NOT_LITERAL:
            return self._characters(source, _others([(value, value)]))
        if kind is sre.ANY:
            return self._characters(source, [(0, _MOST_CODE)])
        if kind is sre.IN:
            return self._characters(source, self._class(value))
        if kind is sre.BRANCH:
            end = self.state()
            for branch in value[1]:
                start = self.state()
                self.empty(source, start)
                self.empty(self.sequence(start, branch), end)
            return end
        if kind is sre.SUBPATTERN:
            _, added, removed, items = value
            if added or removed:
                raise _refusal(self.pattern, "flags within it")
            return self.sequence(source, items)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(source, *value)
        raise _refusal(self.pattern, f"{str(kind).lower()} within it")

    def _repeat(self, state: int, low: int, high, items) -> int:
        for _ in range(low):
            state = self.sequence(state, items)
        if high is sre.MAXREPEAT:
            loop, end = self.state(), self.state()
            self.empty(state, loop)
            self.empty(self.sequence(loop, items), loop)
            self.empty(loop, end)
            return end
        end = self.state()
        for _ in range(high - low):
            self.empty(state, end)
            state = self.sequence(state, items)
        self.empty(state, end)
        return end

    def _class(self, items) -> list[tuple[int, int]]:
        ranges, negates = [], False
        for kind, value in items:
            if kind is sre.NEGATE:
                negates = True
            elif kind is sre.LITERAL:
                ranges.append((value, value))
            elif kind is sre.RANGE:
                ranges.append(value)
            elif kind is sre.CATEGORY:
                ranges += _category(value)
            else:
                raise _refusal(self.pattern, f"{str(kind).lower()} in a class")
        return _others(ranges) if negates else ranges

    def _characters(self, source: int, ranges: list[tuple[int, int]]) -> int:
        """Adds one character of the ranges of code points, as its bytes."""
        end = self.state()
        for low, high in ranges:
            for bytes_ in _utf8(low, high):
                state = source
                for i, byte in enumerate(bytes_):
                    following = end if i == len(bytes_) - 1 else self.state()
                    self.edge(state, [byte], following)
                    state = following
        return end

    def _closure(self, states) -> frozenset[int]:
        reached, todo = set(states), list(states)
        while todo:
            for next_state in self.empties[todo.pop()]:
                if next_state not in reached:
                    reached.add(next_state)
                    todo.append(next_state)
        return frozenset(reached)

    def deterministic(self, first: int, last: int) -> Automaton:
        """Returns the automaton of sets of states. Raises InputError if it has too many."""
        sets = [self._closure([first])]
        index_of, rows = {sets[0]: 0}, []
        for states in sets:  # grows meanwhile
            edges = [edge for state in states for edge in self.edges[state]]
            borders = sorted({0, 256, *(e[0] for e in edges), *(e[1] + 1 for e in edges)})
            row = np.zeros(256, np.int32)
            for low, high in zip(borders, borders[1:], strict=False):
                reached = self._closure({e[2] for e in edges if e[0] <= low <= e[1]})
                if reached not in index_of:
                    if len(index_of) >= MOST_STATES:
                        raise self._too_large()
                    index_of[reached] = len(sets)
                    sets.append(reached)
                row[low:high] = index_of[reached]
            rows.append(row)
        return Automaton(np.stack(rows), np.array([last in states for states in sets]))


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the code points that are in none of the ranges."""
    out, next_code = [], 0
    for low, high in sorted(ranges):
        if low > next_code:
            out.append((next_code, low - 1))
        next_code = max(next_code, high + 1)
    return [*out, (next_code, _MOST_CODE)] if next_code <= _MOST_CODE else out


@functools.cache
def _category(category) -> tuple[tuple[int, int], ...]:
    r"""Returns the code points of \d, \s, \w and their opposites, as `re` has them."""
    letter = {
        sre.CATEGORY_DIGIT: r"\d",
        sre.CATEGORY_NOT_DIGIT: r"\D",
        sre.CATEGORY_SPACE: r"\s",
        sre.CATEGORY_NOT_SPACE: r"\S",
        sre.CATEGORY_WORD: r"\w",
        sre.CATEGORY_NOT_WORD: r"\W",
    }[category]
    characters = "".join(map(chr, range(_MOST_CODE + 1)))
    return tuple((m.start(), m.end() - 1) for m in re.finditer(f"{letter}+", characters))


_LAST_OF_SIZE = (0x7F, 0x7FF, 0xFFFF, _MOST_CODE)  # the last code point of one byte, of two, ...


def _utf8(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Returns sequences of ranges of bytes: together they are the UTF-8 of code points low to
    high, without surrogates."""
    if low <= 0xDFFF and high >= 0xD800:
        parts = [(low, 0xD7FF), (0xE000, high)]
        return [s for a, b in parts if a <= b for s in _utf8(a, b)]
    out, start = [], low
    for limit in _LAST_OF_SIZE:
        if start <= limit and start <= high:
            out += _between([*chr(start).encode()], [*chr(min(high, limit)).encode()])
            start = limit + 1
    return out


def _between(first: list[int], last: list[int]) -> list[list[tuple[int, int]]]:
    """Returns the sequences of bytes from `first` to `last`, of one length, in ranges."""
    if len(first) == 1:
        return [[(first[0], last[0])]]
    if first[0] == last[0]:
        return [[(first[0], first[0]), *rest] for rest in _between(first[1:], last[1:])]
    rest = len(first) - 1
    lowest, highest = [0x80] * rest, [0xBF] * rest
    out = []
    low, high = first[0], last[0]
    if first[1:] != lowest:
        out += [[(low, low), *tail] for tail in _between(first[1:], highest)]
        low += 1
    if last[1:] != highest:
        high -= 1
    if low <= high:
        out.append([(low, high), *[(0x80, 0xBF)] * rest])
    if last[1:] != highest:
        out += [[(last[0], last[0]), *tail] for tail in _between(lowest, last[1:])]
    return out
