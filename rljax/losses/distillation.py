"""Distillation: divergences of a student's next-token distributions from a teacher's, per token.

The generalised Jensen-Shannon divergence over the whole vocabulary or the top k, straight from
hidden states and heads; the forward KL on the vocabulary entries that a teacher server returned;
the reverse KL of the sampled token, which is a policy loss. Unreduced. No array of all tokens times
the vocabulary is built: tokens are walked in chunks, forward and backward, and the backward pass
computes the logits of a chunk again.

Axes: ... leading (rows), S tokens, D embed (student and teacher may differ), V vocabulary (the
same), K entries returned. Everything is float32 or wider; the teacher gets no gradient.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.kernels.logprob.options import (
    CHUNK_LOGITS,
    LogprobOptions,
    capped,
    head_product,
    raw_logits,
    vocab_size_of,
)
from rljax.losses.policy.common import PolicyOutputs
from rljax.metric import Metric

METRICS = {
    "teacher_gap": Metric(
        "log policy - log teacher at the sampled tokens", "nats per token", "falls to 0"
    ),
    "student_entropy": Metric("entropy of the student", "nats per token", "near the teacher's"),
    "teacher_entropy": Metric("entropy of the teacher", "nats per token"),
    "same_first_word": Metric("tokens at which both have the same first choice", "share", "rises"),
    "student_mass": Metric(
        "student's probability of the entries that the teacher sent", "share", "near teacher_mass"
    ),
    "teacher_mass": Metric(
        "teacher's probability of the entries that it sent", "share", "above 0.9"
    ),
    "top_k_overlap": Metric(
        "share of the top_k likeliest tokens of one that are the other's, too",
        "share",
        "rises; below 0.5 the student rarely hears of the tokens that it would choose",
    ),
    "overlap": Metric("sent entries that are the student's first choices, too", "share", "rises"),
    "overlap_advantage": Metric(
        "how much more likely the teacher finds the shared entries", "nats"
    ),
}

# Log-prob of an entry of probability 0: finite, so that 0 times it is 0, in the gradient too.
_LOG_ZERO = -1e30
# The log of the mass of the k kept entries is held below this: log(1 - mass) stays finite.
_LOG_MASS_MAX = -1e-7


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "head"],
    meta_fields=["logit_scale", "soft_cap", "float32_head", "vocab_first"],
)
@dataclasses.dataclass(frozen=True)
class Readout:
    """Logits not yet built: cap tanh(scale hidden head / cap); soft_cap 0 = none.

    hidden [..., S, D], head [D, V], or an embedding [V, D] with `vocab_first`. `float32_head`: full
    float32 products where the hardware has a faster, coarser one.
    """

    hidden: jax.Array
    head: jax.Array
    logit_scale: float = 1.0
    soft_cap: float = 0.0
    float32_head: bool = True
    vocab_first: bool = False

    @property
    def vocabulary(self) -> int:
        """V, the number of entries of the head."""
        return vocab_size_of(self.head, LogprobOptions(vocab_first=self.vocab_first))

    def at(self, hidden: jax.Array) -> "Readout":
        """Returns the logits of other hidden states [..., S, D]."""
        return dataclasses.replace(self, hidden=hidden)


def _log_softmax(readout: Readout, temperature: float) -> jax.Array:
    """Returns the log-probs of the whole vocabulary at temperature: [..., V]."""
    hidden, head, precision = head_product(readout.hidden, readout.head, readout.float32_head)
    options = LogprobOptions(vocab_first=readout.vocab_first, precision=precision)
    z = capped(raw_logits(hidden, head, options) * readout.logit_scale, readout.soft_cap)
    return jax.nn.log_softmax(z / temperature, axis=-1)


def jsd_terms(student: jax.Array, teacher: jax.Array, *, beta: float) -> jax.Array:
    """Returns the summands of the generalised JSD of two distributions; log-probs [..., V] -> [...,
    V], in nats.

    beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S; beta 0 is KL(T || S), beta 1
    is KL(S || T) (GKD, arXiv 2306.13649). -inf, a probability of 0, is allowed. Raises InputError
    unless 0 <= beta <= 1.
    """
    if not 0.0 <= beta <= 1.0:
        raise InputError(
            "beta of a distillation", value=beta, fix="beta=0.5, or another number from 0 to 1"
        )
    student, teacher = (jnp.maximum(x, _LOG_ZERO) for x in (student, teacher))
    if beta == 0.0:
        return jnp.exp(teacher) * (teacher - student)
    if beta == 1.0:
        return jnp.exp(student) * (student - teacher)
    mixture = jnp.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    from_teacher = jnp.exp(teacher) * (teacher - mixture)
    return beta * from_teacher + (1 - beta) * jnp.exp(student) * (student - mixture)


def _kept(log_probs: jax.Array, entries: jax.Array, tail: bool) -> jax.Array:
    """Returns the distribution over `entries` [..., k], with one more entry for all others or
    renormalised.

    [..., V] -> [..., k + tail]
    """
    selected = jnp.take_along_axis(log_probs, entries, axis=-1)
    mass = jax.nn.logsumexp(selected, axis=-1, keepdims=True)
    if not tail:
        return selected - mass
    other_mass = jnp.log(-jnp.expm1(jnp.minimum(mass, _LOG_MASS_MAX)))
    return jnp.concatenate([selected, other_mass], axis=-1)


def _entropy(log_probs: jax.Array) -> jax.Array:
    log_probs = jnp.maximum(log_probs, _LOG_ZERO)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def _by_chunks(function, arrays: tuple, axis: int, vocabulary: int):
    """Returns function(arrays), where `axis` of all of them, S tokens, is walked in chunks of about
    CHUNK_LOGITS logits; the backward pass computes what is inside again."""
    length, rows = arrays[0].shape[axis], math.prod(arrays[0].shape[:axis])
    # Two models' logits are held at once. Chunks of rows would cut across the devices' shares.
    chunks = max(1, min(-(-2 * rows * length * vocabulary // CHUNK_LOGITS), length))
    padding = -length % chunks

    def split(x):
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[:axis] + (chunks, -1) + x.shape[axis + 1 :]), axis, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(x.shape[:axis] + (-1,))[..., :length]

    recomputed = jax.checkpoint(function, prevent_cse=False)
    _, outputs = jax.lax.scan(
        lambda _, chunk: (None, recomputed(chunk)), None, tuple(map(split, arrays))
    )
    return jax.tree.map(join, outputs)


def _selected(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns x [..., S, N] with zeros at mask 0: garbage there meets no product with the head."""
    return x if mask is None else jnp.where(mask[..., None] > 0, x, 0)


def _check(student: Readout, temperature: float, top_k: int) -> None:
    if not temperature > 0:
        raise InputError(
            "temperature of a distillation",
            value=temperature,
            fix="temperature=1.0, or another number above 0",
        )
    if not 0 <= top_k <= student.vocabulary:
        raise InputError(
            "top_k of a distillation",
            value=top_k,
            rule=f"0 (all) to {student.vocabulary}, the size of the vocabulary",
            fix="top_k=0, or a number of this range, as in dataflow='on_policy_distil(top_k=64)'",
        )


def distillation(
    student: Readout,
    teacher: Readout,
    mask: jax.Array | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int = 0,
    top_k_of: Literal["student", "teacher"] = "student",
    tail: bool = True,
):
    """Generalised JSD of the two next-token distributions, at every token: [..., S].

    GKD, arXiv 2306.13649: `jsd_terms` summed over the vocabulary, or over the `top_k` likeliest of
    `top_k_of` with all others as one entry (`tail`) or left out and the rest renormalised. Both are
    softmax(logits / temperature). Tokens at mask 0 may be garbage. Metrics [..., S]:
    student_entropy, teacher_entropy, same_first_word, and with top_k top_k_overlap, the diagnostic
    of arXiv 2604.13016. Raises InputError for vocabularies of two
    sizes, a temperature that is not above 0, and a top_k above the vocabulary.
    """
    _check(student, temperature, top_k)
    if student.vocabulary != teacher.vocabulary:
        raise InputError(
            "distillation: the two heads",
            value=(student.head.shape, teacher.head.shape),
            rule="the same vocabulary: student and teacher share a tokenizer",
            fix="take a teacher of the student's family, or distil by text: dataflow=sft on its "
            "responses",
        )
    if top_k_of not in ("student", "teacher"):
        raise InputError(
            "top_k_of of a distillation",
            value=top_k_of,
            fix="write student or teacher for top_k_of",
        )
    teacher = jax.lax.stop_gradient(teacher)

    def one(hidden):
        student_chunk, teacher_chunk = student.at(hidden[0]), teacher.at(hidden[1])
        log_s, log_t = (_log_softmax(x, temperature) for x in (student_chunk, teacher_chunk))
        constant_log_s = jax.lax.stop_gradient(log_s)
        metrics = {
            "student_entropy": _entropy(constant_log_s),
            "teacher_entropy": _entropy(log_t),
            "same_first_word": (constant_log_s.argmax(-1) == log_t.argmax(-1)).astype(log_t.dtype),
        }
        if top_k:
            of_student, of_teacher = (jax.lax.top_k(x, top_k)[1] for x in (constant_log_s, log_t))
            both = of_student[..., :, None] == of_teacher[..., None, :]
            metrics["top_k_overlap"] = jnp.sum(both, (-2, -1)).astype(log_t.dtype) / top_k
            entries = of_student if top_k_of == "student" else of_teacher
            log_s, log_t = (_kept(x, entries, tail) for x in (log_s, log_t))
        return jnp.sum(jsd_terms(log_s, log_t, beta=beta), axis=-1), metrics

    hidden = (_selected(student.hidden, mask), _selected(teacher.hidden, mask))
    return _by_chunks(one, hidden, student.hidden.ndim - 2, student.vocabulary)


def forward_kl_of_sent_entries(
    student: Readout,
    teacher_logprobs: jax.Array,
    teacher_ids: jax.Array,
    mask: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    log_prob_min: float | None = None,
):
    """sum over the K entries sent of p_t (log p_t - log p_s), at every token: [..., S].

    teacher_logprobs and teacher_ids are [..., S, K]: what a teacher server returns. Nothing is
    renormalised: a loss may be negative. `log_prob_min` bounds both log-probs from below.
    Metrics [..., S]: student_mass and teacher_mass of those entries; overlap, how many of them are
    among the student's own K likeliest; overlap_advantage, the mean of -p_t (log p_t - log p_s)
    over those (arXiv 2604.13016). Raises InputError for a temperature that is not above 0.
    """
    k = teacher_ids.shape[-1]
    _check(student, temperature, k)
    axis = student.hidden.ndim - 2

    def one(chunk):
        hidden, log_t, ids = chunk
        log_probs = _log_softmax(student.at(hidden), temperature)
        log_s = jnp.maximum(jnp.take_along_axis(log_probs, ids, axis=-1), _LOG_ZERO)
        masses = jnp.sum(jnp.exp(jax.lax.stop_gradient(log_s)), -1), jnp.sum(jnp.exp(log_t), -1)
        if log_prob_min is not None:
            log_s, log_t = (jnp.maximum(x, log_prob_min) for x in (log_s, log_t))
        terms = jnp.exp(log_t) * (log_t - log_s)
        student_top = jax.lax.top_k(jax.lax.stop_gradient(log_probs), k)[1]
        is_shared = jnp.any(ids[..., :, None] == student_top[..., None, :], axis=-1)
        overlap = jnp.sum(is_shared, axis=-1).astype(terms.dtype)
        gain = jax.lax.stop_gradient(jnp.sum(jnp.where(is_shared, -terms, 0.0), axis=-1))
        return jnp.sum(terms, axis=-1), {
            "student_mass": masses[0],
            "teacher_mass": masses[1],
            "overlap": overlap,
            "overlap_advantage": gain / jnp.maximum(overlap, 1),
        }

    sent_logprobs = jnp.maximum(_selected(jax.lax.stop_gradient(teacher_logprobs), mask), _LOG_ZERO)
    arrays = (_selected(student.hidden, mask), sent_logprobs, _selected(teacher_ids, mask))
    return _by_chunks(one, arrays, axis, student.vocabulary)


@contract(reads=("ref_logprobs",))
def sampled_reverse_kl(policy: PolicyOutputs, batch: Batch):
    """log pi (log pi - log teacher) of policy tokens, the second factor constant: [B, S].

    The teacher's log-probs of the batch's tokens are `ref_logprobs`. On tokens that the student
    sampled its mean gradient is that of KL(student || teacher), one token ahead. Metrics:
    teacher_gap. Raises InputError where the batch lacks ref_logprobs.
    """
    batch.require("ref_logprobs", by="sampled_reverse_kl")
    is_policy = batch.mask > 0
    logprobs = jnp.where(is_policy, policy.logprobs, 0.0)
    gap = jax.lax.stop_gradient(logprobs - jnp.where(is_policy, batch.ref_logprobs, 0.0))
    return gap * logprobs, {"teacher_gap": gap}
