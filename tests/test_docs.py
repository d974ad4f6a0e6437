"""What docs/extend shows can be run, and a user adds to the library from files alone."""

import ast
import inspect
import operator
import re
import shlex
import sys
import types

import jax
import numpy as np
import pytest
import users_formulas
import users_vine
from conftest import REPO, compiled, lanes
from golden_checks.common import response_batch
from test_house import ORDER

from rljax import setup as build
from rljax.arrays import fetch
from rljax.config import Config
from rljax.errors import InputError
from rljax.models import families
from rljax.plan.programs import programs_of
from rljax.training.run import Run
from rljax.validation import validate


def tiny(**fields) -> Config:
    """Steps of GRPO on 8 prompts of three digits; `batch__epochs=2` sets batch.epochs."""
    config = Config(dataflow="grpo", steps=2, compilation_cache="", export=False)
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.model_settings.remat = "none"
    config.data.train, config.data.max_prompt_tokens = "sort_digits(digits=3)", 4
    config.sampler.max_response_tokens, config.reward.workers = 3, 1
    config.reward.function = "sequence_match(partial=0.5)"
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 8
    config.batch.sequences_per_optimizer_step, config.actor_optimizer.lr = 64, 1e-3
    for name, value in fields.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        assert hasattr(node, path[-1]), name
        setattr(node, path[-1], value)
    return config


class Trained:
    """A run after `steps` steps: their metrics, its roles before and after, one more batch."""

    def __init__(self, config: Config, folder, steps: int = 1):
        validate(config)
        with Run(build.build(config, jax.devices()[:1]), folder) as run:
            params = {}
            if run.setup.starts_from_policy:
                params = build.initial_params(config, run.setup.model)
            run.begin(run.phase, params)
            self.before = fetch(build.role_arrays(run.roles))
            self.metrics = [run.step() for _ in range(steps)]
            self.after = fetch(build.role_arrays(run.roles))
            self.batch, self.of_source = run.source.next(steps, run.roles)
            self.batch = fetch(self.batch)

    def moved(self, role: str) -> bool:
        one, other = (jax.tree.leaves(x[role]) for x in (self.before, self.after))
        return any((a != b).any() for a, b in zip(one, other, strict=True))


# -- additions of a user's own file


@pytest.mark.slow
def test_a_loss_and_an_advantage_of_a_users_file(tmp_path):
    config = tiny(
        algorithm__policy_loss="users_formulas.topr(most=1.0)",
        algorithm__advantage="users_formulas.group_quantile(quantile=0.4)",
        batch__sequences_per_optimizer_step=32,  # the second step has ratios other than 1
        actor_optimizer__lr=1e-2,
    )
    done = Trained(config, tmp_path, 2)
    assert done.moved("actor")
    assert all(0 < row["topr_weight"] < 1.5 and row["grad_norm"] > 0 for row in done.metrics)


def test_the_users_formulas():
    mask = [[1, 1], [1, 0], [1, 1], [1, 1]]
    batch = response_batch(mask, np.float32, group=[0, 0, 0, 0], scores=[0.0, 0.0, 1.0, 3.0])
    batch = batch.replace(rewards=batch.scores[:, None] * np.array([[1, 0]], np.float32))
    # Quantile 0.4 of (0, 0, 1, 3) is 0, of which half is no higher; 0.75 is 1.
    std = np.std([0, 0, 1, 3], ddof=1)
    low = compiled(users_formulas.group_quantile)(batch, quantile=0.4)
    high = compiled(users_formulas.group_quantile)(batch, quantile=0.75)
    np.testing.assert_allclose(low[:, 0], np.array([0, 0, 1, 3]) / std, rtol=1e-5)
    np.testing.assert_allclose(high[:, 0], np.array([-1, -1, 0, 2]) / std, rtol=1e-5)
    assert low[1, 1] == 0  # no policy token
    advantages = np.array([[1, 1], [1, 0], [-1, -1], [-1, -1]], np.float32)
    batch = batch.replace(advantages=advantages, old_logprobs=np.zeros((4, 2), np.float32))
    logprobs = np.log(np.array([[2, 2], [0.5, 9], [0.5, 0.5], [2, 2]], np.float32))

    def topr(logprobs, batch):
        return users_formulas.topr(types.SimpleNamespace(logprobs=logprobs), batch)

    _, metrics = compiled(topr)(logprobs, batch)
    np.testing.assert_allclose(metrics["topr_weight"][:, 0], [1, 1, 0.25, 1], rtol=1e-6)


@pytest.mark.slow
def test_vineppo_as_a_rollout_of_a_users_file(tmp_path):
    """The reward reads the first character alone: from the second line on it is certain."""
    config = tiny(
        data__train="running_sum(terms=3)",
        sampler__max_response_tokens=12,
        reward__function="toy.begins_even()",
        algorithm__collect="users_vine.vine(completions=4, most_states=3)",
        algorithm__advantage="vineppo()",
    )
    done = Trained(config, tmp_path)
    assert done.metrics[0]["grad_norm"] > 0 and done.moved("actor")
    batch, later = done.batch, 0
    assert done.of_source["vine/states"] == np.sum(~np.isnan(batch.values))
    for row in range(batch.rows):
        columns = np.flatnonzero(~np.isnan(batch.values[row]))
        lines = batch.step_ids[row]
        assert list(lines[columns]) == list(range(1, min(lines.max(), 3) + 1))
        assert all(lines[c - 1] != lines[c] for c in columns)
        later += len(columns[1:])
        np.testing.assert_allclose(batch.values[row, columns[1:]], batch.scores[row])
    first = batch.values[:, 1:][(batch.step_ids[:, 1:] == 1) & (batch.step_ids[:, :-1] == 0)]
    assert later > 3 and 0 < np.mean(first) < 1 and np.any((first > 0) & (first < 1))


@pytest.mark.slow
def test_prime_as_a_dataflow_with_a_trained_role_of_a_users_file(tmp_path):
    config = tiny(
        dataflow="users_prime.prime(beta=0.1)",
        roles=("implicit=trained_policy(lr=1e-3)",),
        algorithm__advantage="prime()",
    )
    done = Trained(config, tmp_path, 2)
    assert done.moved("actor") and done.moved("implicit") and not done.moved("reference")
    for row in done.metrics:
        assert row["implicit/grad_norm"] > 0 and row["grad_norm"] > 0
        assert 0 <= row["implicit/accuracy"] <= 1


@pytest.mark.slow
def test_a_rollout_of_a_users_file_that_samples_twice_is_planned():
    setup = build.build(tiny(algorithm__collect="toy.scored_once_more()"), jax.devices()[:1])
    calls = programs_of(setup, build.abstract_roles(setup))
    assert [call.name for call in calls] == ["generate", "generate 2", "learn"]


def test_a_role_that_is_missing_is_named_with_the_way_to_declare_it():
    config = tiny(dataflow="users_prime.prime()", algorithm__advantage="prime()")
    with pytest.raises(InputError, match=r"argument: 'implicit'.* roles=\('NAME=trained_policy"):
        validate(config)


@pytest.mark.parametrize(
    ("written", "most"),
    [(users_formulas.topr, 20), (users_formulas.group_quantile, 20), (users_vine, 60)],
    ids=["loss", "advantage", "rollout"],
)
def test_they_are_short(written, most):
    assert len(inspect.getsource(written).splitlines()) <= most


# -- docs/architecture.md and docs/extend

PAGE = (REPO / "docs" / "architecture.md").read_text()
# {file: its text} of the blocks of python that begin with the name of a file.
PARTS = {
    path.stem: dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", path.read_text(), re.DOTALL))
    for path in sorted((REPO / "docs" / "extend").glob("*.md"))
}
FILES = {n: text for files in PARTS.values() for n, text in files.items() if "# --config." in text}
SHOWN = {  # a metric that only the file itself can have brought about
    "my_loss.py": "my_ratio",
    "my_reward.py": "reward/part/right",
    "my_rollout.py": "my_rollout/tries",
    "my_role.py": "student/entropy",
    "my_squares.py": "reward/source/squares",
}


def settings(text: str) -> dict:
    """The flags in the last lines of a block, `# --config.field=value`, as a shell reads them."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("# --config.")]
    found = {}
    for flag in (argument for line in lines for argument in shlex.split(line)):
        name, _, value = flag.removeprefix("--config.").partition("=")
        plain = isinstance(operator.attrgetter(name)(Config()), str)
        found[name.replace(".", "__")] = value if plain else ast.literal_eval(value)
    return found


def test_the_page_names_what_is_there():
    levels = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert len(levels) == len(ORDER)
    for level, rooms in enumerate(ORDER, 1):
        assert [name for name in rooms if f"`{name}`" not in levels[str(level)]] == []
    inside = [page.read_text() for page in (REPO / "docs" / "internals").glob("*.md")]
    links = re.findall(
        r"\]\((?:\.\./)+((?:rljax|examples|tests)/[^)]+)\)", "\n".join([PAGE, *inside])
    )
    assert len(links) > 60 and [link for link in links if not (REPO / link).exists()] == []


def test_the_page_is_one_that_is_read():
    """At most 200 lines of at most 200 characters, and three pictures."""
    lines = PAGE.splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 200
    assert len(re.findall(r"^!\[[^]]+\]\(figures/", PAGE, re.MULTILINE)) == 3


def test_every_part_has_a_block():
    assert all(PARTS.values()), PARTS
    assert len(FILES) >= 9 and all(settings(text) for text in FILES.values())


def test_a_model_family_of_a_users_file():
    made = {}
    exec(compile(PARTS["model_family"]["my_family.py"], "my_family.py", "exec"), made)
    try:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "vocab_size": 11, "model_type": "mine"}
        config = families.from_hf_config(shape)
        assert (config.kv_heads, config.norm_eps, config.qk_norm) == (2, 1e-5, True)
        written = families.to_hf_config(config)
        assert written["architectures"] == ["MineForCausalLM"]
        assert families.from_hf_config(written) == config
    finally:
        del families.FAMILIES["mine"]


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """shown(NAME) -> the config that the block of a page is for; the file itself is written."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def config_of(name: str) -> Config:
        (tmp_path / name).write_text(FILES[name])
        names.append(name.removesuffix(".py"))
        fields = settings(FILES[name])
        if "data__train" in fields:  # the task's own reward
            fields["reward__function"] = ""
        return tiny(**fields)

    yield config_of
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", FILES)
def test_a_block_of_a_page_is_valid(name, shown):
    validate(shown(name))


QUICK = ("my_squares.py",)


@pytest.mark.parametrize("name", lanes(QUICK, [name for name in FILES if name not in QUICK]))
def test_a_block_of_a_page_trains(name, shown, tmp_path):
    done = Trained(shown(name), tmp_path / "run")
    (row,) = done.metrics
    assert done.moved("actor") and row["grad_norm"] > 0
    assert SHOWN.get(name, "loss") in row, sorted(row)
