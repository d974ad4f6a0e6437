"""A rollout of a user's file that wraps `sample`: responses, episodes, and both in flight; handed
on to rollouts that need more of `sample` than its call; and one that chooses groups in flight."""

import re
import sys
from inspect import signature
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import REPO, lanes
from tiny_run import tiny_config

from rljax import rollout as rollouts
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.rollout import Landed, RewardReport, TrajectorySampler
from rljax.sampler import Sampling
from rljax.setup import build
from rljax.training.run import Run
from rljax.validation import validate

PAGE = (REPO / "docs" / "extend" / "rollout.md").read_text()
MODEL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"
EPISODES = dict(
    reward__function="",
    data__train="tiny_environments.rows()",
    data__max_prompt_tokens=4,
    environment__function="tiny_environments.count_letter()",
    environment__workers=1,
    environment__max_tokens=40,
    environment__max_reply_tokens=8,
    environment__max_turns=6,
    sampler__max_response_tokens=4,
)
FLIGHT = dict(rollouts__max_staleness=1, rollouts__clock="logical(2)", sampler__slots=12)
PRICE = 0.125
# Of its 20,000 prompts a run reads a few: all are encoded when it is built.
FEW_PROMPTS = "sort_digits(digits=5, prompts=800)"
# Rollouts of a user beside those of the page.
MORE = '''
from my_prices import priced
from rljax.contracts import contract
from rljax.rollout import Rollout, once, search, turn_tree, vine

FILLS = ("target_ids", "target_probs", "search_values")


@contract(searches=True, targets=4, fills=FILLS)
def my_search(prompts, key, cfg, *, actor, sample, price: float = 0.01):
    return search(prompts, key, cfg, actor=actor, sample=priced(sample, price), method=METHOD)


def silent_search(prompts, key, cfg, *, actor, sample):
    method = "best_of_n(samples=1)"
    return search(prompts, key, cfg, actor=actor, sample=sample, method=method)


TREE = turn_tree.contract["tree"](dict(branches=2, at=(1,)))


@contract(tree=TREE, fills=("weights",))
def my_tree(prompts, key, cfg, *, sample, price: float = 0.01):
    return turn_tree(prompts, key, cfg, sample=priced(sample, price))


@contract(fills=("step_ids", "values"), continues=True)
def plain_vine(prompts, key, cfg, *, actor, sample, tokenizer):
    def same(prompts, key, **options):
        return sample(prompts, key, **options)

    return vine(prompts, key, cfg, actor=actor, sample=same, tokenizer=tokenizer)


@contract(needs_groups=True, drops_dead=(10, "fill"))
def two_more(prompts, key, cfg, *, sample, draw):
    """Asks for two prompts beside its own."""
    done = once(prompts, key, cfg, sample=sample)
    more, report = sample(draw(2), key, n=cfg.samples_per_prompt)
    return done.replace(metrics={"two_more/rows": float(more.rows)})


def short(prompts, key, cfg, *, sample):
    return once(prompts, key, cfg, sample=sample.wrapped(lambda prompts, key, n: None))


def narrow(prompts, key, cfg, *, sample):
    return once(prompts, key, cfg, sample=sample.wrapped(lambda prompts, key: None))
'''.replace("METHOD", repr("mcts(simulations=4, width=4)"))


@pytest.fixture(autouse=True)
def users_files(tmp_path, monkeypatch):
    files = dict(re.findall(r"```python\n# (my_\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
    for name, text in {**files, "my_more": MORE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_prices", "my_choice", "my_more"):
        sys.modules.pop(name, None)


def first_step(folder, collect: str, **fields):
    """The first batch and its metrics."""
    given = dict(
        steps=2,
        sft__steps=0,
        evaluate__every_steps=0,
        model=MODEL,
        data__train=FEW_PROMPTS,
        batch__sequences_per_optimizer_step=16,
        algorithm__collect=collect,
        algorithm__policy_loss="cispo(behaviour='sampler')",
    )
    config = tiny_config(folder, **given | fields)
    validate(config)
    with Run(build(config, devices=jax.devices()[:1]), folder) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        batch, metrics = run.source.next(0, run.roles)
        return jax.tree.map(np.asarray, batch), metrics


def first_batch(folder, collect: str, **fields) -> Batch:
    return first_step(folder, collect, **fields)[0]


def assert_priced(plain: Batch, paid: Batch) -> None:
    """The same samples, each with a price for its tokens."""
    for name in ("tokens", "mask", "group", "finish_reason"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(paid, name), name)
    cost = PRICE * plain.mask.sum(axis=1)
    assert len({*cost.tolist()} - {0.0}) > 0
    np.testing.assert_allclose(plain.scores - cost, paid.scores, atol=1e-6)
    sums = plain.rewards.sum(axis=1) - paid.rewards.sum(axis=1)
    np.testing.assert_allclose(sums, cost, atol=1e-6)


WHERE = {
    "responses": {},
    "episodes": EPISODES,
    "responses in flight": FLIGHT,
    "episodes in flight": EPISODES | FLIGHT,
}


@pytest.mark.parametrize(
    "where", lanes(["responses in flight"], ["responses", "episodes", "episodes in flight"])
)
def test_a_users_rollout_wraps_sample(tmp_path, where):
    """The samples are those of `once`, and every one pays for its tokens."""
    fields = WHERE[where]
    plain = first_batch(tmp_path / "plain", "once()", **fields)
    paid = first_batch(tmp_path / "paid", f"my_prices.my_prices(price={PRICE})", **fields)
    assert_priced(plain, paid)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at once", "in flight"])
def test_what_is_wrapped_is_handed_on_to_vine(tmp_path, when):
    """Continuations have no price, so values are those of `vine`."""
    fields = FLIGHT if when == "in flight" else {}
    plain = first_batch(tmp_path / "plain", "vine()", **fields)
    paid = first_batch(tmp_path / "paid", f"my_prices.my_priced_vine(price={PRICE})", **fields)
    assert_priced(plain, paid)
    np.testing.assert_array_equal(plain.values, paid.values)


OF_SIX = dict(batch__samples_per_prompt=6, batch__sequences_per_optimizer_step=24)
HANDED_ON = {
    "search": ("search(method='mcts(simulations=4, width=4)')", "my_more.my_search", {}),
    "turn_tree": ("turn_tree()", "my_more.my_tree", EPISODES | OF_SIX),
}


@pytest.mark.slow
@pytest.mark.parametrize("rollout", HANDED_ON)
def test_what_is_wrapped_is_handed_on(tmp_path, rollout):
    theirs, ours, fields = HANDED_ON[rollout]
    plain = first_batch(tmp_path / "plain", theirs, **fields)
    paid = first_batch(tmp_path / "paid", f"{ours}(price={PRICE})", **fields)
    assert_priced(plain, paid)


def test_a_wrapper_is_asked_by_rollouts_that_need_more():
    """By a search with the searching actor, by trees with the tree; the player is the same."""
    asked, played = [], []
    row, report = Batch(*np.ones((4, 1, 2), np.int32)), RewardReport()

    class Player:
        rows = 1

        def play(self, actor, prompts, key, sampling, **options):
            played.append((actor, options["n"], options["tree"]))
            return row, RewardReport()

        def outcome_alone(self):
            return self

    def function(prompts, key, **options):
        asked.append(options)
        return plain(prompts, key, **options)[0], report

    plain = TrajectorySampler(Player(), "actor", Sampling(max_response_tokens=2), None)
    given = dict(sample=plain.wrapped(function))
    cfg = SimpleNamespace(samples_per_prompt=6, reward_shaping=())
    prompts = SimpleNamespace(records=(0, 1), select=tuple)
    actor = SimpleNamespace(model=SimpleNamespace(mesh=None))
    done = rollouts.search(prompts, None, cfg, actor=actor, **given)
    assert done.batch is row and done.report is report
    searching = asked[0]["actor"]
    assert searching.actor is actor and played[0] == (searching, 6, None)
    done = rollouts.turn_tree(prompts, None, cfg, **given)
    assert done.batch is row and done.report is report
    tree = asked[1]["tree"]
    assert tree.branches == 2 and played[1] == ("actor", 4, tree)
    assert done.prompts == (0,) * 3 + (1,) * 3


@pytest.mark.parametrize("rollout", HANDED_ON)
def test_what_is_played_at_once_is_refused_in_flight(tmp_path, rollout):
    """Also where nothing was declared: below."""
    _, ours, fields = HANDED_ON[rollout]
    with pytest.raises(InputError, match="max_staleness"):
        first_batch(tmp_path / "flown", ours, **fields | FLIGHT)


@pytest.mark.slow
def test_a_search_that_is_not_declared_is_refused_in_flight(tmp_path):
    with pytest.raises(InputError, match="did not ask for samples of the prompts"):
        first_batch(tmp_path / "flown", "my_more.silent_search()", **FLIGHT)


def test_a_plain_function_is_refused_by_a_rollout_that_needs_more(tmp_path):
    with pytest.raises(InputError, match=r"vine\(\) is handed a plain .*same.*sample\.wrapped"):
        first_batch(tmp_path / "run", "my_more.plain_vine()")
    cfg = SimpleNamespace(samples_per_prompt=2)
    prompts, roles = SimpleNamespace(records=()), dict.fromkeys(("draw", "reward", "tokenizer"))
    roles |= dict.fromkeys(("actor", "critic", "reference"))
    for name in ("search", "special_token", "turn_tree", "with_baseline_response"):
        rollout = getattr(rollouts, name)
        given = {role: None for role in roles if role in signature(rollout).parameters}
        cfg = SimpleNamespace(samples_per_prompt=3 if name == "turn_tree" else 2)
        with pytest.raises(InputError, match=rf"{name}\(\) is handed a plain.*sample\.wrapped"):
            rollout(prompts, None, cfg, sample=lambda prompts, key, **options: None, **given)


@pytest.mark.parametrize(
    ("collect", "match"),
    [
        ("short", r"returns the wrong thing: got 'NoneType'.*\(batch, report\).*my_more\.py"),
        ("narrow", r"does not take what it is called with: got 'n'.*unexpected .*my_more\.py"),
    ],
)
def test_a_wrong_function_is_named(tmp_path, collect, match):
    with pytest.raises(InputError, match=match):
        first_batch(tmp_path / "run", f"my_more.{collect}()")


# -- a choice of groups


@pytest.mark.parametrize("when", lanes(["in flight"], ["at once"]))
def test_a_users_choice_of_groups_is_called(tmp_path, when):
    """With the groups that `active` has; prices and metrics are kept."""
    fields = FLIGHT if when == "in flight" else {}
    collect = "active(max_rounds=10)"
    plain, metrics = first_step(tmp_path / "plain", collect, **fields)
    paid, of_ours = first_step(tmp_path / "paid", f"my_choice.my_choice(price={PRICE})", **fields)
    assert of_ours["my_choice/in_flight"] == bool(fields)
    assert metrics["batch/prompts"] == of_ours["batch/prompts"]
    assert_priced(plain, paid)


@pytest.mark.slow
def test_prompts_that_a_rollout_draws_in_flight_are_counted(tmp_path):
    _, metrics = first_step(tmp_path / "run", "my_more.two_more()", **FLIGHT)
    assert metrics["two_more/rows"] == 8
    assert metrics["batch/prompts"] == 4 + metrics["queue/dropped"] + 2


def test_no_tree_is_taken_for_one_that_landed():
    asked = []

    class Player:
        def play(self, actor, prompts, key, sampling, **options):
            asked.append(options["tree"])
            return "played"

    prompts, sampling = object(), Sampling(max_response_tokens=2, stop_ids=())
    landed = Landed(prompts, "actor", sampling, 2, (Batch, RewardReport()))
    sample = TrajectorySampler(Player(), "actor", sampling, landed)
    assert sample(prompts, None, n=2, tree="tree") == "played" and asked == ["tree"]
    assert not landed.taken
    assert sample(prompts, None, n=2) == landed.result and landed.taken
