"""Images inside the text decoder: their rotary positions, and their features at their tokens.

The features come from rljax.models.vision.tower, the position ids of a row from
rljax.data.images.rows.

Axes: B rows, S tokens, M features of a row, D embed, E head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import InputError
from rljax.models.vision.config import VisionConfig


def mrope_axes(section: tuple[int, int, int], interleaved: bool) -> np.ndarray:
    """Returns the axis (time, row, column) that each of the E/2 frequencies rotates
    with: [E/2] of 0, 1, 2.

    `section` counts the frequencies of each. In blocks (Qwen2.5-VL): t t t h h h w w w. Interleaved
    (Qwen3-VL): t h w t h w ..., and the rest t. Raises InputError unless these are three numbers of
    0 or more, and if interleaved ones reach beyond the last frequency.
    """
    if len(section) != 3 or min(section) < 0:
        rule = "three whole numbers of 0 or more"
        fix = "give the number of frequencies of time, height and width"
        raise InputError("mrope_section", value=section, rule=rule, fix=fix)
    size = sum(section)
    if not interleaved:
        return np.repeat(np.arange(3), section)
    axes = np.zeros(size, int)
    for axis in (1, 2):
        frequencies = np.arange(section[axis]) * 3 + axis
        if len(frequencies) and frequencies[-1] >= size:
            rule = f"interleaved, entry {axis} reaches frequency {frequencies[-1]} of {size}"
            fix = "lower the second and third entry, or raise the first"
            raise InputError("mrope_section", value=section, rule=rule, fix=fix)
        axes[frequencies] = axis
    return axes


def mrope_angles(
    positions: jax.Array, frequency: jax.Array, section: tuple[int, int, int], interleaved: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of multimodal rotary positions (arXiv 2409.12191, 2.1):
    positions [B, S, 3] int32 and frequency [E/2] -> two [B, S, E/2] float32; plain rotary angles
    where the three agree. Raises InputError unless `section` adds up to E/2."""
    axes = mrope_axes(section, interleaved)
    if len(axes) != frequency.shape[0]:
        rule = f"adds up to half of head_dim, {frequency.shape[0]}"
        fix = "change the entries so that they add up to that"
        raise InputError("mrope_section", value=section, rule=rule, fix=fix)
    angles = positions.astype(jnp.float32)[..., axes] * frequency[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def vision_tokens(
    tokens: jax.Array, segment_ids: jax.Array, mask: jax.Array | None, config: VisionConfig
) -> jax.Array:
    """Returns where a token stands for a piece of an image: [B, S] bool.

    Such a token was put there by the prompt or the environment. One that the policy chose (`mask`
    1) is an ordinary token, for the sampler embeds it so; hence no image token is ever trained.
    """
    is_vision = (tokens == config.image_token_id) | (tokens == config.video_token_id)
    is_vision = is_vision & (segment_ids > 0)
    return is_vision if mask is None else is_vision & ~(mask > 0)


def _features_at(where: jax.Array, features: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the k-th feature of each row at its k-th True, and where there is one: ([B, S, D],
    [B, S] bool)."""
    order = jnp.cumsum(where.astype(jnp.int32), axis=1) - 1
    index = jnp.clip(order, 0, features.shape[1] - 1)
    return jnp.take_along_axis(features, index[..., None], axis=1), where & (
        order < features.shape[1]
    )


def insert_features(x: jax.Array, where: jax.Array, features: jax.Array) -> jax.Array:
    """Returns x [B, S, D] with the k-th feature of a row [B, M, D] at its k-th True of
    `where` [B, S]."""
    placed, has_feature = _features_at(where, features)
    return jnp.where(has_feature[..., None], placed.astype(x.dtype), x)


def add_features(x: jax.Array, where: jax.Array, features: jax.Array) -> jax.Array:
    """Returns x [B, S, D] + the k-th feature of a row [B, M, D] at its k-th True of `where` [B, S]:
    one deepstack level (arXiv 2406.04334), after the decoder layer of the same number."""
    placed, has_feature = _features_at(where, features)
    return x + jnp.where(has_feature[..., None], placed.astype(x.dtype), 0)


def add_level(x: jax.Array, call, layer) -> jax.Array:
    """Adds the vision tower's features to x [B, S, D] at the tokens of images, after each of the
    first layers (deepstack); `call` is the decoder's Pass."""
    if call.levels is None:
        return x
    count = call.levels.shape[0]
    level = call.levels[jnp.minimum(layer, count - 1)]
    return add_features(x, call.where, jnp.where(layer < count, level, 0))
