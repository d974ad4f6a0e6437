"""Rejection sampling: a saved policy's own best completions as a file that SFT reads (RAFT, arXiv
2304.06767; best-of-n; ALGORITHMS A3).

What lives here: the options of launchers/rejection_sample.py, the files, and the loop sample ->
select -> SFT. What does not: which samples are kept (rljax.datagen.selection), sampling
(rljax.datagen.trajectories).
"""

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path

import jax

from rljax.config import Config, is_path
from rljax.data.online.default_rewards import reward_text
from rljax.datagen.selection import METHODS, Method, best_and_worst, select, selection_metrics
from rljax.datagen.trajectories import (
    Sample,
    Source,
    centred_scores,
    draw,
    example_row,
    open_source,
    pair_row,
    prefix_pass_rates,
    trajectory_rows,
)
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy, load_policy
from rljax.train import train


@dataclasses.dataclass(frozen=True)
class RejectionOptions:
    """The flags of launchers/rejection_sample.py. None: as the run's config.json says."""

    checkpoint: str
    out: str  # .jsonl of worked examples; FILE.meta.json beside it says where they come from
    step: str = "latest"  # of a run: latest | best | a number
    data: str | None = None
    split: str = "train"
    reward: str | None = None
    samples: int = 8  # per prompt
    prompts: int | None = None  # the first so many; None = all
    temperature: float | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    select: Method = "best"
    top_k: int = 1
    min_reward: float | None = None  # strict
    per_prompt: int = 0  # 0 = no cap
    dedup: bool = True
    keep_truncated: bool = False
    pairs: str = ""  # .jsonl of (best, worst) of every prompt without a tie
    trajectories: str = ""  # .jsonl of every sample with reward and log-probs
    process_samples: int = 0  # completions per prefix for process scores; 0 = none
    seed: int = 0


def check_options(options: RejectionOptions) -> None:
    """Every problem of the flags at once. Raises InputError."""
    problems = []

    def check(ok: bool, flag: str, rule: str):
        if not ok:
            problems.append(f"--{flag}={vars(options)[flag]}: {rule}")

    check(options.checkpoint != "", "checkpoint", "a run folder or a Hugging Face folder")
    check(options.out.endswith(".jsonl"), "out", "the name of a .jsonl file")
    for flag in ("pairs", "trajectories"):
        value = vars(options)[flag]
        check(not value or value.endswith(".jsonl"), flag, "the name of a .jsonl file")
    files = [f for f in (options.out, options.pairs, options.trajectories) if f]
    check(len(set(files)) == len(files), "out", "another file than --pairs and --trajectories")
    check(options.samples >= 1, "samples", "must be >= 1")
    check(options.select in METHODS, "select", f"one of {', '.join(METHODS)}")
    bounded = options.select != "threshold" or options.min_reward is not None
    check(bounded, "min_reward", "--select=threshold needs the bound")
    check(1 <= options.top_k <= max(options.samples, 1), "top_k", "between 1 and --samples")
    check(options.per_prompt >= 0, "per_prompt", "must be >= 0; 0 = no cap")
    check(options.process_samples >= 0, "process_samples", "must be >= 0; 0 = none")
    wanted = not options.process_samples or bool(options.trajectories)
    check(wanted, "process_samples", "process scores are columns of --trajectories")
    for flag in ("prompts", "max_prompt_tokens", "max_response_tokens"):
        value = vars(options)[flag]
        check(value is None or 1 <= value < 2**31, flag, "must be >= 1")
    temperature = options.temperature
    fits = temperature is None or 0 < temperature < float("inf")
    check(fits, "temperature", "must be above 0 and finite: equal samples leave nothing to select")
    step = options.step
    check(step in ("latest", "best") or step.isdecimal(), "step", "latest, best, or a number")
    check(0 <= options.seed < 2**31, "seed", "from 0 to 2147483647")
    if problems:
        raise InputError("these flags cannot be used:\n  " + "\n  ".join(problems))


def _sources(options: RejectionOptions, policy: SavedPolicy) -> tuple[str, str]:
    """(data, reward), from the flags or from the run."""
    config = policy.config
    found = {"data": options.data or "", "reward": options.reward or ""}
    if policy.step is not None:
        found["data"] = found["data"] or config.data.train
        found["reward"] = found["reward"] or reward_text(config)
    missing = [f"--{name}" for name, value in found.items() if not value]
    if missing:
        raise InputError(
            f"{options.checkpoint} does not say what to sample on",
            fix=f"set {' and '.join(missing)}, such as --data=train.parquet --reward='gsm8k()'",
        )
    return found["data"], found["reward"]


def write_rows(path: str | Path, rows: Iterable[dict]) -> dict:
    """A .jsonl file, whole or not at all -> {"file", "rows", "sha256"}."""
    path, rows = Path(path), list(rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}")
        hidden.write_text(text, encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written", rule=str(error)) from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"file": str(path), "rows": len(rows), "sha256": digest}


def trajectories_of(
    source: Source, samples: list[Sample], key: jax.Array, *, process_samples: int = 0
) -> tuple[list[dict], dict[str, int]]:
    """Rows of trajectories of the samples, with centred process scores if asked, and counts."""
    rows, kept, counts = trajectory_rows(source, samples)
    if process_samples:
        rates = prefix_pass_rates(source, kept, rows, key, completions=process_samples)
        scores = centred_scores(rows, rates)
        rows = [
            {**row, "pass_rates": rate, "process_scores": score}
            for row, rate, score in zip(rows, rates, scores, strict=True)
        ]
    return rows, counts


def _groups(samples: list[Sample], size: int) -> list[list[Sample]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def rejection_sample(options: RejectionOptions) -> dict:
    """Sample, score, select, and write the files; returns what the .meta.json beside `out` holds.

    Raises InputError where nothing at all is selected.
    """
    check_options(options)
    policy = load_policy(options.checkpoint, options.step)
    data, reward = _sources(options, policy)
    source = open_source(
        policy, data, reward, split=options.split, prompts=options.prompts,
        temperature=options.temperature, max_prompt_tokens=options.max_prompt_tokens,
        max_response_tokens=options.max_response_tokens,
    )  # fmt: skip
    key = jax.random.key(options.seed)
    trajectories, counts = [], {}
    try:
        samples = draw(source, jax.random.fold_in(key, 0), options.samples)
        groups = _groups(samples, options.samples)
        kept, metrics = _select(groups, options)
        if options.trajectories:
            trajectories, counts = trajectories_of(
                source, samples, jax.random.fold_in(key, 1), process_samples=options.process_samples
            )
    finally:
        source.close()
    examples = [example_row(source, g[i]) for g, picks in zip(groups, kept, strict=True)
                for i in picks if g[i].text.strip()]  # fmt: skip
    if not examples:
        raise InputError(
            f"none of {len(samples)} samples was selected",
            value=f"mean reward {metrics['mean_reward_all']:.3g}, min_reward {options.min_reward}",
            fix="more --samples, a lower --min_reward, or a policy that sometimes succeeds",
        )
    files = {"examples": write_rows(options.out, examples)}
    if options.pairs:
        files["pairs"] = write_rows(options.pairs, _pair_rows(source, groups, options))
    if options.trajectories:
        files["trajectories"] = write_rows(options.trajectories, trajectories)
    meta = {
        "model": options.checkpoint,
        "step": policy.step,
        "seed": options.seed,
        "data": data,
        "reward": reward,
        "temperature": source.sampling.temperature,
        "max_response_tokens": source.sampling.max_response_tokens,
        "prompts": len(source.prompts),
        "options": dataclasses.asdict(options),
        "metrics": metrics,
        "trajectories": counts,
        "files": files,
    }
    meta_path(options.out).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def meta_path(out: str) -> Path:
    """FILE.jsonl -> FILE.meta.json."""
    return Path(out).with_suffix(".meta.json")


def _eligible(group: list[Sample], options: RejectionOptions) -> list[bool]:
    return [options.keep_truncated or not s.truncated for s in group]


def _select(groups: list[list[Sample]], options: RejectionOptions) -> tuple[list, dict]:
    rewards = [[s.reward for s in group] for group in groups]
    texts = [[s.text for s in group] for group in groups]
    kept = [
        select(
            r, t, method=options.select, top_k=options.top_k, min_reward=options.min_reward,
            per_prompt=options.per_prompt, dedup=options.dedup,
            eligible=_eligible(group, options),
        )
        for r, t, group in zip(rewards, texts, groups, strict=True)
    ]  # fmt: skip
    truncated = [[s.truncated for s in group] for group in groups]
    return kept, selection_metrics(rewards, texts, kept, truncated, method=options.select)


def _pair_rows(source: Source, groups: list[list[Sample]], options: RejectionOptions) -> list[dict]:
    rows = []
    for group in groups:
        live = [e and bool(s.text.strip()) for e, s in zip(_eligible(group, options), group,
                strict=True)]  # fmt: skip
        found = best_and_worst([s.reward for s in group], live)
        if found is not None:
            rows.append(pair_row(source, group[found[0]], group[found[1]]))
    return rows


def raft(
    config: Config,
    options: RejectionOptions,
    folder: str | Path,
    *,
    iterations: int = 3,
    epochs: int = 1,
) -> list[dict]:
    """`iterations` times: sample from the policy, select, `epochs` of SFT on the selection; the
    next one samples from what came out -> the meta of every iteration (RAFT, arXiv 2304.06767).

    `config` says how SFT trains (optimizer, offline.*); its dataflow, model, data, steps and
    run_dir are set here. `options` are those of the first iteration, without `out`; iteration i is
    in FOLDER/i: samples.jsonl, samples.meta.json, and the run with its policy/.
    """
    if iterations < 1 or epochs < 1:
        raise InputError("raft", value=(iterations, epochs), rule="iterations and epochs >= 1")
    if options.step != "latest":
        raise InputError("raft(step)", value=options.step, rule="latest: SFT goes on from its end")
    checkpoint, metas = options.checkpoint, []
    policy = load_policy(checkpoint)
    data, reward = _sources(options, policy)
    limits = policy.config
    for i in range(iterations):
        here = Path(folder) / str(i)
        found = rejection_sample(
            dataclasses.replace(
                options, checkpoint=checkpoint, data=data, reward=reward,
                out=str(here / "samples.jsonl"), seed=options.seed + i,
                temperature=options.temperature or limits.sampler.temperature,
                max_prompt_tokens=options.max_prompt_tokens or limits.data.max_prompt_tokens,
                max_response_tokens=(
                    options.max_response_tokens or limits.sampler.max_response_tokens
                ),
            )
        )  # fmt: skip
        made = copy.deepcopy(config)
        made.dataflow, made.model, made.run_dir = "sft", checkpoint_model(checkpoint), str(here)
        made.data.train, made.data.sources = found["files"]["examples"]["file"], ()
        made.sft.steps, made.export = 0, True
        rows = found["files"]["examples"]["rows"]
        made.steps = math.ceil(rows * epochs / made.offline.examples_per_step)
        train(made)
        metas.append(found)
        checkpoint = str(here / "policy")
    return metas


def checkpoint_model(checkpoint: str) -> str:
    """The Hugging Face folder of a checkpoint: a run's exported policy, or the folder itself."""
    exported = Path(checkpoint) / "policy"
    folder = exported if (exported / "config.json").is_file() else Path(checkpoint)
    saved = json.loads((folder / "config.json").read_text())
    if "model_type" not in saved or not is_path(f"{folder}/"):
        raise InputError(
            f"{checkpoint} has no exported policy to train from",
            fix="finish the run with export=True, or give a Hugging Face folder",
        )
    return f"{folder}/"
