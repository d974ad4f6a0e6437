"""The training loop: {step, evaluate, log, save} until the run is over. Plumbing only.

The order of things, the run folder, signals, faults and the summary; the state is
rljax.training.run, every algorithm a page of rljax.dataflows.
"""

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from rljax.config import Config, to_dict
from rljax.errors import InputError
from rljax.evaluation.policy import bootstrap
from rljax.report import timeline
from rljax.report.live import renewed_report
from rljax.report.meanings import health_warnings
from rljax.report.page import write_report
from rljax.report.run_folder import EQUAL_STEPS, MOST_FAILED, equal_rewards
from rljax.report.starts import last_start, peak_memory, record_start
from rljax.setup import Setup, build
from rljax.tracking import compiles
from rljax.tracking.console import Console
from rljax.tracking.folder import (
    concerns,
    disk_fault,
    locked,
    make_folder,
    not_written,
    removed_if_empty,
    write_whole,
)
from rljax.tracking.signals import Signals
from rljax.tracking.timing import Timings, collect
from rljax.tracking.trackers import Tracking, open_tracking
from rljax.training.progress import bad_steps_in_a_row
from rljax.training.result import TrainedRun
from rljax.training.run import Run
from rljax.training.scores import check_scores, require_scores, shown_sample, try_rewards
from rljax.validation import validate

LOG = logging.getLogger("rljax")
_OF_SCORES = ("reward/mean", "reward/std", "reward/min", "reward/max", "shaped_reward/mean")
PARTS = ("generate", "reward", "learn", "rest")


class Terminated(Exception):
    """A signal was received; the state has been saved."""


def one_step(run: Run) -> dict:
    """One step of the current phase; its seconds are split into generate, reward, learn and
    rest."""
    phase = run.phase
    compiled = compiles.count()
    with collect() as timings:
        metrics = {k: float(v) for k, v in run.step().items()}
    step_s, seconds = time.monotonic() - timings.begun_s, timings.seconds
    seconds["rest"] = step_s - sum(seconds.values())
    metrics |= {f"time/{name}_s": seconds.get(name, 0.0) for name in PARTS}
    if timings.scoring:
        metrics |= _scoring_times(timings)
    tokens = metrics.get("response_tokens/mean", 0.0) * metrics.get("batch/completions", 0.0)
    if tokens:
        metrics["tokens_per_s"] = tokens / step_s
        metrics["generate_tokens_per_s"] = tokens / max(seconds.get("generate", 0.0), 1e-9)
    elif "batch/tokens" in metrics:
        metrics["tokens_per_s"] = metrics["batch/tokens"] / step_s
    here = run.taken_here[phase.name] = run.taken_here.get(phase.name, 0) + 1
    learning = f"jit({phase.dataflow.function.__name__})"
    run.learning_programs += compiles.names(compiled).count(learning)
    if here > 3 and compiles.count() > compiled:
        names = "; ".join(compiles.names(compiled))
        LOG.warning("step %d compiled again: %s", run.progress.step, names)
    if phase is run.setup.main and compiles.count() == compiled:
        run.steady.append([metrics[f"time/{name}_s"] for name in PARTS])
        # Of the first such step, and of the last.
        run.timelines[1 if run.timelines else 0 :] = [
            timeline.record_of(timings, run.progress.step, step_s)
        ]
    _count_faults(run, metrics)
    counts = {"compiles": compiles.count(), "learning_programs": run.learning_programs}
    return {**metrics, "phase": phase.label, **{name: float(n) for name, n in counts.items()}}


def _scoring_times(timings: Timings) -> dict:
    """Of scoring by processes: seconds that the step did not wait for, and of a sample."""
    each = [end - begin for begin, end in timings.scoring]
    return {
        "time/reward_hidden_s": timeline.scored_while_decoding(timings),
        "time/reward_sample_mean_s": float(np.mean(each)),
        "time/reward_sample_max_s": max(each),
    }


def _count_faults(run: Run, metrics: dict) -> None:
    faults = run.progress.faults
    for text in health_warnings(metrics):
        name = f"unhealthy/{text.split()[0]}"
        faults[name] = faults.get(name, 0.0) + 1
        if faults[name] == 1:  # each once, and counted from then on
            LOG.warning("step %d: %s", run.progress.step, text)
    rewards = ("reward/errors", "reward/timeouts", "reward/timeouts_scored")
    for name in ("skipped_steps", "critic/skipped_steps", *rewards):
        if metrics.get(name):
            faults[name] = faults.get(name, 0.0) + metrics[name]
    failed = metrics.get("reward/errors", 0.0) + metrics.get("reward/timeouts", 0.0)
    if failed and failed >= metrics.get("batch/completions", 1.0):
        for name in _OF_SCORES:  # a missing score is not a zero reward
            metrics.pop(name, None)
    if failed > MOST_FAILED * metrics.get("batch/completions", 1.0):
        first = next(row for row in run.source.report.rows if row.score.status != "ok")
        text = "step %d: %d rewards failed and are masked out, the first one: %s"
        LOG.warning(text, run.progress.step, failed, shown_sample(first))
    if "reward/all_equal" in metrics:
        _count_equal_rewards(run, metrics)


def _count_equal_rewards(run: Run, metrics: dict) -> None:
    """Several steps without any two rewards that differ, where they are compared, are a fault."""
    progress = run.progress
    equal = metrics["reward/all_equal"] or metrics.get("reward/equal_groups", 0.0) == 1.0
    progress.equal_rewards_in_a_row = progress.equal_rewards_in_a_row + 1 if equal else 0
    steps = progress.equal_rewards_in_a_row
    if steps >= EQUAL_STEPS:
        new = 1 if steps > EQUAL_STEPS else EQUAL_STEPS
        progress.faults["equal_rewards"] = progress.faults.get("equal_rewards", 0.0) + new
    if steps == EQUAL_STEPS or steps and steps % (20 * EQUAL_STEPS) == 0:
        LOG.warning("step %d: %s", progress.step, equal_rewards(steps, metrics))


def after_step(run: Run, metrics: dict) -> bool:
    """Evaluate and change phase where it is time; adds to `metrics`. True if a checkpoint is
    due."""
    config, progress = run.config, run.progress
    every = config.checkpoint.every_steps
    due = bool(every and progress.step % every == 0)
    if run.phase is run.setup.main:
        every = config.evaluate.every_steps
        if run.finished() or (every and progress.rl_steps % every == 0):
            metrics |= run.evaluate()
        due = (
            due or config.checkpoint.best_metric.removeprefix("-") in metrics
        )  # only a saved step can be the best
        return due or run.finished()
    over, evaluated = progress.sft_steps >= config.sft.steps, {}
    if config.sft.stop_at_accuracy and progress.sft_steps % config.sft.check_every_steps == 0:
        evaluated = run.evaluate()
        over = over or evaluated.get("eval/accuracy", 0.0) >= config.sft.stop_at_accuracy
    if over:
        run.begin(run.setup.main, run.roles["actor"].state.weights)
        evaluated = evaluated if evaluated and not run.setup.data.held_out else run.evaluate()
        run.remember_before()
    metrics |= evaluated
    return due or over


def roll_back(run: Run, bad: int) -> None:
    """Too many non-finite steps: back to the last good checkpoint, then stop with the reason."""
    failed, faults = run.progress.step, dict(run.progress.faults)
    step = run.checkpoints.latest()
    if step is not None:
        run.load(step)
    run.progress.faults = {**faults, "rollbacks": faults.get("rollbacks", 0.0) + 1}
    raise InputError(
        f"stopped at step {failed}: {bad} optimizer steps in a row were not finite",
        rule=f"max_skipped_in_a_row={run.config.max_skipped_in_a_row}; "
        + (
            "no checkpoint to go back to"
            if step is None
            else f"rolled back to the checkpoint of step {step}"
        ),
        fix="lower the learning rate, or look at metrics.jsonl before that step",
    )


def example_rows(run: Run) -> list[dict]:
    """Completions to show: the best, the worst, and some in between."""
    rows = sorted(
        run.source.report.examples, key=lambda r: -r["reward"] if r["status"] == "ok" else np.inf
    )
    picks = np.unique(np.linspace(0, len(rows) - 1, min(8, len(rows))).astype(int))
    return [{**rows[i], "phase": "rl"} for i in picks]


def loop(run: Run, tracking: Tracking, signals: Signals) -> None:
    """Until the run is finished, a signal arrives, or too many steps go wrong."""
    while not run.finished():
        if signals.received:  # during the start: nothing is new since the checkpoint
            raise Terminated(signals.received)
        metrics = one_step(run)
        run.metrics, step = metrics, run.progress.step
        show = run.phase is run.setup.main and run.setup.needs_reward
        show = show and (step % run.config.samples_every_steps == 0 or run.finished())
        rows = example_rows(run) if show else []
        bad = bad_steps_in_a_row(metrics)
        hopeless = bad >= run.config.max_skipped_in_a_row
        begun = time.perf_counter()
        due = not hopeless and after_step(run, metrics)
        metrics["time/evaluate_s"] = time.perf_counter() - begun
        tracking.log(step, metrics)
        if rows:
            tracking.samples(step, rows)
        if hopeless:
            roll_back(run, bad)
        check_scores(run, metrics)
        if due or signals.received:
            run.save(tracking)
        if signals.received and not run.finished():
            raise Terminated(signals.received)


def summarise(run: Run, status: str) -> dict:
    """What summary.json holds."""
    progress, devices = run.progress, run.setup.model.mesh.devices
    out = {
        "status": status,
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy if progress.rl_steps else None,
        "eval_before": progress.held_out_before,
        "eval_after": progress.held_out if progress.rl_steps else None,
        "stopped_early": run.stopped_early,
        "wall_s": time.monotonic() - run.started,
        "steps": progress.step,
        "sft_steps": progress.sft_steps,
        "rl_steps": progress.rl_steps,
        "prompts": progress.prompts,
        "completions": progress.completions,
        "seed": run.config.seed,
        "device": run.device,
        "memory": peak_memory(devices.flat),
        "started": last_start(run.folder),
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")},
        "compiles": compiles.count(),
        "data": run.setup.data.counts,
        "faults": progress.faults,
    }
    if run.steady:  # steps of the dataflow that compiled nothing
        means = np.mean(run.steady, axis=0)
        out["step_s"] = float(means.sum())
        out["time_split"] = {n: float(m / means.sum()) for n, m in zip(PARTS, means, strict=True)}
    if progress.right_before and progress.right and progress.rl_steps:
        pairs = zip(progress.right_before, progress.right, strict=True)
        changes = [b - a for a, b in pairs if a is not None and b is not None]
        if changes:
            out["difference"] = bootstrap(changes)
    return out


def finish(run: Run, status: str, lost: str) -> dict:
    """The exported policy, summary.json, and report.html last: Run.is_wrapped_up looks at it.

    What cannot be written keeps nothing else from being written and is part of the status, as is
    what was `lost` of the metrics.
    """
    folder, faults = run.folder, [lost] if lost else []

    def attempt(what: str, write: Callable, *arguments) -> None:
        try:
            write(*arguments)
        except Exception as error:
            if not disk_fault(error):
                raise
            fix = "make room or give it permissions, and start the same command again"
            faults.append(str(not_written(what, folder, error, fix)))

    if not folder.is_dir():  # nothing is put in its place
        faults.append(f"{folder} was removed while the run wrote it")
        return summarise(run, "; ".join([status, *faults]))
    if run.config.export and status != "failed":  # after a crash the arrays may be gone: donated
        attempt("the exported model", run.export)
    attempt("report.html", (folder / "report.html").unlink, True)
    if not (folder / "config.json").exists():  # somebody has removed it
        attempt("config.json", write_config, folder, run.config)
    attempt("timeline.json", timeline.write, folder, run.timelines)
    summary = summarise(run, "; ".join([status, *faults]))
    text = json.dumps(summary, indent=2) + "\n"
    attempt("summary.json", write_whole, folder / "summary.json", text)
    attempt("report.html", write_report, folder)
    return {**summary, "status": "; ".join([status, *faults])}


def write_config(folder: Path, config: Config) -> None:
    write_whole(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")


def programs(setup: Setup) -> list[tuple[str, str]]:
    """The large programs of a run in the order in which it compiles them, by function and use."""
    learning = [
        (phase.dataflow.function.__name__, f"learn {phase.label}") for phase in setup.phases
    ]
    samples = setup.needs_reward or setup.data.test_prompts
    return [*learning[:-1], *([("rollout", "generate")] if samples else []), learning[-1]]


def _prepare_jax(config: Config) -> None:
    if config.compilation_cache:
        folder = os.path.expanduser(config.compilation_cache)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    compiles.watch()


def train(
    config: Config, *, on_start: Callable[[Path], None] | None = None, devices=None
) -> TrainedRun:
    """Run a config to its end (resuming if run_dir holds checkpoints), on `devices` (default: all
    there are); returns the run: its folder, summary, metrics, report and policy.

    Raises InputError for anything the user can fix, before the first compile wherever that is
    possible.
    """
    devices = jax.devices() if devices is None else devices
    for warning in validate(config, len(devices)):
        LOG.warning("%s", warning)
    _prepare_jax(config)
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    path = Path(config.run_dir) if config.run_dir else Path("runs") / name
    with removed_if_empty(path):
        return _train(config, path, on_start, devices)


def _train(config: Config, path: Path, on_start, devices) -> TrainedRun:
    folder = make_folder(path)
    if on_start:
        on_start(folder)
    shows = "console" in config.trackers
    console = Console(config.sft.steps + config.steps, busy=compiles.running) if shows else None
    settings, summary, status = to_dict(config), {}, "failed"
    with Signals() as signals, locked(folder), Run(build(config, devices), folder) as run:
        if console:
            print(f"plan: {run.memory.line()}", flush=True)
            for note in run.setup.data.notes:
                print(f"data: {note}", flush=True)
        with open_tracking(config.trackers, folder, settings, console) as tracking:
            try:
                try_rewards(run)
                compiles.expect(programs(run.setup))
                if console:
                    console.begin()
                run.start(tracking)
                if console and run.progress.step:
                    print(f"resumed {folder} at step {run.progress.step}", flush=True)
                # Written only now: a refused resume must not replace the config of the run it was
                # refused for.
                write_config(folder, config)
                plan, step = run.memory.line(), run.progress.step
                record_start(folder, device=run.device, memory=plan, step=step)
                with renewed_report(folder, config.report_every_minutes):
                    loop(run, tracking, signals)
                require_scores(run)
                status = "finished"
            except Terminated as stop:
                status = f"stopped by {stop} at step {run.progress.step}, " + (
                    "before the first checkpoint"
                    if run.saved_step is None
                    else f"saved at step {run.saved_step}"
                )
            except InputError as error:
                status = str(error)
                raise
            except OSError as error:
                if not concerns(folder, error):
                    raise
                fix = "make room or give it permissions, and start the same command again"
                fault = not_written("a file of the run", folder, error, fix)
                status = str(fault)
                raise fault from None
            finally:
                if run.started_training:
                    summary = finish(run, status, tracking.lost())
    return TrainedRun(folder, summary)
