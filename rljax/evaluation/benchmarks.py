"""Runs suites of `suites` on a saved policy: rows to prompts, samples, scores, metrics.

Scoring is apart from sampling: `score_items` takes responses from anywhere. Metrics are computed
from the records of `results.json` alone, so a stored file gives them again.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence

import jax

import rljax
from rljax import hub
from rljax.components import resolve
from rljax.config.declare import check_options, option_flags
from rljax.config.policy_options import EvaluateOptions
from rljax.data.rows.read import read_rows
from rljax.data.rows.sources import prompt_record
from rljax.errors import InputError
from rljax.evaluation.policy import SHARE, bootstrap, majority_at_k, pass_at_k
from rljax.evaluation.suite_rows import pinned
from rljax.evaluation.suites import Suite
from rljax.keys import root_key
from rljax.policies import Policy, SavedPolicy, load_policy, sample_all
from rljax.reasoning import Response
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import extraction_failed_fraction
from rljax.sampler.stop_strings import stop_tokens

HOME = "rljax.evaluation.suites"
_LONGEST_TRUTH = 20_000  # characters of a ground truth in results.json: tests of programs have more


def make_suite(text: str, data: str | None = None) -> Suite:
    """The suite that a text names, such as "gsm8k(shots=8)"; `data` replaces the spec of its rows.
    Raises InputError for a text that names no suite, for two specs of the rows, and for several
    samples at temperature 0."""
    component = resolve(f"{text}", HOME)
    if data is not None and "data" in component.signature.parameters:
        if "data" in component.options:
            fix = f"leave --data out, or data= of --suite={text}"
            raise InputError("--data", value=data, rule=f"{text} names its data already", fix=fix)
        component = resolve(_with_data(text, data), HOME)
    suite = component()
    if not isinstance(suite, Suite):
        fix = "return rljax.evaluation.suites.Suite(data=..., record=..., reward=..., columns=...)"
        raise InputError(f"{text} returned no suite", value=suite, fix=fix)
    if suite.samples < 1 or (suite.temperature == 0 and suite.samples > 1):
        rule = "at least 1, and 1 at temperature 0: the greedy response is always the same"
        fix = "--samples=1, or --temperature=0.6 for several"
        raise InputError(f"{text}: samples", value=suite.samples, rule=rule, fix=fix)
    return (
        suite
        if data is None or "data" in component.options
        else dataclasses.replace(suite, data=data)
    )


def _with_data(text: str, data: str) -> str:
    text = text.strip()
    head = text[:-1] if text.endswith(")") else f"{text}("
    comma = "" if head.endswith("(") else ", "
    return f"{head}{comma}data={data!r})"


def suite_records(suite: Suite, prompts: int | None = None) -> list[dict]:
    """Prompt records of the first rows of a suite, as rljax.data.rows.sources makes them. Raises
    InputError that names the row, the column and the columns that the suite reads."""
    dataset = read_rows(suite.data, suite.split)
    fix = f"rows have the columns {', '.join(suite.columns)}"
    records = []
    for index, row in enumerate(dataset.rows):
        if prompts is not None and len(records) == prompts:
            break
        try:
            fields = suite.record(row)
        except InputError as error:
            problem, hint = error.parts
            raise InputError(f"{dataset.location(index)} {problem}", fix=f"{fix}; {hint}") from None
        if fields is None:
            continue
        record = prompt_record(fields, index, dataset, True)
        if missing := [name for name in suite.by if name not in record["extra_info"]]:
            record["extra_info"] |= dict.fromkeys(missing, "")
        records.append(record)
    if not records:
        raise InputError(
            f"{dataset.source} has no row for this suite", value=len(dataset.rows), fix=fix
        )
    return records


def as_text(record: dict) -> dict:
    """The record with its messages as plain text, for a tokenizer without a chat template."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return record
    return {**record, "prompt": "\n\n".join(message["content"] for message in prompt)}


def items_of(suite: Suite, records: Sequence[dict]) -> list[dict]:
    """The records of results.json, with empty lists of samples."""
    return [
        {
            "index": record["index"],
            "ground_truth": record["ground_truth"],
            "by": {name: str(record["extra_info"][name]) for name in suite.by},
            "samples": [],
        }
        for record in records
    ]


def score_items(suite: Suite, items: Sequence[dict], *, workers: int = 2, memory_gb: float = 8.0):
    """Scores every sample of the items in place: {"response", ...} gets "score", "parts" and, if
    the reward failed (score None), "error". The reward runs in `workers` processes of at most
    `memory_gb` each. Raises InputError if they cannot start."""
    samples = [(item, sample) for item in items for sample in item["samples"]]
    inputs = [
        {
            "response": sample["response"],
            "ground_truth": item["ground_truth"],
            "prompt": item.get("prompt", ""),
            "data_source": suite.data,
            "extra_info": item["by"],
            "num_tokens": sample.get("tokens", 0),
            "finish_reason": sample.get("finish_reason", "stop"),
        }
        for item, sample in samples
    ]
    pool_options = dict(workers=workers, timeout_s=suite.timeout_s, memory_gb=memory_gb)
    with contextlib.closing(RewardPool(suite.reward, **pool_options)) as pool:
        scores = pool.score(inputs)
    for (_, sample), score in zip(samples, scores, strict=True):
        sample["score"] = None if math.isnan(score.value) else float(score.value)
        sample["parts"] = {name: float(value) for name, value in score.parts.items()}
        if score.status != "ok":
            sample["error"] = score.message or score.status


def suite_metrics(
    items: Sequence[dict],
    ks: Sequence[int],
    *,
    parts: Mapping[str, str] | None = None,
    answer: Callable[[str], str | None] | None = None,
) -> dict:
    """Metrics of a suite, each with a 95 % bootstrap interval over prompts: avg@n; pass@k
    (unbiased, Chen et al. 2021) for each k of `ks`; maj@k, if `answer` extracts the text that is
    voted on; the `parts`; and avg@n of every value of the columns in "by". Without intervals:
    truncated_fraction, extraction_failed_fraction, failed_rewards, response_tokens.

    A sample whose reward failed is left out; a prompt with fewer than k others has no value at k.
    Raises InputError if every reward failed.
    """
    n = max(len(item["samples"]) for item in items)
    scored = [[s for s in item["samples"] if s["score"] is not None] for item in items]
    right = [[s["score"] >= 1.0 for s in row] for row in scored]
    average = [sum(row) / len(row) if row else math.nan for row in right]
    if all(map(math.isnan, average)):
        errors = [s["error"] for item in items for s in item["samples"]]
        fix = "make the reward of the suite work on one row and one response"
        raise InputError("every reward of the suite failed", value=errors[0], fix=fix)
    out = {f"avg@{n}": bootstrap(average, within=SHARE)}
    for k in sorted(set(ks)):
        values = [pass_at_k(len(r), sum(r), k) if len(r) >= k else math.nan for r in right]
        out[f"pass@{k}"] = bootstrap(values, within=SHARE)
        if answer is not None:
            votes = [[answer(s["response"]) for s in row] for row in scored]
            pairs = zip(votes, right, strict=True)
            values = [majority_at_k(v, r, k) if len(r) >= k else math.nan for v, r in pairs]
            out[f"maj@{k}"] = bootstrap(values, within=SHARE)
    for name, weight in (parts or {}).items():
        out[name] = _part(scored, name, weight)
    groups: dict[str, list[float]] = {}
    for item, value in zip(items, average, strict=True):
        for column, label in item["by"].items():
            if not label:  # the row does not say
                continue
            groups.setdefault(f"avg@{n}/{column}={label}", []).append(value)
    for name, values in sorted(groups.items()):
        if not all(map(math.isnan, values)):
            out[name] = bootstrap(values, within=SHARE)
    return out | _health(items)


def _part(scored: Sequence[Sequence[dict]], name: str, weight: str) -> dict:
    """The mean of a part, responses weighed by another; the interval over prompts."""
    if any(
        name not in s["parts"] or (weight and weight not in s["parts"]) for s in sum(scored, [])
    ):
        names = sorted(next(s for s in sum(scored, []))["parts"])
        fix = "return it in the dict of the suite's reward, or name one of these"
        raise InputError(f"the reward has no part {name!r} or {weight!r}", value=names, fix=fix)
    weights = [[s["parts"][weight] if weight else 1.0 for s in row] for row in scored]
    sums = [
        sum(w * s["parts"][name] for w, s in zip(ws, row, strict=True))
        for ws, row in zip(weights, scored, strict=True)
    ]
    totals = [sum(ws) for ws in weights]
    values = [
        total and s / total if total else math.nan for s, total in zip(sums, totals, strict=True)
    ]
    is_share = all(0 <= s["parts"][name] <= 1 for row in scored for s in row)
    return bootstrap(values, weights=totals, within=SHARE if is_share else None)


def _health(items: Sequence[dict]) -> dict:
    samples = [sample for item in items for sample in item["samples"]]
    out = {
        "truncated_fraction": sum(s["truncated"] for s in samples) / len(samples),
        "failed_rewards": sum(s["score"] is None for s in samples),
        "response_tokens": bootstrap(
            [sum(s["tokens"] for s in i["samples"]) / len(i["samples"]) for i in items]
        ),
    }
    failed = extraction_failed_fraction(sample["parts"] for sample in samples)
    return out if failed is None else {**out, "extraction_failed_fraction": failed}


# -- a policy --


def evaluate_suites(options: EvaluateOptions) -> dict:
    """Runs every suite of `options.suites` on the saved policy. Returns, as JSON, per suite its
    settings, its metrics and the record of every prompt, and what is needed to run it again. Raises
    InputError for bad options or rows before the model is loaded."""
    check_options(options)
    started = time.perf_counter()
    # All rows are read, and their errors seen, before the model is loaded.
    suites = [_settled(make_suite(text, options.data), text, options) for text in options.suites]
    rows = [suite_records(suite, options.prompts) for suite in suites]
    saved = load_policy(options.checkpoint, options.step, trust_code=options.trust_code)
    results = [
        {"suite": text, **_run(suite, records, saved, options)}
        for text, suite, records in zip(options.suites, suites, rows, strict=True)
    ]
    values = ((field, getattr(options, field.name)) for field in dataclasses.fields(options))
    changed = {field.name: x for field, x in values if x not in (field.default, None)}
    flags = shlex.join(option_flags(EvaluateOptions, changed))
    return {
        "checkpoint": hub.pinned(options.checkpoint),
        "step": saved.step,
        "command": f"rljax evaluate {flags}",
        "versions": {"rljax": rljax.__version__, "jax": importlib.metadata.version("jax")},
        "tokenizer_sha256": saved.tokenizer.fingerprint(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "wall_s": time.perf_counter() - started,
        "metrics": {
            f"{result['suite']}/{name}": value
            for result in results
            for name, value in result["metrics"].items()
        },
        "suites": results,
    }


def _settled(suite: Suite, text: str, options: EvaluateOptions) -> Suite:
    """The suite with the numbers that the flags set, and its data at a commit."""
    names = ("samples", "temperature", "max_response_tokens")
    changes = {name: x for name in names if (x := getattr(options, name)) is not None}
    suite = dataclasses.replace(suite, **changes)
    if options.samples == 0:
        suite = dataclasses.replace(suite, samples=1, temperature=0.0)
    if suite.samples > 1 and suite.temperature == 0:
        rule = f"{text} is greedy, and each would be the same"
        fix = "set --temperature, such as --temperature=0.6"
        raise InputError("--samples", value=suite.samples, rule=rule, fix=fix)
    if too_large := [k for k in options.ks if k > suite.samples]:
        fix = f"--samples={max(too_large)}, or smaller numbers in --k"
        raise InputError(
            "--k", value=too_large, rule=f"{text} draws {suite.samples} samples", fix=fix
        )
    return dataclasses.replace(suite, data=pinned(suite.data))


def _run(suite: Suite, records: list[dict], saved: SavedPolicy, options: EvaluateOptions) -> dict:
    chat = saved.tokenizer.has_chat_template
    inputs = records if chat else [as_text(record) for record in records]
    limit = options.max_prompt_tokens or saved.model.config.max_tokens
    prompts, counts = saved.encode(inputs, max_tokens=limit, overlong="error")
    policy = _sampling(suite, saved.ready(prompts, max_response_tokens=suite.max_response_tokens))
    samples = sample_all(policy, prompts, suite.samples, key=root_key(options.seed))
    items = items_of(suite, records)
    for item, prompt in zip(items, prompts, strict=True):
        item["prompt"] = prompt.prompt_text
    for sample in samples:
        fields = dict(response=_before(sample.text, suite.stop), tokens=len(sample.ids))
        fields |= dict(finish_reason=sample.finish_reason, truncated=sample.cut_off)
        items[sample.prompt]["samples"].append(fields)
    reward = saved.config.reward
    score_items(suite, items, workers=reward.workers, memory_gb=reward.memory_gb)
    sampling = policy.sampling
    settings = dict(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    return {
        "data": suite.data,
        "split": suite.split,
        "prompts": counts["kept"],
        "prompts_sha256": _digest(prompt.prompt_text for prompt in prompts),
        "template": "chat" if chat and not isinstance(records[0]["prompt"], str) else "text",
        "reward": suite.reward,
        "samples": suite.samples,
        **settings,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop_strings),
        "max_response_tokens": sampling.max_response_tokens,
        "seed": options.seed,
        "metrics": suite_metrics(
            items,
            [k for k in options.ks_of(suite.samples) if k > 1],
            parts=suite.parts,
            answer=suite.answer,
        ),
        "items": [_shortened(item) for item in items],
    }


def _sampling(suite: Suite, policy: Policy) -> Policy:
    """The policy as the suite samples, whatever the run sampled with; its own stop strings stay."""
    sampling = policy.sampling
    stop_ids = (*sampling.stop_ids, *stop_tokens(policy.tokenizer, suite.stop))
    draws = dict(temperature=suite.temperature, top_p=suite.top_p, top_k=0, min_p=0.0)
    texts = tuple(dict.fromkeys((*sampling.stop_strings, *suite.stop)))
    stops = dict(stop_strings=texts, stop_ids=tuple(dict.fromkeys(stop_ids)))
    sampling = dataclasses.replace(sampling, **draws, **stops)
    return dataclasses.replace(
        policy, sampling=sampling.greedy() if not suite.temperature else sampling
    )


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings, which does not belong to a response."""
    head = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    return Response(head, _before(text.answer, stops)) if isinstance(text, Response) else head


def _digest(texts) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps(text).encode())
    return digest.hexdigest()


def _shortened(item: dict) -> dict:
    truth = item["ground_truth"]
    if len(truth) <= _LONGEST_TRUTH:
        return item
    return {**item, "ground_truth": f"sha256 {_digest([truth])}"}
