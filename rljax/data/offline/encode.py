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
    TURNS,
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
    learned_turns,
)
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError

TIES = ("drop", "both_orders")
TURNS_OF_A_COMPLETION = ("auto", "last")  # it is judged as a whole: no example for each turn
# What cuts rows that are too long under this value of overlong: completions without room for a
# prompt, which "left" cuts, are cut by "right" alone.
_CUTS = {
    "drop": ", or cut prompts with overlong='left', completions with overlong='right'",
    "left": ", or cut the completions with overlong='right'",
}


@dataclass(frozen=True)
class Pair:
    """Ids [n] int32 and masks [n] float32 of completions to one prompt. `margin` is the amount by
    which the chosen one is better. The reference completion is the one of TPO."""

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
    """Returns items of one kind (the classes above, by `load_rows`'s kinds), and counts of rows
    kept, dropped and truncated.

    An item of more than `max_tokens` is dropped, an error, cut at its prompt's left end, or cut at
    its completion's right end; one with nothing left to learn is dropped. Pairs of equal
    completions are dropped. A tie is dropped, or stands in both orders, which is label smoothing of
    1/2 at twice the weight of one pair. `separator` stands between steps. `images` reads the images
    of the rows. `turns` chooses the turns of a conversation that make an example
    (rljax.data.online.prompts.encode_demonstration); of a completion of other kinds, which is one
    example, "last" learns the last turn alone, and "each" is an error. Raises InputError for an
    unknown option, for a row that cannot be encoded (with its number), for rows too long with
    overlong="error", and if no row is left.
    """
    _check_options(kind, overlong, ties, turns, max_tokens)
    counts = dict(total=len(records), kept=0) | _no_counts(kind)
    items, refused, settings = [], [], (max_tokens, overlong, images, turns)
    for record in records:
        try:
            items += _encode(record, tokenizer, kind, separator, ties, *settings, counts)
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
            fix=reason.fix.format(cut=_CUTS.get(overlong, "")),
        )
    return items, counts


def encode_row(
    record: dict, tokenizer: Tokenizer, kind: str, **options
) -> tuple[object | None, dict[str, int]]:
    """Returns the item of one record, None if it is dropped, and the counts of `encode_rows` for
    it. Options are those of `encode_rows` except `ties`: ties are dropped. Raises InputError, with
    the row, if it cannot be encoded, if it is too long with overlong="error", and if it makes
    several items."""
    counts = _no_counts(kind)
    separator, max_tokens = options["separator"], options["max_tokens"]
    try:
        settings = (
            max_tokens,
            options["overlong"],
            options.get("images"),
            options.get("turns", "auto"),
        )
        items = _encode(record, tokenizer, kind, separator, "drop", *settings, counts)
    except TooLong:
        raise
    except InputError as error:
        raise in_row(record, error) from None
    return one_of_stream(record, items) if items else None, counts


def _no_counts(kind: str) -> dict[str, int]:
    counts = dict(dropped_overlong=0, dropped_empty=0, truncated=0)
    return counts | (dict(dropped_identical=0, dropped_tie=0) if kind in PAIRED else {})


def _check_options(kind: str, overlong: str, ties: str, turns: str, max_tokens: int) -> None:
    checks = (("kind", kind, KINDS), ("overlong", overlong, OVERLONG), ("ties", ties, TIES))
    checks += (("turns", turns, TURNS if kind == "examples" else TURNS_OF_A_COMPLETION),)
    for name, value, allowed in checks:
        if value not in allowed:
            raise InputError(f"unknown {name!r}", value=value, fix=f"use one of {allowed}")
    require_positive("max_tokens", max_tokens)


def _encode(
    record, tokenizer, kind, separator, ties, max_tokens, overlong, reader, turns, counts
) -> list:
    """Returns the items of one record: none where it is dropped, two where a tie stands in both
    orders, several where each turn of a conversation is an example."""
    if kind in PAIRED:
        if record["chosen"] == record["rejected"]:
            counts["dropped_identical"] += 1
            return []
        if record["tie"] and ties == "drop":
            counts["dropped_tie"] += 1
            return []
    record, tokenizer, images = with_image_tokens(record, tokenizer, reader)
    if kind == "examples":
        encoded = _examples(encode_demonstration(record, tokenizer, counts, turns))
    else:
        encoded = [_encode_columns(record, tokenizer, kind, separator, turns)]
    tokens = max((len(prompt) + _longest(columns) for prompt, columns in encoded), default=0)
    if overlong == "error" and tokens > max_tokens:
        raise TooLong(record, tokens, rule=f"max_tokens is {max_tokens}")
    items = []
    for prompt, columns in encoded:
        row_images = images
        if reader is not None:
            if images and kind == "examples" and (len(encoded) > 1 or turns != "auto"):
                column = columns["all"]
                mask = [0] * len(prompt) + column["mask"]
                row_images = reader.beginning([*prompt, *column["ids"]], mask, images)
            _check_images(prompt, columns, row_images, kind, reader)
        limits = max_tokens, overlong, tokenizer.bos_id, reader
        items += _items_within_limit(record, kind, prompt, columns, row_images, *limits, counts)
    return items


def _items_within_limit(
    record, kind, prompt, columns, images, max_tokens, overlong, bos_id, reader, counts
) -> list:
    """Returns the items of encoded columns, within `max_tokens`; none where they are dropped."""
    cut_columns = _cut_to_limit(prompt, columns, max_tokens, overlong, bos_id)
    if cut_columns is not None and images:
        cut_columns, images = _with_whole_images(cut_columns, images, kind, max_tokens, reader)
    if cut_columns is None:
        counts["dropped_overlong"] += 1
        return []
    prompt, columns, cut = cut_columns
    if not all(any(column["mask"]) for column in columns.values()):
        counts["dropped_empty"] += 1
        return []
    if kind in PAIRED and columns["chosen"]["ids"] == columns["rejected"]["ids"]:
        counts["dropped_identical"] += 1
        return []
    counts["truncated"] += cut != ""
    items = _items_of_columns(record, kind, prompt, columns, cut)
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


def _with_whole_images(cut_columns, images, kind: str, max_tokens: int, reader: ImageReader):
    """Returns the result of _cut_to_limit and the images in it. An example ends before an image
    that would be cut; a row whose prompt was cut is dropped."""
    prompt, columns, cut = cut_columns
    if cut == "left":
        return None, ()
    if not cut or kind != "examples":  # the prompt is whole
        return cut_columns, images
    ids, mask = [*prompt, *columns["all"]["ids"]], [0] * len(prompt) + columns["all"]["mask"]
    ids, mask, images = cut_example(ids, mask, images, max_tokens, reader)
    first = min(len(prompt), len(ids))
    column = {"ids": ids[first:], "mask": mask[first:]}
    return (prompt[:first], {"all": column}, cut), images


def _examples(encoded) -> list[tuple[list[int], dict[str, dict]]]:
    """Returns ids and masks of examples as prompt and columns: the tokens before the first learned
    one are the prompt."""
    examples = []
    for ids, mask in encoded:
        mask = [0, *mask[1:]]  # nothing precedes the first token, so nothing predicts it
        first = mask.index(1) if 1 in mask else len(mask)
        examples.append((ids[:first], {"all": {"ids": ids[first:], "mask": mask[first:]}}))
    return examples


def _encode_columns(record, tokenizer, kind, separator, turns) -> tuple[list[int], dict[str, dict]]:
    """Returns the prompt's ids, and the columns of each completion: ids, mask, and the values that
    the data give."""
    if kind == "stepwise":
        prompt = _encode_prompt(record, tokenizer)
        return prompt, {"all": _encode_steps(record, prompt, tokenizer, separator)}
    if kind == "trajectories":
        prompt, columns = _encode_trajectory(record, tokenizer, separator, turns)
        return prompt, {"completion": columns}
    names = [name for name in ("reference", "chosen", "rejected", "completion") if name in record]
    columns = {}
    for name in names:
        encoded = _encode_answer(record, record[name], tokenizer, turns)
        prompt, columns[name] = encoded.prompt, {"ids": encoded.ids, "mask": encoded.mask}
    return prompt, columns


def _longest(columns) -> int:
    return max(len(column["ids"]) for column in columns.values())


def _cut_to_limit(prompt, columns, max_tokens, overlong, bos_id):
    """Returns (prompt, columns, the side that was cut or "") within max_tokens; None where the row
    is dropped."""
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


def _items_of_columns(record, kind, prompt, columns, cut_side) -> list:
    prompt_ids = np.array(prompt, np.int32)
    arrays = {
        name: {
            key: np.array(x, np.int32 if key == "ids" else np.float32) for key, x in column.items()
        }
        for name, column in columns.items()
    }
    if kind in ("examples", "stepwise"):
        example = arrays["all"]
        unlearned = np.zeros(len(prompt_ids), np.float32)
        values = {k: np.concatenate([unlearned, x]) for k, x in example.items() if k != "ids"}
        make = Example if kind == "examples" else Stepwise
        return [make(ids=np.concatenate([prompt_ids, example["ids"]]), **values)]
    if kind == "unpaired":
        completion = arrays["completion"]
        return [Labelled(prompt_ids, completion["ids"], completion["mask"], record["label"])]
    if kind == "trajectories":
        completion = arrays["completion"]
        optional = {key: completion.get(key) for key in ("process_scores", "logprobs")}
        truncated = record["truncated"] or cut_side == "right"
        values = completion["ids"], completion["mask"], record["reward"], truncated
        return [Trajectory(prompt_ids, *values, **optional)]
    reference = tuple(arrays["reference"].values()) if "reference" in arrays else ()
    chosen, rejected = tuple(arrays["chosen"].values()), tuple(arrays["rejected"].values())
    if kind == "safety":
        return [Pair(prompt_ids, *chosen, *rejected, 0.0, unsafe=record["unsafe"])]
    pair = Pair(prompt_ids, *chosen, *rejected, record["margin"], *reference)
    if not record["tie"]:
        return [pair]
    return [pair, Pair(prompt_ids, *rejected, *chosen, -record["margin"], *reference)]


# -- text to ids --


def _encode_answer(
    record: dict,
    completion: str | list[dict],
    tokenizer: Tokenizer,
    turns: str,
    *,
    ended: bool = True,
) -> Turns:
    """Encodes the record's prompt and a completion to it, of which `turns` "last" learns the last
    turn alone; without `ended` no end token follows it."""
    if isinstance(record["prompt"], str):
        return _encode_text(record, completion, tokenizer, ended)
    messages = [*record["prompt"], *completion]
    first, options = len(record["prompt"]), options_of(record)
    if not ended and len(completion) == 1 and not completion[0].keys() - {"role", "content"}:
        return _encode_cut_turn(record, completion[0]["content"], tokenizer)
    learned = [k for k in learned_turns(messages) if k >= first]
    learned = learned[-1:] if turns == "last" else learned
    try:
        encoded = encode_turns(tokenizer, messages, first, learned, **options)
    except RewrittenTurn:  # several turns, as a rollout would have them
        encoded = encode_log(tokenizer, messages, first, learned, **options)
    ids, mask, offsets = list(encoded.ids), list(encoded.mask), list(encoded.offsets)
    # Tokens of the template after the end token belong to no turn, and nothing follows them here.
    while mask and not mask[-1]:
        ids.pop(), mask.pop(), offsets.pop()
    while ids and not ended and ids[-1] in tokenizer.eos_ids:
        ids.pop(), mask.pop(), offsets.pop()
    return encoded._replace(ids=ids, mask=mask, offsets=offsets)


def _encode_cut_turn(record: dict, text: str, tokenizer: Tokenizer) -> Turns:
    """Encodes the record's prompt and a turn that was cut: the text that the policy wrote behind
    the prompt, to the letter, as no template has finished it."""
    prompt = _encode_prompt(record, tokenizer)
    ids, offsets = encode_after(tokenizer, prompt[-1], text)
    return Turns(prompt, ids, [1] * len(ids), text, offsets)


def _encode_text(record: dict, completion: str, tokenizer: Tokenizer, ended: bool) -> Turns:
    prompt = _encode_prompt(record, tokenizer)
    all_ids = tokenizer.encode(record["prompt"] + completion, add_special_tokens=True)
    ids, offsets = tokenizer.encode_with_offsets(record["prompt"] + completion)
    count, prompt_characters = len(all_ids) - len(prompt), len(record["prompt"])
    if all_ids[: len(prompt)] == prompt and ids[len(ids) - count :] == all_ids[len(prompt) :]:
        ids = ids[len(ids) - count :]
        offsets = [
            (max(a - prompt_characters, 0), b - prompt_characters)
            for a, b in offsets[len(offsets) - count :]
        ]
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
    """Encodes each step with the separator after it (the last one with the end token where the
    record is `ended`); its label stands at the last of these tokens."""
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


def _encode_trajectory(record: dict, tokenizer: Tokenizer, separator: str, turns: str):
    """Returns prompt ids, and the completion's columns: ids, mask, process_scores, logprobs."""
    completion = record.get("completion")
    if completion is None:
        completion = separator.join(record["steps"])
    text = completion
    if isinstance(completion, str) and not isinstance(record["prompt"], str):
        completion = [{"role": "assistant", "content": completion}]
    encoded = _encode_answer(record, completion, tokenizer, turns, ended=not record["truncated"])
    columns = {"ids": encoded.ids, "mask": encoded.mask}
    if "process_scores" in record:
        scores = [0.0] * len(encoded.ids)
        ends = _step_ends(encoded, record["steps"], text, separator)
        for position, score in zip(ends, record["process_scores"], strict=True):
            scores[position] += score  # one token may end two steps
        columns["process_scores"] = scores
    if "logprobs" in record:
        columns["logprobs"] = _at_mask(record["logprobs"], encoded.mask)
    return encoded.prompt, columns


def _step_ends(turns: Turns, steps: list[str], text: str, separator: str) -> list[int]:
    """Returns the index of the last token of every step; the last step ends with the completion."""
    start = turns.text.find(text.strip()) - (len(text) - len(text.lstrip()))
    ends, stop = [], start
    for step in steps[:-1]:
        stop += len(step)
        covering = [t for t, (a, b) in enumerate(turns.offsets) if a < stop <= b]
        if text.strip() not in turns.text or not covering:
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
    """Returns the values at the tokens of mask 1, and 0 elsewhere."""
    if len(values) != sum(mask):
        raise InputError(
            f"'logprobs' has {len(values)} values for {sum(mask)} tokens",
            rule="one of each learned token of the completion (data.turns='last' learns its last"
            " turn alone), its end token included unless 'truncated'",
            fix="record the log-probabilities with this tokenizer, or drop the column",
        )
    remaining = iter(values)
    return [next(remaining) if chosen else 0.0 for chosen in mask]
