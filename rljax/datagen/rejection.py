"""Rejection sampling: a saved policy's own best completions as a file that SFT reads (RAFT, arXiv
2304.06767; best-of-n): selection, the files, and the loop sample, select, SFT.
"""

import collections
import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from rljax import hub
from rljax.config import Config, fingerprints, from_dict
from rljax.config.declare import check_options
from rljax.config.policy_options import SELECTED, RejectionOptions
from rljax.data.images.columns import require_text_alone
from rljax.data.online.default_rewards import reads_reference, training_text
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.columns import rows_of
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.datagen.trajectories import example_row, pair_row, trajectories_of
from rljax.errors import InputError
from rljax.evaluation.saved import require_named
from rljax.files import file_sha256, read_json_object, write_json, write_rows
from rljax.keys import stream
from rljax.policies import Completion, SavedPolicy, load_policy, sample_all, warn_of_failed_rewards
from rljax.report.page import write_page
from rljax.report.samples import of_prompts
from rljax.runs.folder import exported_steps
from rljax.tracking.charts import escaped
from rljax.training import train
from rljax.training.run_folder import RunFolder

LOG = logging.getLogger("rljax")
Method = Literal["best", "top_k", "threshold"]
METHODS = ("best", "top_k", "threshold")
REPORTED_PROMPTS = 20  # on the page beside the file

# -- selection: the rewards and texts of one prompt's samples --


def _candidates(rewards: Sequence[float], eligible: Sequence[bool] | None) -> list[int]:
    """Returns the eligible samples whose reward is known, the best first; equal rewards keep their
    order."""
    eligible = [True] * len(rewards) if eligible is None else eligible
    if len(eligible) != len(rewards):
        rule = f"one per reward: {len(rewards)}"
        fix = "give one bool for each reward, or None: all are eligible"
        raise InputError("eligible", value=len(eligible), rule=rule, fix=fix)
    live = [i for i, r in enumerate(rewards) if eligible[i] and not math.isnan(r)]
    return sorted(live, key=lambda i: (-rewards[i], i))


def select(
    rewards: Sequence[float],
    texts: Sequence[str],
    *,
    method: Method = "best",
    top_k: int = 1,
    min_reward: float | None = None,
    per_prompt: int = 0,
    dedup: bool = True,
    eligible: Sequence[bool] | None = None,
) -> list[int]:
    """Returns the indices of the samples of one prompt that are kept, the best first (RAFT, arXiv
    2304.06767).

    "best" keeps the first maximum, "top_k" the `top_k` best, "threshold" all. Whatever the method,
    a reward must exceed `min_reward` (strictly; None = any will do), a NaN is a reward that failed,
    `dedup` keeps one of equal texts, and at most `per_prompt` are kept (0 = no cap). `eligible`
    marks the samples that may be kept; None = all. Raises InputError for another method,
    "threshold" without `min_reward`, `top_k` below 1, `per_prompt` below 0, and unless there is one
    text per reward.
    """
    if method not in METHODS:
        raise InputError("select(method)", value=method, fix=f"write one of {', '.join(METHODS)}")
    if method == "threshold" and min_reward is None:
        rule = "min_reward is the bound"
        fix = "give min_reward, the bound, such as --min_reward=0.5"
        raise InputError("select(method='threshold')", value=None, rule=rule, fix=fix)
    for name, value, least in (("top_k", top_k, 1), ("per_prompt", per_prompt, 0)):
        if value < least:
            raise InputError(f"select({name})", value=value, fix=f"set {name} to {least} or more")
    if len(texts) != len(rewards):
        rule = f"one per reward: {len(rewards)}"
        fix = "give the texts in the order of the rewards, one each"
        raise InputError("select(texts)", value=len(texts), rule=rule, fix=fix)
    selected, seen_texts = [], set()
    for i in _candidates(rewards, eligible):
        if min_reward is not None and not rewards[i] > min_reward:
            continue
        if dedup and texts[i] in seen_texts:
            continue
        seen_texts.add(texts[i])
        selected.append(i)
    limit = {"best": 1, "top_k": top_k, "threshold": len(selected)}[method]
    return selected[: min(limit, per_prompt) if per_prompt else limit]


def best_and_worst(
    rewards: Sequence[float], eligible: Sequence[bool] | None = None
) -> tuple[int, int] | None:
    """Returns (index of the first maximum, index of the first minimum) of one prompt's rewards;
    None if all are equal, so that nothing is preferred."""
    order = _candidates(rewards, eligible)
    if not order or rewards[order[0]] == rewards[order[-1]]:
        return None
    lowest = rewards[order[-1]]
    return order[0], next(i for i in order if rewards[i] == lowest)


def best_of_n_kl(n: int) -> float:
    """Returns log n - (n - 1) / n: an upper bound on KL(best-of-n || the policy sampled from), in
    nats.
    Raises InputError for n below 1."""
    if n < 1:
        fix = "give the number of samples that the best is taken of, 1 or more"
        raise InputError("best_of_n_kl(n)", value=n, fix=fix)
    return math.log(n) - (n - 1) / n


def selection_metrics(
    rewards: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    kept: Sequence[Sequence[int]],
    truncated: Sequence[Sequence[bool]],
    *,
    method: Method,
) -> dict[str, float]:
    """Returns metrics of a selection; lists are [prompts][samples], `kept` the indices that
    `select` gave.

    Means run over samples whose reward is known. `kl_bound` is there for "best" alone, the only
    selection that it bounds. Raises InputError without any sample.
    """
    known_rewards = [r for row in rewards for r in row if not math.isnan(r)]
    chosen = [row[i] for row, picks in zip(rewards, kept, strict=True) for i in picks]
    samples = sum(len(row) for row in rewards)
    prompts = len(rewards)
    if not samples:
        raise InputError("selection_metrics: there are no samples", fix="sample some prompts")
    metrics = {
        "mean_reward_all": sum(known_rewards) / len(known_rewards) if known_rewards else math.nan,
        "mean_reward_selected": sum(chosen) / len(chosen) if chosen else math.nan,
        "acceptance_rate": len(chosen) / samples,
        "prompts_without_any": sum(not picks for picks in kept) / prompts,
        "unique_fraction": sum(len(set(row)) for row in texts) / samples,
        "truncated_fraction": sum(sum(map(bool, row)) for row in truncated) / samples,
        "failed_rewards": float(samples - len(known_rewards)),
    }
    if method == "best":
        metrics["kl_bound"] = best_of_n_kl(max(len(row) for row in rewards))
    return metrics


# -- sampling and files --


def rejection_sample(
    options: RejectionOptions, *, test_fraction: float | None = None, config: Config | None = None
) -> dict:
    """Samples, scores, selects and writes the files; returns the content of the .meta.json file.

    `test_fraction` is the share of the data that was held out; None: that of the run's config.
    `config` has the settings of sampling and rewards in place of those of the checkpoint. Raises
    InputError if nothing at all is selected.
    """
    check_options(options)
    saved = load_policy(options.checkpoint, options.step, trust_code=options.trust_code)
    if config is not None:
        saved = dataclasses.replace(saved, config=config, generation={})
    if options.reward_model:
        reward = dataclasses.replace(saved.config.reward, model=options.reward_model)
        saved = dataclasses.replace(saved, config=dataclasses.replace(saved.config, reward=reward))
    data, reward_name = _data_and_reward(options, saved)
    held_out = held_out_fraction(saved.config, data) if test_fraction is None else test_fraction
    records = _load_records(options, data, reward_name, held_out)
    prompts, _ = saved.encode(records, max_tokens=options.max_prompt_tokens)
    policy = saved.ready(
        prompts, temperature=options.temperature, max_response_tokens=options.max_response_tokens
    )
    key = jax.random.key(options.seed)
    trajectories, counts = [], {}
    with contextlib.closing(saved.player(reward_name)) as player:
        draw = stream(key, "samples")
        samples = sample_all(policy, prompts, options.samples, player, key=draw)
        warn_of_failed_rewards(samples, prompts)
        groups = [samples[i : i + options.samples] for i in range(0, len(samples), options.samples)]
        selected, metrics = _select(groups, options)
        if options.trajectories:
            rates, count = stream(key, "pass rates"), options.process_samples
            trajectories, counts = trajectories_of(
                policy, prompts, player, samples, rates, process_samples=count
            )
    groups_and_picks = zip(groups, selected, strict=True)
    picked = [group[i] for group, picks in groups_and_picks for i in picks]
    examples = [example_row(prompts, sample) for sample in picked]
    if not examples:
        raise _none_selected(samples, options)
    files = {"examples": write_rows(options.out, examples)}
    if options.pairs:
        pairs = _pair_rows(prompts, groups, options)
        if not pairs:
            LOG.warning(
                "%s is empty: no prompt has two samples of different rewards that may be kept. "
                "Fix: more --samples, or other prompts",
                options.pairs,
            )
        files["pairs"] = write_rows(options.pairs, pairs)
    if options.trajectories:
        files["trajectories"] = write_rows(options.trajectories, trajectories)
    meta = {
        "model": options.checkpoint,
        "step": saved.step,
        "seed": options.seed,
        "data": data,
        "prompts_sha256": _records_sha256(records),
        "reward": reward_name,
        "temperature": policy.sampling.temperature,
        "max_response_tokens": policy.sampling.max_response_tokens,
        "prompts": len(prompts),
        "options": dataclasses.asdict(options),
        "metrics": metrics,
        "trajectories": counts,
        "files": files,
        "report": str(_write_report(options.out, prompts, groups, metrics)),
    }
    write_json(meta_path(options.out), meta)
    return meta


def _load_records(
    options: RejectionOptions, data: str, reward: str, test_fraction: float
) -> list[dict]:
    need = reads_reference([reward])
    with rows_of("--data", "--data=FILE of prompts with answers"):
        records = load_prompts(
            data, options.split, need_ground_truth=need, test_fraction=test_fraction
        )
    records = records[: options.prompts]
    require_text_alone(records, "this command")
    return records


def _records_sha256(records: Sequence[dict]) -> str:
    return hashlib.sha256(json.dumps(records, default=str).encode()).hexdigest()


def _write_report(
    out: str,
    prompts: Sequence[PromptRecord],
    groups: Sequence[Sequence[Completion]],
    metrics: dict[str, float],
) -> Path:
    """Writes a page beside the file, and returns its path. It shows the best sample, one near the
    mean and the worst of the prompts whose rewards differ most: a look at them shows whether the
    reward is sane."""
    samples = [
        {
            "prompt": prompt.prompt_text,
            "ground_truth": prompt.ground_truth,
            "step": None,
            "response": sample.text,
            "reward": float(sample.reward),
        }
        for prompt, group in zip(prompts, groups, strict=True)
        for sample in group
    ]
    title = f"Samples of {Path(out).name}"
    metric_spans = "".join(
        f"<span>{escaped(name.replace('_', ' '))} <b>{value:.4g}</b></span>"
        for name, value in metrics.items()
    )
    sections = of_prompts(samples, REPORTED_PROMPTS)
    sections = sections or "<p>All samples of a prompt score alike.</p>"
    body = (
        f'<h1>{escaped(title)}</h1><p class="facts">{metric_spans}</p><section>'
        f"<h2>Best, mean and worst of a prompt</h2>{sections}</section>"
    )
    return write_page(Path(out).with_suffix(".report.html"), title, body)


def _data_and_reward(options: RejectionOptions, policy: SavedPolicy) -> tuple[str, str]:
    """Returns (data, reward), from the options or from the run."""
    data, reward = options.data, options.reward
    if options.reward_model and not reward:
        reward = "reward_model()"
    if policy.step is not None:
        data = data or policy.config.data.train
        # "": the score of reward.model is the only reward.
        reward = reward or training_text(policy.config) or "reward_model()"
    require_named(options.checkpoint, "sample on", data=data, reward=reward)
    return data, reward


def meta_path(out: str) -> Path:
    """Returns the path of the report of a file: FILE.jsonl -> FILE.meta.json."""
    return Path(out).with_suffix(".meta.json")


def _eligible(group: list[Completion], options: RejectionOptions) -> list[bool]:
    """Returns which samples may be kept: those with an end, or all with --keep_truncated."""
    return [options.keep_truncated or not s.truncated for s in group]


def _select(groups: list[list[Completion]], options: RejectionOptions) -> tuple[list, dict]:
    rewards = [[s.reward for s in group] for group in groups]
    texts = [[s.text for s in group] for group in groups]
    names = ("top_k", "min_reward", "per_prompt", "dedup")
    selection = {"method": options.select, **{name: getattr(options, name) for name in names}}
    selected = []
    for r, t, group in zip(rewards, texts, groups, strict=True):
        # SFT cannot learn an empty text: the best of the others is taken.
        eligible = zip(_eligible(group, options), t, strict=True)
        has_text = [may_be_kept and bool(text.strip()) for may_be_kept, text in eligible]
        selected.append(select(r, t, **selection, eligible=has_text))
    truncated = [[s.truncated for s in group] for group in groups]
    return selected, selection_metrics(rewards, texts, selected, truncated, method=options.select)


def _none_selected(samples: Sequence[Completion], options: RejectionOptions) -> InputError:
    """Returns the error for samples of which none was selected: why each was not, and what helps
    against the reasons, the most frequent first."""
    cut = "without an end (the limit is --max_response_tokens)"
    empty, failed = "without text", "without a reward, which failed"
    low = f"with a reward of at most --min_reward={options.min_reward}"
    reasons = collections.Counter(
        cut
        if sample.truncated and not options.keep_truncated
        else empty
        if not sample.text.strip()
        else failed
        if math.isnan(sample.reward)
        else low
        for sample in samples
    )
    rewards = [sample.reward for sample in samples if not math.isnan(sample.reward)]
    highest = f"; the highest reward is {max(rewards):.3g}" if rewards else ""
    fixes = {
        cut: "a larger --max_response_tokens, or --keep_truncated",
        empty: "a policy that answers these prompts, or another --temperature",
        failed: "a --reward that can score these texts",
        low: "more --samples, a lower --min_reward, or a policy that sometimes succeeds",
    }
    return InputError(
        f"none of {len(samples)} samples was selected",
        value=", ".join(f"{n} {reason}" for reason, n in reasons.most_common()) + highest,
        fix="; ".join(fixes[reason] for reason, _ in reasons.most_common()),
    )


def _pair_rows(
    prompts: Sequence[PromptRecord], groups: list[list[Completion]], options: RejectionOptions
) -> list[dict]:
    rows = []
    for group in groups:
        pair = best_and_worst([s.reward for s in group], _eligible(group, options))
        if pair is not None:
            rows.append(pair_row(prompts, group[pair[0]], group[pair[1]]))
    return rows


# -- sampling and SFT in turns --


def raft(config: Config, options: RejectionOptions, folder: str | Path) -> list[dict]:
    """Repeats `options.iterations` times: samples from the policy, selects, and runs
    `options.epochs` of SFT on the selection; the next iteration samples from the policy that came
    out (RAFT, arXiv 2304.06767). Returns the meta of every iteration.

    `config` says how SFT trains (optimizer, offline.*); its dataflow, model, data, steps and
    run_dir are set here. `options` are those of the first iteration; iteration i is in FOLDER/i:
    selected.jsonl, selected.meta.json, the files of --pairs and --trajectories, and the run with
    its policy/. The same call goes on where an interrupted one stopped: at a checkpoint of the run
    of an iteration, or behind its samples. Raises InputError for fewer than 1 iteration or epoch,
    for a step other than "latest", and for a folder that holds iterations of other settings, of
    other prompts or of another first policy.
    """
    if options.iterations < 1 or options.epochs < 1:
        value = (options.iterations, options.epochs)
        fix = "--iterations=1 --epochs=1, or more"
        raise InputError("raft", value=value, rule="iterations and epochs >= 1", fix=fix)
    if options.step != "latest":
        rule = "latest: SFT goes on from its end"
        raise InputError("raft(step)", value=options.step, rule=rule, fix="leave --step out")
    saved = load_policy(options.checkpoint, trust_code=options.trust_code)
    data, reward = _data_and_reward(options, saved)
    checkpoint, metas, saved_config = hub.model_folder(options.checkpoint), [], saved.config
    model = _model_folder(checkpoint, saved.step)
    sampler, tokens = saved_config.sampler, saved_config.data.max_prompt_tokens
    test_fraction = held_out_fraction(saved_config, data)
    records = _load_records(options, data, reward, test_fraction)
    # Of the files that options only name, and that may change before the same call goes on.
    inputs = {"prompts_sha256": _records_sha256(records), "weights_sha256": _weights_sha256(model)}
    for i in range(options.iterations):
        iteration_folder = Path(folder) / str(i)
        files = dict(checkpoint=str(checkpoint), out=str(iteration_folder / SELECTED))
        for name in ("pairs", "trajectories"):
            if path := getattr(options, name):
                files[name] = str(iteration_folder / Path(path).name)
        sampling = dict(
            temperature=options.temperature or sampler.temperature,
            max_prompt_tokens=options.max_prompt_tokens or tokens,
            max_response_tokens=options.max_response_tokens or sampler.max_response_tokens,
        )
        changes = dict(data=data, reward=reward, seed=options.seed + i, **files, **sampling)
        # The folder of an iteration is a model's, which says nothing of how the run samples.
        run_config = saved_config if i and saved.step is not None else None
        call = dataclasses.replace(options, iterations=0, **changes)
        meta = _sampled_before(call, inputs, first=not i)
        if meta is None:
            meta = rejection_sample(call, test_fraction=test_fraction, config=run_config) | inputs
            write_json(meta_path(call.out), meta)
        sft, examples = copy.deepcopy(config), meta["files"]["examples"]
        sft.dataflow, sft.model = "sft", str(model)
        sft.run_dir, sft.export = str(iteration_folder), True
        sft.data.train, sft.data.sources = call.out, ()
        sft.data.test_fraction = 0.0
        sft.sft.steps = 0
        sft.steps = math.ceil(examples["rows"] * options.epochs / sft.offline.examples_per_step)
        _train_to_the_end(sft)
        metas.append(meta)
        checkpoint = model = iteration_folder / "policy"
    return metas


def _weights_sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def _sampled_before(
    options: RejectionOptions, inputs: dict[str, str], *, first: bool
) -> dict | None:
    """Returns the meta of an iteration whose files are there and whole, else None. Raises
    InputError if they were made with other options or `inputs`. After the `first` iteration the
    checkpoint is the policy of the one before."""
    path = meta_path(options.out)
    if not path.is_file():
        return None
    meta = read_json_object(path)
    saved, now = meta.get("options", {}), dataclasses.asdict(options)
    may_change = ("trust_code", "compilation_cache", *(() if first else ("checkpoint",)))
    changes = []
    for name in (name for name in now if name not in may_change):
        values = (now[name], saved.get(name))
        if name in ("out", "pairs", "trajectories"):  # the folder may have moved
            values = tuple(Path(value or "").name for value in values)
        if values[0] != values[1]:
            changes.append("--{}={}, which was {}".format(name, *values))
    for name, flag in (("prompts_sha256", "--data"), ("weights_sha256", "--checkpoint")):
        if meta.get(name, inputs[name]) != inputs[name]:
            changes.append(f"what {flag} names has changed")
    _refuse_other_settings(path.parent, changes)
    if "examples" not in meta.get("files", {}):
        return None
    for file in meta["files"].values():
        written = path.parent / Path(file["file"]).name
        if not written.is_file() or file_sha256(written) != file["sha256"]:
            return None
    return meta


def _train_to_the_end(config: Config) -> None:
    """Trains, or goes on, unless the run has ended. Raises InputError for a run of other settings,
    and for one that stops before its end."""
    folder = Path(config.run_dir)
    if (folder / "policy" / "config.json").is_file() and RunFolder(folder).is_wrapped_up():
        path = folder / "config.json"
        saved = fingerprints(from_dict(read_json_object(path), str(path)))
        # The folder may have moved: these are files in it.
        may_change = ("data.train", "model", *config.checkpoint.allow_changed)
        names = [k for k, v in fingerprints(config).items() if saved.get(k) != v]
        _refuse_other_settings(folder, [name for name in names if name not in may_change])
        return
    # A run that has ended without its policy is wrapped up again, not refused.
    (folder / "report.html").unlink(missing_ok=True)
    status = train(config).summary["status"]
    if status != "finished":
        raise InputError(f"{folder}: {status}", fix="the same command goes on")


def _refuse_other_settings(folder: Path, changes: Sequence[str]) -> None:
    if changes:
        raise InputError(
            f"{folder} holds an iteration of RAFT with other settings",
            value="; ".join(changes),
            rule="the same command goes on with it",
            fix="restore them, or name another --out",
        )


def _model_folder(checkpoint: Path, step: int | None) -> Path:
    """Returns the Hugging Face folder of a checkpoint: a run's exported policy, or the folder
    itself. Raises InputError for a run without one, and for one whose newest checkpoint, `step`,
    has other weights than its policy."""
    exported = checkpoint / "policy"
    folder = exported if (exported / "config.json").is_file() else checkpoint
    if "model_type" not in read_json_object(folder / "config.json"):
        fix = "finish the run with export=True, or give a Hugging Face folder"
        raise InputError(f"{checkpoint} has no exported policy to train from", fix=fix)
    path = checkpoint / "summary.json"
    summary = read_json_object(path) if step is not None and path.is_file() else {}
    exported = (exported_steps(summary) or {}).get("policy")
    if exported not in (None, step):
        raise InputError(
            f"{folder} is not of the newest checkpoint of {checkpoint}",
            value=f"the weights of step {exported}, and the checkpoint of step {step}",
            rule="SFT goes on from the policy that samples",
            fix="let the run finish with export=True: the command that trains it goes on; or "
            f"sample from the older weights, too: --checkpoint={folder}, with --data and --reward",
        )
    return folder
