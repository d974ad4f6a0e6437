"""The state of one training run, and what one step does to it.

Every random draw is a function of (seed, phase, step), and the data order of (seed, position), so
that a resumed run is bitwise equal to one that was not interrupted.
"""

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax import contracts, heartbeat, hosts
from rljax import setup as build
from rljax.arrays import fetch
from rljax.checkpoint.checkpoint import STATE, Checkpoints, Damaged, check_fingerprints, reads_steps
from rljax.config import Config, fingerprints, is_path
from rljax.data.online.curriculum import Curriculum
from rljax.errors import InputError
from rljax.evaluation.in_training import accuracy_metrics, pass_estimates, with_interval
from rljax.evaluation.policy import SHARE, bootstrap, greedy_accuracy
from rljax.keys import root_key, stream
from rljax.learn.optimizers import current_learning_rate
from rljax.metric import Metric
from rljax.models.adapters import lora
from rljax.models.huggingface import save_params
from rljax.models.huggingface.peft import save_adapter
from rljax.plan.chips import local_devices
from rljax.plan.memory import check_fits, fewest_microbatches
from rljax.policies import Policy, sample_all
from rljax.report.run_warnings import IN_A_ROW, fault_lines, is_said
from rljax.roles.placed import run_dataflow
from rljax.rollout import Player, Reward
from rljax.runs.folder import whole_export
from rljax.setup import Phase, Setup
from rljax.setup.dry_run import check_fields_read, parts_readers
from rljax.tracking import timing
from rljax.tracking.timing import timed
from rljax.training.ahead import CompiledAhead
from rljax.training.bad_batch import is_bad, keep, of_taken_steps
from rljax.training.best_metric import check_best_metric
from rljax.training.health import own_metrics
from rljax.training.offline import held_out_step, read_reference_logprobs, store_reference_logprobs
from rljax.training.program_steps import ProgramSteps
from rljax.training.progress import Progress, bad_steps_in_a_row
from rljax.training.run_folder import RunFolder, exports_of
from rljax.training.sources import draw_pretraining, make_sources, positions
from rljax.validation.unread import unread

METRICS = {"lr": Metric("learning rate of the last optimizer step", "", "as its schedule says")}

LOG = logging.getLogger("rljax")
PRINTED = "rewards.log"  # what the functions of rewards print
# What reading a state of another form may raise.
_NOT_SAVED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, StopIteration)
EXPORTED = {"actor": "policy", "reward_model": "reward_model"}  # folder names
ADAPTER = "adapter"


def checkpoint_bytes(setup: Setup) -> int:
    """Returns the bytes of the arrays of a checkpoint, in the phase that has most."""
    phases = [build.role_arrays(build.abstract_roles(setup, phase)) for phase in setup.phases]
    return max(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(roles)) for roles in phases)


def adapted_folder(config: Config, role: str) -> str:
    """Returns the folder or name of the model whose weights are frozen below the adapters of a
    role, the actor or one that scores; "" for one of random weights."""
    start = config.model if role == "actor" else config.critic_model or config.model
    return start if is_path(start) else ""


def restored_roles(
    setup: Setup, phase: Phase, checkpoints: Checkpoints, step: int, record: Path
) -> dict:
    """Returns the roles of a phase with the arrays of a checkpoint. Raises InputError if adapters
    would be put on other weights than those of `record`, the run's model.json, or arrays into a
    model of another config.json, or if a frozen model beside them has other weights."""
    build.check_models(setup, record)
    if setup.model.config.has_frozen:  # a checkpoint holds what is trained alone
        may_differ = "model" in setup.config.checkpoint.allow_changed
        options = dict(begun=record, may_differ=may_differ)
        params = build.initial_params(setup.config, setup.model, **options)
    else:  # shapes and shardings; the values are replaced
        params = setup.model.init(root_key(0))
    roles = build.make_roles(setup, phase, params)
    return build.with_arrays(roles, checkpoints.read_arrays(step, build.role_arrays(roles)))


class Run:
    """One run: its setup, sources, roles and progress. `train` drives it.

    `players` are those of another run of such a config: they take the place of the config's own,
    and are not closed with the run.
    """

    def __init__(
        self, setup: Setup, run_folder: RunFolder | Path, *, players: Sequence[Player] = ()
    ):
        chip = local_devices()[1]
        setup = fewest_microbatches(setup, chip and chip.hbm_bytes)
        self.setup, self.config = setup, setup.config
        run_folder = run_folder if isinstance(run_folder, RunFolder) else RunFolder(run_folder)
        self.run_folder, self.folder = run_folder, run_folder.path
        self.started = time.monotonic()
        self.memory = check_fits(setup)  # before any weight is loaded
        config = self.config
        # Fields of the config that nothing reads, whatever they hold.
        self.unread = {*check_fields_read(setup), *unread(config)}
        self.own_metrics = own_metrics(config)
        check_best_metric(setup, self.own_metrics)
        self.key = root_key(config.seed)
        self.checkpoints = Checkpoints(
            run_folder.at("checkpoints"),
            keep=config.checkpoint.keep,
            best_metric=config.checkpoint.best_metric,
            before_commit=run_folder.put,
        )
        self.fingerprints = {**fingerprints(config), "data": setup.data.digest}
        self.progress = Progress(phase=setup.phases[0].name)
        self.roles: dict = {}
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []  # that were known before the first step
        self.logs_warnings = True  # as they are counted
        self.steady: list[list[float]] = []  # seconds of generate, reward, learn, rest of each step
        self.timelines: list[dict] = []  # rljax.report.timeline: of two steps at most
        self.unscored_steps = 0  # in a row
        self.late_samples = self.late_and_longer = 0.0  # rljax.training.scores
        self.learning_programs = 0  # of all phases, that this process compiled
        self.taken_here: dict[str, int] = {}  # steps of each phase by this process
        self.begun_at: dict | None = None  # the positions at the beginning of the step that runs
        # Metrics and what to show of a step that is learned, but not evaluated and logged yet.
        self.half_step: tuple[dict, dict[str, list[dict]]] | None = None
        self.started_training = False
        self.saved_step: int | None = None  # of the checkpoint that a resume would go on from
        self.owned: list[Player] = []
        if not players and (setup.needs_reward or setup.data.test_prompts):
            players = self.owned = build.open_players(setup, self.folder / PRINTED)
        self.player, self.eval_player = (players[0], players[-1]) if players else (None, None)
        if self.eval_player is not None:  # evaluation uses the outcome reward only
            self.eval_player = self.eval_player.outcome_alone()
        self.sources = make_sources(setup, self.player, self.key)
        self.ahead = CompiledAhead()
        self.programs: ProgramSteps | None = None  # of the last phase, if it takes several at once
        if self.config.program_steps > 1:
            main = setup.main
            self.programs = ProgramSteps(setup, main, self.sources[main.name], self.key)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Waits for checkpoints that are being written, and closes the players that the run
        has opened."""
        self.ahead.wait()
        self.checkpoints.close()
        for player in self.owned:
            player.close()

    @property
    def reward(self) -> Reward | None:
        """The reward that scores samples; of episodes the one that was opened, if there is any."""
        return None if self.player is None else self.player.reward

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.setup.phase(self.progress.phase)

    @property
    def device(self) -> str:
        """Text with the number of devices of each kind: "8 x TPU v5e", "16 x TPU v5e on
        4 hosts"."""
        devices, count = self.setup.model.mesh.devices, hosts.count()
        on_hosts = f" on {count} hosts" if count > 1 else ""
        return f"{devices.size} x {devices.flat[0].device_kind}{on_hosts}"

    @property
    def source(self):
        """The source of the current phase's batches."""
        return self.sources[self.progress.phase]

    # -- state --

    def start(self, tracking) -> None:
        """Resumes from the newest whole checkpoint of the folder, or starts anew. Raises InputError
        for a finished run."""
        self.checkpoints.prepare()
        self.checkpoints.check_room(checkpoint_bytes(self.setup))
        while (step := self.checkpoints.latest()) is not None:
            with contextlib.suppress(Damaged):  # found as arrays are read: try the one before
                self._resume(step, tracking)
                break
        if step is None:
            if hosts.share(self.run_folder.is_wrapped_up()):
                raise InputError(
                    f"{self.run_folder} holds a finished run, and no checkpoint to go on from",
                    rule="a run that begins there would replace its metrics, samples and policy",
                    fix="use a new run_dir, or remove that folder",
                )
            tracking.empty()
            params = {}
            if self.setup.starts_from_policy:
                params = build.initial_params(self.config, self.setup.model, self.model_record)
            build.record_models(self.setup, self.model_record)
            self.begin(self.phase, params)
            if self.phase is self.setup.main:
                self.evaluate()
                self.remember_before()
        self.started_training = True

    def begin(self, phase: Phase, params: dict) -> None:
        """Enters a phase with fresh optimizers on these weights; the reference is a copy
        of them."""
        stored = self.config.offline.reference_logprobs
        if stored and phase is self.setup.main:
            self._store_reference(params)
        self.roles = build.make_roles(self.setup, phase, params)
        self.progress.phase = phase.name
        if self.config.data.drop_above_pass_rate and phase is self.setup.main:
            self._drop_solved()

    def _store_reference(self, params: dict) -> None:
        """Takes the log-probs of the reference, whose weights these are, from a file, which is
        written if it is not there."""
        folder = Path(self.config.offline.reference_logprobs)
        with heartbeat.phase("reference_logprobs"):
            name = store_reference_logprobs(self.setup, params, folder)
        self.progress.reference_file = name
        read_reference_logprobs(self.setup, folder / name)

    def _read_reference(self) -> None:
        """Reads the stored log-probs of the reference. Those of data that have changed are computed
        anew, by the weights that the run started from."""
        file = Path(self.config.offline.reference_logprobs, self.progress.reference_file)
        if read_reference_logprobs(self.setup, file):
            return
        if self.setup.phases[0] is not self.setup.main:
            raise InputError(
                f"{file} holds the reference's log-probs of other rows",
                rule="the reference is what sft.steps made, and those weights are not kept",
                fix="put the data of that time back; or --config.offline.reference_logprobs='' in "
                "a new run",
            )
        LOG.info("other rows: the log-probs of the reference are computed for them")
        self._store_reference(
            build.initial_params(self.config, self.setup.model, begun=self.model_record)
        )

    def _resume(self, step: int, tracking) -> None:
        state = self.checkpoints.read_state(step)
        spread = reads_steps(self.config)
        allowed = self.config.checkpoint.allow_changed + (() if spread else ("steps",))
        with self._reading_state(step):
            check_fingerprints(dict(state["fingerprints"]), self.fingerprints, allowed)
            offsets = {name: int(size) for name, size in state["offsets"].items()}
        self.load(step)
        wrapped_up = (self.progress.step, exports_of(self.config))
        if self.finished() and hosts.share(self.run_folder.is_wrapped_up(*wrapped_up)):
            allow = " --config.checkpoint.allow_changed=steps" if spread else ""
            taken, steps = self.progress.rl_steps, self.config.steps
            fix = f"train on: --config.steps={max(2 * steps, taken + steps)}{allow}"
            if taken < steps:  # evaluate.patience ended it
                fix = "train on without it: --config.evaluate.patience=0 "
                fix += "--config.checkpoint.allow_changed=evaluate.patience"
            ended = f", as evaluate.patience={self.config.evaluate.patience} ended it"
            raise InputError(
                f"{self.run_folder} is a finished run: step {step}, nothing left to train"
                + ended * (taken < steps),
                fix=f"use a new run_dir, or {fix}",
            )
        tracking.truncate(offsets)
        LOG.info("resumed %s at step %d", self.run_folder, step)

    def load(self, step: int) -> None:
        """Loads everything of a checkpoint except the trackers."""
        state = self.checkpoints.read_state(step)
        with self._reading_state(step):
            self.progress = Progress.from_dict(state["progress"])
            self.setup.phase(self.progress.phase)
        if self.progress.reference_file:
            self._read_reference()
        arguments = (self.setup, self.phase, self.checkpoints, step)
        self.roles = restored_roles(*arguments, self.model_record)
        with self._reading_state(step):
            for name, source in self.sources.items():
                same_data = state["fingerprints"].get("data") == self.fingerprints["data"]
                self._restore_order(source, state["sources"][name], same_data)
            if self.reward is not None and self.reward.rubrics is not None:
                self.reward.rubrics.set_state(state.get("rubrics"))
            metrics, samples = state.get("half_step") or ({}, {})
            self.half_step = (dict(metrics), dict(samples)) if metrics else None
        self.started, self.saved_step = time.monotonic() - self.progress.elapsed_s, step

    @contextlib.contextmanager
    def _reading_state(self, step: int) -> Iterator[None]:
        """Turns whatever is missing from state.json, or is of another type, into one InputError."""
        try:
            yield
        except InputError:
            raise
        except _NOT_SAVED as error:
            raise InputError(
                f"{self.checkpoints.path(step) / STATE} does not hold what a run saves",
                rule=f"{type(error).__name__}: {error}",
                fix="remove that checkpoint to go on from the one before, or start a new run_dir",
            ) from None

    def _restore_order(self, source, saved: dict, same_data: bool) -> None:
        """Moves a source to its saved position. Other data or another seed, which the user has
        allowed by name, has an order of its own."""
        changed = {"data", "seed"} & set(self.config.checkpoint.allow_changed)
        flight = {"in_flight": saved["in_flight"]} if saved.get("in_flight") else {}
        if flight and not same_data:
            count = len(flight.pop("in_flight")["groups"])
            LOG.warning("%d prompts of the data before were in flight and are given up", count)
        # A curriculum's pass rates belong to their prompts: no other data.
        if changed and "position" in saved and not isinstance(source.loader, Curriculum):
            saved = {**source.get_state(), "position": saved["position"], **flight}
        source.set_state(saved)

    def save_halfway(self, tracking) -> None:
        """Saves the state of the last finished step, if the one after it has been abandoned before
        its roles changed; or of the last one, if only its evaluation is left. Saves nothing if this
        is the state that this run went on from."""
        if self.progress.step and self.saved_step != self.progress.step:
            self.save(tracking)

    def save(self, tracking) -> None:
        """Saves roles, data position, progress and tracker offsets at once. They are copied to host
        memory here and written during the steps that follow."""
        if bad_steps_in_a_row(self.metrics) and not self.finished():
            return  # a checkpoint is a state worth going back to
        self.progress.elapsed_s = time.monotonic() - self.started
        state = {
            "progress": dataclasses.asdict(self.progress),
            "fingerprints": self.fingerprints,
            "offsets": tracking.offsets(),
            **(self.begun_at or positions(self.sources, self.player)),
            "metrics": {
                k: v for k, v in self.metrics.items() if isinstance(v, float) and np.isfinite(v)
            },
        }
        if self.half_step is not None:
            state["half_step"] = self.half_step
        with heartbeat.phase("save"):
            self.checkpoints.start_save(self.progress.step, build.role_arrays(self.roles), state)
        for source in self.sources.values():
            source.saved()
        self.saved_step = self.progress.step

    @property
    def model_record(self) -> Path:
        """The file that says which files the policy began with."""
        return self.folder / "model.json"

    @property
    def stopped_early(self) -> bool:
        """Returns whether evaluate.patience evaluations in a row were no better than the best
        before them."""
        return 0 < self.config.evaluate.patience <= self.progress.since_best

    @property
    def total_steps(self) -> int:
        """Number of steps of all phases; supervised steps that have ended early count as many as
        they were."""
        in_main = self.phase is self.setup.main
        return self.config.steps + (self.progress.sft_steps if in_main else self.config.sft.steps)

    def finished(self) -> bool:
        """Returns whether the last phase has taken all its steps or has stopped early."""
        is_over = self.progress.rl_steps >= self.config.steps or self.stopped_early
        return self.phase is self.setup.main and is_over

    # -- steps --

    def step(self) -> dict:
        """Takes one step of the current phase, a batch of its source through its dataflow; returns
        its metrics."""
        phase, steps_taken = self.phase, self.progress.taken.get(self.progress.phase, 0)
        if self.programs is not None and phase is self.setup.main:
            dataflow_metrics, metrics = self._step_of_program(steps_taken)
        else:
            dataflow_metrics, metrics = self._step_of_host(phase, steps_taken)
        count = metrics.get("batch/prompts", metrics.get("batch/examples", 0.0))
        if phase is self.setup.main:
            self.progress.prompts += int(count)
            self.progress.completions += int(metrics.get("batch/completions", 0.0))
        dataflow_metrics = of_taken_steps(dataflow_metrics)
        metrics = {**dataflow_metrics, **metrics, "lr": self._learning_rate(phase)}
        # NaN says that nothing was measured: a step that is not finite is counted as skipped.
        return {k: v for k, v in metrics.items() if not np.isnan(v)}

    @property
    def within_program(self) -> bool:
        """Returns whether the roles are those after a later step: a program has taken steps that
        are not counted yet."""
        return self.programs is not None and bool(self.programs.taken)

    @property
    def needs_program(self) -> bool:
        """Returns whether a program is about to take the next steps of the run."""
        waits = self.half_step is None and not self.within_program
        return self.programs is not None and self.phase is self.setup.main and waits

    @property
    def compiled_program(self) -> bool:
        """Returns whether the program that took the last step was compiled for it."""
        programs = self.programs if self.phase is self.setup.main else None
        return programs is not None and programs.compiled

    def _step_of_program(self, steps_taken: int) -> tuple[dict, dict]:
        """Takes the next steps in one program, or counts one that a program has taken. Returns
        metrics of the dataflow, and of the rollout."""
        programs = self.programs
        count = programs.steps_until(self.progress.step, self.progress.rl_steps)
        step, self.roles = programs.next(steps_taken, count, self.roles)
        timing.spread("program", step.seconds)
        metrics = {**step.metrics, **step.drawn}
        metrics |= self.source.outcome(programs.report(step, self.reward))
        self.progress.taken[self.phase.name] = steps_taken + 1
        return step.learned, metrics

    def _step_of_host(self, phase: Phase, steps_taken: int) -> tuple[dict, dict]:
        """Samples or reads a batch and learns from it. Returns metrics of the dataflow, and of the
        source."""
        self._compile_ahead()
        if hosts.count() > 1:  # a step can be abandoned; one process stops between two
            self.begun_at = copy.deepcopy(positions(self.sources, self.player))
        with hosts.may_stop(), heartbeat.phase("data"):
            batch, metrics = self.source.next(steps_taken, self.roles)
            metrics |= draw_pretraining(self.sources, steps_taken, self.roles)
        if not parts_readers(phase):  # the program is that of the dry run, whatever parts there are
            batch = batch.replace(reward_parts=None)
        with timed("learn"):
            key, roles = stream(self.key, f"learn {phase.name}", steps_taken), self._roles_of(phase)
            self.ahead.wait()
            new_roles, dataflow_metrics = run_dataflow(
                phase.dataflow, batch, key, phase.algorithm, roles
            )
            self.roles |= {k: v for k, v in new_roles.items() if k in self.roles}
            self.source.meanwhile(
                lambda: all(x.is_ready() for x in jax.tree.leaves(dataflow_metrics))
            )
            dataflow_metrics = fetch(dataflow_metrics)
        self.begun_at = None
        self.progress.taken[phase.name] = steps_taken + 1
        if is_bad(dataflow_metrics) and not is_bad(self.progress.faults):  # the first one
            keep(self.run_folder, batch, self.progress, build.role_arrays(self.roles))
        return dataflow_metrics, metrics

    def _compile_ahead(self) -> None:
        """Begins to compile the learning program of this phase, once."""
        if self.programs is not None and self.phase is self.setup.main:
            return  # it is a part of a larger one
        key = stream(self.key, f"learn {self.phase.name}", 0)
        self.ahead.start(self.setup, self.phase, key, self._roles_of(self.phase))

    # -- warnings --

    def warn(self, name: str, text: str, count: float = 1.0) -> None:
        """Counts a warning of a step, and logs it at the first, 10th, 100th, 1000th ... time."""
        previous = self.progress.faults.get(name, 0.0)
        self.progress.count_fault(name, count)
        total = self.progress.faults[name]
        if self.logs_warnings and is_said(previous, total):
            times = f" (so far {total:.0f} times)" if previous else ""
            LOG.warning("step %d: %s%s", self.progress.step, text, times)

    def warn_in_a_row(self, name: str, holds: bool, text: Callable[[int], str]) -> None:
        """Counts a warning about a condition that has held for IN_A_ROW steps in a row or more;
        `text` makes the message from the number of steps."""
        steps = self.progress.in_a_row.get(name, 0) + 1 if holds else 0
        self.progress.in_a_row[name] = steps
        if steps >= IN_A_ROW:
            self.warn(name, text(steps), IN_A_ROW if steps == IN_A_ROW else 1)

    def all_warnings(self) -> list[str]:
        """Returns the warnings so far, a line each."""
        return [
            *self.warnings,
            *fault_lines(self.progress.faults, self.progress.fault_steps, self.progress.step),
        ]

    def add_warning(self, warning: str) -> None:
        """Adds a warning, which is logged, too, to those that the run says; "" is none."""
        if warning:
            self.warnings.append(warning)
            if hosts.first() and self.logs_warnings:
                LOG.warning("%s", warning)

    def _roles_of(self, phase: Phase) -> dict:
        return {k: v for k, v in self.roles.items() if k in phase.dataflow.parameters}

    def _learning_rate(self, phase: Phase) -> float:
        """Returns the learning rate of the last optimizer step."""
        total, steps_taken = phase.optimizer_steps, self.progress.taken[phase.name]
        of_actor = phase.trains == "actor"
        optimizer = phase.actor_optimizer if of_actor else self.config.critic_optimizer
        last = steps_taken * total // max(phase.steps, 1) - 1
        return float(current_learning_rate(optimizer, total, max(last, 0)))

    def _policy(self) -> Policy:
        """The actor as it is now, and how it samples."""
        setup = self.setup
        sampling, length = setup.rollouts.sampling, setup.data.prompt_tokens
        return Policy(self.roles["actor"], setup.tokenizer, sampling, length, setup.data.images)

    def _drop_solved(self) -> None:
        """Drops prompts that the starting policy mostly solves, before the first step."""
        limit, samples = self.config.data.drop_above_pass_rate, self.config.data.pass_rate_samples
        prompts, loader = self.setup.data.prompts, self.source.loader
        sampled = sample_all(
            self._policy(),
            prompts,
            samples,
            self.player,
            key=stream(self.key, "drop solved"),
            prompts_per_call=self.config.batch.prompts_per_step,
        )
        scored = [sample for sample in sampled if not np.isnan(sample.reward)]
        outcomes = [(prompts[sample.prompt].prompt_id, sample.reward) for sample in scored]
        loader.record(outcomes, self.config.evaluate.correct_at)
        dropped = loader.drop_above(limit)
        LOG.info("dropped %d of %d prompts: pass rate above %g", dropped, len(prompts), limit)

    def evaluate(self) -> dict:
        """Returns the loss on held-out examples and the greedy accuracy on held-out prompts, if
        there are any, and keeps them in progress."""
        self._compile_ahead()
        with hosts.may_stop(), heartbeat.phase("evaluate"):
            metrics = self._evaluated()
        self.progress.evaluated_step = self.progress.step
        self._count_patience(metrics)
        return metrics

    def _evaluated(self) -> dict:
        metrics = {}
        if self.setup.data.held_out and self.phase is self.setup.main:
            roles = self._roles_of(self.phase)
            new_roles, metrics = held_out_step(self.setup, roles, stream(self.key, "held out"))
            self.roles |= {k: v for k, v in new_roles.items() if k in self.roles}
            self.progress.held_out = metrics
        if self.setup.data.test_prompts:
            metrics = {**metrics, **self._accuracy()}
        return metrics

    def _count_patience(self, metrics: dict) -> None:
        accuracy = metrics.get("eval/accuracy")
        better = -metrics["eval/loss"] if "eval/loss" in metrics else accuracy
        progress = self.progress
        if better is None or not np.isfinite(better) or self.phase is not self.setup.main:
            return
        if progress.best is None or better > progress.best:
            progress.best, progress.since_best = float(better), 0
        else:
            progress.since_best += 1

    def _accuracy(self) -> dict:
        """Greedy accuracy on the held-out prompts, and pass@k where samples are drawn."""
        data, evaluate, policy = self.setup.data, self.config.evaluate, self._policy()
        arguments = (policy, self.eval_player, data.test_prompts)
        right, samples = greedy_accuracy(*arguments, correct_at=evaluate.correct_at)
        if np.isnan(right).all():  # a judge that is down must not end the run
            LOG.warning("step %d: every reward of the evaluation failed", self.progress.step)
            self.progress.accuracy = self.progress.right = self.progress.pass_at_k = None
            return {"eval/failed_fraction": 1.0}
        self.progress.accuracy = bootstrap(right, within=SHARE)
        self.progress.right = [None if np.isnan(r) else float(r) for r in right]
        metrics = accuracy_metrics(data.test_prompts, right, samples)
        if n := evaluate.samples:
            key = stream(self.key, "evaluate", self.progress.step)
            sampled = sample_all(policy, data.test_prompts, n, self.eval_player, key=key)
            self.progress.pass_at_k = pass_estimates(sampled, n, evaluate.correct_at)
            for name, estimate in self.progress.pass_at_k.items():
                metrics |= with_interval(f"eval/{name}", estimate)
        return metrics

    def remember_before(self) -> None:
        """Keeps the latest evaluation as the one before the dataflow."""
        self.progress.accuracy_before = self.progress.accuracy
        self.progress.right_before = self.progress.right
        self.progress.pass_at_k_before = self.progress.pass_at_k
        self.progress.held_out_before = self.progress.held_out

    def metric_prefixes(self) -> set[str]:
        """Returns the names that stand before the metrics of the roles, without a slash."""
        prefixes = {getattr(role, "prefix", "").removesuffix("/") for role in self.roles.values()}
        return {*self.roles, *prefixes}

    def export_adapter(self) -> None:
        """Writes the adapters alone, as a PEFT folder."""
        role = self.roles[self.phase.trains]
        base = adapted_folder(self.config, self.phase.trains)
        with self._exporting(ADAPTER) as folder:
            save_adapter(folder, role.model, role.state.weights, base=base)
            if hosts.first() and self.phase.trains == "actor":
                build.save_tokenizer(folder, self.config, self.setup.tokenizer)

    def export(self) -> None:
        """Writes the trained model as a Hugging Face folder: weights (adapters merged),
        config, tokenizer."""
        tokenizer, role = self.setup.tokenizer, self.roles[self.phase.trains]
        model, params = role.model, role.state.weights
        if model.config.lora:
            params = lora.merge(model, params)
            merged = dataclasses.replace(lora.without(model.config), weight_dtype="float32")
            model = dataclasses.replace(model, config=merged)
        is_of_steps = contracts.spec(self.phase.dataflow).data == "stepwise"
        settings = {build.STEP_SEPARATOR: self.config.offline.step_separator} if is_of_steps else {}
        with self._exporting(EXPORTED[self.phase.trains]) as folder:
            save_params(
                folder,
                model,
                params,
                bos_id=tokenizer.bos_id,
                eos_ids=build.stop_ids(self.config, tokenizer),
                pad_id=tokenizer.pad_id,
                settings=settings,
            )
            if hosts.first():
                build.save_tokenizer(folder, self.config, tokenizer)

    @contextlib.contextmanager
    def _exporting(self, name: str) -> Iterator[Path]:
        """Yields the folder of an export, which the first host writes and cleans up after
        a failure."""
        writing = whole_export(self.folder / name) if hosts.first() else contextlib.nullcontext()
        with heartbeat.phase("export"), writing:
            yield self.folder / name
