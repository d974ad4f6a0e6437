"""Learning from pairs of a better and a worse completion, without rewards or samples: DPO (arXiv
2305.18290) and its relatives, which algorithm.preference_loss names (rljax.losses.preference)."""

from rljax.contracts import spec
from rljax.roles import program


def preference(pairs, key, cfg, *, actor, reference=None):
    """`pairs` is a Batch of 2 rows per pair (chosen, rejected), or 3 with a reference completion
    before them; nothing is sampled. The reference is only there if the loss reads it."""
    return learn(pairs, cfg, actor=actor, reference=reference)


@program
def learn(batch, cfg, *, actor, reference=None):
    if reference is not None:
        logprobs = reference.logprobs(batch, cfg.steps.microbatch_rows)
        batch = batch.replace(ref_logprobs=logprobs)
    batch = with_spread(batch, cfg, actor=actor)
    actor, metrics = actor.update(
        batch, cfg.preference_loss, steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor}, metrics


def with_spread(batch, cfg, *, actor):
    """The batch with what WPO weighs a pair by, where the loss asks for it."""
    if "sum_pi_squared" not in spec(cfg.preference_loss).reads:
        return batch
    return batch.replace(sum_pi_squared=actor.sum_pi_squared(batch, cfg.steps.microbatch_rows))
