"""Rows of data files from a policy's samples: demonstrations, pairs, trajectories with log-probs
and process scores.

Ids are the record: a sample whose text does not encode to the sampled ids is not a trajectory,
because its log-probs would stand at other tokens.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from rljax.data.offline.encode import Trajectory, encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import PromptRecord
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.policies import Completion, Policy, sample_all
from rljax.rollout import Player, Reward
from rljax.setup import check_length

LOG = logging.getLogger("rljax")
_NO_LIMIT = 2**30  # tokens: nothing is cut, as what was sampled fits


def lines_of(text: str) -> list[str]:
    """Returns the steps of a completion: its lines, a blank one being part of the line before it.
    Joined by newlines they are the text."""
    steps: list[str] = []
    for line in text.split("\n"):
        if steps and (not line.strip() or not steps[-1].strip()):
            steps[-1] += "\n" + line
        else:
            steps.append(line)
    return steps


# -- rows of files --


def example_row(prompts: Sequence[PromptRecord], sample: Completion) -> dict:
    """Returns a demonstration for SFT: prompt, completion, and its reward."""
    row = prompts[sample.prompt].columns
    return {**row, "completion": sample.text, "reward": sample.reward}


def pair_row(prompts: Sequence[PromptRecord], better: Completion, worse: Completion) -> dict:
    """Returns a pair for preference losses and reward models."""
    row = prompts[better.prompt].columns
    scores = {"score_chosen": better.reward, "score_rejected": worse.reward}
    return {**row, "chosen": better.text, "rejected": worse.text, **scores}


def trajectories_of(
    policy: Policy,
    prompts: Sequence[PromptRecord],
    scorer: Reward | Player,
    samples: Sequence[Completion],
    key: jax.Array,
    *,
    process_samples: int = 0,
) -> tuple[list[dict], dict[str, int]]:
    """Returns rows of trajectories of the samples, and counts of those kept and left out. With
    `process_samples` above 0, each step of a row has a pass rate over so many samples and a centred
    process score. `key` is a scalar PRNG key."""
    rows, kept_samples, counts = trajectory_rows(policy.tokenizer, prompts, samples)
    _warn_of_left_out(counts)
    if process_samples:
        rates = prefix_pass_rates(
            policy, prompts, scorer, kept_samples, rows, key, n=process_samples
        )
        scores = centred_scores(rows, rates)
        rows = [
            {**row, "pass_rates": rate, "process_scores": score}
            for row, rate, score in zip(rows, rates, scores, strict=True)
        ]
    return rows, counts


_REASONS = {  # for which samples are left out of trajectories
    "encoded_otherwise": "whose text does not encode to the sampled tokens again (an untrained"
    " model, forced tokens, a chat template that rewrites it): log-probs would be of other tokens",
    "empty": "without a text",
    "failed": "whose reward failed",
}


def _warn_of_left_out(counts: Mapping[str, int]) -> None:
    """Warns of samples that give no trajectory: how many, and why."""
    reasons = [f"{counts[name]:,} {text}" for name, text in _REASONS.items() if counts[name]]
    if reasons:
        LOG.warning(
            "%s of %s samples are left out of the trajectories%s: %s",
            f"{counts['total'] - counts['kept']:,}",
            f"{counts['total']:,}",
            "" if counts["kept"] else ", of which there are none",
            ", ".join(reasons),
        )


def trajectory_rows(
    tokenizer: Tokenizer, prompts: Sequence[PromptRecord], samples: Sequence[Completion]
) -> tuple[list[dict], list[Completion], dict[str, int]]:
    """Returns (rows of trajectories, their samples, counts). A row has completion, steps, reward,
    truncated, logprobs (nats, one per token) and `group`, the number of the prompt. A failed
    reward, an empty text, and a text that does not encode to the sampled ids give no row, and
    are counted."""
    rows, kept_samples = [], []
    counts = dict(total=len(samples), kept=0, failed=0, empty=0, encoded_otherwise=0)
    for sample in samples:
        if np.isnan(sample.reward):
            counts["failed"] += 1
            continue
        if not sample.text.strip():
            counts["empty"] += 1
            continue
        row = {
            **prompts[sample.prompt].columns,
            "completion": sample.text,
            "steps": lines_of(sample.text),
            "reward": sample.reward,
            "truncated": sample.truncated,
            "logprobs": [min(x, 0.0) for x in sample.logprobs],
            "group": sample.prompt,
        }
        if _encoded(tokenizer, prompts, sample, row) is None:
            counts["encoded_otherwise"] += 1
            continue
        rows.append(row)
        kept_samples.append(sample)
    counts["kept"] = len(rows)
    return rows, kept_samples, counts


def _encoded(
    tokenizer: Tokenizer, prompts: Sequence[PromptRecord], sample: Completion, row: dict
) -> Trajectory | None:
    """Returns the row as training encodes it, its process scores 1 at every step's last token; None
    where these are not the sampled tokens (forced ones were not sampled), or where one token ends
    two steps."""
    if np.isnan(sample.logprobs).any():
        return None
    probe = {k: v for k, v in row.items() if k not in ("completion", "logprobs")}
    probe["process_scores"] = [1.0] * len(row["steps"])
    try:
        records = load_rows([probe], "train", "trajectories")
        (item,), _ = encode_rows(records, tokenizer, "trajectories", max_tokens=_NO_LIMIT)
    except InputError:  # a chat template that rewrites the text
        return None
    is_same = tuple(item.completion_ids.tolist()) == sample.ids and np.all(item.completion_mask > 0)
    is_same = is_same and np.array_equal(item.prompt_ids, prompts[sample.prompt].token_ids)
    return item if is_same and np.sum(item.process_scores > 0) == len(row["steps"]) else None


# -- process scores --


def prefix_pass_rates(
    policy: Policy,
    prompts: Sequence[PromptRecord],
    scorer: Reward | Player,
    samples: Sequence[Completion],
    rows: Sequence[dict],
    key: jax.Array,
    *,
    n: int,
) -> list[list[float]]:
    """Returns pass rates [rows][steps]: the mean reward of n samples that go on from the end of
    every step of every row; for the last step the row's own reward, as nothing follows it. Equal
    prefixes are sampled once. `key` is a scalar PRNG key.

    `samples` and `rows` are those of `trajectory_rows`. A prefix whose rewards all failed has the
    pass rate of the row's outcome.
    """
    numbers: dict[tuple, int] = {}  # (prompt, ids of the prefix) -> its number
    prefixes = []
    for sample, row in zip(samples, rows, strict=True):
        step_ends = np.flatnonzero(_encoded(policy.tokenizer, prompts, sample, row).process_scores)
        prefixes.append([(sample.prompt, sample.ids[: end + 1]) for end in step_ends[:-1]])
        for prefix in prefixes[-1]:
            numbers.setdefault(prefix, len(numbers))
    rates = _rates_of(policy, prompts, scorer, list(numbers), key, n)
    pass_rates = []
    for row, row_prefixes in zip(rows, prefixes, strict=True):
        reward = float(row["reward"])
        prefix_rates = [rates[numbers[prefix]] for prefix in row_prefixes]
        pass_rates.append([reward if np.isnan(rate) else rate for rate in prefix_rates] + [reward])
    return pass_rates


def _rates_of(policy, prompts, scorer, prefixes: list[tuple], key, n: int) -> list[float]:
    """Returns the mean reward of n samples that go on from each prefix; NaN where all rewards
    failed."""
    if not prefixes:
        return []
    records = [continued(prompts[prompt], ids) for prompt, ids in prefixes]
    longest = max(len(record.token_ids) for record in records)
    check_length(longest, policy.sampling.max_response_tokens, policy.actor.model)
    # The response that is scored begins where the prompt ended: the prefix is part of it.
    starts = [len(prompts[prompt].token_ids) for prompt, _ in prefixes]
    samples = sample_all(policy.continuing(longest), records, n, scorer, key=key, starts=starts)
    rates = []
    for start in range(0, len(samples), n):
        rewards = [s.reward for s in samples[start : start + n] if not np.isnan(s.reward)]
        rates.append(float(np.mean(rewards)) if rewards else float("nan"))
    return rates


def continued(record: PromptRecord, ids: Sequence[int]) -> PromptRecord:
    """Returns a prompt record that ends with the beginning of a response."""
    return dataclasses.replace(record, token_ids=np.array([*record.token_ids, *ids], np.int32))


def centred_scores(rows: Sequence[dict], rates: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns DQO's process scores [rows][steps]: the pass rate of the prefix - the mean reward of
    the prompt's rows.

    Under the policy that sampled, the pass rate of a growing prefix is a martingale that starts at
    the prompt's: every score has mean 0, so that more steps are no reward of their own.
    """
    of_prompt: dict = {}
    for row in rows:
        of_prompt.setdefault(row["group"], []).append(float(row["reward"]))
    means = {group: sum(values) / len(values) for group, values in of_prompt.items()}
    return [
        [rate - means[row["group"]] for rate in steps]
        for row, steps in zip(rows, rates, strict=True)
    ]
