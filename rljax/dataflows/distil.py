"""Distillation: the policy learns the teacher's whole next-word distribution, on given completions
or on its own samples (GKD, arXiv 2306.13649; on-policy distillation)."""

from rljax.learn.metrics import sample_metrics
from rljax.roles import program


def distil(examples, key, cfg, *, actor, teacher, beta: float = 0.5, temperature: float = 1.0):
    """`examples` is a Batch whose mask is 1 on the tokens at which both are compared; nothing is
    sampled. beta 0 is KL(teacher || student), 1 the reverse; both are softmax(logits /
    temperature)."""
    return learn(examples, (cfg, beta, temperature), actor=actor, teacher=teacher)


def on_policy_distil(
    prompts, key, cfg, *, actor, teacher, beta: float = 1.0, temperature: float = 1.0
):
    """As distil, at the tokens of the student's own samples, which need no reward."""
    batch = actor.generate(prompts, key, cfg.sampling, n=cfg.samples_per_prompt)
    return learn(batch, (cfg, beta, temperature), actor=actor, teacher=teacher)


@program
def learn(batch, which, *, actor, teacher):
    cfg, beta, temperature = which
    # What comes from a file has not been sampled: there is nothing to say of it.
    seen = {} if batch.finish_reason is None else sample_metrics(batch, actor.state.step)
    actor, metrics = actor.imitate(
        batch, teacher, steps=cfg.steps, reduction=cfg.reduction, beta=beta, temperature=temperature
    )
    return {"actor": actor}, {**metrics, **seen}
