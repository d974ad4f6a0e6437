"""The smallest model that reads packed rows by the rule of rljax.batch: compiles at once."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch


def visible(batch: Batch) -> jax.Array:
    """Which columns a token sees, itself among them: [B, S, S], from the words of the rule."""
    s = batch.tokens.shape[1]
    near = jnp.arange(s)[:, None] >= jnp.arange(s)[None]
    seen = near[None] & (batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :])
    if batch.prefix_ids is not None:
        size = s // batch.prefix_blocks.shape[1]
        block = jnp.arange(s) // size
        seen &= (block[:, None] == block[None])[None]
        reach = batch.prefix_blocks[:, block]  # the block of the prefix of each token
        there = (reach[:, :, None] == block[None, None]) & (batch.prefix_ids > 0)[:, :, None]
        seen |= there & (batch.prefix_ids[:, :, None] == batch.segment_ids[:, None, :])
    return seen & (batch.segment_ids > 0)[:, None, :]


class Reader:
    """Hidden states are sums over what a token sees; log-probs, entropies, values and scores of
    them."""

    def params(self, vocab: int, dtype=jnp.float64, width: int = 5):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape), dtype)

        return {"embed": draw(vocab, width), "head": draw(width, vocab), "scalar": draw(width)}

    def hidden(self, params, batch):
        x = params["embed"][batch.tokens] * jnp.cos(batch.positions * 0.7 + 0.3)[..., None]
        x = jnp.where((batch.segment_ids > 0)[..., None], x, 0)
        return jnp.tanh(jnp.einsum("bst,btd->bsd", visible(batch).astype(x.dtype), x))

    def before(self, params, batch):
        hidden = self.hidden(params, batch)
        if batch.previous is None:
            return jnp.roll(hidden, 1, axis=1)
        return jnp.take_along_axis(hidden, batch.previous[..., None], axis=1)

    def logprobs(self, params, batch, temperature=1.0):
        logits = jax.nn.log_softmax(self.before(params, batch) @ params["head"] / temperature)
        logp = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
        return logp, -jnp.sum(jnp.exp(logits) * logits, axis=-1)

    def values(self, params, batch):
        return self.before(params, batch) @ params["scalar"]

    def token_scores(self, params, batch):
        return self.hidden(params, batch) @ params["scalar"]
