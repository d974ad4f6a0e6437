"""Families: a Hugging Face config.json <-> ModelConfig.

One `Family` value per model_type. A key of config.json that a family does not read is refused,
never dropped. To add a family, add a value to FAMILIES, and its weight names to rljax.models.names
where they are new.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from rljax.errors import InputError
from rljax.models import hf_keys
from rljax.models.config import (
    MOST_LAYERS,
    LatentConfig,
    LayerKind,
    ModelConfig,
    Rope,
    yarn_mscale,
)
from rljax.models.experts import ExpertsConfig
from rljax.models.hf_keys import ACTIVATIONS, NUMBER, Keys
from rljax.models.vision.config import from_hf_vision, to_hf_vision

# -- the families


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of one model_type.

    architecture: the stem of the transformers classes. keys: config.json key -> field, beside
    COMMON's. defaults: what transformers takes where config.json is silent. fixed: fields that
    config.json does not have. windows: the window of every layer. names: the map of
    rljax.models.names. read: further fields of ModelConfig from the keys and the fields so far;
    write: the reverse. images: the model has a vision tower (rljax.models.vision.config), and its
    decoder's keys may lie in text_config.
    """

    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    windows: Callable[[Keys, int], list[int]] = hf_keys.no_windows
    ropes: Callable[[Keys, float, int], tuple[Rope, ...]] = hf_keys.ropes
    names: str = "plain"
    read: Callable[[Keys, dict], dict] = lambda keys, fields: {}
    write: Callable[[ModelConfig], dict] = lambda config: {}
    images: bool = False


COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed",
    "intermediate_size": "mlp",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_tokens",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}


def _biases(keys: Keys, fields: dict) -> dict:
    bias = keys.get("attention_bias", bool, False)
    return {"qkv_bias": bias, "output_bias": bias}


def _experts(keys: Keys, names: Mapping[str, str], **fixed) -> ExpertsConfig:
    """config.json key -> field of ExpertsConfig."""
    return ExpertsConfig(**{**keys.fields(names, ExpertsConfig), **fixed})


_MIXTRAL = {"num_local_experts|num_experts": "count", "num_experts_per_tok": "per_token"}
_QWEN_MOE = {
    "num_experts|num_local_experts": "count",
    "num_experts_per_tok": "per_token",
    "moe_intermediate_size": "mlp",
    "norm_topk_prob": "normalise",
}
_GPT_OSS_ROPE = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                     original_max_position_embeddings=4096)  # fmt: skip
_GPT_OSS = {**_MIXTRAL, "swiglu_alpha": "alpha", "swiglu_limit": "limit"}
_DEEPSEEK = {
    "n_routed_experts|num_local_experts": "count",
    "num_experts_per_tok": "per_token",
    "moe_intermediate_size": "mlp",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "scale",
    "n_group": "groups",
    "topk_group": "groups_kept",
}


def _experts_out(config: ModelConfig, names: Mapping[str, str]) -> dict:
    return {key.split("|")[0]: getattr(config.experts, field) for key, field in names.items()}


def _mixtral(keys: Keys, fields: dict) -> dict:
    how = dict(mlp=fields["mlp"], gated=fields["activation"])
    return {"experts": _experts(keys, _MIXTRAL, **how)}


def _qwen3_moe(keys: Keys, fields: dict) -> dict:
    listed = keys.get("mlp_only_layers", list, None) or []
    if any(type(i) is not int or not 0 <= i < fields["layers"] for i in listed):
        raise InputError("config.json: mlp_only_layers", value=listed, rule="numbers of layers")
    dense = set(listed)
    step = keys.get("decoder_sparse_step", int, 1)
    layers = range(fields["layers"])
    return {
        **_biases(keys, fields),
        "experts": _experts(keys, _QWEN_MOE, gated=fields["activation"]),
        "expert_layers": [i not in dense and step > 0 and (i + 1) % step == 0 for i in layers],
    }


def _qwen3_moe_out(config: ModelConfig) -> dict:
    dense = [i for i, kind in enumerate(config.kinds) if not kind.experts]
    return {
        **_experts_out(config, _QWEN_MOE),
        "attention_bias": config.qkv_bias,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": bool(config.kinds[0].window),
        "sliding_window": config.kinds[0].window or None,
    }


def _gpt_oss(keys: Keys, fields: dict) -> dict:
    fixed = dict(mlp=fields["mlp"], router_bias=True, expert_bias=True, gated="clamped_swiglu")
    return {**_biases(keys, fields), "experts": _experts(keys, _GPT_OSS, **fixed)}


def _deepseek(keys: Keys, fields: dict) -> dict:
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"),
                       ("moe_layer_freq", 1)):  # fmt: skip
        given = keys.get(key, (str, int), value)
        if given != value:
            raise InputError(f"config.json: {key}", value=given, rule=f"supported: {value}")
    latent = LatentConfig(
        kv_rank=keys.get("kv_lora_rank", int),
        q_rank=keys.get("q_lora_rank", int, 0),
        nope_dim=keys.get("qk_nope_head_dim", int),
        rope_dim=keys.get("qk_rope_head_dim", int),
        value_dim=keys.get("v_head_dim", int),
        interleaved=keys.get("rope_interleave", bool, True),
    )
    rope = fields["ropes"][0]
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    first = keys.get("first_k_dense_replace", int, 3)
    shared = keys.get("n_shared_experts", int, 1) * keys.get("moe_intermediate_size", int)
    bias = keys.get("attention_bias", bool, False)
    fixed = dict(scores="sigmoid", correction_bias=True, shared_mlp=shared)
    fixed["gated"] = fields["activation"]
    return {
        "latent": latent,
        "head_dim": latent.rope_dim,
        "attention_scale": scale,
        "experts": _experts(keys, _DEEPSEEK, **fixed),
        "expert_layers": [i >= first for i in range(fields["layers"])],
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _deepseek_out(config: ModelConfig) -> dict:
    latent, experts = config.latent, config.experts
    return {
        **_experts_out(config, _DEEPSEEK),
        "n_shared_experts": experts.shared_mlp // experts.mlp,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
        "first_k_dense_replace": sum(not kind.experts for kind in config.kinds),
        "attention_bias": config.qkv_bias,
    }


def _attention_bias_out(config: ModelConfig) -> dict:
    return {"attention_bias": config.qkv_bias}


def _llama(keys: Keys, fields: dict) -> dict:
    return {**_biases(keys, fields), "mlp_bias": keys.get("mlp_bias", bool, False)}


def _llama_out(config: ModelConfig) -> dict:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _gemma(keys: Keys, fields: dict) -> dict:
    return {
        **_biases(keys, fields),
        "attention_scale": keys.positive("query_pre_attn_scalar", NUMBER, 256.0) ** -0.5,
        "attention_soft_cap": keys.get("attn_logit_softcapping", NUMBER, 0.0),
        "final_soft_cap": keys.get("final_logit_softcapping", NUMBER, 0.0),
        "embed_scale": fields["embed"] ** 0.5,
    }


def _gemma3(keys: Keys, fields: dict) -> dict:
    fields_read = _gemma(keys, fields)
    if fields_read["attention_soft_cap"]:  # transformers keeps it, and does not apply it
        raise InputError(
            "config.json: attn_logit_softcapping",
            value=fields_read["attention_soft_cap"],
            rule="a gemma3_text model has none",
        )
    return fields_read


def _gemma_out(config: ModelConfig) -> dict:
    scalar = config.attention_scale**-2
    return {
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.final_soft_cap or None,
    }


def _windows_out(config: ModelConfig) -> dict:
    """layer_types and sliding_window, for the families that read them."""
    windows = [kind.window for kind in config.kinds]
    types = ["sliding_attention" if w else "full_attention" for w in windows]
    return {"sliding_window": max(windows, default=0) or None, "layer_types": types}


def _qwen_out(config: ModelConfig) -> dict:
    on = any(kind.window for kind in config.kinds)
    windows = {"max_window_layers": 0, **_windows_out(config)} if on else {}
    return {"use_sliding_window": on, **windows}


_GEMMA = dict(norm_offset=1.0, post_norms=True)
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", read=_llama, write=_llama_out),
    "mistral": Family(
        "Mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows=hf_keys.every,
        write=lambda c: {"sliding_window": c.kinds[0].window or None},
    ),
    "qwen2": Family(
        "Qwen2",
        defaults={"sliding_window": 4096},
        fixed=dict(qkv_bias=True),
        windows=hf_keys.qwen_windows,
        write=_qwen_out,
    ),
    "qwen3": Family(
        "Qwen3",
        defaults={"head_dim": 128, "sliding_window": 4096},
        fixed=dict(qk_norm=True),
        windows=hf_keys.qwen_windows,
        read=_biases,
        write=lambda c: {**_qwen_out(c), **_attention_bias_out(c)},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, "sliding_window": 4096},
        fixed=dict(qk_norm=True),
        windows=hf_keys.qwen_moe_windows,
        names="experts",
        read=_qwen3_moe,
        write=_qwen3_moe_out,
    ),
    "mixtral": Family(
        "Mixtral",
        defaults={"rope_theta": 1e6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "num_local_experts": 8, "num_experts_per_tok": 2},
        windows=hf_keys.every,
        names="mixtral",
        read=_mixtral,
        write=lambda c: {
            "sliding_window": c.kinds[0].window or None, **_experts_out(c, _MIXTRAL),
        },
    ),
    "gemma2": Family(
        "Gemma2",
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0, "sliding_window": 4096},
        fixed=_GEMMA,
        windows=hf_keys.alternating,
        names="gemma",
        read=_gemma,
        write=lambda c: {**_gemma_out(c), **_windows_out(c)},
    ),
    "gemma3_text": Family(
        "Gemma3",
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "sliding_window": 4096},
        fixed=dict(_GEMMA, qk_norm=True),
        windows=hf_keys.gemma3_windows,
        ropes=hf_keys.gemma3_ropes,
        names="gemma",
        read=_gemma3,
        write=lambda c: {**_gemma_out(c), **_windows_out(c), **hf_keys.gemma3_ropes_out(c.ropes)},
    ),
    "gpt_oss": Family(
        "GptOss",
        defaults={"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "head_dim": 64,
                  "attention_bias": True,
                  "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "num_key_value_heads": 8,
                  "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
        fixed=dict(sinks=True),
        windows=hf_keys.alternating,
        ropes=functools.partial(hf_keys.ropes, silent=_GPT_OSS_ROPE),
        names="gpt_oss",
        read=_gpt_oss,
        write=lambda c: {
            **_experts_out(c, _GPT_OSS), **_windows_out(c), **_attention_bias_out(c),
            "rope_scaling": hf_keys.rope_out(c.ropes[0]) or {"rope_type": "default"},
        },
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed=dict(qkv_bias=True),
        windows=hf_keys.qwen_windows,
        ropes=functools.partial(hf_keys.mrope, interleaved=False, sections=(16, 24, 24)),
        write=_qwen_out,
        images=True,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        defaults={"head_dim": 128, "rope_theta": 5e6, "num_key_value_heads": 32},
        fixed=dict(qk_norm=True),
        ropes=functools.partial(hf_keys.mrope, interleaved=True, sections=(24, 20, 20)),
        read=_biases,
        write=_attention_bias_out,
        images=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        defaults={"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "n_shared_experts": 1},
        names="deepseek",
        read=_deepseek,
        write=_deepseek_out,
    ),
}  # fmt: skip


def from_hf_config(config: Mapping, **overrides) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json (as a dict). Raises InputError for keys that
    we would ignore."""
    name = Keys(config).get("model_type", str)
    if name not in FAMILIES:
        raise InputError(
            "config.json: model_type", value=name, rule=f"supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    hf_keys.check_quantisation(Keys(config).get("quantization_config", dict, {}))
    vision = None
    if family.images:
        whole, config = config, hf_keys.text_config(config)
        how = {k: overrides[k] for k in ("dtype", "weight_dtype") if k in overrides}
        how["remat"] = "none" if overrides.get("remat") == "none" else "full"
        vision = from_hf_vision(whole, **how)
    keys = Keys(config, {"tie_word_embeddings": False, "rms_norm_eps": 1e-6,
                         "initializer_range": 0.02, **family.defaults})  # fmt: skip
    heads, embed = keys.get("num_attention_heads", int), keys.get("hidden_size", int)
    keys.known.add("quantization_config")
    keys.defaults |= {
        "num_key_value_heads": family.defaults.get("num_key_value_heads", heads),
        "head_dim": family.defaults.get("head_dim", embed // max(heads, 1)),
        "max_position_embeddings": 2048,
    }
    fields = {"family": name, **keys.fields(COMMON, ModelConfig), **family.fixed}
    layers = fields["layers"]
    if not 1 <= layers <= MOST_LAYERS:  # before a list of them is made
        raise InputError("config.json: num_hidden_layers", value=layers, rule=f"1 to {MOST_LAYERS}")
    if config.get("num_key_value_heads", 0) is None:
        fields["kv_heads"] = heads
    activation = keys.get("hidden_activation|hidden_act", str, family.defaults.get("hidden_act"))
    activation = activation or "silu"
    if activation not in ACTIVATIONS:
        raise InputError(
            "config.json: hidden_act", value=activation, rule=f"supported: {', '.join(ACTIVATIONS)}"
        )
    fields["activation"] = ACTIVATIONS[activation]
    theta = float(family.defaults.get("rope_theta", 10_000.0))
    fields["ropes"] = family.ropes(keys, theta, fields["max_tokens"])
    fields |= family.read(keys, fields)
    fields["kinds"] = _kinds(family.windows(keys, layers), fields)
    fields["labels"], fields["head_bias"] = hf_keys.labels(config)
    fields["squash"] = keys.get("score_squash", str, "none")  # ours: transformers gives the raw s
    fields["vision"] = vision
    keys.check_all_read(name)
    return ModelConfig(**{**fields, **overrides})


def _kinds(windows: list[int], fields: dict) -> tuple[LayerKind, ...]:
    has_experts = "experts" in fields
    experts = fields.pop("expert_layers", [has_experts] * fields["layers"])
    local = len(fields["ropes"]) - 1  # Gemma 3: layers with a window have a rope of their own
    return tuple(
        LayerKind(window=w, rope=local if w else 0, experts=e)
        for w, e in zip(windows, experts, strict=True)
    )


def to_hf_config(
    config: ModelConfig, *, head: str = "lm", bos_id=None, eos_ids=(), pad_id=None
) -> dict:
    """ModelConfig -> a config.json that transformers and `from_hf_config` read back."""
    family = FAMILIES[config.family]
    kind = "ForTokenClassification" if config.head_bias else "ForSequenceClassification"
    kind = "ForCausalLM" if head == "lm" else kind
    stem = {"Gemma3": "Gemma3Text"}.get(family.architecture, family.architecture)
    activation = next(k for k, v in ACTIVATIONS.items() if v == config.activation)
    out = {
        "architectures": [(family.architecture if head == "lm" else stem) + kind],
        "model_type": config.family,
        **{key: getattr(config, field) for key, field in COMMON.items()},
        "rope_theta": config.ropes[0].theta,
        "rope_scaling": hf_keys.rope_out(config.ropes[0]),
        "hidden_act": activation,
        "torch_dtype": config.weight_dtype,
        "bos_token_id": bos_id,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "pad_token_id": pad_id,
        **family.write(config),
    }
    if config.post_norms:
        out["hidden_activation"] = out.pop("hidden_act")
    if config.vision:
        outer = ("architectures", "torch_dtype", "tie_word_embeddings")
        text = {**out, "model_type": f"{config.family}_text"}
        extra = {key: text.pop(key) for key in outer}
        extra["architectures"] = [family.architecture + "ForConditionalGeneration"]
        return {**extra, **to_hf_vision(config.vision), "text_config": text}
    if head != "lm":
        out["num_labels"] = config.labels
        out["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
        if config.squash != "none":
            out["score_squash"] = config.squash
    return out
