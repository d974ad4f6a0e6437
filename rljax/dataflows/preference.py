"""Learning from pairs of a better and a worse completion, without rewards or samples: DPO (arXiv
2305.18290) and its relatives, which algorithm.preference_loss names (rljax.losses.preference)."""

from rljax.contracts import contract, spec
from rljax.roles import program


@contract(safe=True, data="pairs", rows=2)
@program
def preference(batch, key, cfg, *, actor, reference=None):
    """2 rows per pair (chosen, rejected), or 3 with a reference completion before them. The
    reference model is only there if the loss reads its log-probs."""
    if reference is not None:
        logprobs = reference.logprobs(batch, cfg.steps)
        batch = batch.replace(ref_logprobs=logprobs)
    batch = with_spread(batch, cfg, actor)
    actor, metrics = actor.update(
        batch, cfg.preference_loss, steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor}, metrics


def with_spread(batch, cfg, actor):
    """Returns the batch with sum_pi_squared [B, S], by which WPO weighs a pair, if the loss reads
    it."""
    if "sum_pi_squared" not in spec(cfg.preference_loss).reads:
        return batch
    return batch.replace(sum_pi_squared=actor.sum_pi_squared(batch, cfg.steps))
