"""Several steps of a run in one compiled program: sampling, scoring and learning, without the host.

The host draws the prompts of the next steps, the program takes the steps in a loop, and the host
makes their metrics and reports afterwards, one step after another, as if it had taken each of them
by itself. Whatever needs the roles of a certain step (an evaluation, a checkpoint) comes between
two calls of the program, which takes fewer steps before it.

Axes: N steps of a program at most, P prompts of a step, L prompt columns.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts
from rljax.arrays import fetch
from rljax.components import Component
from rljax.data.online.default_rewards import training_text
from rljax.data.online.prompts import Prompts
from rljax.dataflows.algorithm import Algorithm
from rljax.errors import InputError
from rljax.keys import stream
from rljax.learn.optimizers import new_optimizer
from rljax.rewards.on_device import DeviceScorer, device_scorer
from rljax.rollout import (
    Reward,
    RewardReport,
    RolloutConfig,
    ScoredRow,
    check_rows,
    run_rollout,
    widened,
)
from rljax.rollout.on_device import DevicePrompts, DeviceSampler, report_of
from rljax.sampler import Decoding
from rljax.setup import Phase, Setup
from rljax.setup.dry_run import parts_readers
from rljax.tracking import compiles
from rljax.tracking.timing import timed
from rljax.training.run_numbers import (
    TEMPERATURE,
    RunNumber,
    RunOptimizer,
    numbers_of,
    with_numbers,
)
from rljax.training.sources import RolloutSource

# Greatest difference of equal scores, relative to the larger of 1 and the score: one is a float32.
SAME = 1e-5


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The functions and settings of a step: the static half of the program."""

    rollout: Component
    cfg: RolloutConfig
    decoding: Decoding
    scorer: DeviceScorer | None
    dataflow: Component
    algorithm: Algorithm
    columns: int  # of a batch that is learned from
    keeps_parts: bool  # whether learning reads the parts of the reward
    # Of roles whose numbers are inputs of the program.
    optimizers: tuple[RunOptimizer, ...] = ()


class Given(NamedTuple):
    """Roles, prompts and keys that a program reads for its next steps."""

    parts: tuple[dict, dict, dict, dict]  # of the roles: trained, shared, read, of the rollout
    prompts: list[Prompts]  # of each step
    drawn: list[dict]  # metrics of these prompts
    inputs: dict  # prompts and keys of N steps


class TakenStep(NamedTuple):
    """A step that a program has taken and that the run has not counted yet."""

    learned: dict  # metrics of the dataflow
    metrics: dict  # of the rollout
    samples: tuple  # rljax.rollout.on_device.Samples of each call of `sample`
    report: int  # which of them is the rollout's
    prompts: Prompts
    drawn: dict  # metrics of the prompts
    seconds: float  # of the program, this step's share


class ProgramSteps:
    """The steps of the last phase of a run. `taken` holds those that a program has taken and the
    run has not counted yet."""

    def __init__(self, setup: Setup, phase: Phase, source: RolloutSource, key: jax.Array):
        config, scorer = setup.config, None
        self.setup, self.phase, self.source, self.key = setup, phase, source, key
        self.most = config.program_steps
        if hosts.count() > 1:
            raise InputError(
                "program_steps on several hosts",
                value=hosts.count(),
                rule="each host scores the samples of its own prompts",
                fix="program_steps=1",
            )
        if source.scored:
            text, vocabulary = training_text(config), setup.model.config.ids
            scorer = device_scorer(text, setup.tokenizer, vocabulary)
        self.static = StepProgram(
            setup.rollout,
            setup.rollouts.replace(prompts_per_step=source.count),
            dataclasses.replace(setup.decoding, decode=None),
            scorer,
            phase.dataflow,
            phase.algorithm,
            setup.row_tokens,
            bool(parts_readers(phase)),
        )
        self.compiled = False  # for the steps that were taken last
        self._is_traced = self._is_checked = False
        self.more = 0  # prompts that a step draws beside its first ones
        self.taken: collections.deque[TakenStep] = collections.deque()

    def steps_until(self, step: int, rl_step: int) -> int:
        """Returns how many steps the next program takes after step `step` of the run and `rl_step`
        of its last phase: up to the next checkpoint, evaluation, profile or end of the run."""
        config = self.setup.config
        count = min(self.most, config.steps - rl_step)
        schedules = ((config.checkpoint.every_steps, step), (config.evaluate.every_steps, rl_step))
        for period, at_step in schedules:
            count = min(count, period - at_step % period) if period else count
        for border in config.profile_steps:  # the step before, and the last one
            for at_step in (border - 1, border):
                count = min(count, at_step - step) if at_step > step else count
        return max(count, 1)

    def next(self, first: int, count: int, roles: dict) -> tuple[TakenStep, dict]:
        """Returns the next step, and the roles after all steps that a program has taken. If no such
        step is left, a program takes `count` steps, from the step `first` of the phase."""
        if not self.taken:
            roles = self._run(first, count, roles)
        return self.taken.popleft(), roles

    def _run(self, first: int, count: int, roles: dict) -> dict:
        start, compile_count = time.monotonic(), compiles.count()
        arguments = self.given(first, count, roles)
        with timed("program"):
            new_roles, out = _steps(
                *arguments.parts, arguments.inputs, jnp.int32(count), static=self.static
            )
            out = fetch(out)
        self.compiled = compiles.count() > compile_count
        return self.keep(arguments, new_roles, out, roles, (time.monotonic() - start) / count)

    def given(self, first: int, count: int, roles: dict) -> Given:
        """Draws the prompts of `count` steps from the step `first` of the phase."""
        parts = self._parts(roles)
        return Given(parts, *self._drawn(parts, first, count))

    def keep(self, given: Given, new: dict, out: tuple, roles: dict, seconds: float) -> dict:
        """Stores the steps that a program has taken, each with its `seconds`. `new`: the trained
        roles; `out`: all other outputs of the program, [N, ...] on the host. Returns the roles
        after these steps."""
        _, shared, *_ = given.parts
        new = {name: role.joined(shared[name]) for name, role in new.items()}
        updated = {name: roles[name].after_program(role, new) for name, role in new.items()}
        for i, (prompts, draw_metrics) in enumerate(zip(given.prompts, given.drawn, strict=True)):
            dataflow_metrics, metrics, samples, report = jax.tree.map(lambda x, i=i: x[i], out)
            fields = (
                dataflow_metrics,
                metrics,
                samples,
                int(report),
                prompts,
                draw_metrics,
                seconds,
            )
            self.taken.append(TakenStep(*fields))
        return {**roles, **updated}

    def lower(self, roles: dict) -> jax.stages.Lowered:
        """Returns the program of the next steps, lowered for roles whose arrays may be shapes."""
        arguments = self.given(0, self.most, roles)
        count = jnp.int32(self.most)
        return _steps.lower(*arguments.parts, arguments.inputs, count, static=self.static)

    def _parts(self, roles: dict) -> tuple[dict, dict, dict, dict]:
        """Splits the roles into those that the program trains, what they share with others, those
        that the dataflow only reads, and those that only the rollout reads."""
        in_program = {name: role.in_program() for name, role in roles.items()}
        dataflow_roles = {
            k: v for k, v in in_program.items() if k in self.phase.dataflow.parameters
        }
        function = self.phase.dataflow.function
        algorithm = self.static.algorithm
        (trained, _, _, shared, read_only), _ = function.arguments(
            None, None, algorithm, **dataflow_roles
        )
        parameters = self.setup.rollout.parameters
        rollout_roles = {
            k: v for k, v in in_program.items() if k not in dataflow_roles and k in parameters
        }
        return trained, shared, read_only, rollout_roles

    def _drawn(self, parts: tuple, first: int, count: int) -> tuple[list, list, dict]:
        """Draws the prompts of `count` steps. Returns them, their metrics, and the inputs of the
        program."""
        source, state = self.source, self.source.get_state()
        while True:
            prompts, metrics = [], []
            for _ in range(count):
                position = source.loader.position
                prompts.append(source.draw(source.count + self.more))
                metrics.append(source.drawn_metrics(position))
            inputs = self._inputs(prompts, first)
            if self._is_traced:
                return prompts, metrics, inputs
            # How many prompts the rollout of a step draws is known once it is traced.
            trained, *other_parts = parts
            draw_counts: list[int] = []
            step = functools.partial(_one_step, *other_parts, self.static, draw_counts, {})
            jax.eval_shape(step, trained, jax.tree.map(lambda x: x[0], inputs))
            self.more, self._is_traced = sum(draw_counts), True
            source.set_state(state)

    def _inputs(self, prompts: list[Prompts], first: int) -> dict:
        """Returns the prompts and keys of N steps; nothing reads those after the last prompts."""
        scorer = self.static.scorer
        fields: dict = {}
        if scorer is not None:
            count = len(prompts[0].records)
            records = [record for step_prompts in prompts for record in step_prompts.records]
            truths = [record.ground_truth for record in records]
            texts = [(record.prompt_text, record.messages) for record in records]
            fields = {
                name: x.reshape(len(prompts), count, *x.shape[1:])
                for name, x in scorer.fields(truths, texts).items()
            }
        steps = range(first, first + len(prompts))
        arrays = {
            "tokens": np.stack([step_prompts.tokens for step_prompts in prompts]),
            "lengths": np.stack([step_prompts.lengths for step_prompts in prompts]),
            "fields": fields,
            "sampled": _keys(self.key, "rollout", steps),
            "learned": _keys(self.key, f"learn {self.phase.name}", steps),
        }
        padding = self.most - len(prompts)
        return jax.tree.map(lambda x: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), arrays)

    def report(self, step: TakenStep, reward: Reward | None) -> RewardReport:
        """Returns the report of the rollout's samples. At the first call it raises InputError if
        the reward gives their texts other scores than its form for the device."""
        if self.static.scorer is None:
            return RewardReport()
        report = report_of(step.samples[step.report], step.prompts, reward)
        if not self._is_checked:
            check_form(report.rows, reward)
            self._is_checked = True
        return report


def check_form(rows: Sequence[ScoredRow], reward: Reward) -> None:
    """Raises InputError if a reward gives the text of a row another score than its form for the
    device did. Rows that the form did not decide on are not compared."""
    texts = reward.pool.score([row.sample for row in rows])
    decided = [i for i, row in enumerate(rows) if row.score.status == "ok"]
    differ = [
        i
        for i in decided
        if texts[i].status not in ("ok", "timeout")
        or abs(texts[i].value - rows[i].score.value) > SAME * max(1.0, abs(texts[i].value))
    ]
    if differ:
        row, text = rows[differ[0]], texts[differ[0]]
        text_score = (
            f"{text.value:.6g}" if text.status == "ok" else f"{text.status}: {text.message}"
        )
        raise InputError(
            f"the reward {reward.pool.component.text!r} and its form for the device differ on "
            f"{len(differ)} of {len(decided)} responses",
            value=f"{row.score.value:.6g} on the device and {text_score} of the text "
            f"{row.sample['response'][:200]!r}",
            rule="both are one reward: what is learned is what an evaluation measures",
            fix="correct the form (texts and fields have zeros behind their end: "
            "rljax.rewards.on_device.form.inside says where), or program_steps=1",
        )


def _keys(key: jax.Array, name: str, steps) -> np.ndarray:
    """The data of the keys of a stream at some steps: [N, 2] uint32."""
    return np.stack([jax.random.key_data(stream(key, name, step)) for step in steps])


def _with_optimizers(static: StepProgram, numbers: Mapping[RunNumber, jax.Array], roles: dict):
    """Returns the roles with optimizers of these numbers."""
    new = dict(roles)
    for made_of in static.optimizers:
        fields = {**dict(made_of.fields), **numbers_of(made_of.section, numbers)}
        optimizer = new_optimizer(fields, made_of.total_steps)
        new[made_of.role] = dataclasses.replace(new[made_of.role], optimizer=optimizer)
    return new


def _one_step(
    shared,
    read_only,
    rollout_roles,
    static: StepProgram,
    draw_counts: list[int],
    numbers: Mapping[RunNumber, jax.Array],
    trained,
    inputs,
):
    """Traces one step. Returns the trained roles, and (metrics of the dataflow, metrics of the
    rollout, samples, the index of the rollout's samples). `numbers` are those of a run among
    others. Fills `draw_counts` with the numbers of prompts that calls of `draw` asked for. Raises
    InputError for a rollout that makes a report of its own."""
    counts: list[int] = []
    algorithm = with_numbers(static.algorithm, numbers)
    given = trained
    trained = _with_optimizers(static, numbers, trained)
    roles = {name: role.joined(shared[name]) for name, role in trained.items()} | read_only
    count = static.cfg.prompts_per_step
    index = jnp.arange(inputs["tokens"].shape[0], dtype=jnp.int32)
    all_prompts = DevicePrompts(inputs["tokens"], inputs["lengths"], inputs["fields"], index)
    sample = DeviceSampler(
        roles["actor"],
        static.cfg.sampling,
        static.decoding,
        static.scorer,
        numbers.get(RunNumber(TEMPERATURE)),
    )

    def draw(n: int) -> DevicePrompts:
        start = count + sum(counts)
        counts.append(n)
        # (While these numbers are counted there are no such prompts yet: any will do.)
        return all_prompts.select((start + np.arange(n)) % all_prompts.count)

    keys = {k: jax.random.wrap_key_data(inputs[k]) for k in ("sampled", "learned")}
    available = {**roles, **rollout_roles, "sample": sample, "draw": draw}
    available |= {"reward": None, "tokenizer": None}
    prompts = all_prompts.select(np.arange(count))
    result = run_rollout(static.rollout, prompts, keys["sampled"], static.cfg, **available)
    draw_counts[:] = counts
    if not isinstance(result.report, int):
        raise InputError(
            f"algorithm.collect={static.rollout.text!r} returns a report of its own",
            rule="in a program of several steps it is the one that `sample` has returned",
            fix="Rollout(batch, prompts, report) with that report, or program_steps=1",
        )
    check_rows(static.rollout, result.batch, static.cfg)
    batch = widened(result.batch, static.columns)
    if not static.keeps_parts:
        batch = batch.replace(reward_parts=None)
    batch = jax.lax.optimization_barrier(batch)
    function, options = static.dataflow.function, static.dataflow.options
    dataflow_roles = {k: v for k, v in roles.items() if k in static.dataflow.parameters}
    arguments, statics = function.arguments(
        batch, keys["learned"], algorithm, **dataflow_roles, **options
    )
    run = function.run.__wrapped__ if numbers else function.run  # traced numbers are not hashable
    new_roles, dataflow_metrics = run(*arguments, **statics)
    for made_of in static.optimizers:
        optimizer = given[made_of.role].optimizer
        new_roles[made_of.role] = dataclasses.replace(new_roles[made_of.role], optimizer=optimizer)
    metrics = {name: jnp.asarray(x, jnp.float32) for name, x in result.metrics.items()}
    return new_roles, (dataflow_metrics, metrics, tuple(sample.asked), jnp.int32(result.report))


def take_steps(own, shared, read, others, inputs, count, numbers=None, *, static: StepProgram):
    """Takes `count` steps. `numbers`: those of a run among others. Returns the trained roles, and
    for each step (metrics of the dataflow, metrics of the rollout, samples, the index of the
    rollout's samples): N of them, with zeros after the last step."""

    one_step = functools.partial(_one_step, shared, read, others, static, [], numbers or {})

    def step(state):
        i, trained, out = state
        step_inputs = jax.tree.map(lambda x: x[i], inputs)
        new_roles, step_out = one_step(trained, step_inputs)
        return (
            i + 1,
            new_roles,
            jax.tree.map(lambda stacked, x: stacked.at[i].set(x), out, step_out),
        )

    first_inputs = jax.tree.map(lambda x: x[0], inputs)
    _, shapes = jax.eval_shape(one_step, own, first_inputs)
    max_steps = inputs["tokens"].shape[0]
    out = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shapes)
    state = (jnp.int32(0), own, out)
    _, own, out = jax.lax.while_loop(lambda state: state[0] < count, step, state)
    return own, out


_steps = jax.jit(take_steps, static_argnames="static", donate_argnames="own")
