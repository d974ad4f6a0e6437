"""Safe-RLHF: PPO for a reward under a constraint on a cost, with a critic of each and a Lagrange
multiplier that learns (arXiv 2310.12773)."""

from rljax.contracts import NotNegative, Share, contract
from rljax.dataflows.steps import (
    adapt_entropy_coef,
    compute_logprobs,
    prepare_batch,
    update_actor,
    use_costs_as_rewards,
    use_lagrangian_advantage,
)
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group", "costs"), fills=("values", "cost_values"))
@program
def safe_rlhf(
    batch,
    key,
    cfg,
    *,
    actor,
    critic,
    cost_critic,
    multiplier,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    pretraining=None,
    kl_split: Share = 1.0,
    clip: NotNegative = 50.0,
):
    """Costs come from reward.cost_model, or as the reward's part `cost`; above 0 is unsafe.

    config.roles = ("cost_critic=trained_values(lr=5e-6)", "multiplier=lagrange_multiplier()").
    `kl_split` and `clip`: rljax.dataflows.steps.use_lagrangian_advantage.
    """
    cfg, entropy_controller, bonus = adapt_entropy_coef(batch, cfg, entropy_controller)
    batch, load = compute_logprobs(batch, cfg, actor=actor, reference=reference, critic=critic)
    batch = batch.replace(cost_values=cost_critic.values(batch, cfg.steps))
    multiplier, costs = multiplier.update(batch)
    cfg = use_lagrangian_advantage(cfg, multiplier, kl_controller, kl_split=kl_split, clip=clip)
    batch, metrics, controller = prepare_batch(batch, cfg, actor=actor, kl_controller=kl_controller)
    critic, learned = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    cost_critic, cost_learned = cost_critic.update(
        use_costs_as_rewards(batch), cfg.value_loss, **cfg.critic_options
    )
    earlier_metrics = {**learned, **cost_learned, **costs, **metrics, **bonus, **load}
    actor, metrics = update_actor(actor, batch, cfg, earlier_metrics, kl_controller, pretraining)
    roles = {"actor": actor, "critic": critic, "cost_critic": cost_critic, "multiplier": multiplier}
    return {**roles, "kl_controller": controller, "entropy_controller": entropy_controller}, metrics
