"""Short convolutions with two gates: the layers of LFM2 that see a few tokens (arXiv 2511.23404).

Token t of a channel gives c_t sum_i w_i (b x)_(t - taps + 1 + i), where the gates b and c, and x,
are maps of the token. A layer remembers the newest taps - 1 of its inputs b x. Runs and tokens that
are `taken` are those of rljax.models.gated_delta.

Axes: B rows, S tokens, D channels, as many as the model's embed.
"""

import jax.numpy as jnp
from flax import nnx

from rljax.models.config import ModelConfig
from rljax.models.gated_delta import Convolution, State, check_no_shared_prompts, convolved, latest
from rljax.models.layers import Linear


def empty_state(taps: int, channels: int, rows: int, dtype) -> State:
    """Returns the state of so many rows that have read nothing, in a model that computes in
    `dtype`."""
    return State(None, (jnp.zeros((rows, taps - 1, channels), dtype),))


class ShortConvolution(nnx.Module):
    """Projections, a causal convolution of each channel, and its two gates."""

    def __init__(self, rngs, config: ModelConfig):
        d, axes = config.embed, ("embed", "channels")
        self.input_gate = Linear(rngs, config, (d,), (d,), axes)
        self.output_gate = Linear(rngs, config, (d,), (d,), axes)
        self.x = Linear(rngs, config, (d,), (d,), axes)
        self.conv = Convolution(rngs, config, config.short_conv, (d,), ("channels",))
        self.o = Linear(rngs, config, (d,), (d,), ("channels", "embed"))
        self.taps, self.stretches = config.short_conv, False

    def project(self, x, *angles):
        """Returns the inputs of the convolution and the gates of its outputs, [B, S, D] each, of
        x [B, S, D]."""
        return self.input_gate(x) * self.x(x), self.output_gate(x)

    def attend(self, projected, call, state: State | None = None):
        """Returns the gated outputs [B, S, D], and the new state. `state`: None is that of no
        tokens. Raises InputError for packed rows that share prompts."""
        check_no_shared_prompts(call.prefix)
        inputs, gate = projected
        if state is None:
            state = empty_state(self.taps, inputs.shape[-1], inputs.shape[0], inputs.dtype)
        (recent,), counts = state.recent, jnp.sum(call.taken, axis=1)
        output = convolved(inputs, self.conv.weight[...], recent, call.runs).astype(inputs.dtype)
        return gate * output, State(None, (latest(inputs, recent, call.runs, counts),))
