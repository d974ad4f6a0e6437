"""Six steps of TRL's trainers, as the golden vectors hold them, and their replay by our programs.

A run is `trl_traj/NAME.npz`: every micro-batch, its loss, the gradient norms and the weights at the
end. Every hyper-parameter is read from the file's own meta, so that a folder of other runs
($RLJAX_GOLDEN) is replayed as it was made.
"""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import FURTHER, GOLDEN
from golden_checks.policy_trl import trl_core, trl_total
from golden_checks.preference import dpo_arguments
from golden_io import Case, read_cases, same
from toy import objective

from rljax import learn
from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.kto import kto
from rljax.dataflows.preference import preference
from rljax.dataflows.reward_model import reward_model
from rljax.learn import Steps, fit
from rljax.learn.optimizers import make_optimizer
from rljax.learn.state import TrainState
from rljax.losses import policy
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.models.names import disk_pieces
from rljax.roles import Actor, Reference, RewardModel, start_training

KEY = jax.random.key(0)
COLUMNS = 8  # rows are padded to multiples of it: few shapes, few compiles
SCALED = ("SFTTrainer", "GRPOTrainer")  # whose losses are divided for accumulation already


@dataclasses.dataclass(frozen=True)
class Run:
    """One recorded run: `steps` are its micro-batches, those of one optimizer step together."""

    path: Path
    meta: dict
    steps: list[list[Case]]
    final: dict[str, np.ndarray]

    @property
    def trainer(self) -> str:
        return self.meta["trainer"]

    def folder(self, name: str) -> Path:
        """A model folder beside the run, else that of tests/golden."""
        own = self.path.parent / name
        return own if own.is_dir() else GOLDEN / "trl_traj" / name


def read_run(path: Path) -> Run:
    """The run of a file."""
    meta, cases = read_cases(path)
    with np.load(path) as file:
        final = {k.removeprefix("final/"): file[k] for k in file if k.startswith("final/")}
    by_step = itertools.groupby(enumerate(cases), lambda pair: pair[1].params.get("step", pair[0]))
    steps = [[case for _, case in group] for _, group in by_step]
    size = meta.get("gradient_accumulation_steps", 1)
    assert all(len(step) == size for step in steps), f"{path}: steps of {[*map(len, steps)]}"
    return Run(path, meta, steps, final)


def recorded_runs() -> dict[str, Path]:
    """{id: file} of both folders. Of two that record the same the one with more weights stays."""
    found = {f"golden/{p.stem}": p for p in sorted(GOLDEN.glob("trl_traj/*.npz"))}
    for path in sorted(FURTHER.glob("trl_traj/*.npz")):
        mine = found.get(f"golden/{path.stem}")
        if mine and _same_run(mine, path):
            found[f"golden/{path.stem}"] = path
        else:
            found[f"further/{path.stem}"] = path
    return found


def _same_run(one: Path, other: Path) -> bool:
    (meta, cases), (other_meta, others) = read_cases(one), read_cases(other)
    pairs = len(cases) == len(others) and zip(cases, others, strict=True)
    return meta == other_meta and bool(pairs) and all(same(a, b) for a, b in pairs)


SCHEDULES = {
    "LINEAR": "linear",
    "COSINE": "cosine",
    "CONSTANT": "constant",
    "CONSTANT_WITH_WARMUP": "constant",
}


def trl_optimizer(meta: dict) -> optax.GradientTransformation:
    """AdamW as the run's meta says it."""
    kind = meta["scheduler"].upper().rpartition(".")[2]
    config = OptimizerConfig(
        lr=meta["lr"],
        schedule=SCHEDULES[kind],
        warmup_steps=0 if kind == "CONSTANT" else meta["warmup_steps"],
        beta1=meta["betas"][0],
        beta2=meta["betas"][1],
        eps=meta["eps"],
        weight_decay=meta["weight_decay"],
        clip_norm=meta["max_grad_norm"] or 0.0,
    )
    return make_optimizer(config, meta["max_steps"])


def replay(run: Run, mesh) -> None:
    """Every recorded step through our update: losses, gradient norms and final weights are TRL's.

    Raises AssertionError for the first that differs.
    """
    role, call = STARTS[run.trainer](run, mesh)
    losses, norms, wanted = [], [], []
    for step in run.steps:
        role, metrics = call(role, _together(step))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        recorded = [float(case.outputs["loss"]) for case in step]
        wanted.append(sum(recorded) if run.trainer in SCALED else np.mean(recorded))
    np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norms, run.final["grad_norms"], rtol=1e-4)
    state = role if isinstance(role, TrainState) else role.state
    compared = 0
    for tensor, (piece,) in disk_pieces(_model(run, mesh)).items():
        if f"param/{tensor}" not in run.final:
            continue
        node = state.params
        for key in piece.path:
            node = node[key]
        got = piece.theirs(np.asarray(node[piece.index]))
        np.testing.assert_allclose(got, run.final[f"param/{tensor}"], atol=2e-4, err_msg=tensor)
        compared += 1
    assert compared == sum(k.startswith("param/") for k in run.final) > 5


def _together(step: list[Case]) -> dict[str, np.ndarray]:
    """The micro-batches of an optimizer step as one batch: rows behind each other, columns padded
    (labels with -100)."""
    arrays = {}
    for name in step[0].inputs:
        parts = [case.inputs[name] for case in step]
        if parts[0].ndim == 2:
            width = max(part.shape[1] for part in parts)
            fill = -100 if name == "labels" else 0
            parts = [
                np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=fill) for p in parts
            ]
        arrays[name] = np.concatenate(parts) if parts[0].ndim else parts[0]
    return arrays | {"micro_batches": len(step)}


def _model(run: Run, mesh):
    name, head = ("reward_model", "scalar") if run.trainer == "RewardTrainer" else ("model", "lm")
    return Model(load_config(run.folder(name), remat="none"), mesh, head)


def _start(run: Run, mesh):
    """(model, its training state, optimizer)."""
    model, optimizer = _model(run, mesh), trl_optimizer(run.meta)
    folder = run.folder("reward_model" if run.trainer == "RewardTrainer" else "model")
    return model, start_training(model, load_params(folder, model), optimizer), optimizer


# -- pairs and labels, by our dataflows


def _recipe(rows: int, **stages) -> Algorithm:
    made = {name: resolve(text, NAMESPACES[name]) for name, text in stages.items()}
    return Algorithm(None, None, None, learn.token_mean, Steps(rows, rows), **made)


def _written(name: str, options: dict) -> str:
    """A component as a config has it."""
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"


def _pairs_first(x: np.ndarray, blocks: int) -> np.ndarray:
    """TRL stacks chosen on rejected, in each micro-batch; an example is two rows that follow each
    other here."""
    halves = x.reshape(blocks, 2, -1, *x.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(x.shape)


def _padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % COLUMNS)))


def _batch(ids, attention, mask, **fields):
    return batch_from_rows(
        jnp.asarray(_padded(ids), jnp.int32),
        jnp.asarray(attention.sum(axis=1)),
        jnp.asarray(_padded(mask), jnp.float32),
        **fields,
    )


def _actor_and_reference(run: Run, mesh):
    model, state, optimizer = _start(run, mesh)
    reference = Reference(load_params(run.folder("model"), model), model, 1.0)
    return Actor(state, model, optimizer, 1.0), reference


def _dpo(run: Run, mesh):
    actor, reference = _actor_and_reference(run, mesh)
    text = _written("dpo", dpo_arguments(run.meta))

    def call(actor, x):
        names = ("input_ids", "attention_mask", "completion_mask")
        batch = _batch(*(_pairs_first(x[name], x["micro_batches"]) for name in names))
        cfg = _recipe(batch.rows, preference_loss=text)
        new, metrics = preference(batch, KEY, cfg, actor=actor, reference=reference)
        return new["actor"], metrics

    return actor, call


def _kto(run: Run, mesh):
    meta = run.meta
    # TRL's KL is that of a micro-batch, ours of an optimizer step.
    assert meta.get("gradient_accumulation_steps", 1) == 1, "KTO with accumulation is not replayed"
    actor, reference = _actor_and_reference(run, mesh)
    options = {k: meta[k] for k in ("beta", "desirable_weight", "undesirable_weight")}
    text = _written(meta["loss_type"], options)

    def call(actor, x):
        label = jnp.where(jnp.asarray(x["label"]) > 0, 1.0, -1.0)
        names = ("input_ids", "attention_mask", "completion_mask")
        own, other = ([x[f"{front}{name}"] for name in names] for front in ("", "KL_"))
        width = max(own[0].shape[1], other[0].shape[1])

        def wide(v):
            return np.pad(v, ((0, 0), (0, width - v.shape[1])))

        own = _batch(*map(wide, own), scores=label)
        other = _batch(*map(wide, other), scores=jnp.zeros_like(label))
        both = jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), own, other)
        cfg = _recipe(len(label), preference_loss=text)
        new, metrics = kto(both, KEY, cfg, actor=actor, reference=reference)
        return new["actor"], metrics

    return actor, call


def _reward(run: Run, mesh):
    model, state, optimizer = _start(run, mesh)
    center = run.meta.get("center_rewards_coefficient") or 0.0

    def call(role, x):
        names = ("input_ids", "attention_mask")
        ids, attention = (_pairs_first(x[name], x["micro_batches"]) for name in names)
        cfg = _recipe(len(ids), reward_loss=_written("bradley_terry", {"center": center}))
        batch = _batch(ids, attention, attention)
        new, metrics = reward_model(batch, KEY, cfg, reward_model=role)
        return new["reward_model"], metrics

    return RewardModel(state, model, optimizer), call


# -- tokens, by our update


def _update(run: Run, mesh, to_batch, loss, reduction):
    """(state, call) of a loss per token."""
    model, state, optimizer = _start(run, mesh)

    @jax.jit
    def step(state, batch):
        return fit(
            state,
            batch,
            objective(model, loss, reduction),
            optimizer=optimizer,
            steps=Steps(batch.rows, batch.rows),
        )

    def call(state, x):
        state, metrics, _ = step(state, to_batch(x))
        return state, metrics

    return state, call


def _of_micro_batches(reduction, count: int):
    """A reduction of each micro-batch, whose mean is the step's."""

    def weights(batch):
        rows = batch.rows // count
        parts = [
            reduction(jax.tree.map(lambda a, k=k: a[k * rows : (k + 1) * rows], batch))
            for k in range(count)
        ]
        return jnp.concatenate(parts) / count

    return weights if count > 1 else reduction


def _sft(run: Run, mesh):
    losses = {"nll": policy.negative_log_likelihood, "dft": policy.dynamic_fine_tuning}

    def to_batch(x):
        mask = np.where(x["labels"] != -100, 1.0, 0.0)
        mask[:, 0] = 0
        return _batch(x["input_ids"], x["attention_mask"], mask)

    loss = losses[run.meta.get("loss_type", "nll")]
    return _update(run, mesh, to_batch, loss, learn.token_mean)


def _responses(x, columns: dict[str, np.ndarray], rows: dict[str, np.ndarray]):
    """Prompts and completions as one row each. `columns` [B, T] stand at the completion's tokens,
    `rows` [B] at all of them."""
    prompt, completion = x["prompt_mask"].sum(axis=1), x["completion_mask"].sum(axis=1)
    shape = len(prompt), x["prompt_ids"].shape[1] + x["completion_ids"].shape[1]
    tokens = np.zeros(shape, np.int64)
    fields = {k: np.zeros(shape, np.float32) for k in ("mask", *columns, *rows)}
    for i, (p, c) in enumerate(zip(prompt.astype(int), completion.astype(int), strict=True)):
        tokens[i, :p] = x["prompt_ids"][i][x["prompt_mask"][i] > 0]
        tokens[i, p : p + c] = x["completion_ids"][i, :c]
        fields["mask"][i, p : p + c] = 1
        for name, values in columns.items():
            fields[name][i, p : p + c] = values[i, :c]
        for name, values in rows.items():
            fields[name][i, p : p + c] = values[i]
    mask = fields.pop("mask")
    made = {name: jnp.asarray(_padded(values)) for name, values in fields.items()}
    lengths = np.arange(shape[1]) < (prompt + completion)[:, None]
    return _batch(tokens, lengths, mask, **made)


def _grpo(run: Run, mesh):
    # What a trainer logs of its config goes before TRL's defaults.
    p = {"importance_sampling_level": "token", "use_bias_correction_kl": True} | run.meta
    p.setdefault("epsilon_high", p["epsilon"])
    loss, options = trl_core(p, None, None)
    count = p.get("gradient_accumulation_steps", 1)
    width = p.get("max_completion_length")
    reduction = {
        "grpo": learn.seq_mean_token_mean,
        "sapo": learn.seq_mean_token_mean,
        "bnpo": _of_micro_batches(learn.token_mean, count),
        "dr_grpo": lambda batch: learn.seq_mean_token_sum_norm(batch, max_tokens=width),
        "luspo": learn.seq_mean_token_sum,
    }.get(p["loss_type"], learn.token_mean)

    def to_batch(x):
        names = {"old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps"}
        columns = {ours: x[theirs] for ours, theirs in names.items() if theirs in x}
        assert "old_logprobs" in columns, "a run without old log-probs is not replayed"
        return _responses(x, columns, {"advantages": x["advantages"]})

    def total(now, batch):
        core, metrics, _ = trl_total(now, batch, p, loss, options, False)
        return core, metrics

    return _update(run, mesh, to_batch, total, reduction)


def _rloo(run: Run, mesh):
    low = run.meta["epsilon"]
    clip = dict(clip_low=low, clip_high=run.meta.get("epsilon_high") or low)

    def to_batch(x):
        # Of the whole response, at its first token: only the sum counts.
        first = np.zeros(x["completion_ids"].shape, np.float32)
        first[:, 0] = x["old_logps"]
        return _responses(x, {"old_logprobs": first}, {"advantages": x["advantages"]})

    def loss(now, batch):
        return policy.gspo(now, batch, **clip, length_normalized=False)

    return _update(run, mesh, to_batch, loss, learn.seq_mean_token_mean)


STARTS = {
    "DPOTrainer": _dpo,
    "KTOTrainer": _kto,
    "RewardTrainer": _reward,
    "SFTTrainer": _sft,
    "GRPOTrainer": _grpo,
    "RLOOTrainer": _rloo,
}
