"""Rows of offline training as the arrays of a Batch: right-padded, numpy.

Decides which row an item becomes, and which field holds each value of the data. Items come encoded
(`encode`) and, for SFT, packed (`packing`). The dicts are keyword arguments of rljax.batch.Batch.

Axes: B rows, S tokens; a pair is rows 2i (chosen) and 2i + 1 (rejected), a triple is rows 3i
(reference), 3i + 1 (chosen) and 3i + 2 (rejected). A pair of kind safety is rows 2i (safer) and
2i + 1 (more harmful).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rljax.batch import FinishReason
from rljax.data.images.encode import Image, ImageLayout
from rljax.data.kinds import PAIRED
from rljax.data.offline.encode import Labelled, Pair, Stepwise, Trajectory
from rljax.data.offline.rows import KINDS
from rljax.data.online.prompts import blank_rows
from rljax.errors import InputError


class _Segment(NamedTuple):
    """One sequence of a row: ids [n] and mask [n]."""

    ids: np.ndarray
    mask: np.ndarray


def batch_arrays(
    kind: str,
    items: Sequence,
    *,
    length: int,
    rows_per_example: int = 2,
    images: ImageLayout | None = None,
) -> dict[str, np.ndarray]:
    """Returns the rows of `items` of one kind, as arrays with S = `length`: tokens, segment_ids,
    positions and mask [B, S], and by kind

    examples: no more; an item may be a list of examples, packed into one row (`pack_examples`).
    pairs: scores [B] = the margin of the chosen row, 0 of the others; group [B] = the pair.
        `rows_per_example` 3 puts the reference completion first, 2 leaves it out.
    safety: costs [B, S] = +1 (unsafe) or -1 (safe) at the last token of a row; group as of pairs.
    unpaired: scores [B] = +1 (desirable) or -1. See `mismatched_arrays` for the other rows of KTO.
    stepwise: process_rewards [B, S], the labels at the last tokens of steps, where mask is 1.
    trajectories: rewards [B, S] at the last token, or the process scores at the ends of steps;
        scores [B] = the reward; finish_reason [B]; process_rewards and sampler_logprobs [B, S] if
        the data have them.

    With `images`, also the arrays of `ImageLayout.rows`. Raises InputError for an unknown kind, for
    a row of more than `length` tokens, and for triples without a reference completion.
    """
    makers = dict(examples=_example_rows, safety=_safety_rows, unpaired=_labelled_rows)
    makers |= dict(stepwise=_step_rows, trajectories=_trajectory_rows)
    if kind not in KINDS:
        raise InputError("unknown kind of rows", value=kind, fix=f"use one of {KINDS}")
    if kind == "pairs":
        arrays = _pair_rows(items, length, rows_per_example)
    else:
        arrays = makers[kind](items, length)
    if images is None:
        return arrays
    rows_of_item = {"pairs": rows_per_example, "safety": 2}.get(kind, 1)
    rows = [item_images(item) for item in items for _ in range(rows_of_item)]
    return arrays | images.rows(arrays, rows)


def item_images(item) -> tuple[Image, ...]:
    """Returns the images of an item, or of all examples that are packed into one row."""
    if isinstance(item, list):
        return tuple(image for example in item for image in example.images)
    return item.images


def longest_row(kind: str, items: Sequence) -> int:
    """Returns the number of tokens of the longest row that `batch_arrays` makes of the items."""
    if kind == "examples":
        rows = [item if isinstance(item, list) else [item] for item in items]
        return max(sum(len(ids) for ids, _ in row) for row in rows)
    if kind == "stepwise":
        return max(len(item.ids) for item in items)
    if kind in PAIRED:
        return max(len(item.prompt_ids) + _longest_completion(item) for item in items)
    sizes = [(len(item.prompt_ids), len(item.completion_ids)) for item in items]
    return max(sum(size) for size in sizes)


def _longest_completion(pair: Pair) -> int:
    reference = 0 if pair.reference_ids is None else len(pair.reference_ids)
    return max(len(pair.chosen_ids), len(pair.rejected_ids), reference)


def mismatched_arrays(
    items: Sequence[Labelled], *, length: int, images: ImageLayout | None = None
) -> dict[str, np.ndarray]:
    """Returns the rows for KTO's estimate of the KL divergence (2402.01306): row i is prompt i with
    the completion of row i - 1 (of the last, for row 0). tokens, segment_ids, positions,
    mask: [B, `length`].

    One item alone has no other completion: its mask is 0. A completion is cut where the row ends:
    longer rows would pad all others, for an estimate. Raises InputError for a prompt of more than
    `length` tokens.
    """
    rows = []
    for i, item in enumerate(items):
        previous = items[i - 1]
        row = _joined_segment(item.prompt_ids, previous.completion_ids, previous.completion_mask)
        mask = row.mask if len(items) > 1 else np.zeros_like(row.mask)
        if len(item.prompt_ids) <= length:
            row, mask = _Segment(row.ids[:length], row.mask[:length]), mask[:length]
        rows.append([_Segment(row.ids, mask)])
    arrays = _padded_rows(rows, length)
    if images is not None:
        arrays |= images.rows(arrays, [item.images for item in items])
    return arrays


def _example_rows(items: Sequence, length: int) -> dict[str, np.ndarray]:
    rows = []
    for item in items:
        examples = item if isinstance(item, list) else [item]
        # Nothing in its segment precedes a first token, so nothing predicts it.
        rows.append([_Segment(ids, _without_first(mask)) for ids, mask in examples])
    return _padded_rows(rows, length)


def _without_first(mask: np.ndarray) -> np.ndarray:
    mask = np.array(mask, np.float32)
    mask[:1] = 0
    return mask


def _pair_rows(items: Sequence[Pair], length: int, rows_per_example: int) -> dict[str, np.ndarray]:
    if rows_per_example not in (2, 3):
        rule = "a pair has 2 rows or 3"
        fix = "rows_per_example=2, or 3 with a reference row"
        raise InputError("rows_per_example", value=rows_per_example, rule=rule, fix=fix)
    rows, scores = [], []
    for number, item in enumerate(items):
        if rows_per_example == 3:
            if item.reference_ids is None:
                raise InputError(
                    f"pair {number} has no reference completion",
                    rule="rows_per_example is 3",
                    fix="give each row of the data a 'reference'",
                )
            rows.append([_joined_segment(item.prompt_ids, item.reference_ids, item.reference_mask)])
            scores.append(0.0)
        rows.append([_joined_segment(item.prompt_ids, item.chosen_ids, item.chosen_mask)])
        rows.append([_joined_segment(item.prompt_ids, item.rejected_ids, item.rejected_mask)])
        scores += [item.margin, 0.0]
    batch = _padded_rows(rows, length)
    batch["scores"] = np.array(scores, np.float32)
    batch["group"] = np.repeat(np.arange(len(items), dtype=np.int32), rows_per_example)
    return batch


def _safety_rows(items: Sequence[Pair], length: int) -> dict[str, np.ndarray]:
    batch = _pair_rows(items, length, 2)
    del batch["scores"]
    batch["costs"] = np.zeros_like(batch["mask"])
    for row, unsafe in enumerate(label for item in items for label in item.unsafe):
        chosen = np.flatnonzero(batch["mask"][row])
        batch["costs"][row, chosen[-1]] = 1.0 if unsafe else -1.0
    return batch


def _labelled_rows(items: Sequence[Labelled], length: int) -> dict[str, np.ndarray]:
    batch = _padded_rows([[_completion_segment(item)] for item in items], length)
    batch["scores"] = np.array([1.0 if item.label else -1.0 for item in items], np.float32)
    return batch


def _step_rows(items: Sequence[Stepwise], length: int) -> dict[str, np.ndarray]:
    batch = _padded_rows([[_Segment(item.ids, item.mask)] for item in items], length)
    batch["process_rewards"] = _padded_values([item.labels for item in items], length)
    return batch


def _trajectory_rows(items: Sequence[Trajectory], length: int) -> dict[str, np.ndarray]:
    batch = _padded_rows([[_completion_segment(item)] for item in items], length)
    batch["scores"] = np.array([item.reward for item in items], np.float32)
    batch["finish_reason"] = np.array(
        [FinishReason.LENGTH if item.truncated else FinishReason.STOP for item in items], np.int32
    )
    for field, name in (("process_rewards", "process_scores"), ("sampler_logprobs", "logprobs")):
        values = [vars(item)[name] for item in items]
        if any(value is None for value in values):
            if not all(value is None for value in values):
                raise InputError(
                    f"some trajectories have {name} and some have not", fix="split them"
                )
            continue
        starts = [len(item.prompt_ids) for item in items]
        shifted = [np.pad(v, (start, 0)) for v, start in zip(values, starts, strict=True)]
        batch[field] = _padded_values(shifted, length)
    if "process_rewards" in batch:
        batch["rewards"] = batch["process_rewards"].copy()
        return batch
    batch["rewards"] = np.zeros_like(batch["mask"])
    for row, item in enumerate(items):
        chosen = np.flatnonzero(batch["mask"][row])
        batch["rewards"][row, chosen[-1]] = item.reward
    return batch


# -- rows --


def _joined_segment(prompt: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> _Segment:
    return _Segment(
        np.concatenate([prompt, ids]), np.concatenate([np.zeros(len(prompt), np.float32), mask])
    )


def _completion_segment(item: Labelled | Trajectory) -> _Segment:
    return _joined_segment(item.prompt_ids, item.completion_ids, item.completion_mask)


def _padded_values(values: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns values [n] per row as [B, S], 0 behind their ends."""
    padded = np.zeros((len(values), length), np.float32)
    for row, value in enumerate(values):
        padded[row, : len(value)] = value
    return padded


def _padded_rows(rows: Sequence[Sequence[_Segment]], length: int) -> dict[str, np.ndarray]:
    """Returns rows of segments as tokens, segment_ids, positions [B, S] int32 and mask [B, S]
    float32."""
    batch = blank_rows(len(rows), length)
    for row, segments in enumerate(rows):
        total = sum(len(segment.ids) for segment in segments)
        if total > length:
            raise InputError(
                f"row {row} of the batch has {total} tokens",
                rule=f"rows are {length} tokens long",
                fix="encode the data with max_tokens of at most that length",
            )
        start = 0
        for number, (ids, mask) in enumerate(segments, start=1):
            columns = slice(start, start + len(ids))
            batch["tokens"][row, columns] = ids
            batch["segment_ids"][row, columns] = number
            batch["positions"][row, columns] = np.arange(len(ids))
            batch["mask"][row, columns] = mask
            start += len(ids)
    return batch
