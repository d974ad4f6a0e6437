"""The programs that a config runs, each with the shapes and layouts that it is called with.

Learning is the dry run's program (rljax.setup.dry_run); decoding is what the config's rollout asks
of an actor that plans instead of sampling. Its samples are zeros of this host, and their reward
alternates between 0 and 1.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from rljax.batch import Batch, last_token
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import spec
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.errors import InputError
from rljax.mesh import make_mesh, replicated, row_sharding, row_shards
from rljax.roles import Actor, Reference
from rljax.rollout import RewardReport, run_rollout
from rljax.sampler.generate import planned_rollout
from rljax.setup import Phase, Setup, abstract_roles
from rljax.setup.dry_run import abstract_batch, abstract_key, roles_read
from rljax.setup.setup import rollout_of, samples_policy


@dataclasses.dataclass(frozen=True)
class Call:
    """A jitted function and its arguments. `turns`: of the loops that end when the data say so, at
    most."""

    name: str
    function: Any
    arguments: tuple
    turns: int = 1
    static: dict = dataclasses.field(default_factory=dict)


def programs_of(setup: Setup, roles: dict) -> list[Call]:
    """Those of every phase in the order in which they run: decoding, if it samples, and learning
    with `roles` (of abstract_roles). Arguments are ShapeDtypeStructs, those of roles the very ones
    of `roles`."""
    calls = []
    for phase in setup.phases:
        main = phase is setup.main
        own = roles if main else abstract_roles(setup, phase)
        if phase.samples and samples_policy(setup.config):
            calls += _decoding(setup, own)
        calls.append(_learning(setup, phase, own, "learn" if main else phase.name))
    return calls


def _learning(setup: Setup, phase: Phase, roles: dict, name: str) -> Call:
    function = phase.dataflow.function
    if "arguments" not in vars(function):
        raise InputError(
            f"dataflow={phase.dataflow.text!r} is no program",
            rule="a plan compiles the one program of a dataflow",
            fix="decorate it with rljax.roles.program; --nocompile estimates its memory",
        )
    positional, static = function.arguments(
        abstract_batch(setup, phase), abstract_key(setup), phase.algorithm,
        **roles_read(phase, roles), **phase.dataflow.options,
    )  # fmt: skip
    return Call(name, function.run, positional, static=static)


def _decoding(setup: Setup, roles: dict) -> list[Call]:
    calls: list[Call] = []
    config, rollout = setup.config, setup.rollout
    collect = resolve(config.algorithm.collect, NAMESPACES["collect"])
    if spec(collect).needs_groups:  # further rounds call the same program
        settings = dataclasses.replace(config.algorithm, collect="once()")
        config = dataclasses.replace(config, algorithm=settings)
        rollout = rollout_of(config, setup.dataflow)
    samplers = {
        name: _Planned(role, calls) if isinstance(role, (Actor, Reference)) else role
        for name, role in roles.items()
    }
    prompts = _prompts(setup, setup.config.batch.prompts_per_step)
    try:
        run_rollout(
            rollout, prompts, jax.random.key(0), setup.rollouts, **samplers, reward=_rewarded,
            draw=lambda count: _prompts(setup, count), tokenizer=setup.tokenizer,
        )  # fmt: skip
    except InputError:
        raise
    except Exception as error:  # what it does on the host between its programs
        raise InputError(
            f"algorithm.collect={collect.text!r} cannot be followed on samples of zeros",
            rule=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="--nocompile estimates its memory; or plan one that calls the same programs",
        ) from error
    return _placed(_each_once(calls), setup)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A role whose samples are zeros, and the programs that would draw them noted in `calls`."""

    role: Actor | Reference
    calls: list

    @property
    def model(self):
        """Host code places batches on this host, not on the planned mesh."""
        here = make_mesh(1, 1, 1, devices=jax.local_devices(backend="cpu")[:1])
        return dataclasses.replace(self.role.model, mesh=here)

    def sampling_params(self):
        return self.role.params

    def generate(
        self, prompts, key, sampling, *, n=1, finished=None, stop=None, second=None
    ) -> Batch:
        role = self.role
        weights = role.state.weights if isinstance(role, Actor) else role.params
        if second is not None:  # its model is this host's: the planned one has the same layout
            second = dataclasses.replace(second, model=role.model)
        programs, batch = planned_rollout(
            role.model,
            weights,
            prompts.tokens,
            sampling,
            n=n,
            decoding=role.decoding,
            second=second,
        )
        self.calls += [Call(name, *program) for name, program in programs.items()]
        return batch


def _prompts(setup: Setup, count: int) -> Prompts:
    """`count` prompts of the greatest length."""
    length = setup.data.prompt_tokens
    tokens = np.zeros((count, length), np.int32)
    record = PromptRecord("", tokens[0], "", "", {}, 0)
    return Prompts(tokens, np.full(count, length, np.int32), (record,) * count)


def _rewarded(batch: Batch, prompts: Prompts, early=None) -> tuple[Batch, RewardReport]:
    """As rljax.rollout.Reward leaves a batch."""
    scores = np.arange(batch.rows, dtype=np.float32) % 2
    batch = batch.replace(rewards=last_token(batch) * scores[:, None], scores=scores)
    return batch, RewardReport()


def _each_once(calls: list[Call]) -> list[Call]:
    """Without the calls that run a program again; of two of one name the second is numbered."""
    kept, known = [], set()
    for call in calls:
        leaves, structure = jax.tree.flatten(call.arguments)
        arrays = [x for x in leaves if hasattr(x, "shape")]
        same = (id(call.function), structure, *((x.shape, str(x.dtype)) for x in arrays))
        if same not in known:
            known.add(same)
            count = sum(call.name == k.name.partition(" ")[0] for k in kept) + 1
            name = f"{call.name} {count}" if count > 1 else call.name
            kept.append(dataclasses.replace(call, name=name))
    return kept


def _placed(calls: list[Call], setup: Setup) -> list[Call]:
    """Arrays of this host as shapes, their rows split over the mesh where they divide."""
    mesh = setup.model.mesh

    def shape_of(x):
        if isinstance(x, jax.ShapeDtypeStruct) or not hasattr(x, "shape"):
            return x
        fits = np.ndim(x) > 0 and x.shape[0] % row_shards(mesh) == 0
        layout = row_sharding(mesh) if fits else replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return [
        dataclasses.replace(call, arguments=jax.tree.map(shape_of, call.arguments))
        for call in calls
    ]
