"""Draws one token per row from logits, with its log-prob.

Every rule is a runtime array and causes no compile.

Axes: B rows, V vocabulary entries, E stop ids, M tokens with a bias, W = ceil(V / 32) words of
32 bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from rljax.kernels.logprob.invariant import chosen_logprobs
from rljax.mesh import highest_of_runs

# Tokens of a block and of a group of the inverse CDF; the lanes of a TPU, and whole blocks.
BLOCK, GROUP = 128, 4096
_ONE = 0x3F800000  # the bits of float32 1.0
LARGEST = 1024  # weights of a row that are looked at first for top_k and top_p


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of each row. bias_ids, bias and allowed are None where no row of a
    program needs them."""

    temperature: jax.Array  # [B] float32; 0 = greedy
    top_k: jax.Array  # [B] int32; 0 = off
    top_p: jax.Array  # [B] float32; 1 = off
    min_p: jax.Array  # [B] float32; 0 = off
    stop_ids: jax.Array  # [B, E] int32; -1 matches none
    bias_ids: jax.Array | None = None  # [B, M] int32; V = unused
    bias: jax.Array | None = None  # [B, M] float32
    allowed: jax.Array | None = None  # [B, W] uint32: bit v % 32 of entry v // 32 allows token v
    # Log-probs are the model's own, those of temperature 1, at every temperature of the draw.
    raw_logprobs: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """One token per row: [B] each."""

    ids: jax.Array
    # log softmax(logits / temperature)[id], over the full vocabulary; with Rules.raw_logprobs log
    # softmax(logits)[id].
    logp: jax.Array
    log_kept: jax.Array  # logp minus the log-prob with which id was drawn; 0 without a rule
    entropy: jax.Array  # of softmax(logits / temperature), nats
    finite: jax.Array  # bool: whether the logits were finite


def _inverse_cdf(probs: jax.Array, u: jax.Array) -> jax.Array:
    """Draws a token from probs [B, V], which need not sum to 1, by the uniforms u [B, 3] in [0, 1).

    Three levels: a group, a block of the group, and a token of the block, each drawn by a uniform
    of its own at the place where the running sum of its level passes it. That is three uniforms a
    row instead of V Gumbels, and far cheaper than one running sum over V. By one uniform for all
    levels, the rounding of the logits would move the border of each of V tokens; so it moves those
    of one block, and a token of probability 1e-9 is still drawn at its rate.
    """
    size = min(GROUP, probs.shape[1] + -probs.shape[1] % BLOCK)
    probs = jnp.pad(probs, ((0, 0), (0, max(0, size - probs.shape[1]))))
    rows, vocab = probs.shape
    # One sum for each slice: a TPU's compiler makes one sum over a reshaped array far slower.
    starts = range(0, vocab, size)
    group = _passed(
        jnp.stack([jnp.sum(probs[:, i : i + size], axis=-1) for i in starts], 1), u[:, 0]
    )
    # The last group may be short: its window begins in the group before, whose mass is left out.
    start = jnp.minimum(group * size, vocab - size)
    window = jax.vmap(lambda row, begin: jax.lax.dynamic_slice(row, (begin,), (size,)))(
        probs, start
    )
    in_group = start[:, None] + jnp.arange(size)[None, :] >= group[:, None] * size
    blocks = jnp.where(in_group, window, 0.0).reshape(rows, -1, BLOCK)
    block = _passed(jnp.sum(blocks, axis=-1), u[:, 1])
    tokens = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return start + block * BLOCK + _passed(tokens, u[:, 2])


def _passed(masses: jax.Array, share: jax.Array) -> jax.Array:
    """Returns the index [B] of the first of masses [B, N] at which their running sum exceeds a
    share [B] of their total."""
    index = jnp.arange(masses.shape[1])[None, :]
    sums = jnp.cumsum(masses, axis=-1)
    # Rounding may push the target past all of them: stay on the last one that has mass.
    last_index = jnp.max(jnp.where(masses > 0, index, 0), axis=-1)
    target = share * jnp.sum(masses, axis=-1)
    return jnp.minimum(jnp.sum(sums <= target[:, None], axis=-1), last_index)


def _edge(weights: jax.Array, predicate) -> jax.Array:
    """Returns the largest threshold t [B] for which predicate(weights >= t) [B] is true, of weights
    [B, N] in 0..1. The predicate must be true at t = 0, and once it is false it stays so for larger
    t.

    Floats above 0 are ordered as their bits are, so 30 halvings find t exactly: no sort, no gather,
    and the vocabulary may be split over devices.
    """
    rows = weights.shape[0]
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        satisfied = predicate(bits >= middle[:, None])
        return jnp.where(satisfied, middle, low), jnp.where(satisfied, high, middle)

    low = jnp.zeros((rows,), jnp.int32)
    edge, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full((rows,), _ONE + 1, jnp.int32)))
    return jax.lax.bitcast_convert_type(edge, jnp.float32)


def _edges(weights: jax.Array, mass: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Returns two thresholds [B], at or above which weights are kept: by top_k alone, and by top_k
    and then top_p; 0 keeps all. `weights` [B, N] are all weights of each row, or the largest of
    them, and `mass` [B] is the sum of all."""
    by_count, by_mass = rules.top_k > 0, rules.top_p < 1

    def of_count():
        edge = _edge(weights, lambda mask: jnp.sum(mask, axis=-1) >= rules.top_k)
        return jnp.where(by_count, edge, 0.0)

    def of_mass(edge):
        remaining = jnp.where(weights >= edge[:, None], weights, 0.0)
        target_mass = rules.top_p * jnp.where(by_count, jnp.sum(remaining, axis=-1), mass)

        def enough(mask):
            return jnp.sum(jnp.where(mask, remaining, 0.0), axis=-1) >= target_mass

        return jnp.where(by_mass, jnp.maximum(_edge(remaining, enough), edge), edge)

    zeros = jnp.zeros_like(mass)
    any_count, any_mass = (highest_of_runs(jnp.any(x)) for x in (by_count, by_mass))
    count_edge = jax.lax.cond(any_count, of_count, lambda: zeros)
    return count_edge, jax.lax.cond(any_mass, of_mass, lambda edge: edge, count_edge)


def _edges_by_largest(weights: jax.Array, mass: jax.Array, rules: Rules) -> jax.Array:
    """Returns the second threshold of `_edges` [B]. Where it is above the least of a row's LARGEST
    weights, all tokens that it keeps are among these, and they alone are searched; the other rows
    are searched in full."""
    # XLA finds the largest without a sort of the row only where nothing reads a part of them.
    largest = jax.lax.optimization_barrier(jax.lax.top_k(weights, LARGEST)[0])
    count_edge, edge = _edges(largest, mass, rules)
    resolved = (count_edge > largest[:, -1]) | (rules.top_k <= 0)
    resolved &= (edge > largest[:, -1]) | ~_is_cut(rules)

    def whole():
        return jnp.where(resolved, edge, _edges(weights, mass, rules)[1])

    return jax.lax.cond(highest_of_runs(jnp.any(~resolved)), whole, lambda: edge)


def _truncate(weights: jax.Array, rules: Rules) -> jax.Array:
    """Keeps the top_k most likely tokens; of these the smallest set with top_p of their mass; and
    of these the tokens of at least min_p times the top probability. Ties at an edge stay. The
    largest weight is 1."""
    mass = jnp.sum(weights, axis=-1)
    find_edge = full_edge = lambda *arguments: _edges(*arguments)[1]
    if weights.shape[-1] > 2 * LARGEST:  # a CPU finds these far faster than it reads rows 31 times

        def find_edge(*arguments):
            return jax.lax.platform_dependent(*arguments, cpu=_edges_by_largest, default=full_edge)

    def nothing(*_):
        return jnp.zeros_like(mass)

    any_cut = highest_of_runs(jnp.any(_is_cut(rules)))
    edge = jax.lax.cond(any_cut, find_edge, nothing, weights, mass, rules)
    # (The largest weight may be slightly below 1 by rounding, and min_p = 1 must keep it.)
    min_weight = rules.min_p * jnp.max(weights, axis=-1)
    return jnp.where(weights >= jnp.maximum(edge, min_weight)[:, None], weights, 0.0)


def _is_cut(rules: Rules) -> jax.Array:
    """Returns whether top_k or top_p ask for the largest weights of each row: [B] bool."""
    return (rules.top_k > 0) | (rules.top_p < 1)


def _with_bias(logits: jax.Array, rules: Rules) -> jax.Array:
    """logits + bias, and -inf where a token is not allowed."""
    vocab = logits.shape[-1]
    if rules.bias is not None:
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = logits.at[rows, rules.bias_ids].add(rules.bias, mode="drop")
    if rules.allowed is not None:
        bits = rules.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
        allowed = (bits & 1).reshape(logits.shape[0], -1)[:, :vocab] > 0
        logits = jnp.where(allowed, logits, -jnp.inf)
    return logits


def choice_logprobs(logits: jax.Array, rules: Rules) -> jax.Array:
    """Returns log softmax((logits + bias) / temperature) [B, V] of logits [B, V], -inf where a
    token is not allowed. Temperature 0 reads as 1; top-k, top-p and min-p cut nothing."""
    temperature = jnp.where(rules.temperature <= 0, 1.0, rules.temperature)[:, None]
    return jax.nn.log_softmax(_with_bias(logits, rules) / temperature, axis=-1)


def mode_of(rules: Rules) -> jax.Array:
    """Returns the most general draw that any row of rules [B] asks for, an int32 scalar: 0
    = the softmax alone, 1 = some row is greedy, 2 = some row is ruled. A program does no
    more than that."""
    greedy = jnp.any(rules.temperature <= 0).astype(jnp.int32)
    return highest_of_runs(jnp.where(jnp.any(_is_ruled(rules)), 2, greedy))


def _is_ruled(rules: Rules) -> jax.Array:
    """Returns whether each row's draw is not from the plain softmax: [B] bool. (A greedy draw
    counts as one from it.)"""
    ruled = _is_cut(rules) | (rules.min_p > 0)
    if rules.bias is not None:
        ruled |= jnp.any(rules.bias != 0, axis=1)
    if rules.allowed is not None:
        ruled |= jnp.any(rules.allowed != jnp.uint32(0xFFFFFFFF), axis=1)
    return ruled


def sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    rules: Rules,
    mode=None,
    batch_invariant: bool = False,
) -> Drawn:
    """Draws one token per row. The draw is a function of (key of the request, position)
    alone, whose uniforms are those of fold_in(key, position). Temperature 0 is greedy; its log-prob
    is reported at temperature 1.

    Args:
      logits: [B, V] float32.
      keys: [B, 2] uint32, of the requests.
      positions: [B] int32, of the tokens that are drawn.
      rules: sampling options of the rows.
      mode: mode_of(rules), where it is known.
      batch_invariant: the log-probs are those of a trainer that is (rljax.models.invariant).

    Returns ids, log-probs and entropies in nats, [B] each.
    """
    greedy = rules.temperature <= 0
    temperature = jnp.where(greedy, 1.0, rules.temperature)[:, None]
    scaled = logits / temperature
    top = jnp.max(scaled, axis=-1, keepdims=True)
    exp_scaled = jnp.exp(scaled - top)
    total = jnp.sum(exp_scaled, axis=-1)
    lse = jnp.log(total) + top[:, 0]
    weighted = jnp.sum(jnp.where(exp_scaled > 0, exp_scaled * scaled, 0.0), axis=-1)
    u = jax.vmap(functools.partial(_uniforms, vocab=logits.shape[-1]))(keys, positions)

    def at(x, ids):
        return jnp.take_along_axis(x, ids[:, None], axis=-1)[:, 0]

    # Each mode returns the tokens, and logp minus the log-prob with which each was drawn.
    def softmax(rules):
        return _inverse_cdf(exp_scaled, u), jnp.zeros_like(lse)

    def greedy_too(rules):
        likeliest = _first_of(scaled, top)
        return jnp.where(greedy, likeliest, _inverse_cdf(exp_scaled, u)), jnp.zeros_like(lse)

    def ruled(rules):
        shaped = _with_bias(logits, rules) / temperature
        peak = jnp.max(shaped, axis=-1, keepdims=True)
        weights = _truncate(jnp.exp(shaped - peak), rules)
        lse_kept = jnp.log(jnp.sum(weights, axis=-1)) + peak[:, 0]
        ids = jnp.where(greedy, _first_of(shaped, peak), _inverse_cdf(weights, u))
        # log p - log q = (z - lse) - (z + gain - lse_kept)
        log_kept = lse_kept - lse - at(shaped - scaled, ids)
        return ids, jnp.where(_is_ruled(rules), log_kept, 0.0)

    mode = mode_of(rules) if mode is None else mode
    ids, log_kept = jax.lax.switch(mode, (softmax, greedy_too, ruled), rules)
    ids = ids.astype(jnp.int32)
    logp = at(scaled, ids) - lse
    if rules.raw_logprobs:
        raw = at(logits, ids) - jax.nn.logsumexp(logits, axis=-1)
        log_kept += raw - logp
        logp, temperature = raw, jnp.ones_like(temperature)
    if batch_invariant:
        logp = chosen_logprobs(logits, ids, temperature[:, 0])
    log_kept = jnp.where(greedy, logp, log_kept)  # the log-prob of a greedy choice is 0
    return Drawn(ids, logp, log_kept, lse - weighted / total, jnp.isfinite(lse))


def _first_of(x: jax.Array, top: jax.Array) -> jax.Array:
    """argmax of x [B, V], whose maxima top [B, 1] are known: five times as fast on CPU."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(x == top, index, x.shape[1] - 1), axis=-1)


def _uniforms(key: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Returns the uniforms [3] of a token: of its group, its block, and itself."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    token = jax.random.uniform(key, (1,))
    # The token of a small vocabulary, which is one block, is drawn by the last one alone.
    outer = jax.random.uniform(jax.random.fold_in(key, 1), (2,)) if vocab > BLOCK else jnp.zeros(2)
    return jnp.concatenate([outer, token])
