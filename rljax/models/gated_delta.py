"""Gated delta net (arXiv 2412.06464): the layers of Qwen3-Next and Qwen3.5 that remember a state.

Each head keeps a matrix S [K, V], and token t changes and reads it:

    S <- exp(g_t) S;  S <- S + k_t (b_t (v_t - S^T k_t))^T;  output_t = S^T q_t

with g_t <= 0 and b_t in 0..1. Before that a causal convolution over a few tokens mixes each channel
of queries, keys and values. A call of one token is a step of this recurrence. Rows of tokens are
read in chunks (arXiv 2406.06484): the state goes from chunk to chunk, and within one the changes
that tokens make are the solution of a triangular system.

Runs: the tokens of a sequence in a call have the same number, which rises along a row. Run 0 goes
on behind the state that a call begins with; every other run begins with zeros. Tokens that are not
`taken` (padding, or what is read later) change no state, and give outputs of no meaning.

Axes: B rows, S tokens, H heads, C tokens of a chunk, N chunks, K and V sizes of a key and a value.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.errors import InputError
from rljax.models.config import DeltaConfig, ModelConfig
from rljax.models.layers import Linear, RMSNorm, weight

CHUNK = 64  # tokens
_LARGEST_DECAY = 16.0  # of a new head, in nats for a step of softplus 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """State of a layer after the tokens that each slot has read, of one size whatever their
    number."""

    memory: jax.Array | None  # [B, H, K, V] float32; None: of a convolution alone
    # What the convolutions of q, k, v, or the one convolution, read last: [B, taps - 1, ...].
    recent: tuple[jax.Array, ...]

    # As rljax.models.cache.Cache says them: there are no columns, no window, and no pages.
    order, window, pool, columns, is_ring = "state", 0, None, 0, False


def empty_state(delta: DeltaConfig, rows: int, dtype) -> State:
    """Returns the state of so many rows that have read nothing, in a model that computes in
    `dtype`."""
    sizes = [(delta.key_heads, delta.key_dim)] * 2 + [(delta.value_heads, delta.value_dim)]
    memory = (rows, delta.value_heads, delta.key_dim, delta.value_dim)
    recent = tuple(jnp.zeros((rows, delta.taps - 1, *size), dtype) for size in sizes)
    return State(jnp.zeros(memory, jnp.float32), recent)


def runs_of(segments: jax.Array, continued: jax.Array) -> jax.Array:
    """Returns the run of each token [B, S] int32, where segments [B, S] name sequences and 0 is
    padding, which belongs to the run before it. continued [B] bool: the first segment goes on
    behind the state that the call begins with."""
    real, column = segments > 0, jnp.arange(segments.shape[1])[None, :]
    newest_real = jax.lax.cummax(jnp.where(real, column, -1), axis=1)
    before = jnp.pad(newest_real[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    segment_before = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1)
    is_same = jnp.where(before >= 0, segments == segment_before, continued[:, None])
    return jnp.cumsum((real & ~is_same).astype(jnp.int32), axis=1)


def convolved(x: jax.Array, taps: jax.Array, recent: jax.Array, runs: jax.Array) -> jax.Array:
    """Returns the sum over i of taps[i] * (x of taps - 1 - i tokens before), of each channel, in
    float32: x [B, S, *channels], taps [taps, *channels], runs [B, S], recent [B, taps - 1,
    *channels] the inputs before those of run 0."""
    count = taps.shape[0]
    inputs = jnp.concatenate([recent.astype(x.dtype), x], axis=1).astype(jnp.float32)
    run_of_input = jnp.pad(runs, ((0, 0), (count - 1, 0)))
    total = 0.0
    for i in range(count):
        back = slice(i, i + x.shape[1])
        own = _over_channels(run_of_input[:, back] == runs, x)
        total += jnp.where(own, inputs[:, back], 0.0) * taps[i][None, None].astype(jnp.float32)
    return total


def latest(x: jax.Array, recent: jax.Array, runs: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the newest inputs of a convolution, [B, taps - 1, *channels], behind the first counts
    [B] tokens of x [B, S, *channels], all of one run; those of a call with none are `recent`."""
    goes_on = _over_channels(runs[:, -1:] == 0, x)
    inputs = jnp.concatenate([jnp.where(goes_on, recent, 0).astype(x.dtype), x], axis=1)
    index = counts[:, None] + jnp.arange(recent.shape[1])[None, :]
    return jnp.take_along_axis(inputs, _over_channels(index, x), axis=1)


def _over_channels(of_tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `of_tokens` [B, S] with as many axes as x [B, S, *channels], those added of size
    1."""
    return jnp.expand_dims(of_tokens, tuple(range(2, x.ndim)))


def check_no_shared_prompts(prefix) -> None:
    """Raises InputError for packed rows that share prompts (Pass.prefix)."""
    if prefix is not None:
        raise InputError(
            "a recurrent model cannot read rows whose prompts are shared",
            value="packed rows",
            rule="they are shared where the policy has no recurrent layer",
            fix="--config.batch.packing=False, or take models of one kind for all roles",
        )


def _unit(x: jax.Array) -> jax.Array:
    """Returns x / |x| over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def inverse_of_unit_lower(x: jax.Array) -> jax.Array:
    """Returns (I + the entries of x below the diagonal)^-1 of matrices [..., C, C], C a power of 2.

    Blocks on the diagonal are inverted in pairs, from single entries up to the whole matrix. (XLA's
    own solver calls LAPACK on CPU, where two of its calls in one program can wait for each other's
    threads for ever.)
    """
    size, leading = x.shape[-1], x.shape[:-2]
    inverse, block = jnp.ones((*leading, size, 1, 1), x.dtype), 1
    while block < size:
        pairs = size // (2 * block)
        parts = x.reshape(*leading, pairs, 2, block, pairs, 2, block)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(parts, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -jnp.einsum("...ij,...jk,...kl->...il", second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse.reshape(x.shape)


def delta_rule(q, k, v, decay, rate, runs, memory, *, chunk: int = CHUNK):
    """Reads tokens into states.

    Args:
      q, k: [B, S, H, K], of any length: they are brought to length 1, and q is divided by sqrt(K).
      v: [B, S, H, V].
      decay: g [B, S, H], 0 at tokens that are not taken.
      rate: b [B, S, H], 0 at tokens that are not taken.
      runs: [B, S] int32.
      memory: [B, H, K, V], the states behind which run 0 goes on.
      chunk: C, of which the results differ by rounding alone.

    Returns the outputs [B, S, H, V] and the states of each row's last run [B, H, K, V], computed in
    float32 or wider.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v, decay, rate, memory = (x.astype(dtype) for x in (q, k, v, decay, rate, memory))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    if q.shape[1] == 1:
        return _step(q, k, v, decay, rate, runs, memory)
    tokens = q.shape[1]
    size = min(chunk, 1 << (tokens - 1).bit_length())
    room = -tokens % size

    def chunks(x, mode="constant"):
        """Returns x [B, S, ...] as [N, B, C, ...]."""
        x = jnp.pad(x, ((0, 0), (0, room), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def by_head(x):
        """Returns x [N, B, C, H, ...] as [N, B, H, C, ...]."""
        return x.swapaxes(2, 3)

    runs = chunks(runs, "edge")
    q, k, v, decay, rate = (by_head(chunks(x)) for x in (q, k, v, decay, rate))
    total = jnp.cumsum(decay, axis=-1)  # from the chunk's first token on
    # The run that the state before each chunk is of.
    run_before = jnp.pad(runs[:-1, :, -1], ((1, 0), (0, 0)))
    carried = (runs == run_before[:, :, None])[:, :, None]  # [N, B, 1, C]
    causal = jnp.tri(size, dtype=bool)[None, None]
    same_run = (runs[:, :, :, None] == runs[:, :, None, :]) & causal
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(same_run[:, :, None], between, -jnp.inf))
    from_start = jnp.where(carried, jnp.exp(total), 0.0)[..., None]
    to_end = jnp.where(runs == runs[:, :, -1:], 0.0, -jnp.inf)[:, :, None]
    to_end = jnp.exp(total[..., -1:] - total + to_end)[..., None]
    # What each token writes: v_new = b (v - S^T k), where S has what those before it wrote.
    system = jnp.einsum("nbhik,nbhjk->nbhij", rate[..., None] * k, k) * between
    sides = jnp.concatenate([v, k * from_start], axis=-1) * rate[..., None]
    solved = jnp.einsum("nbhij,nbhjv->nbhiv", inverse_of_unit_lower(system), sides)
    written, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = jnp.einsum("nbhik,nbhjk->nbhij", q, k) * between

    def one(memory, of_chunk):
        q, k, written, read, scores, kept = of_chunk
        new = written - jnp.einsum("bhck,bhkv->bhcv", read, memory)
        output = jnp.einsum("bhck,bhkv->bhcv", q, memory)
        output += jnp.einsum("bhcd,bhdv->bhcv", scores, new)
        memory = kept * memory + jnp.einsum("bhck,bhcv->bhkv", k, new)
        return memory, output

    of_chunks = (q * from_start, k * to_end, written, read, scores, from_start[..., -1:, :])
    memory, outputs = jax.lax.scan(one, memory, of_chunks)
    outputs = by_head(outputs).swapaxes(0, 1)  # [B, N, C, H, V]
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :tokens], memory


def _step(q, k, v, decay, rate, runs, memory):
    """Reads one token of each row, as the recurrence is written above."""
    q, k, v, decay, rate = (x[:, 0] for x in (q, k, v, decay, rate))
    goes_on = (runs == 0)[:, :, None, None]
    memory = jnp.where(goes_on, memory * jnp.exp(decay)[..., None, None], 0.0)
    written = rate[..., None] * (v - jnp.sum(memory * k[..., None], axis=2))
    memory = memory + k[..., None] * written[:, :, None, :]
    return jnp.sum(memory * q[..., None], axis=2)[:, None], memory


class Convolution(nnx.Module):
    """The taps of a causal convolution of each channel [taps, *channels], with the logical axes of
    these."""

    def __init__(self, rngs, config: ModelConfig, taps: int, channels, axes):
        self.weight = weight(rngs, config, (taps, *channels), ("taps", *axes))


class GatedDeltaNet(nnx.Module):
    """Projections, convolutions and the gated delta rule; the outputs of each head are normed, and
    multiplied by silu(z)."""

    def __init__(self, rngs, config: ModelConfig):
        d, delta = config.embed, config.delta
        keys, values = (delta.key_heads, delta.key_dim), (delta.value_heads, delta.value_dim)
        if delta.joined:
            shared = delta.value_heads // delta.key_heads
            of_head = 2 * (delta.key_dim + shared * delta.value_dim)
            axes = ("embed", "key_heads", "head_dim")
            self.qkvz = Linear(rngs, config, (d,), (delta.key_heads, of_head), axes)
            self.ba = Linear(rngs, config, (d,), (delta.key_heads, 2 * shared), axes)
        else:
            of_keys, of_values = ("embed", "key_heads", "head_dim"), ("embed", "value_heads")
            self.q = Linear(rngs, config, (d,), keys, of_keys)
            self.k = Linear(rngs, config, (d,), keys, of_keys)
            self.v = Linear(rngs, config, (d,), values, (*of_values, "head_dim"))
            self.z = Linear(rngs, config, (d,), values, (*of_values, "head_dim"))
            self.b = Linear(rngs, config, (d,), values[:1], of_values)
            self.a = Linear(rngs, config, (d,), values[:1], of_values)
        self.q_conv = Convolution(rngs, config, delta.taps, keys, ("key_heads", "head_dim"))
        self.k_conv = Convolution(rngs, config, delta.taps, keys, ("key_heads", "head_dim"))
        self.v_conv = Convolution(rngs, config, delta.taps, values, ("value_heads", "head_dim"))
        uniform = jax.random.uniform(rngs.params(), values[:1], minval=0.01, maxval=_LARGEST_DECAY)
        log_decay = jnp.log(uniform).astype(config.weight_dtype)
        self.log_decay = nnx.Param(log_decay, axes=("value_heads",))
        self.step_bias = weight(rngs, config, values[:1], ("value_heads",), init="ones")
        plain = dataclasses.replace(config, norm_offset=0.0)
        self.norm = RMSNorm(rngs, plain, delta.value_dim, "head_dim")
        output_axes = ("value_heads", "head_dim", "embed")
        self.o = Linear(rngs, config, values, (d,), output_axes)
        self.delta, self.stretches = delta, False

    def project(self, x, *angles):
        """Returns queries and keys [B, S, Hk, K], values and gates z [B, S, Hv, V], and b and a [B,
        S, Hv] of x [B, S, D]."""
        if not self.delta.joined:
            return tuple(part(x) for part in (self.q, self.k, self.v, self.z, self.b, self.a))
        delta, rows = self.delta, x.shape[:2]
        q, k, v, z = _parts(self.qkvz(x), delta)
        b, a = jnp.split(self.ba(x), 2, axis=-1)
        values = (*rows, delta.value_heads, delta.value_dim)
        v, z = v.reshape(values), z.reshape(values)
        return q, k, v, z, b.reshape(values[:3]), a.reshape(values[:3])

    def attend(self, projected, call, state: State | None = None):
        """Returns the outputs of the heads [B, S, Hv, V], and the new state. `state`: None is that
        of no tokens. Raises InputError for packed rows that share prompts."""
        check_no_shared_prompts(call.prefix)
        *qkv, z, b, a = projected
        shared = self.delta.value_heads // self.delta.key_heads
        if state is None:
            state = empty_state(self.delta, z.shape[0], z.dtype)
        taken, runs = call.taken, call.runs
        counts = jnp.sum(taken, axis=1)
        taps = [conv.weight[...] for conv in (self.q_conv, self.k_conv, self.v_conv)]
        recent = tuple(
            latest(x, old, runs, counts) for x, old in zip(qkv, state.recent, strict=True)
        )
        q, k, v = (
            jax.nn.silu(convolved(x, tap, old, runs).astype(x.dtype))
            for x, tap, old in zip(qkv, taps, state.recent, strict=True)
        )
        q, k = (jnp.repeat(x, shared, axis=2) for x in (q, k))
        step_bias, log_decay = (
            x[...].astype(jnp.float32)[None, None, :] for x in (self.step_bias, self.log_decay)
        )
        decay = -jnp.exp(log_decay) * jax.nn.softplus(a.astype(jnp.float32) + step_bias)
        rate = jax.nn.sigmoid(b)
        decay, rate = (jnp.where(taken[:, :, None], x, 0) for x in (decay, rate))
        output, memory = delta_rule(q, k, v, decay, rate, runs, state.memory)
        output = self.norm(output.astype(z.dtype)).astype(jnp.float32)
        output = (output * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
        return output, State(memory.astype(state.memory.dtype), recent)


def _parts(joined: jax.Array, delta: DeltaConfig) -> list[jax.Array]:
    """Splits what the map of Qwen3-Next gives, [B, S, Hk, 2 K + 2 R V], into q, k [B, S, Hk, K] and
    v, z [B, S, Hk, R V], of R values to a key."""
    of_values = delta.value_heads // delta.key_heads * delta.value_dim
    ends = (delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + of_values)
    return jnp.split(joined, ends, axis=-1)
