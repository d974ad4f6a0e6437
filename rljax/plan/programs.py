"""The programs that a config runs, each with the shapes and layouts that it is called with.

Learning is the program that the dry run traces (rljax.setup.dry_run). Decoding is found by running
the config's rollout with an actor that notes its programs and returns samples of zeros, placed on
this host; their rewards alternate between 0 and 1.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.arrays import fetch
from rljax.batch import Batch, last_token
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.dataflows.algorithm import Algorithm
from rljax.errors import InputError
from rljax.mesh import make_mesh, replicated, row_sharding, row_shards
from rljax.rewards.pool.pool import Score
from rljax.roles import Actor, Critic, Reference
from rljax.roles.models import values_of
from rljax.rollout import RewardReport, ScoredRow, make_sample, run_rollout
from rljax.sampler.generate import planned_rollout, planned_search
from rljax.sampler.layout import is_apart, weights_like
from rljax.setup import Phase, Setup, abstract_roles
from rljax.setup.dry_run import abstract_batch, abstract_key, roles_read
from rljax.setup.setup import sampled_prompts

RESHARD = "reshard"  # what planned_rollout calls the program that brings weights to a layout


@dataclasses.dataclass(frozen=True)
class ProgramCall:
    """A jitted function and its arguments. `trips` is the greatest number of iterations of a loop
    whose end depends on the data. `mesh`: what it runs on where that is not training's; `copy`: the
    weights that it reads there. `instead`: no step runs it, it stands beside the one that does."""

    name: str
    function: Any
    arguments: tuple
    trips: int = 1
    static: dict = dataclasses.field(default_factory=dict)
    mesh: Mesh | None = None
    copy: Any = None
    instead: bool = False


def programs_of(setup: Setup, roles: dict) -> list[ProgramCall]:
    """Returns the programs of every phase in the order in which they run: decoding, if the phase
    samples, then learning. Arguments are ShapeDtypeStructs; those of the main phase's roles are the
    very objects in `roles`, which abstract_roles has made."""
    calls = []
    for phase in setup.phases:
        main = phase is setup.main
        phase_roles = roles if main else abstract_roles(setup, phase)
        if phase.samples and sampled_prompts(setup.config):
            calls += _decoding(setup, phase_roles)
        calls.append(learning_call(setup, phase, phase_roles, "learn" if main else phase.name))
    return calls


def learning_call(setup: Setup, phase: Phase, roles: dict, name: str) -> ProgramCall:
    """Returns the program that learns from a step's batch, every row at full length. Raises
    InputError for a dataflow without `rljax.roles.program`."""
    function = phase.dataflow.function
    if "arguments" not in vars(function):
        rule = "a plan compiles the one program of a dataflow"
        fix = "decorate it with rljax.roles.program; --nocompile estimates its memory"
        raise InputError(f"dataflow={phase.dataflow.text!r} is no program", rule=rule, fix=fix)
    positional, static = function.arguments(
        abstract_batch(setup, phase),
        abstract_key(),
        planned(phase.algorithm),
        **roles_read(phase, roles),
        **phase.dataflow.options,
    )
    return ProgramCall(name, function.run, positional, static=static)


def planned(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm for rows of full length: with packing, the number of microbatches that
    are computed would else depend on the rows."""
    steps = algorithm.steps
    if steps.packing is None:
        return algorithm
    packing = dataclasses.replace(steps.packing, full=True)
    return algorithm.replace(steps=dataclasses.replace(steps, packing=packing))


def _decoding(setup: Setup, roles: dict) -> list[ProgramCall]:
    """The programs of one step's rollout. Every group of the samples is live: a rollout that asks
    for live groups needs one round of the size that it begins with."""
    calls, config = [], setup.config
    samplers = {
        name: _Planned(role, calls)
        if isinstance(role, (Actor, Reference))
        else _PlannedCritic(role, calls)
        if isinstance(role, Critic)
        else role
        for name, role in roles.items()
    }
    prompts, rollouts = _prompts(setup, sampled_prompts(config)), setup.rollouts
    if config.environment.function:  # all turns of an episode as one response
        longest = setup.row_tokens - setup.data.prompt_tokens
        sampling = dataclasses.replace(rollouts.sampling, max_response_tokens=longest)
        rollouts = rollouts.replace(sampling=sampling)
    try:
        run_rollout(
            setup.rollout,
            prompts,
            jax.random.key(0),
            rollouts,
            **samplers,
            reward=_rewarded,
            sample=make_sample(samplers.get("actor"), _rewarded, rollouts.sampling),
            draw=lambda count: _prompts(setup, count),
            tokenizer=setup.tokenizer,
        )
    except Exception as error:  # of the rollout's code between its programs
        cause = error.__cause__ if isinstance(error, InputError) else error
        if cause is None:  # a refusal, and no line of the user's that failed
            raise
        raise InputError(
            f"algorithm.collect={config.algorithm.collect!r} fails on samples of zeros",
            rule=f"{type(cause).__name__}: {str(cause).splitlines()[0]}",
            fix="--nocompile estimates its memory; or plan one that calls the same programs",
        ) from error
    return _placed(_each_once(calls), setup)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A role that samples zeros. The programs that would draw them are noted in `calls`."""

    role: Actor | Reference
    calls: list

    @property
    def model(self):
        """Host code places batches on this host, not on the planned mesh."""
        mesh = make_mesh(1, 1, 1, devices=jax.local_devices(backend="cpu")[:1])
        return dataclasses.replace(self.role.model, mesh=mesh)

    def sampling_params(self):
        return self.role.params

    def generate(
        self, prompts, key, sampling, *, n=1, finished=None, stop=None, second=None, search=None
    ) -> Batch:
        if second is not None:  # its model is this host's: the planned one has the same layout
            second = dataclasses.replace(second, model=self.role.model)
        if search is not None:
            return self._noted(prompts.tokens, sampling, planned_search, n=n, search=search)
        return self._noted(prompts.tokens, sampling, n=n, second=second)

    def branch(self, batch, rows, at, starts, key, sampling, *, n=1) -> Batch:
        tokens = np.zeros((len(rows), batch.tokens.shape[1]), np.int32)
        out = self._noted(tokens, sampling, n=n, branches=True)
        return out.replace(group=fetch(batch.group)[np.repeat(np.asarray(rows), n)])

    def _noted(self, tokens, sampling, plan=planned_rollout, **options) -> Batch:
        role = self.role
        weights = role.state.weights if isinstance(role, Actor) else role.params
        inputs = (role.model, weights, tokens, sampling)
        options |= dict(decoding=role.decoding)
        programs, batch = plan(*inputs, **options)
        self.calls.extend(_calls(role, weights, programs))
        if RESHARD in programs and role.decoding.mesh is None:
            decoding = dataclasses.replace(role.decoding, layout=None, weight_dtype="")
            programs, _ = plan(*inputs, **options | dict(decoding=decoding))
            self.calls.extend(
                ProgramCall(f"{name} as trained", *program, instead=True)
                for name, program in programs.items()
            )
        return batch


@dataclasses.dataclass(frozen=True)
class _PlannedCritic:
    """A critic whose values are all 1, those that a rollout asks for: its program is noted."""

    role: Critic
    calls: list

    @property
    def model(self):
        return self.role.model

    @property
    def state(self):
        return self.role.state

    def valued(self, batch: Batch, rows: int = 0) -> Batch:
        self.calls.append(
            ProgramCall("values", values_of, (self.role, batch), static=dict(rows=rows))
        )
        return batch.replace(values=np.ones(batch.tokens.shape, np.float32))


def _calls(role: Actor | Reference, weights, programs: dict[str, tuple]) -> list[ProgramCall]:
    """The programs of one `generate` of a role; those that decode run on the mesh of decoding."""
    target = role.decoding.of(role.model)
    if RESHARD not in programs and not is_apart(role.model, target):
        return [ProgramCall(name, *program) for name, program in programs.items()]
    copy = weights_like(target, weights, keep_dtypes=not role.decoding.weight_dtype)
    return [
        ProgramCall(name, *program)
        if name.startswith(RESHARD)
        else ProgramCall(name, *program, mesh=target.mesh, copy=copy)
        for name, program in programs.items()
    ]


def _prompts(setup: Setup, count: int) -> Prompts:
    """`count` prompts of the greatest length."""
    length = setup.data.prompt_tokens
    tokens = np.zeros((count, length), np.int32)
    first = setup.data.first
    source = "" if first is None else first.data_source
    record = PromptRecord("", tokens[0], "", source, {}, 0)
    return Prompts(tokens, np.full(count, length, np.int32), (record,) * count)


_SAMPLE = dict(prompt="", response="", ground_truth="", finish_reason="length")


def _rewarded(batch: Batch, prompts: Prompts, early=None) -> tuple[Batch, RewardReport]:
    """The batch with rewards and scores, as rljax.rollout.Reward returns it."""
    scores = np.arange(batch.rows, dtype=np.float32) % 2
    batch = batch.replace(rewards=last_token(batch) * scores[:, None], scores=scores)
    groups = fetch(batch.group).tolist()
    rows = tuple(
        ScoredRow(_SAMPLE, Score(float(score), {}, "ok", 0.0), prompts.records[group], group)
        for score, group in zip(scores, groups, strict=True)
    )
    return batch, RewardReport(rows)


def _each_once(calls: list[ProgramCall]) -> list[ProgramCall]:
    """The calls without those that run the same program again. Names that repeat are numbered."""
    unique, signatures = [], set()
    for call in calls:
        leaves, structure = jax.tree.flatten(call.arguments)
        arrays = [x for x in leaves if hasattr(x, "shape")]
        signature = (id(call.function), structure, call.mesh, call.instead)
        signature += tuple((x.shape, str(x.dtype)) for x in arrays)
        if signature not in signatures:
            signatures.add(signature)
            count = sum(call.name == k.name.rstrip(" 0123456789") for k in unique) + 1
            name = f"{call.name} {count}" if count > 1 else call.name
            unique.append(dataclasses.replace(call, name=name))
    return unique


def _placed(calls: list[ProgramCall], setup: Setup) -> list[ProgramCall]:
    """The calls with this host's arrays replaced by shapes, whose rows are split over the mesh
    where they divide."""

    def shape_of(x, mesh: Mesh):
        if isinstance(x, jax.ShapeDtypeStruct) or not hasattr(x, "shape"):
            return x
        fits = np.ndim(x) > 0 and x.shape[0] % row_shards(mesh) == 0
        layout = row_sharding(mesh) if fits else replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    def placed(call: ProgramCall) -> ProgramCall:
        mesh = call.mesh or setup.model.mesh
        shapes = jax.tree.map(lambda x: shape_of(x, mesh), call.arguments)
        return dataclasses.replace(call, arguments=shapes)

    return [placed(call) for call in calls]
