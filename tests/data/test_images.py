"""Images to patches: sizes and values against transformers, resampling against Pillow."""

import dataclasses

import numpy as np
import pytest

from rljax.data.images.patches import (
    ImageProcessing,
    from_hf_processor,
    image_patches,
    patchify,
    resize_bicubic,
    smart_resize,
)
from rljax.errors import InputError

PUBLISHED_3 = {  # preprocessor_config.json of Qwen3-VL
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [
        (56, 84, (56, 84)),
        (100, 200, (112, 196)),  # 3.57 and 7.14 units of 28
        (10, 10, (56, 56)),  # raised to min_pixels
        (3000, 4000, (840, 1148)),
        (4000, 3000, (1148, 840)),  # lowered to max_pixels
        (20, 2000, (28, 1988)),
    ],
)
def test_sizes(height, width, wanted):
    assert smart_resize(height, width, ImageProcessing()) == wanted


def test_a_ribbon_and_what_is_no_rgb_image_are_refused():
    with pytest.raises(InputError, match=r"\(1, 201\).*200 times"):
        smart_resize(1, 201, ImageProcessing())
    for wrong in (picture(8, 8).astype(np.float32), picture(8, 8)[..., 0]):
        with pytest.raises(InputError, match="convert it to RGB"):
            image_patches(wrong, ImageProcessing())
    with pytest.raises(InputError, match="multiples of 28"):
        patchify(picture(28, 30)[None], ImageProcessing())


def test_a_patch_holds_channel_frame_row_column():
    plain = ImageProcessing(
        patch_size=2, merge_size=1, min_pixels=1, mean=(0.5,) * 3, std=(0.25,) * 3
    )
    frames = np.stack([picture(4, 6, seed) for seed in range(3)])
    patches, grid = patchify(frames, plain)
    assert grid == (2, 2, 3)
    block = np.stack([frames[2], frames[2]])[:, 2:4, 2:4] / 63.75 - 2  # the last frame, repeated
    np.testing.assert_allclose(patches[6 + 3 + 1], block.transpose(3, 0, 1, 2).ravel(), atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"), [((37, 53), (56, 84)), ((211, 130), (56, 28)), ((64, 90), (64, 45))]
)
def test_resampling_is_pillows_bit_for_bit(old, new):
    image_module = pytest.importorskip("PIL.Image")
    image = picture(*old)
    want = image_module.fromarray(image).resize(new[::-1], image_module.Resampling.BICUBIC)
    np.testing.assert_array_equal(resize_bicubic(image, *new), np.asarray(want))


def test_resampling_keeps_flat_colours_and_symmetry():
    flat = np.full((31, 47, 3), 201, np.uint8)
    np.testing.assert_array_equal(resize_bicubic(flat, 56, 28), np.full((56, 28, 3), 201))
    image = picture(33, 20)
    np.testing.assert_array_equal(
        resize_bicubic(image[::-1, ::-1], 14, 28), resize_bicubic(image, 14, 28)[::-1, ::-1]
    )


@pytest.mark.parametrize("published", [{}, PUBLISHED_3], ids=["qwen2.5", "qwen3"])
def test_patches_equal_transformers(published):
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(**{k: v for k, v in published.items() if "_type" not in k})
    processing = from_hf_processor(published)
    assert from_hf_processor(theirs.to_dict()) == processing
    for height, width in ((64 * 7, 64 * 14), (100, 333)):  # a multiple already, and resampled
        image = picture(height, width)
        want = theirs(image, return_tensors="np")
        patches, grid = image_patches(image, processing)
        assert [list(grid)] == want["image_grid_thw"].tolist()
        np.testing.assert_allclose(patches, want["pixel_values"], atol=2e-6)


def test_published_preprocessor_files():
    three = ImageProcessing(16, 2, 2, 65536, 16777216, (0.5,) * 3, (0.5,) * 3)
    assert from_hf_processor(PUBLISHED_3) == three
    two = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
    assert from_hf_processor(two) == dataclasses.replace(ImageProcessing(), max_pixels=12845056)
    for change, says in (
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"crop_size": 5}, "crop_size"),
        ({"max_pixels": 10}, "max_pixels"),
    ):
        with pytest.raises(InputError, match=says):
            from_hf_processor({**two, **change})
