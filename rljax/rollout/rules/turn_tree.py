"""A rollout for environments: episodes that branch where turns end."""

from rljax.contracts import contract
from rljax.rollout.players.episodes.tree import TurnTree
from rljax.rollout.rollout import Rollout
from rljax.rollout.sample import require_sampler


@contract(safe=True, fills=("weights",), tree=lambda o: TurnTree(o["branches"], o["at"]))
def turn_tree(prompts, key, cfg, *, sample, branches: int = 2, at: tuple[int, ...] = (1,)):
    """Episodes that go on `branches` times from the end of each turn in `at`, each time by draws of
    its own: samples are compared that differ from one turn on, and what led there is drawn once.

    A row is a stretch of turns between two branchings. It reads what came before and learns its own
    tokens, so that each token is learned once. Its return is the mean of the returns of all
    episodes that begin with it, its group the siblings of its branch, and its weight in the loss
    the number of these episodes. The environment of a branch is played again from the recorded
    replies, with its siblings' seeds. One root has 1 + branches + branches^2 + ... rows, of which
    batch.samples_per_prompt is a multiple; where an episode ends before it can branch, rows are
    empty. With leave-one-out advantages (rloo, turn_leave_one_out) and a reduction by a constant
    the expected gradient is that of the expected return.
    """
    tree = TurnTree(branches, at)
    n = tree.leaf_rows(cfg.samples_per_prompt)
    player = require_sampler(sample, by="turn_tree()").player
    batch, report = sample(prompts, key, n=n, tree=tree)
    leaves = n // player.rows
    prompt_index = [p for p in range(len(prompts.records)) for _ in range(tree.groups(leaves))]
    return Rollout(batch, prompts.select(prompt_index), report)
