"""HybridFlow's table of calls (arXiv 2409.19256): which verb of which role a step
calls how often, in how few lines its pages differ (Safe-RLHF: test_safe_rlhf), and how long pages
are."""

import ast
import collections
import dataclasses
import difflib
import inspect

import jax
import numpy as np
import pytest
from conftest import lanes
from preset_runs import Shared, preset_config
from test_programs import KEY, host_batch, recipe, roles_on

from rljax import dataflows
from rljax import setup as build
from rljax.components import Component
from rljax.dataflows import grpo, ppo, remax
from rljax.dataflows.steps import compute_logprobs, prepare_batch, update_actor
from rljax.learn import Steps
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.roles import Actor, Critic, Reference, program
from rljax.rollout import ModelScorer
from rljax.rollout.scoring.reward import Reward

ONE = make_mesh(1, 1, 1, devices=jax.devices()[:1])
METHODS = {  # what is counted, and as what
    (Actor, "logprobs"): "log-probs",
    (Actor, "logprobs_and_load"): "log-probs",
    (Actor, "logprobs_and_entropy"): "log-probs",
    (Actor, "update"): "update",
    (Critic, "values"): "values",
    (Critic, "update"): "critic update",
    (Reference, "logprobs"): "reference",
    (Reward, "__call__"): "reward",
    (ModelScorer, "score"): "cost",  # of these presets none has a reward model
}
# "generate" and "greedy" are samples of a prompt; an absent verb is not called.
TABLE = {
    "ppo": {
        "generate": 1,
        "log-probs": 1,
        "values": 1,
        "reference": 1,
        "reward": 1,
        "advantages": 1,
        "critic update": 1,
        "update": 1,
    },
    "remax": {
        "generate": 1,
        "greedy": 1,
        "log-probs": 1,
        "reference": 1,
        "reward": 2,
        "advantages": 1,
        "update": 1,
    },
    "grpo": {
        "generate": 8,
        "log-probs": 1,
        "reference": 1,
        "reward": 1,
        "advantages": 1,
        "update": 1,
    },
    # Two critics and two advantages; the cost model is asked once, within the reward's call.
    "safe_rlhf": {
        "generate": 1,
        "log-probs": 1,
        "values": 2,
        "reference": 1,
        "reward": 1,
        "cost": 1,
        "advantages": 2,
        "critic update": 2,
        "update": 1,
    },
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("calls"))
    yield runs
    runs.close()


def write_cost_model(folder, policy: Model) -> str:
    """A scalar model of the policy's shape, with random weights."""
    model = Model(dataclasses.replace(policy.config, labels=1), policy.mesh, "scalar")
    params = model.init(jax.random.key(1))
    save_params(folder, model, params, bos_id=None, eos_ids=(1,), pad_id=0)
    return str(folder)


# What the pages of PPO and GRPO call in their program, test_passes counts, too.
@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["remax"], [name for name in TABLE if name != "remax"]))
def test_a_step_calls_each_role_as_the_table_says(shared, monkeypatch, tmp_path, name):
    """One step of the tiny preset with a KL to the reference. Its program is traced once, so what
    the page calls is counted once; the trace of the dry run is dropped, as nothing was counted."""
    config, counts = preset_config(name), collections.Counter()
    setattr(config.algorithm, "kl_in_loss" if name == "grpo" else "kl_in_reward", 0.05)
    if name == "remax":  # one sample beside the greedy one
        config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 1
    if name == "safe_rlhf":
        policy = build.build(config, jax.devices()[:1]).model
        config.reward.cost_model = write_cost_model(tmp_path / "cost", policy)

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
        count(
            Actor,
            "generate",
            lambda actor, prompts, key, sampling, n=1, **_: (
                "generate" if sampling.temperature else "greedy",
                n,
            ),
        )
        count(Component, "__call__", lambda part, *_, **__: ("advantages", part == advantage))
        run.setup.main.dataflow.function.run.clear_cache()
        run.step()
    assert dict(counts) == TABLE[name]


@program
def without_critic(batch, key, cfg, *, actor, reference=None, kl_controller=None, pretraining=None):
    """PPO's page, edited by hand into the update of ReMax and GRPO."""
    batch, load = compute_logprobs(batch, cfg, actor=actor, reference=reference)
    batch, metrics, controller = prepare_batch(batch, cfg, actor=actor, kl_controller=kl_controller)
    before = {**metrics, **load}
    actor, metrics = update_actor(actor, batch, cfg, before, kl_controller, pretraining)
    return {"actor": actor, "kl_controller": controller}, metrics


def lines_of(page) -> list[str]:
    function = ast.parse(inspect.getsource(page.page)).body[0]
    function.name, function.decorator_list = "page", []
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.unparse(function).splitlines()


@pytest.mark.slow
def test_ppo_becomes_remax_and_grpo_in_few_lines():
    """The edited page differs in at most 10 lines, keeps others, and takes the very step of the
    pages of both: what is left to ReMax is where `values` come from (its rollout)."""
    changed = [
        line for line in difflib.ndiff(lines_of(ppo), lines_of(without_critic)) if line[0] in "+-"
    ]
    assert 0 < len(changed) <= 10 and len(set(lines_of(ppo)) & set(lines_of(without_critic))) >= 1

    for page, advantage in ((remax, "remax()"), (grpo, "group_relative()")):
        cfg = recipe(advantage, Steps(16, 8)).replace(kl_in_reward=0.05)
        batch = host_batch()
        values = 0.3 * batch.mask
        taken = []
        for one in (page, without_critic):
            roles = {name: roles_on(ONE)[name] for name in ("actor", "reference")}
            new, _ = one(batch.replace(values=values), KEY, cfg, **roles)
            taken.append(jax.device_get(new["actor"].state.params))
        jax.tree.map(np.testing.assert_array_equal, *taken)


@pytest.mark.parametrize("name", dataflows.__all__)
def test_a_page_is_a_page(name):
    """Its statements, without what it calls: at most 30 lines (the studies' sizes, 30 to 60, count
    docstrings, imports and helpers of the file)."""
    source = inspect.getsource(inspect.unwrap(getattr(dataflows, name).page))
    function = ast.parse(source).body[0]
    body = function.body[ast.get_docstring(function) is not None :]
    assert len("\n".join(map(ast.unparse, body)).splitlines()) <= 30
