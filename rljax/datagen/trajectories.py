"""Samples of a saved policy with their ids, log-probs and rewards, and rows of data files of them.

What lives here: sampling at the host, pass rates of prefixes by sampling on from them, and the rows
that training from a file reads. What does not: which samples are kept (rljax.datagen.selection),
flags and files (rljax.datagen.rejection), evaluation (rljax.evaluation.policy).

Ids are the record: a sample whose text does not encode to the ids that were sampled is no
trajectory, as its log-probs would stand at other tokens.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.data.offline.encode import Trajectory, encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import PromptRecord, Prompts, encode_prompts
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy
from rljax.rewards.pool.pool import RewardPool
from rljax.roles import Actor
from rljax.rollout import Reward, sample_scored
from rljax.sampler import Sampling
from rljax.setup import check_length

_NO_LIMIT = 2**30  # tokens: nothing is cut, as what was sampled fits


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion. `prompt` is its number in the prompts of the source; reward NaN = failed."""

    prompt: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampler, one per id
    reward: float
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """A policy, prompts for it and what scores its completions; `raw` are the prompts unencoded."""

    policy: SavedPolicy
    actor: Actor
    reward: Reward
    raw: list[dict]
    prompts: list[PromptRecord]
    prompt_tokens: int
    sampling: Sampling

    def close(self) -> None:
        self.reward.close()


def open_source(
    policy: SavedPolicy,
    data: str,
    reward: str,
    *,
    split: str = "train",
    prompts: int | None = None,
    temperature: float | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
) -> Source:
    """The first `prompts` prompts of `data` that fit, ready to sample. None: as the policy's config
    says. Close it: the reward runs in processes of its own."""
    config = policy.config
    records = load_prompts(data, split)[:prompts]
    encoded, _ = encode_prompts(
        records,
        policy.tokenizer,
        max_prompt_tokens=max_prompt_tokens or config.data.max_prompt_tokens,
    )
    by_index = {record["index"]: record for record in records}
    length = max(len(record.token_ids) for record in encoded)
    response = max_response_tokens or config.sampler.max_response_tokens
    check_length(length, response, policy.model)
    sampling = Sampling(
        temperature=temperature or config.sampler.temperature,
        max_response_tokens=response,
        stop_ids=tuple(policy.tokenizer.eos_ids),
        stop_strings=tuple(config.sampler.stop_strings),
    )
    pool = RewardPool(reward, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
    return Source(
        policy,
        policy.actor(),
        Reward(pool, policy.tokenizer, policy.model.mesh),
        [by_index[record.index] for record in encoded],
        encoded,
        length,
        sampling,
    )


def draw(source: Source, key: jax.Array, samples: int, *, rows_per_call: int = 512) -> list[Sample]:
    """`samples` completions of every prompt, those of a prompt one after the other."""
    out, size = [], min(max(rows_per_call // samples, 1), len(source.prompts))
    for start in range(0, len(source.prompts), size):
        part = source.prompts[start : start + size]
        real = len(part)
        part = part + [part[-1]] * (size - real)  # one shape, so one compile
        prompts = Prompts.from_records(part, length=source.prompt_tokens)
        batch, report = sample_scored(
            source.actor, source.reward, prompts, jax.random.fold_in(key, start), source.sampling,
            n=samples,
        )  # fmt: skip
        host = fetch((batch.tokens, batch.mask, batch.sampler_logprobs))
        tokens, mask, logprobs = (np.asarray(x) for x in host)
        for row, scored in enumerate(report.examples[: real * samples]):
            at = mask[row] > 0
            out.append(
                Sample(
                    prompt=start + row // samples,
                    text=scored["response"],
                    ids=tuple(tokens[row, at].tolist()),
                    logprobs=tuple(logprobs[row, at].astype(float).tolist()),
                    reward=scored["reward"] if scored["status"] == "ok" else float("nan"),
                    truncated=scored["finish_reason"] != "stop",
                )
            )
    return out


def lines_of(text: str) -> list[str]:
    """The steps of a completion: its lines, a blank one being part of the line before it. Joined
    by newlines they are the text."""
    steps: list[str] = []
    for line in text.split("\n"):
        if steps and (not line.strip() or not steps[-1].strip()):
            steps[-1] += "\n" + line
        else:
            steps.append(line)
    return steps


# -- rows of files --


def _prompt_columns(record: dict) -> dict:
    """What every row says of its prompt."""
    row = {"prompt": record["prompt"]}
    if "tools" in record["extra_info"]:
        row["tools"] = record["extra_info"]["tools"]
    return row


def example_row(source: Source, sample: Sample) -> dict:
    """A worked example for SFT: prompt, completion, and its reward."""
    row = _prompt_columns(source.raw[sample.prompt])
    return {**row, "completion": sample.text, "reward": sample.reward}


def pair_row(source: Source, better: Sample, worse: Sample) -> dict:
    """A pair for preference losses and reward models."""
    row = _prompt_columns(source.raw[better.prompt])
    scores = {"score_chosen": better.reward, "score_rejected": worse.reward}
    return {**row, "chosen": better.text, "rejected": worse.text, **scores}


def trajectory_rows(
    source: Source, samples: Sequence[Sample]
) -> tuple[list[dict], list[Sample], dict[str, int]]:
    """(rows of trajectories, their samples, counts): completion, steps, reward, truncated, logprobs
    and `group`, the number of the prompt. A failed reward, an empty text, and a text that does not
    encode to the sampled ids give no row, and are counted."""
    rows, kept = [], []
    counts = dict(total=len(samples), kept=0, failed=0, empty=0, encoded_otherwise=0)
    for sample in samples:
        if np.isnan(sample.reward):
            counts["failed"] += 1
            continue
        if not sample.text.strip():
            counts["empty"] += 1
            continue
        row = {
            **_prompt_columns(source.raw[sample.prompt]),
            "completion": sample.text,
            "steps": lines_of(sample.text),
            "reward": sample.reward,
            "truncated": sample.truncated,
            "logprobs": [min(x, 0.0) for x in sample.logprobs],
            "group": sample.prompt,
        }
        if _encoded(source, sample, row) is None:
            counts["encoded_otherwise"] += 1
            continue
        rows.append(row)
        kept.append(sample)
    counts["kept"] = len(rows)
    return rows, kept, counts


def _encoded(source: Source, sample: Sample, row: dict) -> Trajectory | None:
    """The row as training encodes it, its process scores 1 at every step's last token; None where
    that is not what was sampled, or where one token ends two steps."""
    probe = {k: v for k, v in row.items() if k not in ("completion", "logprobs")}
    probe["process_scores"] = [1.0] * len(row["steps"])
    try:
        records = load_rows([probe], "train", "trajectories")
        items, _ = encode_rows(
            records, source.policy.tokenizer, "trajectories", max_tokens=_NO_LIMIT
        )
    except InputError:  # a chat template that rewrites the text
        return None
    item = items[0]
    same = tuple(item.completion_ids.tolist()) == sample.ids and np.all(item.completion_mask > 0)
    prompt = source.prompts[sample.prompt].token_ids
    same = same and item.prompt_ids.tolist() == np.asarray(prompt).tolist()
    return item if same and np.sum(item.process_scores > 0) == len(row["steps"]) else None


# -- process scores --


def prefix_pass_rates(
    source: Source,
    samples: Sequence[Sample],
    rows: Sequence[dict],
    key: jax.Array,
    *,
    completions: int,
    rows_per_call: int = 512,
) -> list[list[float]]:
    """Of every step of every row the mean reward of `completions` samples that go on from its end;
    of the last step the row's own reward, as nothing follows it. Equal prefixes are asked once.

    `samples` and `rows` are those of `trajectory_rows`. A prefix whose rewards all failed has the
    pass rate of the row's outcome.
    """
    asked: dict[tuple, int] = {}  # (prompt, ids of the prefix) -> its number
    ends = []
    for sample, row in zip(samples, rows, strict=True):
        at = np.flatnonzero(_encoded(source, sample, row).process_scores)
        prefixes = [(sample.prompt, sample.ids[: end + 1]) for end in at[:-1]]
        ends.append(prefixes)
        for prefix in prefixes:
            asked.setdefault(prefix, len(asked))
    rates = _rates_of(source, list(asked), key, completions, rows_per_call)
    out = []
    for row, prefixes in zip(rows, ends, strict=True):
        found = [rates[asked[prefix]] for prefix in prefixes]
        own = float(row["reward"])
        out.append([own if np.isnan(rate) else rate for rate in found] + [own])
    return out


def _rates_of(source: Source, prefixes: list[tuple], key, completions: int, rows_per_call: int):
    """The mean reward of samples that go on from each prefix; NaN where all rewards failed."""
    if not prefixes:
        return []
    records = []
    for prompt, ids in prefixes:
        whole = source.prompts[prompt]
        with_prefix = np.concatenate([whole.token_ids, ids]).astype(np.int32)
        records.append(dataclasses.replace(whole, token_ids=with_prefix))
    length = max(len(record.token_ids) for record in records)
    check_length(length, source.sampling.max_response_tokens, source.policy.model)
    size, rates = min(max(rows_per_call // completions, 1), len(records)), []
    for start in range(0, len(records), size):
        numbers = list(range(start, min(start + size, len(records))))
        real = len(numbers)
        numbers += [numbers[-1]] * (size - real)
        prompts = Prompts.from_records([records[i] for i in numbers], length=length)
        # The response that is scored begins where the prompt ended: the prefix is part of it.
        starts = [len(source.prompts[prefixes[i][0]].token_ids) for i in numbers]
        prompts = dataclasses.replace(prompts, starts=np.array(starts, np.int32))
        _, report = sample_scored(
            source.actor, source.reward, prompts, jax.random.fold_in(key, start), source.sampling,
            n=completions,
        )  # fmt: skip
        scored = report.examples[: real * completions]
        values = [r["reward"] if r["status"] == "ok" else np.nan for r in scored]
        for group in np.asarray(values, np.float64).reshape(real, completions):
            known = group[~np.isnan(group)]
            rates.append(float(known.mean()) if known.size else float("nan"))
    return rates


def centred_scores(rows: Sequence[dict], rates: Sequence[Sequence[float]]) -> list[list[float]]:
    """pass rate of the prefix - mean reward of the prompt's rows, of every step: DQO's process
    scores (ALGORITHMS F5).

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
