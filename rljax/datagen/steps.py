"""Labels of lines from policies on disk: the options of launchers/label_steps.py, and its files.

What lives here: which checkpoints, prompts and tests; what is written. What does not: sampling and
labelling with one policy (rljax.datagen.process_labels), finding its weights
(rljax.evaluation.saved).
"""

import dataclasses
import json
import random
import time
from pathlib import Path

import jax

from rljax.data.online.default_rewards import reward_text
from rljax.data.online.prompts import PromptRecord, encode_prompts
from rljax.data.rows.sources import load_prompts
from rljax.datagen.process_labels import Searcher, label_programs
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy, load_policy
from rljax.rewards.pool.pool import RewardPool
from rljax.sampler import Sampling
from rljax.setup import check_length

METRICS = "labels.json"


@dataclasses.dataclass(frozen=True)
class LabelOptions:
    """The flags of launchers/label_steps.py. None: as the run's config.json says, else its
    default."""

    checkpoints: tuple[str, ...]  # run folders, RUN@STEP, or Hugging Face folders
    out: str  # a folder: train.jsonl, test.jsonl, labels.json
    data: str | None = None
    reward: str | None = None
    prompts: int = 256  # of each checkpoint, drawn anew
    programs_per_prompt: int = 4
    completions: int = 20  # at most, for each prefix that is asked about
    held_out: float = 0.1  # share of the prompts whose rows go to test.jsonl
    neutral: str = "zero"
    code_only: bool = False
    replay: bool = False
    temperature: float | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    rows_at_once: int = 256
    seed: int = 0


def check_options(options: LabelOptions) -> None:
    """Every problem of the flags at once. Raises InputError."""
    problems = []

    def check(ok: bool, flag: str, value, rule: str):
        if not ok:
            problems.append(f"--{flag}={value}: {rule}")

    check(bool(options.checkpoints), "checkpoints", "", "run folders, RUN@STEP, or model folders")
    check(options.out != "", "out", "", "the folder that the rows are written into")
    check(0 <= options.held_out < 1, "held_out", options.held_out, "from 0 to below 1")
    known = ("zero", "drop", "inherit")
    check(options.neutral in known, "neutral", options.neutral, f"one of {', '.join(known)}")
    for flag in (
        "prompts", "programs_per_prompt", "completions", "rows_at_once", "max_prompt_tokens",
        "max_response_tokens",
    ):  # fmt: skip
        value = vars(options)[flag]
        check(value is None or 1 <= value < 2**31, flag, value, "must be >= 1")
    temperature = options.temperature
    rule = "above 0 and finite: programs are to differ"
    check(temperature is None or 0 < temperature < float("inf"), "temperature", temperature, rule)
    check(0 <= options.seed < 2**31, "seed", options.seed, "from 0 to 2147483647")
    if problems:
        raise InputError("these flags cannot be used:\n  " + "\n  ".join(problems))


def open_checkpoint(name: str) -> SavedPolicy:
    """The policy of a folder, or of RUN@STEP: a step of a run, latest or best."""
    folder, mark, step = name.rpartition("@")
    if mark and not Path(name).is_dir():
        return load_policy(folder, step)
    return load_policy(name)


def _searcher(options: LabelOptions, policy: SavedPolicy) -> tuple[Searcher, str]:
    """The policy with its tests, and the data it is asked about."""
    config = policy.config
    reward = options.reward or (reward_text(config) if policy.step is not None else None)
    data = options.data or config.data.train
    missing = [f"--{name}" for name, value in (("data", data), ("reward", reward)) if not value]
    if missing:
        raise InputError(
            "a checkpoint does not say what to label", fix=f"set {' and '.join(missing)}"
        )
    sampling = Sampling(
        temperature=options.temperature or config.sampler.temperature,
        max_response_tokens=options.max_response_tokens or config.sampler.max_response_tokens,
        stop_ids=tuple(policy.tokenizer.eos_ids),
        stop_strings=tuple(config.sampler.stop_strings),
    )
    pool = RewardPool(reward, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
    return Searcher(
        policy.actor(), policy.tokenizer, pool, sampling, prompt_tokens=1,
        correct_at=config.evaluate.correct_at, code_only=options.code_only,
        rows_at_once=options.rows_at_once,
    ), data  # fmt: skip


def _records(
    options: LabelOptions, policy: SavedPolicy, data: str, number: int
) -> list[PromptRecord]:
    """Prompts of this checkpoint, drawn without replacement, encoded."""
    given = load_prompts(data, "train")
    rng = random.Random(f"{options.seed} {number}")
    drawn = rng.sample(given, min(options.prompts, len(given)))
    limit = options.max_prompt_tokens or policy.config.data.max_prompt_tokens
    encoded, _ = encode_prompts(drawn, policy.tokenizer, max_prompt_tokens=limit)
    return encoded


def _label_one(options: LabelOptions, name: str, number: int) -> tuple[list[dict], dict]:
    """Rows and metrics of one checkpoint."""
    policy = open_checkpoint(name)
    searcher, data = _searcher(options, policy)
    try:
        records = _records(options, policy, data, number)
        longest = max(len(record.token_ids) for record in records)
        check_length(longest, searcher.sampling.max_response_tokens, policy.model)
        searcher = dataclasses.replace(searcher, prompt_tokens=longest)
        rows, metrics = label_programs(
            searcher, records, jax.random.fold_in(jax.random.key(options.seed), number),
            programs_per_prompt=options.programs_per_prompt, completions=options.completions,
            neutral=options.neutral, replay=options.replay,
        )  # fmt: skip
    finally:
        searcher.pool.close()
    source = {"source": name, "source_step": policy.step}
    return [{**row, **source} for row in rows], {**metrics, "prompts": float(len(records))}


def label_saved(options: LabelOptions) -> dict:
    """Labels programs of every checkpoint, each searched with completions of its own, and writes
    train.jsonl and test.jsonl (rows of held-out prompts, whatever checkpoint they come from) for
    dataflow="process_reward_model", and labels.json: {checkpoint: metrics, "rows", "wall_s"}."""
    check_options(options)
    started, rows, found = time.perf_counter(), [], {}
    for number, name in enumerate(options.checkpoints):
        of_one, found[name] = _label_one(options, name, number)
        rows += of_one
    if not rows:
        raise InputError(
            "no program has a line to label",
            value={k: v for one in found.values() for k, v in one.items() if k[:8] == "programs"},
            fix="longer responses (--max_response_tokens), or a policy that ends its programs",
        )
    held_out = {i for i in {row["index"] for row in rows} if _held_out(i, options)}
    parts = {
        "train": [row for row in rows if row["index"] not in held_out],
        "test": [row for row in rows if row["index"] in held_out],
    }
    folder = Path(options.out)
    result = {
        "checkpoints": found,
        "rows": {name: len(part) for name, part in parts.items()},
        "options": dataclasses.asdict(options),
        "wall_s": time.perf_counter() - started,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / METRICS).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--out={options.out} cannot be written", rule=str(error)) from None
    return result


def _held_out(index: int, options: LabelOptions) -> bool:
    """A draw of the prompt's own, so that it falls alike for every checkpoint."""
    return random.Random(f"{options.seed} held out {index}").random() < options.held_out
