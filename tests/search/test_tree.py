"""The search tree: worked examples, mctx as an oracle on random trees, the move of the root."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, worked_example

from rljax.search import tree as trees

C = 1.25
PROGRAMS = Compiled(trees)  # op by op each operation is compiled


def with_children(prior, visits, total_value, tokens=None) -> trees.Tree:
    """One tree: a root with children that are nodes 1, 2, ... where they were visited."""
    m = len(prior)
    tree = jax.tree.map(np.array, trees.empty(1, m + 2, m))
    tokens = range(m) if tokens is None else tokens
    children = [i + 1 if n else trees.NONE for i, n in enumerate(visits)]

    def put(x, row):
        x[0, 0] = row
        return x

    tree.parent[0, 1 : m + 1] = 0
    tree.edge[0, 1 : m + 1] = np.arange(m)
    return dataclasses.replace(
        tree,
        tokens=put(tree.tokens, tokens),
        prior=put(tree.prior, prior),
        visits=put(tree.visits, visits),
        total_value=put(tree.total_value, total_value),
        children=put(tree.children, children),
        size=np.array([m + 1], np.int32),
    )


@pytest.mark.smoke
def test_puct():
    example = worked_example("mcts.puct")
    x, want = example["inputs"], example["outputs"]
    prior, visits, q = (jnp.asarray(x[name]) for name in ("prior", "visits", "q"))
    c = example["params"]["c_puct"]
    score = PROGRAMS.puct(prior, visits, q * visits, c)
    np.testing.assert_allclose(score, want["score"], atol=1e-6)
    np.testing.assert_allclose(score - q, want["u"], atol=1e-6)
    assert int(PROGRAMS.best_of(score, prior, jnp.arange(3))) == want["select"]
    tree = with_children(x["prior"], x["visits"], np.multiply(x["q"], x["visits"]))
    assert int(PROGRAMS.select(tree, c).path[0, 0]) == want["select"]


@pytest.mark.smoke
def test_backup():
    example = worked_example("mcts.backup")
    x, want = example["inputs"], example["outputs"]
    tree = with_children([0.4, 0.3, 0.3], x["visits"], x["total_value"])
    leaf, value = jnp.array([x["child"] + 1]), jnp.array([x["value"]], jnp.float32)
    after = PROGRAMS.backup(tree, leaf, value, jnp.array([True]))
    np.testing.assert_array_equal(after.visits[0, 0], want["visits"])
    np.testing.assert_allclose(after.total_value[0, 0], want["total_value"], atol=1e-6)
    q = trees.mean_value(after.visits, after.total_value)
    np.testing.assert_allclose(q[0, 0], want["q"], atol=1e-6)
    still = PROGRAMS.backup(tree, leaf, value, jnp.array([False]))
    np.testing.assert_array_equal(still.visits, tree.visits)


def test_root_noise():
    example = worked_example("mcts.root_noise")
    x, want = example["inputs"], example["outputs"]
    tree = with_children(x["prior"], [0, 0, 0], [0, 0, 0])
    noise, fraction = jnp.asarray([x["noise"]]), example["params"]["frac"]
    after = PROGRAMS.with_root_noise(tree, noise, fraction, jnp.array([True]))
    np.testing.assert_allclose(after.prior[0, 0], want["prior"], atol=1e-6)
    still = PROGRAMS.with_root_noise(tree, noise, fraction, jnp.array([False]))
    np.testing.assert_array_equal(still.prior, tree.prior)


def test_visit_policy():
    example = worked_example("mcts.visit_policy")
    visits, want = jnp.asarray(example["inputs"]["visits"]), example["outputs"]
    for temperature, name in ((1.0, "t1"), (0.5, "t05")):
        np.testing.assert_allclose(trees.visit_policy(visits, temperature), want[name], atol=1e-6)
    assert int(trees.best_of(visits, jnp.zeros(3), jnp.arange(3))) == want["choice"]
    cold = trees.visit_policy(jnp.array([300, 299, 0]), 1e-3)
    np.testing.assert_allclose(cold, [0.965677, 0.034323, 0.0], atol=1e-4)
    assert not np.any(trees.visit_policy(jnp.zeros(3, jnp.int32), 1.0))


def test_ties_go_to_the_higher_prior_then_to_the_lower_token():
    def pick(*x):
        return int(trees.best_of(*(jnp.asarray(one) for one in x)))

    assert pick([2, 2, 1], [0.1, 0.3, 0.6], [5, 6, 7]) == 1
    assert pick([2, 2, 2], [0.3, 0.3, 0.3], [9, 4, 7]) == 1
    assert pick([2.0, 2.0, 3.0], [0.3, 0.3, 0.9], [9, 4, trees.NONE]) == 1
    # (Without a visit the prior decides, as sum N counts as 1.)
    assert int(PROGRAMS.select(with_children([0.2, 0.5, 0.3], [0] * 3, [0] * 3), C).path[0, 0]) == 1


@pytest.mark.slow
def test_dirichlet_noise():
    keys = jax.random.split(jax.random.key(0), 4000)
    there = jnp.arange(4)[None, :] < jnp.where(jnp.arange(4000) % 2, 4, 3)[:, None]
    noise = np.asarray(PROGRAMS.dirichlet(keys, there, 0.3))
    np.testing.assert_allclose(noise.sum(axis=1), 1.0, atol=1e-5)
    assert not noise[~np.asarray(there)].any()
    four = noise[1::2]
    np.testing.assert_allclose(four.mean(axis=0), 0.25, atol=0.02)
    # Var = (1/m)(1 - 1/m) / (m a + 1)
    np.testing.assert_allclose(four.var(axis=0), 0.25 * 0.75 / (4 * 0.3 + 1), rtol=0.1)


# -- random trees: a state is a hash of its path


def _bits(state):
    return jax.random.split(jax.random.fold_in(jax.random.key(5), state), 3)


def _priors(state, width):
    return jax.random.normal(_bits(state)[0], (width,))


def _value(state):
    return jax.random.uniform(_bits(state)[1], (), minval=-1.0)


def _ends(state, chance):
    return jax.random.uniform(_bits(state)[2]) < chance


def _next(state, action):
    return (state * 7919 + 104729 * (action + 1)) % (2**31 - 1)


@functools.partial(jax.jit, static_argnames=("count", "width", "chance"))
def searched(roots, count: int, width: int, chance: float = 0.2) -> trees.Tree:
    """Our search of random trees: tokens are actions."""
    active = jnp.ones(roots.shape, bool)

    def one(_, tree):
        at = PROGRAMS.select(tree, C)

        def step(s, x):
            return (jnp.where(x >= 0, _next(s, x), s), None)

        depths = jnp.arange(at.path.shape[1])[None, :]
        path = jnp.where(depths < at.depth[:, None], at.path, -1)
        state, _ = jax.lax.scan(step, roots, path.T)
        logits = jax.vmap(lambda s: jax.nn.log_softmax(_priors(s, width)))(state)
        tokens = jnp.broadcast_to(jnp.arange(width), logits.shape)
        ends = jax.vmap(lambda s: _ends(s, chance))(state) & (at.depth > 0)
        value = jax.vmap(_value)(state)
        tree = trees.expand(tree, at, tokens, logits, value, ends, active)
        return trees.backup(tree, at.leaf, value, active)

    return jax.lax.fori_loop(0, count, one, trees.empty(len(roots), count, width))


def by_mctx(mctx, roots, count: int, width: int, chance: float):
    """The same by mctx. A sentence that has ended goes on in a line of nodes of the same value."""

    def look(state, ended):
        prior = jnp.where(ended[:, None], 0.0, jax.vmap(lambda s: _priors(s, width))(state))
        return prior, jax.vmap(_value)(state)

    def recurrent(params, key, action, embedding):
        state, ended = embedding
        state = jnp.where(ended, state, _next(state, action))
        ended |= jax.vmap(lambda s: _ends(s, chance))(state)
        prior, value = look(state, ended)
        one = jnp.ones_like(value)
        return mctx.RecurrentFnOutput(
            reward=0 * one, discount=one, prior_logits=prior, value=value
        ), (state, ended)

    def choose(key, tree, node, depth):
        prior = jax.nn.softmax(tree.children_prior_logits[node])
        visits = tree.children_visits[node]
        parent = jnp.sqrt(jnp.maximum(visits.sum(), 1).astype(jnp.float32))
        q = jnp.where(visits > 0, tree.children_values[node], 0.0)
        return jnp.argmax(q + C * prior * parent / (1 + visits)).astype(jnp.int32)

    ended = jnp.zeros(roots.shape, bool)
    prior, value = look(roots, ended)
    from mctx._src import search

    run = functools.partial(
        search.search,
        recurrent_fn=recurrent,
        num_simulations=count - 1,
        root_action_selection_fn=lambda key, tree, node: choose(key, tree, node, 0),
        interior_action_selection_fn=choose,
    )
    root = mctx.RootFnOutput(prior_logits=prior, value=value, embedding=(roots, ended))
    return jax.jit(lambda root: run((), jax.random.key(0), root=root))(root)


@pytest.mark.parametrize(
    "count, width, chance", [(40, 3, 0.2), pytest.param(17, 5, 0.0, marks=pytest.mark.slow)]
)
def test_random_trees_are_searched_as_mctx_searches_them(count, width, chance):
    mctx = pytest.importorskip("mctx")
    roots = jnp.arange(24, dtype=jnp.int32) * 31 + 7
    ours = searched(roots, count, width, chance)
    theirs = by_mctx(mctx, roots, count, width, chance)
    np.testing.assert_array_equal(ours.visits[:, 0], theirs.children_visits[:, 0])
    q = trees.mean_value(ours.visits, ours.total_value)
    np.testing.assert_allclose(q[:, 0], theirs.children_values[:, 0], atol=1e-5)
    np.testing.assert_allclose(trees.root_value(ours), theirs.node_values[:, 0], atol=1e-5)
    np.testing.assert_array_equal(trees.root_count(ours), count)
    if chance:
        assert bool(jnp.any(ours.terminal)) and bool(jnp.any(ours.size < count))
        return
    # Where no sentence ends the trees are equal node for node.
    np.testing.assert_array_equal(ours.children, theirs.children_index)
    np.testing.assert_array_equal(ours.visits, theirs.children_visits)
    np.testing.assert_array_equal(ours.parent, theirs.parents)


@pytest.mark.slow
def test_the_move_of_the_root_keeps_the_subtree():
    tree = searched(jnp.arange(16, dtype=jnp.int32) * 3 + 1, 40, 3)
    edge = jnp.argmax(tree.visits[:, 0], axis=-1).astype(jnp.int32)
    active = jnp.arange(16) % 4 != 0
    moved, kept = trees.move_root(tree, edge, active)

    def below(tree, row, node):
        """A nested account of everything below a node, without indices."""
        children = []
        for i in range(tree.tokens.shape[2]):
            child = int(tree.children[row, node, i])
            children.append(
                (
                    int(tree.tokens[row, node, i]),
                    float(tree.prior[row, node, i]),
                    int(tree.visits[row, node, i]),
                    float(tree.total_value[row, node, i]),
                    None if child == trees.NONE else below(tree, row, child),
                )
            )
        return float(tree.value[row, node]), bool(tree.terminal[row, node]), children

    counts = np.asarray(trees.root_count(moved))
    before, after, kept = jax.tree.map(np.asarray, (tree, moved, kept))
    for row in range(16):
        if not active[row]:
            old = 0
            np.testing.assert_array_equal(kept[row], np.arange(40))
        else:
            old = before.children[row, 0, int(edge[row])]
            assert after.size[row] == (kept[row] >= 0).sum() < before.size[row]
            # The count of a node is what its parent counted of it.
            if not after.terminal[row, 0]:
                assert counts[row] == before.visits[row, 0, int(edge[row])]
            assert kept[row, 0] == old and after.parent[row, 0] == trees.NONE
            rest = slice(int(after.size[row]), None)
            assert not after.visits[row, rest].any() and (after.children[row, rest] < 0).all()
        assert below(after, row, 0) == below(before, row, old)
        nodes = np.arange(1, int(after.size[row]))
        parents, edges = after.parent[row, nodes], after.edge[row, nodes]
        assert (parents < nodes).all() and (after.children[row, parents, edges] == nodes).all()


@pytest.mark.slow
def test_a_root_moved_to_a_child_without_a_visit_is_a_tree_without_a_node():
    tree = with_children([0.6, 0.4], [3, 0], [1.0, 0.0])
    moved, kept = trees.move_root(tree, jnp.array([1]), jnp.array([True]))
    blank = trees.empty(1, tree.parent.shape[1], 2)
    jax.tree.map(np.testing.assert_array_equal, moved, blank)
    assert (np.asarray(kept) == trees.NONE).all()
    at = PROGRAMS.select(moved, C)
    assert (int(at.leaf[0]), int(at.parent[0]), int(at.depth[0])) == (0, trees.NONE, 0)


@jax.jit
def found_leaves(worth, count, exploration=2.5):
    """The leaf [B] of trees of depth 6, two children to a node, that is walked to by the most
    visits, after `count` simulations before each step.
    Of a node the search is told the worth of one leaf below it, which a hash chooses."""
    rows, depth, most = worth.shape[0], 6, 512
    prior = jnp.log(jnp.array([0.6, 0.4]))

    def simulation(carry):
        tree, walked, steps = carry
        active = trees.root_count(tree) < count
        at = trees.select(tree, exploration)
        places = jnp.arange(at.path.shape[1])[None, :]
        bits = jnp.where(
            places < at.depth[:, None], at.path * 2 ** (at.depth[:, None] - 1 - places), 0
        )
        prefix = walked * 2**at.depth + jnp.sum(bits, axis=1)
        left = depth - steps - at.depth
        below = prefix * 2**left + (prefix * 40503 + 12829 * left) // 7 % 2**left
        value = worth[jnp.arange(rows), below]
        tokens = jnp.broadcast_to(jnp.arange(2), (rows, 2))
        grown = trees.expand(
            tree, at, tokens, jnp.broadcast_to(prior, (rows, 2)), value, left == 0, active
        )
        return trees.backup(grown, at.leaf, value, active), walked, steps

    def step(steps, carry):
        tree, walked = carry
        tree, _, _ = jax.lax.while_loop(
            lambda c: jnp.any(trees.root_count(c[0]) < count), simulation, (tree, walked, steps)
        )
        edge = trees.best_of(tree.visits[:, 0], tree.prior[:, 0], tree.tokens[:, 0])
        tree, _ = trees.move_root(tree, edge, jnp.ones(rows, bool))
        return tree, walked * 2 + edge

    start = trees.empty(rows, most, 2), jnp.zeros(rows, jnp.int32)
    return jax.lax.fori_loop(0, depth, step, start)[1]


@pytest.mark.slow
def test_the_planted_leaf_that_greedy_misses_is_found():
    random = np.random.default_rng(0)
    worth, best = random.uniform(0, 0.4, (40, 64)), random.integers(1, 64, 40)  # greedy is 0
    worth[np.arange(40), best] = 1.0
    worth = jnp.asarray(worth, jnp.float32)
    np.testing.assert_array_equal(found_leaves(worth, 512), best)
    assert (np.asarray(found_leaves(worth, 1)) == 0).all()
