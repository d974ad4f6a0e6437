"""Patch arrays and multimodal position ids per row: which image stands where in which row.

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
    """The coordinates [N, 3] int32 (frame, patch row, patch column) of the N = t h w patches of an
    image, with the patches of one token next to each other."""
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
    """The patches of each row: pixels [B, N, C] float32, coords [B, N, 4] int32 (image number in
    the row from 1, frame, patch row, patch column; 0 = padding).

    tokens and segment_ids [B, S] (0 = padding, left or right), pixel_values
    [patches of all images, C], grids [I, 3], policy_mask [B, S]. N is `patches`, or the patches of
    the fullest row. Raises InputError unless pixels, grids and runs of image tokens agree, and if N
    is below the patches of a row or not a multiple of a merged patch.
    """
    rows = _find_images(tokens, segment_ids, grids, video_grids, None, policy_mask, config)
    sources = [pixel_values, video_pixels]
    for source, (grid, name) in enumerate(((grids, "image"), (video_grids, "video"))):
        sources[source] = _check_pixels(sources[source], grid, config, name)
    needed = [sum(np.prod(i.grid) for i in row) for row in rows]
    # Not 0: one program serves batches with and without images.
    size = max([config.merge_area, *needed]) if patches is None else patches
    if size < max(needed, default=0) or size % config.merge_area:
        raise InputError(
            "patches of a row",
            value=size,
            rule=f"a multiple of {config.merge_area}, and row {int(np.argmax(needed))} "
            f"holds {max(needed)}",
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
    """Multimodal position ids [B, S, 3] int32 (time, row, column), and by how much they exceed the
    number of tokens at the end of the row, delta [B] int32 (arXiv 2409.12191, 2.1).

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
            images = [i for i in row if segment_ids[b, i.columns[0]] == segment]
            positions[b, columns] = _segment_positions(columns, images, config)
            delta[b] = positions[b, columns].max() + 1 - len(columns)
    return positions, delta


def _segment_positions(columns, images: list[_Image], config: VisionConfig) -> np.ndarray:
    """[len(columns), 3]; the columns of a segment are in order, but need not be neighbours."""
    out = np.zeros((len(columns), 3), np.int32)
    here, position = 0, 0  # tokens written, next free position
    for image in images:
        text = int(np.searchsorted(columns, image.columns[0])) - here
        out[here : here + text] = position + np.arange(text)[:, None]
        here, position = here + text, position + text
        t, h, w = image.grid
        merged = (t, h // config.merge_size, w // config.merge_size)
        coords = np.indices(merged).reshape(3, -1).T.astype(np.float64)
        if image.source == 1 and config.tokens_per_second:
            coords[:, 0] *= config.tokens_per_second * image.seconds
        out[here : here + len(coords)] = position + np.floor(coords)
        here, position = here + len(coords), int(out[here : here + len(coords)].max()) + 1
    out[here:] = position + np.arange(len(columns) - here)[:, None]
    return out


def _find_images(
    tokens, segment_ids, grids, video_grids, seconds, policy_mask, config: VisionConfig
) -> list[list[_Image]]:
    """The images of each row, in the order of its text."""
    tokens, segment_ids = np.asarray(tokens), np.asarray(segment_ids)
    if tokens.ndim != 2 or tokens.shape != segment_ids.shape:
        raise InputError(
            "tokens and segment_ids",
            value=(tokens.shape, segment_ids.shape),
            rule="both [B, S]",
            fix="give both as arrays [rows, tokens] of one shape",
        )
    chosen = np.zeros(tokens.shape, bool) if policy_mask is None else np.asarray(policy_mask) > 0
    kinds = np.where(tokens == config.image_token_id, 0, -1)
    kinds = np.where(tokens == config.video_token_id, 1, kinds)
    kinds = np.where(chosen | (segment_ids == 0), -1, kinds)
    waiting = [_queue(grids, None, config, "image"), _queue(video_grids, seconds, config, "video")]
    rows = []
    for b in range(len(tokens)):
        valid = np.flatnonzero(segment_ids[b])
        rows.append(
            _images_of_row(b, valid, kinds[b, valid], segment_ids[b, valid], waiting, config)
        )
    for name, queue in zip(("image", "video"), waiting, strict=True):
        if queue:
            raise InputError(
                f"{len(queue)} {name} grids are left over after the last row, of {name} tokens",
                value=int(np.sum(kinds == (name == "video"))),
                rule="every image and video stands in the text, in the order of the rows",
                fix=f"give only the {name}s whose tokens are in the rows",
            )
    return rows


def _images_of_row(b, valid, kinds, segments, waiting, config) -> list[_Image]:
    images, at = [], 0
    while True:
        starts = np.flatnonzero(kinds[at:] >= 0)
        if not len(starts):
            return images
        at = at + int(starts[0])
        kind = int(kinds[at])
        name = ("image", "video")[kind]
        same = (kinds[at:] == kind) & (segments[at:] == segments[at])
        run = len(same) if same.all() else int(np.argmin(same))
        if not waiting[kind]:
            raise InputError(
                f"row {b} has {run} {name} tokens for which no {name} is left",
                rule=f"{len(images)} images and videos stand before them in the row",
                fix=f"give one {name} grid for each run of {name} tokens",
            )
        grid, patches, seconds = waiting[kind].pop(0)
        size = int(np.prod(grid)) // config.merge_area
        if run < size:
            raise InputError(
                f"row {b} has {run} {name} tokens in a run, but its {name} of grid {grid} fills "
                f"{size}",
                rule=f"t h w / {config.merge_area} tokens stand for each {name}",
                fix="expand the prompt with expand_image_tokens, and do not cut it inside an image",
            )
        images.append(_Image(valid[at : at + size], grid, kind, patches, seconds))
        at += size


def _queue(grids, seconds, config: VisionConfig, name: str) -> list:
    """[(grid, its rows in the pixel values, seconds between frames)] in order."""
    grids = _check_grids(grids, config, name)
    seconds = [1.0] * len(grids) if seconds is None else list(seconds)
    if len(seconds) != len(grids):
        rule = f"one for each of {len(grids)} videos"
        fix = "give the seconds of each video in their order, or None: 1 s each"
        raise InputError("seconds_per_grid", value=len(seconds), rule=rule, fix=fix)
    out, start = [], 0
    for (t, h, w), second in zip(grids.tolist(), seconds, strict=True):
        # Where the text holds timestamps, each frame is a run of tokens of its own.
        split = name == "video" and not config.tokens_per_second
        for frames in [1] * t if split else [t]:
            stop = start + frames * h * w
            out.append(((frames, h, w), slice(start, stop), float(second)))
            start = stop
    return out


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
    wanted = (int(np.prod(grids, axis=1).sum()), config.patch_values)
    pixels = np.zeros((0, config.patch_values), np.float32) if pixels is None else pixels
    pixels = np.asarray(pixels)
    if pixels.shape != wanted:
        rule = f"[patches of all grids, values of a patch] is {wanted}"
        fix = "give the pixels and the grids that one call of image_patches returned"
        raise InputError(f"{name} pixel values", value=pixels.shape, rule=rule, fix=fix)
    return pixels


def _in_order(segments: np.ndarray) -> list[int]:
    """The segments of a row in the order in which they begin; padding is none."""
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
    """The arrays of `Prompts.images` for right-padded prompts [P, L] whose image tokens are
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
