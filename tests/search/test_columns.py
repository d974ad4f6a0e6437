"""Trees whose nodes are columns of one slot are searched as those whose paths are read again behind
a copy of the root: the same trees, values and tokens, by one program that reads one token each."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import EOS, VOCAB, prompts, tiny, weights
from test_sampler_families import FAMILIES, family

from rljax.arrays import fetch
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.sampler import Decoding, Sampling
from rljax.sampler.inputs import request_keys
from rljax.search import columns
from rljax.search.columns import Columns
from rljax.search.evaluators import Forked, Value
from rljax.search.mcts import mcts
from rljax.search.problem import SearchProblem

ROWS, NEW = 4, 4


@dataclasses.dataclass(frozen=True)
class Watched(SearchProblem):
    """A task that notes what its evaluator, of one form or the other, was asked and said."""

    by_columns: bool = True
    said: list = dataclasses.field(default_factory=list)

    def evaluator(self, width, sampling=None, *, nodes=0):
        made = super().evaluator(width, sampling, nodes=nodes if self.by_columns else 0)
        assert type(made) is (Columns if self.by_columns else Forked)
        return Watching(made, self.said)


class Watching:
    def __init__(self, evaluator, said):
        self.evaluator, self.width, self.said = evaluator, evaluator.width, said
        self.move_root = evaluator.move_root

    def __call__(self, leaves):
        found = fetch(self.evaluator(leaves))
        self.said.append((leaves, found))
        return found


def value_of(model, reads, seed=5, labels=1):
    """A value model of random weights, its head too, which says numbers of either sign."""
    config = dataclasses.replace(model.config, labels=labels)
    judge = dataclasses.replace(model, config=config, head="scalar")
    params = judge.init(jax.random.key(seed))
    head = jax.random.normal(jax.random.key(seed + 1), params["head"].shape)
    lines = tuple(range(3, model.config.vocab_size, 2))  # so that many end
    return Value(judge, params | {"head": head}, reads, lines)


def task_of(model, params, value, by_columns=True, *, vocab=VOCAB, temperature=0.0, new=NEW):
    tokens, lengths = prompts(ROWS, seed=3, vocab=vocab)
    asked = Sampling(max_response_tokens=new, temperature=temperature, stop_ids=(EOS,))
    keys = fetch(request_keys(jax.random.key(2), ROWS))
    how = (keys, asked, Decoding(), value)
    return Watched(model, params, tokens, lengths, *how, by_columns=by_columns)


def assert_same_search(model, params, value, *, atol=1e-5, vocab=VOCAB, **options):
    """The forms are asked the same of every simulation, and say the same."""
    options = dict(simulations=10, width=3) | options
    how = dict(vocab=vocab, temperature=float(options.get("noise_fraction", 0) > 0))
    tasks = [task_of(model, params, value, by_columns, **how) for by_columns in (True, False)]
    found = [mcts(task, **options) for task in tasks]
    for (asked, ours), (also, theirs) in zip(*[task.said for task in tasks], strict=True):
        live = asked.live
        np.testing.assert_array_equal(live, also.live)
        for name in ("path", "depth", "node", "parent"):
            np.testing.assert_array_equal(getattr(asked, name)[live], getattr(also, name)[live])
        for name in ("tokens", "logprobs", "value"):
            mine, other = getattr(ours, name)[live], getattr(theirs, name)[live]
            np.testing.assert_allclose(mine, other, atol=atol, err_msg=name)
    for ours, theirs in zip(*found, strict=True):
        assert ours.ids == theirs.ids and ours.reason == theirs.reason
        for name in ("target_ids", "target_probs", "values", "logprobs"):
            pair = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_allclose(*pair, atol=atol, err_msg=name)
    return tasks[0].said, found[0]


CASES = {
    "process": (dict(window=4, sinks=True), "process", 1, {}),
    "unvisited": (dict(), "process", 1, dict(simulations=1)),  # no new root was evaluated before
    "critic": (dict(), "critic", 1, {}),
    "outcome": (dict(window=6), "outcome", 2, dict(answer="best_leaf")),
    "noise": (dict(), "critic", 1, dict(noise_fraction=0.25, visit_temperature=1.0)),
    "narrow": (dict(), "outcome", 1, dict(simulations=4, width=2)),
    "broad": (dict(), "outcome", 1, dict(simulations=40, width=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(["process"], list(CASES)[1:]))
def test_whole_searches_are_those_by_copies(case):
    changes, reads, labels, options = CASES[case]
    model = tiny(**changes)
    value = value_of(model, reads, labels=labels)
    said, found = assert_same_search(model, weights(model), value, **options)
    values = np.concatenate([one.value[asked.live] for asked, one in said])
    assert len({tuple(one.ids) for one in found}) > 1 and len(np.unique(values)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", *FAMILIES])
def test_families(name):
    _, model, params = family(name)
    assert_same_search(model, params, value_of(model, "critic"), vocab=min(300, VOCAB))


@pytest.mark.slow
def test_one_set_of_programs_for_all_simulations_steps_and_prompts():
    """A look is compiled once for each power of four of the depth; nothing is compiled again."""
    model = tiny(mlp=48)  # that no other test has compiled
    value = value_of(model, "process")
    programs = columns._started, columns._looked, columns._moved

    def run(new):
        return mcts(task_of(model, weights(model), value, new=new), simulations=9, width=3)

    counts = [[one._cache_size() for one in programs]]
    for new in (NEW, NEW, NEW + 1):
        run(new)
        counts.append([one._cache_size() for one in programs])
    first, again, longer = np.diff(counts, axis=0).tolist()
    assert first[0] == first[2] == 1 <= first[1] <= 2
    assert again == [0, 0, 0] and longer == first


def test_trees_that_do_not_fit_are_refused_with_their_sizes():
    model = tiny()
    with pytest.raises(InputError, match=r"16 search trees of 1000000000 nodes behind 40 tokens"):
        columns.check([model], 16, 40, 10**9)
    with pytest.raises(InputError, match="context"):
        columns.check([model], 16, model.config.max_tokens + 1, 10)
    columns.check([model], 16, 40, 10)


@pytest.mark.slow
def test_models_that_cannot_have_columns_are_searched_by_copies():
    model = tiny(batch_invariant=True)
    task = task_of(model, weights(model), value_of(model, "critic"))
    assert isinstance(SearchProblem.evaluator(task, 3, nodes=8), Forked)
    with pytest.raises(InputError, match="range of columns"):
        columns.check([model], ROWS, 40, 8)


@pytest.mark.slow
def test_eight_devices_search_as_one_does():
    model, mesh = tiny(window=4), make_mesh(4, 2, 1)
    params, value = weights(model), value_of(model, "process")
    want = mcts(task_of(model, params, value), simulations=8, width=3)

    def split(one, params):
        return (
            (made := dataclasses.replace(one, mesh=mesh)),
            jax.device_put(params, made.shardings()),
        )

    model, params = split(model, params)
    judge, of_judge = split(value.model, value.params)
    value = dataclasses.replace(value, model=judge, params=of_judge)
    found = mcts(task_of(model, params, value), simulations=8, width=3)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.ids == theirs.ids
        np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


@pytest.mark.slow
def test_the_programs_of_a_plan_compile_from_shapes():
    model = tiny()
    task = task_of(model, weights(model), value_of(model, "process"))
    made = SearchProblem.evaluator(task, 3, nodes=9)
    for function, arguments, _ in made.programs(task.prompts.shape[1], NEW).values():
        assert function.lower(*arguments).compile().memory_analysis().output_size_in_bytes > 0
