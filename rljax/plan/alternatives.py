"""Tries meshes, remat policies and microbatches of a config: which fit, and which is fastest.

rljax.plan.memory estimates a candidate, rljax.plan.compiled compiles it; here is the order in which
candidates are compiled.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rljax.config import Config, microbatch_tokens, value_of, with_overrides
from rljax.errors import InputError
from rljax.kernels.logprob.options import product_dtypes
from rljax.mesh import undivided
from rljax.plan.chips import Chip
from rljax.plan.compiled import Plan, make_plan
from rljax.plan.memory import as_flags, estimate
from rljax.roles import Actor, Critic, RewardModel
from rljax.sampler.layout_cost import layout_cost
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.decode_layout import samples, workload
from rljax.setup.placement import devices_apart
from rljax.setup.setup import Setup, assemble

LOG = logging.getLogger("rljax")
REMATS = ("none", "dots", "attention", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A changed config, {field: value}, and its plan."""

    changes: dict[str, object]
    plan: Plan


def meshes(devices: int) -> Iterator[dict[str, int]]:
    """Yields every data x fsdp x tensor mesh of so many devices, as fields of a config."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, fsdp in itertools.product(divisors, divisors):
        if devices % (tensor * fsdp) == 0:
            sizes = dict(data=devices // (tensor * fsdp), fsdp=fsdp, tensor=tensor)
            yield {f"mesh.{name}": n for name, n in sizes.items()}


def candidates(config: Config, devices) -> Iterator[tuple[dict[str, object], Setup, int]]:
    """Yields (changes, their setup, bytes of its estimate) for every mesh that divides the
    model and the batch, every remat policy, and tokens per microbatch from those of an
    optimizer step halved down to one row. Roles are made once per mesh: neither remat nor
    microbatches change their arrays. Raises InputError if the config's expert and context axes
    do not divide the devices."""
    # The expert axis, and here the context axis, are as the config has them (-1: what is left).
    fixed = max(config.mesh.expert, 1) * max(config.mesh.context, 1)
    count = len(devices) - devices_apart(config)
    if count % fixed:
        rule = f"divides the {count} devices"
        fix = "change mesh.expert and mesh.context so that their product divides the devices"
        raise InputError("mesh.expert x mesh.context", value=fixed, rule=rule, fix=fix)
    for mesh in meshes(count // fixed):
        try:
            setup = abstract_setup(with_overrides(config, mesh, "--search"), devices)
            roles = abstract_roles(setup)
        except InputError:
            continue
        as_configured = all(value_of(config, name) in (size, -1) for name, size in mesh.items())
        if undivided(setup.model.mesh, setup.model.shapes()) and not as_configured:
            continue  # it would pad
        sizes = [microbatch_tokens(config), setup.algorithm.steps.rows * setup.row_tokens]
        while sizes[-1] // 2 >= setup.row_tokens:
            sizes.append(sizes[-1] // 2)
        visited = set()
        for remat, tokens in itertools.product(REMATS, sizes):
            settings = {"model_settings.remat": remat, "batch.tokens_per_microbatch": tokens}
            changes = {**mesh, **settings}
            changed = with_overrides(config, changes, "--search")
            candidate = _with(setup, changed)
            if (remat, candidate.algorithm.steps) in visited:
                continue
            visited.add((remat, candidate.algorithm.steps))
            with_remat = {name: _of_remat(role, remat) for name, role in roles.items()}
            yield changes, candidate, estimate(candidate, with_remat).total


def _with(setup: Setup, config: Config) -> Setup:
    """The setup under another remat policy and microbatch."""
    model_config = dataclasses.replace(setup.model.config, remat=config.model_settings.remat)
    model = dataclasses.replace(setup.model, config=model_config)
    assembled = assemble(config, setup.tokenizer, setup.data, model, setup.row_tokens, setup.groups)
    return dataclasses.replace(assembled, decoding=setup.decoding)  # neither changes how it decodes


def _of_remat(role, remat: str):
    if not isinstance(role, (Actor, Critic, RewardModel)):
        return role
    config = dataclasses.replace(role.model.config, remat=remat)
    return dataclasses.replace(role, model=dataclasses.replace(role.model, config=config))


def fitting_candidates(
    config: Config, devices, chip: Chip, topology: str, *, compiles: int, seconds: float, only=()
) -> tuple[list[Candidate], int, int]:
    """Returns the candidates that fit by the compiler, best first; how many were compiled;
    and how many that may fit were left when `compiles` configs or `seconds` were spent.
    `only` as in make_plan.

    Meshes that do not divide the model, but for the config's own, and configs whose estimate
    exceeds the chip's memory, are not compiled. Rows are split over mesh.context only where nothing
    fits with the config's own split. The others are compiled in the order of a rough time, which
    counts the weights gathered for each microbatch and the layers computed again.
    """
    likely = _likely(config, devices, chip)
    start, fitting, compiled = time.monotonic(), [], 0
    for _, changes in likely[:compiles]:
        if time.monotonic() - start > seconds:
            break
        compiled += 1
        changed = with_overrides(config, changes, "--search")
        try:
            plan = make_plan(changed, devices, chip, topology, only=only)
        except jax.errors.JaxRuntimeError as error:  # the others took minutes: they are not lost
            LOG.warning("%s: %s", as_flags(changes), str(error).splitlines()[0])
            continue
        if plan.fits:
            current = {name: value_of(config, name) for name in changes}
            differing = {name: value for name, value in changes.items() if value != current[name]}
            fitting.append(Candidate(differing, plan))
    fitting.sort(key=lambda candidate: candidate.plan.least_s)
    return fitting, compiled, len(likely) - compiled


def _likely(config: Config, devices, chip: Chip) -> list[tuple[float, dict[str, object]]]:
    """(rough seconds, changes) of the candidates whose estimate fits, the fastest first.

    Rows stay whole, or split as the config's mesh.context says, where anything fits so; a row that
    is too long for a device is split over the fewest devices with which something fits.
    """
    count = (len(devices) - devices_apart(config)) // max(config.mesh.expert, 1)
    configured = config.mesh.context
    splits = [n for n in range(2, count + 1) if count % n == 0 and n > configured > 0]
    for context in (configured, *splits):
        split = {} if context == configured else {"mesh.context": context}
        wider = with_overrides(config, split, "--search")
        ordered = [
            (_rough_s(setup, chip), {**split, **changes})
            for changes, setup, needs in candidates(wider, devices)
            if needs <= chip.hbm_bytes
        ]
        if ordered:
            break
    return sorted(ordered, key=lambda pair: pair[0])


def _rough_s(setup: Setup, chip: Chip) -> float:
    """A rough estimate of the seconds of a step, sampled in the candidate's layout of decoding; it
    only orders candidates."""
    rollout_s = 0.0
    if samples(setup):
        inputs = (setup.model, setup.model.abstract(), setup.decoding, workload(setup), chip)
        rollout_s = layout_cost(*inputs).rollout_s
    model_config, mesh, steps = setup.model.config, setup.model.mesh, setup.algorithm.steps
    weights = sum(math.prod(shape) for shape, _ in setup.model.shapes().values())
    batch = setup.config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    tokens = rows * setup.row_tokens / mesh.size
    recomputed = {"none": 0, "dots": 0.1, "attention": 0.8}.get(model_config.remat, 1)
    head = model_config.vocab_size * model_config.embed
    *dtypes, precision = product_dtypes(
        jnp.dtype(model_config.dtype),
        jnp.dtype(model_config.weight_dtype),
        model_config.head_in_float32,
        model_config.head_dtype,
    )
    wide_inputs = sum(dtype == jnp.float32 for dtype in dtypes) if precision else 0
    passes, size = (1, 3, 6)[wide_inputs], jnp.dtype(dtypes[1]).itemsize
    # Logits are made in a pass for log-probs, forward, and once more backward.
    compute = (8 + 2 * recomputed) * weights * tokens + 3 * 2 * (passes - 1) * head * tokens
    compute /= chip.flops_per_s
    parts = rows / (steps.packing.full_rows if steps.packing else steps.microbatch_rows)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    gathers = 2 * weights / tensor * (fsdp - 1) / fsdp * parts * (3 + (recomputed > 0.5))
    # The head takes three gathers in the dtype of its product, and a scatter in float32.
    gathers += (3 * size + 4 - 2 * 3) * head / tensor * (fsdp - 1) / fsdp * parts
    # Sums of every layer's activations over the tensor axis.
    local = tokens * tensor * model_config.embed * 2
    sums = 8 * local * model_config.layers * 2 * (tensor - 1) / tensor
    sums += 8 * weights / tensor / fsdp * parts * (mesh.shape["data"] > 1)
    return compute + (gathers + sums) / (2 * chip.link_bytes_per_s) + rollout_s
