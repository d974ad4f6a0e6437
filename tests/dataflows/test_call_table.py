"""HybridFlow's table of calls (arXiv 2409.19256; ALGORITHMS K3): which verb of which role a step
calls how often, in how few lines its pages differ (Safe-RLHF: test_safe_rlhf), and how long pages
are."""

import ast
import collections
import difflib
import inspect

import pytest
from preset_runs import Shared, preset_config

from rljax import dataflows
from rljax.components import Component
from rljax.dataflows import grpo, ppo, remax
from rljax.roles import Actor, Critic, Reference
from rljax.rollout.reward import Reward

METHODS = {  # what is counted, and as what
    (Actor, "logprobs"): "log-probs", (Actor, "logprobs_and_load"): "log-probs",
    (Actor, "logprobs_and_entropy"): "log-probs", (Actor, "update"): "update",
    (Critic, "values"): "values", (Critic, "update"): "critic update",
    (Reference, "logprobs"): "reference", (Reward, "__call__"): "reward",
}  # fmt: skip
# "generate" and "greedy" are samples of a prompt; an absent verb is not called.
TABLE = {
    "ppo": {"generate": 1, "log-probs": 1, "values": 1, "reference": 1, "reward": 1,
            "advantages": 1, "critic update": 1, "update": 1},
    "remax": {"generate": 1, "greedy": 1, "log-probs": 1, "reference": 1, "reward": 2,
              "advantages": 1, "update": 1},
    "grpo": {"generate": 8, "log-probs": 1, "reference": 1, "reward": 1, "advantages": 1,
             "update": 1},
    # Two critics and two advantages; the cost comes with the reward's call.
    "safe_rlhf": {"generate": 1, "log-probs": 1, "values": 2, "reference": 1, "reward": 1,
                  "advantages": 2, "critic update": 2, "update": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("calls"))
    yield runs
    runs.close()


@pytest.mark.parametrize("name", TABLE)
def test_a_step_calls_each_role_as_the_table_says(shared, monkeypatch, name):
    """One step of the tiny preset with a KL to the reference. Its program is traced once, so what
    the page calls is counted once."""
    config, counts = preset_config(name), collections.Counter()
    setattr(config.algorithm, "kl_in_loss" if name == "grpo" else "kl_in_reward", 0.05)
    if name == "remax":  # one sample beside the greedy one
        config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 1

    def count(owner, method, verb_of):
        original = getattr(owner, method)

        def counted(*arguments, **options):
            verb, times = verb_of(*arguments, **options)
            counts[verb] += times
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, counted)

    with shared.run(config) as run:
        run.begin(run.setup.main, run.setup.model.init(run.key))
        advantage = run.setup.main.algorithm.advantage
        for (owner, method), verb in METHODS.items():
            count(owner, method, lambda *_, verb=verb, **__: (verb, 1))
        count(Actor, "generate", lambda actor, prompts, key, sampling, n=1, **_: (
            "generate" if sampling.temperature else "greedy", n))  # fmt: skip
        count(Component, "__call__", lambda part, *_, **__: ("advantages", part == advantage))
        run.step()
    assert dict(counts) == TABLE[name]


def lines_of(page) -> list[str]:
    """The statements of a page without docstrings and imports, as ast writes them."""
    module = ast.parse(inspect.getsource(inspect.getmodule(page.page)))
    kept = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            node.name = "page"
            kept += ast.unparse(node).splitlines()
    return kept


def changed(one, other) -> int:
    """Lines that differ: of a line that is another one, the larger side counts."""
    found = difflib.SequenceMatcher(None, lines_of(one), lines_of(other), autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in found.get_opcodes() if tag != "equal"
    )


@pytest.mark.parametrize(("other", "most"), [(remax, 10), (grpo, 12)], ids=["remax", "grpo"])
def test_the_pages_differ_from_ppo_in_few_lines(other, most):
    assert 0 < changed(ppo, other) <= most


@pytest.mark.parametrize("name", dataflows.__all__)
def test_a_page_is_a_page(name):
    """Its statements, without what it calls: at most 30 lines (the studies' sizes, 30 to 60, count
    docstrings, imports and helpers of the file)."""
    source = inspect.getsource(inspect.unwrap(getattr(dataflows, name).page))
    function = ast.parse(source).body[0]
    body = function.body[ast.get_docstring(function) is not None :]
    assert len("\n".join(map(ast.unparse, body)).splitlines()) <= 30
