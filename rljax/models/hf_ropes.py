"""Rotary positions of a Hugging Face config.json: rope parameters in every spelling,
to and from Rope."""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType

from rljax.errors import InputError
from rljax.models.config import Rope
from rljax.models.hf_keys import LARGEST_NUMBER, MISSING, NUMBER, Keys, refuse_unread

LOG = logging.getLogger("rljax")
# key of the rope parameters -> field of Rope
_SAME = "factor low_freq_factor high_freq_factor beta_fast beta_slow truncate attention_factor"
_SAME += " mscale mscale_all_dim short_factor long_factor"
_ROPE = {name: name for name in _SAME.split()} | {
    "original_max_position_embeddings": "original_max_tokens",
    "partial_rotary_factor": "fraction",
    "mrope_section": "sections",
    "mrope_interleaved": "interleaved_sections",
}
_LONGER = ("factor", "original_max_position_embeddings")
_OF_YARN = "beta_fast beta_slow truncate attention_factor mscale mscale_all_dim".split()
_ROPE_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (*_LONGER, *_OF_YARN),
    "longrope": (*_LONGER, "attention_factor", "short_factor", "long_factor"),
    "dynamic": ("factor",),
    "proportional": ("factor",),
}
_SECTIONS = ("mrope_section", "mrope_interleaved")


def _rope(
    parameters: Mapping,
    theta: float,
    max_tokens: int,
    *,
    sections: bool = False,
    fraction: float | None = None,
    original: int | None = None,
) -> Rope:
    """One set of rope parameters, in either spelling of the type. `sections`: may it have some.
    `fraction`: of a head that is rotated where they do not say; None: the family rotates whole
    heads. `original`: original_max_position_embeddings where it stands outside of them."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "mrope" and sections:
        kind = "default"  # an older name of the same thing, with sections
    if not isinstance(kind, str) or kind not in _ROPE_OF_KIND:
        rule = f"supported: {', '.join(_ROPE_OF_KIND)}"
        fix = "take a model whose rotary positions are of one of these types"
        raise InputError("config.json: rope scaling type", value=kind, rule=rule, fix=fix)
    keys = Keys(parameters)
    fields = dict(theta=keys.get("rope_theta", NUMBER, float(theta)), kind=kind)
    whole = 1.0 if fraction is None else fraction
    fields["fraction"] = keys.get("partial_rotary_factor", NUMBER, whole)
    if fraction is None and fields["fraction"] != 1:
        what = "config.json: partial_rotary_factor"
        rule = "a model of this family rotates whole heads"
        raise InputError(what, value=fields["fraction"], rule=rule, fix="remove it, or set it to 1")
    read = (*_ROPE_OF_KIND[kind], *(_SECTIONS if sections else ()))
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *read}
    if kind == "yarn":
        _check_attn_factor(keys)
        known.add("attn_factor")
    unknown = sorted(k for k in set(parameters) - known if parameters[k] is not None)
    # Written beside any kind, and read by those alone that _ROPE_OF_KIND says.
    unknown = [key for key in unknown if key != "original_max_position_embeddings"]
    refuse_unread("config.json: the rope parameters set", parameters, unknown)
    defaults = {f.name: f.default for f in dataclasses.fields(Rope)}
    defaults["original_max_tokens"] = max_tokens
    if original and "original_max_position_embeddings" in read:
        keys = Keys({**parameters, "original_max_position_embeddings": original})
    for key in read:
        field, default = _ROPE[key], defaults[_ROPE[key]]
        kinds = {bool: bool, int: int, tuple: list}.get(type(default), NUMBER)
        needed = (key == "factor" and kind != "proportional") or (
            kind == "llama3" and key.endswith("_freq_factor")
        )
        needed |= key in ("short_factor", "long_factor")
        if kind in ("yarn", "longrope") and key == "factor":
            before = keys.get("original_max_position_embeddings", int, max_tokens)
            needed, default = False, max_tokens / max(before, 1)
        value = keys.get(key, kinds, MISSING if needed else default)
        fields[field] = _numbers(key, value) if kinds is list else value
    if kind == "dynamic":
        fields["original_max_tokens"] = max_tokens
    return Rope(**fields)


def _check_attn_factor(keys: Keys) -> None:
    """Warns of an `attn_factor`, by which vLLM multiplies yarn's own factor of cos and sin, and
    which transformers does not read. Raises InputError if it is no number."""
    factor = keys.get("attn_factor", NUMBER, 1.0)
    if factor != 1:
        LOG.warning(
            "config.json: attn_factor=%g of the rope parameters is not read, as in transformers. "
            "Fix: for another factor of yarn's cos and sin set attention_factor",
            factor,
        )


def _numbers(key: str, values: list) -> tuple:
    """A list of numbers of the rope parameters, as a tuple."""
    if not all(type(x) in NUMBER and abs(x) <= LARGEST_NUMBER for x in values):
        fix = f"correct {key}, or download config.json again"
        raise InputError(f"config.json: {key}", value=values[:4], rule="a list of numbers", fix=fix)
    return tuple(values)


def ropes(
    keys: Keys,
    theta: float,
    max_tokens: int,
    *,
    sections: bool = False,
    silent: Mapping = MappingProxyType({}),
    fraction: float | None = None,
    older: Mapping = MappingProxyType({}),
    notes: Collection[str] = (),
) -> tuple[Rope, ...]:
    """Returns the model's ropes, from either spelling: `rope_parameters` (new), or `rope_theta` +
    `rope_scaling` (published). Raises InputError for a type or a key that is not known, and for a
    fraction of a head where the family rotates whole ones.

    `silent` is what transformers takes where neither is there; `fraction` of a head is rotated
    where the keys do not say, None: always all of it; `older` are further names of types; `notes`
    are keys of the parameters that say nothing of the rotation.
    """
    given = keys.get("rope_parameters", Mapping, None)
    parameters = dict(given or keys.get("rope_scaling", Mapping, None) or silent)
    parameters = {key: value for key, value in parameters.items() if key not in notes}
    kind = parameters.get("rope_type") or parameters.get("type")
    if isinstance(kind, str) and kind in older:
        parameters["rope_type"] = older[kind]
    theta = keys.get("rope_theta", NUMBER, theta)
    share = keys.get("partial_rotary_factor", NUMBER, 1.0 if fraction is None else fraction)
    if fraction is None and share != 1:
        parameters["partial_rotary_factor"] = share  # refused
    how = dict(sections=sections, fraction=None if fraction is None else share)
    how["original"] = keys.get("original_max_position_embeddings", int, None)
    return (_rope(parameters, theta, max_tokens, **how),)


def olmo3_ropes(keys: Keys, theta: float, max_tokens: int) -> tuple[Rope, ...]:
    """Returns rope 0 for layers that see everything, and rope 1 for those with a window: of the
    same theta where the keys give one, and never scaled by `rope_scaling`."""
    return gemma3_ropes(keys, theta, max_tokens, keys.get("rope_theta", NUMBER, theta))


def gemma3_ropes(
    keys: Keys, theta: float, max_tokens: int, silent: float = 10_000.0
) -> tuple[Rope, ...]:
    """Returns rope 0 for layers that see everything, and rope 1 for those with a window, whose
    theta is `silent` where the keys do not say. Raises InputError if rope_parameters has a set
    for other layers."""
    nested = keys.get("rope_parameters", Mapping, None) or {}
    unknown = sorted(set(nested) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(
            f"config.json: rope_parameters sets {unknown[0]!r}",
            rule="one set for full_attention, one for sliding_attention",
            fix="move the parameters below full_attention and sliding_attention",
        )
    theta = keys.get("rope_theta", NUMBER, theta)
    local = keys.get("rope_local_base_freq", NUMBER, silent)
    scaling = nested.get("full_attention") or keys.get("rope_scaling", Mapping, None) or {}
    return (
        _rope(scaling, theta, max_tokens),
        _rope(nested.get("sliding_attention") or {}, local, max_tokens),
    )


def minimax_ropes(keys: Keys, theta: float, max_tokens: int) -> tuple[Rope, ...]:
    """Returns the rope of MiniMax M2, whose keys may say the number of rotated elements of a head,
    `rotary_dim`."""
    head_dim = keys.get("head_dim", int)
    rotated = keys.positive("rotary_dim", int, head_dim)
    return ropes(keys, theta, max_tokens, fraction=rotated / head_dim)


def gemma4_ropes(keys: Keys, theta: float, max_tokens: int) -> tuple[Rope, ...]:
    """Returns rope 0 for layers that see everything, which may be proportional, and rope 1 for
    those with a window. Raises InputError if rope_parameters lacks one of the two."""
    silent = dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6)
    nested = keys.get("rope_parameters", Mapping, None)
    nested = nested or {"full_attention": silent, "sliding_attention": {}}
    if set(nested) != {"full_attention", "sliding_attention"}:
        raise InputError(
            "config.json: rope_parameters",
            value=sorted(nested),
            rule="one set for full_attention, one for sliding_attention",
            fix="use the config.json that came with the weights",
        )
    full, sliding = (nested[name] or {} for name in ("full_attention", "sliding_attention"))
    share = 1.0 if full.get("rope_type") == "proportional" else None
    return _rope(full, theta, max_tokens, fraction=share), _rope(sliding, theta, max_tokens)


def mrope(
    keys: Keys,
    theta: float,
    max_tokens: int,
    *,
    interleaved: bool,
    sections: tuple[int, ...],
    fraction: float | None = None,
) -> tuple[Rope, ...]:
    """Returns the rope of a model with images, whose family decides how the sections lie. Raises
    InputError if the keys interleave sections that the family does not."""
    (rope,) = ropes(keys, theta, max_tokens, sections=True, fraction=fraction)
    if rope.interleaved_sections and not interleaved:
        rule = "not of this family"
        fix = "set mrope_interleaved to false, or correct model_type"
        raise InputError("config.json: mrope_interleaved", value=True, rule=rule, fix=fix)
    found = dict(sections=rope.sections or sections, interleaved_sections=interleaved)
    return (dataclasses.replace(rope, **found),)


def gemma3_ropes_out(both: tuple[Rope, ...]) -> dict:
    """Returns the published spelling, where it can express the ropes: no scaling on
    layers with a window."""
    _, local = both
    if local.kind == "default":
        return {"rope_local_base_freq": local.theta}
    return nested_ropes_out(both)


def nested_ropes_out(both: tuple[Rope, ...]) -> dict:
    """Returns the new spelling, with the ropes of both types of layers."""
    entries = map(whole_rope_out, both)
    named = dict(zip(("full_attention", "sliding_attention"), entries, strict=True))
    return {"rope_parameters": named}


def whole_rope_out(rope: Rope) -> dict:
    """Returns the new spelling of one rope."""
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **(rope_out(rope) or {})}


def rope_out(rope: Rope) -> dict | None:
    """Returns the published spelling of everything but theta."""
    out = {"rope_type": rope.kind} if rope.kind != "default" else {}
    default = Rope()
    for key in (*_ROPE_OF_KIND[rope.kind], *_SECTIONS):
        value = getattr(rope, _ROPE[key])
        if (
            key in ("factor", "original_max_position_embeddings")
            or value != getattr(default, _ROPE[key])
            or key.endswith("_freq_factor")
        ):
            out[key] = list(value) if isinstance(value, tuple) else value
    if rope.kind == "proportional":
        out["partial_rotary_factor"] = rope.fraction
    if out and "rope_type" not in out:
        out["rope_type"] = "default"
    return out or None
