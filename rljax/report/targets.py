"""Published results of the setups in the configs, to stand beside those of a run.

A number of a small model on a small task is never called comparable: a run is compared with a
result only if its model and its data are those of the publication.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from rljax.report.arms import interval
from rljax.report.estimates import shares, shown, table
from rljax.report.head import field, short_name
from rljax.report.kinds import OVERALL, value_at
from rljax.report.run_folder import Estimate, RecordedRun, estimate
from rljax.tracking.charts import escaped

MOST = 8  # rows that are not folded


@dataclasses.dataclass(frozen=True)
class Target:
    """One published number, in percent."""

    configs: tuple[str, ...]  # of ours, by the name of the file
    what: str  # the method, and how it was measured
    model: str
    benchmark: str
    data: str  # what the path or name of such data has in it; "" = nobody else has the data
    value: float
    source: str


_DQO = "arXiv 2410.09302, table of GSM8K and MATH"
_PRM = "arXiv 2410.17621, table 1, mean of 10 runs"
# Method: GSM8K greedy, GSM8K sampled, MATH greedy, MATH sampled.
_DQO_ROWS = {
    "Qwen2-7B-Instruct": {
        "base": (59.06, 53.30, 37.44, 35.42),
        "SFT": (85.06, 84.15, 44.56, 41.34),
        "Reject Sampling": (84.15, 83.47, 49.82, 48.02),
        "DPO": (87.26, 84.23, 51.66, 49.00),
        "KTO": (86.35, 83.55, 50.32, 46.30),
        "DRO": (86.73, 83.39, 51.18, 48.40),
        "DQO": (87.26, 84.69, 51.72, 50.18),
    },
    "Gemma-1.1-7B-it": {
        "base": (39.65, 38.89, 17.04, 16.06),
        "SFT": (53.45, 45.46, 21.64, 18.00),
        "Reject Sampling": (53.60, 53.37, 21.74, 20.42),
        "DPO": (57.85, 59.41, 22.62, 22.66),
        "KTO": (50.49, 50.19, 18.56, 18.56),
        "DRO": (60.58, 60.05, 24.56, 23.70),
        "DQO": (63.91, 64.06, 24.90, 24.68),
        "DQO w/ process scores": (65.04, 65.35, 25.54, 25.10),
    },
}
_DQO_COLUMNS = (("GSM8K", "greedy"), ("GSM8K", "sampled"), ("MATH", "greedy"), ("MATH", "sampled"))
# Setting: LiveCodeBench easy, medium, hard, overall; in-house contest, NL2Alg, overall.
_PRM_ROWS = {
    "SFT": (55.3, 9.3, 0.3, 23.5, 10.4, 41.4, 20.0),
    "RL baseline": (70.0, 7.2, 1.7, 28.2, 24.4, 48.7, 31.8),
    "ValueInit": (67.9, 8.9, 1.9, 28.2, 25.0, 45.4, 31.4),
    "DenseReward": (68.5, 9.9, 2.5, 28.9, 25.2, 48.1, 32.3),
    "ValueInit and DenseReward": (69.3, 12.0, 1.6, 29.8, 27.9, 53.5, 35.8),
}
_PRM_COLUMNS = (
    *(f"LiveCodeBench {part}" for part in ("easy", "medium", "hard", "overall")),
    *(f"in-house {part}" for part in ("contest", "NL2Alg", "overall")),
)

_VERL = "verl.readthedocs.io, algorithm baselines"
_README = "github.com/volcengine/verl, README"
_SEED = "arXiv 2504.13914"
# Config, method, model, benchmark, data, percent, source.
_ROWS = (
    ("ppo_gsm8k", "PPO, greedy", "Qwen2.5-0.5B-Instruct", "GSM8K", "gsm8k", 56.7, _VERL),
    ("dapo", "DAPO, avg@32", "Qwen2.5-32B", "AIME 2024", "aime", 50.0, "arXiv 2503.14476"),
    ("vapo", "VAPO, avg@32", "Qwen2.5-32B", "AIME 2024", "aime", 60.4, "arXiv 2504.05118"),
    ("vapo", "another system", "Seed-Thinking-v1.5", "AIME 2024", "aime", 86.7, _SEED),
    ("vapo", "another system", "Seed-Thinking-v1.5", "Codeforces", "codeforces", 55.0, _SEED),
    ("vapo", "another system", "Seed-Thinking-v1.5", "GPQA diamond", "gpqa", 77.3, _SEED),
    ("vapo", "another system, RL scaling preview", "Doubao-1.5-pro", "AIME", "aime", 70.0, _README),
)
_OFFLINE, _PROGRAMS = ("compare_offline",), ("prm_programs", "sweep_prm_programs")
TARGETS = (
    *(Target((config,), *rest) for config, *rest in _ROWS),
    *(
        Target(_OFFLINE, f"{method}, {setting}", model, benchmark, benchmark.lower(), value, _DQO)
        for model, methods in _DQO_ROWS.items()
        for method, values in methods.items()
        for (benchmark, setting), value in zip(_DQO_COLUMNS, values, strict=True)
    ),
    *(
        Target(_PROGRAMS, f"{setting}, pass@1", "an in-house model", benchmark, "", value, _PRM)
        for setting, values in _PRM_ROWS.items()
        for benchmark, value in zip(_PRM_COLUMNS, values, strict=True)
    ),
)


def config_of(run: RecordedRun) -> str:
    """Returns the name of the config file that a run was started from, "" if its command names
    none: "vapo" of `rljax train presets/vapo:tiny`."""
    for start in reversed(run.starts):
        try:
            words = shlex.split(str(start.get("command", "")))
        except ValueError:
            continue
        configs = [w.removeprefix("--config=") for w in words if w.startswith("--config=")]
        for flag in ("--config", "train"):
            if not configs and flag in words[:-1]:
                configs = [words[words.index(flag) + 1]]
        if not configs and "compare" in words:
            return "compare_offline"  # its own config
        if configs and not configs[-1].startswith("-"):
            return PurePath(configs[-1].partition(":")[0]).stem
    return ""


def targets_of(run: RecordedRun) -> list[Target]:
    """Returns the published results of the config that a run was started from."""
    name = config_of(run)
    return [target for target in TARGETS if name in target.configs]


def differences(run: RecordedRun, target: Target) -> str:
    """Returns how the setting of a run differs from that of a published result; "" if its model and
    its held-out data are the same."""
    model = str(short_name(field(run.config, "model")) or "unknown")
    if target.model.lower() != model.lower():
        return f"not comparable: the model is {model}, not {target.model}"
    data = " ".join(str(field(run.config, name) or "") for name in ("data.test", "data.train"))
    if not target.data or target.data not in re.sub(r"[\s_-]", "", data.lower()):
        return f"not comparable: the data is {data.strip() or 'unknown'}, not {target.benchmark}"
    return ""


LATE = " at the last evaluation, which is not after the last step"


def obtained(runs: Sequence[RecordedRun]) -> str:
    """Returns the accuracy at the end, or else at the last evaluation, marked as such, as HTML:
    for a single run with its interval over prompts, for several the mean with Student's interval
    over them."""
    accuracies = [(value, at_end) for run in runs for value, at_end in _accuracy(run)]
    if not accuracies:
        return "not evaluated"
    result, suffix = accuracies[0][0], "" if all(at_end for _, at_end in accuracies) else LATE
    if len(accuracies) > 1:
        result = estimate(interval([value.value for value, _ in accuracies]))
    return f"{shown(result, shares(result))}{suffix}"


def _accuracy(run: RecordedRun) -> Iterator[tuple[Estimate, bool]]:
    """(accuracy, whether it is that after the last step), if the run has been evaluated."""
    if (after := estimate(run.summary.get("accuracy_after"))) is not None:
        yield after, True
    elif (last := value_at(run, OVERALL, -1)) is not None:
        yield last, False


def expected(groups: Mapping[str, Sequence[RecordedRun]]) -> str:
    """Returns the table of expected and obtained numbers; each name stands for runs that were made
    alike. "" if nothing is published about their config."""
    all_runs = [run for runs in groups.values() for run in runs]
    configs = {config_of(run) for run in all_runs}
    got = "<br>".join(
        (f"{escaped(name)}: " if name else "") + obtained(runs) for name, runs in groups.items()
    )
    rows = []
    for target in targets_of(all_runs[0]) if len(configs) == 1 else ():
        reasons = {differences(run, target) or "yes: same model and data" for run in all_runs}
        title = f"{target.what}, {target.model}, {target.benchmark}"
        texts = (title, f"{target.value:g} %", "; ".join(sorted(reasons)), target.source)
        published, value, setting, source = map(escaped, texts)
        rows.append((published, value, got, setting, source))
    note = (
        "What is published of the method of this config, beside the accuracy on the held-out data "
        "of what ran here."
    )
    head = ("published", "expected", "obtained here", "the same setting?", "source")
    first_rows = table("Expected and obtained", head, rows[:MOST], note, wraps=True)
    if len(rows) <= MOST:
        return first_rows
    title, more_rows = f"{len(rows) - MOST} more of them", table("", head, rows[MOST:], wraps=True)
    return f"{first_rows}<details><summary>{title}</summary>{more_rows}</details>"
