"""A rollout of a user's file that wraps `sample`: responses, episodes, and both in flight."""

import re
import sys

import jax
import numpy as np
import pytest
from conftest import REPO
from tiny_run import tiny_config

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


@pytest.fixture(autouse=True)
def users_file(tmp_path, monkeypatch):
    block = re.search(r"```python\n# my_prices\.py\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "my_prices.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_prices", None)


def first_batch(folder, collect: str, **fields):
    config = tiny_config(
        folder,
        steps=2,
        sft__steps=0,
        evaluate__every_steps=0,
        model=MODEL,
        batch__sequences_per_optimizer_step=16,
        algorithm__collect=collect,
        algorithm__policy_loss="cispo(behaviour='sampler')",
        **fields,
    )
    validate(config)
    with Run(build(config, devices=jax.devices()[:1]), folder) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        batch, _ = run.source.next(0, run.roles)
        return jax.tree.map(np.asarray, batch)


@pytest.mark.parametrize(
    "fields",
    [{}, EPISODES, FLIGHT, EPISODES | FLIGHT],
    ids=["responses", "episodes", "responses in flight", "episodes in flight"],
)
def test_a_users_rollout_wraps_sample(tmp_path, fields):
    """The samples are those of `once`, and every one pays for its tokens."""
    plain = first_batch(tmp_path / "plain", "once()", **fields)
    paid = first_batch(tmp_path / "paid", f"my_prices.my_prices(price={PRICE})", **fields)
    for name in ("tokens", "mask", "group", "finish_reason"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(paid, name), name)
    cost = PRICE * plain.mask.sum(axis=1)
    assert len({*cost.tolist()} - {0.0}) > 0
    np.testing.assert_allclose(plain.scores - cost, paid.scores, atol=1e-6)
    sums = plain.rewards.sum(axis=1) - paid.rewards.sum(axis=1)
    np.testing.assert_allclose(sums, cost, atol=1e-6)
