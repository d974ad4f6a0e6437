"""The training loop: steps, evaluations, logs and checkpoints until the run is over.

It has the order of things, the run folder, signals, faults and the summary. The state of a run is
in rljax.training.run, and every algorithm is a page of rljax.dataflows.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax import heartbeat, hosts
from rljax.config import Config, to_dict
from rljax.config.trust import vouch
from rljax.correction.health import health_warnings
from rljax.data.rows.show import turn_lines
from rljax.errors import InputError
from rljax.evaluation.policy import GAIN, bootstrap
from rljax.files import read_json_object
from rljax.metric import Metric
from rljax.report import timeline
from rljax.report.live import renewed_report
from rljax.report.page import write_report
from rljax.report.run_folder import MOST_FAILED, equal_rewards
from rljax.report.run_warnings import (
    COMPILED_AGAIN,
    EQUAL_REWARDS,
    MOST_TRUNCATED,
    NO_GRADIENT,
    REWARDS_FAILING,
    TRUNCATED,
    UNHEALTHY,
    too_many_truncated,
)
from rljax.report.starts import last_start, peak_memory, record_start, run_date, versions
from rljax.rollout import Player
from rljax.runs.folder import concerns, disk_fault, exported_steps, not_written, write_whole
from rljax.setup import Setup, build
from rljax.setup.default_batch import with_default_batch
from rljax.tracking import compiles
from rljax.tracking.meanings import Meanings
from rljax.tracking.notebook import make_console
from rljax.tracking.screen import streams_without_readers
from rljax.tracking.signals import Signals
from rljax.tracking.timing import collect
from rljax.tracking.trackers import Silent, Tracking, open_tracking
from rljax.training.best_metric import none_was_best, not_measured
from rljax.training.health import narrowest_numbers
from rljax.training.hub_commits import with_commits
from rljax.training.preflight import check_same_data, check_same_start
from rljax.training.profiling import Profile
from rljax.training.program_cache import ProgramCache, compiled_for
from rljax.training.progress import bad_steps_in_a_row
from rljax.training.result import RunStopped, TrainedRun
from rljax.training.run import ADAPTER, EXPORTED, Run
from rljax.training.run_folder import RunFolder, run_folder, write_config, write_data_page
from rljax.training.scores import check_scores, examples, require_scores, shown_sample, try_rewards
from rljax.training.setup_warnings import setup_warnings
from rljax.training.sources import data_counts, epoch_notes
from rljax.validation import validate

METRICS = {
    "learning_programs": Metric(
        "programs of the phases' learning compiled so far",
        "programs",
        "1 for each phase: lengths change none",
    ),
    "compiles": Metric("programs compiled so far", "programs", "flat after the first steps"),
    "tokens_per_s": Metric("tokens per second of the whole step", "tokens/s", "steady"),
    "generate_tokens_per_s": Metric("tokens per second while sampling", "tokens/s", "steady"),
    "time/generate_s": Metric("sampling", "seconds"),
    "time/reward_s": Metric(
        "waiting for rewards", "seconds", "small: scoring goes on beside sampling"
    ),
    "time/learn_s": Metric("log-probs, advantages and update", "seconds"),
    "time/program_s": Metric(
        "sampling, scoring and learning in one program, the step's share", "seconds"
    ),
    "time/rest_s": Metric("everything else of the step", "seconds", "small"),
    "time/evaluate_s": Metric("evaluation", "seconds"),
    "time/reward_hidden_s": Metric("scoring that went on while sequences were decoded", "seconds"),
    "time/reward_sample_mean_s": Metric(
        "scoring one sample, mean", "seconds", "below reward.timeout_s"
    ),
    "time/reward_sample_max_s": Metric(
        "scoring one sample, longest", "seconds", "below reward.timeout_s"
    ),
    "time/*_s": Metric("seconds of {}", "seconds"),
}

LOG = logging.getLogger("rljax")
# A run that is trained: it yields where a program is about to take its next steps, and returns what
# has become of it and the signal that came too late to stop it.
Training = Generator[Run, None, tuple[TrainedRun, str]]
_OF_SCORES = ("reward/mean", "reward/std", "reward/min", "reward/max", "shaped_reward/mean")
PARTS = ("generate", "reward", "learn", "program", "rest")
_STOPPED = "stopped by"  # how the status of a run begins that a signal has stopped


@dataclasses.dataclass(frozen=True)
class Beside:
    """Signals of the process and players that score samples: shared by the runs that take their
    steps together."""

    signals: Signals
    players: Sequence[Player] = ()


def one_step(run: Run) -> dict:
    """Takes one step of the current phase and returns its metrics, with its seconds split into
    generate, reward, learn and rest."""
    phase = run.phase
    compiled = compiles.count()
    with collect() as timings:
        metrics = {k: float(v) for k, v in run.step().items()}
    step_s, seconds = time.monotonic() - timings.begun_s, timings.seconds
    seconds["rest"] = step_s - sum(seconds.values())
    names = [name for name in PARTS if name in seconds or name != "program"]
    metrics |= {f"time/{name}_s": seconds.get(name, 0.0) for name in names}
    if phase.samples:
        metrics |= timings.decoding_metrics()
    for role, sums in timings.moves.items():
        metrics |= {f"placement/{role}/{name}": number for name, number in sums.items()}
    if timings.scoring:
        each = [end - begin for begin, end in timings.scoring]
        metrics["time/reward_hidden_s"] = timeline.scored_while_decoding(timings)
        metrics["time/reward_sample_mean_s"] = float(np.mean(each))
        metrics["time/reward_sample_max_s"] = max(each)
    tokens = metrics.get("response_tokens/mean", 0.0) * metrics.get("batch/completions", 0.0)
    if tokens:
        metrics["tokens_per_s"] = tokens / step_s
        metrics["generate_tokens_per_s"] = tokens / max(timings.decoding_s, 1e-9)
    elif "batch/tokens" in metrics:
        metrics["tokens_per_s"] = metrics["batch/tokens"] / step_s
    here = run.taken_here[phase.name] = run.taken_here.get(phase.name, 0) + 1
    learning = f"jit({phase.dataflow.function.__name__})"
    run.learning_programs += compiles.names(compiled, ahead=False).count(learning)
    if here > 3 and compiles.count() > compiled:
        names = "; ".join(compiles.names(compiled))
        run.warn(COMPILED_AGAIN, f"compiled again: {names}")
    if phase is run.setup.main and compiles.count() == compiled and not run.compiled_program:
        if not run.steady:
            # Each step makes objects for every sample, which make the garbage collector run: it
            # would look at all traced programs each time.
            gc.collect()
            gc.freeze()
        run.steady.append([seconds.get(name, 0.0) for name in PARTS])
        # Of the first such step, and of the last.
        run.timelines[1 if run.timelines else 0 :] = [
            timeline.record_of(timings, run.progress.step, step_s)
        ]
    _count_faults(run, metrics)
    learning_programs = run.learning_programs + run.ahead.programs
    counts = {"compiles": compiles.count(), "learning_programs": learning_programs}
    return {**metrics, "phase": phase.label, **{name: float(n) for name, n in counts.items()}}


def _count_faults(run: Run, metrics: dict) -> None:
    numbers = narrowest_numbers(run.config, run.setup.model.mesh)
    for text in health_warnings(metrics, numbers, run.own_metrics):
        run.warn(f"{UNHEALTHY}{text.split()[0]}", text)
    rewards = ("reward/errors", "reward/timeouts", "reward/timeouts_scored", "reward/abstained")
    for name in ("skipped_steps", "critic/skipped_steps", *rewards):
        if metrics.get(name):
            run.progress.count_fault(name, metrics[name])
    failed = metrics.get("reward/errors", 0.0) + metrics.get("reward/timeouts", 0.0)
    unscored = failed + metrics.get("reward/abstained", 0.0)
    if unscored and unscored >= metrics.get("batch/completions", 1.0):
        for name in _OF_SCORES:  # a missing score is not a zero reward
            metrics.pop(name, None)
    if failed > MOST_FAILED * metrics.get("batch/completions", 1.0):
        said = ("ok", "abstained")
        first = next(row for row in run.source.report.rows if row.score.status not in said)
        text = f"{failed:.0f} rewards failed and are masked out, the first one: "
        run.warn(REWARDS_FAILING, text + shown_sample(first))
    equal = metrics.get("reward/all_equal") or metrics.get("reward/equal_groups", 0.0) == 1.0
    if "reward/all_equal" in metrics:
        run.warn_in_a_row(EQUAL_REWARDS, equal, lambda steps: equal_rewards(steps, metrics))
    if (share := metrics.get("response/truncated_fraction")) is not None:
        run.warn_in_a_row(
            TRUNCATED,
            share > MOST_TRUNCATED,
            lambda steps: f"{steps} steps in a row: {too_many_truncated(share)}",
        )
    if (norm := metrics.get("grad_norm")) is not None and not equal:
        run.warn_in_a_row(NO_GRADIENT, norm == 0, lambda steps: _without_gradient(steps, metrics))


def _without_gradient(steps: int, metrics: dict) -> str:
    entropy = metrics.get("entropy")
    at = f", the entropy {entropy:.4g}" if entropy is not None else ""
    return (
        f"for {steps} steps in a row the gradient is 0{at}: nothing is learned. Likely causes: a "
        "learning rate that has destroyed the weights, a filter that leaves no row, a clip that "
        "leaves no gradient"
    )


def after_step(run: Run, metrics: dict) -> bool:
    """Evaluates and enters the next phase if it is time, and adds to `metrics`. Returns whether a
    checkpoint is due."""
    config, progress = run.config, run.progress
    every = config.checkpoint.every_steps
    due = bool(every and progress.step % every == 0)
    if run.phase is run.setup.main and progress.rl_steps:
        every = config.evaluate.every_steps
        if run.finished() or (every and progress.rl_steps % every == 0):
            metrics |= run.evaluate()
        # Only a saved step can be the best.
        wanted = config.checkpoint.best_metric
        best = wanted.removeprefix("-") in metrics
        if progress.rl_steps == 1:
            run.add_warning(not_measured(wanted, metrics))
        return due or best or run.finished()
    begun = run.phase is run.setup.main  # and stopped in the evaluation before its first step
    over, evaluated = begun or progress.sft_steps >= config.sft.steps, {}
    if (
        not begun
        and config.sft.stop_at_accuracy
        and progress.sft_steps % config.sft.check_every_steps == 0
    ):
        evaluated = run.evaluate()
        over = over or evaluated.get("eval/accuracy", 0.0) >= config.sft.stop_at_accuracy
    if over:
        if not begun:
            with heartbeat.phase("begin"):
                run.begin(run.setup.main, run.roles["actor"].state.weights)
        evaluated = evaluated if evaluated and not run.setup.data.held_out else run.evaluate()
        run.remember_before()
    metrics |= evaluated
    return due or over


def roll_back(run: Run, bad: int) -> None:
    """Goes back to the last checkpoint after `bad` non-finite optimizer steps in a row, and raises
    InputError with the reason."""
    run.progress.count_fault("rollbacks")
    failed, faults = run.progress.step, dict(run.progress.faults)
    fault_steps = dict(run.progress.fault_steps)
    with heartbeat.phase("load"):
        run.checkpoints.wait()
        step = run.checkpoints.latest()
        if step is not None:
            run.load(step)
    narrow = run.config.model_settings.dtype == "float16"
    of_range = "; numbers above 65,504 leave float16: model_settings.dtype='bfloat16'" * narrow
    run.progress.faults, run.progress.fault_steps = faults, fault_steps
    back = "no checkpoint to go back to"
    back = back if step is None else f"rolled back to the checkpoint of step {step}"
    raise InputError(
        f"stopped at step {failed}: {bad} optimizer steps in a row were not finite",
        rule=f"max_skipped_in_a_row={run.config.max_skipped_in_a_row}; {back}",
        fix="lower the learning rate, or look at metrics.jsonl before that step" + of_range,
    )


def loop(run: Run, tracking: Tracking, signals: Signals, profile: Profile) -> Iterator[Run]:
    """Trains until the run is finished, a signal arrives, or too many steps go wrong; then waits
    until all checkpoints are written. Yields the run where a program is about to take its next
    steps."""
    try:
        yield from _steps(run, tracking, signals, profile)
    except hosts.StopAgreed:
        heartbeat.at_end()
        run.checkpoints.wait()
        raise
    finally:
        gc.unfreeze()
    heartbeat.at_end()
    run.checkpoints.wait()


def _steps(run: Run, tracking: Tracking, signals: Signals, profile: Profile) -> Iterator[Run]:
    stop = hosts.stop_agreed(signals.received)  # during the start
    while run.half_step or not run.finished():
        if hosts.count() == 1:
            stop = stop or signals.received
        if stop and not run.within_program:  # nothing is new since the checkpoint
            raise hosts.StopAgreed(stop)
        run.checkpoints.check()  # of the save before
        if run.needs_program:
            yield run
        try:
            metrics, shown, due = whole_step(run, profile)
        except hosts.StopAgreed:  # of several hosts, on all of them alike
            run.save_halfway(tracking)
            raise
        step = run.progress.step
        with heartbeat.phase("tracking"):
            tracking.log(step, metrics)
            if shown.get("samples"):
                tracking.samples(step, shown["samples"])
            if shown.get("episodes"):
                tracking.episodes(step, shown["episodes"])
        bad = bad_steps_in_a_row(metrics)
        if bad >= run.config.max_skipped_in_a_row:
            roll_back(run, bad)
        check_scores(run, metrics)
        stop = hosts.stop_agreed(signals.received)
        if run.within_program:  # the roles are those of a later step, before which nothing is due
            continue
        if due or stop:
            run.save(tracking)
        if stop and not run.finished():
            raise hosts.StopAgreed(stop)
    # A run that was stopped at a step which fewer steps make its last one is evaluated there.
    progress = run.progress
    if progress.evaluated_step != progress.step and (metrics := run.evaluate()):
        with heartbeat.phase("tracking"):
            tracking.log(progress.step, {"phase": run.phase.label, **metrics})


def whole_step(run: Run, profile: Profile) -> tuple[dict, dict, bool]:
    """Takes one step with its evaluation; returns (metrics, samples and episodes to show, whether a
    checkpoint is due). If a stopped run had only the evaluation of a step left, its batch is not
    learned again."""
    heartbeat.at_step(run.progress.step + (run.half_step is None))
    if run.half_step is None:
        with profile.step(run.progress.step + 1):
            metrics = one_step(run)
        run.metrics, step = metrics, run.progress.step
        show = hosts.first() and run.phase is run.setup.main and run.setup.needs_reward
        due = step % run.config.samples_every_steps == 0 or run.progress.rl_steps == 1
        show = show and (due or run.finished())  # the first ones are what later ones improve on
        run.half_step = (dict(metrics), examples(run) if show else {})
    metrics, shown = run.half_step
    run.metrics = metrics = dict(metrics)
    hopeless = bad_steps_in_a_row(metrics) >= run.config.max_skipped_in_a_row
    begun = time.perf_counter()
    due = not hopeless and after_step(run, metrics)
    metrics["time/evaluate_s"] = time.perf_counter() - begun
    run.half_step = None
    return metrics, shown, due


def summarise(run: Run, status: str) -> dict:
    """Returns the content of summary.json."""
    progress, devices = run.progress, run.setup.model.mesh.devices
    pass_after = (progress.measured and progress.pass_at_k) or {}
    step, accuracy, held_out = progress.evaluated_step, progress.accuracy, progress.held_out
    evaluated = {"step": step, "accuracy": accuracy, "eval": held_out}
    out = {
        "status": status,
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy if progress.measured else None,
        "eval_before": progress.held_out_before,
        "eval_after": progress.held_out if progress.measured else None,
        **{f"{name}_before": x for name, x in (progress.pass_at_k_before or {}).items()},
        **{f"{name}_after": x for name, x in pass_after.items()},
        "last_evaluation": None if progress.evaluated_step is None else evaluated,
        "stopped_early": run.stopped_early,
        "wall_s": time.monotonic() - run.started,
        "steps": progress.step,
        "sft_steps": progress.sft_steps,
        "rl_steps": progress.rl_steps,
        "prompts": progress.prompts,
        "completions": progress.completions,
        "seed": run.config.seed,
        "device": run.device,
        "memory": peak_memory([d for d in devices.flat if d in d.client.local_devices()]),
        "started": last_start(run.folder),
        "versions": versions(),
        "compiles": compiles.count(),
        "data": data_counts(run.setup, run.sources),
        "faults": progress.faults,
        "fault_steps": progress.fault_steps,
        "warnings": run.warnings,
        "unread": sorted(run.unread),
    }
    if run.steady:  # steps of the dataflow that compiled nothing
        means = np.mean(run.steady, axis=0)
        out["step_s"] = float(means.sum())
        parts = {name: float(m / means.sum()) for name, m in zip(PARTS, means, strict=True)}
        out["time_split"] = {n: part for n, part in parts.items() if part or n != "program"}
    if progress.right_before and progress.right and progress.measured:
        pairs = zip(progress.right_before, progress.right, strict=True)
        changes = [b - a for a, b in pairs if a is not None and b is not None]
        if changes:
            out["difference"] = bootstrap(changes, within=GAIN)
    return out


def finish(run: Run, status: str, lost: str) -> dict:
    """Writes the exported policy, summary.json, and report.html last: RunFolder.is_wrapped_up looks
    at it. Returns the summary.

    A file that cannot be written does not keep the others from being written; it becomes part of
    the status, as do metrics that were `lost`.

    A run that a signal has stopped exports nothing: a half-trained policy would stand where a final
    one does. It goes on and exports then. Of several hosts the first one writes, and all take part
    in the export, so only a run that has finished makes it: one of them may be gone. The summary
    says of which step each exported model is: that of an earlier end stays in the folder.
    """
    folder, faults = run.folder, [lost] if lost else []
    # After a crash the arrays may be gone: donated.
    exports = status != "failed" if hosts.count() == 1 else status == "finished"
    exports = exports and not status.startswith(_STOPPED)

    def attempt(what: str, write: Callable, *arguments) -> bool:
        try:
            write(*arguments)
        except Exception as error:
            if not disk_fault(error):
                raise
            fix = "make room or give it permissions, and start the same command again"
            faults.append(str(not_written(what, folder, error, fix)))
            return False
        return True

    gone = not hosts.share(folder.is_dir()) if exports else not folder.is_dir()
    exported = _exported_before(folder)
    if run.config.export and exports and not gone:
        if run.setup.model.config.lora and attempt("the exported adapter", run.export_adapter):
            exported[ADAPTER] = run.progress.step
        if attempt("the exported model", run.export):
            exported[EXPORTED[run.phase.trains]] = run.progress.step
    if not hosts.first():
        return {}
    if gone:  # nothing is put in its place
        faults.append(f"{folder} was removed while the run wrote it")
        return summarise(run, "; ".join([status, *faults]))
    attempt("report.html", (folder / "report.html").unlink, True)
    if not (folder / "config.json").exists():  # somebody has removed it
        attempt("config.json", write_config, folder, run.config)
    attempt("timeline.json", timeline.write, folder, run.timelines)
    summary = {**summarise(run, "; ".join([status, *faults])), "exported": exported}
    text = json.dumps(summary, indent=2) + "\n"
    attempt("summary.json", write_whole, folder / "summary.json", text)
    attempt("report.html", write_report, folder)
    faults += filter(None, [run.run_folder.close()])
    return {**summary, "status": "; ".join([status, *faults])}


def _exported_before(folder: Path) -> dict[str, int]:
    """Returns {folder: step} of what earlier ends of the run have exported."""
    try:
        return exported_steps(read_json_object(folder / "summary.json")) or {}
    except InputError:  # there is none, or it cannot be read
        return {}


def programs(setup: Setup) -> list[tuple[str, str]]:
    """Returns (function, use) of the large programs of a run in the order in which it
    compiles them."""
    learning = [(one.dataflow.function.__name__, f"learn {one.label}") for one in setup.phases]
    samples = setup.needs_reward or setup.data.test_prompts
    return [*learning[:-1], *([("rollout", "generate")] if samples else []), learning[-1]]


@streams_without_readers()
def train(
    config: Config,
    *,
    on_start: Callable[[Path | str], None] | None = None,
    devices=None,
    unset: Collection[str] = (),
    shipped: Config | None = None,
) -> TrainedRun:
    """Trains a config to its end (resuming if run_dir holds checkpoints), on `devices` (default:
    all); returns the run: its folder, summary, metrics, report and policy. The fields of
    config.batch that are `unset` are chosen for the model and the devices. `shipped` is the config
    of the library that this one was made from: a warm-up that it set causes no warning.

    Raises InputError for anything the user can fix, before the first compile wherever that is
    possible, and RunStopped if a signal has arrived.
    """
    hosts.start(config.hosts.init_timeout_s, config.hosts.heartbeat_s)
    try:
        check_same_start(config)
        devices = jax.devices() if devices is None else devices
        check = functools.partial(validate, devices=len(devices))
        config, said = with_default_batch(config, unset, devices, check)
        if said and "console" in config.trackers and hosts.first():
            print(said, flush=True)
        name = hosts.share(time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}")
        run, signal = _driven(trained(config, name, devices, shipped, on_start))
    except BaseException as error:
        hosts.fail(error)  # the others would wait for this host
        raise
    if signal or run.summary["status"].startswith(_STOPPED):
        raise RunStopped(run, signal)
    return run


def _driven(training: Training) -> tuple[TrainedRun, str]:
    """Returns the result of a run whose programs take its own steps alone."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value


def trained(
    config: Config,
    name: str,
    devices,
    shipped: Config | None = None,
    on_start: Callable[[Path | str], None] | None = None,
    beside: Beside | None = None,
) -> Training:
    """Opens the folder of a run, `name` if it is a new one, and trains in it, as `train_in`."""
    warnings = validate(config, len(devices), shipped)
    with run_folder(config.run_dir, name) as opened:
        if on_start:
            on_start(opened.url or opened.path)
        return (yield from train_in(config, opened, devices, warnings, shipped, beside))


def train_in(
    config: Config,
    run_folder: RunFolder,
    devices,
    warnings: Sequence[str],
    shipped: Config | None,
    beside: Beside | None = None,
) -> Training:
    """Trains a config in its opened folder. Yields the run where a program is about to take its
    next steps; returns the run, and the signal that came too late to stop it. `beside`: the run is
    one of several that take their steps together, and shows nothing on the console. Raises
    InputError and OSError as `train`."""
    folder = run_folder.path
    writes = hosts.first()  # files, trackers and the console
    shows = "console" in config.trackers and writes and beside is None
    steps = (config.sft.steps + config.steps, config.sft.steps)
    console = make_console(*steps, compiles.doing) if shows else None
    if console:
        console.begin()
    summary, status = {}, "failed"
    with (
        contextlib.closing(console) if console else contextlib.nullcontext(),
        Signals(abandons=hosts.count() > 1)
        if beside is None
        else contextlib.nullcontext(beside.signals) as signals,
        run_folder.watched(config, lambda: signals.received),
        run_folder.locked(),
        contextlib.nullcontext(with_commits(config, folder)) as (config, commits),
        ProgramCache(config, run_folder, say=console and console.say) as cache,
        Profile(config, folder, cache.after_step) as profile,
        _new_run(config, devices, run_folder, beside.players if beside else ()) as run,
    ):
        run.warnings = [*warnings, *setup_warnings(run.setup, shipped)]
        run.logs_warnings = beside is None
        for warning in run.warnings if writes and run.logs_warnings else ():
            LOG.warning("%s", warning)
        if console:
            console.warnings = run.all_warnings
            notes = [
                *turn_lines(run.setup.tokenizer),
                *run.setup.data.notes,
                *epoch_notes(run.sources["rl"], config.steps),
            ]
            print("\ndata: ".join([f"plan: {run.memory.line()}", *notes]), flush=True)
        opened = Silent()
        if writes:
            meanings = Meanings(folder, run.own_metrics, run.metric_prefixes)
            names = [name for name in config.trackers if shows or name != "console"]
            opened = open_tracking(names, folder, to_dict(config), console, meanings)
        with opened as tracking, hosts.telling():
            try:
                for warning in try_rewards(run):
                    run.add_warning(warning)
                compiles.expect(programs(run.setup))
                if console:
                    console.show()
                with heartbeat.phase("load"):
                    run.start(tracking)
                if console and run.progress.step:
                    console.goes_on(run.progress.step, run.total_steps)
                    print(f"resumed {run_folder} at step {run.progress.step}", flush=True)
                if writes:
                    # Only now: a refused resume leaves the config of the run that refused it.
                    write_config(folder, config, commits)
                    vouch(config, run_folder.at("config.json"), folder)
                    write_data_page(folder, run.setup)
                    started = dict(memory=run.memory.line(), step=run.progress.step)
                    started |= dict(warnings=run.warnings, chat_date=run.setup.tokenizer.now)
                    record_start(folder, device=run.device, compiled_for=compiled_for(), **started)
                with renewed_report(folder, config.report_every_minutes if writes else 0.0):
                    yield from loop(run, tracking, signals, profile)
                if writes:
                    run.add_warning(
                        none_was_best(config.checkpoint.best_metric, run.checkpoints.best())
                    )
                require_scores(run)
                status = "finished"
                if console:
                    console.finished()
            except hosts.StopAgreed as stop:
                run.started_training = True  # also if it was stopped in its first evaluation
                at = f"saved at step {run.saved_step}"
                at = "before the first checkpoint" if run.saved_step is None else at
                status = f"{_STOPPED} {stop} at step {run.progress.step}, {at}"
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
    late = "" if status.startswith(_STOPPED) or hosts.count() > 1 else signals.received or ""
    return TrainedRun(run_folder.url or folder, hosts.share(summary)), late


def _new_run(config: Config, devices, run_folder: RunFolder, players: Sequence[Player]) -> Run:
    date = run_date(run_folder.path).isoformat() if hosts.first() else ""
    setup = build(config, devices, datetime.datetime.fromisoformat(hosts.share(date)))
    check_same_data(setup)
    return Run(setup, run_folder, players=players)
