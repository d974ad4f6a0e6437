"""The location of every weight in a Hugging Face checkpoint: its tensor's name, layout and piece.

One name map per naming scheme, and the layout rules. On disk a linear map is [out, in] with heads
flattened; ours is [in, out] with heads apart.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

from rljax.models.config import ModelConfig
from rljax.models.families import FAMILIES
from rljax.models.vision.names import STACKED, VISION_NAMES


@dataclasses.dataclass(frozen=True)
class Disk:
    """A tensor that holds all experts at once, stored as ours; `column` 0 or 1 of two that share
    its last axis: as neighbours, or as `halves`."""

    name: str
    column: int | None = None
    halves: bool = False


@dataclasses.dataclass(frozen=True)
class Fused:
    """A linear map whose rows on disk are those of several of ours, one after the other."""

    name: str
    members: tuple[str, ...]


# our module (or weight) below a layer -> Hugging Face name below "layers.{i}."; "[x]" is a weight
# of all experts, {x} the number of one. Entries of _TOP may stand there, too.
PLAIN: dict[str, str | Disk | Fused] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_EXPERTS = {
    "mlp.router": "mlp.gate.weight",
    "mlp.gate[x]": "mlp.experts.{x}.gate_proj.weight",
    "mlp.up[x]": "mlp.experts.{x}.up_proj.weight",
    "mlp.down[x]": "mlp.experts.{x}.down_proj.weight",
}
_MIXTRAL = {
    **PLAIN,
    "mlp.router": "block_sparse_moe.gate.weight",
    "mlp.gate[x]": "block_sparse_moe.experts.{x}.w1.weight",
    "mlp.up[x]": "block_sparse_moe.experts.{x}.w3.weight",
    "mlp.down[x]": "block_sparse_moe.experts.{x}.w2.weight",
}
_GEMMA = {
    **PLAIN,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _fused(name: str, *members: str) -> dict[str, Fused]:
    """Returns the entries of maps that share the rows of one."""
    return dict.fromkeys(members, Fused(name, members))


_QKV = _fused("self_attn.qkv_proj", "attention.q", "attention.k", "attention.v")
_GATE_UP = _fused("mlp.gate_up_proj", "mlp.gate", "mlp.up")
_DELTA = {
    "recurrence.log_decay": "linear_attn.A_log",
    "recurrence.step_bias": "linear_attn.dt_bias",
    "recurrence.norm": "linear_attn.norm",
    "recurrence.o": "linear_attn.out_proj",
    **_fused("linear_attn.conv1d", "recurrence.q_conv", "recurrence.k_conv", "recurrence.v_conv"),
}
_SHORT_CONV_INPUTS = ("recurrence.input_gate", "recurrence.output_gate", "recurrence.x")
_SHARED_EXPERT = {
    "mlp.shared_gate": "mlp.shared_expert.gate_proj",
    "mlp.shared_up": "mlp.shared_expert.up_proj",
    "mlp.shared_down": "mlp.shared_expert.down_proj",
    "mlp.shared_share": "mlp.shared_expert_gate",
}
NAMES: dict[str, Mapping[str, str | Disk | Fused]] = {
    "plain": PLAIN,
    "gemma": _GEMMA,
    "gemma4": {**_GEMMA, "output_scale": "layer_scalar"},
    "olmo": {
        **PLAIN,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "phi3": {**PLAIN, **_QKV, **_GATE_UP},
    "glm": {**PLAIN, **_GATE_UP},
    "glm4": {
        **PLAIN,
        **_GATE_UP,
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    "experts": {**PLAIN, **_EXPERTS},
    "qwen3_next": {
        **PLAIN,
        **_EXPERTS,
        **_SHARED_EXPERT,
        **_DELTA,
        "recurrence.qkvz": "linear_attn.in_proj_qkvz",
        "recurrence.ba": "linear_attn.in_proj_ba",
    },
    "qwen3_5": {
        **PLAIN,
        **_EXPERTS,
        **_SHARED_EXPERT,
        **_DELTA,
        **_fused("linear_attn.in_proj_qkv", "recurrence.q", "recurrence.k", "recurrence.v"),
        "recurrence.z": "linear_attn.in_proj_z",
        "recurrence.b": "linear_attn.in_proj_b",
        "recurrence.a": "linear_attn.in_proj_a",
    },
    "lfm2": {
        "norm.scale": "embedding_norm.weight",
        "attention_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.out_proj",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        **_fused("conv.in_proj", *_SHORT_CONV_INPUTS),
        "recurrence.conv": "conv.conv",
        "recurrence.o": "conv.out_proj",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
        "mlp.router": "feed_forward.gate.weight",
        "mlp.correction": "feed_forward.expert_bias",
        "mlp.gate[x]": "feed_forward.experts.{x}.w1.weight",
        "mlp.up[x]": "feed_forward.experts.{x}.w3.weight",
        "mlp.down[x]": "feed_forward.experts.{x}.w2.weight",
    },
    "mixtral": _MIXTRAL,
    "minimax": {**_MIXTRAL, "mlp.correction": "block_sparse_moe.e_score_correction_bias"},
    "deepseek": {
        **PLAIN,
        **_EXPERTS,
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_latent_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "mlp.correction": "mlp.gate.e_score_correction_bias",
        "mlp.shared_gate": "mlp.shared_experts.gate_proj",
        "mlp.shared_up": "mlp.shared_experts.up_proj",
        "mlp.shared_down": "mlp.shared_experts.down_proj",
    },
    "llama4": {
        **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in PLAIN.items()},
        "mlp.router": "feed_forward.router.weight",
        "mlp.gate[x]": Disk("feed_forward.experts.gate_up_proj", 0, halves=True),
        "mlp.up[x]": Disk("feed_forward.experts.gate_up_proj", 1, halves=True),
        "mlp.down[x]": Disk("feed_forward.experts.down_proj"),
        "mlp.shared_gate": "feed_forward.shared_expert.gate_proj",
        "mlp.shared_up": "feed_forward.shared_expert.up_proj",
        "mlp.shared_down": "feed_forward.shared_expert.down_proj",
    },
    "gpt_oss": {
        **PLAIN,
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router.weight",
        "mlp.router_bias": "mlp.router.bias",
        "mlp.gate[x]": Disk("mlp.experts.gate_up_proj", 0),
        "mlp.up[x]": Disk("mlp.experts.gate_up_proj", 1),
        "mlp.down[x]": Disk("mlp.experts.down_proj"),
        "mlp.gate_bias[x]": Disk("mlp.experts.gate_up_proj_bias", 0),
        "mlp.up_bias[x]": Disk("mlp.experts.gate_up_proj_bias", 1),
        "mlp.down_bias[x]": Disk("mlp.experts.down_proj_bias"),
    },
}
# Outside of the layers, where the map of the family does not say otherwise.
_TOP = {"embedding": "embed_tokens.weight", "norm.scale": "norm.weight"}


def text_prefix(config: ModelConfig) -> str:
    """Returns the beginning of the names of the decoder's tensors."""
    nested = config.family in ("qwen3_vl", "qwen3_5", "qwen3_5_moe")
    return "model.language_model." if nested else "model."


def names_on_disk(names: Iterable[str], tensors: Collection[str]) -> dict[str, str]:
    """Returns {name of a tensor of ours: its name in a checkpoint that holds the names `tensors`}:
    exports of a base model lack "model.", and models with images are published in two ways."""
    old_prefixes, new_prefixes = ("visual.", "model."), ("model.visual.", "model.language_model.")
    wants_new = any(n.startswith(new_prefixes[1]) for n in tensors)
    base = "embed_tokens.weight" in tensors and "model.embed_tokens.weight" not in tensors

    def on_disk(name: str) -> str:
        is_new = name.startswith(new_prefixes)
        if is_new != wants_new and name.startswith((*old_prefixes, *new_prefixes)):
            both = (new_prefixes, old_prefixes) if is_new else (old_prefixes, new_prefixes)
            pairs = zip(*both, strict=True)
            prefix, replacement = next((a, b) for a, b in pairs if name.startswith(a))
            return replacement + name.removeprefix(prefix)
        return name.removeprefix("model.") if base else name

    return {name: on_disk(name) for name in names}


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one of our weights that one tensor on disk holds."""

    path: tuple[str, ...]  # of the weight
    index: tuple[int, ...]  # leading axes of the weight: the layer, the expert
    shape: tuple[int, ...]  # ours, below `index`
    inside: int = 0  # how many of its axes are summed over; 0 = stored as ours
    column: int | None = None
    kernel: tuple[int, ...] = ()  # the input axes of a convolution on disk; one axis of ours
    halves: bool = False  # the two columns are not interleaved
    rows: tuple[int, int] | None = None  # of a larger tensor: its first row there, all rows there

    @property
    def flat(self) -> bool:
        """Returns whether all its axes are one on disk: the bias of a map into heads, the scale of
        a norm over all of them."""
        return not self.inside and self.column is None and self.path[-1] in ("bias", "scale")

    @property
    def unit(self) -> int:
        """Rows (entries of the first axis) on disk per entry of our axis `inside`."""
        return math.prod(self.shape[self.inside + 1 :]) if self.inside or self.flat else 1

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk."""
        return self.part_shape if self.rows is None else (self.rows[1], *self.part_shape[1:])

    @property
    def first_row(self) -> int:
        """First row of the piece in its tensor on disk."""
        return self.rows[0] if self.rows else 0

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape on disk of the rows that the piece is among."""
        if self.column is not None:
            return (*self.shape[:-1], 2 * self.shape[-1])
        if self.flat:
            return (math.prod(self.shape),)
        if not self.inside:
            return self.shape
        rows = math.prod(self.shape[self.inside :])
        return (rows, *(self.kernel or (math.prod(self.shape[: self.inside]),)))

    def disk_axes(self, axes: tuple) -> tuple:
        """Returns `axes`, one entry (a mesh axis or None) for each of our axes, as one entry for
        each axis on disk. Where several are one on disk, only the first of them can be split."""
        if not (self.inside or self.flat):
            return axes
        firsts = (self.inside, 0) if self.inside else (0,)
        assert all(a is None for i, a in enumerate(axes) if i not in firsts), (self, axes)
        return tuple(axes[i] for i in firsts)

    @property
    def columns(self) -> slice:
        """Slice of the last axis on disk that is ours."""
        if self.column is None:
            return slice(None)
        size = self.shape[-1]
        start = self.column * size
        return slice(start, start + size) if self.halves else slice(self.column, None, 2)

    # The two below take numpy and JAX arrays, and blocks: some of the rows, our `columns`, a part
    # of an axis that is split over devices.

    def ours(self, block):
        """Returns our piece, from what is on disk."""
        if self.flat:
            return block.reshape(-1, *self.shape[1:])
        if not self.inside:
            return block
        i, block = self.inside, block.reshape(block.shape[0], -1)
        return block.T.reshape(
            -1, *self.shape[1:i], block.shape[0] // self.unit, *self.shape[i + 1 :]
        )

    def theirs(self, value):
        """Returns the tensor to write to disk; of shared columns and rows, these only."""
        if self.column is not None or not (self.inside or self.flat):
            return value
        if self.flat:
            return value.reshape(-1)
        value = value.reshape(math.prod(value.shape[: self.inside]), -1).T
        return value.reshape(-1, *self.kernel) if self.kernel else value


def _below_layer(path: tuple[str, ...], names: Mapping) -> str | Disk | Fused:
    """Returns the Hugging Face name below a layer of the leaf `path` of a block."""
    if path[-1] not in ("weight", "bias", "scale"):  # a weight of its own, not of a linear map
        name = ".".join(path)
        return names[f"{name}[x]"] if f"{name}[x]" in names else names[name]
    leaf = {"scale": "weight"}.get(path[-1], path[-1])
    module = names[".".join(path[:-1])]
    if isinstance(module, Fused):
        return dataclasses.replace(module, name=f"{module.name}.{leaf}")
    return f"{module}.{leaf}"


def fused_members(path: tuple[str, ...], fused: Fused) -> list[tuple[str, ...]]:
    """Returns the paths of the weights that share a tensor with that of `path`, itself included, in
    the order of their rows."""
    return [(*path[:2], *member.split("."), path[-1]) for member in fused.members]


def _rows(path: tuple[str, ...], fused: Fused, shapes: Mapping) -> tuple[int, int]:
    """Returns the first row of the weight `path` in the tensor that it shares, and the number of
    rows of all."""
    first_row = total = 0
    for member in fused_members(path, fused):
        shape, axes = shapes[member]
        first_row = total if member == path else first_row
        total += math.prod(shape[1:][_inside(member, axes[1:]) :])
    return first_row, total


def block_layers(config: ModelConfig) -> dict[str, range]:
    """Returns {block: the layers its weights are stacked over}."""
    members = [s.layers_of(m) for s in config.stacks() for m in range(len(s.unit))]
    return {str(b): layers for b, layers in enumerate(members)}


def _inside(path: tuple[str, ...], axes: tuple[str, ...]) -> int:
    """Returns the number of leading axes of the weight that are summed over: 2 for a map out of
    heads."""
    if path[-1] in ("bias", "scale", "positions") or len(axes) < 2:
        return 0
    return 2 if axes[0] in ("heads", "value_heads") else 1


def vision_pieces(vision, path, shape, axes) -> dict[str, list[Piece]]:
    """Returns {tensor name: [its piece]} of one weight of the vision tower."""
    module, leaf = (path[1:], "weight") if path[-1] == "positions" else (path[1:-1], path[-1])
    name = VISION_NAMES[vision.family][".".join(module)]
    name += ".bias" if leaf == "bias" else ".weight"
    name = ("visual." if vision.family == "qwen2_5_vl" else "model.visual.") + name
    kernel = ()
    if path[1:] == ("patch_embed", "weight"):
        kernel = (vision.channels, vision.temporal_patch_size, *[vision.patch_size] * 2)
    if path[1] not in STACKED:
        return {name: [Piece(path, (), shape, _inside(path, axes), kernel=kernel)]}
    pieces = [Piece(path, (i,), shape[1:], _inside(path, axes[1:])) for i in range(shape[0])]
    return {name.format(i): [piece] for i, piece in enumerate(pieces)}


def disk_pieces(model) -> dict[str, list[Piece]]:
    """Returns {tensor name: the pieces it holds} of everything that a checkpoint of `model` has."""
    config = model.config
    names = NAMES[FAMILIES[config.family].names]
    blocks = block_layers(config)
    tensors: dict[str, list[Piece]] = {}
    prefix = text_prefix(config)
    shapes = model.shapes()
    for path, (shape, axes) in shapes.items():
        if path == ("head",):
            name = "lm_head.weight" if model.head == "lm" else "score.weight"
            tensors[name] = [Piece(path, (), shape, 1)]
            continue
        if path == ("head_bias",):
            tensors["score.bias"] = [Piece(path, (), shape)]
            continue
        if path[0] == "vision":
            tensors |= vision_pieces(config.vision, path, shape, axes)
            continue
        if path[0] != "layers":
            name = ".".join(path)
            tensors[prefix + names.get(name, _TOP[name])] = [Piece(path, (), shape)]
            continue
        module = _below_layer(path[2:], names)
        kernel = (1, shape[1]) if axes[1] == "taps" else ()
        for repeat, layer in enumerate(blocks[path[1]]):
            stem, index = f"{prefix}layers.{layer}.", (repeat,)
            if isinstance(module, Disk):
                piece = Piece(path, index, shape[1:], 0, module.column, halves=module.halves)
                tensors.setdefault(stem + module.name, []).append(piece)
            elif isinstance(module, Fused):
                options = dict(inside=_inside(path, axes[1:]), rows=_rows(path, module, shapes))
                piece = Piece(path, index, shape[1:], kernel=kernel, **options)
                tensors.setdefault(stem + module.name, []).append(piece)
            elif "{x}" in module:
                for x in range(shape[1]):
                    piece = Piece(path, (*index, x), shape[2:], 1)
                    tensors.setdefault(stem + module.format(x=x), []).append(piece)
            else:
                inside = _inside(path, axes[1:])
                piece = Piece(path, index, shape[1:], inside, kernel=kernel)
                tensors.setdefault(stem + module, []).append(piece)
    return tensors
