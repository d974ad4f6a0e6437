"""DeviceScorer: the reward of a config as a function of arrays, made by its forms for the device.

Axes: P prompts, R responses, S tokens of a response, V vocabulary entries, W bytes of a token,
N bytes of a text.
"""

import importlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.components import Component, resolve
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.reasoning import MARKS, beginning_of, mark_ids
from rljax.rewards.on_device.automaton import compile_pattern
from rljax.rewards.on_device.form import DeviceForm, Responses, contains, lower
from rljax.rewards.pool.calling import HOME, members

_TRIED = 64  # random sequences of tokens by which a vocabulary is tried
_TOKENS = 24  # in each of them
_BYTES_A_TOKEN = 8  # room for the text of a response, unless all tokens are shorter
_MULTIPLE = 16  # fields of a prompt have a multiple of so many bytes, so that few shapes compile
# Marks at which the reasoning of a response begins or ends, or that stand in it (rljax.reasoning).
_SIGNS = (
    *(mark.lower().encode() for pair in MARKS for mark in pair),
    b"<|message|>",
    b"my thought process:",
)
# GPT-2's letters of bytes: the printable ones themselves, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_LETTERS = {chr(byte): byte for byte in _PRINTABLE}
_LETTERS |= {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
UNDECIDED = "the form for the device cannot decide on this response"


def device_form(component: Component) -> DeviceForm | None:
    """Returns the form for the device that a reward declares; None without one. Raises InputError
    for a declaration that is no form."""
    declared = spec(component).on_device
    if isinstance(declared, str):
        module, _, name = declared.rpartition(".")
        declared = getattr(importlib.import_module(module), name)
    if declared in (None, False):
        return None
    if not isinstance(declared, DeviceForm):
        raise InputError(
            f"the reward {component.text!r} declares on_device",
            value=declared,
            rule="of a reward it is a DeviceForm of rljax.rewards.on_device, or its name",
            fix="@contract(on_device=DeviceForm(score, prepare))",
        )
    return declared


class DeviceScorer:
    """A reward as arrays: `fields` of prompts on the host, and `score` in a program.

    Raises InputError where the text of a response is not the texts of its tokens one after another.
    """

    def __init__(self, component: Component, form: DeviceForm, tokenizer, vocab_size: int):
        self.component, self.form = component, form
        self.table, self.sizes, self.unknown = token_bytes(tokenizer, vocab_size)
        self.has_parts = not all(
            _is_text(row[:n]) for row, n in zip(self.table, self.sizes, strict=True)
        )
        letters = {*self.table.tobytes().lower()}
        self.cuts = _reads_answer(component)
        self.signs = tuple(s for s in _SIGNS if self.cuts and {*s} <= letters)
        if self.cuts:  # marks that are special tokens are no part of the text
            self.unknown[[i for i in mark_ids(tokenizer) if i < vocab_size]] = True

    def _identity(self) -> tuple:
        arrays = (self.table, self.sizes, self.unknown)
        return self.component.text, self.signs, *(array.tobytes() for array in arrays)

    def __eq__(self, other) -> bool:
        """Scorers of one reward and one vocabulary are equal, so that runs share programs."""
        return isinstance(other, DeviceScorer) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.component.text)

    def fields(
        self, ground_truths: Sequence[str], prompts: Sequence[tuple] = ()
    ) -> dict[str, np.ndarray]:
        """Returns the fields of prompts, numbers as [P] and arrays as [P, K]. `prompts` are the
        text and the messages of each. Raises InputError for a ground truth that the reward refuses,
        and for a prompt that begins the reasoning of a response whose answer is read."""
        for text, messages in prompts if self.cuts else ():
            if opening := beginning_of(text, messages):
                raise InputError(
                    f"program_steps with the reward {self.component.text!r}: a prompt begins the "
                    "reasoning of its response",
                    value=opening,
                    rule="it reads the answer behind the reasoning, which the host finds",
                    fix="program_steps=1, or a prompt that does not",
                )
        prepared = []
        for index, truth in enumerate(ground_truths):
            try:
                prepared.append(self.form.prepare(truth, **self.component.options))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"the reward {self.component.text!r} cannot read the ground truth of prompt "
                    f"{index} of the step on the device",
                    value=truth,
                    rule=str(error),
                    fix="mend the row, or program_steps=1",
                ) from None
        return {name: _stacked([row[name] for row in prepared]) for name in prepared[0]}

    def score(
        self,
        tokens: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        finish_reason: jax.Array,
        fields: dict,
    ) -> dict[str, jax.Array]:
        """Scores responses in a program.

        Args:
          tokens: [R, S + prompt columns] int32, rows of a batch.
          starts: [R] int32, where responses begin.
          lengths: [R] int32, where they end.
          finish_reason: [R] int32.
          fields: those of the prompt of each row, [R, ...].

        Returns {"score": [R] float32, name of a part: [R]}; NaN where the form cannot decide.
        """
        column = jnp.arange(tokens.shape[1])[None, :]
        count = (lengths - starts).astype(jnp.int32)
        ids = jnp.take_along_axis(
            tokens, jnp.minimum(column + starts[:, None], tokens.shape[1] - 1), axis=1
        )
        ids = jnp.where(column < count[:, None], ids, 0)
        text, length, decided = self._text(ids, count)
        responses = Responses(text, length, count, finish_reason, ids)
        if self.signs:
            lowered = lower(text)
            for sign in self.signs:
                decided &= ~contains(lowered, sign)
        scores = self.form.score(responses, fields, **self.component.options)
        scores = scores if isinstance(scores, dict) else {"score": scores}
        scores = {name: jnp.asarray(value, jnp.float32) for name, value in scores.items()}
        return scores | {"score": jnp.where(decided, scores["score"], jnp.nan)}

    def _text(self, ids: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the text of ids [R, S]: bytes [R, N], length [R], and whether
        the text is known [R]."""
        table, width = jnp.asarray(self.table), self.table.shape[1]
        live = jnp.arange(ids.shape[1])[None, :] < count[:, None]
        sizes = jnp.where(live, jnp.asarray(self.sizes)[ids], 0)
        decided = ~jnp.any(live & jnp.asarray(self.unknown)[ids], axis=1)
        ends = jnp.cumsum(sizes, axis=1)
        room = ids.shape[1] * min(width, _BYTES_A_TOKEN)
        byte = jnp.arange(width)[None, None, :]
        columns = jnp.where(byte < sizes[..., None], (ends - sizes)[..., None] + byte, room)
        rows = jnp.arange(ids.shape[0])[:, None, None]
        text = jnp.zeros((ids.shape[0], room), jnp.uint8)
        text = text.at[rows, columns].set(table[ids], mode="drop")
        length = jnp.minimum(ends[:, -1], room)
        decided &= ends[:, -1] <= room
        if self.has_parts:  # which may make up no character
            decided &= compile_pattern(".*", whole=True).matches(text, length)
        return text, length, decided


def _is_text(row: np.ndarray) -> bool:
    try:
        row.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _stacked(values: list) -> np.ndarray:
    """Numbers as [P]; arrays [k] as [P, K] with zeros behind the shorter ones."""
    arrays = [np.asarray(value) for value in values]
    if not arrays[0].ndim:
        return np.stack(arrays)
    longest = max(len(array) for array in arrays)
    room = max(-(-longest // _MULTIPLE) * _MULTIPLE, _MULTIPLE)
    return np.stack([np.pad(array, (0, room - len(array))) for array in arrays])


def token_bytes(tokenizer, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the UTF-8 of each token, without special ones: [V, W] uint8, its size [V] int32, and
    whether it has none that is known [V] bool. A token may be a part of a character. Raises
    InputError where the text of a response is not the texts of its tokens one after another."""
    texts = [tokenizer.decode([i]) for i in range(vocab_size)]
    # (A tokenizer that takes a space from the front of a text takes it from a token alone.)
    probe = next((i for i, text in enumerate(texts) if text.isalnum() and text.isascii()), None)
    if probe is not None:
        prefix = texts[probe]
        texts = [tokenizer.decode([probe, i]).removeprefix(prefix) for i in range(vocab_size)]
    partial = [i for i in range(vocab_size) if "\ufffd" in texts[i]]
    complete = sorted({*range(vocab_size)} - {*partial})
    draw = np.random.default_rng(0)
    for _ in range(_TRIED):
        ids = draw.choice(complete, _TOKENS).tolist()
        if tokenizer.decode(ids) != "".join(texts[i] for i in ids):
            raise InputError(
                "program_steps with this tokenizer",
                value=ids,
                rule="on the device the text of a response is the texts of its tokens one after "
                "another, and this tokenizer writes them otherwise",
                fix="program_steps=1",
            )
    raw = [text.encode() for text in texts]
    names, unknown = tokenizer.vocabulary(), np.zeros(vocab_size, bool)
    for i in partial:
        part = part_of_a_character(names.get(i, ""))
        raw[i], unknown[i] = part or b"", part is None
    table = np.zeros((vocab_size, max(1, *map(len, raw))), np.uint8)
    for row, data in zip(table, raw, strict=True):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return table, np.array([len(data) for data in raw], np.int32), unknown


def _reads_answer(component: Component) -> bool:
    """Returns whether a reward, or one that it names, reads what stands behind the reasoning."""
    others = members(component)
    return spec(component).reads == "answer" or any(map(_reads_answer, others))


def part_of_a_character(token: str) -> bytes | None:
    """Returns the bytes of a token that is no text by itself, as vocabularies of bytes write them:
    <0xE9>, or a letter for each byte (GPT-2). None if it is neither."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(match[1])
    if token and all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return None


def without_form(component: Component) -> str:
    """Returns the text of the reward, or of the first one that it names, that has no form for the
    device; "" if there is none."""
    if device_form(component) is None:
        return component.text
    return next(filter(None, map(without_form, members(component))), "")


def device_scorer(text: str, tokenizer, vocab_size: int) -> DeviceScorer:
    """Returns the scorer of the reward `text`. Raises InputError where it, or one that it names,
    has no form for the device."""
    component = resolve(text, HOME)
    if lacks := without_form(component):
        raise InputError(
            f"program_steps with the reward {lacks!r}",
            rule="it has no form for the device: it is called on the host, with texts",
            fix="program_steps=1, or @contract(on_device=DeviceForm(...)) of "
            "rljax.rewards.on_device",
        )
    return DeviceScorer(component, device_form(component), tokenizer, vocab_size)
