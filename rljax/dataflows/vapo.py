"""VAPO: PPO with a critic that is trained alone first, and an NLL term on correct responses (arXiv
2504.05118; its GAE is the advantage `vapo_gae`)."""

import jax
import jax.numpy as jnp

from rljax.contracts import NotNegative, contract
from rljax.dataflows.ppo import ppo
from rljax.dataflows.steps import compute_logprobs, prepare_batch
from rljax.roles import program


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def vapo(
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
    value_pretraining_steps: int = 50,
    positive_nll: NotNegative = 0.1,
):
    """`value_pretraining_steps` optimizer steps of the critic, on returns of the fixed policy, come
    before the actor's first; `positive_nll` weighs the NLL of rows with score >= correct_at.
    Metrics of the actor's update are NaN until its first step."""
    cfg = cfg.replace(positive_nll=positive_nll)
    controllers = dict(kl_controller=kl_controller, entropy_controller=entropy_controller)
    roles = dict(actor=actor, critic=critic, **controllers)

    def train(batch, roles):
        return ppo.page(batch, key, cfg, reference=reference, teacher=teacher, **roles)

    def pretrain(batch, roles):
        plain_cfg = cfg.replace(kl_in_reward=0.0, teacher_coef=0.0)
        batch, load = compute_logprobs(batch, plain_cfg, actor=actor, critic=roles["critic"])
        estimated, metrics, _ = prepare_batch(batch, plain_cfg, actor=actor)
        critic, learned = roles["critic"].update(estimated, cfg.value_loss, **cfg.critic_options)
        _, names = jax.eval_shape(train, batch, roles)
        measured = {**dict.fromkeys(names, jnp.nan), **metrics, **learned, **load}
        return {**roles, "critic": critic}, {
            name: jnp.asarray(measured[name], struct.dtype) for name, struct in names.items()
        }

    if not value_pretraining_steps:
        return train(batch, roles)
    begins = critic.state.step >= value_pretraining_steps
    return jax.lax.cond(begins, train, pretrain, batch, roles)
