"""Runs that differ in their seeds and in numbers: one program takes the next steps of all of them.

Each run has the folder, metrics, checkpoints, evaluations and report that it has by itself, and is
resumed in the same way; only the program of its steps (rljax.training.program_steps) is vmapped
over the runs. One that fails or ends early leaves the others as they are.

Axes: S runs, N steps of a program at most.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import heartbeat, hosts
from rljax.arrays import fetch
from rljax.config import Config, OptimizerConfig, value_of
from rljax.errors import InputError
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import RUNS
from rljax.runs.units import human_bytes
from rljax.tracking import compiles
from rljax.tracking.screen import streams_without_readers
from rljax.tracking.signals import Signals
from rljax.training.loop import Beside, Training, trained
from rljax.training.program_steps import ProgramSteps, StepProgram, take_steps
from rljax.training.result import RunStopped, TrainedRun
from rljax.training.run import Run
from rljax.training.run_numbers import OWN_FIELDS, RunOptimizer, different_numbers, split_numbers

_OPTIMIZERS = tuple(  # sections of the config
    field.name for field in dataclasses.fields(Config) if field.type is OptimizerConfig
)
_NUMBERS = ("actor_optimizer.lr", "algorithm.kl_in_loss")  # for example

Ended = TrainedRun | InputError | RunStopped  # what becomes of a run


def check_together(configs: Sequence[Config]) -> None:
    """Raises InputError for configs that differ in more than seeds, folders and numbers that are
    inputs of the program, or that one program cannot train."""
    first, *others = [split_numbers(config)[0] for config in configs]
    for other in others:
        if differ := sorted(name for name in first if first[name] != other[name]):
            raise InputError(
                f"runs that are trained together differ in {', '.join(differ)}",
                value=[value_of(config, differ[0]) for config in configs],
                rule=f"{', '.join(OWN_FIELDS)} and numbers such as {', '.join(_NUMBERS)} alone may "
                "differ, none of them 0: all else is compiled into the program",
                fix="train those of equal settings together, and the others apart",
            )
    config = configs[0]
    if config.program_steps < 2:
        raise InputError(
            "runs that are trained together",
            value=f"program_steps={config.program_steps}",
            rule="one program takes the steps of all of them, at least 2 of each",
            fix="program_steps=20, with a reward that has a form for the device",
        )
    if config.profile_steps:
        raise InputError(
            "runs that are trained together",
            value=f"profile_steps={config.profile_steps}",
            rule="a profile is of one run",
            fix="leave profile_steps out, or train one run by itself",
        )


@streams_without_readers()
def train_together(
    configs: Sequence[Config],
    *,
    devices: Sequence | None = None,
    say: Callable[[str], None] = print,
) -> list[Ended]:
    """Trains configs that differ in `seed`, `run_dir` and numbers (rljax.training.run_numbers)
    alone to their end, on `devices` (default: all), the steps of all of them in one program.

    Returns for each of them, in their order, the run, or the InputError that ended it, or
    RunStopped if a signal has stopped it. `say` shows a line after each program. Raises InputError
    as `check_together`, where the runs do not fit into memory, and where the program depends on a
    number in which they differ.
    """
    check_together(configs)
    hosts.start(configs[0].hosts.init_timeout_s, configs[0].hosts.heartbeat_s)
    devices = jax.devices() if devices is None else devices
    outcomes: dict[int, Ended] = {}
    with contextlib.ExitStack() as stack:
        beside = Beside(stack.enter_context(Signals()))
        live: dict[int, Training] = {}
        waiting: dict[int, Run] = {}
        program = None
        for i, config in enumerate(configs):
            live[i] = trained(config, "run", devices, beside=beside)
            stack.callback(live[i].close)  # what ends all of them is in the summary of each
            _advance(i, live, waiting, outcomes)
            if i in waiting and not beside.players:
                run = waiting[i]
                check_memory(run, len(configs))
                beside = dataclasses.replace(beside, players=run.owned)
                for player in run.owned:  # they outlive the run that opened them
                    stack.callback(player.close)
                run.owned = []
        while waiting:
            runs, waiting = waiting, {}
            program = program or JointProgram(runs, len(configs))
            say(_progress(list(runs.values()), program.take_next(runs)))
            for i in runs:
                _advance(i, live, waiting, outcomes)
    return [outcomes[i] for i in range(len(configs))]


def _advance(
    i: int, live: dict[int, Training], waiting: dict[int, Run], outcomes: dict[int, Ended]
) -> None:
    """Lets run i go on until it waits for its next program, or has ended."""
    try:
        waiting[i] = next(live[i])
    except StopIteration as end:
        run, signal = end.value
        stopped = signal or run.summary["status"].startswith("stopped by")
        outcomes[i] = RunStopped(run, signal) if stopped else run
    except InputError as error:  # of this run alone
        outcomes[i] = error


def check_memory(run: Run, count: int) -> None:
    """Raises InputError where the estimate of `count` such runs is above what a device has."""
    needed_bytes, available_bytes = run.memory.least * count, run.memory.available
    if available_bytes is not None and needed_bytes > available_bytes:
        raise InputError(
            f"{count} runs together need {human_bytes(needed_bytes)} per device",
            value=f"{human_bytes(available_bytes)} left",
            rule=f"each needs at least {human_bytes(run.memory.least)}: {run.memory.line()}",
            fix=f"{max(available_bytes // run.memory.least, 1)} runs together",
        )


@functools.partial(jax.jit, static_argnames="static", donate_argnames="own")
def _steps_together(own, others, inputs, numbers, count, *, static: StepProgram):
    """Takes the next `count` steps of S runs. Returns a list of trained roles, and the other
    outputs of the steps."""
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (own, others, inputs)]
    trained, (shared, read_only, rollout_roles), inputs = stacked
    take = functools.partial(take_steps, static=static)
    take_all = jax.vmap(take, in_axes=(0, 0, 0, 0, 0, None, 0), axis_name=RUNS)
    new_roles, out = take_all(trained, shared, read_only, rollout_roles, inputs, count, numbers)
    # Roles as a list, so that each run goes on with arrays of its own.
    return [jax.tree.map(lambda x, i=i: x[i], new_roles) for i in range(len(own))], out


def lower_together(programs: ProgramSteps, roles: dict, count: int) -> jax.stages.Lowered:
    """Returns the program of the next steps of `count` runs, lowered for the roles of one, whose
    arrays may be shapes."""
    arguments = programs.given(0, programs.most, roles)
    repeated = [[x] * count for x in (arguments.parts[0], arguments.parts[1:], arguments.inputs)]
    steps = jnp.int32(programs.most)
    return _steps_together.lower(*repeated, {}, steps, static=programs.static)


class JointProgram:
    """The program that takes the steps of all these runs, which wait for their first."""

    def __init__(self, runs: Mapping[int, Run], count: int):
        """`runs` by their number among `count`."""
        first = next(iter(runs.values()))
        configs = [run.setup.config for run in runs.values()]
        self.count = count
        self.numbers = dict(zip(runs, different_numbers(configs), strict=True))
        self.places = tuple(self.numbers[next(iter(runs))])
        self.optimizers = {
            name: role.optimizer for name, role in first.roles.items() if hasattr(role, "optimizer")
        }
        self.static = dataclasses.replace(
            first.programs.static, optimizers=tuple(self._run_optimizers(list(runs.values())))
        )

    def _run_optimizers(self, runs: list[Run]) -> Iterator[RunOptimizer]:
        """Yields the optimizers that differ from run to run. Raises InputError for one whose
        numbers are no fields of the config."""
        for name in self.optimizers:
            optimizers = [run.roles[name].optimizer for run in runs]
            if all(optimizer is optimizers[0] for optimizer in optimizers):
                continue
            sections = [
                section
                for section in _OPTIMIZERS
                if all(_is_made_of(name, section, run) for run in runs)
            ]
            if not sections:
                raise InputError(
                    f"runs that are trained together differ in the optimizer of {name}",
                    rule=f"its numbers are no fields of {', '.join(_OPTIMIZERS)}",
                    fix="train those of equal settings together, and the others apart",
                )
            fields = vars(value_of(runs[0].setup.config, sections[0]))
            total_steps = runs[0].programs.phase.optimizer_steps
            yield RunOptimizer(name, sections[0], tuple(sorted(fields.items())), total_steps)

    def take_next(self, runs: Mapping[int, Run]) -> float:
        """Takes the next steps of all these runs, up to the first step at which one of them has to
        stop. The program is that of all runs, which is compiled once, however many of them still
        take steps. Returns its seconds. Raises InputError if the program depends on a number in
        which they differ."""
        start, compile_count = time.monotonic(), compiles.count()
        numbers, runs = [self.numbers[i] for i in runs], list(runs.values())
        steps = min(
            run.programs.steps_until(run.progress.step, run.progress.rl_steps) for run in runs
        )
        arguments = [
            run.programs.given(run.progress.taken.get(run.progress.phase, 0), steps, run.roles)
            for run in runs
        ]
        trained_roles = [_with_optimizers(item.parts[0], self.optimizers) for item in arguments]
        other_parts = [item.parts[1:] for item in arguments]
        # Copies of the last run stand in for runs that have ended; nobody reads them.
        padding = self.count - len(runs)
        trained_roles += [jax.tree.map(jnp.copy, trained_roles[-1]) for _ in range(padding)]
        numbers += numbers[-1:] * padding
        try:
            with heartbeat.phase("program"):
                new_roles, out = _steps_together(
                    trained_roles,
                    other_parts + other_parts[-1:] * padding,
                    [item.inputs for item in arguments] + [arguments[-1].inputs] * padding,
                    {place: jnp.float32([x[place] for x in numbers]) for place in self.places},
                    jnp.int32(steps),
                    static=self.static,
                )
                out = fetch(out)
        except TypeError as error:  # those of JAX, and Python's of a number in a format
            if not self.places:
                raise
            raise InputError(
                f"runs that are trained together differ in {'; '.join(map(str, self.places))}",
                rule="a function of the program branches on such a number, formats it, or hands it "
                "to NumPy: "
                f"{str(error).splitlines()[0]}",
                fix="train those of equal settings together, and the others apart",
            ) from error
        seconds, compiled = time.monotonic() - start, compiles.count() > compile_count
        for i, (run, item) in enumerate(zip(runs, arguments, strict=True)):
            run_out = jax.tree.map(lambda x, i=i: x[i], out)
            run.programs.compiled = compiled
            own = {name: run.roles[name].optimizer for name in self.optimizers}
            run.roles = run.programs.keep(
                item,
                _with_optimizers(new_roles[i], own),
                run_out,
                run.roles,
                seconds / (steps * len(runs)),
            )
        return seconds


def _is_made_of(role: str, section: str, run: Run) -> bool:
    """Returns whether the optimizer of a role is that of a section of the config."""
    settings = value_of(run.setup.config, section)
    return run.roles[role].optimizer is make_optimizer(settings, run.programs.phase.optimizer_steps)


def _with_optimizers(roles: dict, optimizers: dict) -> dict:
    """Returns the roles with these optimizers, by the names of the roles."""
    changed = {
        name: dataclasses.replace(role, optimizer=optimizers[name])
        for name, role in roles.items()
        if name in optimizers
    }
    return {**roles, **changed}


def _progress(runs: Sequence[Run], seconds: float) -> str:
    """A line about the steps that a program has taken: the mean reward of each run over its steps,
    as the mean of all runs and the range from the lowest to the highest."""
    end = max(run.progress.step + len(run.programs.taken) for run in runs)
    count = sum(len(run.programs.taken) for run in runs)
    line = (
        f"step {end} of {runs[0].total_steps}: {count} steps of {len(runs)} runs in {seconds:.1f} s"
    )
    if runs[0].programs.static.scorer is None:
        return line
    samples = [[step.samples[step.report] for step in run.programs.taken] for run in runs]
    means = [
        float(np.nanmean([step_samples.scores["score"] for step_samples in run_samples]))
        for run_samples in samples
    ]
    return f"{line}, reward {np.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})"
