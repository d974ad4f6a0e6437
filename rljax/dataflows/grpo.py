"""GRPO and its family: a group of samples per prompt, advantages relative to the group, no critic
(arXiv 2402.03300)."""

from rljax.contracts import contract
from rljax.dataflows.steps import (
    adapt_entropy_coef,
    apply_rollout_correction,
    compute_advantages,
    compute_logprobs,
    describe_batch,
    filter_baseline_rows,
    filter_rows,
    shape_rewards,
    update_actor,
    update_kl_controller,
)
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group"), fills=())
@program
def grpo(
    batch,
    key,
    cfg,
    *,
    actor,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    teacher=None,
    pretraining=None,
):
    """GRPO and its family: a group of samples per prompt, advantages relative to the group, no
    critic (arXiv 2402.03300)."""
    cfg, entropy_controller, bonus = adapt_entropy_coef(batch, cfg, entropy_controller)
    models = dict(actor=actor, reference=reference, teacher=teacher)
    batch, load = compute_logprobs(batch, cfg, **models)
    sampled, accepted, mismatch = apply_rollout_correction(batch, cfg)
    batch = filter_baseline_rows(sampled, cfg)
    batch = compute_advantages(batch, shape_rewards(batch, cfg, kl_controller), cfg)
    metrics = describe_batch(sampled, batch, cfg, actor, kl_controller)
    kl_controller_after, adaptation = update_kl_controller(kl_controller, batch)
    batch, filtering = filter_rows(batch, accepted, cfg)
    metrics |= {**mismatch, **adaptation, **bonus, **filtering, **load}
    actor, metrics = update_actor(actor, batch, cfg, metrics, kl_controller, pretraining)
    controllers = dict(kl_controller=kl_controller_after, entropy_controller=entropy_controller)
    return {"actor": actor, **controllers}, metrics
