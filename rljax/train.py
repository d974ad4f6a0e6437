"""The training loop: config -> data, roles, dataflow -> {step, log, evaluate, save}. Plumbing only.

What lives here: the run's folder and state, resume, signals, faults. What does not: any algorithm
(rljax.dataflows), construction (rljax.build).

A run is `sft.steps` supervised steps, then `steps` steps of the dataflow. Every random draw is a function of
(seed, step), and the data order of (seed, position), so that a resumed run is bitwise the uninterrupted one.
"""

import dataclasses
import json
import logging
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax import build, compiles
from rljax.batch import Batch
from rljax.checkpoint import Checkpoints, check_fingerprints
from rljax.config import Config, fingerprints, to_dict, validate
from rljax.console import Console
from rljax.data.loader import make_loader
from rljax.data.prompts import Prompts, pad_examples
from rljax.dataflows.sft import sft
from rljax.errors import InputError
from rljax.evaluate import bootstrap, greedy_accuracy
from rljax.mesh import shard_rows
from rljax.models.huggingface import save_params
from rljax.optimizers import current_learning_rate
from rljax.report import write_report
from rljax.timing import collect
from rljax.tracking import open_tracking

LOG = logging.getLogger("rljax")


@dataclasses.dataclass
class Progress:
    """The JSON half of a checkpoint: where the run is, and what it has found so far."""

    sft_steps: int = 0
    rl_steps: int = 0
    phase: str = "sft"
    accuracy_before: dict | None = None
    accuracy: dict | None = None
    right_before: list | None = None  # per prompt, for the interval of the difference
    right: list | None = None
    prompts: int = 0
    completions: int = 0
    faults: dict[str, float] = dataclasses.field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def step(self) -> int:
        return self.sft_steps + self.rl_steps


class Terminated(Exception):
    """SIGTERM or SIGINT was received; the state has been saved."""


class Run:
    """One run: its setup, roles and progress. `train` drives it."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder
        self.started = time.monotonic()
        self.setup = build.build(config)
        self.key = jax.random.key(config.seed)
        self.checkpoints = Checkpoints(
            folder / "checkpoints", keep=config.checkpoint.keep, best_metric=config.checkpoint.best_metric
        )
        self.fingerprints = {**fingerprints(config), "data": self.setup.data.digest}
        data, seed = self.setup.data, config.seed
        self.prompts = make_loader(data.prompts, batch_size=config.batch.prompts_per_step, seed=seed)
        self.examples = None
        if config.sft.steps:
            self.examples = make_loader(
                data.examples, batch_size=config.sft.sequences_per_step, seed=seed
            )
        self.progress = Progress(phase="sft" if config.sft.steps else "rl")
        self.roles: dict = {}
        self.metrics: dict[str, float] = {}
        self.reward = self.eval_reward = None
        if self.setup.needs_reward or data.test_prompts:
            self.reward = build.reward_role(self.setup, config.reward.function)
            other = config.evaluate.reward
            self.eval_reward = build.reward_role(self.setup, other) if other else self.reward

    def close(self) -> None:
        for reward in {id(r): r for r in (self.reward, self.eval_reward) if r is not None}.values():
            reward.close()

    # -- state -------------------------------------------------------------------------------------------------

    def start(self, tracking) -> None:
        """Resume from the newest whole checkpoint of the folder, or start anew."""
        step = self.checkpoints.latest()
        if step is None:
            tracking.truncate({"metrics.jsonl": 0, "samples.jsonl": 0})
            params = build.initial_params(self.setup)
            if self.progress.phase == "sft":
                self.roles = build.sft_roles(self.setup, params)
            else:
                self.begin_rl(params)
            return
        state = self.checkpoints.read_state(step)
        check_fingerprints(state["fingerprints"], self.fingerprints, self.config.checkpoint.allow_changed)
        self._load(step, state)
        tracking.truncate(state["offsets"])
        if self.finished():
            raise InputError(
                f"{self.folder} is a finished run: step {step}, nothing left to train",
                fix="use a new run_dir, or raise steps and allow it: "
                "--config.checkpoint.allow_changed=\"('steps',)\"",
            )
        LOG.warning("resumed %s at step %d", self.folder, step)

    def _load(self, step: int, state: dict) -> None:
        self.progress = Progress(**state["progress"])
        params = self.setup.model.init(jax.random.key(0))  # shapes and shardings; the values are replaced
        make = build.sft_roles if self.progress.phase == "sft" else build.rl_roles
        roles = make(self.setup, params)
        self.roles = build.with_arrays(roles, self.checkpoints.read_arrays(step, build.role_arrays(roles)))
        self.prompts.set_state(state["prompts"])
        if self.examples is not None:
            self.examples.set_state(state["examples"])
        self.started = time.monotonic() - self.progress.elapsed_s

    def save(self, tracking) -> None:
        """Everything, at once: roles, data position, progress, tracker offsets."""
        if self.metrics.get("skipped_in_a_row", 0) > 0:
            return  # a checkpoint is a state worth going back to
        self.progress.elapsed_s = time.monotonic() - self.started
        state = {
            "progress": dataclasses.asdict(self.progress),
            "fingerprints": self.fingerprints,
            "offsets": tracking.offsets(),
            "prompts": self.prompts.get_state(),
            "examples": self.examples.get_state() if self.examples is not None else None,
            "metrics": {k: v for k, v in self.metrics.items() if isinstance(v, float) and np.isfinite(v)},
        }
        self.checkpoints.save(self.progress.step, build.role_arrays(self.roles), state)

    def finished(self) -> bool:
        return self.progress.phase == "rl" and self.progress.rl_steps >= self.config.steps

    # -- steps -------------------------------------------------------------------------------------------------

    def begin_rl(self, params) -> None:
        """Fresh optimizers on these weights; the reference is their copy."""
        self.roles = build.rl_roles(self.setup, params)
        self.progress.phase = "rl"

    def sft_step(self) -> dict:
        examples = pad_examples(next(self.examples), length=self.setup.data.example_tokens)
        batch = shard_rows(Batch(**examples), self.setup.model.mesh)
        new, metrics = sft(batch, None, self.setup.sft_recipe, actor=self.roles["actor"])
        self.roles |= new
        self.progress.sft_steps += 1
        taken = self.progress.sft_steps - 1
        metrics["lr"] = current_learning_rate(self.config.sft.optimizer, self.config.sft.steps, taken)
        return metrics

    def rl_step(self) -> dict:
        setup, config = self.setup, self.config
        prompts = Prompts.from_records(next(self.prompts), length=setup.data.prompt_tokens)
        key = jax.random.fold_in(jax.random.fold_in(self.key, 2), self.progress.rl_steps)
        roles = {k: v for k, v in self.roles.items() if k in setup.dataflow.parameters}
        if setup.needs_reward:
            roles["reward"] = self.reward
        new, metrics = setup.dataflow(prompts, key, setup.recipe, **roles)
        self.roles |= {k: v for k, v in new.items() if k in self.roles}
        self.progress.rl_steps += 1
        completions = len(prompts.records) * setup.recipe.samples_per_prompt
        self.progress.prompts += len(prompts.records)
        self.progress.completions += completions
        total = build.optimizer_steps(config)
        taken = self.progress.rl_steps * total // max(config.steps, 1) - 1
        counts = self.reward.counts if setup.needs_reward else {}
        return {
            **metrics,
            **counts,
            "lr": current_learning_rate(config.actor_optimizer, total, max(taken, 0)),
            "batch/prompts": float(len(prompts.records)),
            "batch/completions": float(completions),
            "data/epoch": self.prompts.epoch,
        }

    def evaluate(self) -> dict:
        """Greedy accuracy on the held-out prompts, remembered in progress; {} when there are none."""
        data = self.setup.data
        if not data.test_prompts:
            return {}
        right, rows = greedy_accuracy(
            self.roles["actor"], self.eval_reward, data.test_prompts, sampling=self.setup.recipe.sampling,
            prompt_tokens=data.prompt_tokens, correct_at=self.config.evaluate.correct_at,
        )  # fmt: skip
        found = bootstrap(right)
        self.progress.accuracy, self.progress.right = found, [None if np.isnan(r) else float(r) for r in right]
        truncated = float(np.mean([r["finish_reason"] == "length" for r in rows]))
        return {
            "eval/accuracy": found["value"], "eval/accuracy_low": found["low"],
            "eval/accuracy_high": found["high"], "eval/truncated_fraction": truncated,
        }  # fmt: skip


def _fresh_name() -> str:
    return time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"


class _Signals:
    """SIGTERM and SIGINT set `received`; the loop saves and leaves between two steps."""

    def __enter__(self):
        self.received, self.old = None, {}
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.old[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread (a notebook's executor): signals are not ours
                pass
        return self

    def _note(self, number, _frame):
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step to end
        self.received = signal.Signals(number).name

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)


def _count_faults(progress: Progress, metrics: dict) -> None:
    for name in ("skipped_steps", "critic/skipped_steps", "reward/errors", "reward/timeouts"):
        if metrics.get(name):
            progress.faults[name] = progress.faults.get(name, 0.0) + float(metrics[name])


def _one_step(run: Run) -> dict:
    """One step of the current phase with its timings; the split sums to time/step_s."""
    phase, begun = run.progress.phase, time.perf_counter()
    compiled = compiles.count()
    with collect() as seconds:
        metrics = run.sft_step() if phase == "sft" else run.rl_step()
        metrics = {k: float(v) for k, v in metrics.items()}
    step_s = time.perf_counter() - begun
    for name in ("generate", "reward", "learn"):
        metrics[f"time/{name}_s"] = seconds.get(name, 0.0)
    tokens = metrics.get("response_tokens/mean", 0.0) * metrics.get("batch/completions", 0.0)
    if tokens:
        metrics["tokens_per_s"] = tokens / step_s
        metrics["generate_tokens_per_s"] = tokens / max(seconds.get("generate", 0.0), 1e-9)
    metrics |= {"phase": phase, "compiles": float(compiles.count())}
    in_phase = run.progress.sft_steps if phase == "sft" else run.progress.rl_steps
    if in_phase > 3 and compiles.count() > compiled:
        LOG.warning("step %d compiled again: %s", run.progress.step, "; ".join(compiles.names(compiled)))
    _count_faults(run.progress, metrics)
    return metrics


def _evaluation_due(run: Run) -> bool:
    every, steps = run.config.evaluate.every_steps, run.progress.rl_steps
    return run.finished() or bool(every and steps % every == 0)


def _sft_is_over(run: Run) -> tuple[bool, dict]:
    """Whether the supervised phase ends here, and the evaluation that decided it."""
    settings, done = run.config.sft, run.progress.sft_steps
    if settings.stop_at_accuracy and done % settings.check_every_steps == 0:
        found = run.evaluate()
        return done >= settings.steps or found.get("eval/accuracy", 0.0) >= settings.stop_at_accuracy, found
    return done >= settings.steps, {}


def _after_step(run: Run, metrics: dict) -> bool:
    """Evaluate and change phase where it is time; adds to `metrics`. True if a checkpoint is due."""
    every = run.config.checkpoint.every_steps
    due = bool(every and run.progress.step % every == 0)
    if run.progress.phase == "sft":
        over, found = _sft_is_over(run)
        if over:
            found = found or run.evaluate()
            run.begin_rl(run.roles["actor"].state.params)
            _remember_before(run)
        metrics |= found
        return due or over
    if _evaluation_due(run):
        metrics |= run.evaluate()
    return due or run.finished()


def _remember_before(run: Run) -> None:
    run.progress.accuracy_before, run.progress.right_before = run.progress.accuracy, run.progress.right


def _give_up(run: Run, metrics: dict) -> None:
    """Too many non-finite steps: back to the last good checkpoint, then stop with the reason."""
    worst = max(metrics.get("skipped_in_a_row", 0.0), metrics.get("critic/skipped_in_a_row", 0.0))
    if worst < run.config.max_skipped_in_a_row:
        return
    failed, step = run.progress.step, run.checkpoints.latest()
    faults = dict(run.progress.faults)
    if step is not None:
        run._load(step, run.checkpoints.read_state(step))
    run.progress.faults = {**faults, "rollbacks": faults.get("rollbacks", 0.0) + 1}
    back = f"rolled back to the checkpoint of step {step}" if step is not None else "there is no checkpoint yet"
    raise InputError(
        f"stopped at step {failed}: {int(worst)} optimizer steps in a row had a non-finite loss or gradient",
        rule=f"max_skipped_in_a_row={run.config.max_skipped_in_a_row}; {back}",
        fix="lower the learning rate, or look at metrics.jsonl before that step",
    )


def _example_rows(run: Run, step: int) -> list[dict]:
    """Completions to show: the best, the worst, and some in between."""
    rows = sorted(run.reward.rows, key=lambda r: -r["reward"] if r["status"] == "ok" else np.inf)
    picks = np.unique(np.linspace(0, len(rows) - 1, min(8, len(rows))).astype(int))
    return [{**rows[i], "phase": run.progress.phase, "step": step} for i in picks]


def _loop(run: Run, tracking, signals: _Signals) -> None:
    while not run.finished():
        begun = time.perf_counter()
        phase = run.progress.phase
        metrics = _one_step(run)
        step = run.progress.step
        sampled = phase == "rl" and run.setup.needs_reward
        rows = _example_rows(run, step) if sampled else []
        run.metrics = metrics
        _give_up_after_log = metrics.get("skipped_in_a_row", 0.0) >= run.config.max_skipped_in_a_row
        work_s = time.perf_counter() - begun
        save_due = False if _give_up_after_log else _after_step(run, metrics)
        parts = sum(metrics[f"time/{name}_s"] for name in ("generate", "reward", "learn"))
        metrics["time/rest_s"], metrics["time/step_s"] = work_s - parts, work_s
        tracking.log(step, metrics)
        if rows and (step % run.config.samples_every_steps == 0 or run.finished()):
            tracking.samples(step, rows)
        _give_up(run, metrics)
        if signals.received:
            run.save(tracking)
            raise Terminated(signals.received)
        if save_due:
            run.save(tracking)


def _versions() -> dict:
    from importlib.metadata import version

    names = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {"python": platform.python_version(), **{n: version(n) for n in names}}


def _summary(run: Run, status: str) -> dict:
    progress = run.progress
    out = {
        "status": status,
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy if progress.rl_steps else None,
        "wall_s": time.monotonic() - run.started,
        "steps": progress.step,
        "sft_steps": progress.sft_steps,
        "rl_steps": progress.rl_steps,
        "prompts": progress.prompts,
        "completions": progress.completions,
        "seed": run.config.seed,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": _versions(),
        "compiles": compiles.count(),
        "data": run.setup.data.counts,
        "faults": progress.faults,
    }
    if progress.right_before and progress.right and progress.rl_steps:
        pairs = [
            (a, b)
            for a, b in zip(progress.right_before, progress.right, strict=True)
            if a is not None and b is not None
        ]
        if pairs:
            out["difference"] = bootstrap([b - a for a, b in pairs])
    return out


def export(run: Run) -> None:
    """The policy as a Hugging Face folder: weights, config, tokenizer."""
    tokenizer, actor = run.setup.tokenizer, run.roles["actor"]
    folder = run.folder / "policy"
    save_params(
        folder, actor.model, actor.state.params,
        bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    tokenizer.save(folder)


def _finish(run: Run, status: str) -> dict:
    summary = _summary(run, status)
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if run.config.export and run.roles:
        export(run)
    write_report(run.folder)
    return summary


def _prepare_jax(config: Config) -> None:
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    compiles.watch()


def train(config: Config, *, on_start: Callable[[Path], None] | None = None) -> dict:
    """Run a config to its end (resuming if run_dir holds checkpoints); returns what summary.json holds.

    Raises InputError for anything the user can fix, before the first compile wherever that is possible.
    """
    for warning in validate(config):
        LOG.warning("%s", warning)
    _prepare_jax(config)
    folder = build.run_folder(config, _fresh_name)
    folder.mkdir(parents=True, exist_ok=True)
    if on_start:
        on_start(folder)
    run = Run(config, folder)
    (folder / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
    total = config.sft.steps + config.steps
    console = Console(total) if "console" in config.trackers else None
    status = "failed"
    try:
        with _Signals() as signals, open_tracking(config.trackers, folder, to_dict(config), console) as tracking:
            try:
                run.start(tracking)
                if run.progress.phase == "rl" and run.progress.rl_steps == 0 and not run.progress.accuracy:
                    run.evaluate()
                    _remember_before(run)
                _loop(run, tracking, signals)
                status = "finished"
            except Terminated as stop:
                status = f"stopped by {stop}, saved at step {run.progress.step}"
            except InputError as error:
                status = str(error)
                raise
            finally:
                if run.roles and run.progress.step:
                    summary = _finish(run, status)
    finally:
        run.close()
    return summary
