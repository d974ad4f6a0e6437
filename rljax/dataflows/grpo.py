"""GRPO and its family: a group of samples per prompt, advantages relative to the group, no critic
(arXiv 2402.03300)."""

from rljax.contracts import contract
from rljax.dataflows.stages import (
    adapted,
    baseline_filtered,
    corrected,
    described,
    filtered,
    shaped,
    updated,
    with_advantages,
    with_logprobs,
)
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group"))
@program
def grpo(batch, key, cfg, *, actor, reference=None, kl_controller=None):
    batch, load = with_logprobs(batch, cfg, actor=actor, reference=reference)
    whole, kept, mismatch = corrected(batch, cfg)  # weights for what the sampler drew otherwise
    batch = baseline_filtered(whole, cfg)
    batch = with_advantages(batch, shaped(batch, cfg, kl_controller), cfg)
    metrics = described(whole, batch, cfg, actor, kl_controller)
    new_controller, adaptation = adapted(kl_controller, batch)
    batch, left = filtered(batch, kept, cfg)
    metrics |= {**mismatch, **adaptation, **left, **load}
    actor, metrics = updated(actor, batch, cfg, metrics, kl_controller)
    return {"actor": actor, "kl_controller": new_controller}, metrics
