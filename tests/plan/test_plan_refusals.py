"""plan: what it says where a run does not fit, and what it must not say."""

import dataclasses
import json

import jax
import pytest
from conftest import REPO
from test_plan import CHIP, tiny

from rljax.config import with_overrides
from rljax.errors import InputError
from rljax.mesh import replicated
from rljax.plan import compiled, table
from rljax.plan.alternatives import fitting_candidates
from rljax.plan.chips import Chip
from rljax.plan.compiled import make_plan, needless_gathers
from rljax.plan.hlo import Collective
from rljax.plan.programs import programs_of
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.held import held_parts


def counted(config, chip=None):
    return make_plan(config, jax.devices(), chip, "8 x cpu", compile=False)


def test_a_run_that_this_host_cannot_hold_does_not_fit(monkeypatch):
    needs = counted(tiny()).estimate
    have = int(needs.resident + sum(needs.learn.values()) / 3)
    monkeypatch.setattr(compiled, "available_bytes", lambda setup: have)
    plan = counted(tiny())
    assert not plan.fits and "batch.tokens_per_microbatch" in plan.nearest
    text = table.plan_text(plan)
    assert "does not fit" in text and "--config.batch.tokens_per_microbatch=" in text
    told = json.loads(json.dumps(table.plan_json(plan), allow_nan=False))
    assert (told["left"], told["nearest"], told["fits"]) == (have, plan.nearest, False)
    assert counted(with_overrides(tiny(), plan.nearest, "test")).fits
    # Of a chip that is not there alike.
    chip = dataclasses.replace(CHIP, hbm_bytes=have)
    assert counted(tiny(), chip).nearest == plan.nearest
    monkeypatch.setattr(compiled, "available_bytes", lambda setup: None)
    assert counted(tiny()).fits and "does not fit" not in table.plan_text(counted(tiny()))


@pytest.mark.smoke
def test_a_dataflow_that_learns_from_a_file_has_one_program():
    setup = abstract_setup(tiny(dataflow="preference"))
    assert [call.name for call in programs_of(setup, abstract_roles(setup))] == ["learn"]
    with pytest.raises(InputError, match="no such program.*generate.*learn"):
        make_plan(tiny(dataflow="preference"), jax.devices(), None, "x", only=("generate",))
    assert "at the peak" in counted(tiny(dataflow="preference")).estimate.line()


@pytest.mark.slow
def test_a_row_of_the_search_is_all_that_has_to_be_set(monkeypatch):
    refused = []

    def pretend(config, devices, chip, topology, *, only):
        if not refused:
            refused.append(config)
            raise jax.errors.JaxRuntimeError("INTERNAL: this one the compiler does not take")
        return make_plan(config, devices, chip, topology, compile=False)

    monkeypatch.setattr("rljax.plan.alternatives.make_plan", pretend)
    chip = Chip("none", 2**24, 1e12, 1e11, 1e9)
    base = tiny()  # on fsdp 4 x tensor 2
    found, tried, _ = fitting_candidates(base, jax.devices(), chip, "x", compiles=6, seconds=100.0)
    assert (len(found), tried) == (5, 6)  # one crash does not lose the others
    for one in found:
        again = counted(with_overrides(base, one.changes, "test"), chip)
        assert again.config == one.plan.config
    assert any(one.changes.get("mesh.tensor") == 1 for one in found)


def test_neither_biases_nor_adapters_make_small_gathers_large():
    setup = abstract_setup(tiny(lora__rank=2, mesh__tensor=1, mesh__fsdp=8))
    held = held_parts(setup, abstract_roles(setup))
    small = Collective("all-gather", ("fsdp",), 1.0, 2 * 64 * 16, 3.0, "dot", True)
    matrix = dataclasses.replace(small, result_bytes=2 * 64 * 192)
    assert needless_gathers([small], held) == []
    assert len(needless_gathers([matrix], held)) == 1
    setup = abstract_setup(tiny())
    held = held_parts(setup, abstract_roles(setup))
    layers, whole = held["actor weights"]["layers"], replicated(setup.model.mesh)
    bias = jax.ShapeDtypeStruct((2, 2, 16), "float32", sharding=whole)
    held["actor weights"] = {"layers": {**layers, "q": {"bias": bias}}}
    assert needless_gathers([dataclasses.replace(small, result_bytes=256)], held) == []


def test_adapters_share_a_base_unless_the_critic_is_another_model(tmp_path):
    wish = dict(
        dataflow="ppo", algorithm__advantage="gae()", lora__rank=2, mesh__tensor=1, mesh__fsdp=8
    )
    assert [n for n in counted(tiny(**wish)).estimate.held if n.endswith("base")] == ["actor base"]
    config = json.loads((REPO / "configs/models/qwen2_5_0_5b/config.json").read_text())
    # A critic reads the ids of the policy: of Qwen's 0.49e9 weights the embedding is another one.
    embedding = config["vocab_size"] * config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    other = counted(tiny(**wish, critic_model=str(tmp_path)))
    weights = 0.494e9 - embedding  # in bfloat16 over eight devices
    assert other.estimate.held["critic base"] == pytest.approx(weights * 2 / 8, rel=0.02)
