"""The benchmarks of a whole training step: their counts of work, and a run at a tiny size."""

import dataclasses
import json
import mmap
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
import real
import real_decoding
import real_rljax
import real_rows
import sync
from step_shapes import SHAPES, Cost, Decoder, Shape, lap

TINY = Shape(  # a row for each of the tests' devices
    prompts=4,
    samples=2,
    shortest_prompt=3,
    longest_prompt=5,
    response=8,
    mean_response=5,
    slots=8,
    microbatch=8,
    decoder=Decoder(64, layers=1, embed=32, mlp=64, heads=2, kv_heads=1),
)


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
        tokens=np.zeros((4, 6), np.int32),
        mask=mask,
        segment_ids=real,
        positions=np.zeros((4, 6), np.int32),
    )
    every = [(p + r) * (p + r + 1) // 2 for p, r in rows]
    assert grpo_step.needed_tokens(batch, 2) == {
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
        # Pages of its own, each touched: memory of an array may be one that was used before.
        with mmap.mmap(-1, 2**26) as pages:
            for start in range(0, 2**26, mmap.PAGESIZE):
                pages[start] = 1

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
        "best_peer": "tunix",
        "ratio": 1.5,
        "ratio_of_the_extremes": [0.75, 3.0],
    }
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


# -- the comparison on a real model --


def test_rows_of_a_seed_are_those_that_a_run_draws(tmp_path):
    path = tmp_path / "rows.jsonl"
    train, test = real_rows.sums()
    assert len(train) == 2000 and not {str(x) for x in train} & {str(x) for x in test}
    real_rows.write_rows(path, train[:5])
    stream = real_rows.task(str(path), "exact_match()").train
    for seed in (0, 3):
        begin = seed * real_rows.APART
        rows = real_rows.rows_of_seed(str(path), seed, 12)
        assert rows == [stream[begin + i] for i in range(12)]
    rows = [str(x) for x in real_rows.rows_of_seed(str(path), 0, 10)]
    assert len(set(rows[:5])) == len(set(rows[5:])) == 5 and rows[:5] != rows[5:]
    score = real_rows.reward_function(f"{real_rows.__file__}:last_number")
    assert [score(x, "72") for x in ("24 + 48 = 72.", "72 or 73", "none")] == [1, 0, 0]


GIVEN = {
    "model": "m",
    "rows": "r.jsonl",
    "reward": f"{real_rows.__file__}:last_number",
    "steps": 1,
    "prompts": 2,
    "samples": 4,
    "max_prompt_tokens": 8,
    "max_response_tokens": 4,
    "microbatch": 4,
    "lr": 2e-5,
    "seed": 1,
    "dtype": "float32",
    "remat": "full",
}


@pytest.mark.slow
def test_both_systems_are_given_the_same_settings(tmp_path):
    ours = real_rljax.make_config(GIVEN, str(tmp_path))
    assert ours.batch.tokens_per_microbatch == 4 * 12 and ours.sampler.temperature == 1.0
    assert ours.batch.sequences_per_optimizer_step == 8 and ours.algorithm.kl_in_loss == 0
    pytest.importorskip("trl")
    import real_trl

    theirs = real_trl.make_settings(GIVEN, str(tmp_path))
    adamw = ours.actor_optimizer
    assert theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps == 8
    assert theirs.steps_per_generation == theirs.gradient_accumulation_steps == 2
    assert (theirs.learning_rate, theirs.adam_beta1, theirs.adam_beta2, theirs.adam_epsilon) == (
        adamw.lr,
        adamw.beta1,
        adamw.beta2,
        adamw.eps,
    )
    assert (theirs.max_grad_norm, theirs.weight_decay) == (adamw.clip_norm, adamw.weight_decay)
    assert theirs.gradient_checkpointing and not theirs.bf16
    assert theirs.lr_scheduler_type == adamw.schedule == "constant"


REAL_PEER = """
import os, subprocess, sys, time
from real_worker import RealWorker
worker = RealWorker()
spin = "import time, sys\\nwhile sys.stdin.readline():\\n  end = time.process_time() + 0.3\\n"
spin += "  while time.process_time() < end: pass\\n  print(flush=True)"
child = subprocess.Popen([sys.executable, "-c", spin], stdin=-1, stdout=-1, text=True)
worker.say({"ready": {"name": worker.options["remat"]}})
for number in range(2 if worker.options["fails"] == worker.options["remat"] else 9):
    worker.wait()
    worker.generated(6)
    print(file=child.stdin, flush=True)
    child.stdout.readline()
    worker.learned([(2, 3), (2, 3), (1,), (1,)], [1, 0, worker.options["seed"], 1])
sys.exit("no more steps")
"""


@pytest.mark.slow
def test_steps_on_a_real_model_are_taken_in_turns(tmp_path, monkeypatch):
    (tmp_path / "peer.py").write_text(REAL_PEER)
    for name in ("peer_worker.py", "real_worker.py", "step_shapes.py"):
        (tmp_path / name).symlink_to(peers.HERE / name)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setattr(real, "SYSTEMS", {"a": ("peer.py", "full"), "b": ("peer.py", "none")})
    flags = real.argparse.Namespace(dtypes="float32", systems="a,b", seeds="0,1")
    given = {**GIVEN, "steps": 2, "fails": ""}
    out = json.loads(json.dumps(real.measure(flags, given, tmp_path)))["float32"]
    a, both = out["systems"]["a"], out["against_a"]["b"]
    assert a["laps"] == 4 and a["versions"] == {"name": "full"} and out["failed"] == {}
    # What the process below spent is part of a step, and its memory, too.
    assert a["step"]["cpu_s"]["min"] >= 0.25 > a["generate"]["cpu_s"]["max"]
    assert a["peak_mb"]["later_steps"] > a["peak_mb"]["of_which_workers"] > 5
    assert [x["value"] for x in a["reward"]] == [0.625] * 3  # 1/2 and, by seed, 1/2 or 1
    assert both["other_prompts"] == 0 and both["cpu_s_ratio"]["low"] > 0
    assert both["reward_difference_of_the_last_quarter"] == {"value": 0, "low": 0, "high": 0}
    out = real.measure(flags, {**given, "fails": "none"}, tmp_path)["float32"]
    assert "no more steps" in out["failed"]["b"] and list(out["systems"]) == ["a"]


def test_prompts_that_differ_are_counted_and_not_compared():
    def lap(digest):
        cost = dataclasses.asdict(Cost(2.0, 1.0, 0.0, 1, 100.0))
        return {
            **dict.fromkeys(real.PARTS, cost),
            "response_tokens": 4,
            "prompts_sha256": digest,
            "rewards": [1.0],
            "workers": {"cpu_s": 1.0, "peak_mb": 100.0},
        }

    seeds = [[{"laps": [lap("x"), lap(last)]}] for last in ("x", "y")]
    found = real.compared(*seeds)
    assert found["other_prompts"] == 1 and "reward_difference" not in found
    assert found["cpu_s_ratio"]["value"] == 1 and real.cost(lap("x"), "step", "cpu_s") == 2


def test_greedy_tokens_are_compared_from_their_beginning():
    found = real_decoding.agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]])
    assert found == {"equal": 1, "sequences": 2, "mean_common_tokens": 2.0}
    laps = [{"step": dataclasses.asdict(Cost(s, s, 0.0, 1, 9.0))} for s in (50.0, 2.0, 4.0)]
    found = real_decoding.summary({"versions": {}}, laps, sequences=16, tokens=2)
    assert found["tokens_per_wall_s"] == {"min": 8, "median": 12, "max": 16}
    assert found["first_lap_wall_s"] == 50 and found["laps"] == 2


@pytest.mark.slow
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

    def spread(x):
        return {"min": x, "median": x, "max": x}

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
