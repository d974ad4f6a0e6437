"""Families: a Hugging Face config.json <-> ModelConfig.

One `Family` value per model_type. A key of config.json that a family does not read is refused,
never dropped. To add a family, add a value to FAMILIES, and its weight names to rljax.models.names
where they are new.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from rljax.errors import InputError
from rljax.models import family_fields as own
from rljax.models import hf_keys, hf_ropes
from rljax.models.config import MOST_LAYERS, LayerKind, ModelConfig, Rope
from rljax.models.hf_keys import ACTIVATIONS, Keys
from rljax.models.vision.config import from_hf_vision, to_hf_vision

LOG = logging.getLogger("rljax")

# -- the families


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of one model_type.

    architecture: the stem of the transformers classes. keys: config.json key -> field, in place of
    COMMON's for that field. defaults: what transformers takes where config.json is silent. fixed:
    fields that config.json does not have. windows: the window of every layer. names: the map of
    rljax.models.names. read: further fields of ModelConfig from the keys and the fields so far;
    write: the reverse. images: the model has a vision tower (rljax.models.vision.config), and its
    decoder's keys may lie in text_config.
    """

    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    windows: Callable[[Keys, int], list[int]] = hf_keys.no_windows
    ropes: Callable[[Keys, float, int], tuple[Rope, ...]] = hf_ropes.ropes
    names: str = "plain"
    read: Callable[[Keys, dict], dict] = lambda keys, fields: {}
    write: Callable[[ModelConfig], dict] = lambda config: {}
    images: bool = False

    def common(self) -> dict[str, str]:
        """Returns {config.json key: field} of the fields that all families have."""
        own = {field: key for key, field in self.keys.items()}
        return {own.get(field, key): field for key, field in COMMON.items()}


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


_MIXTRAL = {"rope_theta": 1e6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
_GPT_OSS = {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "attention_bias": True}
_GPT_OSS |= {"num_key_value_heads": 8, "sliding_window": 128, "num_local_experts": 128}
_GPT_OSS |= {"num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_LLAMA4 = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8}
_LLAMA4 |= {"attention_chunk_size": 8192, "intermediate_size_mlp": 16384}
_LLAMA4 |= {"num_local_experts": 16, "num_experts_per_tok": 1}
_MINISTRAL3 = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_MINISTRAL3 |= {"max_position_embeddings": 262_144, "rope_theta": 1e6}
_MINIMAX = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 196_608}
_MINIMAX |= {"rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8}
_ERNIE = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128}
_ERNIE |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
_ERNIE |= {"max_position_embeddings": 131_072}
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
_OLMOE |= {"norm_topk_prob": False, "max_position_embeddings": 4096}
_CWM = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
_CWM |= {"sliding_window": 8192, "max_position_embeddings": 131_072}
_GLM = {"rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2, "head_dim": 128}
_GLM |= {"attention_bias": True}
_GLM_MOE = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "moe_intermediate_size": 1408}
_GLM_MOE |= {"n_routed_experts": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
_GLM_MOE |= {"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
_GLM_MOE |= {"n_group": 1, "topk_group": 1}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_QWEN_NEXT = {"num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16}
_QWEN_NEXT |= {"linear_num_value_heads": 32, "linear_key_head_dim": 128}
_QWEN_NEXT |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_QWEN_NEXT["max_position_embeddings"] = 32_768
_QWEN_NEXT_MOE = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
_QWEN_NEXT_MOE |= {"norm_topk_prob": True, "shared_expert_intermediate_size": 512}
_QWEN_3_5 = {**_QWEN_NEXT, "num_key_value_heads": 4}
_QWEN_3_5_MOE = {**_QWEN_NEXT, **_QWEN_NEXT_MOE, "num_experts": 256, "num_experts_per_tok": 8}
_LFM2_KEYS = {"norm_eps": "norm_eps", "tie_word_embeddings|tie_embedding": "tie_embeddings"}
_LFM2 = {"norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 8}
_LFM2 |= {"max_position_embeddings": 128_000, "rope_theta": 1e6, "conv_L_cache": 3}
_LFM2_MOE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
_LFM2_MOE |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
_TEXT_ROPES = functools.partial(hf_ropes.ropes, sections=True, fraction=0.25)
_IMAGE_ROPES = functools.partial(
    hf_ropes.mrope, interleaved=True, sections=(11, 11, 10), fraction=0.25
)
_GATED = dict(qk_norm=True, norm_offset=1.0, attention_gate=True)
_OLMO = dict(qk_norm=True, qk_norm_kind="whole", pre_norms=False, post_norms=True)
_GEMMA = dict(norm_offset=1.0, post_norms=True)
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}

_GEMMA3_DEFAULTS = {**_GEMMA_DEFAULTS, "rope_theta": 1e6, "sliding_window": 4096}
# Published files of the whole model leave out what is as in its 4B.
_GEMMA3_DEFAULTS |= {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
_GEMMA3_DEFAULTS |= {"max_position_embeddings": 131_072}
_GEMMA4_DEFAULTS = {**_GEMMA_DEFAULTS, "sliding_window": 512, "num_key_value_heads": 4}
_GEMMA4_DEFAULTS |= {"hidden_size_per_layer_input": 256, "max_position_embeddings": 131_072}
_GEMMA4_UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0}
_GEMMA4_UNIFIED["max_position_embeddings"] = 262_144
_GEMMA4 = Family(
    "Gemma4",
    defaults=_GEMMA4_DEFAULTS,
    fixed=dict(post_norms=True, qk_norm=True, value_norm=True, layer_scales=True),
    windows=hf_keys.gemma4_windows,
    ropes=hf_ropes.gemma4_ropes,
    names="gemma4",
    read=own.gemma4,
    write=own.gemma4_out,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", read=own.llama, write=own.llama_out),
    "mistral": Family(
        "Mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows=hf_keys.every,
        write=own.window_out,
    ),
    "qwen2": Family(
        "Qwen2",
        defaults={"sliding_window": 4096},
        fixed=dict(qkv_bias=True),
        windows=hf_keys.qwen_windows,
        write=own.qwen_out,
    ),
    "qwen3": Family(
        "Qwen3",
        defaults={"head_dim": 128, "sliding_window": 4096},
        fixed=dict(qk_norm=True),
        windows=hf_keys.qwen_windows,
        read=own.biases,
        write=lambda c: {**own.qwen_out(c), **own.attention_bias_out(c)},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, "sliding_window": 4096},
        fixed=dict(qk_norm=True),
        windows=hf_keys.qwen_moe_windows,
        names="experts",
        read=own.qwen3_moe,
        write=own.qwen3_moe_out,
    ),
    "mixtral": Family(
        "Mixtral",
        defaults=_MIXTRAL,
        windows=hf_keys.every,
        names="mixtral",
        read=own.mixtral,
        write=lambda c: {**own.window_out(c), **own.experts_out(c, own.MIXTRAL)},
    ),
    "ministral3": Family(
        "Ministral3",
        defaults=_MINISTRAL3,
        windows=hf_keys.every,
        ropes=functools.partial(
            hf_ropes.ropes,
            silent=own.MINISTRAL3_ROPE,
            notes=("llama_4_scaling_beta", "max_position_embeddings"),
        ),
        read=own.ministral3,
        write=own.ministral3_out,
    ),
    "minimax_m2": Family(
        "MiniMaxM2",
        defaults=_MINIMAX,
        fixed=dict(qk_norm=True, qk_norm_kind="whole"),
        ropes=hf_ropes.minimax_ropes,
        names="minimax",
        read=own.minimax_m2,
        write=own.minimax_m2_out,
    ),
    "gemma2": Family(
        "Gemma2",
        defaults={**_GEMMA_DEFAULTS, **_GEMMA2_CAPS, "sliding_window": 4096},
        fixed=_GEMMA,
        windows=hf_keys.alternating,
        names="gemma",
        read=own.gemma,
        write=lambda c: {**own.gemma_out(c), **own.windows_out(c)},
    ),
    "gemma3_text": Family(
        "Gemma3",
        defaults=_GEMMA3_DEFAULTS,
        fixed=dict(_GEMMA, qk_norm=True),
        windows=hf_keys.gemma3_windows,
        ropes=hf_ropes.gemma3_ropes,
        names="gemma",
        read=own.gemma3,
        write=lambda c: {
            **own.gemma_out(c),
            **own.windows_out(c),
            **hf_ropes.gemma3_ropes_out(c.ropes),
        },
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": dataclasses.replace(
        _GEMMA4, architecture="Gemma4Unified", defaults={**_GEMMA4_DEFAULTS, **_GEMMA4_UNIFIED}
    ),
    "gpt_oss": Family(
        "GptOss",
        defaults=_GPT_OSS,
        fixed=dict(sinks=True),
        windows=hf_keys.alternating,
        ropes=functools.partial(hf_ropes.ropes, silent=own.GPT_OSS_ROPE),
        names="gpt_oss",
        read=own.gpt_oss,
        write=lambda c: {
            **own.experts_out(c, own.GPT_OSS),
            **own.windows_out(c),
            **own.attention_bias_out(c),
            "rope_scaling": hf_ropes.rope_out(c.ropes[0]) or {"rope_type": "default"},
        },
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed=dict(qkv_bias=True),
        windows=hf_keys.qwen_windows,
        ropes=functools.partial(hf_ropes.mrope, interleaved=False, sections=(16, 24, 24)),
        write=own.qwen_out,
        images=True,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        defaults={"head_dim": 128, "rope_theta": 5e6, "num_key_value_heads": 32},
        fixed=dict(qk_norm=True),
        ropes=functools.partial(hf_ropes.mrope, interleaved=True, sections=(24, 20, 20)),
        read=own.biases,
        write=own.attention_bias_out,
        images=True,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        defaults={**_QWEN_NEXT, **_QWEN_NEXT_MOE, "intermediate_size": 5632},
        fixed=_GATED,
        ropes=functools.partial(hf_ropes.ropes, fraction=0.25),
        names="qwen3_next",
        read=own.qwen3_next,
        write=own.qwen3_next_out,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5",
        defaults=_QWEN_3_5,
        fixed=_GATED,
        ropes=_TEXT_ROPES,
        names="qwen3_5",
        read=own.recurrent,
        write=own.recurrent_out,
    ),
    "qwen3_5": Family(
        "Qwen3_5",
        defaults=_QWEN_3_5,
        fixed=_GATED,
        ropes=_IMAGE_ROPES,
        names="qwen3_5",
        read=own.recurrent,
        write=own.recurrent_out,
        images=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5Moe",
        defaults=_QWEN_3_5_MOE,
        fixed=_GATED,
        ropes=_TEXT_ROPES,
        names="qwen3_5",
        read=own.qwen3_5_moe,
        write=own.qwen3_5_moe_out,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        defaults=_QWEN_3_5_MOE,
        fixed=_GATED,
        ropes=_IMAGE_ROPES,
        names="qwen3_5",
        read=own.qwen3_5_moe,
        write=own.qwen3_5_moe_out,
        images=True,
    ),
    "lfm2": Family(
        "Lfm2",
        keys={**_LFM2_KEYS, "intermediate_size|block_ff_dim": "mlp"},
        defaults={**_LFM2, "block_ffn_dim_multiplier": 1.0},
        fixed=dict(qk_norm=True),
        names="lfm2",
        read=own.lfm2,
        write=own.lfm2_out,
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
        keys=_LFM2_KEYS,
        defaults={**_LFM2, **_LFM2_MOE},
        fixed=dict(qk_norm=True),
        names="lfm2",
        read=own.lfm2_moe,
        write=own.lfm2_moe_out,
    ),
    "olmo2": Family(
        "Olmo2",
        defaults={"rms_norm_eps": 1e-5},
        fixed=_OLMO,
        names="olmo",
        read=own.biases,
        write=own.attention_bias_out,
    ),
    "olmo3": Family(
        "Olmo3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        fixed=_OLMO,
        windows=hf_keys.olmo3_windows,
        ropes=hf_ropes.olmo3_ropes,
        names="olmo",
        read=own.biases,
        write=lambda c: {
            **own.attention_bias_out(c),
            **own.windows_out(c),
            **hf_ropes.nested_ropes_out(c.ropes),
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
        windows=hf_keys.smollm3_windows,
        read=own.smollm3,
        write=own.smollm3_out,
    ),
    "llama4_text": Family(
        "Llama4",
        defaults=_LLAMA4,
        fixed=dict(rope_interleaved=True, qk_norm_kind="l2"),
        names="llama4",
        read=own.llama4,
        write=own.llama4_out,
    ),
    "phi3": Family(
        "Phi3",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        windows=hf_keys.every,
        # What is called yarn here is read as longrope by transformers, too.
        ropes=functools.partial(
            hf_ropes.ropes, fraction=1.0, older={"su": "longrope", "yarn": "longrope"}
        ),
        names="phi3",
        read=own.phi3,
        write=own.phi3_out,
    ),
    "glm": Family(
        "Glm",
        defaults=_GLM,
        fixed=dict(rope_interleaved=True),
        ropes=functools.partial(hf_ropes.ropes, fraction=0.5),
        names="glm",
        read=own.qkv_bias,
        write=own.glm_out,
    ),
    "glm4": Family(
        "Glm4",
        defaults=_GLM,
        fixed=dict(rope_interleaved=True, post_norms=True),
        ropes=functools.partial(hf_ropes.ropes, fraction=0.5),
        names="glm4",
        read=own.qkv_bias,
        write=own.glm_out,
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        defaults=_GLM_MOE,
        ropes=functools.partial(hf_ropes.ropes, fraction=0.5),
        names="deepseek",
        read=own.glm4_moe,
        write=own.glm4_moe_out,
    ),
    "seed_oss": Family(
        "SeedOss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288},
        read=own.seed_oss,
        write=own.seed_oss_out,
    ),
    "ernie4_5": Family(
        "Ernie4_5",
        defaults=_ERNIE,
        fixed=dict(rope_interleaved=True),
        read=own.ernie4_5,
        write=own.ernie4_5_out,
    ),
    "exaone4": Family(
        "Exaone4",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
        fixed=dict(qk_norm=True, pre_norms=False, post_norms=True),
        windows=hf_keys.exaone4_windows,
        names="olmo",
        read=own.exaone4,
        write=own.exaone4_out,
    ),
    "olmoe": Family(
        "Olmoe",
        defaults=_OLMOE,
        fixed=dict(qk_norm=True, qk_norm_kind="whole"),
        names="experts",
        read=own.olmoe,
        write=own.olmoe_out,
    ),
    "cwm": Family(
        "Cwm",
        defaults=_CWM,
        windows=hf_keys.cwm_windows,
        ropes=functools.partial(hf_ropes.ropes, silent=own.CWM_ROPE),
        read=own.cwm,
        write=own.cwm_out,
    ),
    "granite": Family("Granite", read=own.granite, write=own.granite_out),
    "deepseek_v3": Family(
        "DeepseekV3",
        defaults={"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "n_shared_experts": 1},
        names="deepseek",
        read=own.deepseek,
        write=own.deepseek_out,
    ),
}
# Models with images or sound of which the decoder alone is read: model_type -> keys that stand
# beside text_config and belong to the rest.
WRAPPERS = {
    "mistral3": """image_token_index multimodal_projector_bias projector_hidden_act
    spatial_merge_size vision_feature_layer""",
    "gemma3": """boi_token_index eoi_token_index image_token_index initializer_range
    mm_tokens_per_image""",
    "gemma4": "eoa_token_index initializer_range vision_soft_tokens_per_image",
    "gemma4_unified": "eoa_token_index initializer_range vision_soft_tokens_per_image",
}


def from_hf_config(config: Mapping, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face config.json (as a dict). Raises InputError
    for a family that is not supported, for keys that we would ignore, and for values of
    the wrong type."""
    name, part_of = Keys(config).get("model_type", str), ""
    hf_keys.check_quantisation(Keys(config).get("quantization_config", dict, {}))
    if name in WRAPPERS:
        beside = ("quantization_config", *WRAPPERS[name].split())
        part_of, config = name, hf_keys.text_config(config, beside)
        name = Keys(config).get("model_type", str)
        LOG.warning(
            "config.json: of a %s model its decoder, %s, is read, trained and exported, and no "
            "images or sounds",
            part_of,
            name,
        )
    if name not in FAMILIES:
        rule = f"supported: {', '.join(FAMILIES)}"
        fix = "take a model of one of these families"
        raise InputError("config.json: model_type", value=name, rule=rule, fix=fix)
    family, vision = FAMILIES[name], None
    if family.images:
        whole, config = config, hf_keys.text_config(config)
        how = {k: overrides[k] for k in ("dtype", "weight_dtype") if k in overrides}
        how["remat"] = "none" if overrides.get("remat") == "none" else "full"
        vision = from_hf_vision(whole, **how)
    silent = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "initializer_range": 0.02}
    silent |= {"hidden_act": "silu"}
    keys = Keys(config, {**silent, **family.defaults})
    heads, embed = keys.get("num_attention_heads", int), keys.get("hidden_size", int)
    keys.known.add("quantization_config")
    keys.defaults |= {
        "num_key_value_heads": family.defaults.get("num_key_value_heads", heads),
        "head_dim": family.defaults.get("head_dim", embed // max(heads, 1)),
        "max_position_embeddings": family.defaults.get("max_position_embeddings", 2048),
    }
    fields = {
        "family": name,
        "part_of": part_of,
        **keys.fields(family.common(), ModelConfig),
        **family.fixed,
    }
    layers = fields["layers"]
    if not 1 <= layers <= MOST_LAYERS:  # before a list of them is made
        rule = f"1 to {MOST_LAYERS}"
        fix = "correct num_hidden_layers, or download config.json again"
        raise InputError("config.json: num_hidden_layers", value=layers, rule=rule, fix=fix)
    if config.get("num_key_value_heads", 0) is None:
        fields["kv_heads"] = heads
    activation = keys.get("hidden_activation|hidden_act", str, family.defaults.get("hidden_act"))
    activation = activation or "silu"
    if activation not in ACTIVATIONS:
        rule = f"supported: {', '.join(ACTIVATIONS)}"
        fix = "take a model with one of these activations"
        raise InputError("config.json: hidden_act", value=activation, rule=rule, fix=fix)
    fields["activation"] = ACTIVATIONS[activation]
    theta = float(family.defaults.get("rope_theta", 10_000.0))
    fields["ropes"] = family.ropes(keys, theta, fields["max_tokens"])
    for rope in (rope for rope in fields["ropes"] if rope.kind == "dynamic"):
        fields["max_tokens"] = int(fields["max_tokens"] * rope.factor)  # how far it reaches
    chunk = hf_keys.dual_chunk_tokens(keys)
    if chunk is not None and chunk < fields["max_tokens"]:
        LOG.warning(
            "config.json: dual_chunk_attention_config is not implemented and changes nothing up to "
            "%d tokens: that is the model's context here, not max_position_embeddings, %d",
            chunk,
            fields["max_tokens"],
        )
        fields["max_tokens"] = chunk
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
    rotated = fields.pop("rope_layers", [True] * fields["layers"])
    chunks = fields.pop("chunks", [0] * fields["layers"])
    recurrent = fields.pop("recurrent_layers", [False] * fields["layers"])
    rotated = [a and not b for a, b in zip(rotated, recurrent, strict=True)]
    sizes = fields.pop("layer_sizes", [{}] * fields["layers"])
    local = len(fields["ropes"]) - 1  # Gemma 3: layers with a window have a rope of their own
    return tuple(
        LayerKind(w, c, (local if w else 0) if rotates else None, e, recurrent=r, **s)
        for w, c, e, rotates, r, s in zip(
            windows, chunks, experts, rotated, recurrent, sizes, strict=True
        )
    )


def _context_out(config: ModelConfig) -> int:
    """max_position_embeddings: of a dynamic rope the length from which on it changes."""
    grown = [rope.original_max_tokens for rope in config.ropes if rope.kind == "dynamic"]
    return grown[0] if grown else config.max_tokens


def to_hf_config(
    config: ModelConfig, *, head: str = "lm", bos_id=None, eos_ids=(), pad_id=None
) -> dict:
    """Returns the config.json of a ModelConfig, which transformers and
    `from_hf_config` read back."""
    family = FAMILIES[config.family]
    kind = "ForTokenClassification" if config.head_bias else "ForSequenceClassification"
    kind = "ForCausalLM" if head == "lm" else kind
    stem = family.architecture
    stem += "Text" if stem in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else ""
    activation = next(k for k, v in ACTIVATIONS.items() if v == config.activation)
    out = {
        "architectures": [(family.architecture if head == "lm" else stem) + kind],
        "model_type": config.family,
        **{key.split("|")[0]: getattr(config, field) for key, field in family.common().items()},
        "max_position_embeddings": _context_out(config),
        "rope_theta": config.ropes[0].theta,
        "rope_scaling": hf_ropes.rope_out(config.ropes[0]),
        "hidden_act": activation,
        "torch_dtype": config.weight_dtype,
        "bos_token_id": bos_id,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "pad_token_id": pad_id,
        **family.write(config),
    }
    if "rope_parameters" in out:  # beside them transformers would read the old keys
        del out["rope_theta"], out["rope_scaling"]
    if family.names.startswith("gemma"):
        out["hidden_activation"] = out.pop("hidden_act")  # as the Gemmas say it
    if config.vision:
        outer = ("architectures", "torch_dtype", "tie_word_embeddings")
        text = {**out, "model_type": f"{config.family}_text"}
        extra = {key: text.pop(key) for key in outer}
        extra["architectures"] = [family.architecture + "ForConditionalGeneration"]
        return {**extra, **to_hf_vision(config.vision), "text_config": text}
    if head != "lm":
        out["num_labels"] = config.labels
        if not config.head_bias:  # for AutoModelForTokenClassification
            out["token_classification_bias"] = False
        out["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.labels)}
        if config.squash != "none":
            out["score_squash"] = config.squash
    return out
