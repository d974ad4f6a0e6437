"""The recorded micro-batches of TRL's trainers under other hyper-parameters, computed by plain
PyTorch: transformers' model, the papers' formulas and torch's AdamW; nothing of this library."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_io import read_cases
from torch.nn.functional import logsigmoid, softplus


def write_run(source: Path, models: Path, target: Path, changes: dict) -> None:
    """Writes the run of `source` with `changes` of its meta, beside its model."""
    meta, cases = read_cases(source)
    meta |= changes
    name = "reward_model" if meta["trainer"] == "RewardTrainer" else "model"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (target.parent / name).exists():
        shutil.copytree(models / name, target.parent / name)
    kinds = transformers.AutoModelForSequenceClassification, transformers.AutoModelForCausalLM
    kind = kinds[name == "model"]
    model, start = (kind.from_pretrained(models / name, attn_implementation="eager") for _ in "ab")
    final = _trained(model.train(), start.eval(), meta, cases)
    arrays = {"__meta__": np.asarray(json.dumps(meta))}
    for i, (case, loss) in enumerate(zip(cases, final.pop("losses"), strict=True)):
        case.params["step"] = i // meta["gradient_accumulation_steps"]
        arrays |= {f"case{i}/input/{k}": v for k, v in case.inputs.items()}
        arrays |= {f"case{i}/param/{k}": np.asarray(v) for k, v in case.params.items()}
        arrays |= {f"case{i}/output/loss": np.float32(loss), f"case{i}/label": np.asarray(f"{i}")}
    np.savez_compressed(target, **arrays, **{f"final/{k}": v for k, v in final.items()})


def _trained(model, reference, meta, cases) -> dict:
    """{losses, grad_norms, param/NAME} of the run."""
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    spared = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [
        dict(params=decayed, weight_decay=meta["weight_decay"]),
        dict(params=spared, weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=meta["lr"], betas=meta["betas"], eps=meta["eps"])
    size, losses, norms = meta["gradient_accumulation_steps"], [], []
    for i, case in enumerate(cases):
        inputs = {k: torch.from_numpy(np.asarray(v)) for k, v in case.inputs.items()}
        loss = FORMULAS[meta["trainer"]](model, reference, inputs, meta)
        losses.append(loss.item())
        (loss / size).backward()
        if (i + 1) % size == 0:
            for group in optimizer.param_groups:
                group["lr"] = meta["lr"] * _share(len(norms), meta)
            limit = meta["max_grad_norm"]
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"param/{n}": p.detach().numpy() for n, p in model.named_parameters()}
    if meta["trainer"] == "GRPOTrainer":  # it divides the loss itself
        losses = [loss / size for loss in losses]
    return {"losses": losses, "grad_norms": np.asarray(norms), **weights}


def _share(step: int, meta: dict) -> float:
    """The share of the learning rate at a step."""
    warmup, kind = meta["warmup_steps"], meta["scheduler"].rpartition(".")[2]
    if step < warmup and kind != "CONSTANT":
        return step / warmup
    if kind.startswith("CONSTANT"):
        return 1.0
    part = (step - warmup) / max(1, meta["max_steps"] - warmup)
    return {"LINEAR": 1 - part, "COSINE": (1 + math.cos(math.pi * part)) / 2}[kind]


def _logps(model, ids, attention):
    """Log-probs of ids[:, 1:], each given those before it."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    chosen = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0]
    return chosen


def _row_sums(model, x, front=""):
    ids, attention = x[f"{front}input_ids"], x[f"{front}attention_mask"]
    mask = x[f"{front}completion_mask"][:, 1:]
    return (_logps(model, ids, attention) * mask).sum(1), mask.sum(1)


def _dpo(model, reference, x, meta):
    now, counts = _row_sums(model, x)
    with torch.no_grad():
        before, _ = _row_sums(reference, x)
    if meta["loss_type"] == "ipo":
        now, before = now / counts, before / counts
    gain = now - before
    half = len(gain) // 2
    margin = gain[:half] - gain[half:]
    beta = meta["beta"]
    losses = {
        "sigmoid": lambda: -logsigmoid(beta * margin),
        "hinge": lambda: torch.relu(1 - beta * margin),
        "ipo": lambda: (margin - 1 / (2 * beta)) ** 2,
    }
    return losses[meta["loss_type"]]().mean()


def _kto(model, reference, x, meta):
    now, _ = _row_sums(model, x)
    with torch.no_grad():
        before, _ = _row_sums(reference, x)
        kl = (_row_sums(model, x, "KL_")[0] - _row_sums(reference, x, "KL_")[0]).mean().clamp(min=0)
    gain, beta = now - before, meta["beta"]
    good = 1 - torch.sigmoid(beta * (gain - kl))
    bad = 1 - torch.sigmoid(beta * (kl - gain))
    weights = meta["desirable_weight"], meta["undesirable_weight"]
    return torch.where(x["label"], weights[0] * good, weights[1] * bad).mean()


def _reward(model, _, x, meta):
    scores = model(input_ids=x["input_ids"], attention_mask=x["attention_mask"]).logits[:, 0]
    half = len(scores) // 2
    chosen, rejected = scores[:half], scores[half:]
    center = meta["center_rewards_coefficient"] * ((chosen + rejected) ** 2).mean()
    return softplus(rejected - chosen).mean() + center


def _sft(model, _, x, meta):
    labels = x["labels"][:, 1:]
    logps, mask = _logps(model, x["input_ids"], x["attention_mask"]), labels != -100
    if meta["loss_type"] == "dft":
        logps = logps.exp().detach() * logps
    return -(logps * mask).sum() / mask.sum()


def _response_logps(model, x):
    """[B, T] of the completions: TRL pads prompts on the left."""
    ids = torch.cat([x["prompt_ids"], x["completion_ids"]], 1)
    attention = torch.cat([x["prompt_mask"], x["completion_mask"]], 1)
    places = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attention, position_ids=places).logits[:, :-1]
    logps = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0]
    return logps[:, -x["completion_ids"].shape[1] :]


def _grpo(model, _, x, meta):
    logps, mask = _response_logps(model, x), x["completion_mask"]
    ratio = (logps - x["old_per_token_logps"]).exp()
    advantages = x["advantages"][:, None]
    if meta["loss_type"] == "cispo":
        per_token = -ratio.clamp(max=meta["epsilon_high"]).detach() * advantages * logps
    else:
        clipped = ratio.clamp(1 - meta["epsilon"], 1 + meta["epsilon_high"])
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if meta["beta"]:
        log = x["ref_per_token_logps"] - logps
        per_token = per_token + meta["beta"] * ratio * (log.exp() - log - 1)
    total = (per_token * mask).sum(1)
    if meta["loss_type"] == "grpo":
        return (total / mask.sum(1)).mean()
    if meta["loss_type"] == "dr_grpo":
        return total.mean() / meta["max_completion_length"]
    return total.sum() / mask.sum()


def _rloo(model, _, x, meta):
    logps, mask = _response_logps(model, x), x["completion_mask"]
    ratio = ((logps * mask).sum(1) - x["old_logps"]).exp()
    clipped = ratio.clamp(1 - meta["epsilon"], 1 + meta["epsilon"])
    return -torch.minimum(ratio * x["advantages"], clipped * x["advantages"]).mean()


FORMULAS = {
    "DPOTrainer": _dpo,
    "KTOTrainer": _kto,
    "RewardTrainer": _reward,
    "SFTTrainer": _sft,
    "GRPOTrainer": _grpo,
    "RLOOTrainer": _rloo,
}
