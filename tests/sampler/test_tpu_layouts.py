"""The program that brings weights to the layout of decoding, compiled ahead of time for a TPU v5e
of eight chips on a host that has none.

    python -m pytest -n 0 -m tpu_aot tests/sampler/test_tpu_layouts.py
"""

import dataclasses

import pytest
from test_layouts import exchanges, largest_held
from test_tpu_sampler import ITEM_BYTES, config

from rljax.mesh import make_mesh
from rljax.models.model import Model
from rljax.sampler import Decoding, Layout
from rljax.sampler.layout import reshard_program

pytestmark = pytest.mark.tpu_aot


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("decoded", [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)])
def test_a_reshard_sends_narrow_numbers_and_holds_a_layer_beside_its_output(chips, decoded, dtype):
    """From float32 weights split by fsdp; the study measured temporaries as large as the output
    where all layers went at once."""
    wide = dataclasses.replace(config(), weight_dtype="float32", layers=8, kinds=())
    model = Model(wide, make_mesh(fsdp=8, devices=chips))
    decoding = Decoding(layout=Layout(*decoded), weight_dtype=dtype)
    target = decoding.of(model)
    program = reshard_program(model, target, False).lower(model.abstract()).compile()
    sent = exchanges(program.as_text())
    assert {kind for kind, _ in sent} <= (
        {"bf16"} if dtype == "bfloat16" else {"s8", "bf16", "f32"}
    )
    most = max(size * ITEM_BYTES[kind] for kind, size in sent)
    assert most <= 2 * largest_held(target)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * memory.output_size_in_bytes
