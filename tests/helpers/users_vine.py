"""VinePPO (arXiv 2410.01679) as a user writes it: a rollout that estimates values by sampling."""

import dataclasses

import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import FinishReason
from rljax.contracts import contract
from rljax.keys import stream
from rljax.policies import Policy, sample_all
from rljax.rollout import TokenTexts, once
from rljax.shaping.steps import line_ids


@contract(fills=("step_ids", "values"))
def vine(prompts, key, cfg, *, sample, actor, reward, tokenizer, completions=9, most_states=20):
    """`once`, and at the first token of each of the first `most_states` lines of a response the
    mean reward of `completions` fresh samples from there; NaN where that is not known."""
    done = once(prompts, key, cfg, sample=sample)
    batch = done.batch
    tokens, mask, group, finish = fetch(
        (batch.tokens, batch.mask, batch.group, batch.finish_reason)
    )
    texts = TokenTexts(tokenizer)(tokens, mask)
    steps = line_ids(texts, mask, finish == FinishReason.LENGTH)
    values = np.full(steps.shape, np.nan, np.float32)
    at = [
        (row, int(np.argmax(steps[row] == line)))
        for row in range(len(steps))
        for line in range(1, min(steps[row].max(), most_states) + 1)
    ]
    # Prompts that end where a line begins; what is scored still begins behind the first prompt.
    states = [
        dataclasses.replace(prompts.records[group[row]], token_ids=tokens[row, :column])
        for row, column in at
    ]
    width = tokens.shape[1]
    policy = Policy(actor, tokenizer, cfg.sampling, width).continuing(width)
    if states:
        samples = sample_all(
            policy,
            states,
            completions,
            reward,
            key=stream(key, "vine"),
            starts=[int(prompts.lengths[group[row]]) for row, _ in at],
            prompts_per_call=batch.rows,
        )
        rewards = np.array([sample.reward for sample in samples]).reshape(-1, completions)
        known = ~np.isnan(rewards)
        sums = np.where(known, rewards, 0.0).sum(1)
        means = np.where(known.any(1), sums / np.maximum(known.sum(1), 1), np.nan)
        for (row, column), mean in zip(at, means, strict=True):
            values[row, column] = mean
    step_ids, values = place((steps, values), actor.model.mesh)
    metrics = {**done.metrics, "vine/states": float(len(at))}
    return done.replace(batch=batch.replace(step_ids=step_ids, values=values), metrics=metrics)
