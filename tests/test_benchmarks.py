"""The benchmarks of a whole training step: their counts of work, and a run at a tiny size."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax.batch import Batch
from rljax.learn import Steps
from rljax.learn.packing import Packing
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Layout

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import grpo_step
import history
import peers
import sync
from step_shapes import SHAPES, Cost, Decoder, Shape, lap

TINY = Shape(  # a row for each of the tests' devices
    prompts=4, samples=2, shortest_prompt=3, longest_prompt=5, response=8, mean_response=5,
    slots=8, microbatch=8, decoder=Decoder(64, layers=1, embed=32, mlp=64, heads=2, kv_heads=1),
)  # fmt: skip


def test_prompts_are_of_the_lengths_of_the_shape_and_end_no_response():
    shape = SHAPES["ragged"]
    prompts = [shape.prompt_ids(i) for i in range(200)]
    assert prompts == [shape.prompt_ids(i) for i in range(200)]
    assert {len(x) for x in prompts} == set(range(8, 33))
    assert not {0, *shape.stop_ids()} & {token for x in prompts for token in x}
    assert len(shape.stop_ids()) == 4096 // 33 and SHAPES["fixed"].stop_ids() == ()
    assert (shape.rows, SHAPES["long"].columns) == (256, 256)


def test_useful_work_counts_a_prompt_once_in_its_group_and_no_padding():
    # Two groups of two: prompts of 3 and 2 tokens, responses of 1, 2 and 2, 0.
    rows = [(3, 1), (3, 2), (2, 2), (2, 0)]
    mask = np.zeros((4, 6), np.float32)
    real = np.zeros((4, 6), np.int32)
    for row, (prompt, response) in enumerate(rows):
        mask[row, prompt : prompt + response] = 1
        real[row, : prompt + response] = 1
    batch = Batch(
        tokens=np.zeros((4, 6), np.int32), mask=mask, segment_ids=real,
        positions=np.zeros((4, 6), np.int32),
    )  # fmt: skip
    every = [(p + r) * (p + r + 1) // 2 for p, r in rows]
    assert grpo_step.needed(batch, 2) == {
        "response_tokens": 5,
        "positions": 3 + 2 + 5,
        "pairs": sum(every) - 6 - 3,  # the second reading of each prompt
        "row_positions": 4 + 5 + 4 + 2,
        "row_pairs": sum(every),
        "padded_positions": 24,
    }
    # 3 + 1 + 2 of the first group, and 4 of a row that shares its prompt with none that counts.
    packing = Packing(4, 2, 1, 4, True, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    steps = Steps(rows=4, microbatch_rows=2)
    assert grpo_step.computed_positions(batch, steps) == 24
    assert grpo_step.computed_positions(batch, dataclasses.replace(steps, packing=packing)) == 16


def test_flops_are_those_of_the_products():
    sizes = Decoder(vocabulary=10, layers=2, embed=4, mlp=6, heads=2, kv_heads=1, head_dim=3)
    layer = 4 * 6 + 2 * 4 * 3 + 6 * 4 + 3 * 4 * 6  # queries, keys and values, output, MLP
    assert sizes.layer_weights() == 2 * layer
    attention = 2 * 2 * (2 * 3)  # scores and sums of values, per layer and pair
    assert sizes.forward_flops(7, 5, 11) == 2 * (7 * 2 * layer + 5 * 4 * 10) + 11 * attention * 2


def test_a_lap_is_charged_with_what_it_spends():
    def work():
        np.ones(2**23).sum()  # 64 MB, touched once

    cost = lap(work)
    assert 0 < cost.cpu_s < 60 and cost.peak_mb > 64
    assert cost.page_faults > 0


@pytest.mark.slow
def test_a_whole_run_at_a_tiny_size():
    out = grpo_step.measure(TINY, repeats=2)
    for part in ("generate", "learn", "step", "logprobs"):
        assert 0 < out[part]["wall_s"]["min"] <= out[part]["wall_s"]["max"]
    whole, parts = out["step"], [out["generate"], out["learn"]]
    assert sum(x["wall_s"]["min"] for x in parts) <= whole["wall_s"]["max"]
    assert 0 < out["tokens"]["positions"] < out["tokens"]["row_positions"] < 8 * 13
    assert out["before_the_second_step"]["compiles"] > 0 and out["compiled_later"] == []


def test_flags_choose_the_shape():
    flags = dataclasses.make_dataclass("Flags", ["prompt", "response", "ragged"])
    assert grpo_step.shape_of(flags(32, 128, False)) == SHAPES["fixed"]
    long = grpo_step.shape_of(flags(128, 128, False))
    assert dataclasses.replace(long, name="long") == SHAPES["long"]
    assert grpo_step.shape_of(flags(32, 128, True)) == SHAPES["ragged"]


# -- the comparison with other libraries --


def laps(seconds: list[float], tokens: int, peak_mb: float) -> list[dict]:
    def one(wall_s):
        cost = dataclasses.asdict(Cost(wall_s, 2 * wall_s, 0.0, 10, peak_mb))
        return {**dict.fromkeys(peers.PARTS, cost), "response_tokens": tokens}

    return [one(x) for x in seconds]


def test_ratios_are_to_the_best_peer():
    systems = {
        "rljax": peers.summary(laps([2.0, 1.0, 4.0], 120, 300.0)),
        "trl": peers.summary(laps([3.0, 4.0, 5.0], 120, 200.0)),
        "tunix": peers.summary(laps([5.0, 5.0, 5.0], 200, 900.0)),  # the most tokens per second
    }
    assert systems["rljax"]["step"]["wall_s"] == {"min": 1.0, "median": 2.0, "max": 4.0}
    ratios = peers.compared(systems)
    assert ratios["step_by_wall_s"] == {
        "best_peer": "tunix", "ratio": 1.5, "ratio_of_the_extremes": [0.75, 3.0]
    }  # fmt: skip
    assert ratios["update_by_cpu_s"]["ratio"] == 1.5
    assert ratios["peak_memory"] == {"best_peer": "trl", "ratio": 2 / 3}
    assert peers.compared({**systems, "tunix": {"failed": "why"}})["step_by_wall_s"]["ratio"] == 2
    assert peers.compared({"rljax": systems["rljax"], "trl": {"failed": "why"}}) == {}


PEER = """
import sys
from peer_worker import Worker
worker = Worker()
print("what a library says")
worker.say({"ready": {"name": worker.shape.name}})
for _ in range(int("%s")):
    worker.wait()
    worker.generated(3)
    worker.generated(4)
    worker.done()
sys.exit("no more steps")
"""


def test_systems_take_turns_and_one_that_fails_is_reported(tmp_path, monkeypatch):
    for name, steps in (("rljax", 3), ("trl", 3), ("tunix", 2)):
        (tmp_path / f"peer_{name}.py").write_text(PEER % steps)
    for name in ("peer_worker.py", "step_shapes.py"):
        (tmp_path / name).symlink_to(peers.HERE / name)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    out = peers.measure(TINY, 2, dict.fromkeys(peers.PACKAGES, sys.executable), tmp_path)
    systems = json.loads(json.dumps(out))["systems"]
    assert [systems[name]["laps"] for name in ("rljax", "trl")] == [2, 2]
    assert systems["trl"]["response_tokens"]["median"] == 7
    assert systems["rljax"]["versions"] == {"name": "fixed"}
    parts = systems["trl"]["generate"], systems["trl"]["update"], systems["trl"]["step"]
    assert parts[0]["wall_s"]["min"] <= parts[2]["wall_s"]["max"]
    assert "no more steps" in systems["tunix"]["failed"] and "step" not in systems["tunix"]
    assert out["ratios"]["step_by_wall_s"]["best_peer"] == "trl"
    in_no_time = peers.measure(TINY, 2, {"trl": sys.executable}, tmp_path, seconds=0)
    assert in_no_time["systems"]["trl"]["laps"] == 1


def test_an_environment_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "trl").write_text("a file where the environment goes")
    with pytest.raises(peers.Failed, match="environment cannot be made"):
        peers.python_of("trl", tmp_path)
    assert peers.python_of("rljax", tmp_path) == sys.executable
    (tmp_path / "tunix" / "bin").mkdir(parents=True)
    installed = "\n".join(x.format(jax=jax.__version__) for x in peers.PACKAGES["tunix"])
    (tmp_path / "tunix" / "installed.txt").write_text(installed)
    assert peers.python_of("tunix", tmp_path) == str(tmp_path / "tunix" / "bin" / "python")


def test_every_way_of_synchronising_brings_the_same_weights_to_the_same_place():
    config = decoder(64, layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)
    model, decoding = Model(config, make_mesh(fsdp=8)), Decoding(layout=Layout(data=4, tensor=2))
    params = model.init(jax.random.key(0))
    assert sync.colocated(model, params, decoding)[1:] == (params, 0, 0)
    (one, ours, written, none), (other, theirs, again, through) = (
        way(model, params, decoding) for way in (sync.resharded, sync.naive)
    )
    assert one == other and (none, written) == (0, again)
    assert through == written + sum(x.nbytes for x in jax.tree.leaves(params))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_ratios_of_synchronisation_are_of_medians():
    times = dict(written_bytes=[8], host_bytes=[0], sync_s=[1.0, 2.0, 9.0])
    found = {
        "colocated": times | dict(rollout_s=[4.0, 5.0, 60.0], written_bytes=[0]),
        "resharded": times | dict(rollout_s=[1.0, 2.5, 3.0]),
        "naive": times | dict(rollout_s=[10.0], sync_s=[6.0], host_bytes=[12]),
    }
    assert sync.summary(found)["ratios"] == {
        "rollout: resharded / colocated": 0.5,
        "rollout: naive / colocated": 2.0,
        "rollout: naive / resharded": 4.0,
        "sync: naive / resharded": 3.0,
        "bytes: naive / resharded": 2.5,
    }


def a_result(rate: float, *cpu_s: float) -> dict:
    """What benchmarks/grpo_step.py prints, of which the history reads a part."""
    spread = lambda x: {"min": x, "median": x, "max": x}  # noqa: E731
    parts = dict(zip(history.PARTS, cpu_s, strict=True))
    return {"matmul_gflop_per_cpu_s": spread(rate)} | {
        name: {"cpu_s": spread(x)} for name, x in parts.items()
    }


def test_the_cost_of_a_part_does_not_depend_on_the_speed_of_the_machine():
    fast, slow = (
        history.parts_of(a_result(100 / k, k * 1.0, k * 2.0, k * 0.5, k * 3.0)) for k in (1, 4)
    )
    costs = {part: one["cost"] for part, one in fast.items()}
    assert costs == {part: one["cost"] for part, one in slow.items()}
    assert costs == {"generate": 100, "learn": 200, "logprobs": 50, "step": 300}
    assert slow["learn"]["cpu_s"]["median"] == 8


def test_the_history_is_drawn_by_commit_oldest_first(tmp_path):
    lines = history.read(Path(history.HERE) / "benchmarks" / "history.jsonl")
    assert len(lines) > 2
    for line in lines:
        assert not line["changed"] and set(line["parts"]) == set(history.PARTS)
        assert {"jax", "python", "device", "cores", "load", "measured"} <= line.keys()
    points = history.costs([*reversed(lines), *lines])
    dates = [one["commit_date"] for one in points]
    assert dates == sorted(dates) and len(points) == len({x["commit"] for x in lines})
    assert all(len(one["step"]) % 2 == 0 for one in points)  # each line was given twice
    pytest.importorskip("matplotlib")
    history.draw(lines, str(tmp_path / "history.svg"))
    text = (tmp_path / "history.svg").read_text()
    assert all(one["commit"] in text for one in points)
