"""Other meshes, remat policies and microbatches of a config: which fit, and which is fastest.

What lives here: the order in which they are tried. What does not: what one of them needs
(rljax.plan.memory estimates, rljax.plan.compiled compiles).
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator

from rljax.build.abstract import abstract_setup
from rljax.config import Config, row_tokens, with_overrides
from rljax.errors import InputError
from rljax.plan.chips import Chip
from rljax.plan.compiled import Plan, make_plan
from rljax.plan.memory import estimate

REMATS = ("none", "dots", "attention", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A changed config, {field: value}, and its plan."""

    changes: dict[str, object]
    plan: Plan


def meshes(devices: int) -> Iterator[dict[str, int]]:
    """data x fsdp x tensor of so many devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, fsdp in itertools.product(divisors, divisors):
        if devices % (tensor * fsdp) == 0:
            sizes = dict(data=devices // (tensor * fsdp), fsdp=fsdp, tensor=tensor)
            yield {f"mesh.{name}": n for name, n in sizes.items()}


def candidates(config: Config, devices: int) -> Iterator[dict[str, object]]:
    """Every combination of mesh, remat and tokens per microbatch (halved down to one row)."""
    tokens, sizes = config.batch.tokens_per_microbatch, []
    while tokens >= row_tokens(config):
        sizes.append(tokens)
        tokens //= 2
    for mesh, remat, tokens in itertools.product(meshes(devices), REMATS, sizes):
        rest = {"mesh.expert": 1, "mesh.context": 1, "model_settings.remat": remat}
        yield {**mesh, **rest, "batch.tokens_per_microbatch": tokens}


def search(
    config: Config, devices, chip: Chip, topology: str, *, compiles: int, seconds: float
) -> tuple[list[Candidate], int, int]:
    """(the candidates that fit by the compiler, best first; how many were compiled; how many that
    may fit were left when `compiles` configs or `seconds` were spent).

    A mesh that does not divide the model, and a config whose estimate is above the chip, is not
    compiled. The rest is compiled in the order of a rough time: bytes of weights that are gathered
    for each microbatch, and layers that are computed again.
    """
    likely = _likely(config, devices, chip)
    begun, found, tried = time.monotonic(), [], 0
    for _, changes in likely[:compiles]:
        if time.monotonic() - begun > seconds:
            break
        tried += 1
        plan = make_plan(with_overrides(config, changes, "--search"), devices, chip, topology)
        if plan.fits:
            found.append(Candidate({k: v for k, v in changes.items() if v != 1}, plan))
    found.sort(key=lambda one: one.plan.least_s)
    return found, tried, len(likely) - tried


def _likely(config: Config, devices, chip: Chip) -> list[tuple[float, dict[str, object]]]:
    """Those that divide and whose estimate fits, fastest first by `_rough_s`."""
    out, seen = [], set()
    for changes in candidates(config, len(devices)):
        try:
            setup = abstract_setup(with_overrides(config, changes, "--search"), devices)
            needs = estimate(setup).total
        except InputError:
            continue
        same = (setup.model, setup.recipe.steps)
        if needs <= chip.hbm_bytes and same not in seen:
            seen.add(same)
            out.append((_rough_s(setup, chip), changes))
    return sorted(out, key=lambda pair: pair[0])


def _rough_s(setup, chip: Chip) -> float:
    """Seconds of a step's learning phase, roughly: what orders the candidates, and no more."""
    facts, mesh, steps = setup.model.config, setup.model.mesh, setup.recipe.steps
    weights = sum(math.prod(shape) for shape, _ in setup.model.shapes().values())
    batch = setup.config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    tokens = rows * setup.row_tokens / mesh.size
    again = {"none": 0, "dots": 0.1, "attention": 0.8}.get(facts.remat, 1)
    compute = (8 + 2 * again) * weights * tokens / chip.flops_per_s
    parts = rows / steps.microbatch_rows
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    gathers = 2 * weights / tensor * (fsdp - 1) / fsdp * parts * (3 + (again > 0.5))
    local = tokens * tensor * facts.embed * 2  # of every layer's activations, summed over tensor
    sums = 8 * local * facts.layers * 2 * (tensor - 1) / tensor
    sums += 8 * weights / tensor / fsdp * parts * (mesh.shape["data"] > 1)
    return compute + (gathers + sums) / (2 * chip.link_bytes_per_s)
