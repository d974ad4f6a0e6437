"""The search tree of a batch of sentences, as arrays, and its pure functions: PUCT selection,
expansion, backup, root noise, the policy of visit counts, and the move of the root (AlphaZero,
arXiv 1712.01815).

Node 0 is the root. A node is made by the simulation that first reaches it, so its index is above
its parent's, and it stays so when the root moves. Axes: B sentences, N nodes, M children of a node.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

NONE = -1  # no token, no node, no edge


def _struct(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_struct
class Tree:
    """The tree of a search. A child is named by its parent and by its edge, 0 to M - 1."""

    tokens: jax.Array  # [B, N, M] int32 that lead to the children; NONE = there is no such child
    prior: jax.Array  # [B, N, M] the policy's probabilities, which sum to 1 over the children
    children: jax.Array  # [B, N, M] int32 their nodes; NONE = not visited yet
    visits: jax.Array  # [B, N, M] int32 how many simulations went through them
    total_value: jax.Array  # [B, N, M] the sum of what these found
    parent: jax.Array  # [B, N] int32
    edge: jax.Array  # [B, N] int32: which child of its parent a node is
    value: jax.Array  # [B, N] what the evaluator said of the node itself; NaN of a root: nothing
    terminal: jax.Array  # [B, N] bool: the sentence ends there
    size: jax.Array  # [B] int32 nodes in use; 0: not even the root has been evaluated


@_struct
class Selected:
    """The leaf that a simulation comes to. It is `known` where it is a terminal node that was
    evaluated before; else it becomes node `leaf`."""

    leaf: jax.Array  # [B] int32
    parent: jax.Array  # [B] int32; NONE of the root
    edge: jax.Array  # [B] int32; NONE of the root
    path: jax.Array  # [B, N] int32: the tokens from the root to the leaf, `depth` [B] of them
    depth: jax.Array
    known: jax.Array  # [B] bool


def empty(sentences: int, nodes: int, width: int) -> Tree:
    """Returns trees without a node, with room for `nodes` of `width` children each."""

    def full(value, dtype, *axes):
        return jnp.full((sentences, *axes), value, dtype)

    return Tree(
        tokens=full(NONE, jnp.int32, nodes, width),
        prior=full(0, jnp.float32, nodes, width),
        children=full(NONE, jnp.int32, nodes, width),
        visits=full(0, jnp.int32, nodes, width),
        total_value=full(0, jnp.float32, nodes, width),
        parent=full(NONE, jnp.int32, nodes),
        edge=full(NONE, jnp.int32, nodes),
        value=full(0, jnp.float32, nodes),
        terminal=full(False, bool, nodes),
        size=full(0, jnp.int32),
    )


def root_count(tree: Tree) -> jax.Array:
    """Returns the number of simulations of the root, its own evaluation included: [B]."""
    return jnp.where(tree.size > 0, 1 + jnp.sum(tree.visits[:, 0], axis=-1), 0)


def root_value(tree: Tree) -> jax.Array:
    """Returns the mean of what all simulations of the root found, its own evaluation included
    unless it said nothing (NaN): [B]."""
    root, below = tree.value[:, 0], jnp.sum(tree.total_value[:, 0], axis=-1)
    count = root_count(tree) - jnp.isnan(root)
    return (jnp.nan_to_num(root) + below) / jnp.maximum(count, 1)


def mean_value(visits: jax.Array, total_value: jax.Array) -> jax.Array:
    """Returns Q = W / N, and 0 where N = 0, in the shape of both."""
    return jnp.where(visits > 0, total_value / jnp.maximum(visits, 1), 0.0)


def puct(prior, visits, total_value, exploration) -> jax.Array:
    """Q + c P sqrt(max(1, sum N)) / (1 + N) of the children of a node (PUCT, AlphaZero,
    arXiv 1712.01815): shape [..., M]."""
    parent = jnp.maximum(jnp.sum(visits, axis=-1, keepdims=True), 1)
    bonus = exploration * prior * jnp.sqrt(parent.astype(prior.dtype)) / (1 + visits)
    return mean_value(visits, total_value) + bonus


def best_of(score, prior, tokens) -> jax.Array:
    """Returns the child with the highest score; of equal ones the one with the higher prior, then
    the one with the lower token id: [..., M] -> an index of shape [...]."""
    exists = tokens != NONE
    tied = exists
    for x in (score, prior, -tokens):
        x = jnp.where(tied, x, _lowest(x.dtype))
        tied &= x == jnp.max(x, axis=-1, keepdims=True)
    return jnp.argmax(tied, axis=-1).astype(jnp.int32)


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def select(tree: Tree, exploration) -> Selected:
    """Goes down from the root, at each node to the child with the best PUCT score, to a node that
    has not been evaluated or that ends the sentence."""
    return jax.vmap(_select_one, in_axes=(0, None))(tree, jnp.float32(exploration))


def _select_one(tree: Tree, exploration) -> Selected:
    nodes = tree.parent.shape[0]

    def inside(selected: Selected):
        # (A leaf that is not in the tree yet is called `size`.)
        return (selected.leaf < tree.size) & ~selected.known

    def down(selected: Selected) -> Selected:
        node = selected.leaf
        score = puct(tree.prior[node], tree.visits[node], tree.total_value[node], exploration)
        edge = best_of(score, tree.prior[node], tree.tokens[node])
        child = tree.children[node, edge]
        exists = child != NONE
        child = jnp.where(exists, child, tree.size)
        return Selected(
            leaf=child,
            parent=node,
            edge=edge,
            path=selected.path.at[selected.depth].set(tree.tokens[node, edge]),
            depth=selected.depth + 1,
            known=exists & tree.terminal[jnp.minimum(child, nodes - 1)],
        )

    none, zero = jnp.int32(NONE), jnp.int32(0)
    path = jnp.zeros((nodes,), jnp.int32)
    known = (tree.size > 0) & tree.terminal[0]
    return jax.lax.while_loop(inside, down, Selected(zero, none, none, path, zero, known))


def expand(tree: Tree, at: Selected, tokens, logprobs, value, terminal, active) -> Tree:
    """Returns the trees with the selected leaves as nodes, where `active` [B]: their children
    are `tokens` [B, M] with `logprobs`, of which the prior is renormalised, and none where
    `terminal` [B]."""
    nodes, rows = tree.parent.shape[1], jnp.arange(tree.size.shape[0])
    is_new = active & ~at.known
    node = jnp.where(is_new, at.leaf, nodes)  # out of range: dropped
    parent = jnp.where(is_new & (at.parent != NONE), at.parent, nodes)
    tokens = jnp.where(terminal[:, None] | ~jnp.isfinite(logprobs), NONE, tokens)
    prior = jax.nn.softmax(jnp.where(tokens == NONE, -jnp.inf, logprobs), axis=-1)
    prior = jnp.where(tokens == NONE, 0.0, prior)

    def put(old, value):
        return old.at[rows, node].set(value, mode="drop")

    return dataclasses.replace(
        tree,
        tokens=put(tree.tokens, tokens),
        prior=put(tree.prior, prior),
        children=tree.children.at[rows, parent, at.edge].set(at.leaf, mode="drop"),
        parent=put(tree.parent, at.parent),
        edge=put(tree.edge, at.edge),
        value=put(tree.value, value),
        terminal=put(tree.terminal, terminal),
        size=tree.size + is_new,
    )


def backup(tree: Tree, leaf, value, active) -> Tree:
    """Adds 1 to N and value [B] to W on every edge from the leaves [B] up to the root, where
    `active` [B]. One player: no sign is flipped."""
    rows, nodes = jnp.arange(tree.size.shape[0]), tree.parent.shape[1]

    def up(carry):
        visits, total, node = carry
        parent = jnp.where(node != NONE, tree.parent[rows, node], NONE)
        edge = tree.edge[rows, node]
        index = (rows, jnp.where(parent == NONE, nodes, parent), edge)
        visits = visits.at[index].add(1, mode="drop")
        return visits, total.at[index].add(value, mode="drop"), parent

    start = jnp.where(active, leaf, NONE)
    carry = (tree.visits, tree.total_value, start)
    visits, total, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2] > 0), up, carry)
    return dataclasses.replace(tree, visits=visits, total_value=total)


def mixed(prior: jax.Array, noise: jax.Array, fraction) -> jax.Array:
    """Returns (1 - fraction) prior + fraction noise, in the shape of both."""
    return (1 - fraction) * prior + fraction * noise


def dirichlet(keys: jax.Array, there: jax.Array, concentration) -> jax.Array:
    """Draws from Dirichlet(concentration) over those of M children that are `there` [B, M]: [B, M].
    Its gammas are functions of a row's key [B] alone."""
    gammas = jax.vmap(lambda key: jax.random.loggamma(key, concentration, (there.shape[-1],)))(keys)
    return jnp.where(there, jax.nn.softmax(jnp.where(there, gammas, -jnp.inf), axis=-1), 0.0)


def with_root_noise(tree: Tree, noise: jax.Array, fraction, active) -> Tree:
    """Returns the trees whose roots' priors are mixed with noise [B, M], where `active` [B]."""
    prior = mixed(tree.prior[:, 0], noise, fraction)
    prior = jnp.where(active[:, None], prior, tree.prior[:, 0])
    return dataclasses.replace(tree, prior=tree.prior.at[:, 0].set(prior))


def visit_policy(visits: jax.Array, temperature) -> jax.Array:
    """N^(1 / temperature), normalised over the children, in the shape of the visits; zeros where
    nothing was visited."""
    logs = jnp.log(jnp.maximum(visits, 1).astype(jnp.float32)) / temperature
    weights = jax.nn.softmax(jnp.where(visits > 0, logs, -jnp.inf), axis=-1)
    return jnp.where(visits > 0, weights, 0.0)


def move_root(tree: Tree, edge: jax.Array, active: jax.Array) -> tuple[Tree, jax.Array]:
    """Returns the trees whose roots are the children at `edge` [B] of the old ones, where
    `active` [B], and the old index [B, N] of each new node, NONE for none. The subtree keeps all
    that it knows; a child that was not visited is a tree without a node."""
    return jax.vmap(_move_one)(tree, edge, active)


def _move_one(tree: Tree, edge, active):
    nodes = tree.parent.shape[0]
    index = jnp.arange(nodes)
    root = tree.children[0, edge]

    def mark(in_subtree, node):
        parent = tree.parent[node]
        inside = (node == root) | ((parent != NONE) & in_subtree[parent])
        return in_subtree.at[node].set(inside & (node < tree.size)), None

    in_subtree, _ = jax.lax.scan(mark, jnp.zeros((nodes,), bool), index)
    new_index = jnp.where(in_subtree, jnp.cumsum(in_subtree) - 1, nodes)
    old_index = jnp.full((nodes,), NONE, jnp.int32).at[new_index].set(index, mode="drop")
    blank = jax.tree.map(lambda x: x[0], empty(1, nodes, tree.tokens.shape[1]))
    rows = dataclasses.replace(tree, size=blank.parent)  # (a field of every node, for the map)
    moved = jax.tree.map(
        lambda x, none: jnp.where(
            (old_index == NONE).reshape(-1, *[1] * (x.ndim - 1)), none, x[old_index]
        ),
        rows,
        dataclasses.replace(blank, size=blank.parent),
    )
    renamed = functools.partial(_renamed, new_index=new_index)
    moved = dataclasses.replace(
        moved,
        children=renamed(moved.children),
        parent=renamed(moved.parent).at[0].set(NONE),
        edge=moved.edge.at[0].set(NONE),
        size=jnp.sum(in_subtree, dtype=jnp.int32),
    )
    return jax.tree.map(
        lambda new, same: jnp.where(active, new, same), (moved, old_index), (tree, index)
    )


def _renamed(indices: jax.Array, new_index: jax.Array) -> jax.Array:
    """Returns the new indices of nodes, NONE for NONE and for nodes outside the subtree."""
    renumbered = jnp.where(indices == NONE, len(new_index), new_index[indices])
    return jnp.where(renumbered < len(new_index), renumbered, NONE).astype(jnp.int32)
