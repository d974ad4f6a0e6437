"""Records to token arrays: the prompts of a step [P, L], and supervised examples [B, S].

P prompts, L and S token positions, B rows. Rows are right-padded; lengths, segment ids and masks
mark the padding, never a token id. Limits and lengths are in tokens.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rljax.data.images.encode import Image, ImageLayout, ImageReader, cut_example, with_image_tokens
from rljax.data.rows.columns import prompt_columns, rendering_of
from rljax.data.text.chat import (
    RewrittenTurn,
    answered_turns,
    encode_conversation,
    encode_turns,
    prompt_text,
)
from rljax.data.text.messages import LEARN
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError

OVERLONG = ("drop", "error", "left", "right")
TURNS = ("auto", "each", "last")
SPLIT = "split_conversations"  # a count: conversations of which each turn is an example of its own
UNASKED = "unasked_turns"  # a count: turns before the first question, which are read only


def _joined_images(first: dict | None, second: dict | None) -> dict | None:
    """Returns the images of both, padded to the same number of patches."""
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise InputError(
            "prompts with images and prompts without cannot be joined",
            fix="give the others empty images: rljax.data.images.rows.prompt_images",
        )
    patches = max(x["pixels"].shape[1] for x in (first, second))

    def padded(x, name):
        if name not in ("pixels", "patch_coords"):
            return x[name]
        return np.pad(x[name], [(0, 0), (0, patches - x[name].shape[1]), (0, 0)])

    return {name: np.concatenate([padded(first, name), padded(second, name)]) for name in first}


@dataclass(frozen=True, eq=False)
class PromptRecord:
    """One encoded prompt, with the columns of its row that a reward may read."""

    prompt_text: str  # as the policy reads it, rendered by the chat template
    token_ids: np.ndarray  # [n] int32
    ground_truth: str
    data_source: str
    extra_info: dict  # further columns of the row: tools, rubrics, target_tokens, ...
    index: int  # of the row in its file or task
    messages: tuple[dict, ...] | None = None  # the conversation, where the prompt was one
    prompt_id: int | None = None  # unique over all sources of a run; None: not of its training data
    source: str = ""  # the entry of data.train and data.sources, where several are mixed
    images: tuple[Image, ...] = ()  # of the prompt, in the order of its text

    @property
    def prompt(self) -> str | list[dict]:
        """Returns the prompt as its row has it: text or a list of messages."""
        return self.prompt_text if self.messages is None else list(self.messages)

    @property
    def columns(self) -> dict:
        """Returns the columns of a row with this prompt: prompt, and tools and variables of the
        chat template where there are some."""
        return prompt_columns({**self.extra_info, "prompt": self.prompt})


@dataclass(frozen=True)
class Prompts:
    """The prompts of one step: `tokens` [P, L] and `lengths` [P] int32, one record each.

    `starts` [P]: the column at which the response that is scored begins; None: at `lengths`. It is
    less than the length where the prompt is continued from a part of a response. `images` are those
    of the prompts (rljax.data.images.rows.prompt_images), None for text alone.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    records: tuple[PromptRecord, ...]
    starts: np.ndarray | None = None
    images: dict[str, np.ndarray] | None = None

    @property
    def response_starts(self) -> np.ndarray:
        """Returns the column at which each scored response begins: [P]."""
        return self.lengths if self.starts is None else self.starts

    def joined(self, other: "Prompts") -> "Prompts":
        """Returns these prompts, then the others."""
        begin_at_lengths = self.starts is None and other.starts is None
        return Prompts(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.lengths, other.lengths]),
            self.records + other.records,
            None
            if begin_at_lengths
            else np.concatenate([self.response_starts, other.response_starts]),
            _joined_images(self.images, other.images),
        )

    def select(self, rows: Sequence[int]) -> "Prompts":
        """Returns the prompts at these indices [p], in this order."""
        rows = np.asarray(rows, np.int32)
        return Prompts(
            self.tokens[rows],
            self.lengths[rows],
            tuple(self.records[i] for i in rows),
            None if self.starts is None else self.starts[rows],
            None if self.images is None else {k: v[rows] for k, v in self.images.items()},
        )

    @classmethod
    def from_records(
        cls, records: Sequence[PromptRecord], *, length: int, images: ImageLayout | None = None
    ) -> "Prompts":
        """Pads the prompts to `length` tokens, which is chosen once for a run: every new length is
        a new compile. So is `images`, the layout of the images of a run whose data have some.
        Raises InputError for a longer prompt, and for a prompt with images without a layout."""
        tokens = np.zeros((len(records), length), np.int32)
        lengths = np.array([len(record.token_ids) for record in records], np.int32)
        for row, record in enumerate(records):
            if lengths[row] > length:
                raise InputError(
                    f"the prompt of row {record.index} has {lengths[row]} tokens",
                    rule=f"prompts are padded to {length} tokens",
                    fix="encode the prompts with max_prompt_tokens of at most that length",
                )
            tokens[row, : lengths[row]] = record.token_ids
        images_of_records = [record.images for record in records]
        if images is None and any(images_of_records):
            raise InputError(
                f"the prompt of row {next(r.index for r in records if r.images)} has images",
                rule="none of the rows has that a run looks at before it begins",
                fix="put a row with images among the first ones of a stream",
            )
        image_arrays = (
            None if images is None else images.prompts(tokens, lengths, images_of_records)
        )
        return cls(tokens, lengths, tuple(records), images=image_arrays)


def encode_prompts(
    records: Sequence[dict],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    overlong: str = "drop",
    images: ImageReader | None = None,
) -> tuple[list[PromptRecord], dict[str, int]]:
    """Returns encoded prompts, and the numbers of those kept, dropped and truncated.

    A prompt of more than `max_prompt_tokens` is dropped, an error, or cut at its left or right end.
    `images` reads the images of the rows. Raises InputError for a row that cannot be
    encoded, for prompts too long with overlong="error", and if no prompt is left.
    """
    encoded, counts = [], dict(total=len(records), kept=0, dropped_overlong=0, truncated=0)
    options = dict(max_prompt_tokens=max_prompt_tokens, overlong=overlong, images=images)
    refused = []
    for record in records:
        try:
            prompt, cut = encode_prompt(record, tokenizer, **options)
        except TooLong as error:  # all of them are counted before one error is raised
            refused.append(error)
            continue
        counts["truncated"] += cut
        if prompt is None:
            counts["dropped_overlong"] += 1
        else:
            encoded.append(prompt)
    require_none_too_long(refused, len(records))
    counts["kept"] = len(encoded)
    if not encoded:
        raise InputError(
            f"no prompt is left: all {len(records)} are longer than {max_prompt_tokens} tokens",
            fix="raise max_prompt_tokens (of a run: data.max_prompt_tokens), or truncate with "
            "overlong='left'",
        )
    return encoded, counts


def encode_prompt(
    record: dict,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    overlong: str = "drop",
    images: ImageReader | None = None,
) -> tuple[PromptRecord | None, bool]:
    """Returns (one prompt as `encode_prompts` makes it, None if it is dropped; True if it was cut).
    `record` is a row of rljax.data.rows.sources.load_prompts.

    Raises InputError for an unknown `overlong`, for a prompt that cannot be encoded, and for one
    that is too long with overlong="error", or that has images and would have to be cut.
    """
    if overlong not in OVERLONG:
        raise InputError("unknown 'overlong'", value=overlong, fix=f"use one of {OVERLONG}")
    require_positive("max_prompt_tokens", max_prompt_tokens)
    text, ids, opened = _encode_prompt(record, tokenizer, images)
    cut = len(ids) > max_prompt_tokens
    if cut and overlong == "error":
        raise TooLong(record, len(ids), rule=f"max_prompt_tokens is {max_prompt_tokens}")
    if cut and overlong == "drop":
        return None, False
    if cut and opened:
        rule = f"max_prompt_tokens is {max_prompt_tokens}, and a prompt with images is not cut"
        raise TooLong(record, len(ids), rule=rule, other_fix="a smaller data.max_image_pixels")
    if cut:
        ids = cut_ids(ids, max_prompt_tokens, overlong, tokenizer.bos_id)
    columns = {n: value for n, value in record.items() if n not in ("prompt", "images")}
    messages = None if isinstance(record["prompt"], str) else tuple(record["prompt"])
    ids = np.array(ids, np.int32)
    prompt = PromptRecord(
        prompt_text=text, token_ids=ids, messages=messages, images=opened, **columns
    )
    return prompt, cut


def _encode_prompt(
    record: dict, tokenizer: Tokenizer, reader: ImageReader | None
) -> tuple[str, list[int], tuple[Image, ...]]:
    """Returns text, ids and images of one prompt, at least one id: the first response token needs a
    position."""
    try:
        record, tokenizer, images = with_image_tokens(record, tokenizer, reader)
        prompt = record["prompt"]
        if isinstance(prompt, str):
            text, ids = prompt, tokenizer.encode(prompt, add_special_tokens=True)
        else:
            options = rendering_of(record["extra_info"], f"row {record['index']}")
            text = prompt_text(tokenizer, prompt, **options)
            ids = tokenizer.encode(text)
        if reader is not None:
            reader.check(ids, None, images)
            text = reader.shown(text)
    except InputError as error:
        raise in_row(record, error) from None
    return text, at_least_bos(ids, tokenizer, record), images


def at_least_bos(ids: list[int], tokenizer: Tokenizer, record: dict) -> list[int]:
    """Returns the ids, or the BOS token if they are empty. Raises InputError if there is no BOS
    either."""
    if ids:
        return ids
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id]
    raise InputError(
        f"the prompt of row {record['index']} has no tokens",
        value=record["prompt"],
        rule="the first response token must follow something, and this tokenizer has no BOS",
        fix="remove the row or give it a prompt",
    )


def in_row(record: dict, error: InputError) -> InputError:
    """Returns the error with the row that it is about."""
    return error.within(f"row {record['index']} cannot be encoded: ")


class TooLong(InputError):
    """The error of one row that has more `tokens` than the limit and cannot be dropped or cut."""

    def __init__(self, record: dict, tokens: int, *, rule: str, other_fix: str = "shorter rows"):
        self.row, self.tokens, self.rule = record["index"], tokens, rule
        self.other_fix = other_fix
        problem, fix = f"row {self.row} is too long: {tokens} tokens", self.fix(tokens)
        super().__init__(problem, rule=rule, fix=fix)

    def fix(self, tokens: int) -> str:
        """Returns the fix to suggest if the longest row has `tokens` tokens."""
        return f"a limit of {tokens}, {self.other_fix}, or overlong='drop'"


def require_none_too_long(refused: Sequence[TooLong], total: int) -> None:
    """Raises one InputError for all rows that were refused, of `total`; the first few are named."""
    if not refused:
        return
    if len(refused) == 1:
        raise refused[0]
    examples = ", ".join(f"row {error.row} has {error.tokens} tokens" for error in refused[:3])
    ellipsis = ", ..." if len(refused) > 3 else ""
    longest = max(refused, key=lambda error: error.tokens)
    raise InputError(
        f"{len(refused)} of {total} rows are too long: {examples}{ellipsis}; the longest is row "
        f"{longest.row} with {longest.tokens}",
        rule=longest.rule,
        fix=longest.fix(longest.tokens),
    )


def cut_ids(ids: list[int], limit: int, side: str, bos_id: int | None) -> list[int]:
    """Returns the ids cut to `limit` tokens at their `side`, left or right; a leading BOS survives
    a cut on the left."""
    if side == "right":
        return ids[:limit]
    if bos_id is not None and ids[0] == bos_id:
        return [bos_id, *ids[len(ids) - limit + 1 :]]
    return ids[len(ids) - limit :]


class _ExamplePair(NamedTuple):
    ids: np.ndarray
    mask: np.ndarray


class Example(_ExamplePair):
    """A supervised example, the pair of ids [n] int32 and mask [n] float32, 1 on learned tokens;
    `images` are those of its text."""

    images: tuple[Image, ...] = ()

    def with_images(self, images: tuple[Image, ...]) -> "Example":
        """Returns the same example with these images."""
        example = Example(*self)
        example.images = images
        return example


def encode_demonstrations(
    records: Sequence[dict],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    images: ImageReader | None = None,
    turns: str = "auto",
) -> tuple[list[Example], dict[str, int]]:
    """Returns supervised records as examples, and counts.

    The mask is 1 on completion or assistant tokens and the end token after them; `text` is learned
    whole. Longer examples are cut on the right; one with nothing left to learn is dropped. `turns`
    is that of encode_demonstration. Raises InputError for a record that cannot be encoded, and if
    no example is left.
    """
    require_positive("max_tokens", max_tokens)
    examples, counts = [], collections.Counter(total=len(records), dropped_empty=0, truncated=0)
    options = dict(max_tokens=max_tokens, images=images, turns=turns)
    for record in records:
        for example, tokens in encode_examples(record, tokenizer, counts, **options):
            counts["truncated"] += tokens > max_tokens
            if example is None:
                counts["dropped_empty"] += 1
            else:
                examples.append(example)
    counts["kept"] = len(examples)
    if not examples:
        raise InputError(
            f"no demonstration is left of {len(records)}",
            rule=f"none has a token to learn within max_tokens={max_tokens}",
            fix="raise max_tokens (of a run: sft.max_tokens, or pretraining.max_tokens)"
            if counts["truncated"]
            else "write what the assistant answers into each row",
        )
    return examples, dict(counts)


def encode_examples(
    record: dict,
    tokenizer: Tokenizer,
    counts: dict[str, int],
    *,
    max_tokens: int,
    images: ImageReader | None = None,
    turns: str = "auto",
) -> list[tuple[Example | None, int]]:
    """Returns the examples of a supervised record, each with its number of tokens before the cut;
    None instead of an example with nothing left to learn. `counts` grows by the counts of
    encode_demonstration. Raises InputError, with the row, if the record cannot be encoded."""
    try:
        with_tokens, image_tokenizer, all_images = with_image_tokens(record, tokenizer, images)
        encoded = encode_demonstration(with_tokens, image_tokenizer, counts, turns)
        examples = []
        for ids, mask in encoded:
            tokens, example_images = len(ids), all_images
            if images is not None:
                # Otherwise the example is the whole conversation.
                if all_images and (len(encoded) > 1 or turns != "auto"):
                    example_images = images.beginning(ids, mask, all_images)
                images.check(ids, mask, example_images)
            if example_images:
                ids, mask, example_images = cut_example(
                    ids, mask, example_images, max_tokens, images
                )
            ids = np.array(ids[:max_tokens], np.int32)
            mask = np.array(mask[:max_tokens], np.float32)
            mask[:1] = 0  # nothing precedes the first token, so nothing predicts it
            example = Example(ids, mask).with_images(example_images) if mask.any() else None
            examples.append((example, tokens))
    except InputError as error:
        raise in_row(record, error) from None
    return examples


def encode_example(
    record: dict,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    images: ImageReader | None = None,
    turns: str = "auto",
) -> tuple[Example | None, dict[str, int]]:
    """Returns the example of a record of a stream, which has one item for each row, and the counts
    of encode_demonstrations; None if nothing is left to learn of it. Raises InputError, with the
    row, if it cannot be encoded or makes several examples."""
    counts, options = collections.Counter(), dict(max_tokens=max_tokens, images=images, turns=turns)
    examples = encode_examples(record, tokenizer, counts, **options)
    example, tokens = one_of_stream(record, examples)
    counts.update(truncated=int(tokens > max_tokens), dropped_empty=int(example is None))
    return example, counts


def one_of_stream(record: dict, examples: list):
    """Returns the only item of a record. Raises InputError if there are several: an item of a
    stream is a function of the number of its row."""
    if len(examples) == 1:
        return examples[0]
    raise InputError(
        f"row {record['index']} makes {len(examples)} examples, one of each turn",
        rule="with data.stream a row is one example",
        fix="data.turns='last', or data.stream=False",
    )


def encode_demonstration(
    record: dict, tokenizer: Tokenizer, counts: dict[str, int], turns: str = "auto"
) -> list[tuple[list[int], list[int]]]:
    """Returns (token ids [n], mask [n]) of the examples of one supervised record; mask 1 = learned.

    A conversation is one example in which every turn of the assistant is learned; "each" makes an
    example of each turn, rendered as it is when the policy is asked for it, "last" one of the last
    turn. "auto" makes one where the chat template renders earlier turns as the policy wrote them,
    and else one of each turn. `counts` gets the number of conversations that were split, and of
    turns that are read only, because they stand before the first question. Raises InputError for
    unknown `turns`, and for a conversation that the chat template cannot render.
    """
    if turns not in TURNS:
        raise InputError("unknown 'turns'", value=turns, fix=f"use one of {TURNS}")
    if "messages" in record:
        return _encode_messages(record, tokenizer, counts, turns)
    if "text" in record:
        ids = with_end_token(tokenizer.encode(record["text"], add_special_tokens=True), tokenizer)
        return [(ids, [1] * len(ids))]
    prompt = tokenizer.encode(record["prompt"], add_special_tokens=True)
    prompt = at_least_bos(prompt, tokenizer, record)
    ids = tokenizer.encode(record["prompt"] + record["completion"], add_special_tokens=True)
    if ids[: len(prompt)] != prompt:
        # A token spans the border. When sampling, the prompt is encoded alone, so it is here too.
        ids = prompt + tokenizer.encode(record["completion"])
    ids = with_end_token(ids, tokenizer)
    return [(ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt)))]


def _encode_messages(record, tokenizer, counts, turns) -> list[tuple[list[int], list[int]]]:
    messages, options = record["messages"], options_of(record)
    first = record.get("prompt_messages", 0)
    answered, unanswered = answered_turns(tokenizer, messages, first, options)
    if not answered:
        raise InputError(
            "no turn of the assistant is learned",
            value=[(m["role"], m.get(LEARN, True)) for m in messages if m["role"] == "assistant"],
            rule="each is marked as context, or stands before the first question",
            fix="remove the row, or correct its weights",
        )
    if unanswered:
        counts[UNASKED] = counts.get(UNASKED, 0) + len(unanswered)

    def encode_learned(learned: list[int]):
        if first:
            log = encode_turns(tokenizer, messages[: learned[-1] + 1], first, learned, **options)
            return log.prompt + log.ids, [0] * len(log.prompt) + log.mask
        return encode_conversation(tokenizer, messages, learned, **options)

    if turns == "auto":
        try:
            return [encode_learned(answered)]
        except RewrittenTurn:
            if len(answered) > 1 or answered[-1] != len(messages) - 1:
                counts[SPLIT] = counts.get(SPLIT, 0) + 1
    examples = []
    for k in answered[-1:] if turns == "last" else answered:
        continues = bool(first) and k == first  # a prefill is continued by the first message
        turn = encode_turns(tokenizer, messages[: k + 1], k, [k], continues=continues, **options)
        examples.append((turn.prompt + turn.ids, [0] * len(turn.prompt) + turn.mask))
    return examples


def options_of(record: dict) -> dict:
    """Returns the options by which the chat template renders a supervised record: tools and
    variables."""
    return {name: record[name] for name in ("tools", "variables") if name in record}


def with_end_token(ids: list[int], tokenizer: Tokenizer, *, turn: bool = False) -> list[int]:
    """Returns the ids with an end token, unless the text itself wrote one; of a `turn` in a
    conversation the one that the chat template writes."""
    if ids and ids[-1] in tokenizer.eos_ids:
        return ids
    return [*ids, tokenizer.end_of_turn_id if turn else tokenizer.eos_ids[0]]


def blank_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns rows without a token: tokens, mask, segment_ids, positions [rows, length]."""
    names = ("tokens", "mask", "segment_ids", "positions")
    dtypes = {name: np.float32 if name == "mask" else np.int32 for name in names}
    return {name: np.zeros((rows, length), dtype) for name, dtype in dtypes.items()}


def pad_examples(
    examples: Sequence[Example], *, length: int, images: ImageLayout | None = None
) -> dict[str, np.ndarray]:
    """Returns one example per row: tokens, segment_ids, positions [B, S] int32 and mask [B, S]
    float32, S = `length`; with `images`, also the arrays of `ImageLayout.rows`. Raises InputError
    for an example of more than `length` tokens."""
    batch = blank_rows(len(examples), length)
    for row, (ids, mask) in enumerate(examples):
        n = len(ids)
        if n > length:
            raise InputError(
                f"a demonstration has {n} tokens",
                rule=f"rows are {length} tokens long",
                fix="encode the examples with max_tokens of at most that length",
            )
        batch["tokens"][row, :n] = ids
        batch["mask"][row, :n] = mask
        batch["segment_ids"][row, :n] = 1
        batch["positions"][row, :n] = np.arange(n)
    if images is not None:
        batch |= images.rows(batch, [example.images for example in examples])
    return batch


def require_positive(name: str, value: object) -> None:
    """Raises InputError unless the value is a positive whole number."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        fix = f"set {name} to 1 or more"
        raise InputError(f"{name} must be a positive number of tokens", value=value, fix=fix)
