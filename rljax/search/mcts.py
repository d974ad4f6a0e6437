"""Monte-Carlo tree search as decoding: for each token a budget of simulations, then the child of
the root with the most visits (AlphaZero, arXiv 1712.01815).

Axes: B sentences, M children of a node.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rljax import heartbeat
from rljax.arrays import fetch
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.search import tree as trees
from rljax.search.evaluators import Leaves, folded, padded_paths, path_columns
from rljax.search.problem import SearchedResponse, SearchProblem
from rljax.search.tree import NONE, Selected, Tree


@contract(
    safe=True,
    targets=lambda o: o["width"],
    nodes=lambda o: 0 if o["rollouts"] else o["simulations"],
)
def mcts(
    problem: SearchProblem,
    *,
    simulations: int = 32,
    width: int = 4,
    exploration: float = 1.25,
    rollouts: bool = False,
    visit_temperature: float = 0.0,
    noise_fraction: float = 0.0,
    noise_concentration: float = 0.3,
    answer: Literal["visits", "best_leaf"] = "visits",
) -> list[SearchedResponse]:
    """Monte-Carlo tree search over tokens: one SearchedResponse for each row of the problem.

    Before each token the root is searched until it has `simulations` (its own evaluation is one):
    select by Q + c P sqrt(max(1, sum N)) / (1 + N) with c = `exploration`, expand with the policy's
    `width` likeliest tokens, evaluate, back up. The child with the most visits is emitted (of equal
    ones the one with the higher prior, then the lower id), and its subtree is kept.

    A text that has ended is worth its reward, where the problem can score it, else what the value
    model says. Another one is worth what the model says or, without one or with `rollouts`, the end
    of a response that the policy samples from there. `noise_fraction` of the root's prior is
    Dirichlet noise, and a `visit_temperature` above 0 samples the child by N^(1 / temperature):
    both are for exploration, and off where sampling is greedy. `answer` best_leaf: the response is
    the best complete one that any simulation came to.
    """
    _check(problem, rollouts, simulations, visit_temperature, noise_fraction, noise_concentration)
    explores = problem.sampling.temperature > 0
    noise = noise_fraction if explores else 0.0, noise_concentration
    rolls = rollouts or problem.value is None
    search = _Searched(problem, simulations, width, exploration, rolls, *noise)
    for position in range(problem.limit):
        if not search.live.any():
            break
        search.simulate()
        search.emit(position, visit_temperature if explores else 0.0)
    return search.responses if answer == "visits" else search.best_leaves()


def _check(
    problem: SearchProblem, rollouts, simulations, visit_temperature, fraction, concentration
) -> None:
    if problem.value is None and problem.scored is None:
        rule = "it compares texts by a critic, a reward model or a reward"
        fix = "give a value model by --search_model=FOLDER, or a config with a reward"
        raise InputError("mcts", value="no value model, no reward", rule=rule, fix=fix)
    if rollouts and problem.scored is None and problem.value.reads == "critic":
        rule = "the end of a rollout is scored by a reward model or a reward: a critic has no score"
        fix = "mcts(rollouts=0), or a reward model in place of the critic"
        raise InputError("mcts(rollouts)", value=rollouts, rule=rule, fix=fix)
    for name, value, good, rule in (
        ("simulations", simulations, simulations >= 1, ">= 1"),
        ("visit_temperature", visit_temperature, visit_temperature >= 0, ">= 0 (0: most visits)"),
        ("noise_fraction", fraction, 0 <= fraction <= 1, "0 to 1"),
        ("noise_concentration", concentration, concentration > 0, "above 0"),
    ):
        if not good:
            raise InputError(
                f"mcts({name})", value=value, rule=rule, fix=f"mcts({name}=...) of this range"
            )


def _next(tree: Tree, exploration):
    """Returns the trees, the leaves of their next simulation, and the numbers of simulations of
    their roots."""
    return tree, trees.select(tree, exploration), trees.root_count(tree)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begun(sentences: int, nodes: int, width: int, exploration):
    return _next(trees.empty(sentences, nodes, width), exploration)


@jax.jit
def _grown(tree: Tree, selected: Selected, tokens, logprobs, value, terminal, active, exploration):
    """Returns `_next` after a simulation of the rows that are `active` has reached the leaves
    `selected`."""
    rows = jnp.arange(value.shape[0])
    value = jnp.where(selected.known, tree.value[rows, selected.leaf], value)
    tree = trees.expand(tree, selected, tokens, logprobs, value, terminal, active)
    return _next(trees.backup(tree, selected.leaf, value, active), exploration)


@jax.jit
def _noisy(tree: Tree, keys, position, fraction, concentration, active, exploration):
    """Returns `_next` after noise was added at the roots of the rows that are `active`."""
    keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), position))(keys)
    noise = trees.dirichlet(keys, tree.tokens[:, 0] != NONE, concentration)
    return _next(trees.with_root_noise(tree, noise, fraction, active), exploration)


@jax.jit
def _emitted(tree: Tree, keys, position, temperature, live, exploration):
    """Returns (record of the children that are emitted, old indices of nodes, `_next` of the trees
    below them). The record: token [B] and the log-prob of its choice, the tokens of all children
    [B, M], their shares of the visits, the root's value [B]."""
    visits, prior, tokens = tree.visits[:, 0], tree.prior[:, 0], tree.tokens[:, 0]
    visited = jnp.any(visits > 0, axis=-1)
    policy = trees.visit_policy(visits, jnp.maximum(temperature, 1e-3))

    def draw(key, p):
        key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
        return jax.random.categorical(key, jnp.log(p))

    draws = (temperature > 0) & visited
    drawn = jax.vmap(draw)(keys, policy).astype(jnp.int32)
    edge = jnp.where(draws, drawn, trees.best_of(visits, prior, tokens))

    def at(x):
        return jnp.take_along_axis(x, edge[:, None], axis=1)[:, 0]

    logprob = jnp.where(draws, jnp.log(jnp.maximum(at(policy), 1e-30)), 0.0)
    shares = jnp.where(
        visited[:, None], trees.visit_policy(visits, 1.0), jax.nn.one_hot(edge, visits.shape[1])
    )
    record = at(tokens), logprob, tokens, shares, trees.root_value(tree)
    tree, old_index = trees.move_root(tree, edge, live)
    return record, old_index, _next(tree, exploration)


_NOISE, _CHOICE, _ROLLOUT = 0, 1, 2  # streams of a row's draws


def _stream(keys: np.ndarray, purpose: int) -> np.ndarray:
    """Returns keys [B, 2] for one purpose."""
    return fetch(folded(keys, 2**30 + purpose))


class _Searched:
    """The trees of a problem's rows, and the responses emitted so far."""

    def __init__(
        self, problem: SearchProblem, simulations, width, exploration, rollouts, fraction, alpha
    ):
        self.problem, self.budget, self.exploration = problem, simulations, np.float32(exploration)
        self.rollouts, self.noise = rollouts, (np.float32(fraction), np.float32(alpha))
        # (A rollout ends where no node of the tree is.)
        self.evaluator = problem.evaluator(width, nodes=0 if rollouts else simulations)
        self.next = _begun(problem.rows, simulations, width, self.exploration)
        self.responses = [SearchedResponse() for _ in range(problem.rows)]
        self.live = np.ones(problem.rows, bool)
        self.noised = np.zeros(problem.rows, bool)
        self.keys = {p: _stream(problem.keys, p) for p in (_NOISE, _CHOICE, _ROLLOUT)}
        self.done = np.zeros(problem.rows, np.int32)  # simulations of each row
        self.best: list[tuple[float, list[int], int] | None] = [None] * problem.rows

    @property
    def position(self) -> int:
        return max((len(response.ids) for response in self.responses), default=0)

    def simulate(self) -> None:
        """Simulates all live rows at once, until every root has its budget."""
        while True:
            tree, selected, count = self.next
            reached, counts = fetch((selected, count))
            active = self.live & (counts < self.budget)
            if not active.any():
                return
            if self.noise[0] > 0 and (fresh := active & (counts > 0) & ~self.noised).any():
                self.noised |= fresh
                noise_args = (np.int32(self.position), *self.noise, fresh, self.exploration)
                self.next = _noisy(tree, self.keys[_NOISE], *noise_args)
                continue
            self.next = self._simulated(tree, selected, reached, active)
            self.done += active
            heartbeat.beat()

    def _simulated(self, tree: Tree, selected: Selected, reached: Selected, active: np.ndarray):
        """Returns `_next` after a simulation of the rows that are `active`, whose leaves are
        `selected`; `reached` are the same on the host."""
        evaluated = active & ~reached.known
        depth = np.where(evaluated, reached.depth, 0).astype(np.int32)
        columns = path_columns(int(depth.max(initial=0)))
        path = np.pad(reached.path, ((0, 0), (0, max(0, columns - reached.path.shape[1]))))[
            :, :columns
        ]
        rows, width = self.problem.rows, self.evaluator.width
        tokens = np.full((rows, width), NONE, np.int32)
        logprobs = np.zeros((rows, width), np.float32)
        value, ended = np.zeros(rows, np.float32), np.zeros(rows, bool)
        if evaluated.any():
            leaves = Leaves(path, depth, reached.leaf, reached.parent, evaluated)
            tokens, logprobs, value = fetch(self.evaluator(leaves))
            texts = [self.responses[r].ids + path[r, : depth[r]].tolist() for r in range(rows)]
            below_root = evaluated & (depth > 0)
            reasons = [below_root[r] and self.problem.reason(texts[r]) for r in range(rows)]
            ended = below_root & [reason is not None for reason in reasons]
            value = self._values(tree, leaves, texts, ended, value)
        evaluation = (tokens, logprobs, value.astype(np.float32), ended)
        return _grown(tree, selected, *evaluation, active, self.exploration)

    def _values(self, tree: Tree, leaves: Leaves, texts, ended, value) -> np.ndarray:
        """Returns the values of the leaves (see `mcts`): [B]."""
        problem, rows = self.problem, np.arange(self.problem.rows)
        complete = self._rolled(leaves, texts, ended) if self.rollouts else texts
        valued = leaves.live & (ended | self.rollouts)
        if problem.scored is not None and valued.any():
            indices = np.flatnonzero(valued).tolist()
            responses = [
                (complete[row], int(problem.reason(complete[row]) or 0)) for row in indices
            ]
            scores = problem.score(indices, responses)
            # A leaf whose reward failed gets the value of its root. If the reward of the root
            # failed, it is left out of the mean. A failed response is not an answer.
            fallback = np.where(leaves.depth == 0, np.nan, fetch(trees.root_value(tree)))
            value, failed = np.array(value), np.isnan(scores)
            value[valued] = np.where(failed, fallback[valued], scores)
            valued[indices] = ~failed
        elif problem.scored is None and self.rollouts:
            suffixes = [complete[row][len(self.responses[row].ids) :] for row in rows]
            value = fetch(self.evaluator(padded_paths(suffixes, valued)).value)
        elif problem.scored is None and problem.value.reads == "critic":
            value = np.where(ended, fetch(tree.value)[rows, np.maximum(leaves.parent, 0)], value)
        self._note(complete, valued, value)
        return value

    def _rolled(self, leaves: Leaves, texts, ended) -> list[list[int]]:
        """Returns the texts, of which the policy has completed those that had not ended."""
        rolls = leaves.live & ~ended
        if not rolls.any():
            return texts
        keys = folded(self.keys[_ROLLOUT], self.done)
        limit = self.problem.lengths + self.problem.limit
        unfinished = leaves._replace(live=rolls)
        continuations = self.evaluator.roll(unfinished, keys, limit, self.problem.limit)
        return [text + continuations[r] if rolls[r] else text for r, text in enumerate(texts)]

    def _note(self, complete, valued, value) -> None:
        """Keeps the best complete response of each row."""
        for row in np.flatnonzero(valued):
            if self.best[row] is None or value[row] > self.best[row][0]:
                reason = self.problem.reason(complete[row])
                self.best[row] = float(value[row]), list(complete[row]), int(reason or 0)

    def emit(self, position: int, temperature: float) -> None:
        """Emits one token of every live row and moves the roots there."""
        choice_args = (self.keys[_CHOICE], np.int32(position), np.float32(temperature), self.live)
        record, old_index, self.next = _emitted(self.next[0], *choice_args, self.exploration)
        (token, logprob, tokens, shares, value), old_index = fetch((record, old_index))
        for row in np.flatnonzero(self.live):
            response = self.responses[row]
            if token[row] == NONE:  # logits that were not finite
                self.live[row] = False
                continue
            response.add(token[row], logprob[row])
            response.target_ids.append(np.maximum(tokens[row], 0))
            response.target_probs.append(shares[row])
            response.values.append(float(value[row]))
            if (reason := self.problem.reason(response.ids)) is not None:
                response.reason, self.live[row] = int(reason), False
        self.noised[:] = False
        if self.live.any():
            self.evaluator.move_root(token, old_index, self.live)

    def best_leaves(self) -> list[SearchedResponse]:
        """Returns the best complete response of each row, or the emitted one if no simulation
        reached a complete response."""
        out = []
        for best, emitted in zip(self.best, self.responses, strict=True):
            if best is None:
                out.append(emitted)
                continue
            _, ids, reason = best
            response = SearchedResponse(reason=reason)
            width = self.evaluator.width
            for token in ids:
                response.add(token, 0.0)
                response.target_ids.append(np.array([token] + [0] * (width - 1), np.int32))
                response.target_probs.append(np.array([1.0] + [0.0] * (width - 1), np.float32))
                response.values.append(best[0])
            out.append(response)
        return out
