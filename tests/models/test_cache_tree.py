"""Nodes of trees as columns of one slot: every path from the root says what an ordinary forward
pass over the prefix and the path says, whatever is read at once, and after the root has moved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import tiny, weights
from test_sampler_families import FAMILIES, family

from rljax.batch import batch_from_rows
from rljax.models import cache, cache_tree
from rljax.models.cache_tree import Nodes

ROWS, LONGEST, NODES, MOST = 3, 14, 9, 4  # slots, tokens of a prefix, nodes, nodes of a call
COLUMNS = LONGEST + NODES + 2


def in_order(one, order):
    """A cache of order "heads" in another one, such as a TPU has."""
    if order == "heads":
        return one
    parts = tuple(x.swapaxes(1, 2) for x in one.parts)
    if order == "pairs":
        slots, columns, heads, size = parts[0].shape
        parts = (jnp.stack(parts, axis=3).reshape(slots, columns, 2 * heads, size),)
    return dataclasses.replace(one, parts=parts, order=order)


class Trees:
    """A tree behind each of a few prefixes, kept in plain lists, and its columns in a cache."""

    def __init__(self, model, params, kv_dtype="", order="heads", seed=0):
        self.model, self.params = model, params
        self.rng, self.vocab = np.random.default_rng(seed), min(300, model.config.vocab_size)
        lengths = np.array([LONGEST, 1, 8])
        self.prefixes = [self.rng.integers(2, self.vocab, n).tolist() for n in lengths]
        self.trees = [[] for _ in lengths]  # (token, parent) of every node
        tokens = np.zeros((ROWS, LONGEST), np.int32)
        for row, one in enumerate(self.prefixes):
            tokens[row, : len(one)] = one
        self.caches = jax.jit(self._prefill, static_argnums=3)(params, tokens, lengths, kv_dtype)
        self.caches = [in_order(one, order) for one in self.caches]
        self.read_some = jax.jit(self._read)

    def _prefill(self, params, tokens, lengths, kv_dtype):
        batch = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
        read = self.model.prefill(params, batch, tokens.shape[1], kv_dtype, rings=False)
        blank = self.model.empty_caches(ROWS, COLUMNS, kv_dtype, rings=False)
        rows = jnp.arange(ROWS)
        return [cache.write_rows(a, b, rows, rows) for a, b in zip(blank, read, strict=True)]

    def _read(self, params, tokens, nodes, caches):
        unstacked = self.model.unstack(params)
        hidden, caches = self.model.read_nodes(unstacked, tokens, nodes, caches)
        return hidden, self.model.says(unstacked, hidden), caches

    def path(self, row, node):
        """The nodes from the root to this one."""
        above = self.trees[row][node][1]
        return (self.path(row, above) if above >= 0 else []) + [node]

    def grow(self, count):
        """Adds random leaves to every tree, a root first: their ids [ROWS, count]."""
        ids = np.array([len(tree) + np.arange(count) for tree in self.trees])
        for tree in self.trees:
            for _ in range(count):
                parent = int(self.rng.integers(len(tree))) if tree else -1
                tree.append((int(self.rng.integers(2, self.vocab)), parent))
        return ids

    def read(self, ids):
        """Reads nodes ids [ROWS, S], at most MOST; checks them against the forward pass."""
        depths, ancestors = np.zeros((ROWS, NODES), int), np.zeros((ROWS, NODES, NODES), bool)
        for row, tree in enumerate(self.trees):
            for node in range(len(tree)):
                path = self.path(row, node)
                depths[row, node], ancestors[row, node, path] = len(path) - 1, True
        held = np.array([len(one) for one in self.prefixes])
        wide, tokens = np.full((ROWS, MOST), -1), np.zeros((ROWS, MOST), int)
        wide[:, : ids.shape[1]] = ids
        for row in range(ROWS):
            tokens[row, : ids.shape[1]] = [self.trees[row][node][0] for node in ids[row]]
        nodes = jax.tree.map(jnp.asarray, Nodes(held, wide, depths, ancestors))
        hidden, logits, self.caches = self.read_some(self.params, tokens, nodes, self.caches)
        logits = logits.reshape(ROWS, MOST, -1)
        return hidden[:, : ids.shape[1]], logits[:, : ids.shape[1]]

    def forward(self, ids):
        """What a forward pass over prefix and path says at the nodes ids [ROWS, S]."""
        lines = [
            self.prefixes[row] + [self.trees[row][node][0] for node in self.path(row, last)]
            for row in range(ROWS)
            for last in ids[row]
        ]
        tokens, lengths = np.zeros((len(lines), COLUMNS), np.int32), np.array(list(map(len, lines)))
        for row, one in enumerate(lines):
            tokens[row, : len(one)] = one
        hidden, logits = _forward(self.model, self.params, tokens, lengths)
        return hidden.reshape(*ids.shape, -1), logits.reshape(*ids.shape, -1)

    def move(self):
        """Makes node 1, a child of the root, the root; what is not below it is forgotten."""
        sources = np.tile(np.arange(NODES), (ROWS, 1))
        held = jnp.array([len(one) for one in self.prefixes])
        for row, tree in enumerate(self.trees):
            kept = [i for i in range(len(tree)) if 1 in self.path(row, i)]
            sources[row, 1 : len(kept) + 1] = kept  # the old root is a token of the prefix
            self.prefixes[row].append(tree[0][0])
            place = {old: new for new, old in enumerate(kept)}
            self.trees[row] = [(tree[i][0], place.get(tree[i][1], -1)) for i in kept]
        self.caches = _moved(self.caches, held, jnp.asarray(sources))


@jax.jit
def _moved(caches, held, sources):
    return [cache_tree.moved(one, held, sources) for one in caches]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, lengths):
    batch = batch_from_rows(tokens, lengths, jnp.ones(tokens.shape))
    at = (lengths - 1)[:, None, None]
    hidden = jnp.take_along_axis(model.hidden_states(params, batch)[-1], at, axis=1)[:, 0]
    return hidden, model.next_logits(params, batch, lengths - 1)


def assert_says_what_a_forward_pass_says(trees, ids, most=MOST, atol=1e-5):
    for first in range(0, ids.shape[1], most):
        some = ids[:, first : first + most]
        wants = trees.forward(np.pad(some, ((0, 0), (0, MOST - some.shape[1])), mode="edge"))
        for found, want in zip(trees.read(some), wants, strict=True):
            scale = max(1.0, float(jnp.abs(want).max()))
            np.testing.assert_allclose(found, want[:, : some.shape[1]], atol=atol * scale)


def play(model, params, atol=1e-5, **how):
    """Four nodes at once, two one by one, the root moves, and three more."""
    trees = Trees(model, params, **how)
    assert_says_what_a_forward_pass_says(trees, trees.grow(4), atol=atol)
    assert_says_what_a_forward_pass_says(trees, trees.grow(2), most=1, atol=atol)
    sizes = [len(tree) for tree in trees.trees]
    trees.move()
    assert all(len(tree) < size for tree, size in zip(trees.trees, sizes, strict=True))
    assert_says_what_a_forward_pass_says(trees, trees.grow(3), atol=atol)


CASES = {
    "windowed": (dict(window=4, sinks=True, attention_soft_cap=3.0), {}),
    "plain": (dict(), {}),
    "tied": (dict(window=4, tie_embeddings=True), {}),
    "tokens": (dict(window=4), dict(order="tokens")),
    "pairs": (dict(window=4), dict(order="pairs")),
}


@pytest.mark.parametrize("case", lanes(["windowed"], list(CASES)[1:]))
def test_paths_are_read_as_sequences_of_their_own(case):
    changes, how = CASES[case]
    model = tiny(**changes)
    play(model, weights(model), **how)


@pytest.mark.slow
def test_int8_keys_and_values_are_close():
    """(A forward pass rounds none of them.)"""
    model = tiny(window=4)
    play(model, weights(model), kv_dtype="int8", atol=0.2)


def test_an_empty_cache_computes_nothing():
    """XLA computes functions of constants when it compiles: for 200 CPU seconds in the 30 layers of
    SmolLM2 with 32 rows of 172 columns."""
    model = tiny()
    made = jax.make_jaxpr(lambda: model.empty_caches(4, 16, "int8"))()
    assert {str(one.primitive) for one in made.eqns} <= {"broadcast_in_dim", "sharding_constraint"}


def test_what_cannot_be_columns_is_named_with_the_reason():
    """All families can; attention that must keep the trainer's order of keys cannot."""
    config = dataclasses.replace(tiny().config, batch_invariant=True)
    assert "range of columns" in cache_tree.why_not(config)
    assert cache_tree.why_not(tiny(window=4).config) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", *FAMILIES])
def test_families(name):
    """Sinks, windows, soft caps, latents, experts, biases, norms of queries and keys."""
    _, model, params = family(name)
    play(model, params)
