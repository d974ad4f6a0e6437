"""Forms for the device of the rewards of rljax.rewards. Each is held against its form of texts by
tests/rewards/test_on_device.py.

Axes: B responses, N bytes of a text, K parts of a mixture.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.components import Component, resolve
from rljax.rewards.mixing import member_names, member_weights
from rljax.rewards.on_device.automaton import compile_pattern
from rljax.rewards.on_device.form import (
    DeviceForm,
    Responses,
    at_each,
    equal,
    inside,
    part,
    shifted,
    strip,
    text_field,
)
from rljax.rewards.on_device.scorer import device_form
from rljax.rewards.pool.calling import HOME
from rljax.rewards.text.rules import written_number
from rljax.rewards.text.targets import only_target

_GSM8K_WINDOW = 300  # characters of the form of texts
_REPLACED = "\ufffd"  # the character of bytes that are no UTF-8


def _known(score: jax.Array, decided: jax.Array) -> jax.Array:
    """Scores [B], NaN where they are not decided."""
    return jnp.where(decided, score, jnp.nan).astype(jnp.float32)


def _stripped_truth(ground_truth: str, **options) -> dict:
    target, text = _truth(ground_truth).strip(), str(ground_truth).strip()
    return text_field("truth", target) | text_field("written", text)


def _truth(ground_truth: str) -> str:
    """Returns the one target, as a form reads it."""
    target = only_target(ground_truth)
    if _REPLACED in target:
        raise ValueError("ground_truth holds U+FFFD, which stands for bytes that are no text")
    return target


def _exact_match(responses: Responses, fields: dict) -> jax.Array:
    text, length, decided = strip(responses.text, responses.length)
    return _known(_either(text, length, fields), decided)


def _either(text: jax.Array, length: jax.Array, fields: dict) -> jax.Array:
    """Returns whether texts [B, N] are the target, or the ground truth as it is written: [B]."""
    names = ("truth", "written")
    matches = [equal(text, length, fields[name], fields[f"{name}_length"]) for name in names]
    return matches[0] | matches[1]


exact_match = DeviceForm(_exact_match, _stripped_truth)


def _sequence_match(responses: Responses, fields: dict, *, partial: float = 0.0) -> jax.Array:
    text, length, decided = strip(responses.text, responses.length)
    is_equal, best = _either(text, length, fields), jnp.zeros(length.shape)
    # Positions count characters, so that a text must be ASCII where it is not equal.
    is_ascii = jnp.all(text < 128, axis=1)
    for name in ("truth", "written"):
        truth, truth_length = fields[name], fields[f"{name}_length"]
        shared = min(text.shape[1], truth.shape[1])
        compared = inside(text, jnp.minimum(length, truth_length))[:, :shared]
        agree = jnp.sum(compared & (text[:, :shared] == truth[:, :shared]), axis=1)
        longer = jnp.maximum(jnp.maximum(length, truth_length), 1)
        best, is_ascii = jnp.maximum(best, agree / longer), is_ascii & jnp.all(truth < 128, axis=1)
    return _known(jnp.where(is_equal, 1.0, partial * best), decided & (is_equal | is_ascii))


def _sequence_truth(ground_truth: str, *, partial: float = 0.0) -> dict:
    if not 0.0 <= partial <= 1.0:
        raise ValueError(f"sequence_match: partial must lie in [0, 1], got {partial!r}")
    return _stripped_truth(ground_truth)


sequence_match = DeviceForm(_sequence_match, _sequence_truth)


def _letter(ground_truth: str, *, quota: int) -> dict:
    if quota < 1:
        raise ValueError(f"letter_quota needs a quota of at least 1, got {quota}")
    letter = only_target(ground_truth)
    if len(letter.encode()) != 1:
        raise ValueError(f"ground_truth {letter!r:.80} is no single ASCII character")
    return {"letter": np.uint8(ord(letter))}


def _letter_quota(responses: Responses, fields: dict, *, quota: int) -> jax.Array:
    hits = responses.text == fields["letter"][:, None]
    count = jnp.sum(hits & inside(responses.text, responses.length), axis=1)
    return jnp.maximum(0.0, 1 - jnp.abs(count - quota) / quota)


letter_quota = DeviceForm(_letter_quota, _letter)


def _length_under(responses: Responses, fields: dict, *, max_tokens: int) -> jax.Array:
    return (responses.num_tokens < max_tokens).astype(jnp.float32)


length_under = DeviceForm(_length_under)


def _regex_match(
    responses: Responses, fields: dict, *, pattern: str = "", whole: bool = False
) -> jax.Array:
    automaton = compile_pattern(pattern, whole)
    if not whole:
        return automaton.matches(responses.text, responses.length).astype(jnp.float32)
    text, length, decided = strip(responses.text, responses.length)
    return _known(automaton.matches(text, length), decided)


def _pattern_of_option(ground_truth: str, *, pattern: str = "", whole: bool = False) -> dict:
    if not pattern:
        raise ValueError("regex_match: on the device one pattern serves all prompts: pattern='...'")
    compile_pattern(pattern, whole)
    return {}


regex_match = DeviceForm(_regex_match, _pattern_of_option)


def _gsm8k_truth(
    ground_truth: str,
    *,
    method: str = "numeric",
    score: float = 1.0,
    format_score: float = 0.0,
    whole_response: bool = False,
) -> dict:
    target = only_target(ground_truth)
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k(method={method!r}): on the device it is 'strict' or 'flexible'")
    return text_field("truth", written_number(target, method))


def _gsm8k(
    responses: Responses,
    fields: dict,
    *,
    method: str = "numeric",
    score: float = 1.0,
    format_score: float = 0.0,
    whole_response: bool = False,
) -> dict:
    text, length = responses.text, responses.length
    # The window counts characters.
    ascii_only = jnp.all(text < 128, axis=1)
    text, length = part(text, jnp.maximum(length - _GSM8K_WINDOW, 0), length)
    text = text[:, :_GSM8K_WINDOW]
    digit = (text >= 48) & (text <= 57) | (text == ord(".")) | (text == ord(","))
    minus, width = text == ord("-"), text.shape[1]
    column = jnp.arange(width)[None, :]
    ends = jnp.where(digit & ~shifted(digit, 1), column, -1)  # columns where a run of digits ends
    if method == "strict":
        mark, size = at_each(text, b"#### "), 5
        follows = shifted(digit, size) | shifted(minus, size) & shifted(digit, size + 1)
        starts = mark & follows
        has_number = jnp.any(starts, axis=1)
        begin = jnp.where(has_number, width - 1 - jnp.argmax(starts[:, ::-1], axis=1) + size, 0)
        first_digit = jnp.where(_at(minus, begin), begin + 1, begin)
        ends_after = jnp.where(ends >= first_digit[:, None], ends, width)
        end = jnp.min(ends_after, axis=1) + 1
        number, number_length = _without_commas(*part(text, begin, end))
        number_length = jnp.where(has_number, number_length, 0)
    else:
        # Runs but "."; the last one counts, with the minus before it.
        begins = digit & ~_behind(digit)
        lone_dots = (text == ord(".")) & begins & ~shifted(digit, 1)
        last = jnp.max(jnp.where(lone_dots, -1, ends), axis=1)
        signed = minus & shifted(begins, 1)
        # "-." is a number of its own: it is not ".".
        last = jnp.maximum(last, jnp.max(jnp.where(lone_dots & _behind(minus), column, -1), axis=1))
        has_number = last >= 0
        start = jnp.max(jnp.where(begins & (column <= last[:, None]), column, -1), axis=1)
        start = jnp.maximum(start, 0)
        start = jnp.where((start > 0) & _at(signed, jnp.maximum(start - 1, 0)), start - 1, start)
        number, number_length = part(text, start, last + 1)
    right = has_number & equal(number, number_length, fields["truth"], fields["truth_length"])
    value = jnp.where(right, score, jnp.where(has_number, format_score, 0.0))
    return {"score": _known(value, ascii_only), "format/extracted": has_number.astype(jnp.float32)}


def _at(flags: jax.Array, column: jax.Array) -> jax.Array:
    """Returns flags [B, N] at one column [B] of each row."""
    column = jnp.minimum(column, flags.shape[1] - 1)
    return jnp.take_along_axis(flags, column[:, None], axis=1)[:, 0]


def _behind(flags: jax.Array) -> jax.Array:
    """Returns the flags [B, N] of the column before."""
    return jnp.pad(flags[:, :-1], [(0, 0), (1, 0)])


def _without_commas(text: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Texts [B, N] without their commas, and the new length [B]."""
    keep = inside(text, length) & (text != ord(","))
    columns = jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, text.shape[1])
    rows = jnp.arange(text.shape[0])[:, None]
    compacted = jnp.zeros_like(text).at[rows, columns].set(text, mode="drop")
    return compacted, jnp.sum(keep, axis=1).astype(jnp.int32)


gsm8k = DeviceForm(_gsm8k, _gsm8k_truth)


def _member_forms(rewards: tuple[str, ...]) -> list[tuple[Component, DeviceForm]]:
    return [
        (component, device_form(component))
        for component in (resolve(text, HOME) for text in rewards)
    ]


def _mixture_fields(ground_truth: str, *, rewards: tuple[str, ...], **options) -> dict:
    forms = enumerate(_member_forms(rewards))
    prepared = {
        i: form.prepare(ground_truth, **component.options) for i, (component, form) in forms
    }
    return {
        f"{i}/{name}": value for i, fields in prepared.items() for name, value in fields.items()
    }


def _mixture(
    responses: Responses,
    fields: dict,
    *,
    rewards: tuple[str, ...],
    weights: tuple[float, ...] = (),
    normalise: bool = False,
    inner_parts: bool = True,
) -> dict:
    total, parts = 0.0, {}
    scales = member_weights(rewards, weights, normalise)
    entries = zip(member_names(rewards), _member_forms(rewards), scales, strict=True)
    for i, (name, (component, form), scale) in enumerate(entries):
        prefix = f"{i}/"
        member_fields = {
            k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)
        }
        scores = form.score(responses, member_fields, **component.options)
        scores = scores if isinstance(scores, dict) else {"score": scores}
        total, parts[name] = total + scale * scores["score"], scores["score"]
        if inner_parts:
            parts |= {f"{name}/{key}": value for key, value in scores.items() if key != "score"}
    return {"score": total, **parts}


mixture = DeviceForm(_mixture, _mixture_fields)
