"""The images of one prompt, as the host's loop reads them: checked, and padded to a few shapes.

Axes: N patches, C pixel values of a patch, S tokens of the prompt.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping

import numpy as np

from rljax.errors import InputError
from rljax.models.config import ModelConfig

_LEAST_TOKENS = 16  # of images, that a pass has room for


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PromptImages:
    """One prompt's images: the arrays of rljax.data.images.rows.prompt_images without their first
    axis."""

    pixels: np.ndarray  # [N, C]
    patch_coords: np.ndarray  # [N, 4], image number 0 = padding
    rope_positions: np.ndarray  # [S, 3]
    shift: int  # position minus column of the tokens behind the prompt

    @functools.cached_property
    def name(self) -> bytes:
        """Returns a name that tells these images from others beside the same tokens."""
        digest = hashlib.blake2b(digest_size=16)
        valid = self.patch_coords[:, 0] > 0
        for array in (self.pixels[valid], self.patch_coords[valid]):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.digest()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that the images belong to."""
        return len(self.rope_positions)

    def check(self, config: ModelConfig, ids: np.ndarray) -> None:
        """Raises InputError unless a model reads images and these fill the image tokens of a
        prompt, ids [S]."""
        vision = config.vision
        if vision is None:
            raise InputError(
                "images of a prompt",
                value=f"{len(self.pixels)} patches",
                rule=f"a {config.family} model without a vision tower reads none",
                fix="a model with images, or a prompt of text",
            )
        count = len(self.pixels)
        shapes = self.pixels.shape, self.patch_coords.shape, self.rope_positions.shape
        expected_shapes = (count, vision.patch_values), (count, 4), (len(ids), 3)
        if shapes != expected_shapes:
            rule = f"pixels, patch_coords and rope_positions are {expected_shapes}"
            raise InputError(
                "arrays of a prompt's images",
                value=shapes,
                rule=rule,
                fix="make the arrays by the ImageReader of this model",
            )
        image_tokens = int(np.count_nonzero(self.patch_coords[:, 0] > 0)) // vision.merge_area
        special = (ids == vision.image_token_id) | (ids == vision.video_token_id)
        if int(np.count_nonzero(special)) != image_tokens:
            raise InputError(
                f"a prompt has {np.count_nonzero(special)} tokens of images",
                rule=f"its images fill {image_tokens}",
                fix="rljax.data.images.rows.prompt_images",
            )

    def padded(
        self, config: ModelConfig, ids: np.ndarray, least: int, most: int
    ) -> tuple[np.ndarray, int, dict[str, np.ndarray]]:
        """Returns (tokens [1, L], how many of them are real, the images as Engine.prefill
        reads them) of the beginning of `ids` [S] that ends behind the last image, as far as
        there is room.

        L is a power of two times `least`, or `most`, and the patches have a power of two as well,
        so that few programs are compiled. Tokens behind the prompt are left out: the policy may
        have drawn the token of an image, which is then an ordinary one.
        """
        vision, ids = config.vision, ids[: self.tokens]
        special = (ids == vision.image_token_id) | (ids == vision.video_token_id)
        columns = least
        while columns < int(np.flatnonzero(special)[-1]) + 2:  # the last one is read again, as text
            columns *= 2
        columns = min(columns, most)
        size = min(len(ids), columns)
        tokens, positions = np.zeros((1, columns), np.int32), np.zeros((1, columns, 3), np.int32)
        tokens[0, :size], positions[0, :size] = ids[:size], self.rope_positions[:size]
        valid = self.patch_coords[:, 0] > 0
        count, room = int(np.count_nonzero(valid)), _LEAST_TOKENS * vision.merge_area
        while room < count:
            room *= 2
        pixels = np.zeros((1, room, vision.patch_values), np.float32)
        coords = np.zeros((1, room, 4), np.int32)
        pixels[0, :count], coords[0, :count] = self.pixels[valid], self.patch_coords[valid]
        shift = np.array([self.shift], np.int32)
        inputs = dict(pixels=pixels, patch_coords=coords, rope_positions=positions, shift=shift)
        return tokens, size, inputs


def of_prompt(images: Mapping[str, np.ndarray] | None, row: int, size: int) -> PromptImages | None:
    """Returns the images of prompt `row`, which has `size` tokens, out of those of all prompts [P,
    ...] (rljax.data.images.rows.prompt_images); None if it has none."""
    if images is None or not np.any(images["patch_coords"][row, :, 0] > 0):
        return None
    return PromptImages(
        np.asarray(images["pixels"][row]),
        np.asarray(images["patch_coords"][row]),
        np.asarray(images["rope_positions"][row, :size]),
        int(images["shift"][row]),
    )
