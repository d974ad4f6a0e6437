"""VisionConfig: the vision tower of Qwen2.5-VL or Qwen3-VL as one value, from and to config.json.

The tower's sizes and switches, and the token ids that stand for images. No JAX here: the host side
of the data (rljax.data.images.rows) reads this value, too.
"""

import dataclasses
import math
from collections.abc import Mapping

from rljax.errors import InputError

# No published tower comes near these; they bound what a config.json can ask for.
_MOST_LAYERS, _LARGEST_SIZE = 1_000, 2**24


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """One vision tower. Sizes in elements; layer numbers start at 0."""

    family: str  # a key of _KEYS: decides norms, MLP and weight names
    layers: int
    embed: int
    mlp: int
    heads: int
    out_embed: int  # the text decoder's embed
    activation: str  # silu | gelu_tanh | gelu
    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int
    channels: int = 3
    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames
    merge_size: int = 2  # merge_size x merge_size patches become one token of the decoder
    rope_theta: float = 10_000.0
    window_size: int = 0  # pixels; 0: every layer attends to whole frames
    full_attention_layers: tuple[int, ...] = ()  # of a tower with windows
    tokens_per_second: float = 0.0  # 0: the text holds timestamps, and positions do not count time
    position_grid: int = 0  # side of the learned position grid; 0: none
    deepstack_layers: tuple[int, ...] = ()  # whose outputs the decoder's first layers add
    init_std: float = 0.02
    dtype: str = "float32"
    weight_dtype: str = "float32"
    remat: str = "full"  # "none": keep activations; "full": recompute each block backwards

    norm_eps = 1e-6  # both families fix it
    norm_offset = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name in ("window_size", "position_grid") else 1
            minimum = 0 if field.name.endswith("_token_id") else minimum
            maximum = _MOST_LAYERS if field.name == "layers" else _LARGEST_SIZE
            if field.type is int and (type(value) is not int or not minimum <= value <= maximum):
                rule = f"a whole number, {minimum} to {maximum}"
                fix = f"set {field.name} to a number of this range"
                raise InputError(f"vision.{field.name}", value=value, rule=rule, fix=fix)
        self._check_attention()
        if list(self.deepstack_layers) != sorted(set(self.deepstack_layers)):
            raise InputError(
                "vision.deepstack_layers",
                value=self.deepstack_layers,
                rule="ascending",
                fix=f"deepstack_layers={tuple(sorted(set(self.deepstack_layers)))}",
            )
        for name in ("full_attention_layers", "deepstack_layers"):
            if not all(0 <= i < self.layers for i in getattr(self, name)):
                rule = f"below {self.layers} layers"
                fix = f"number the layers from 0 to {self.layers - 1}"
                raise InputError(f"vision.{name}", value=getattr(self, name), rule=rule, fix=fix)
        if self.remat not in ("none", "full"):
            raise InputError("vision.remat", value=self.remat, fix='remat="none" or remat="full"')
        for name in ("dtype", "weight_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                rule = "float32, bfloat16 or float16"
                fix = f'{name}="float32", or another of these'
                raise InputError(f"vision.{name}", value=getattr(self, name), rule=rule, fix=fix)

    def _check_attention(self):
        if self.embed % (4 * self.heads):
            rule = f"embed / heads is a multiple of 4 (2-D rotary pairs), embed is {self.embed}"
            fix = "set heads to a number that divides embed / 4"
            raise InputError("vision.heads", value=self.heads, rule=rule, fix=fix)
        if self.window_size and self.window_size < self.patch_size * self.merge_size:
            rule = f"at least one merged patch, {self.patch_size * self.merge_size} pixels"
            fix = "window_size=0, which is off, or a number that is as large"
            raise InputError("vision.window_size", value=self.window_size, rule=rule, fix=fix)
        if not 0 < self.rope_theta < math.inf:
            fix = "set rope_theta as the model was trained, such as 10000.0"
            raise InputError("vision.rope_theta", value=self.rope_theta, rule="above 0", fix=fix)
        if not 0 <= self.tokens_per_second < math.inf:
            raise InputError(
                "vision.tokens_per_second",
                value=self.tokens_per_second,
                rule="0 or above",
                fix="set tokens_per_second as the model was trained, such as 2.0",
            )

    @property
    def head_dim(self) -> int:
        """Size of a head of attention."""
        return self.embed // self.heads

    @property
    def patch_values(self) -> int:
        """C, the number of pixel values of one patch, in the order channel, frame, row, column."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_area(self) -> int:
        """The number of patches that become one token of the decoder."""
        return self.merge_size**2

    @property
    def window(self) -> int:
        """Side of an attention window in merged patches."""
        return self.window_size // self.merge_size // self.patch_size


# The field of VisionConfig: its key in vision_config, and what transformers takes without it.
_SHARED = {
    "layers": ("depth", None),
    "embed": ("hidden_size", None),
    "mlp": ("intermediate_size", None),
    "heads": ("num_heads", 16),
    "out_embed": ("out_hidden_size", 3584),
    "temporal_patch_size": ("temporal_patch_size", 2),
    "merge_size": ("spatial_merge_size", 2),
    "init_std": ("initializer_range", 0.02),
}
_KEYS = {
    "qwen2_5_vl": _SHARED
    | {
        "patch_size": ("patch_size", 14),
        "window_size": ("window_size", 112),
        "full_attention_layers": ("fullatt_block_indexes", (7, 15, 23, 31)),
        "tokens_per_second": ("tokens_per_second", 4.0),
    },
    "qwen3_vl": _SHARED
    | {
        "patch_size": ("patch_size", 16),
        "deepstack_layers": ("deepstack_visual_indexes", (8, 16, 24)),
    },
    "qwen3_5": _SHARED | {"patch_size": ("patch_size", 16)},  # without mergers behind its layers
}
_KEYS["qwen3_5_moe"] = _KEYS["qwen3_5"]
_ACTIVATION = {"qwen2_5_vl": "silu", "qwen3_vl": "gelu_pytorch_tanh"}
_ACTIVATION |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "gelu_pytorch_tanh")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_TOKENS = {
    "image_token_id": ("image_token_id", 151655),
    "video_token_id": ("video_token_id", 151656),
    "start_token_id": ("vision_start_token_id", 151652),
    "end_token_id": ("vision_end_token_id", 151653),
}
_TOKENS_3_5 = (248056, 248057, 248053, 248054)  # what transformers takes, in the same order
_READ_APART = set(
    """
    model_type hidden_act in_channels in_chans spatial_patch_size rope_parameters rope_scaling
    rope_theta num_position_embeddings
    """.split()
)
# Keys that every configuration of transformers may hold and that do not change the tower.
_IGNORED = set(
    """
    _attn_implementation_autoset _name_or_path architectures chunk_size_feed_forward
    diversity_penalty dtype encoder_no_repeat_ngram_size id2label label2id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states problem_type repetition_penalty return_dict
    temperature top_k top_p torch_dtype transformers_version typical_p use_cache
    """.split()
)


def _tokens(family: str) -> dict[str, tuple[str, int]]:
    """Returns {field: (its key, the id without it)} of the tokens that stand for images."""
    if not family.startswith("qwen3_5"):
        return _TOKENS
    return {
        name: (key, id) for (name, (key, _)), id in zip(_TOKENS.items(), _TOKENS_3_5, strict=True)
    }


def _number(section: str, config: Mapping, key: str, default):
    """Reads a number, or a list of whole numbers as a tuple; `default` None: the key is
    required."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(
            f"config.json: {section} has no {key!r}",
            fix="use the config.json that came with the weights",
        )
    items = value if isinstance(default, tuple) and isinstance(value, list | tuple) else [value]
    kind = (int, float) if isinstance(default, float) else int
    if isinstance(default, tuple) != isinstance(value, list | tuple) or not all(
        isinstance(i, kind) and not isinstance(i, bool) for i in items
    ):
        rule = "a list of whole numbers" if isinstance(default, tuple) else "a number"
        raise InputError(
            f"config.json: {section}.{key}",
            value=value,
            rule=f"must be {rule}",
            fix=f"correct {key}, or download config.json again",
        )
    return tuple(value) if isinstance(default, tuple) else value


def _rope_theta(vision: Mapping) -> float:
    """Reads both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`."""
    parameters = vision.get("rope_parameters") or vision.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        rule = "an object"
        fix = "download config.json again"
        raise InputError("config.json: vision_config's rope", value=parameters, rule=rule, fix=fix)
    kind = parameters.get("rope_type", parameters.get("type", "axial"))
    unknown = sorted(set(parameters) - {"rope_type", "type", "rope_theta"})
    if kind not in ("axial", "default") or unknown:
        rule = "supported: rope_type axial with a rope_theta"
        fix = "take a model whose vision_config says so, or remove what it does not need"
        raise InputError("config.json: vision_config's rope", value=parameters, rule=rule, fix=fix)
    theta = _number("vision_config", parameters, "rope_theta", 0.0)
    return float(theta or _number("vision_config", vision, "rope_theta", 10_000.0))


def _position_grid(vision: Mapping) -> int:
    count = _number("vision_config", vision, "num_position_embeddings", 2304)
    side = math.isqrt(max(count, 0))
    if side < 1 or side * side != count:
        raise InputError(
            "config.json: vision_config.num_position_embeddings",
            value=count,
            rule="a square: the embeddings are a grid",
            fix="correct num_position_embeddings, or download config.json again",
        )
    return side


def _refuse_unknown(family: str, vision: Mapping):
    read_keys = {key for key, _ in _KEYS[family].values()} | _READ_APART | _IGNORED
    if family == "qwen2_5_vl":
        read_keys.discard("num_position_embeddings")
    unset = {k for k, v in vision.items() if v is None or v is False or v == []}
    unknown = sorted(set(vision) - read_keys - unset)
    if unknown:
        raise InputError(
            f"config.json: vision_config of a {family} model sets {unknown[0]!r}",
            value=vision[unknown[0]],
            rule="the tower does not implement it, and would silently ignore it",
            fix=f"remove {unknown[0]!r} if the model works without it, or take another model",
        )
    # Published files write the model_type of the whole model here, of the tower, or none.
    kind = vision.get("model_type", family)
    if kind not in (family, family + "_vision"):
        rule = f"the model is a {family}"
        fix = f"remove model_type from vision_config, or set it to {family!r}"
        raise InputError("config.json: vision_config.model_type", value=kind, rule=rule, fix=fix)
    patch = vision.get("patch_size")
    if vision.get("spatial_patch_size", patch) != patch:
        raise InputError(
            "config.json: vision_config.spatial_patch_size",
            value=vision["spatial_patch_size"],
            rule=f"equal to patch_size, which is {patch}",
            fix="remove spatial_patch_size, or set it to patch_size",
        )


def from_hf_vision(config: Mapping, **overrides) -> VisionConfig:
    """Returns the VisionConfig of the whole config.json (as a dict) of a vision-language model.

    Raises InputError for what the tower would ignore; `overrides` are fields of VisionConfig.
    """
    family = config.get("model_type")
    if family not in _KEYS:
        raise InputError(
            "config.json: model_type of a model with images",
            value=family,
            rule=f"supported: {', '.join(_KEYS)}",
            fix="take a model of one of these families",
        )
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        fix = "download config.json of a model that reads images again"
        raise InputError("config.json: vision_config", value=vision, rule="an object", fix=fix)
    _refuse_unknown(family, vision)
    activation = vision.get("hidden_act", _ACTIVATION[family])
    if activation not in _ACTIVATIONS:
        raise InputError(
            "config.json: vision_config.hidden_act",
            value=activation,
            rule=f"supported: {', '.join(_ACTIVATIONS)}",
            fix="take a model with one of these activations",
        )
    fields = {
        name: _number("vision_config", vision, *key) for name, key in _KEYS[family].items()
    } | {name: _number("the model", config, *key) for name, key in _tokens(family).items()}
    channels = "in_channels" if vision.get("in_channels") is not None else "in_chans"
    fields |= {
        "family": family,
        "activation": _ACTIVATIONS[activation],
        "channels": _number("vision_config", vision, channels, 3),
        "rope_theta": _rope_theta(vision),
        "position_grid": _position_grid(vision) if family != "qwen2_5_vl" else 0,
    }
    return VisionConfig(**{**fields, **overrides})


def to_hf_vision(config: VisionConfig) -> dict:
    """Returns the keys of config.json that describe the tower: model_type,
    vision_config and token ids."""
    names = {activation: hf_name for hf_name, activation in _ACTIVATIONS.items()}
    vision = {
        "model_type": config.family + "_vision",
        "hidden_act": names[config.activation],
        "in_channels": config.channels,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }
    for name, (key, _) in _KEYS[config.family].items():
        value = getattr(config, name)
        vision[key] = list(value) if isinstance(value, tuple) else value
    if "tokens_per_second" in vision and float(config.tokens_per_second).is_integer():
        vision["tokens_per_second"] = int(config.tokens_per_second)  # transformers takes no 4.0
    if config.position_grid:
        vision["num_position_embeddings"] = config.position_grid**2
    tokens = {key: getattr(config, name) for name, (key, _) in _tokens(config.family).items()}
    return {"model_type": config.family, "vision_config": vision, **tokens}
