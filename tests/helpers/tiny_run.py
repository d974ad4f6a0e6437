"""A run of seconds, also as a config file for the launcher, and what two equal runs share."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from rljax.config import Config
from rljax.training import train

REPO = Path(__file__).resolve().parents[2]
# As much the machine's as the run's.
RATES = ("sync/seconds", "tokens_per_s", "generate_tokens_per_s", "compiles", "learning_programs")


def get_config() -> Config:
    """6 supervised steps and 6 of GRPO, two optimizer steps each; 16 rewards a step."""
    config = Config(dataflow="grpo", steps=6, samples_every_steps=2)
    config.model = "decoder(layers=2, embed=96, mlp=288, heads=3, kv_heads=3, head_dim=32)"
    config.model_settings.remat = "none"
    # (Of the task's own 20,000 prompts every start of a run would make records, for 2 seconds.)
    config.data.train = "sort_digits(digits=5, prompts=1000, test=64)"
    config.data.max_prompt_tokens = 8
    config.sampler.max_response_tokens = 7
    config.sft.steps, config.sft.optimizer.lr = 6, 2e-3
    config.batch.prompts_per_step = config.batch.samples_per_prompt = 4
    config.batch.sequences_per_optimizer_step = 8
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.actor_optimizer.lr, config.actor_optimizer.warmup_steps = 5e-4, 5
    config.reward.function, config.reward.workers = "sequence_match(partial=0.5)", 1
    config.evaluate.prompts, config.evaluate.every_steps = 16, 2
    config.checkpoint.every_steps = 2
    # No other cache than the one conftest.py has set.
    config.trackers, config.compilation_cache = (), ""
    return config


def tiny_config(run_dir, **fields) -> Config:
    """get_config() in `run_dir`; `batch__epochs=2` sets batch.epochs."""
    config = get_config()
    config.run_dir = str(run_dir)
    for name, value in fields.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        assert hasattr(node, path[-1]), name
        setattr(node, path[-1], value)
    return config


def train_on_one(config, **options) -> dict:
    """The summary of `train` on one of the eight devices: such a program compiles and runs in half
    the time."""
    return train_on(1, config, **options)


def train_on(devices: int, config, **options) -> dict:
    """The summary of `train` on so many of the eight devices."""
    return train(config, devices=jax.devices()[:devices], **options).summary


def metrics_rows(folder) -> list[dict]:
    """metrics.jsonl without what may differ between equal runs."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and k not in RATES}
        for row in rows
    ]


def summary(folder) -> dict:
    return json.loads((Path(folder) / "summary.json").read_text())


def newest_step(folder) -> int:
    return max(int(p.name) for p in (Path(folder) / "checkpoints").iterdir() if p.name.isdigit())


def flat_bytes(tree) -> dict:
    """{path: (dtype, shape, bytes)}: equal exactly when the trees are bitwise equal."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {path: (str(a.dtype), a.shape, a.tobytes()) for path, a in arrays.items()}


def checkpoint_bytes(folder, step: int) -> dict:
    """Every array of a checkpoint, whatever devices it was written from."""
    path = (Path(folder) / "checkpoints" / f"{step:08d}" / "arrays").absolute()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        like = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=here), tree)
        return flat_bytes(checkpointer.restore(path, like))


def policy_bytes(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((Path(folder) / "policy").iterdir())}


def saved_state(folder, step: int) -> dict:
    """state.json without clocks and without offsets, which count the digits of timings."""
    path = Path(folder) / "checkpoints" / f"{step:08d}" / "state.json"
    state = json.loads(path.read_text())
    del state["offsets"], state["progress"]["elapsed_s"]
    for part in ("faults", "fault_steps"):  # a process that goes on compiles anew
        state["progress"][part].pop("compiled_again", None)
    state["metrics"] = {
        k: v for k, v in state["metrics"].items() if not k.startswith("time/") and k not in RATES
    }
    return state


def assert_same_run(one, other) -> None:
    """Bitwise: parameters, optimizer state, data position, metrics, samples, exported policy."""
    rows, expected = metrics_rows(one), metrics_rows(other)
    assert [r["step"] for r in rows] == [r["step"] for r in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row == wanted
    assert (Path(one) / "samples.jsonl").read_bytes() == (
        Path(other) / "samples.jsonl"
    ).read_bytes()
    step = newest_step(other)
    assert newest_step(one) == step
    assert saved_state(one, step) == saved_state(other, step)
    arrays, wanted = checkpoint_bytes(one, step), checkpoint_bytes(other, step)
    assert len(wanted) > 30 and sum(len(a[2]) for a in wanted.values()) > 100_000
    assert arrays.keys() == wanted.keys()
    assert [k for k in arrays if arrays[k] != wanted[k]] == []
    assert policy_bytes(one) == policy_bytes(other)
    assert {"model.safetensors", "config.json"} <= policy_bytes(one).keys()
    ends = [
        {k: summary(f)[k] for k in ("status", "accuracy_before", "accuracy_after", "faults")}
        for f in (one, other)
    ]
    assert ends[0] == ends[1] and ends[0]["status"] == "finished"
