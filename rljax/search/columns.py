"""The evaluator whose nodes are columns of one slot (rljax.models.cache_tree).

Node i of a sentence's tree is column P + i behind the P tokens that precede the root. So each
simulation reads one token per sentence, whatever the depth, and copies nothing; a move of the root
brings the columns of its subtree together. It says what `Forked` says, for less work. Layers with a
sliding window keep all columns here. Axes: B sentences, N nodes of a tree, M children of a node.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import batch_from_rows
from rljax.errors import InputError
from rljax.models import cache, cache_tree
from rljax.models.cache_tree import Nodes
from rljax.models.model import Model
from rljax.runs.units import human_bytes
from rljax.sampler.draw import Rules, choice_logprobs
from rljax.sampler.memory import memory_left, slots_bytes
from rljax.sampler.slots import rows_layout
from rljax.search.evaluators import (
    Evaluation,
    Leaves,
    Value,
    ends_of_lines,
    one_number,
    shaped,
    whole,
    why_lines_end,
)
from rljax.search.tree import NONE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Trees:
    """Arrays of every sentence's nodes that the tree of the search does not have."""

    caches: tuple[list, ...]  # caches of the policy, and of the value model if there is one
    held: jax.Array  # [B] int32: P
    token: jax.Array  # [B] int32: the root's own
    tokens: jax.Array  # [B, N] int32: of every node
    depths: jax.Array  # [B, N] int32
    ancestors: jax.Array  # [B, N, N] bool, each node its own, too
    # For a process model: the score of the last line that ends at or before each node, that of the
    # last line before the root, and whether the root's token is one of the response.
    scores: jax.Array  # [B, N]
    before: jax.Array  # [B]
    inside: jax.Array  # [B] bool


class Columns:
    """The evaluator by columns (see the module), for trees of at most `nodes` nodes and sentences
    of at most `tokens` tokens: a slot has tokens + nodes columns."""

    def __init__(
        self,
        model: Model,
        params,
        rules: Rules,
        width: int,
        value: Value | None = None,
        *,
        tokens: int,
        nodes: int,
        kv_dtype: str = "",
    ):
        self.rules, self.width, self.calls = rules, width, 0
        models = (model,) if value is None else (model, value.model)
        check(models, len(rules.temperature), tokens, nodes, kv_dtype)
        process = value is not None and value.reads == "process"
        self._plan = _Plan(models, tokens + nodes, nodes, width, kv_dtype, process)
        self._weights = (params,) if value is None else (params, value.params)
        self._why = why_lines_end(value, rules, model.config.ids)

    def start(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """Reads right-padded prompts [B, L] of lengths [B]: the roots are whole prompts."""
        counts = np.asarray(lengths, np.int32)
        self._trees = _started(self._plan, self._weights, prompts, counts)

    def programs(self, columns: int, depth: int) -> dict[str, tuple]:
        """Returns {name: (jitted function, its arguments as shapes, 1)} of a search of prompts of
        so many columns, as `Forked.programs`; no path is read, so `depth` changes none."""
        rows, plan = len(self.rules.temperature), self._plan
        read = plan, self._weights, whole(rows, columns), whole(rows)
        trees = jax.eval_shape(lambda *rest: _started(plan, *rest), *read[1:])
        trees = jax.tree.map(shaped, trees, _layout(plan, trees))
        live = jax.ShapeDtypeStruct((rows,), bool)
        inputs = self.rules, self._why, whole(rows), whole(rows), whole(rows), live
        moves = whole(rows), whole(rows, plan.nodes), live
        return {
            "search: read prompts": (_started, read, 1),
            "search: look at leaves": (_looked, (plan, self._weights, trees, *inputs), 1),
            "search: move roots": (_moved, (plan, trees, *moves), 1),
        }

    def __call__(self, leaves: Leaves) -> Evaluation:
        self.calls += 1
        rows = np.arange(len(leaves.depth))
        token = leaves.path[rows, np.maximum(leaves.depth - 1, 0)]
        inputs = [np.asarray(x, np.int32) for x in (token, leaves.node, leaves.parent)]
        self._trees, evaluation = _looked(
            self._plan, self._weights, self._trees, self.rules, self._why, *inputs, leaves.live
        )
        return Evaluation(*evaluation)

    def move_root(self, tokens: np.ndarray, kept: np.ndarray, live: np.ndarray) -> None:
        """Moves the roots of live [B] rows to their children by tokens [B]; kept [B, N] are the old
        indices of the new nodes."""
        moves = np.asarray(tokens, np.int32), np.asarray(kept, np.int32), live
        self._trees = _moved(self._plan, self._trees, *moves)


def check(models, rows: int, tokens: int, nodes: int, kv_dtype: str = "") -> None:
    """Raises InputError where a model cannot have nodes as columns, or where their keys and values
    are larger than what the devices have left."""
    for model in models:
        if why := why_not(model):
            raise InputError("a search whose nodes are columns", value=why, fix="use Forked")
        if tokens > model.config.max_tokens:
            rule = f"at most the model's context, {model.config.max_tokens}"
            fix = "lower sampler.max_response_tokens, or data.max_prompt_tokens"
            raise InputError("search tokens", value=tokens, rule=rule, fix=fix)
        cache.check_dtype(model.config, kv_dtype)
    columns = tokens + nodes
    need = sum(slots_bytes(model, rows, columns, kv_dtype, rings=False) for model in models)
    have, devices = memory_left(models[0].mesh)
    if have is not None and need * devices > have:
        raise InputError(
            f"{rows} search trees of {nodes} nodes behind {tokens} tokens, {columns} columns each, "
            f"need {human_bytes(need)} per device for keys and values ({len(models)} models)",
            value=f"{human_bytes(have)} left for {devices} device(s)",
            fix=f"at most {rows * have // (need * devices)} sentences at a time (sampler.slots), "
            "fewer simulations, or kv_dtype bfloat16 or int8",
        )


def why_not(model: Model) -> str:
    """Returns why a model's nodes cannot be columns; "" if they can."""
    return cache_tree.why_not(model.config)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static half of every program."""

    models: tuple[Model, ...]
    columns: int
    nodes: int
    width: int
    kv_dtype: str
    process: bool


def _layout(plan: _Plan, trees: _Trees) -> _Trees:
    """Returns the sharding of every array."""
    mesh = plan.models[0].mesh
    layout = rows_layout(dataclasses.replace(trees, caches=()), mesh)
    caches = tuple(cache.shardings(layers, mesh) for layers in trees.caches)
    return dataclasses.replace(layout, caches=caches)


def _pinned(plan: _Plan, trees: _Trees) -> _Trees:
    """Returns the trees with the sharding of `_layout`, so that donated buffers are reused."""
    return jax.lax.with_sharding_constraint(trees, _layout(plan, trees))


@functools.partial(jax.jit, static_argnums=0)
def _started(plan: _Plan, weights, prompts, lengths) -> _Trees:
    rows, nodes = len(lengths), plan.nodes
    batch = batch_from_rows(prompts, lengths, jnp.zeros(prompts.shape, jnp.float32))
    prefill_args = (batch, plan.columns, plan.kv_dtype)
    caches = tuple(
        model.prefill(params, *prefill_args, rings=False)
        for model, params in zip(plan.models, weights, strict=True)
    )
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    empty = {name: jnp.zeros((rows, nodes), jnp.int32) for name in ("tokens", "depths")}
    empty["ancestors"] = jnp.zeros((rows, nodes, nodes), bool)
    scores, before = jnp.zeros((rows, nodes), jnp.float32), jnp.zeros((rows,), jnp.float32)
    process_fields = dict(scores=scores, before=before, inside=jnp.zeros((rows,), bool))
    return _pinned(plan, _Trees(caches, lengths - 1, last, **empty, **process_fields))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _looked(plan: _Plan, weights, trees: _Trees, rules, ends_line, token, node, parent, live):
    """Returns (the trees with nodes [B] of live rows, children of `parent` [B]; tokens, log-probs
    and values that the models predict at these nodes)."""
    trees = _grown(plan, trees, token, node, parent, live)
    token = jnp.where(node == 0, trees.token, token)
    nodes = Nodes(trees.held, jnp.where(live, node, NONE)[:, None], trees.depths, trees.ancestors)
    heads, caches = [], []
    for model, params, old in zip(plan.models, weights, trees.caches, strict=True):
        unstacked = model.unstack(params)
        hidden, new = model.read_nodes(unstacked, token[:, None], nodes, old)
        heads.append(model.says(unstacked, hidden))
        caches.append(new)
    trees = dataclasses.replace(trees, caches=tuple(caches))
    top, tokens = jax.lax.top_k(choice_logprobs(heads[0], rules), plan.width)
    tokens = jnp.where(jnp.isfinite(top), tokens, NONE).astype(jnp.int32)
    value = jnp.zeros(node.shape, jnp.float32)
    if len(heads) > 1:
        value = one_number(heads[1])[:, 0]
    if plan.process:
        value, trees = _of_lines(trees, ends_line, value, token, node, parent, live)
    value = jnp.where(jnp.isfinite(value), value, 0.0)
    return _pinned(plan, trees), (tokens, top, value)


def _at(x: jax.Array, node: jax.Array) -> jax.Array:
    """Returns x [B, N, ...] at one node [B] of each row."""
    return x[jnp.arange(len(node)), node]


def _set(x: jax.Array, node: jax.Array, live: jax.Array, value: jax.Array) -> jax.Array:
    """Returns x [B, N, ...] with value [B, ...] at one node [B] of each live row."""
    node = jnp.where(live, node, x.shape[1])
    return x.at[jnp.arange(len(node)), node].set(value, mode="drop")


def _grown(plan: _Plan, trees: _Trees, token, node, parent, live) -> _Trees:
    is_node = jnp.arange(plan.nodes)[None, :] == node[:, None]
    is_root, parent_index = parent == NONE, jnp.maximum(parent, 0)
    depth = jnp.where(is_root, 0, _at(trees.depths, parent_index) + 1)
    ancestors = is_node | (_at(trees.ancestors, parent_index) & ~is_root[:, None])
    return dataclasses.replace(
        trees,
        tokens=_set(trees.tokens, node, live, jnp.where(is_root, trees.token, token)),
        depths=_set(trees.depths, node, live, depth),
        ancestors=_set(trees.ancestors, node, live, ancestors),
    )


def _of_lines(trees: _Trees, ends_line, score, token, node, parent, live):
    """Returns (the score [B] of the last line that ends at or before each node, the trees with
    these scores)."""
    is_root, parent_index = parent == NONE, jnp.maximum(parent, 0)
    parent_ends_line = jnp.where(is_root, 0, ends_line[_at(trees.tokens, parent_index)])
    ends = ends_of_lines(ends_line[token], parent_ends_line) & (~is_root | trees.inside)
    before = jnp.where(is_root, trees.before, _at(trees.scores, parent_index))
    score = jnp.where(ends, score, before)
    return score, dataclasses.replace(trees, scores=_set(trees.scores, node, live, score))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _moved(plan: _Plan, trees: _Trees, tokens, old_index, live) -> _Trees:
    """Returns the trees whose roots, in live rows, are the old nodes old_index[:, 0], reached by
    tokens [B]. old_index [B, N] are the old indices of all nodes."""
    rows, order = len(tokens), jnp.arange(plan.nodes)[None, :]
    exists = live[:, None] & (old_index != NONE)
    # The old root stays in its column, as the last token before the new one.
    source = jnp.where(exists, old_index, order + 1)
    source = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), source], axis=1)
    caches = tuple(
        [cache_tree.moved(layer, trees.held, source) for layer in layers] for layers in trees.caches
    )
    index = jnp.where(exists, old_index, order)

    def pick(x):
        return jnp.take_along_axis(x, index, axis=1)

    ancestors = jnp.take_along_axis(trees.ancestors, index[:, :, None], axis=1)
    ancestors = jnp.take_along_axis(ancestors, index[:, None, :], axis=2)
    # Columns that are no node any more are cleared as ancestors: new nodes will use them.
    ancestors &= (exists | ~live[:, None])[:, None, :]
    moved = dataclasses.replace(
        trees,
        caches=caches,
        held=trees.held + live,
        token=jnp.where(live, tokens, trees.token),
        tokens=pick(trees.tokens),
        depths=pick(trees.depths) - exists,
        ancestors=ancestors,
        scores=pick(trees.scores),
        before=jnp.where(live, trees.scores[:, 0], trees.before),
        inside=trees.inside | live,
    )
    return _pinned(plan, moved)
