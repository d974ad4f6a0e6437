"""ModelConfig: a family (Llama, Qwen2, Qwen3) is a value of this one dataclass.

What lives here: the sizes and switches of the decoder, and how a Hugging Face config.json becomes
one. A
setting of config.json that the decoder would ignore is refused, never dropped.
"""

import dataclasses
import math
from collections.abc import Mapping

from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 rotary scaling (frequencies below `low_freq_factor` divided by `factor`), or
    linear."""

    kind: str  # "llama3" | "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192

    def __post_init__(self):
        if not all(0 < x < math.inf for x in dataclasses.astuple(self)[1:]):
            raise InputError("rope scaling", value=self, rule="its numbers are above 0")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise InputError("rope scaling", value=self, rule="low_freq_factor < high_freq_factor")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes in elements; dtype is what matmuls run in, weights are kept in
    `weight_dtype`."""

    family: str  # the Hugging Face model_type: decides weight names at load and save
    vocab_size: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    dtype: str = "float32"
    weight_dtype: str = "float32"
    head_in_float32: bool = True
    remat: str = (
        "full"  # "none": keep activations; "full": recompute each layer in the backward pass
    )

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "embed",
            "mlp",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "max_tokens",
        )
        for name in sizes:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(
                    f"model.{name}", value=getattr(self, name), rule="a whole number >= 1"
                )
        if self.heads % self.kv_heads:
            raise InputError(
                "model.kv_heads does not divide model.heads", value=(self.kv_heads, self.heads)
            )
        if self.head_dim % 2:
            raise InputError(
                "model.head_dim", value=self.head_dim, rule="even: rotary pairs halves"
            )
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:  # false for NaN, too
                raise InputError(f"model.{name}", value=getattr(self, name), rule="above 0")
        if not 0 <= self.init_std < math.inf:
            raise InputError("model.init_std", value=self.init_std, rule="0 or above")
        if self.remat not in ("none", "full"):
            raise InputError("model.remat", value=self.remat, rule='"none" or "full"')
        for name in ("dtype", "weight_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16"):
                raise InputError(
                    f"model.{name}", value=getattr(self, name), rule="float32 or bfloat16"
                )


# config.json keys that change the computation and that these families may set.
_READ = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "initializer_range",
}
# Keys that do not change the forward pass.
_IGNORED = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "is_llama_config",
    "_attn_implementation_autoset",
    "pretraining_tp",
    "_name_or_path",
    "num_labels",
    "id2label",
    "label2id",
    "classifier_dropout",
    "is_decoder",
    "output_attentions",
    "return_dict",
    "output_hidden_states",
    "problem_type",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
}
_ROPE = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}
FAMILIES = ("llama", "qwen2", "qwen3")
_NO_DEFAULT = object()


def _get(config: Mapping, key: str, kind: type | tuple, default: object = _NO_DEFAULT):
    value = config.get(key, default)
    if value is _NO_DEFAULT:
        raise InputError(
            f"config.json has no {key!r}", fix="use the config.json that came with the weights"
        )
    if value is None or value is default:
        return None if default is _NO_DEFAULT else default
    if isinstance(value, bool) and kind is not bool or not isinstance(value, kind):
        name = kind.__name__ if isinstance(kind, type) else "number"
        raise InputError(f"config.json: {key}", value=value, rule=f"must be a {name}")
    return value


def _rope(config: Mapping) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_parameters` (new) and `rope_theta` + `rope_scaling` (published
    checkpoints)."""
    parameters = _get(config, "rope_parameters", Mapping, None) or _get(
        config, "rope_scaling", Mapping, None
    )
    parameters = parameters or {}
    theta = _get(parameters, "rope_theta", (int, float), None) or _get(
        config, "rope_theta", (int, float), 10_000.0
    )
    unknown = sorted(set(parameters) - _ROPE)
    if unknown:
        raise InputError(
            f"config.json: the rope parameters set {unknown[0]!r}",
            value=parameters[unknown[0]],
            rule="the decoder does not implement it, and would silently ignore it",
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind not in ("llama3", "linear"):
        raise InputError(
            "config.json: rope scaling type", value=kind, rule="supported: default, linear, llama3"
        )
    factor = float(_get(parameters, "factor", (int, float)))
    if kind == "linear":
        return float(theta), RopeScaling("linear", factor)
    return float(theta), RopeScaling(
        "llama3",
        factor,
        float(_get(parameters, "low_freq_factor", (int, float))),
        float(_get(parameters, "high_freq_factor", (int, float))),
        _get(parameters, "original_max_position_embeddings", int),
    )


def from_hf_config(config: Mapping, **overrides) -> ModelConfig:
    """A Hugging Face config.json (as a dict) -> ModelConfig. Raises InputError for what we would
    ignore."""
    family = _get(config, "model_type", str)
    if family not in FAMILIES:
        raise InputError(
            "config.json: model_type", value=family, rule=f"supported: {', '.join(FAMILIES)}"
        )
    # Exporters write switches that are off (use_mrope: false); off is what the decoder does.
    unset = {k for k, v in config.items() if v is None or v is False}
    unknown = sorted(set(config) - _READ - _IGNORED - unset)
    if unknown:
        raise InputError(
            f"config.json of a {family} model sets {unknown[0]!r}",
            value=config[unknown[0]],
            rule="the decoder does not implement it, and would silently ignore it",
        )
    activation = _get(config, "hidden_act", str, "silu")
    if activation != "silu":
        raise InputError("config.json: hidden_act", value=activation, rule="supported: silu")
    layer_types = _get(config, "layer_types", list, None) or []
    other = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise InputError(
            "config.json: layer_types", value=other[0], rule="supported: full_attention"
        )
    windowed = config.get("use_sliding_window", False) or "sliding_attention" in layer_types
    if windowed or (family == "llama" and config.get("sliding_window") is not None):
        raise InputError(
            "config.json asks for sliding-window attention",
            value=config.get("sliding_window"),
            rule="this decoder attends to the whole context",
        )
    heads = _get(config, "num_attention_heads", int)
    embed = _get(config, "hidden_size", int)
    theta, scaling = _rope(config)
    attention_bias = bool(_get(config, "attention_bias", bool, False))
    fields = dict(
        family=family,
        vocab_size=_get(config, "vocab_size", int),
        embed=embed,
        mlp=_get(config, "intermediate_size", int),
        layers=_get(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=_get(config, "num_key_value_heads", int, heads),
        head_dim=_get(config, "head_dim", int, None) or embed // max(heads, 1),
        max_tokens=_get(config, "max_position_embeddings", int, 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(_get(config, "rms_norm_eps", (int, float), 1e-6)),
        qkv_bias=True if family == "qwen2" else attention_bias,
        output_bias=False if family == "qwen2" else attention_bias,
        mlp_bias=bool(_get(config, "mlp_bias", bool, False)) and family == "llama",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(_get(config, "tie_word_embeddings", bool, False)),
        init_std=float(_get(config, "initializer_range", (int, float), 0.02)),
    )
    return ModelConfig(**{**fields, **overrides})


def to_hf_config(config: ModelConfig, *, bos_id=None, eos_ids=(), pad_id=None) -> dict:
    """ModelConfig -> a config.json that transformers and `from_hf_config` read back."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    scaling = None
    if config.rope_scaling is not None:
        s = config.rope_scaling
        scaling = {"rope_type": s.kind, "factor": s.factor}
        if s.kind == "llama3":
            scaling |= {
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_tokens,
            }
    out = {
        "architectures": [names[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_tokens,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "torch_dtype": config.weight_dtype,
        "bos_token_id": bos_id,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "pad_token_id": pad_id,
    }
    if config.family in ("llama", "qwen3"):
        out["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        out["mlp_bias"] = config.mlp_bias
    return out
