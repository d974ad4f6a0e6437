"""Images for the vision towers of Qwen: resized, normalised, cut into patches.

Numpy from uint8 pixels to patches, by the rules of Qwen2VLImageProcessor. Where the patches stand
in a row is rljax.data.images.rows.

Resizing is bicubic with antialiasing, in the fixed-point arithmetic of Pillow on uint8, and equals
Pillow's result bit for bit; torchvision's (the "fast" processors) differs from both by a level.

Axes: T frames, H and W pixels, N patches, C pixel values of a patch (channel, frame, row, column).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from rljax.errors import InputError

_FRACTION_BITS = 22  # of Pillow's weights: 32 less 8 of the pixel and 2 of headroom
_OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
_OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True)
class ImageProcessing:
    """The settings of preprocessor_config.json; the defaults are those of Qwen2.5-VL."""

    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames
    merge_size: int = 2  # patches
    min_pixels: int = 56 * 56  # of a resized image
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = _OPENAI_MEAN
    std: tuple[float, ...] = _OPENAI_STD

    def __post_init__(self):
        for name in ("patch_size", "temporal_patch_size", "merge_size", "min_pixels"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                rule = "at least 1"
                fix = f"set {name} to 1 or more in preprocessor_config.json"
                raise InputError(f"image {name}", value=getattr(self, name), rule=rule, fix=fix)
        if self.max_pixels < max(self.min_pixels, (self.patch_size * self.merge_size) ** 2):
            rule = f"at least min_pixels, {self.min_pixels}, and one merged patch"
            fix = "raise max_pixels, or lower min_pixels"
            raise InputError("image max_pixels", value=self.max_pixels, rule=rule, fix=fix)
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            rule = "three each, std above 0"
            fix = "three numbers in image_mean and three above 0 in image_std"
            raise InputError("image mean and std", value=(self.mean, self.std), rule=rule, fix=fix)


_READ = set(
    """
    patch_size temporal_patch_size merge_size min_pixels max_pixels size image_mean image_std
    do_resize do_rescale do_normalize do_convert_rgb rescale_factor resample
    """.split()
)
_IGNORED = {"image_processor_type", "processor_class", "feature_extractor_type", "data_format"}


def from_hf_processor(config: Mapping) -> ImageProcessing:
    """Returns the settings of a preprocessor_config.json, read as a dict. Raises InputError for a
    setting that this processor does not implement."""
    unknown = {k for k in set(config) - _READ - _IGNORED if config[k] not in (None, False)}
    if unknown:
        key = sorted(unknown)[0]
        raise InputError(
            f"preprocessor_config.json sets {key!r}",
            value=config[key],
            rule="the processor does not implement it, and would silently ignore it",
            fix=f"remove {key!r} if images are read without it, or take another model",
        )
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
    for key, supported in {**fixed, "rescale_factor": 1 / 255}.items():
        value = config.get(key)
        if value is not None and value != supported and not math.isclose(value, supported):
            rule = f"supported: {supported}"
            fix = f"set {key} to {supported} if images are prepared so, or take another model"
            raise InputError(f"preprocessor_config.json: {key}", value=value, rule=rule, fix=fix)
    size, fields = config.get("size") or {}, {}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        # Published files spell the same number in three ways.
        sizes = [config.get(name), size.get(name), size.get(edge)]
        fields |= {name: next(v for v in sizes if v is not None)} if any(sizes) else {}
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        fields |= {name: config[name]} if config.get(name) is not None else {}
    for name in ("mean", "std"):
        value = config.get("image_" + name)
        fields |= {name: tuple(value)} if value is not None else {}
    return ImageProcessing(**fields)


def to_hf_processor(processing: ImageProcessing) -> dict:
    """Returns the settings as a dict that from_hf_processor and transformers read."""
    names = ("patch_size", "temporal_patch_size", "merge_size")
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        **{name: getattr(processing, name) for name in names},
        "min_pixels": processing.min_pixels,
        "max_pixels": processing.max_pixels,
        "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        "image_mean": list(processing.mean),
        "image_std": list(processing.std),
    }


def smart_resize(height: int, width: int, processing: ImageProcessing) -> tuple[int, int]:
    """Returns the (height, width) in pixels to resize to: multiples of a merged patch, height x
    width between min_pixels and max_pixels, the aspect ratio nearly kept. Raises InputError for an
    image without pixels, and for one whose sides differ by more than a factor of 200."""
    if min(height, width) < 1 or max(height, width) > 200 * min(height, width):
        rule = "at least 1 pixel, and one at most 200 times the other"
        fix = "crop the image"
        raise InputError("image height and width", value=(height, width), rule=rule, fix=fix)
    unit = processing.patch_size * processing.merge_size
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > processing.max_pixels:
        shrink = math.sqrt(height * width / processing.max_pixels)
        rows = max(1, math.floor(height / shrink / unit))
        columns = max(1, math.floor(width / shrink / unit))
    elif rows * columns * unit**2 < processing.min_pixels:
        grow = math.sqrt(processing.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows * unit, columns * unit


def image_patches(
    image: np.ndarray, processing: ImageProcessing
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Resizes an RGB image [H, W, 3] uint8 and returns its patches [N, C] float32 and its grid (1,
    h, w) in patches. Raises InputError for another shape or dtype, and for a size that
    `smart_resize` refuses."""
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        rule = "[height, width, 3] of uint8"
        fix = "convert it to RGB"
        raise InputError("an image", value=(image.shape, str(image.dtype)), rule=rule, fix=fix)
    image = resize_bicubic(image, *smart_resize(*image.shape[:2], processing))
    return patchify(image[None], processing)


def patchify(
    frames: np.ndarray, processing: ImageProcessing
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cuts frames [T, H, W, 3] uint8 of the final size into normalised patches [N, C] float32, and
    returns them with their grid (t, h, w). The last frame is repeated to fill temporal patches; an
    image is one frame. Raises InputError unless H and W are multiples of patch_size x merge_size.
    """
    p, m, per = processing.patch_size, processing.merge_size, processing.temporal_patch_size
    count, height, width, channels = frames.shape
    if height % (p * m) or width % (p * m):
        rule = f"height and width are multiples of {p * m}"
        fix = f"resize the frames to multiples of {p * m}"
        raise InputError("frames", value=(height, width), rule=rule, fix=fix)
    mean = np.asarray(processing.mean, np.float32)
    std = np.asarray(processing.std, np.float32)
    values = (frames.astype(np.float32) / np.float32(255) - mean) / std
    values = np.concatenate([values, np.repeat(values[-1:], -count % per, axis=0)])
    t, h, w = len(values) // per, height // p, width // p
    values = values.reshape(t, per, h // m, m, p, w // m, m, p, channels)
    # -> frame, block row, block column, row and column in the block | channel, frame, row, column
    patches = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(patches.reshape(t * h * w, channels * per * p * p)), (t, h, w)


def resize_bicubic(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes an image [H, W, channels] uint8 to [height, width, channels] uint8, as Pillow's
    BICUBIC does it."""
    # Columns first, rounded to whole levels in between: the order changes the rounding.
    for axis, size in ((1, width), (0, height)):
        if image.shape[axis] != size:
            image = _resize_axis(image, axis, size)
    return image


def _resize_axis(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    first, weights = _bicubic_weights(image.shape[axis], size)
    image = np.moveaxis(image, axis, 0)
    total = np.full((size, *image.shape[1:]), 1 << (_FRACTION_BITS - 1), np.int32)
    for tap in range(weights.shape[1]):
        index = np.minimum(first + tap, len(image) - 1)  # taps past the end have weight 0
        total += image[index].astype(np.int32) * weights[:, tap, None, None]
    levels = np.clip(total >> _FRACTION_BITS, 0, 255).astype(np.uint8)
    return np.moveaxis(levels, 0, axis)


def _bicubic_weights(old_size: int, new_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first pixel that each new one reads [new], and the fixed-point weights [new,
    taps].

    Keys' cubic kernel with a = -1/2, as wide as the step between new pixels when shrinking.
    """
    scale = old_size / new_size
    stretch = max(scale, 1.0)
    centre = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centre - 2 * stretch + 0.5).astype(int), 0)
    stop = np.minimum((centre + 2 * stretch + 0.5).astype(int), old_size)
    pixel = first[:, None] + np.arange((stop - first).max())
    x = np.abs((pixel - centre[:, None] + 0.5) / stretch)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    weights = np.where(pixel < stop[:, None], weights, 0.0)
    weights = weights / weights.sum(axis=1, keepdims=True) * (1 << _FRACTION_BITS)
    return first, np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)
