"""The offline comparison: several algorithms trained from one file of a policy's own samples
(the layout of the table is that of arXiv 2410.09302).

OUT/seed0/base/ is the policy that samples.jsonl was drawn from, OUT/seed0/METHOD/ a run;
result.json in it makes the cell a finished one, which keeps its policy/ and no checkpoint. Where
the config takes no steps, the base policy is its model as it is. The methods are data of a config
file's methods().
"""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax.config import Config, is_path, to_dict, with_overrides
from rljax.config.declare import check_options
from rljax.config.policy_options import ComparisonOptions
from rljax.data.online.default_rewards import evaluation_text, reward_text
from rljax.data.rows.columns import prompt_columns
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.datagen.rejection import best_and_worst, select
from rljax.datagen.trajectories import trajectories_of
from rljax.errors import InputError
from rljax.evaluation.policy import correct, score_table
from rljax.files import make_folder, parse_json, read_json_object, read_text, write_json, write_rows
from rljax.keys import stream
from rljax.policies import load_policy, sample_all
from rljax.training import train
from rljax.validation import validate

BASE = "base"


# -- what each method reads of the one file --


def _plain(row: dict, *names: str) -> dict:
    return prompt_columns(row) | {name: row[name] for name in names if name in row}


def _by_prompt(rows: Sequence[dict]) -> list[list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return list(groups.values())


def _ended(rows: Sequence[dict]) -> list[dict]:
    """Returns the rows whose completion was not cut off, because training teaches texts to end."""
    return [row for row in rows if not row["truncated"]]


def correct_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns demonstrations: every right completion, as often as it was sampled."""
    return [_plain(row, "completion") for row in _ended(rows) if row["reward"] >= correct_at]


def selected_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns demonstrations: a right completion of every prompt with one (rejection sampling)."""
    out = []
    for group in _by_prompt(rows):
        fits = [row["reward"] >= correct_at and not row["truncated"] for row in group]
        rewards, texts = [r["reward"] for r in group], [r["completion"] for r in group]
        out += [_plain(group[i], "completion") for i in select(rewards, texts, eligible=fits)]
    return out


def pair_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns pairs: best and worst completion of every prompt whose rewards do not all tie."""
    out = []
    for group in _by_prompt(_ended(rows)):
        pair = best_and_worst([row["reward"] for row in group])
        if pair is not None:
            chosen, rejected = (group[i]["completion"] for i in pair)
            out.append({**_plain(group[0]), "chosen": chosen, "rejected": rejected})
    return out


def labelled_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns every completion with a label, whether it is right."""
    return [{**_plain(r, "completion"), "label": r["reward"] >= correct_at} for r in _ended(rows)]


def outcome_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns trajectories: every completion with its reward and the sampler's log-probs."""
    return [_plain(row, "completion", "reward", "truncated", "logprobs") for row in rows]


def process_rows(rows: Sequence[dict], correct_at: float) -> list[dict]:
    """Returns trajectories with the rewards of their steps."""
    names = ("steps", "process_scores", "reward", "truncated", "logprobs")
    return [_plain(row, *names) for row in rows]


ROWS: dict[str, Callable[[Sequence[dict], float], list[dict]]] = {
    "correct": correct_rows,
    "selected": selected_rows,
    "pairs": pair_rows,
    "labelled": labelled_rows,
    "outcome": outcome_rows,
    "process": process_rows,
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: its name, the rows that it reads (`ROWS`), and fields of the config."""

    name: str
    rows: str
    fields: Mapping[str, object]

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


def read_methods(items: Iterable[Mapping[str, object]], where: str) -> list[Method]:
    """Returns the methods that a config file's methods() yields: {"name", "rows", "dataflow",
    dotted fields ...}. Raises InputError that lists every problem."""
    methods, problems = [], []
    for number, item in enumerate(items):
        name, rows = item.get("name", ""), item.get("rows", "")
        fields = {k: v for k, v in item.items() if k not in ("name", "rows")}
        method = Method(str(name), str(rows), fields)
        if not method.folder or method.folder == BASE:
            problems.append(f"method {number}: needs a name that is not {BASE!r}")
        if rows not in ROWS:
            problems.append(f"method {name!r}: rows={rows!r}, must be one of {', '.join(ROWS)}")
        if "dataflow" not in fields:
            problems.append(f"method {name!r}: needs a dataflow")
        methods.append(method)
    folders = [m.folder for m in methods]
    problems += [f"{f!r} names two methods" for f in sorted(set(folders)) if folders.count(f) > 1]
    if problems or not methods:
        text = "\n  ".join(problems or ["methods() yields nothing"])
        fix = f"correct these entries of methods() in {where}"
        raise InputError(f"{where} cannot be compared:\n  {text}", fix=fix)
    return methods


# -- cells --


def _base_config(config: Config, options: ComparisonOptions, seed: int) -> Config:
    base = copy.deepcopy(config)
    base.seed, base.export = seed, True
    base.run_dir = str(Path(options.out) / f"seed{seed}" / BASE)
    return base


def _trains(config: Config) -> bool:
    """Returns whether the base policy is trained; else it is the model as it is."""
    return config.steps + config.sft.steps > 0


def _base_policy(config: Config) -> str:
    """The folder of the base policy, or its name on the hub."""
    return str(Path(config.run_dir) / "policy") if _trains(config) else config.model


def _method_config(base: Config, method: Method, options: ComparisonOptions) -> Config:
    """Returns the config that trains from the base policy on the method's file, in its folder."""
    folder, config = Path(base.run_dir).parent / method.folder, copy.deepcopy(base)
    config.sft.steps, config.steps, config.run_dir = 0, options.steps, str(folder)
    config.model, config.tokenizer = _base_policy(base), "" if _trains(base) else base.tokenizer
    data, evaluate = config.data, config.evaluate
    data.train, data.test, data.sources = str(folder / "data.jsonl"), "", ()
    data.test_fraction = 0.0  # its rows are of prompts that are not held out
    evaluate.prompts_from, evaluate.every_steps, evaluate.patience = "", 0, 0
    return with_overrides(config, method.fields, f"method {method.name!r}")


def _require_same(path: Path, settings: dict) -> dict | None:
    """The result of a finished part, None where there is none; another experiment's is refused."""
    if not path.is_file():
        return None
    saved = read_json_object(path)
    settings = json.loads(json.dumps(settings))  # tuples are lists in a file
    if saved.get("settings") != settings:
        changed = [k for k, v in settings.items() if (saved.get("settings") or {}).get(k) != v]
        rule = "a comparison that goes on is the same one"
        fix = "another --out, or restore the settings"
        raise InputError(f"{path} is of other settings", value=changed, rule=rule, fix=fix)
    return saved


def train_to_the_end(config: Config, train: Callable = train) -> dict:
    """Trains, or goes on; returns the summary, or raises where the run stopped before its end."""
    folder = Path(config.run_dir)
    # A run that ended before its result was written is wrapped up again, not refused.
    (folder / "report.html").unlink(missing_ok=True)
    summary = train(config).summary
    if summary["status"] != "finished":
        raise InputError(f"{folder}: {summary['status']}", fix="the same command goes on")
    return summary


def _make_base(config: Config) -> float:
    """Trains the base policy unless it is there, and returns the seconds that it took."""
    folder = Path(config.run_dir)
    settings = {k: v for k, v in to_dict(config).items() if k != "run_dir"}
    finished = _require_same(folder / "base.json", settings)
    if finished is None:
        wall_s = train_to_the_end(config)["wall_s"] if _trains(config) else 0.0
        finished = {"settings": settings, "wall_s": wall_s}
        make_folder(folder)
        write_json(folder / "base.json", finished)
    return finished["wall_s"]


def _make_file(config: Config, options: ComparisonOptions) -> list[dict]:
    """The one file of the seed: read if it is there, else sampled from the base policy."""
    folder = Path(config.run_dir).parent
    path, names = folder / "samples.jsonl", ("prompts", "samples", "process_samples")
    settings = {name: vars(options)[name] for name in names}
    if _require_same(folder / "samples.meta.json", settings) is None:
        if _trains(config):  # it was trained here just now
            saved = load_policy(Path(config.run_dir), trust_code=True)
        else:
            saved = dataclasses.replace(load_policy(config.model), config=config)
        data = config.data.train
        records = load_prompts(data, "train", test_fraction=held_out_fraction(config, data))
        prompts, _ = saved.encode(records[: options.prompts])
        policy, key = saved.ready(prompts), stream(jax.random.key(config.seed), "file")
        with contextlib.closing(saved.player(reward_text(config))) as player:
            draw, rates = stream(key, "samples"), stream(key, "pass rates")
            samples = sample_all(policy, prompts, options.samples, player, key=draw)
            rows, counts = trajectories_of(
                policy, prompts, player, samples, rates, process_samples=options.process_samples
            )
        meta = {"settings": settings, "counts": counts, "step": saved.step, "seed": config.seed}
        meta |= {"model": config.run_dir, "file": write_rows(path, rows)}
        write_json(folder / "samples.meta.json", meta)
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [parse_json(line, f"{path}: line {n}") for n, line in lines if line.strip()]


def _held_out(config: Config) -> str:
    """The data that holds the prompts on which every method is measured."""
    data = config.evaluate.prompts_from
    if not data and (config.data.test_fraction or not is_path(config.data.train)):
        data = config.data.train  # a task has a test split of its own, a file what was held out
    if not data:
        fix = "--config.evaluate.prompts_from=FILE, or --config.data.test_fraction=0.05"
        rule = "held-out prompts are needed"
        raise InputError("evaluate.prompts_from", value="", rule=rule, fix=fix)
    return data


def measure(folder: str | Path, config: Config, options: ComparisonOptions) -> dict:
    """Evaluates the policy of a folder on held-out prompts; returns {"greedy": [right or not, per
    prompt], "sampled": [share of the test_samples that are right, per prompt]}, None for a prompt
    whose rewards failed."""
    saved = load_policy(folder)
    data = _held_out(config)
    records = load_prompts(data, "test", test_fraction=held_out_fraction(config, data))
    prompts, _ = saved.encode(
        records[: options.test_prompts], max_tokens=config.data.max_prompt_tokens
    )
    merged = dataclasses.replace(saved.config, sampler=config.sampler, reward=config.reward)
    saved = dataclasses.replace(saved, config=merged)
    policy, key = saved.ready(prompts), stream(jax.random.key(config.seed), "measure")
    out = {}
    variants = (("greedy", policy.greedy(), 1), ("sampled", policy, options.test_samples))
    with contextlib.closing(saved.player(evaluation_text(config))) as player:
        for name, variant, n in variants:
            scores = score_table(sample_all(variant, prompts, n, player, key=key), n)
            right = correct(scores, config.evaluate.correct_at)
            counts = np.sum(~np.isnan(right), axis=1)
            means = np.where(counts > 0, np.nansum(right, axis=1) / np.maximum(counts, 1), np.nan)
            out[name] = [None if np.isnan(x) else float(x) for x in means]
    return out


def _run_cell(
    base: Config, method: Method | None, rows, options: ComparisonOptions, base_s: float
) -> dict:
    """One cell of the table, from disk if it is finished. `base_s`: what the base policy took."""
    config = base if method is None else _method_config(base, method, options)
    folder = Path(config.run_dir)
    settings = {k: v for k, v in to_dict(config).items() if k != "run_dir"}
    settings |= {f: vars(options)[f] for f in ("test_prompts", "test_samples")}
    if method is not None:
        settings |= {f: vars(options)[f] for f in ("prompts", "samples", "process_samples")}
    finished = _require_same(folder / "result.json", settings)
    if finished is not None:
        return finished
    name, count, wall_s, policy = BASE, 0, base_s, _base_policy(base)
    if method is not None:
        method_rows = ROWS[method.rows](rows(), config.evaluate.correct_at)
        name, count = method.name, write_rows(folder / "data.jsonl", method_rows)["rows"]
        if not count:
            raise InputError(
                f"method {name!r} has nothing to learn from",
                value=f"no sample of the base policy is a row of {method.rows!r}",
                fix="more --prompts and --samples, an easier task, or a base policy that is right "
                "now and then",
            )
        wall_s, policy = train_to_the_end(config)["wall_s"], folder / "policy"
    result = {"method": name, "seed": config.seed, "rows": count, "wall_s": wall_s}
    result |= measure(policy, base, options) | {"settings": settings}
    write_json(folder / "result.json", result)
    if method is not None:  # of several gigabytes, and nothing goes on from it
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def require_comparable(
    config: Config, methods: Sequence[Method], options: ComparisonOptions
) -> None:
    """Raises InputError for options, a base policy or a method that `compare` cannot run."""
    check_options(options)
    if not _trains(config) and not is_path(config.model):
        rule = f"the base policy is the model as it is, and {config.model!r} has random weights"
        fix = "--config.model=FOLDER, or --config.steps=300 to train a base policy"
        raise InputError("steps", value=0, rule=rule, fix=fix)
    _held_out(config)
    base = _base_config(config, options, options.seeds[0])
    for method in methods:
        method_config = _method_config(base, method, options)
        # The base policy is not there yet.
        method_config.model, method_config.tokenizer = config.model, config.tokenizer
        method_config.data.train = config.data.train
        validate(method_config)


def compare(
    config: Config,
    methods: Sequence[Method],
    options: ComparisonOptions,
    *,
    on_cell: Callable[[dict], None] = lambda cell: None,
) -> dict:
    """Trains and measures every cell that is not finished, in order; returns the table of all,
    which OUT/results.json holds. Raises InputError if the base policy would be a model with
    random weights.

    `config` is that of the base policy: it is trained, or, with steps=0, it is the model as it is.
    Every method starts from it, takes `options.steps` optimizer steps of offline.examples_per_step
    examples, and is measured on the same prompts.
    """
    require_comparable(config, methods, options)  # before the first step of the first base
    if not any(method.rows == "process" for method in methods):
        options = dataclasses.replace(options, process_samples=0)  # nobody reads them
    cells = []
    for seed in options.seeds:
        base = _base_config(config, options, seed)
        base_s = _make_base(base)
        loaded: list[list[dict]] = []

        def rows(base=base, loaded=loaded):
            if not loaded:
                loaded.append(_make_file(base, options))
            return loaded[0]

        for method in (None, *methods):
            cells.append(_run_cell(base, method, rows, options, base_s))
            on_cell(cells[-1])
    result = {"options": dataclasses.asdict(options), "table": summarise(cells)}
    keep = ("method", "seed", "rows", "wall_s", "greedy", "sampled")
    result["cells"] = [{name: cell[name] for name in keep} for cell in cells]
    write_json(Path(options.out) / "results.json", result)
    return result


# -- the table --


def interval(values: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> dict:
    """Returns the mean of values [seeds, prompts] with a 95 % bootstrap interval that resamples
    seeds, then prompts of each: both vary. NaN = unknown. Raises InputError for another shape, and
    if no value is known."""
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or np.all(np.isnan(values)):
        rule = "[seeds, prompts], some known"
        fix = "give one row of values for each seed, and leave out methods without a known value"
        raise InputError("interval", value=values.shape, rule=rule, fix=fix)
    rng, (seeds, prompts) = np.random.default_rng(seed), values.shape
    means = np.empty(resamples)
    for i in range(resamples):
        # The same prompts for every seed: they are the same prompts.
        resampled = values[rng.integers(0, seeds, seeds)][:, rng.integers(0, prompts, prompts)]
        valid = ~np.isnan(resampled)
        means[i] = np.sum(resampled, where=valid) / max(valid.sum(), 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"value": float(np.nanmean(values)), "low": float(low), "high": float(high)}


def summarise(cells: Sequence[dict]) -> list[dict]:
    """Returns one row per method, in order: greedy and sampled accuracy with intervals, each seed's
    own, and the difference to the base policy of the same seed, prompt by prompt."""
    names = list(dict.fromkeys(cell["method"] for cell in cells))

    def values(name: str, column: str) -> np.ndarray:
        rows = [cell[column] for cell in cells if cell["method"] == name]
        return np.array([[np.nan if x is None else x for x in row] for row in rows], np.float64)

    table = []
    for name in names:
        row: dict = {"method": name}
        for column in ("greedy", "sampled"):
            scores = values(name, column)
            row[column] = interval(scores)
            row[f"{column}_of_seeds"] = np.nanmean(scores, axis=1).tolist()
            if name != BASE:
                row[f"{column}_gain"] = interval(scores - values(BASE, column))
        table.append(row)
    return table
