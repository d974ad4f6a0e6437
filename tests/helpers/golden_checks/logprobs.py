"""Log-probs and entropies of tokens, from logits and from hidden states with their head (TRL)."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.kernels.logprob import token_logprobs


def logprob_entropy(case, dtype):
    x = case.inputs
    logits, labels = jnp.asarray(x["logits"], dtype), jnp.asarray(x["labels"], jnp.int32)
    head = jnp.eye(logits.shape[-1], dtype=dtype)  # logits as hidden states

    def statistics(z):
        return token_logprobs(z, head, labels)[:2]

    def total(z):
        logp, entropy = statistics(z)
        return jnp.sum(logp * x["logp_cotangent"]) + jnp.sum(entropy * x["entropy_cotangent"])

    logp, entropy = statistics(logits)
    return {
        "output/logps": logp,
        "output/logps_fused": logp,
        "output/entropy": entropy,
        "output/entropy_fused": entropy,
        "grad/logits": jax.grad(total)(logits),
    }


def fused_lm_head(case, dtype):
    """The logits of a position say the label after it; a label of -100 is no token. The gradient is
    that of the log-probs times `logp_cotangent`, the loss their mean."""
    x, p = case.inputs, case.params
    hidden, head = jnp.asarray(x["hidden"], dtype), jnp.asarray(x["lm_head"], dtype)
    labels = x["labels"][:, 1:]
    keep = labels != -100
    targets = jnp.asarray(np.where(keep, labels, 0), jnp.int32)

    def statistics(hidden, head):
        scaled = hidden[:, :-1] * p.get("logit_scale", 1.0)
        return token_logprobs(
            scaled,
            head.T,
            targets,
            temperature=p["temperature"],
            with_greedy=True,
            soft_cap=p.get("final_logit_softcapping", 0.0),
        )

    def weighted(hidden, head):
        return jnp.sum(jnp.where(keep, statistics(hidden, head)[0], 0.0) * x["logp_cotangent"])

    logp, entropy, _, greedy = statistics(hidden, head)
    of_hidden, of_head = jax.grad(weighted, argnums=(0, 1))(hidden, head)
    unused = "a statistic that nothing here reads"
    return {
        "output/loss": -jnp.sum(jnp.where(keep, logp, 0.0)) / np.sum(keep),
        "output/log_probs": (logp, keep),
        "output/entropy": (entropy, keep),
        "output/is_top1": (greedy, keep),
        "output/label_mask": keep,
        "grad/hidden": of_hidden,
        "grad/lm_head": of_head,
        "omitted": {"output/log_sum_sq_probs": unused, "output/mean_logits": unused},
    }


CHECKS = {"trl/logprob_entropy": logprob_entropy, "trl/fused_lm_head": fused_lm_head}
