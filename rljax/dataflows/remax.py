"""ReMax: REINFORCE whose baseline is the score of the greedy response to the same prompt (arXiv
2310.10505)."""

from rljax.contracts import contract
from rljax.dataflows.grpo import grpo
from rljax.roles import program


@contract(
    safe=True,
    reads=("rewards", "scores", "group", "values"),
    fills=(),
    rollout="greedy_baseline()",
    single_rows=True,
)
@program
def remax(
    batch,
    key,
    cfg,
    *,
    actor,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    teacher=None,
):
    """The greedy scores come with the rollout, rljax.rollout.greedy_baseline, as `values`."""
    controllers = dict(kl_controller=kl_controller, entropy_controller=entropy_controller)
    models = dict(actor=actor, reference=reference, teacher=teacher)
    return grpo.page(batch, key, cfg, **models, **controllers)
