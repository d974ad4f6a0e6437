"""Evaluations that a search asks of its models at the leaf of every live sentence: the policy's
likeliest next tokens, and how good the text is so far.

`Forked` keeps the root of each sentence as a cached prefix. A call reads the path from the root to
the leaf behind a copy of it, which XLA drops at the end of the program, so the root stays as it is
for every kind of layer; O(depth) tokens are read again. Axes: B sentences, D tokens of a path,
M children of a node.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.models import cache
from rljax.models.model import Model
from rljax.sampler.draw import Rules, choice_logprobs
from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.slots import SlotInputs, rows_layout
from rljax.search.tree import NONE

Reads = Literal["critic", "outcome", "process"]
_NEWLINE, _END = 1, 2  # why a line ends with a token


@dataclasses.dataclass(frozen=True)
class Value:
    """A model with a scalar head that says how good a text is, by the policy's tokens.

    A critic and an outcome reward model are read behind the last token; a process reward model
    behind the last token at or before it that ends a line (one of `line_ids`, or a stop id behind
    text), and it says 0 before the first. A critic says nothing of a text that has ended: that has
    the value of the state before its last token.
    """

    model: Model
    params: Any
    reads: Reads = "outcome"
    line_ids: tuple[int, ...] = ()


class Leaves(NamedTuple):
    """The leaves of a simulation, as host arrays. D is a power of four, so that few shapes are
    compiled; a path of depth 0 is the root."""

    path: np.ndarray  # [B, D] int32: the tokens from the root to the leaf, `depth` [B] of them
    depth: np.ndarray
    node: np.ndarray  # [B] int32: the index of the leaf in the tree, above that of its parent
    parent: np.ndarray  # [B] int32; NONE of the root
    live: np.ndarray  # [B] bool: rows that are not may give anything


class Evaluation(NamedTuple):
    """tokens [B, M] with the highest log-probs [B, M] as the next token, of equal ones the lowest
    id first, NONE where fewer are allowed; value [B] of the text."""

    tokens: jax.Array
    logprobs: jax.Array
    value: jax.Array


class Evaluator(Protocol):
    """Host code, of which each call dispatches one program for all sentences."""

    def start(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """Reads right-padded prompts [B, L] of lengths [B]: the roots are whole prompts."""

    def __call__(self, leaves: Leaves) -> Evaluation:
        """Evaluates leaves, each once in its life and always after its parent."""

    def move_root(self, tokens: np.ndarray, kept: np.ndarray, live: np.ndarray) -> None:
        """Moves the roots of live [B] rows to their children by tokens [B]; kept [B, N] are the old
        indices of the new nodes (rljax.search.tree.move_root)."""


class Forked:
    """The evaluator by copies of the root (see the module). `rules` are those of B rows."""

    def __init__(
        self, engine: Engine, params, rules: Rules, width: int, value: Value | None = None
    ):
        self.engine, self.params, self.rules, self.width = engine, params, rules, width
        self.value = value
        self.calls = 0  # calls of the policy and the value model together
        self.value_engine, self.value_params = None, ()
        self.ends_line = why_lines_end(value, rules, engine.model.config.ids)
        if value is not None:
            self.value_engine = dataclasses.replace(engine, model=value.model)
            self.value_params = value.params

    def start(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """Reads right-padded prompts [B, L] of lengths [B]: the roots are whole prompts."""
        counts = np.asarray(lengths, np.int32)
        self.roots, self.before = _started(self._engines, self._weights, prompts, counts)

    def programs(self, columns: int, depth: int) -> dict[str, tuple]:
        """Returns {name: (jitted function, its arguments as shapes, 1)} of a search of prompts of
        so many columns: what reads them, a look at leaves of `depth` tokens, a move of the roots.
        `params` may be shapes."""
        rows = self.rules.temperature.shape[0]

        def prefix(engine: Engine | None):
            if engine is None:
                return None
            empty, mesh = jax.eval_shape(lambda: engine.empty_prefix(rows)), engine.model.mesh
            small = dataclasses.replace(empty, caches=[])
            layout = rows_layout(small, mesh)
            layout = dataclasses.replace(layout, caches=cache.shardings(empty.caches, mesh))
            return jax.tree.map(shaped, empty, layout)

        roots = tuple(prefix(engine) for engine in (self.engine, self.value_engine))
        before = jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), bool)
        roots = (self._weights, roots, before)
        path, counts = whole(rows, path_columns(depth)), whole(rows)
        read = (self._engines, self._weights, whole(rows, columns), counts)
        look = (self._engines, self.width, *roots, self.rules, self.ends_line, path, counts)
        move = (self._engines, *roots, self.ends_line, whole(rows, 1), counts, counts)
        return {
            "search: read prompts": (_started, read, 1),
            "search: look at leaves": (_looked, look, 1),
            "search: move roots": (_advanced, move, 1),
        }

    @property
    def _engines(self) -> tuple[Engine, Engine | None, bool]:
        process = self.value is not None and self.value.reads == "process"
        return self.engine, self.value_engine, process

    @property
    def _weights(self):
        return self.params, self.value_params

    def __call__(self, leaves: Leaves) -> Evaluation:
        self.calls += 1
        roots = self._weights, self.roots, self.before
        inputs = self.rules, self.ends_line, leaves.path, leaves.depth
        return Evaluation(*_looked(self._engines, self.width, *roots, *inputs))

    def move_root(self, tokens: np.ndarray, kept: np.ndarray, live: np.ndarray) -> None:
        """Moves the roots of live [B] rows to their children by tokens [B]; `kept` is not read, for
        roots alone are held."""
        self.advance(tokens[:, None], live.astype(np.int32))

    def advance(self, tokens: np.ndarray, counts: np.ndarray, source: Sequence[int] = ()) -> None:
        """Replaces root b by row source[b] of the roots (() for its own) with the first counts[b]
        of tokens [B, S] behind it."""
        source = np.arange(len(counts)) if len(source) == 0 else np.asarray(source)
        roots, counts = (self._weights, self.roots, self.before), np.asarray(counts, np.int32)
        inputs = self.ends_line, tokens, counts, source
        self.roots, self.before = _advanced(self._engines, *roots, *inputs)

    def roll(
        self, leaves: Leaves, keys: np.ndarray, limit: np.ndarray, steps: int, *, greedy=False
    ) -> list[list[int]]:
        """Returns continuations of at most `steps` tokens from the leaves of live rows, by the
        policy's own sampling, as the keys [B, 2] decide, or the likeliest ones: ids that end with a
        stop id, or where prompt and response have limit [B] tokens."""
        stops = self.rules.stop_ids.shape[1]
        engine = dataclasses.replace(self.engine, steps=steps, stop_ids=stops)
        reached = _reached(engine, self.params, self.roots[0], leaves.path, leaves.depth)
        rows, rules = np.arange(len(limit)), self.rules
        if greedy:
            rules = dataclasses.replace(rules, temperature=np.zeros_like(rules.temperature))
        slot_fields = reached.length, reached.token, np.asarray(limit, np.int32), reached.shift
        inputs = SlotInputs(*slot_fields, keys, rules, None)
        slots = np.where(leaves.live, rows, len(rows)).astype(np.int32)
        state = engine.insert(reached, engine.init_state(), slots, rows, inputs)
        _, decoded, _ = engine.generate(self.params, state, steps)
        ids, valid = fetch((decoded.ids, decoded.valid))
        return [ids[valid[:, row], row].tolist() for row in rows]


def folded(keys: np.ndarray, numbers: np.ndarray | int) -> np.ndarray:
    """Returns the keys [B, 2] folded with numbers [B], or with one number."""

    def one(key, number):
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))

    return jax.vmap(one, in_axes=(0, 0 if np.ndim(numbers) else None))(keys, numbers)


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns int32 of a shape, without numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def shaped(x, sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape and the type of an array, with a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def padded_paths(paths: Sequence[Sequence[int]], live: Sequence[bool]) -> Leaves:
    """Returns the leaves of host lists of tokens, for evaluators that need no tree."""
    depth = np.array([len(path) for path in paths], np.int32)
    wide = np.zeros((len(paths), path_columns(int(depth.max(initial=1)))), np.int32)
    for row, path in enumerate(paths):
        wide[row, : len(path)] = path
    no_nodes = np.full(len(paths), NONE, np.int32)
    return Leaves(wide, depth, no_nodes, no_nodes, np.asarray(live, bool))


def path_columns(depth: int) -> int:
    """Returns D for paths of at most `depth` tokens."""
    columns = 1
    while columns < depth:
        columns *= 4
    return columns


def _line(roots: Prefix, path, depth):
    """Returns the tokens [B, 1 + D] that are read behind the roots, and their number without
    padding."""
    return jnp.concatenate([roots.token[:, None], path], axis=1), depth + 1


def _peek(engine: Engine, params, roots: Prefix, line, counts):
    model = engine.model
    inputs = (line, roots.length, counts, roots.caches, roots.shift)
    return model.look(model.unstack(params), *inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _looked(engines, width, weights, roots, before, rules, ends_line, path, depth):
    policy, judge, process = engines
    line, counts = _line(roots[0], path, depth)
    logprobs = choice_logprobs(_peek(policy, weights[0], roots[0], line, counts), rules)
    top, tokens = jax.lax.top_k(logprobs, width)
    tokens = jnp.where(jnp.isfinite(top), tokens, NONE).astype(jnp.int32)
    if judge is None:
        return tokens, top, jnp.zeros(depth.shape, jnp.float32)
    scores = one_number(_peek(judge, weights[1], roots[1], line, counts))
    if process:
        value = _of_lines(scores, line, counts, before, ends_line)
    else:
        value = jnp.take_along_axis(scores, depth[:, None], axis=1)[:, 0]
    return tokens, top, jnp.where(jnp.isfinite(value), value, 0.0)


def _of_lines(scores, line, counts, before, ends_line):
    """Returns the score [B] of the last line that ends in the tokens that are read, or, if none
    ends there, of the last line before them."""
    score, inside = before
    column, codes = jnp.arange(line.shape[1])[None, :], ends_line[line]
    ends = ends_of_lines(codes, jnp.pad(codes[:, :-1], ((0, 0), (1, 0))))
    ends &= (column < counts[:, None]) & ((column > 0) | inside[:, None])
    last = jnp.max(jnp.where(ends, column, -1), axis=1)
    last_score = jnp.take_along_axis(scores, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    return jnp.where(last >= 0, last_score, score)


def why_lines_end(value: Value | None, rules: Rules, vocab: int) -> np.ndarray:
    """Returns why a line ends with each token of the vocabulary, as a number; 0 if it does
    not: [V] int32."""
    why = np.zeros(vocab, np.int32)
    if value is not None:
        why[list(value.line_ids)] = _NEWLINE
        stop_ids = np.asarray(rules.stop_ids)
        why[stop_ids[stop_ids >= 0]] = _END
    return why


def ends_of_lines(why: jax.Array, before: jax.Array) -> jax.Array:
    """Returns whether lines end with tokens, in the shape of both arguments: why they would, and
    why they would with the tokens before these (`why_lines_end`). The end of a response behind a
    newline is no line."""
    return (why > 0) & ~((why == _END) & (before == _NEWLINE))


def one_number(scores: jax.Array) -> jax.Array:
    """Returns scores [B, S] of one label, or of two (wrong, right) the log-odds of right."""
    return scores[..., 0] if scores.shape[-1] == 1 else scores[..., 1] - scores[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def _advanced(engines, weights, roots, before, ends_line, tokens, counts, source):
    policy, judge, process = engines
    roots, before = jax.tree.map(lambda x: x[source], (roots, before))
    if process:
        # All new tokens are read but the last, which is the token of the new root.
        line, _ = _line(roots[1], tokens, counts)
        scores = one_number(_peek(judge, weights[1], roots[1], line, jnp.maximum(counts, 1)))
        score = _of_lines(scores, line, counts, before, ends_line)
        before = jnp.where(counts > 0, score, before[0]), before[1] | (counts > 0)

    def append(engine, params, prefix):
        return _appended(engine, params, prefix, tokens, counts)

    judge_root = None if judge is None else append(judge, weights[1], roots[1])
    return _pinned(engines, (append(policy, weights[0], roots[0]), judge_root), before)


@functools.partial(jax.jit, static_argnums=0)
def _started(engines, weights, prompts, counts):
    """Returns the roots that are whole prompts, and `before`: for a process model the score of the
    last line before a root's token, and whether that token belongs to the response."""
    rows = counts.shape[0]

    def read(engine, params):
        if engine is None:
            return None
        return engine.append(params, engine.empty_prefix(rows), prompts, counts)

    roots = tuple(read(*pair) for pair in zip(engines[:2], weights, strict=True))
    before = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), bool)
    return _pinned(engines, roots, before)


def _pinned(engines, roots, before):
    """Returns, inside a program, the roots on the layout that the next program expects, so that
    each program is compiled once."""
    mesh = engines[0].model.mesh

    def rows(tree):
        return jax.lax.with_sharding_constraint(tree, rows_layout(tree, mesh))

    def pin(prefix: Prefix | None):
        if prefix is None:
            return None
        small = rows((prefix.length, prefix.token, prefix.shift))
        return Prefix(cache.constrain(prefix.caches, mesh), *small)

    return tuple(map(pin, roots)), rows(before)


@functools.partial(jax.jit, static_argnums=0)
def _reached(engine: Engine, params, roots: Prefix, path, depth) -> Prefix:
    return _appended(engine, params, roots, path, depth)


def _appended(engine: Engine, params, roots: Prefix, tokens, counts) -> Prefix:
    """Returns the roots with the first counts [B] of tokens [B, S] appended. The token of each root
    is read first."""
    line, model = jnp.concatenate([roots.token[:, None], tokens], axis=1), engine.model
    inputs = (line[:, :-1], roots.length, counts, roots.caches, roots.shift)
    caches = model.extend(model.unstack(params), *inputs)
    last = jnp.take_along_axis(line, counts[:, None], axis=1)[:, 0]
    return Prefix(caches, roots.length + counts, last, roots.shift)
