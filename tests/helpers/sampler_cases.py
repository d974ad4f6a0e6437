"""A tiny model, requests for it, and slow references in numpy, for the tests of the sampler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import batch_from_rows
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.config import DeltaConfig, LayerKind
from rljax.models.model import Model
from rljax.sampler import Sampling

VOCAB, EOS, LONGEST, NEW = 29, 1, 11, 12
ROOM = LONGEST + NEW  # the longest prompt and response fill a slot exactly


def tiny(window: int = 0, **changes) -> Model:
    """Two layers, the first with a sliding window where one is asked for."""
    config = decoder(
        VOCAB, layers=2, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.5
    )
    if window:
        config = dataclasses.replace(config, kinds=(LayerKind(window=window), LayerKind()))
    config = dataclasses.replace(config, **changes)
    return Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))


def shallow(**changes) -> Model:
    """The same of one layer, for what is not of its layers: decoding unrolls them."""
    return tiny(**dict(layers=1, kinds=()) | changes)


@functools.cache
def weights(model: Model, seed: int = 3):
    return model.init(jax.random.key(seed))


def ring(window: int) -> Model:
    """The same of one layer with a sliding window."""
    return shallow(kinds=(LayerKind(window=window),))


def recurrent(**changes) -> Model:
    """Two layers, the first a gated delta net, as in Qwen3.5."""
    nets = dict(kinds=(LayerKind(rope=None, recurrent=True), LayerKind()))
    nets |= dict(delta=DeltaConfig(2, 4, 8, 6), attention_gate=True, family="qwen3_5_text")
    return tiny(**nets | dict(init_std=0.3) | changes)


def convolving(**changes) -> Model:
    """Two layers, the first a short convolution, as in LFM2."""
    convolutions = dict(kinds=(LayerKind(rope=None, recurrent=True), LayerKind()))
    convolutions |= dict(short_conv=4, family="lfm2")
    return tiny(**convolutions | dict(init_std=0.3) | changes)


def rounding(model: Model) -> float:
    """How far two ways of reading may differ in a log-prob. Recurrent layers sum in chunks, whose
    sizes differ, and divide keys and queries by their length."""
    return 2e-4 if model.config.recurrent else 2e-5


def drawn(model: Model, spread: float = 0.3):
    """Weights that numpy draws: no program has to be compiled for them."""
    rng = np.random.default_rng(0)

    def draw(x):
        values = spread * rng.standard_normal(x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(draw, model.abstract())


def prompts(count: int = 8, longest: int = LONGEST, seed: int = 0, vocab: int = VOCAB):
    """Right-padded prompts [P, L] of every length, 1 and L among them, and their lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[1, longest], rng.integers(1, longest + 1, count - 2)])
    tokens = rng.integers(2, vocab, (count, longest))
    return np.where(np.arange(longest) < lengths[:, None], tokens, 0).astype(np.int32), lengths


def assert_same(sample, row, starts):
    """A sample of the host loop is row `sample.id` of what the device loop returned."""
    at = sample.id
    end = int((row.segment_ids[at] > 0).sum())
    where = slice(starts[at], end)
    assert sample.tokens.tolist() == row.tokens[at, where].tolist(), at
    assert sample.chosen.tolist() == (row.mask[at, where] > 0).tolist(), at
    assert sample.finish_reason == row.finish_reason[at], at
    for ours, theirs in (
        ("logprobs", "sampler_logprobs"),
        ("log_kept", "sampler_log_kept"),
        ("entropy", "entropy"),
    ):
        np.testing.assert_allclose(
            getattr(sample, ours), getattr(row, theirs)[at, where], atol=1e-5, err_msg=f"{at}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, lengths):
    return model.logits(params, batch_from_rows(tokens, lengths, jnp.ones(tokens.shape)))


def forward(model: Model, params, rows, width: int = ROOM) -> list[np.ndarray]:
    """The full forward's logits of the token behind each token of each row: [tokens, V] float64."""
    tokens, lengths = np.zeros((len(rows), width), np.int32), np.array([len(r) for r in rows])
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    out = np.asarray(_logits(model, params, tokens, lengths), np.float64)
    return [out[i, :n] for i, n in enumerate(lengths)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kept_by_sorting(logits: np.ndarray, asked: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities [V] of the draw, log-probs [V] at the temperature without the rules)."""
    warmth = asked.temperature or 1.0
    shaped = logits.copy()
    for token, bias in asked.logit_bias:
        shaped[token] += bias
    if asked.allowed_ids:
        shaped[[w for w in range(len(logits)) if w not in asked.allowed_ids]] = -np.inf
    if asked.temperature == 0:
        return np.eye(len(logits))[np.argmax(shaped)], log_softmax(logits)
    probs = np.exp(log_softmax(shaped / warmth))
    order = np.argsort(-probs, kind="stable")[: asked.top_k or len(probs)]
    mass = probs[order] / probs[order].sum()
    order = order[(np.cumsum(mass) - mass) < asked.top_p]
    order = order[probs[order] >= asked.min_p * probs.max()]
    kept = np.zeros_like(probs)
    kept[order] = probs[order]
    return kept / kept.sum(), log_softmax(logits / warmth)


@jax.jit
def uniforms(key, places):
    """What a request of this key [2] draws at places [N]."""

    def one(i):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), i))

    return jax.vmap(one)(places)


def could_draw(probs: np.ndarray, u: float, slack: float = 1e-5) -> set[int]:
    """The tokens at which the running sum of probs passes u; two where it is within rounding."""
    return {int(np.searchsorted(np.cumsum(probs), x, side="right")) for x in (u - slack, u + slack)}
