"""Checks of the distillation losses: logits enter as hidden states under a head of ones."""

import jax
import jax.numpy as jnp
import numpy as np

from golden_checks.common import response_batch
from rljax.losses import distillation as distill
from rljax.losses.policy import PolicyOutputs


def logits_readout(logits):
    return distill.Readout(logits, jnp.eye(logits.shape[-1], dtype=logits.dtype))


def arrays(case, dtype, *names):
    return [jnp.asarray(case.inputs[name], dtype) for name in names]


def gkd_generalized_jsd(case, dtype):
    p = case.params
    student, teacher = arrays(case, dtype, "student_logits", "teacher_logits")
    labels = case.inputs.get("labels")
    keep = np.ones(student.shape[:-1], bool) if labels is None else np.asarray(labels) != -100
    count = p.get("num_items_in_batch") or (len(keep) if labels is None else keep.sum())
    divisor = {"batchmean": count, "sum": 1, "mean": keep.sum() * student.shape[-1]}
    both = {"beta": p["beta"], "temperature": p["temperature"]}

    def terms(x):
        log_s, log_t = (jax.nn.log_softmax(z / p["temperature"], axis=-1) for z in (x, teacher))
        return distill.jsd_terms(log_s, log_t, beta=p["beta"])

    def total(x):
        loss, _ = distill.distillation(logits_readout(x), logits_readout(teacher), **both)
        return jnp.sum(jnp.where(keep, loss, 0.0))

    if p["reduction"] == "none":
        # Compared word by word; its gradient is that of the sum.
        loss = terms(student) if labels is None else terms(student)[keep]
        return {"output/loss": loss, "grad/student_logits": jax.grad(total)(student)}
    value, gradient = jax.value_and_grad(total)(student)
    n = divisor[p["reduction"]]
    return {"output/loss": value / n, "grad/student_logits": gradient / n}


def distillation_chunked(case, dtype):
    p = case.params
    hidden, head, teacher_hidden, teacher_head = arrays(
        case, dtype, "student_hidden", "student_lm_head", "teacher_hidden", "teacher_lm_head"
    )
    mask = jnp.asarray(case.inputs["completion_mask"], dtype)
    n = p.get("num_items_in_batch") or jnp.maximum(jnp.sum(mask), 1)
    shape = {"logit_scale": p["logit_scale"], "soft_cap": p.get("final_logit_softcapping") or 0.0}
    teacher = distill.Readout(teacher_hidden, teacher_head.T, **shape)

    def total(hidden, head):
        student = distill.Readout(hidden, head.T, **shape)
        loss, metrics = distill.distillation(
            student, teacher, mask, beta=p["beta"], temperature=p["temperature"]
        )
        entropy = jnp.sum(jnp.where(mask > 0, metrics["student_entropy"], 0.0))
        return jnp.sum(jnp.where(mask > 0, loss, 0.0)) / n, entropy

    (loss, entropy), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        hidden, head
    )
    return {
        "output/loss": loss,
        "output/entropy_sum": entropy,
        "output/n_valid": jnp.sum(mask),
        "grad/student_hidden": gradients[0],
        "grad/student_lm_head": gradients[1],
    }


def self_distillation(case, dtype):
    p = case.params
    student, teacher = arrays(case, dtype, "student_logits", "teacher_logits")
    ids = jnp.asarray(case.inputs["completion_ids"], jnp.int32)[..., None]
    mask = case.inputs.get("completion_mask", np.ones(ids.shape[:-1]))

    def of_ids(x):
        return jnp.take_along_axis(jax.nn.log_softmax(x, axis=-1), ids, axis=-1)[..., 0]

    def loss(x):
        if p["mode"] == "sampled":
            batch = response_batch(mask, dtype, ref_logprobs=of_ids(teacher))
            return distill.sampled_reverse_kl(
                PolicyOutputs(of_ids(x), jnp.zeros_like(of_ids(x))), batch
            )
        return distill.distillation(
            logits_readout(x),
            logits_readout(teacher),
            beta=p["alpha"],
            top_k=p["topk"] if p["mode"] == "topk" else 0,
            tail=bool(p["add_tail"]),
        )

    return {
        "output/per_token_loss": loss(student)[0],
        "grad/student_logits": jax.grad(lambda x: jnp.sum(loss(x)[0]))(student),
    }


def distill_forward_kl_topk(case, dtype):
    logits, sent = arrays(case, dtype, "student_logits", "teacher_topk_log_probs")
    ids = jnp.asarray(case.inputs["teacher_topk_ids"], jnp.int32)

    def loss(x):
        return distill.forward_kl_of_sent_entries(
            logits_readout(x),
            sent[None],
            ids[None],
            log_prob_min=case.params.get("log_prob_min_clamp"),
        )

    value, metrics = loss(logits)
    return {
        "output/distillation_losses": value,
        "output/student_mass": metrics["student_mass"],
        "output/teacher_mass": metrics["teacher_mass"],
        "output/overlap_count": metrics["overlap"],
        "output/overlap_token_advantage": metrics["overlap_advantage"],
        "grad/student_logits": jax.grad(lambda x: jnp.sum(loss(x)[0]))(logits),
    }


CHECKS = {
    "trl/gkd_generalized_jsd": gkd_generalized_jsd,
    "trl/distillation_chunked": distillation_chunked,
    "trl/self_distillation": self_distillation,
    "verl/distill_forward_kl_topk": distill_forward_kl_topk,
}
