"""RAFT: which samples are imitated, and that nothing else moves the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from preset_runs import Shared, preset_config
from test_programs import KEY, host_batch, recipe, roles_on

from rljax.batch import FinishReason
from rljax.dataflows import raft
from rljax.dataflows.raft import best_rows
from rljax.datagen.rejection import select
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.mesh import make_mesh

ONE = make_mesh(1, 1, 1, devices=jax.devices()[:1])


@pytest.mark.parametrize("min_score", [None, 0.4])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("keep", lanes([2], [1, 3]))
def test_it_keeps_what_rejection_sampling_keeps(keep, truncated, min_score):
    """`select` of rljax.datagen.rejection is tested on the worked example raft.select."""
    rng = np.random.default_rng(3)
    batch, samples = host_batch(), 4
    scores = rng.choice([0.0, 0.5, 1.0], batch.rows).astype(np.float32)
    ended = rng.choice([FinishReason.STOP, FinishReason.LENGTH], batch.rows).astype(np.int32)
    live = rng.random(batch.rows) < 0.8
    batch = batch.replace(
        scores=jnp.asarray(scores),
        finish_reason=jnp.asarray(ended),
        mask=batch.mask * live[:, None],
        tokens=batch.tokens.at[:, 0].set(jnp.arange(batch.rows)),
    )
    best, metrics = best_rows(batch, samples, keep, min_score, truncated)
    kept = np.asarray(best.mask).any(1)
    found = np.asarray(best.tokens)[:, 0].reshape(-1, keep)
    wanted = []
    for first in range(0, batch.rows, samples):
        rows = np.arange(first, first + samples)
        chosen = select(
            [float(scores[i]) if live[i] else float("nan") for i in rows],
            [str(i) for i in rows],
            method="top_k",
            top_k=keep,
            min_reward=min_score,
            eligible=[truncated or ended[i] != FinishReason.LENGTH for i in rows],
        )
        wanted.append([int(rows[i]) for i in chosen])
    for row, good, want in zip(found, kept.reshape(-1, keep), wanted, strict=True):
        assert list(row[good]) == want
    assert metrics["raft/kept_fraction"] == pytest.approx(sum(map(len, wanted)) / live.sum())
    none = np.mean([not want for want in wanted])
    assert metrics["raft/prompts_without_any"] == pytest.approx(none)


@pytest.mark.slow
def test_only_the_best_samples_move_the_policy():
    """The parameters after a step are those of the same step on a batch without the others."""
    cfg = recipe("group_relative", Steps(16, 16)).replace(
        samples_per_prompt=4, kl_in_reward=0.0, kl_in_loss=0.0, entropy_coef=0.0
    )
    batch = host_batch().replace(finish_reason=jnp.zeros((16,), jnp.int32))
    best, _ = best_rows(batch.replace(scores=jnp.sum(batch.rewards, axis=1)), 4, 1, None, False)
    tokens = set(map(bytes, np.asarray(best.tokens)))
    other = jnp.asarray([bytes(row) not in tokens for row in np.asarray(batch.tokens)])
    assert 0 < int(other.sum()) < 16
    noise = jnp.where(other[:, None] & (batch.mask > 0), (batch.tokens + 1) % 5, batch.tokens)

    def after(batch):
        new, metrics = raft(batch, KEY, cfg, actor=roles_on(ONE)["actor"])
        return jax.tree.leaves(new["actor"].state.params), metrics

    (one, metrics), (changed, _) = after(batch), after(batch.replace(tokens=noise))
    start = jax.tree.leaves(roles_on(ONE)["actor"].state.params)
    assert any(not np.array_equal(a, b) for a, b in zip(one, start, strict=True))
    for a, b in zip(one, changed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["raft/kept_fraction"] == 0.25


def test_more_than_there_are_cannot_be_kept(tmp_path):
    runs = Shared(tmp_path)
    config = preset_config("raft")
    config.dataflow = "raft(keep=9)"
    with pytest.raises(InputError, match="keep.*9.*samples_per_prompt"), runs.run(config):
        pass
    runs.close()
