"""Patch arrays and multimodal position ids of rows with images.

This is the host side of the data; it finds the images of token rows. Resizing and cutting into
patches is rljax.data.images.patches.

An image of grid (t, h, w), in patches, is t h w / merge_size^2 image tokens in a run. Images are
given in the order of the rows and, inside a row, of the text. Where the policy chose an image token
(`policy_mask` 1) it is an ordinary token.

Axes: B rows, S tokens, N patches of a row, C pixel values of a patch, I images, V videos.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.errors import InputError
from rljax.models.vision.config import VisionConfig


@dataclasses.dataclass(frozen=True)
class _Image:
    """One image or video (or frame of one) in a row."""

    columns: np.ndarray  # of its tokens
    grid: tuple[int, int, int]  # frames, patch rows, patch columns
    source: int  # 0: image, 1: video
    patches: slice  # its rows in the pixel values of that source
    seconds: float  # between frames


def expand_image_tokens(ids: Sequence[int], grids, config: VisionConfig) -> list[int]:
    """Repeats the one image token of each image as many times as the image has features. grids:
    [I, 3]. Raises InputError unless `ids` has one image token for each grid."""
    grids = _check_grids(grids, config, "image")
    placeholders = sum(token == config.image_token_id for token in ids)
    if placeholders != len(grids):
        raise InputError(
            f"the text has {placeholders} image tokens for {len(grids)} images",
            rule=f"one image token (id {config.image_token_id}) stands for each image",
            fix="write one image part in the prompt for each image, in their order",
        )
    sizes = iter(np.prod(grids, axis=1) // config.merge_area)
    repeats = [int(next(sizes)) if token == config.image_token_id else 1 for token in ids]
    return [token for token, count in zip(ids, repeats, strict=True) for _ in range(count)]


def patch_coords(grid: tuple[int, int, int], merge_size: int) -> np.ndarray:
    """Returns the coordinates [N, 3] int32 (frame, patch row, patch column) of the N = t h w
    patches of an image, with the patches of one token next to each other."""
    t, h, w = grid
    frame, row, column = np.indices((t, h, w), dtype=np.int32)
    coords = np.stack([frame, row, column], axis=-1)
    blocks = coords.reshape(t, h // merge_size, merge_size, w // merge_size, merge_size, 3)
    return blocks.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 3)


def image_rows(
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    pixel_values: np.ndarray | None,
    grids: np.ndarray | None,
    config: VisionConfig,
    *,
    video_pixels: np.ndarray | None = None,
    video_grids: np.ndarray | None = None,
    policy_mask: np.ndarray | None = None,
    patches: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the patches of each row: pixels [B, N, C] float32, coords [B, N, 4] int32 (image
    number in the row from 1, frame, patch row, patch column; 0 = padding).

    tokens and segment_ids [B, S] (0 = padding, left or right), pixel_values
    [patches of all images, C], grids [I, 3], policy_mask [B, S]. N is `patches`, or the patches of
    the fullest row. Raises InputError unless pixels, grids and runs of image tokens agree, and if N
    is below the patches of a row or not a multiple of a merged patch.
    """
    rows = _find_images(tokens, segment_ids, grids, video_grids, None, policy_mask, config)
    sources = [pixel_values, video_pixels]
    for source, (grid, name) in enumerate(((grids, "image"), (video_grids, "video"))):
        sources[source] = _check_pixels(sources[source], grid, config, name)
    patches_of_rows = [sum(np.prod(image.grid) for image in row) for row in rows]
    # Not 0: one program serves batches with and without images.
    size = max([config.merge_area, *patches_of_rows]) if patches is None else patches
    if size < max(patches_of_rows, default=0) or size % config.merge_area:
        raise InputError(
            "patches of a row",
            value=size,
            rule=f"a multiple of {config.merge_area}, and row {int(np.argmax(patches_of_rows))} "
            f"holds {max(patches_of_rows)}",
            fix="raise it, or resize images to fewer pixels",
        )
    pixels = np.zeros((len(rows), size, config.patch_values), np.float32)
    coords = np.zeros((len(rows), size, 4), np.int32)
    for b, row in enumerate(rows):
        start = 0
        for number, image in enumerate(row, start=1):
            part = slice(start, start + int(np.prod(image.grid)))
            pixels[b, part] = sources[image.source][image.patches]
            coords[b, part, 0] = number
            coords[b, part, 1:] = patch_coords(image.grid, config.merge_size)
            start = part.stop
    return pixels, coords


def mrope_positions(
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    grids: np.ndarray | None,
    config: VisionConfig,
    *,
    video_grids: np.ndarray | None = None,
    seconds_per_grid: Sequence[float] | None = None,
    policy_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns multimodal position ids [B, S, 3] int32 (time, row, column), and delta [B] int32, by
    which they exceed the number of tokens at the end of the row (arXiv 2409.12191, 2.1).

    tokens, segment_ids and policy_mask are [B, S], grids [I, 3], video_grids [V, 3]. A text token
    is one past the largest position before it, on all three; an image spreads over its grid.
    Positions restart in each segment and are 0 at padding. The token that decoding adds at column c
    of a row (counted without padding) has position c + delta. `seconds_per_grid` [V] is the time
    between two frames of patches of a video. Raises InputError unless grids and runs of image
    tokens agree.
    """
    rows = _find_images(
        tokens, segment_ids, grids, video_grids, seconds_per_grid, policy_mask, config
    )
    segment_ids = np.asarray(segment_ids)
    positions = np.zeros((*segment_ids.shape, 3), np.int32)
    delta = np.zeros(len(rows), np.int32)
    for b, row in enumerate(rows):
        for segment in _in_order(segment_ids[b]):
            columns = np.flatnonzero(segment_ids[b] == segment)
            images = [image for image in row if segment_ids[b, image.columns[0]] == segment]
            positions[b, columns] = _segment_positions(columns, images, config)
            delta[b] = positions[b, columns].max() + 1 - len(columns)
    return positions, delta


def _segment_positions(columns, images: list[_Image], config: VisionConfig) -> np.ndarray:
    """Returns position ids [len(columns), 3]; the columns of a segment are in order, but need not
    be neighbours."""
    positions = np.zeros((len(columns), 3), np.int32)
    written, next_position = 0, 0  # tokens written, next free position
    for image in images:
        text_tokens = int(np.searchsorted(columns, image.columns[0])) - written
        positions[written : written + text_tokens] = next_position + np.arange(text_tokens)[:, None]
        written, next_position = written + text_tokens, next_position + text_tokens
        t, h, w = image.grid
        merged = (t, h // config.merge_size, w // config.merge_size)
        coords = np.indices(merged).reshape(3, -1).T.astype(np.float64)
        if image.source == 1 and config.tokens_per_second:
            coords[:, 0] *= config.tokens_per_second * image.seconds
        stop = written + len(coords)
        positions[written:stop] = next_position + np.floor(coords)
        written, next_position = stop, int(positions[written:stop].max()) + 1
    positions[written:] = next_position + np.arange(len(columns) - written)[:, None]
    return positions


def _find_images(
    tokens, segment_ids, grids, video_grids, seconds, policy_mask, config: VisionConfig
) -> list[list[_Image]]:
    """Returns the images of each row, in the order of its text."""
    tokens, segment_ids = np.asarray(tokens), np.asarray(segment_ids)
    if tokens.ndim != 2 or tokens.shape != segment_ids.shape:
        raise InputError(
            "tokens and segment_ids",
            value=(tokens.shape, segment_ids.shape),
            rule="both [B, S]",
            fix="give both as arrays [rows, tokens] of one shape",
        )
    by_policy = np.zeros(tokens.shape, bool) if policy_mask is None else np.asarray(policy_mask) > 0
    sources = np.where(tokens == config.image_token_id, 0, -1)
    sources = np.where(tokens == config.video_token_id, 1, sources)
    sources = np.where(by_policy | (segment_ids == 0), -1, sources)
    queues = [_queue(grids, None, config, "image"), _queue(video_grids, seconds, config, "video")]
    rows = []
    for b in range(len(tokens)):
        valid = np.flatnonzero(segment_ids[b])
        rows.append(
            _images_of_row(b, valid, sources[b, valid], segment_ids[b, valid], queues, config)
        )
    for name, queue in zip(("image", "video"), queues, strict=True):
        if queue:
            raise InputError(
                f"{len(queue)} {name} grids are left over after the last row, of {name} tokens",
                value=int(np.sum(sources == (name == "video"))),
                rule="every image and video stands in the text, in the order of the rows",
                fix=f"give only the {name}s whose tokens are in the rows",
            )
    return rows


def _images_of_row(b, valid, sources, segments, waiting, config) -> list[_Image]:
    images, position = [], 0
    while True:
        starts = np.flatnonzero(sources[position:] >= 0)
        if not len(starts):
            return images
        position = position + int(starts[0])
        source = int(sources[position])
        name = ("image", "video")[source]
        in_run = (sources[position:] == source) & (segments[position:] == segments[position])
        run_size = len(in_run) if in_run.all() else int(np.argmin(in_run))
        if not waiting[source]:
            raise InputError(
                f"row {b} has {run_size} {name} tokens for which no {name} is left",
                rule=f"{len(images)} images and videos stand before them in the row",
                fix=f"give one {name} grid for each run of {name} tokens",
            )
        grid, patches, seconds = waiting[source].pop(0)
        size = int(np.prod(grid)) // config.merge_area
        if run_size < size:
            raise InputError(
                f"row {b} has {run_size} {name} tokens in a run, but its {name} of grid {grid} "
                f"fills {size}",
                rule=f"t h w / {config.merge_area} tokens stand for each {name}",
                fix="expand the prompt with expand_image_tokens, and do not cut it inside an image",
            )
        images.append(_Image(valid[position : position + size], grid, source, patches, seconds))
        position += size


def _queue(grids, seconds, config: VisionConfig, name: str) -> list:
    """Returns [(grid, its rows in the pixel values, seconds between frames)] in order."""
    grids = _check_grids(grids, config, name)
    seconds = [1.0] * len(grids) if seconds is None else list(seconds)
    if len(seconds) != len(grids):
        rule = f"one for each of {len(grids)} videos"
        fix = "give the seconds of each video in their order, or None: 1 s each"
        raise InputError("seconds_per_grid", value=len(seconds), rule=rule, fix=fix)
    queue, start = [], 0
    for (t, h, w), second in zip(grids.tolist(), seconds, strict=True):
        # Where the text holds timestamps, each frame is a run of tokens of its own.
        split = name == "video" and not config.tokens_per_second
        for frames in [1] * t if split else [t]:
            stop = start + frames * h * w
            queue.append(((frames, h, w), slice(start, stop), float(second)))
            start = stop
    return queue


def _check_grids(grids, config: VisionConfig, name: str) -> np.ndarray:
    grids = np.zeros((0, 3), np.int64) if grids is None else np.asarray(grids).reshape(-1, 3)
    wrong = [g for g in grids.tolist() if min(g) < 1 or any(x % config.merge_size for x in g[1:])]
    if wrong:
        raise InputError(
            f"{name} grid (frames, patch rows, patch columns)",
            value=wrong[0],
            rule=f"at least one frame, rows and columns a multiple of {config.merge_size}",
            fix="resize with rljax.data.images.patches, which rounds the size",
        )
    return grids


def _check_pixels(pixels, grids, config: VisionConfig, name: str) -> np.ndarray:
    grids = _check_grids(grids, config, name)
    shape = (int(np.prod(grids, axis=1).sum()), config.patch_values)
    pixels = np.zeros((0, config.patch_values), np.float32) if pixels is None else pixels
    pixels = np.asarray(pixels)
    if pixels.shape != shape:
        rule = f"[patches of all grids, values of a patch] is {shape}"
        fix = "give the pixels and the grids that one call of image_patches returned"
        raise InputError(f"{name} pixel values", value=pixels.shape, rule=rule, fix=fix)
    return pixels


def _in_order(segments: np.ndarray) -> list[int]:
    """Returns the segments of a row in the order in which they begin; padding is none."""
    ids, first = np.unique(segments, return_index=True)
    return [int(i) for _, i in sorted(zip(first, ids, strict=True)) if i > 0]


def prompt_images(
    tokens: np.ndarray,
    lengths: np.ndarray,
    pixel_values: np.ndarray | None,
    grids: np.ndarray | None,
    config: VisionConfig,
    *,
    patches: int | None = None,
) -> dict[str, np.ndarray]:
    """Returns the arrays of `Prompts.images` for right-padded prompts [P, L] whose image tokens are
    expanded: pixels [P, N, C], patch_coords [P, N, 4], rope_positions [P, L, 3], and shift [P], by
    which the position of a sampled token differs from its column. lengths: [P]; pixel_values, grids
    and errors as in `image_rows`."""
    segments = (np.arange(tokens.shape[1])[None, :] < np.asarray(lengths)[:, None]).astype(np.int32)
    pixels, coords = image_rows(tokens, segments, pixel_values, grids, config, patches=patches)
    positions, shift = mrope_positions(tokens, segments, grids, config)
    return dict(
        pixels=pixels,
        patch_coords=coords,
        rope_positions=np.asarray(positions, np.int32),
        shift=np.asarray(shift, np.int32).reshape(-1),
    )
