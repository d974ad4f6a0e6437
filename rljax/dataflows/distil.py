"""Distillation: the policy learns the teacher's whole next-token distribution, on given completions
or on its own samples (GKD, arXiv 2306.13649; on-policy distillation)."""

from rljax.contracts import AboveZero, Share, contract
from rljax.learn.metrics import sample_metrics
from rljax.roles import program


@contract(safe=True, data="examples")
@program
def distil(batch, key, cfg, *, actor, teacher, beta: Share = 0.5, temperature: AboveZero = 1.0):
    """The mask is 1 on the tokens at which both are compared. beta 0 is KL(teacher || student), 1
    the reverse; both are softmax(logits / temperature)."""
    # Rows of a file have not been sampled: there are no metrics of samples.
    sampled = {} if batch.finish_reason is None else sample_metrics(batch, actor.state.step)
    actor, metrics = actor.imitate(
        batch, teacher, steps=cfg.steps, reduction=cfg.reduction, beta=beta, temperature=temperature
    )
    return {"actor": actor}, {**metrics, **sampled}


@contract(safe=True, data="samples")
@program
def on_policy_distil(
    batch, key, cfg, *, actor, teacher, beta: Share = 1.0, temperature: AboveZero = 1.0
):
    """`distil` at the tokens of the student's own samples, which need no reward."""
    roles = dict(actor=actor, teacher=teacher)
    return distil.page(batch, key, cfg, **roles, beta=beta, temperature=temperature)
