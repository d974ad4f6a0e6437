"""Encodes records of offline training: examples, pairs, labels, steps, trajectories.

Makes the ids, the masks and the per-token data of one item at a time, and cuts or drops items that
are too long. Which columns a record has is `rows`.

Axes: n tokens of one completion, numpy; limits are in tokens.

Conversations go through the chat template, and a prompt is encoded alone, as it is for the sampler:
no token spans the border. A text gets the end token, which is learned.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rljax.data.dropped import REASONS
from rljax.data.images.encode import Image, ImageReader, cut_example, with_image_tokens
from rljax.data.kinds import PAIRED
from rljax.data.offline.rows import KINDS
from rljax.data.online.prompts import (
    OVERLONG,
    Example,
    TooLong,
    at_least_bos,
    cut_ids,
    encode_demonstration,
    in_row,
    one_of_stream,
    options_of,
    require_none_too_long,
    require_positive,
    with_end_token,
)
from rljax.data.text.chat import (
    RewrittenTurn,
    Turns,
    encode_after,
    encode_log,
    encode_prompt_messages,
    encode_turns,
)
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError

TIES = ("drop", "both_orders")


@dataclass(frozen=True)
class Pair:
    """Ids [n] int32 and masks [n] float32 of completions to one prompt. `margin` says how much
    better the chosen one is. The reference completion is the one of TPO."""

    prompt_ids: np.ndarray
    chosen_ids: np.ndarray
    chosen_mask: np.ndarray
    rejected_ids: np.ndarray
    rejected_mask: np.ndarray
    margin: float
    reference_ids: np.ndarray | None = None
    reference_mask: np.ndarray | None = None
    unsafe: tuple[bool, bool] | None = None  # the chosen one and the rejected one, of kind safety
    images: tuple[Image, ...] = ()  # of the prompt, as of the other items


@dataclass(frozen=True)
class Labelled:
    """One completion, and whether it is desirable."""

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    completion_mask: np.ndarray
    label: bool
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Stepwise:
    """Prompt and steps in one row: mask [n] is 1 at the last token of a step, labels [n] float32
    are in [-1, 1] there and 0 elsewhere."""

    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """One completion and its reward; process_scores [n] stand at the last tokens of steps and are 0
    elsewhere, logprobs [n] are the sampler's at mask 1. `truncated`: it has no end of its own."""

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    completion_mask: np.ndarray
    reward: float
    truncated: bool
    process_scores: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    images: tuple[Image, ...] = ()


def encode_rows(
    records: Sequence[dict],
    tokenizer: Tokenizer,
    kind: str,
    *,
    max_tokens: int,
    overlong: Literal["drop", "error", "left", "right"] = "drop",
    separator: str = "\n",
    ties: Literal["drop", "both_orders"] = "drop",
    images: ImageReader | None = None,
    turns: str = "auto",
) -> tuple[list, dict[str, int]]:
    """Items of one kind (the classes above, by `load_rows`'s kinds), and counts of rows kept,
    dropped and truncated.

    An item of more than `max_tokens` is dropped, an error, cut at its prompt's left end, or cut at
    its completion's right end; one with nothing left to learn is dropped. Pairs of equal
    completions are dropped. A tie is dropped, or stands in both orders, which is label smoothing of
    1/2 at twice the weight of one pair. `separator` stands between steps. `images`: how the model
    reads those of the rows. `turns`: of conversations, which turns make an example
    (rljax.data.online.prompts.encode_demonstration). Raises InputError for an unknown option, for a
    row that cannot be encoded (with its number), for rows too long with overlong="error", and if no
    row is left.
    """
    _check_options(kind, overlong, ties, max_tokens)
    counts = dict(total=len(records), kept=0) | _no_counts(kind)
    items, refused, how = [], [], (max_tokens, overlong, images, turns)
    for record in records:
        try:
            items += _encode(record, tokenizer, kind, separator, ties, *how, counts)
        except TooLong as error:  # all of them are counted before one error is raised
            refused.append(error)
        except InputError as error:
            raise in_row(record, error) from None
    require_none_too_long(refused, len(records))
    counts["kept"] = len(items)
    if not items:
        reason = REASONS[max(REASONS, key=lambda name: counts.get(name, 0))]
        raise InputError(
            f"none of {len(records)} rows is left",
            value={name: n for name, n in counts.items() if n},
            rule=reason.rule.format(max_tokens=max_tokens, overlong=overlong),
            fix=reason.fix,
        )
    return items, counts


def encode_row(
    record: dict, tokenizer: Tokenizer, kind: str, **options
) -> tuple[object | None, dict[str, int]]:
    """The item of one record, None if it is dropped, and what `encode_rows` counts of it. Options
    are those of `encode_rows` except `ties`: ties are dropped. Raises InputError, with the row, if
    it cannot be encoded, if it is too long with overlong="error", and if it makes several items."""
    counts = _no_counts(kind)
    separator, most = options["separator"], options["max_tokens"]
    try:
        how = most, options["overlong"], options.get("images"), options.get("turns", "auto")
        made = _encode(record, tokenizer, kind, separator, "drop", *how, counts)
    except TooLong:
        raise
    except InputError as error:
        raise in_row(record, error) from None
    return one_of_stream(record, made) if made else None, counts


def _no_counts(kind: str) -> dict[str, int]:
    counts = dict(dropped_overlong=0, dropped_empty=0, truncated=0)
    return counts | (dict(dropped_identical=0, dropped_tie=0) if kind in PAIRED else {})


def _check_options(kind: str, overlong: str, ties: str, max_tokens: int) -> None:
    known_of = (("kind", kind, KINDS), ("overlong", overlong, OVERLONG), ("ties", ties, TIES))
    for name, value, known in known_of:
        if value not in known:
            raise InputError(f"unknown {name!r}", value=value, fix=f"use one of {known}")
    require_positive("max_tokens", max_tokens)


def _encode(
    record, tokenizer, kind, separator, ties, max_tokens, overlong, reader, turns, counts
) -> list:
    """The items of one record: none where it is dropped, two where a tie stands in both orders,
    several where each turn of a conversation is an example."""
    if kind in PAIRED:
        if record["chosen"] == record["rejected"]:
            counts["dropped_identical"] += 1
            return []
        if record["tie"] and ties == "drop":
            counts["dropped_tie"] += 1
            return []
    record, tokenizer, images = with_image_tokens(record, tokenizer, reader)
    if kind == "examples":
        made = _examples(encode_demonstration(record, tokenizer, counts, turns))
    else:
        made = [_columns(record, tokenizer, kind, separator)]
    tokens = max((len(prompt) + _longest(columns) for prompt, columns in made), default=0)
    if overlong == "error" and tokens > max_tokens:
        raise TooLong(record, tokens, rule=f"max_tokens is {max_tokens}")
    items = []
    for prompt, columns in made:
        shown = images
        if reader is not None:
            if images and kind == "examples" and (len(made) > 1 or turns != "auto"):
                column = columns["all"]
                mask = [0] * len(prompt) + column["mask"]
                shown = reader.beginning([*prompt, *column["ids"]], mask, images)
            _check_images(prompt, columns, shown, kind, reader)
        fit = max_tokens, overlong, tokenizer.bos_id, reader
        items += _kept(record, kind, prompt, columns, shown, *fit, counts)
    return items


def _kept(
    record, kind, prompt, columns, images, max_tokens, overlong, bos_id, reader, counts
) -> list:
    """The items of encoded columns, within `max_tokens`; none where they are dropped."""
    fitted = _fit(prompt, columns, max_tokens, overlong, bos_id)
    if fitted is not None and images:
        fitted, images = _whole_images(fitted, images, kind, max_tokens, reader)
    if fitted is None:
        counts["dropped_overlong"] += 1
        return []
    prompt, columns, cut = fitted
    if not all(any(column["mask"]) for column in columns.values()):
        counts["dropped_empty"] += 1
        return []
    if kind in PAIRED and columns["chosen"]["ids"] == columns["rejected"]["ids"]:
        counts["dropped_identical"] += 1
        return []
    counts["truncated"] += cut != ""
    items = _items(record, kind, prompt, columns, cut)
    if not images:
        return items
    if kind == "examples":
        return [item.with_images(images) for item in items]
    return [dataclasses.replace(item, images=images) for item in items]


def _check_images(prompt, columns, images, kind: str, reader: ImageReader) -> None:
    """Raises InputError unless the images have their tokens: in the prompt, and of examples in
    later turns, too."""
    if kind == "examples":
        column = columns["all"]
        mask = [0] * len(prompt) + list(column["mask"])
        return reader.check([*prompt, *column["ids"]], mask, images)
    if kind != "stepwise":
        for column in columns.values():
            reader.check(column["ids"], column["mask"], ())
    reader.check(prompt, None, images)


def _whole_images(fitted, images, kind: str, max_tokens: int, reader: ImageReader):
    """Returns the result of _fit and the images in it. An example ends before an image that would
    be cut; a row whose prompt was cut is dropped."""
    prompt, columns, cut = fitted
    if cut == "left":
        return None, ()
    if not cut or kind != "examples":  # the prompt is whole
        return fitted, images
    ids, mask = [*prompt, *columns["all"]["ids"]], [0] * len(prompt) + columns["all"]["mask"]
    ids, mask, images = cut_example(ids, mask, images, max_tokens, reader)
    first = min(len(prompt), len(ids))
    rest = {"ids": ids[first:], "mask": mask[first:]}
    return (prompt[:first], {"all": rest}, cut), images


def _examples(encoded) -> list[tuple[list[int], dict[str, dict]]]:
    """Ids and masks of examples as prompt and columns: what comes before the first learned token
    is the prompt."""
    made = []
    for ids, mask in encoded:
        mask = [0, *mask[1:]]  # nothing precedes the first token, so nothing predicts it
        first = mask.index(1) if 1 in mask else len(mask)
        made.append((ids[:first], {"all": {"ids": ids[first:], "mask": mask[first:]}}))
    return made


def _columns(record, tokenizer, kind, separator) -> tuple[list[int], dict[str, dict]]:
    """The prompt's ids, and the columns of each completion: ids, mask, and the values that the
    data give."""
    if kind == "stepwise":
        prompt = _encode_prompt(record, tokenizer)
        return prompt, {"all": _encode_steps(record, prompt, tokenizer, separator)}
    if kind == "trajectories":
        prompt, columns = _encode_trajectory(record, tokenizer, separator)
        return prompt, {"completion": columns}
    names = [name for name in ("reference", "chosen", "rejected", "completion") if name in record]
    columns = {}
    for name in names:
        turns = _encode_answer(record, record[name], tokenizer)
        prompt, columns[name] = turns.prompt, {"ids": turns.ids, "mask": turns.mask}
    return prompt, columns


def _longest(columns) -> int:
    return max(len(column["ids"]) for column in columns.values())


def _fit(prompt, columns, max_tokens, overlong, bos_id):
    """(prompt, columns, which side was cut or "") within max_tokens; None where it is dropped."""
    longest = _longest(columns)
    if len(prompt) + longest <= max_tokens:
        return prompt, columns, ""
    if overlong == "left" and max_tokens > longest:
        return cut_ids(prompt, max_tokens - longest, "left", bos_id), columns, "left"
    if overlong != "right":  # no cut of the prompt makes room for the completion
        return None
    room = max(max_tokens - len(prompt), 0)
    cut = {
        name: {key: values[:room] for key, values in column.items()}
        for name, column in columns.items()
    }
    return prompt, cut, "right"


def _items(record, kind, prompt, columns, cut) -> list:
    before = np.array(prompt, np.int32)
    of = {
        name: {key: np.array(x, np.int32 if key == "ids" else np.float32) for key, x in one.items()}
        for name, one in columns.items()
    }
    if kind in ("examples", "stepwise"):
        items = of["all"]
        unlearned = np.zeros(len(before), np.float32)
        rest = {k: np.concatenate([unlearned, x]) for k, x in items.items() if k != "ids"}
        make = Example if kind == "examples" else Stepwise
        return [make(ids=np.concatenate([before, items["ids"]]), **rest)]
    if kind == "unpaired":
        completion = of["completion"]
        return [Labelled(before, completion["ids"], completion["mask"], record["label"])]
    if kind == "trajectories":
        completion = of["completion"]
        more = {key: completion.get(key) for key in ("process_scores", "logprobs")}
        truncated = record["truncated"] or cut == "right"
        own = completion["ids"], completion["mask"], record["reward"], truncated
        return [Trajectory(before, *own, **more)]
    reference = tuple(of["reference"].values()) if "reference" in of else ()
    chosen, rejected = tuple(of["chosen"].values()), tuple(of["rejected"].values())
    if kind == "safety":
        return [Pair(before, *chosen, *rejected, 0.0, unsafe=record["unsafe"])]
    pair = Pair(before, *chosen, *rejected, record["margin"], *reference)
    if not record["tie"]:
        return [pair]
    return [pair, Pair(before, *rejected, *chosen, -record["margin"], *reference)]


# -- text to ids --


def _encode_answer(
    record: dict, completion: str | list[dict], tokenizer: Tokenizer, *, ended: bool = True
) -> Turns:
    """The record's prompt and a completion to it; without `ended` no end token follows it."""
    if isinstance(record["prompt"], str):
        return _encode_text(record, completion, tokenizer, ended)
    messages = [*record["prompt"], *completion]
    first, options = len(record["prompt"]), options_of(record)
    if not ended and len(completion) == 1 and not completion[0].keys() - {"role", "content"}:
        return _as_sampled(record, completion[0]["content"], tokenizer)
    try:
        turns = encode_turns(tokenizer, messages, first, **options)
    except RewrittenTurn:  # several turns, as a rollout would have them
        turns = encode_log(tokenizer, messages, first, **options)
    ids, mask, offsets = list(turns.ids), list(turns.mask), list(turns.offsets)
    # What the template writes after the end token belongs to no turn, and nothing follows it here.
    while mask and not mask[-1]:
        ids.pop(), mask.pop(), offsets.pop()
    while ids and not ended and ids[-1] in tokenizer.eos_ids:
        ids.pop(), mask.pop(), offsets.pop()
    return turns._replace(ids=ids, mask=mask, offsets=offsets)


def _as_sampled(record: dict, text: str, tokenizer: Tokenizer) -> Turns:
    """The record's prompt and a turn that was cut: what the policy wrote behind the prompt, to the
    letter, as no template has finished it."""
    prompt = _encode_prompt(record, tokenizer)
    ids, offsets = encode_after(tokenizer, prompt[-1], text)
    return Turns(prompt, ids, [1] * len(ids), text, offsets)


def _encode_text(record: dict, completion: str, tokenizer: Tokenizer, ended: bool) -> Turns:
    prompt = _encode_prompt(record, tokenizer)
    whole = tokenizer.encode(record["prompt"] + completion, add_special_tokens=True)
    ids, offsets = tokenizer.encode_with_offsets(record["prompt"] + completion)
    n, before = len(whole) - len(prompt), len(record["prompt"])
    if whole[: len(prompt)] == prompt and ids[len(ids) - n :] == whole[len(prompt) :]:
        ids = ids[len(ids) - n :]
        offsets = [(max(a - before, 0), b - before) for a, b in offsets[len(offsets) - n :]]
    else:  # a token spans the border
        ids, offsets = tokenizer.encode_with_offsets(completion)
    if ended:
        ids = with_end_token(ids, tokenizer)
        offsets = [*offsets, (len(completion), len(completion))][: len(ids)]
    return Turns(prompt, ids, [1] * len(ids), completion, offsets)


def _encode_prompt(record: dict, tokenizer: Tokenizer) -> list[int]:
    if isinstance(record["prompt"], str):
        ids = tokenizer.encode(record["prompt"], add_special_tokens=True)
    else:
        ids = encode_prompt_messages(tokenizer, record["prompt"], **options_of(record))
    return at_least_bos(ids, tokenizer, record)


def _encode_steps(record: dict, prompt: list[int], tokenizer: Tokenizer, separator: str) -> dict:
    """Each step with the separator after it (the last one with the end token where the record is
    `ended`); its label stands at the last of these tokens."""
    columns = {"ids": [], "mask": [], "labels": []}
    last, count = prompt[-1], len(record["completions"])
    steps = zip(record["completions"], record["labels"], strict=True)
    for number, (step, label) in enumerate(steps, start=1):
        ids = encode_after(tokenizer, last, step)[0] if step else []
        if not ids and "ended" not in record:
            raise InputError("a step has no tokens", value=step, fix="join it with another step")
        if number == count and record.get("ended"):
            ids = with_end_token(ids, tokenizer, turn=not isinstance(record["prompt"], str))
        elif separator:
            ids = ids + encode_after(tokenizer, ids[-1] if ids else last, separator)[0]
        if not ids:  # a blank line, and nothing to tell it by
            raise InputError("a step has no tokens", value=step, fix="join it with another step")
        columns["ids"] += ids
        columns["mask"] += [0] * (len(ids) - 1) + [1]
        columns["labels"] += [0.0] * (len(ids) - 1) + [label]
        last = ids[-1]
    return columns


def _encode_trajectory(record: dict, tokenizer: Tokenizer, separator: str):
    """Prompt ids, and the completion's columns: ids, mask, process_scores, logprobs."""
    completion = record.get("completion")
    if completion is None:
        completion = separator.join(record["steps"])
    joined = completion
    if isinstance(completion, str) and not isinstance(record["prompt"], str):
        completion = [{"role": "assistant", "content": completion}]
    turns = _encode_answer(record, completion, tokenizer, ended=not record["truncated"])
    columns = {"ids": turns.ids, "mask": turns.mask}
    if "process_scores" in record:
        scores = [0.0] * len(turns.ids)
        ends = _step_ends(turns, record["steps"], joined, separator)
        for at, score in zip(ends, record["process_scores"], strict=True):
            scores[at] += score  # one token may end two steps
        columns["process_scores"] = scores
    if "logprobs" in record:
        columns["logprobs"] = _at_mask(record["logprobs"], turns.mask)
    return turns.prompt, columns


def _step_ends(turns: Turns, steps: list[str], joined: str, separator: str) -> list[int]:
    """The index of the last token of every step; the last step ends with the completion."""
    start = turns.text.find(joined.strip()) - (len(joined) - len(joined.lstrip()))
    ends, stop = [], start
    for step in steps[:-1]:
        stop += len(step)
        covering = [t for t, (a, b) in enumerate(turns.offsets) if a < stop <= b]
        if joined.strip() not in turns.text or not covering:
            raise InputError(
                "the chat template rewrites the completion",
                value=step,
                rule="the end of a step is looked for in what the template writes",
                fix="write the steps as the template does",
            )
        ends.append(covering[-1])
        stop += len(separator)
    return [*ends, len(turns.ids) - 1]


def _at_mask(values: list[float], mask: list[int]) -> list[float]:
    """The values at the tokens of mask 1, and 0 elsewhere."""
    if len(values) != sum(mask):
        raise InputError(
            f"'logprobs' has {len(values)} values for {sum(mask)} tokens",
            rule="one of each token of the completion, its end token included unless 'truncated'",
            fix="record the log-probabilities with this tokenizer, or drop the column",
        )
    remaining = iter(values)
    return [next(remaining) if chosen else 0.0 for chosen in mask]
