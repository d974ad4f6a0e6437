"""Trees of episodes: which episodes of a prompt share their first turns, and the rows that a tree
becomes, one for every stretch of turns between two branchings.

The leaves of a tree are whole episodes. Axes: E leaves, N nodes, both of all prompts in their
order; a prompt's nodes are ordered by level, the roots first, and within a level by their first
leaf.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.batch import Batch, FinishReason
from rljax.errors import InputError
from rljax.rollout.players.episodes.log import EpisodeRules, Log, Trajectory
from rljax.rollout.players.episodes.rows import rows_of


@dataclasses.dataclass(frozen=True)
class Node:
    """The turns first + 1 to last of an episode, which its siblings do not share. `leaf` is the
    number of that episode among the leaves of its prompt, `group` that of the siblings among the
    groups of the prompt, `leaves` how many leaves share these turns in a whole tree."""

    level: int
    leaf: int
    group: int
    leaves: int
    first: int
    last: int | None  # None: to the end


@dataclasses.dataclass(frozen=True)
class TurnTree:
    """Every episode that goes on after turn `at[0]` goes on `branches` times from there, each of
    these again after turn `at[1]`, and so on. Turns of all seats are counted, from 1."""

    branches: int = 2
    at: tuple[int, ...] = (1,)

    def __post_init__(self):
        if not isinstance(self.branches, int) or self.branches < 2:
            raise InputError(
                "turn_tree(branches)",
                value=self.branches,
                rule="a whole number, at least 2",
                fix="branches=2, or more",
            )
        valid = isinstance(self.at, tuple) and all(isinstance(k, int) for k in self.at)
        if not valid or not self.at or self.at[0] < 1 or list(self.at) != sorted({*self.at}):
            raise InputError(
                "turn_tree(at)",
                value=self.at,
                rule="numbers of turns, the first of an episode is 1, in rising order",
                fix="at=(1,) branches once, after the first reply",
            )

    @property
    def leaves(self) -> int:
        """Number of leaves of a root that branches wherever it may."""
        return self.branches ** len(self.at)

    @property
    def nodes(self) -> int:
        """Number of nodes of such a root, itself included."""
        return sum(self.branches**level for level in range(len(self.at) + 1))

    def leaf_rows(self, rows: int) -> int:
        """Returns how many rows the leaves of a prompt would take, whose nodes take `rows`. Raises
        InputError if `rows` is no whole number of trees."""
        if rows % self.nodes:
            raise InputError(
                "samples per prompt of a turn_tree",
                value=rows,
                rule=f"a multiple of {self.nodes} rows: one root has "
                f"{' + '.join(str(self.branches**i) for i in range(len(self.at) + 1))} nodes",
                fix=f"batch.samples_per_prompt={-(-rows // self.nodes) * self.nodes}",
            )
        return rows // self.nodes * self.leaves

    def siblings(self, leaf: int, turns: int) -> list[int]:
        """Returns the leaves that go on from where `leaf` stands after `turns`
        turns, beside itself."""
        if turns not in self.at:
            return []
        stride = self._leaves_below(self.at.index(turns) + 1)
        return [leaf + i * stride for i in range(1, self.branches)]

    def of_prompt(self, leaves: int) -> list[Node]:
        """Returns the nodes of a prompt with `leaves` leaves."""
        nodes, group, ends = [], 0, (0, *self.at, None)
        for level in range(len(self.at) + 1):
            leaves_below = self._leaves_below(level)
            family = leaves_below * self.branches if level else leaves
            for leaf in range(0, leaves, leaves_below):
                number = group + leaf // family
                nodes.append(Node(level, leaf, number, leaves_below, ends[level], ends[level + 1]))
            group += leaves // family
        return nodes

    def groups(self, leaves: int) -> int:
        """Returns how many groups of siblings a prompt with `leaves` leaves has."""
        return 1 + self.of_prompt(leaves)[-1].group

    def means(self, of_leaves: np.ndarray) -> list[np.ndarray]:
        """Returns for each level the means of its nodes: [leaves of a prompt, ...] ->
        [nodes, ...] each.

        The mean of a node is the mean of its children's, those without one (NaN) left out: of
        leaves that failed, or that are not there because the episode ended before it could branch.
        """
        levels = [of_leaves]
        for _ in self.at:
            levels.append(_mean_over(levels[-1], self.branches))
        return levels[::-1]

    def _leaves_below(self, level: int) -> int:
        return self.branches ** (len(self.at) - level)


def _mean_over(x: np.ndarray, children: int) -> np.ndarray:
    """Means of each `children` neighbours that are not NaN; NaN where all are."""
    x = x.reshape(-1, children, *x.shape[1:])
    valid = ~np.isnan(x)
    total, count = np.where(valid, x, 0.0).sum(axis=1), valid.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def tree_rows(
    tree: TurnTree,
    leaves: Sequence[dict[int, Trajectory]],
    each: int,
    rules: EpisodeRules,
    totals: Sequence[np.ndarray],
    parts: Sequence[np.ndarray] | None,
    *,
    mask_bad_turns: bool,
) -> Batch:
    """Returns a host batch of the nodes of the trees: `EpisodeRules.rows` rows to a node.

    Args:
      tree: where episodes branch.
      leaves: for each prompt the episodes that were played, by the number of their leaf of `each`.
      each: leaves of a prompt.
      rules: of the rollout.
      totals: of each prompt [each, seats], what the leaves are worth; NaN for those that failed or
        were not played.
      parts: of each prompt [each, seats, K], the named parts of that, or None.
      mask_bad_turns: turns with a bad call are not learned from.

    Each token is learned from in one row: that of the node in which it was drawn; what comes before
    it in the episode is read there and not learned from. The return of a node is the mean of its
    children's and of a leaf the episode's, less what was paid before the node began. group =
    siblings of one branch x seats + seat. weights = how many leaves share the tokens, so that a sum
    over all rows is one over episodes.
    """
    nodes, seats, groups = tree.of_prompt(each), len(rules.seats), tree.groups(each)
    views, row_groups, scores, shares, weights = [], [], [], [], []
    for prompt, prompt_leaves in enumerate(leaves):
        means = tree.means(totals[prompt])
        part_means = None if parts is None else tree.means(parts[prompt])
        for node in nodes:
            index = node.leaf // node.leaves
            value = means[node.level][index]
            views.append(_view(tree, node, prompt_leaves, len(views), bool(np.isnan(value).any())))
            row_groups.append(prompt * groups + node.group)
            scores += list(value - _paid(prompt_leaves.get(node.leaf), node, seats))
            weights.append(node.leaves)
            if part_means is not None:
                shares += list(
                    np.where(np.isnan(value)[:, None], 0.0, part_means[node.level][index])
                )
    row_parts = (
        None if parts is None else np.repeat(np.array(shares, np.float32), rules.max_rows, 0)
    )
    row_scores = np.repeat(np.nan_to_num(np.array(scores, np.float32)), rules.max_rows)
    batch = rows_of(views, rules, row_scores, row_parts, row_groups, mask_bad_turns=mask_bad_turns)
    share = np.repeat(np.array(weights, np.float32), rules.rows)[:, None]
    return batch.replace(weights=np.broadcast_to(share, batch.mask.shape).copy())


def _view(
    tree: TurnTree, node: Node, leaves: dict[int, Trajectory], number: int, failed: bool
) -> Trajectory:
    """Returns the turns of a node as an episode; without logs if there is no such node, because its
    parent ended before it could branch."""
    first = next(iter(leaves.values()))
    view = Trajectory(number, first.prompt, first.record, first.start, first.keys)
    view.finish = FinishReason.ABORT
    if not _is_there(tree, node, leaves):
        return view
    episode = leaves[node.leaf]
    if failed:  # all leaves behind it
        view.failure, view.kind = episode.failure, episode.kind
    branched = node.last is not None and tree.siblings(node.leaf, node.last)[0] in leaves
    last = node.last if branched else episode.turns
    view.finish = FinishReason.STOP if branched else episode.finish
    for log in episode.logs:
        turns = [turn for turn in log.turns if node.first < turn.number <= last]
        if turns:
            end = turns[-1].end if branched else log.tokens
            view.logs.append(Log(log.seat, log.sample.part(turns[0].start, end), turns))
    return view


def _is_there(tree: TurnTree, node: Node, leaves: dict[int, Trajectory]) -> bool:
    """Returns whether the parent of a node has branched, or it is a root."""
    if not node.level:
        return True
    parent = node.leaf - node.leaf % (node.leaves * tree.branches)
    return parent + node.leaves in leaves


def _paid(episode: Trajectory | None, node: Node, seats: int) -> np.ndarray:
    """Returns the rewards of an episode's turns before a node, for each seat."""
    paid = np.zeros(seats)
    for log in [] if episode is None else episode.logs:
        paid[log.seat] += sum(turn.reward for turn in log.turns if turn.number <= node.first)
    return paid
