"""The programs that a config runs, each with the shapes and layouts that it is called with.

What lives here: one step of the config's own dataflow, on roles without weights, whose programs are
noted instead of run (rljax.recording). What does not: compiling them (rljax.plan.compiled).

The samples that the step sees are zeros of this host; their reward alternates between 0 and 1.
"""

import dataclasses

import jax
import numpy as np

from rljax.batch import Batch, last_token
from rljax.data.online.prompts import Prompts
from rljax.dataflows.sft import sft
from rljax.errors import InputError
from rljax.mesh import replicated, row_sharding, row_shards
from rljax.recording import Call, recording
from rljax.roles import WITH_OPTIMIZER, Baseline, KLController
from rljax.rollout import RewardReport
from rljax.rollout.collect import once
from rljax.setup.abstract import abstract_sft_actor
from rljax.setup.setup import Setup


def programs_of(setup: Setup, roles: dict) -> list[Call]:
    """Of the supervised phase, if there is one, and of a step of the dataflow with `roles` (of
    abstract_roles), in the order in which they run. Arguments are ShapeDtypeStructs, those of roles
    the very ones of `roles`. Raises InputError for a dataflow that learns from a file."""
    if setup.learns_offline:
        raise InputError(
            f"dataflow={setup.config.dataflow!r} learns from a file",
            rule="programs are planned of dataflows that sample",
            fix="--nocompile estimates its memory",
        )
    found = _supervised(setup) if setup.config.sft.steps else []
    here = {name: _counted(role) for name, role in roles.items()}
    if setup.needs_reward:
        here["reward"] = lambda batch, prompts: (_rewarded(batch), RewardReport())
    recipe = setup.recipe.replace(collect=once)  # further rounds call the same program
    with recording() as calls:
        try:
            setup.dataflow(_prompts(setup), jax.random.key(0), recipe, **here)
        except InputError:
            raise
        except Exception as error:  # what it does on the host between its programs
            raise InputError(
                f"dataflow={setup.config.dataflow!r} cannot be followed on samples of zeros",
                rule=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                fix="--nocompile estimates its memory; or plan one that calls the same programs",
            ) from error
    return found + _placed(_each_once(calls), setup)


def _counted(role):
    """A dataflow may ask how many steps were taken, or for the number that a small role holds."""
    if isinstance(role, WITH_OPTIMIZER):
        state = dataclasses.replace(role.state, step=np.zeros((), np.int32))
    elif isinstance(role, (KLController, Baseline)):
        state = np.zeros(role.state.shape, role.state.dtype)
    else:
        return role
    return dataclasses.replace(role, state=state)


def _prompts(setup: Setup) -> Prompts:
    """Of the greatest length, as many as are asked for."""
    count, length = setup.config.batch.prompts_per_step, setup.data.prompt_tokens
    tokens, lengths = np.zeros((count, length), np.int32), np.full(count, length, np.int32)
    return Prompts(tokens, lengths, ({},) * count)


def _rewarded(batch: Batch) -> Batch:
    """As rljax.roles.Reward leaves a batch."""
    scores = np.arange(batch.rows, dtype=np.float32) % 2
    return batch.replace(rewards=last_token(batch) * scores[:, None], scores=scores)


def _each_once(calls: list[Call]) -> list[Call]:
    """Without the calls that run a program again; of two of one name the second is numbered."""
    kept, seen = [], set()
    for call in calls:
        leaves, structure = jax.tree.flatten(call.arguments)
        arrays = [x for x in leaves if hasattr(x, "shape")]
        same = (id(call.function), structure, *((x.shape, str(x.dtype)) for x in arrays))
        if same not in seen:
            seen.add(same)
            count = sum(call.name == k.name.partition(" ")[0] for k in kept) + 1
            name = f"{call.name} {count}" if count > 1 else call.name
            kept.append(dataclasses.replace(call, name=name))
    return kept


def _placed(calls: list[Call], setup: Setup) -> list[Call]:
    """Arrays of this host as shapes, their rows split over the mesh where they divide."""
    mesh = setup.model.mesh

    def place(x):
        if isinstance(x, jax.ShapeDtypeStruct) or not hasattr(x, "shape"):
            return x
        fits = np.ndim(x) > 0 and x.shape[0] % row_shards(mesh) == 0
        layout = row_sharding(mesh) if fits else replicated(mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return [
        dataclasses.replace(call, arguments=jax.tree.map(place, call.arguments)) for call in calls
    ]


def _supervised(setup: Setup) -> list[Call]:
    """The learning phase on worked examples."""
    rows, length = setup.config.sft.sequences_per_step, setup.data.example_tokens
    numbers = np.zeros((rows, length), np.int32)
    batch = Batch(numbers, numbers, numbers, np.zeros((rows, length), np.float32))
    with recording() as calls:
        sft(batch, None, setup.sft_recipe, actor=abstract_sft_actor(setup))
    return [dataclasses.replace(call, name="sft") for call in _placed(calls, setup)]
