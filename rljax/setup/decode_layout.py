"""The layout that sampler.layout="auto" stands for: the fastest that fits beside what the run
holds, by the chip's published figures. The same config on the same devices has the same one."""

import dataclasses

from rljax.chips import Chip, chip_of
from rljax.mesh import slice_count
from rljax.sampler.layout import AUTO
from rljax.sampler.layout_cost import LayoutCost, Workload, decode_layout, layout_costs
from rljax.setup.held import KEPT_COPY, held_bytes, held_parts, of_mesh
from rljax.setup.role_table import abstract_roles
from rljax.setup.setup import Setup, sampled_prompts


def with_decode_layout(setup: Setup) -> Setup:
    """Returns the setup with the fastest layout of decoding, if its config leaves the choice to the
    plan. If the chip's figures are not known (CPU, GPU), or no policy samples, the layout stays
    that of training."""
    chip = chip_of(list(setup.model.mesh.devices.flat))
    if setup.config.sampler.layout != AUTO or chip is None or not samples(setup):
        return setup
    roles = abstract_roles(setup)
    layout = decode_layout(decode_costs(setup, chip, roles), free_bytes(setup, chip, roles))
    return dataclasses.replace(setup, decoding=dataclasses.replace(setup.decoding, layout=layout))


def samples(setup: Setup) -> bool:
    """Returns whether the policy of the main phase answers prompts."""
    return setup.main.samples and sampled_prompts(setup.config) > 0


def workload(setup: Setup) -> Workload:
    """Returns the sampling work of a main phase's step; all turns of an episode as one response."""
    prompt_tokens, batch = setup.data.prompt_tokens, setup.config.batch
    response = setup.rollouts.sampling.max_response_tokens
    if setup.config.environment.function:
        response = setup.row_tokens - prompt_tokens
    prompts = sampled_prompts(setup.config) or batch.prompts_per_step  # prompts of an evaluation
    return Workload(prompts, batch.samples_per_prompt, prompt_tokens, response)


def decode_costs(setup: Setup, chip: Chip, roles: dict) -> list[LayoutCost]:
    """Returns the costs of all layouts for the weights that are sampled with, the fastest first."""
    slices = slice_count(setup.model.mesh, setup.config.mesh.slices)
    inputs = (setup.model, roles["actor"].state.weights, setup.decoding, workload(setup), chip)
    return layout_costs(*inputs, slices=slices)


def free_bytes(setup: Setup, chip: Chip, roles: dict) -> float:
    """Returns the bytes of a device that a run does not hold from start to end; a copy of the
    weights in a layout of decoding comes out of them."""
    if setup.decoding.mesh is not None:  # the mesh of samplers holds nothing else
        return chip.hbm_bytes
    parts = of_mesh(setup.model.mesh, held_parts(setup, roles))
    return chip.hbm_bytes - sum(held_bytes(x) for name, x in parts.items() if name != KEPT_COPY)
