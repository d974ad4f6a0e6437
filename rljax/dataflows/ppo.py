"""PPO: actor and critic, KL to the reference in the reward, generalised advantages (arXiv
1707.06347)."""

from rljax.contracts import contract
from rljax.dataflows.steps import compute_logprobs, prepare_batch, update_actor
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def ppo(batch, key, cfg, *, actor, critic, reference=None, kl_controller=None, pretraining=None):
    """PPO: actor and critic, KL to the reference in the reward, generalised advantages
    (arXiv 1707.06347)."""
    batch, load = compute_logprobs(batch, cfg, actor=actor, reference=reference, critic=critic)
    batch, metrics, controller = prepare_batch(batch, cfg, actor=actor, kl_controller=kl_controller)
    critic, learned = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    earlier_metrics = {**learned, **metrics, **load}
    actor, metrics = update_actor(actor, batch, cfg, earlier_metrics, kl_controller, pretraining)
    return {"actor": actor, "critic": critic, "kl_controller": controller}, metrics
