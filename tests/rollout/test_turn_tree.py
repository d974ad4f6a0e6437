"""Episodes that branch where turns end: what siblings share, what each row learns, and what its
return is; the gradient of an enumerated game; failures and resumes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from conftest import Compiled, lanes
from killed_runs import killed_run
from role_programs import logprobs
from test_episodes import PROMPTS, actor, config_of, environment_of
from test_turns import PAID_FIRST, PAID_SECOND, chance, score_functions, true_gradient
from tiny_run import policy_bytes

from rljax import advantages as op_by_op
from rljax.arrays import fetch
from rljax.batch import FinishReason
from rljax.config import Config
from rljax.data.online.prompts import Prompts
from rljax.environments.messages import EpisodeLimits
from rljax.errors import InputError
from rljax.keys import root_key
from rljax.plan.programs import programs_of
from rljax.rollout import EpisodeRules
from rljax.rollout.players.episodes.log import Log, Trajectory, Transition
from rljax.rollout.players.episodes.tree import TurnTree, tree_rows
from rljax.sampler import Sampling
from rljax.sampler.sample import RECORD, Sample
from rljax.setup import abstract_roles, build
from rljax.validation import validate

__all__ = ["actor"]  # a fixture
advantages = Compiled(op_by_op)


def tree_of(actor, config, tmp_path, tree, *, roots=2, seed=0, **decoding):
    """(host batch, report, metrics) of one step's trees of `roots` roots for each prompt."""
    actor = dataclasses.replace(actor, decoding=dataclasses.replace(actor.decoding, **decoding))
    with environment_of(config, tmp_path) as (setup, environment):
        prompts = Prompts.from_records(setup.data.prompts[:PROMPTS], length=4)
        n = roots * tree.leaves * environment.rules.rows
        batch, report = environment.play(
            actor, prompts, root_key(seed), setup.rollouts.sampling, n=n, tree=tree
        )
        return fetch(batch), report, report.metrics()


def families(tree: TurnTree, roots: int, rows: int):
    """(parent node, its child nodes) of every node of a batch that may branch."""
    nodes = tree.of_prompt(roots * tree.leaves)
    for prompt in range(PROMPTS):
        first = prompt * len(nodes)
        for at, node in enumerate(nodes):
            if node.level < len(tree.at):
                size = node.leaves // tree.branches
                leaves = [node.leaf + i * size for i in range(tree.branches)]
                children = [
                    first + i
                    for i, n in enumerate(nodes)
                    if n.level == node.level + 1 and n.leaf in leaves
                ]
                assert len(children) == tree.branches
                yield first + at, children


@pytest.fixture(scope="module")
def letters(actor, tmp_path_factory):
    """A batch of trees of two levels: three turns, the last two of which begin with a branch."""
    config, folder = config_of("tiny_environments.count_letter()"), tmp_path_factory.mktemp("tree")
    return tree_of(actor, config, folder, TurnTree(2, (1, 2)))


def test_siblings_share_what_came_before_and_each_token_is_learned_once(actor, letters):
    batch, report, metrics = letters
    chosen, tree = batch.mask > 0, TurnTree(2, (1, 2))
    again = fetch(logprobs(actor, batch))
    np.testing.assert_allclose(again[chosen], batch.sampler_logprobs[chosen], atol=2e-5)
    assert len(report.rows) == PROMPTS * 8 and metrics["turn_tree/leaves"] == 8
    assert metrics["slots/reread_tokens"] == 0  # a branch reads what is new of it
    lengths = batch.segment_ids.sum(axis=1)
    differ = 0
    for parent, children in families(tree, 2, 1):
        read = lengths[parent]
        assert not chosen[parent, read:].any()
        for child in children:
            np.testing.assert_array_equal(batch.tokens[child, :read], batch.tokens[parent, :read])
            assert not chosen[child, :read].any() and chosen[child, read:].any()
        # Of one branch, and of no other; what differs are the draws behind it.
        assert len({int(batch.group[child]) for child in children}) == 1
        assert np.sum(batch.group == batch.group[children[0]]) == 2
        first, second = (batch.tokens[child] for child in children)
        differ += not np.array_equal(first, second)
        paid = batch.scores[parent] - np.mean(batch.scores[children])
        assert -1e-6 <= paid <= 1  # for the turn of the parent
    assert differ > PROMPTS
    np.testing.assert_allclose((batch.rewards * batch.mask).sum(axis=1), batch.scores, atol=1e-6)
    # A root's return is the mean of its four episodes'.
    of_leaves = np.array([row.score.value for row in report.rows]).reshape(PROMPTS, 2, 4)
    np.testing.assert_allclose(
        batch.scores.reshape(PROMPTS, 14)[:, :2], of_leaves.mean(axis=2), atol=1e-6
    )
    np.testing.assert_array_equal(batch.weights[:14, 0], [4] * 2 + [2] * 4 + [1] * 8)
    inner = np.arange(14) < 6
    assert (batch.finish_reason[:14][inner] == FinishReason.STOP).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", lanes([dict(slots=3)], [dict(slots=5, page_tokens=4, pages=20)]))
def test_no_draw_of_a_branch_depends_on_slots(actor, letters, tmp_path, how):
    config = config_of("tiny_environments.count_letter()")
    few, _, _ = tree_of(actor, config, tmp_path, TurnTree(2, (1, 2)), **how)
    for name in ("tokens", "mask", "rewards", "scores", "step_ids", "group", "weights"):
        np.testing.assert_array_equal(getattr(few, name), getattr(letters[0], name), err_msg=name)


@pytest.mark.slow
def test_a_branch_that_fails_begins_again_where_it_branched(actor, letters, tmp_path):
    """Every episode fails once behind its second branch: it is called again, given the replies of
    its turns before, and draws what it would have drawn."""
    (tmp_path / "known").mkdir()
    text = f"tiny_environments.fails_once(folder={str(tmp_path / 'known')!r}, after=3)"
    batch, _, metrics = tree_of(actor, config_of(text), tmp_path, TurnTree(2, (1, 2)))
    assert metrics["env/retried"] > 20 and metrics["env/failed"] == 0
    for name in ("tokens", "mask", "rewards", "scores", "group"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(letters[0], name), err_msg=name)


@pytest.mark.slow
def test_a_failed_leaf_is_masked_and_leaves_its_siblings(actor, tmp_path):
    config = config_of(
        "tiny_environments.fails_by_reply(wrong='abcdefg')", max_failed=1.0, retries=0
    )
    batch, report, metrics = tree_of(actor, config, tmp_path, TurnTree(2, (1,)), roots=3)
    assert 0 < metrics["env/failed"] < len(report.rows)
    status = [row.score.status for row in report.rows]
    values = [row.score.value for row in report.rows]
    of_leaf = {}
    for prompt in range(PROMPTS):
        for leaf in range(6):
            of_leaf[9 * prompt + 3 + leaf] = status[6 * prompt + leaf], values[6 * prompt + leaf]
    learned = (batch.mask > 0).any(axis=1)
    kinds = set()
    for parent, children in families(TurnTree(2, (1,)), 3, 1):
        alive = [child for child in children if of_leaf[child][0] == "ok"]
        kinds.add(len(alive))
        assert [child for child in children if learned[child]] == alive
        assert learned[parent] == bool(alive)
        if alive:
            want = np.mean([of_leaf[child][1] for child in alive])
            assert batch.scores[parent] == pytest.approx(want)
        alone = [child for child in children if child not in alive] + [parent] * (not alive)
        for row in alone:
            assert np.sum(batch.group == batch.group[row]) == 1
    assert kinds == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, rows, at",
    [("two_seats()", 2, (2,)), pytest.param("begins_anew()", 2, (1, 3), marks=pytest.mark.slow)],
)
def test_each_seat_and_each_log_has_rows_of_its_own(actor, tmp_path, function, rows, at):
    """Turns of all seats are counted. A node has the rows of an episode."""
    of = dict(history="rewrite", max_rows=2) if function == "begins_anew()" else {}
    config, tree = config_of(f"tiny_environments.{function}", **of), TurnTree(3, at)
    batch, report, _ = tree_of(actor, config, tmp_path, tree, roots=1)
    assert len(batch.mask) == PROMPTS * tree.nodes * rows
    chosen, turns = batch.mask > 0, {}
    for row in np.flatnonzero(chosen.any(axis=1)):
        turns[row] = int(batch.step_ids[row][chosen[row]].max())
    for parent, children in families(tree, 1, rows):
        for row in range(rows):
            own = batch.scores[parent * rows + row]
            theirs = [batch.scores[child * rows + row] for child in children]
            if function == "two_seats()":  # nothing is paid before the end
                assert own == pytest.approx(np.mean(theirs))
            seat = batch.seat[parent * rows + row]
            assert {int(batch.seat[child * rows + row]) for child in children} == {int(seat)}
    if function == "two_seats()":
        np.testing.assert_allclose(batch.scores[::2], -batch.scores[1::2], atol=1e-6)
        assert set(turns.values()) == {1} and len(turns) == len(batch.mask)
    else:  # two turns to each history, and the third one begins another branch
        levels = np.tile(np.repeat([n.level for n in tree.of_prompt(9)], rows), PROMPTS)
        found = {(int(levels[row]), row % 2): set() for row in turns}
        for row, count in turns.items():
            found[int(levels[row]), row % 2].add(count)
        assert found == {(0, 0): {1}, (1, 0): {1}, (1, 1): {2}, (2, 0): {1}}


# -- the enumerated game: stop, or go on by one of two ways, each of which has two replies


def episode_of(number: int, prompt: int, outcome) -> Trajectory:
    """An episode of the game: a token, an observation, two tokens."""
    first, second = outcome
    episode = Trajectory(number, prompt, None, {}, np.zeros((1, 2), np.uint32))
    episode.finish, episode.outcome = FinishReason.STOP, {"": 0.0}
    ids = [10 + first] + ([] if second is None else [5, 20 + second, 30 + second])
    sample = Sample(
        number, np.array([1, 2], np.int32), Sampling(max_response_tokens=2), np.zeros(2, np.uint32)
    )
    records = np.zeros(len(ids), RECORD)
    records["ids"], records["chosen"] = ids, [True, False, True, True][: len(ids)]
    sample.record(records)
    log = Log(0, sample, [Transition(2, 3, 1, reward=PAID_FIRST[first])])
    if second is not None:
        log.turns.append(Transition(4, 6, 2, reward=PAID_SECOND[first - 1, second]))
    episode.logs, episode.speaker = [log], log
    return episode


def every_tree(roots: int):
    """(chance, outcomes by leaf) of every tree of two branches after the first turn."""
    one = [(chance((0, None)), {0: (0, None)})]
    for way in (1, 2):
        p_way = sum(chance((way, reply)) for reply in (0, 1))
        for a, b in itertools.product((0, 1), repeat=2):
            p = chance((way, a)) * chance((way, b)) / p_way
            one.append((p, {0: (way, a), 1: (way, b)}))
    for picked in itertools.product(one, repeat=roots):
        leaves = {2 * r + leaf: x for r, (_, own) in enumerate(picked) for leaf, x in own.items()}
        yield np.prod([p for p, _ in picked]), leaves


@pytest.mark.slow
@pytest.mark.parametrize("roots", lanes([2], [3]))
def test_the_expected_gradient_of_an_enumerated_game_is_the_true_one(roots):
    """Of all trees of the game, by their chances, and not without the weights of the rows."""
    tree, rules = (
        TurnTree(2, (1,)),
        EpisodeRules(EpisodeLimits(max_turns=2, max_tokens=6), Sampling(max_response_tokens=2)),
    )
    trees, each = list(every_tree(roots)), 2 * roots
    assert sum(p for p, _ in trees) == pytest.approx(1.0, abs=1e-12)
    leaves, totals = [], np.full((len(trees), each, 1), np.nan)
    for prompt, (_, outcomes) in enumerate(trees):
        leaves.append({i: episode_of(i, prompt, outcome) for i, outcome in outcomes.items()})
        for i, (first, second) in outcomes.items():
            totals[prompt, i] = PAID_FIRST[first] + (
                0 if second is None else PAID_SECOND[first - 1, second]
            )
    batch = tree_rows(tree, leaves, each, rules, totals, None, mask_bad_turns=False)
    scores = np.zeros((len(batch.mask), 7))
    for prompt, (_, outcomes) in enumerate(trees):
        for at, node in enumerate(tree.of_prompt(each)):
            if node.leaf in outcomes and (batch.mask[prompt * 3 * roots + at] > 0).any():
                turns = score_functions(outcomes[node.leaf])
                scores[prompt * 3 * roots + at] = turns[node.level]
    on_devices = jax.tree.map(jax.numpy.asarray, batch)
    chances = np.repeat([p for p, _ in trees], 3 * roots) / each
    for advantage in (advantages.rloo, advantages.turn_leave_one_out):
        got = np.asarray(advantage(on_devices), np.float64)
        of_row = np.where(batch.mask > 0, got, 0.0)
        of_row = of_row[np.arange(len(got)), np.argmax(batch.mask, axis=1)]
        weighted = np.einsum("r,r,r,rp->p", chances, batch.weights[:, 0], of_row, scores)
        np.testing.assert_allclose(weighted, true_gradient(), atol=1e-6)
        plain = np.einsum("r,r,rp->p", chances, of_row, scores)
        direction = plain @ true_gradient() / np.linalg.norm(plain)
        assert direction < 0.999 * np.linalg.norm(true_gradient())


# -- configs and runs


def run_config(function: str = "tiny_environments.count_letter()", **options) -> Config:
    """A step of four prompts, each with two roots of two branches."""
    config = config_of(function, **options)
    config.algorithm.collect, config.algorithm.advantage = "turn_tree(branches=2)", "rloo()"
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 6
    config.batch.sequences_per_optimizer_step = 24
    return config


def test_what_does_not_go_with_trees_is_refused():
    assert validate(run_config()) == []
    for field, value, match in (
        ("batch.samples_per_prompt", 8, "multiple of 3"),
        ("environment.function", "tiny_environments.lives()", "played again"),
        ("environment.max_turns", 1, "after turn 1"),
        ("rollouts.max_staleness", 2, "turn_tree"),
        ("config.dataflow", "online_dpo", "begin at different turns"),
        ("algorithm.collect", "turn_tree(branches=1)", "at least 2"),
        ("algorithm.collect", "turn_tree(at=(2, 1))", "rising"),
    ):
        config = run_config()
        section, name = field.split(".")
        setattr(config if section == "config" else getattr(config, section), name, value)
        if name == "samples_per_prompt":
            config.batch.sequences_per_optimizer_step = 32
        with pytest.raises(InputError, match=match):
            validate(config)
    config = run_config()
    config.environment = type(config.environment)()
    with pytest.raises(InputError, match="environment.function"):
        validate(config)


def test_the_plan_decodes_leaves_and_learns_nodes():
    """Slots for the 16 episodes of a step, and 24 rows for their nodes."""
    setup = build(run_config(), jax.devices()[:1])
    calls = {call.name: call for call in programs_of(setup, abstract_roles(setup, setup.main))}
    shapes = {
        name: [x.shape for x in jax.tree.leaves(call.arguments) if hasattr(x, "shape")]
        for name, call in calls.items()
    }
    assert (16, 2) in shapes["generate"] and not any(24 in s for s in shapes["generate"])
    assert shapes["learn"].count((24, 40)) == 12  # weights among them


@pytest.mark.slow
def test_a_killed_run_is_the_run_that_was_not(tmp_path):
    """Killed at three random moments, in the middle of trees: the same weights to the last bit."""

    def run(folder, kills):
        config = run_config("tiny_environments.uneven()")
        config.steps, config.run_dir = 22, str(tmp_path / folder)
        config.checkpoint.every_steps = 2
        config.compilation_cache = "~/.cache/rljax/tests"
        return policy_bytes(killed_run(config, kills))

    assert run("killed", 3) == run("whole", 0)
