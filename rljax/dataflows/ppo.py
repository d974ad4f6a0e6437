"""PPO: actor and critic, KL to the reference in the reward, generalised advantages (arXiv
1707.06347)."""

from rljax.contracts import contract
from rljax.dataflows.steps import adapt_entropy_coef, compute_logprobs, prepare_batch, update_actor
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def ppo(
    batch,
    key,
    cfg,
    *,
    actor,
    critic,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    teacher=None,
    pretraining=None,
):
    """PPO: actor and critic, KL to the reference in the reward, generalised advantages
    (arXiv 1707.06347)."""
    cfg, entropy_controller, bonus = adapt_entropy_coef(batch, cfg, entropy_controller)
    models = dict(actor=actor, reference=reference, critic=critic, teacher=teacher)
    batch, load = compute_logprobs(batch, cfg, **models)
    batch, metrics, controller = prepare_batch(batch, cfg, actor=actor, kl_controller=kl_controller)
    critic, learned = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    earlier_metrics = {**learned, **metrics, **bonus, **load}
    actor, metrics = update_actor(actor, batch, cfg, earlier_metrics, kl_controller, pretraining)
    controllers = dict(kl_controller=controller, entropy_controller=entropy_controller)
    return {"actor": actor, "critic": critic, **controllers}, metrics
