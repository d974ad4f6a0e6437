"""Episodes that branch where turns end: what siblings share, what each row learns, and what its
return is; the gradient of an enumerated game; failures and resumes."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from conftest import compiled
from test_episodes import PROMPTS, actor, config_of, environment_of

from rljax.arrays import fetch
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.keys import root_key
from rljax.rollout.episode_tree import Tree

__all__ = ["actor"]  # a fixture


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


def test_each_token_is_learned_once_and_siblings_share_what_came_before(actor, tmp_path):
    tree = Tree(2, (1, 2))
    batch, report, metrics = tree_of(actor, config_of("tiny_environments.count_letter()"), tmp_path, tree)
    print(metrics)
    print(batch.mask.astype(int)[:14], batch.group[:14], batch.tokens[:14], batch.rewards[:14], batch.scores[:14], batch.weights[:14, 0])
    again = fetch(actor.logprobs(jax.tree.map(jax.numpy.asarray, batch)))
    chosen = batch.mask > 0
    np.testing.assert_allclose(again[chosen], batch.sampler_logprobs[chosen], atol=2e-5)
