"""Reads the keys of config.json that only some families have, and writes them back.

A reader takes the keys and the fields that were read so far, and returns further fields of
ModelConfig. NAME_out takes the ModelConfig and returns the keys. rljax.models.families says which
family uses which. Readers raise InputError for a value that the decoder does not implement.
"""

from collections.abc import Mapping

from rljax.errors import InputError
from rljax.models import hf_keys, hf_ropes
from rljax.models.config import DeltaConfig, LatentConfig, ModelConfig, yarn_mscale
from rljax.models.experts import ExpertsConfig
from rljax.models.hf_keys import NUMBER, Keys, rotated


def biases(keys: Keys, fields: dict) -> dict:
    """Reads attention_bias, for all projections of attention."""
    bias = keys.get("attention_bias", bool, False)
    return {"qkv_bias": bias, "output_bias": bias}


def experts(keys: Keys, names: Mapping[str, str], **fixed) -> ExpertsConfig:
    """Returns the ExpertsConfig of {key of config.json: field}, with these `fixed` fields."""
    return ExpertsConfig(**{**keys.fields(names, ExpertsConfig), **fixed})


MIXTRAL = {"num_local_experts|num_experts": "count", "num_experts_per_tok": "per_token"}
QWEN_MOE = {
    "num_experts|num_local_experts": "count",
    "num_experts_per_tok": "per_token",
    "moe_intermediate_size": "mlp",
    "norm_topk_prob": "normalise",
}
QWEN_NEXT_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": "shared_mlp"}
DELTA = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "taps",
}
LFM2_MOE = {**QWEN_MOE, "routed_scaling_factor": "scale"}
GPT_OSS_ROPE = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
GPT_OSS_ROPE["original_max_position_embeddings"] = 4096
MINISTRAL3_ROPE = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16384)
MINISTRAL3_ROPE |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
CWM_ROPE = dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0)
CWM_ROPE["original_max_position_embeddings"] = 8192
GPT_OSS = {**MIXTRAL, "swiglu_alpha": "alpha", "swiglu_limit": "limit"}
OLMOE = {key: field for key, field in QWEN_MOE.items() if field != "mlp"}
DEEPSEEK = {
    "n_routed_experts|num_local_experts": "count",
    "num_experts_per_tok": "per_token",
    "moe_intermediate_size": "mlp",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "scale",
    "n_group": "groups",
    "topk_group": "groups_kept",
}


def experts_out(config: ModelConfig, names: Mapping[str, str]) -> dict:
    """Writes the fields of ExpertsConfig under their keys."""
    return {key.split("|")[0]: getattr(config.experts, field) for key, field in names.items()}


def mixtral(keys: Keys, fields: dict) -> dict:
    """Reads the experts of Mixtral."""
    how = dict(mlp=fields["mlp"], gated=fields["activation"])
    return {"experts": experts(keys, MIXTRAL, **how)}


def qwen3_moe(keys: Keys, fields: dict) -> dict:
    """Reads the experts of Qwen3-MoE, and which layers have them. Raises InputError for a number in
    mlp_only_layers that is no layer's."""
    listed = keys.get("mlp_only_layers", list, None) or []
    if any(type(i) is not int or not 0 <= i < fields["layers"] for i in listed):
        rule = "numbers of layers"
        fix = f"number the layers from 0 to {fields['layers'] - 1}"
        raise InputError("config.json: mlp_only_layers", value=listed, rule=rule, fix=fix)
    dense = set(listed)
    step = keys.get("decoder_sparse_step", int, 1)
    layers = range(fields["layers"])
    return {
        **biases(keys, fields),
        "experts": experts(keys, QWEN_MOE, gated=fields["activation"]),
        "expert_layers": [i not in dense and step > 0 and (i + 1) % step == 0 for i in layers],
    }


def qwen3_moe_out(config: ModelConfig) -> dict:
    """Writes the experts of Qwen3-MoE, its layers without them, and its window."""
    dense = [i for i, kind in enumerate(config.kinds) if not kind.experts]
    return {
        **experts_out(config, QWEN_MOE),
        "attention_bias": config.qkv_bias,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": bool(config.kinds[0].window),
        **window_out(config),
    }


def recurrent(keys: Keys, fields: dict, *, joined: bool = False) -> dict:
    """Reads which layers of Qwen3.5 are gated delta nets, and their sizes. Raises InputError for
    layers of another type, and for settings that published models do not have: another activation
    than silu, heads without gates, states in other numbers than float32."""
    fixed = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}
    fixed |= {"mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)}
    for key, allowed in fixed.items():
        value = keys.get(key, type(allowed[0]), allowed[0])
        if value not in allowed and not (key == "mlp_only_layers" and joined):
            rule = f"supported: {' or '.join(map(repr, allowed))}"
            fix = "take a model whose config.json says so"
            raise InputError(f"config.json: {key}", value=value, rule=rule, fix=fix)
    # Layers that predict further tokens come after the others, and are not read.
    keys.known |= {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    period = keys.positive("full_attention_interval", int, 4)
    silent = ["full" if (i + 1) % period == 0 else "linear" for i in range(fields["layers"])]
    types = _layer_types(keys, "linear_attention", [f"{name}_attention" for name in silent])
    if fields["activation"] != "silu":
        fix = "take a model whose hidden_act is silu"
        value = fields["activation"]
        raise InputError("config.json: hidden_act", value=value, rule="silu", fix=fix)
    return {
        **biases(keys, fields),
        "delta": DeltaConfig(**keys.fields(DELTA, DeltaConfig), joined=joined),
        "recurrent_layers": [name == "linear_attention" for name in types],
    }


def _layer_types(keys: Keys, recurrent: str, silent: list[str]) -> list[str]:
    """Returns layer_types, of which some are `recurrent`; `silent` where config.json has none.
    Raises InputError unless it names a type for each layer."""
    layers, types = len(silent), keys.get("layer_types", list, None)
    types = silent if types is None else types
    known = (recurrent, "full_attention")
    if len(types) != layers or any(name not in known for name in types):
        rule = f"{layers} names of {' and '.join(known)}"
        fix = "name one type for each layer, or leave layer_types out"
        raise InputError("config.json: layer_types", value=types[:8], rule=rule, fix=fix)
    return types


def recurrent_out(config: ModelConfig) -> dict:
    """Writes the keys that `recurrent` reads, and the fraction of a head that is rotated."""
    types = ["linear" if kind.recurrent else "full" for kind in config.kinds]
    return {
        **{key: getattr(config.delta, field) for key, field in DELTA.items()},
        "layer_types": [f"{name}_attention" for name in types],
        "attention_bias": config.qkv_bias,
        "partial_rotary_factor": config.ropes[0].fraction,
    }


def qwen3_next(keys: Keys, fields: dict) -> dict:
    """Reads the gated delta nets and the experts of Qwen3-Next, of which one sees every token."""
    return {**recurrent(keys, fields, joined=True), **_gated_experts(keys, fields)}


def qwen3_5_moe(keys: Keys, fields: dict) -> dict:
    """Reads the gated delta nets and the experts of Qwen3.5, which all layers have."""
    given = {**recurrent(keys, fields), **_gated_experts(keys, fields)}
    return {**given, "expert_layers": [True] * fields["layers"]}


def _gated_experts(keys: Keys, fields: dict) -> dict:
    given = qwen3_moe(keys, fields)
    how = dict(gated=fields["activation"], shared_gate=True)
    return {**given, "experts": experts(keys, QWEN_NEXT_MOE, **how)}


def qwen3_next_out(config: ModelConfig) -> dict:
    """Writes the keys that `qwen3_next` reads."""
    return {**qwen3_moe_out(config), **qwen3_5_moe_out(config)}


def qwen3_5_moe_out(config: ModelConfig) -> dict:
    """Writes the keys that `qwen3_5_moe` reads."""
    return {**experts_out(config, QWEN_NEXT_MOE), **recurrent_out(config)}


def lfm2(keys: Keys, fields: dict) -> dict:
    """Reads which layers of LFM2 are short convolutions, the tokens that these see, and the size of
    the mlp. Raises InputError as `short_convolutions` does."""
    return {**short_convolutions(keys, fields), "mlp": _mlp_of_lfm2(keys, fields["mlp"])}


def short_convolutions(keys: Keys, fields: dict) -> dict:
    """Reads which layers of LFM2 are short convolutions, and the tokens that these see. Raises
    InputError for layers of another type, for full_attn_idxs that are not the layers with
    attention, and for settings that published models do not have: biases of a convolution, other
    sizes of a block than that of the stream, another activation than silu."""
    fixed = {"conv_bias": False, "use_pos_enc": True, "block_use_swiglu": True}
    fixed |= dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), fields["embed"])
    fixed["block_norm_eps"] = fields["norm_eps"]
    for key, value in fixed.items():
        given = keys.get(key, NUMBER if type(value) is float else type(value), value)
        if given != value:
            fix = "take a model whose config.json says so"
            rule = f"supported: {value}"
            raise InputError(f"config.json: {key}", value=given, rule=rule, fix=fix)
    if fields["activation"] != "silu":  # transformers does not read it
        value, fix = fields["activation"], "take a model whose hidden_act is silu"
        raise InputError("config.json: hidden_act", value=value, rule="silu", fix=fix)
    # How new weights are drawn.
    keys.known |= {"block_mlp_init_scale", "block_out_init_scale"}
    keys.known |= {"block_use_xavier_init", "conv_use_xavier_init"}
    layers = range(fields["layers"])
    attends = keys.get("full_attn_idxs", list, None)
    silent = ["full_attention" if attends is None or i in attends else "conv" for i in layers]
    types = _layer_types(keys, "conv", silent)
    attending = [i for i in layers if types[i] == "full_attention"]
    if attends is not None and (
        len(attends) != len(attending) or any(i not in attends for i in attending)
    ):
        rule = f"the numbers, from 0 to {fields['layers'] - 1}, of the layers with attention"
        fix = "correct it, or leave it out where there are layer_types"
        raise InputError("config.json: full_attn_idxs", value=attends[:8], rule=rule, fix=fix)
    return {
        "short_conv": keys.get("conv_L_cache", int),
        "recurrent_layers": [name == "conv" for name in types],
    }


def _mlp_of_lfm2(keys: Keys, mlp: int) -> int:
    """Returns the hidden size of the mlp: two thirds of what config.json says, by a multiplier, in
    whole multiples; or just that."""
    multiple = keys.positive("block_multiple_of", int, 256)
    multiplier = keys.get("block_ffn_dim_multiplier", NUMBER, None)
    if not keys.get("block_auto_adjust_ff_dim", bool, True):
        return mlp
    mlp = int(2 * mlp / 3)
    if multiplier is None:
        return mlp
    mlp = int(keys.positive("block_ffn_dim_multiplier", NUMBER) * mlp)
    return -(-mlp // multiple) * multiple


def lfm2_out(config: ModelConfig) -> dict:
    """Writes the keys that `lfm2` reads."""
    return {**short_convolutions_out(config), "block_auto_adjust_ff_dim": False}


def short_convolutions_out(config: ModelConfig) -> dict:
    """Writes the keys that `short_convolutions` reads."""
    types = ["conv" if kind.recurrent else "full_attention" for kind in config.kinds]
    return {"conv_L_cache": config.short_conv, "conv_bias": False, "layer_types": types}


def lfm2_moe(keys: Keys, fields: dict) -> dict:
    """Reads the short convolutions and the experts of LFM2, which all layers from some layer on
    have."""
    first = keys.get("num_dense_layers", int, 2)
    bias = keys.get("use_expert_bias", bool, True)
    fixed = dict(gated=fields["activation"], scores="sigmoid", correction_bias=bias)
    return {
        **short_convolutions(keys, fields),
        "experts": experts(keys, LFM2_MOE, **fixed),
        "expert_layers": [i >= first for i in range(fields["layers"])],
    }


def lfm2_moe_out(config: ModelConfig) -> dict:
    """Writes the keys that `lfm2_moe` reads."""
    return {
        **short_convolutions_out(config),
        **experts_out(config, LFM2_MOE),
        "use_expert_bias": config.experts.correction_bias,
        "num_dense_layers": sum(not kind.experts for kind in config.kinds),
    }


def gpt_oss(keys: Keys, fields: dict) -> dict:
    """Reads the experts of gpt-oss, which have biases and a clamped SwiGLU."""
    fixed = dict(mlp=fields["mlp"], router_bias=True, expert_bias=True, gated="clamped_swiglu")
    return {**biases(keys, fields), "experts": experts(keys, GPT_OSS, **fixed)}


def deepseek_experts(keys: Keys, fields: dict) -> dict:
    """Reads the experts of DeepSeek-V3 and GLM-4.5, which all layers from some layer on have.
    Raises InputError for routing rules other than DeepSeek-V3's."""
    rules = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for key, value in rules.items():
        given = keys.get(key, (str, int), value)
        if given != value:
            rule = f"supported: {value}"
            fix = "take a DeepSeek-V3 model, whose config.json says so"
            raise InputError(f"config.json: {key}", value=given, rule=rule, fix=fix)
    first = keys.get("first_k_dense_replace", int, 3)
    shared = keys.get("n_shared_experts", int, 1) * keys.get("moe_intermediate_size", int)
    fixed = dict(scores="sigmoid", correction_bias=True, shared_mlp=shared)
    return {
        "experts": experts(keys, DEEPSEEK, gated=fields["activation"], **fixed),
        "expert_layers": [i >= first for i in range(fields["layers"])],
    }


def deepseek_experts_out(config: ModelConfig) -> dict:
    """Writes the experts of DeepSeek-V3 and GLM-4.5, and the number of dense layers before them."""
    return {
        **experts_out(config, DEEPSEEK),
        "n_shared_experts": config.experts.shared_mlp // config.experts.mlp,
        "first_k_dense_replace": sum(not kind.experts for kind in config.kinds),
    }


def deepseek(keys: Keys, fields: dict) -> dict:
    """Reads the latent attention, its scale under YaRN, and the experts of DeepSeek-V3."""
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
    return {
        **biases(keys, fields),
        **deepseek_experts(keys, fields),
        "latent": latent,
        "head_dim": latent.rope_dim,
        "attention_scale": scale,
    }


def deepseek_out(config: ModelConfig) -> dict:
    """Writes the latent attention and the experts of DeepSeek-V3."""
    latent = config.latent
    return {
        **deepseek_experts_out(config),
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
        "attention_bias": config.qkv_bias,
    }


def attention_bias_out(config: ModelConfig) -> dict:
    """Writes attention_bias."""
    return {"attention_bias": config.qkv_bias}


def llama(keys: Keys, fields: dict) -> dict:
    """Reads attention_bias and mlp_bias."""
    return {**biases(keys, fields), "mlp_bias": keys.get("mlp_bias", bool, False)}


def llama_out(config: ModelConfig) -> dict:
    """Writes attention_bias and mlp_bias."""
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def gemma(keys: Keys, fields: dict) -> dict:
    """Reads Gemma's scale of attention and its soft caps, and scales the embeddings
    by sqrt(embed)."""
    return {
        **biases(keys, fields),
        "attention_scale": keys.positive("query_pre_attn_scalar", NUMBER, 256.0) ** -0.5,
        "attention_soft_cap": keys.get("attn_logit_softcapping", NUMBER, 0.0),
        "final_soft_cap": keys.get("final_logit_softcapping", NUMBER, 0.0),
        "embed_scale": fields["embed"] ** 0.5,
    }


def gemma3(keys: Keys, fields: dict) -> dict:
    """Reads the keys of `gemma`. Raises InputError for a soft cap of attention,
    which Gemma 3 lacks."""
    fields_read = gemma(keys, fields)
    if fields_read["attention_soft_cap"]:  # transformers keeps it, and does not apply it
        raise InputError(
            "config.json: attn_logit_softcapping",
            value=fields_read["attention_soft_cap"],
            rule="a gemma3_text model has none",
            fix="remove attn_logit_softcapping from config.json, or set it to null",
        )
    return fields_read


def gemma_out(config: ModelConfig) -> dict:
    """Writes the keys that `gemma` reads."""
    scalar = config.attention_scale**-2
    return {
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.final_soft_cap or None,
    }


def gemma4(keys: Keys, fields: dict) -> dict:
    """Reads the sizes of the layers that see everything, the soft cap and the scale of embeddings
    of Gemma 4. Raises InputError for what the decoder does not implement."""
    layers = fields["layers"]
    for key, rule in (
        ("hidden_size_per_layer_input", "0: embeddings of each layer are not implemented"),
        ("num_kv_shared_layers", "0: layers that read the keys and values of others are not"),
        ("enable_moe_block", "false: experts beside a dense mlp are not implemented"),
    ):
        silent = False if key.startswith("enable") else 0
        if given := keys.get(key, type(silent), silent):
            fix = "take a dense model without them, such as the 31B"
            raise InputError(f"config.json: {key}", value=given, rule=rule, fix=fix)
    keys.known |= {"vocab_size_per_layer_input", "use_double_wide_mlp"}  # of what is refused above
    keys.known |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    seen = keys.get("use_bidirectional_attention", str, "vision")
    if seen != "vision":
        rule = "null or vision: a token of text sees those before it"
        fix = "take a causal model"
        raise InputError("config.json: use_bidirectional_attention", value=seen, rule=rule, fix=fix)
    of_keys = keys.get("attention_k_eq_v", bool, False)
    wide = keys.positive("global_head_dim", int, 512)
    few = keys.get("num_global_key_value_heads", int, 0) if of_keys else 0
    keys.known.add("num_global_key_value_heads")
    windows = hf_keys.gemma4_windows(keys, layers)
    sizes = [
        {} if w else dict(head_dim=wide, kv_heads=few, values_of_keys=of_keys) for w in windows
    ]
    return {
        **biases(keys, fields),
        "attention_scale": 1.0,
        "final_soft_cap": keys.get("final_logit_softcapping", NUMBER, 0.0),
        "embed_scale": fields["embed"] ** 0.5,
        "layer_sizes": _sizes_by_layer(keys, sizes),
    }


def _sizes_by_layer(keys: Keys, sizes: list[dict]) -> list[dict]:
    """Returns the fields of LayerKind of every layer, from `per_layer_config` where it is there, as
    transformers writes it. Raises InputError for other keys in it."""
    given = keys.get("per_layer_config", Mapping, None)
    if given is None:
        return sizes
    out = []
    for i, layer in enumerate(sizes):
        own = Keys(given.get(str(i)) or {})
        head_dim = own.get("head_dim", int, 0)
        kv_heads = own.get("num_key_value_heads", int, 0)
        unread = sorted(set(own.config) - own.known)
        hf_keys.refuse_unread(f"config.json: per_layer_config: {i} sets", own.config, unread)
        out.append({**layer, "head_dim": head_dim, "kv_heads": kv_heads})
    return out


def gemma4_out(config: ModelConfig) -> dict:
    """Writes the keys that `gemma4` reads, and the windows and ropes."""
    whole = next(kind for kind in config.kinds if not kind.window)
    windows = windows_out(config)
    return {
        **attention_bias_out(config),
        **windows,
        **hf_ropes.nested_ropes_out(config.ropes),
        "sliding_window": windows["sliding_window"] or 512,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": config.final_soft_cap or None,
        "global_head_dim": whole.head_dim or config.head_dim,
        "num_global_key_value_heads": whole.kv_heads or None,
        "attention_k_eq_v": whole.values_of_keys,
    }


def window_out(config: ModelConfig) -> dict:
    """Writes sliding_window, for the families with one window for all layers."""
    return {"sliding_window": config.kinds[0].window or None}


def ministral3(keys: Keys, fields: dict) -> dict:
    """Reads the temperature of Ministral 3, which is one of the rope parameters. Raises InputError
    for one without the length at which it begins to grow."""
    parameters = keys.get("rope_parameters", Mapping, None) or keys.get("rope_scaling", Mapping, {})
    parameters = Keys(parameters or MINISTRAL3_ROPE)
    slope = parameters.get("llama_4_scaling_beta", NUMBER, 0.0)
    if not slope:
        return {}
    floor = parameters.positive("original_max_position_embeddings", int)
    return dict(temperature_floor=floor, temperature_slope=slope, temperature_on_all=True)


def ministral3_out(config: ModelConfig) -> dict:
    """Writes the window of Ministral 3, and its rope parameters in the new spelling, without which
    transformers takes those of the published models."""
    parameters = hf_ropes.whole_rope_out(config.ropes[0])
    if floor := config.temperature_floor:
        parameters["llama_4_scaling_beta"] = config.temperature_slope
        parameters["original_max_position_embeddings"] = floor
    return {**window_out(config), "rope_parameters": parameters}


def windows_out(config: ModelConfig) -> dict:
    """Writes layer_types and sliding_window, for the families that read them."""
    windows = [kind.window for kind in config.kinds]
    types = ["sliding_attention" if w else "full_attention" for w in windows]
    return {"sliding_window": max(windows, default=0) or None, "layer_types": types}


def qwen_out(config: ModelConfig) -> dict:
    """Writes the windows of Qwen, if it has any."""
    on = any(kind.window for kind in config.kinds)
    windows = {"max_window_layers": 0, **windows_out(config)} if on else {}
    return {"use_sliding_window": on, **windows}


def smollm3(keys: Keys, fields: dict) -> dict:
    """Reads the biases of SmolLM3, and which layers are rotated."""
    return {**llama(keys, fields), "rope_layers": rotated(keys, fields["layers"])}


def smollm3_out(config: ModelConfig) -> dict:
    """Writes the biases and windows of SmolLM3, and which layers are rotated."""
    rotates = [int(kind.rope is not None) for kind in config.kinds]
    windows = {**qwen_out(config), "layer_types": windows_out(config)["layer_types"]}
    return {**llama_out(config), **windows, "no_rope_layers": rotates}


def granite(keys: Keys, fields: dict) -> dict:
    """Reads the biases of Granite, and its multipliers."""
    return {
        **llama(keys, fields),
        "embed_scale": keys.positive("embedding_multiplier", NUMBER, 1.0),
        "residual_scale": keys.positive("residual_multiplier", NUMBER, 1.0),
        "attention_scale": keys.positive("attention_multiplier", NUMBER, 1.0),
        "logit_divisor": keys.positive("logits_scaling", NUMBER, 1.0),
    }


def granite_out(config: ModelConfig) -> dict:
    """Writes the keys that `granite` reads."""
    return {
        **llama_out(config),
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": config.logit_divisor,
    }


def llama4(keys: Keys, fields: dict) -> dict:
    """Reads the experts, chunks, rotated layers and attention temperature of Llama 4. Raises
    InputError for layer_types that do not fit the layers, and for a number in moe_layers
    that is no layer's."""
    layers, rotary = fields["layers"], rotated(keys, fields["layers"])
    chunk = keys.get("attention_chunk_size", int, 0)
    types = keys.get("layer_types", list, None)
    if types is None:
        types = ["chunked_attention" if t and chunk else "full_attention" for t in rotary]
    known = {"full_attention": 0, "chunked_attention": chunk}
    good = len(types) == layers and all(isinstance(t, str) and t in known for t in types)
    if not good or chunk < 0 or ("chunked_attention" in types and not chunk):
        rule = f"one of {', '.join(known)} (with attention_chunk_size) for each of {layers} layers"
        fix = "correct layer_types, or leave it out: every fourth layer attends to all"
        raise InputError("config.json: layer_types", value=types[:4], rule=rule, fix=fix)
    step = keys.positive("interleave_moe_layer_step", int, 1)
    sparse = keys.get("moe_layers", list, None)
    sparse = list(range(step - 1, layers, step)) if sparse is None else sparse
    if any(type(i) is not int or not 0 <= i < layers for i in sparse):
        fix = f"number the layers from 0 to {layers - 1}"
        raise InputError("config.json: moe_layers", value=sparse, rule="numbers of layers", fix=fix)
    small = fields["mlp"]
    how = dict(mlp=small, shared_mlp=small, scores="sigmoid", normalise=False, scale_input=True)
    tuned = keys.get("attn_temperature_tuning", bool, True)
    floor = keys.positive("floor_scale", int, 8192)
    return {
        **biases(keys, fields),
        "mlp": keys.get("intermediate_size_mlp", int),
        "experts": experts(keys, MIXTRAL, gated=fields["activation"], **how),
        "expert_layers": [i in sparse for i in range(layers)],
        "rope_layers": rotary,
        "chunks": [known[t] for t in types],
        "qk_norm": keys.get("use_qk_norm", bool, True),
        "temperature_floor": floor if tuned else 0,
        "temperature_slope": keys.get("attn_scale", NUMBER, 0.1),
    }


def llama4_out(config: ModelConfig) -> dict:
    """Writes the keys that `llama4` reads."""
    chunks = [kind.chunk for kind in config.kinds]
    floor = config.temperature_floor
    return {
        **attention_bias_out(config),
        **experts_out(config, MIXTRAL),
        "intermediate_size": config.experts.mlp,
        "intermediate_size_mlp": config.mlp,
        "moe_layers": [i for i, kind in enumerate(config.kinds) if kind.experts],
        "no_rope_layers": [int(kind.rope is not None) for kind in config.kinds],
        "layer_types": ["chunked_attention" if c else "full_attention" for c in chunks],
        "attention_chunk_size": max(chunks) or None,
        "use_qk_norm": config.qk_norm,
        "attn_temperature_tuning": floor > 0,
        **({"floor_scale": floor} if floor else {}),
        "attn_scale": config.temperature_slope,
    }


def minimax_m2(keys: Keys, fields: dict) -> dict:
    """Reads the experts of MiniMax M2. Raises InputError for settings of its older models."""
    beta = "layernorm_{}_attention_beta".format
    rules = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    rules |= {"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "layernorm_mlp_beta": 1.0}
    rules |= {beta("full"): 1.0, beta("linear"): 1.0}
    for key, value in rules.items():
        given = keys.get(key, NUMBER if type(value) is float else type(value), value)
        if given != value:
            rule = f"supported: {value}, as of MiniMax M2"
            fix = "take a model whose config.json says so"
            raise InputError(f"config.json: {key}", value=given, rule=rule, fix=fix)
    types = keys.get("attn_type_list", list, [])
    if any(kind != 1 for kind in types):
        rule = "1 for every layer: linear attention is not implemented"
        fix = "take a model without linear attention"
        raise InputError("config.json: attn_type_list", value=types[:8], rule=rule, fix=fix)
    # Of layers that predict further tokens, which are not read, and of a dense mlp that none has.
    keys.known |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
    keys.known |= {"mlp_intermediate_size", "shared_moe_mode"}
    how = dict(mlp=fields["mlp"], gated=fields["activation"], scores="sigmoid")
    return {"experts": experts(keys, MIXTRAL, correction_bias=True, **how)}


def minimax_m2_out(config: ModelConfig) -> dict:
    """Writes the experts of MiniMax M2, and how much of a head is rotated in both spellings."""
    (rope,) = config.ropes
    return {
        **experts_out(config, MIXTRAL),
        "partial_rotary_factor": rope.fraction,
        "rotary_dim": rope.dims(config.head_dim),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


def seed_oss(keys: Keys, fields: dict) -> dict:
    """Reads the biases of Seed-OSS, whose output projection has a key of its own."""
    keys.known.add("residual_dropout")
    return {
        "qkv_bias": keys.get("attention_bias", bool, True),
        "output_bias": keys.get("attention_out_bias", bool, False),
        "mlp_bias": keys.get("mlp_bias", bool, False),
    }


def seed_oss_out(config: ModelConfig) -> dict:
    """Writes the keys that `seed_oss` reads."""
    return {**llama_out(config), "attention_out_bias": config.output_bias}


def ernie4_5(keys: Keys, fields: dict) -> dict:
    """Reads use_bias, for all linear maps of ERNIE 4.5."""
    bias = keys.get("use_bias", bool, False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def ernie4_5_out(config: ModelConfig) -> dict:
    """Writes use_bias."""
    return {"use_bias": config.mlp_bias}


def exaone4(keys: Keys, fields: dict) -> dict:
    """Reads which layers of EXAONE 4 are rotated: where layers have windows, those alone."""
    windows = hf_keys.exaone4_windows(keys, fields["layers"])
    hybrid = keys.get("sliding_window", int, None) is not None
    return {"rope_layers": [bool(window) or not hybrid for window in windows]}


def exaone4_out(config: ModelConfig) -> dict:
    """Writes the windows of EXAONE 4, which also say which layers are rotated."""
    windows = windows_out(config)
    if windows["sliding_window"] is None and config.kinds[0].rope is None:
        windows["sliding_window"] = 4096  # no layer has one, and none is rotated
    return windows


def olmoe(keys: Keys, fields: dict) -> dict:
    """Reads the biases and the experts of OLMoE, which all layers have."""
    how = dict(mlp=fields["mlp"], gated=fields["activation"])
    return {**biases(keys, fields), "experts": experts(keys, OLMOE, **how)}


def olmoe_out(config: ModelConfig) -> dict:
    """Writes the keys that `olmoe` reads."""
    return {**attention_bias_out(config), **experts_out(config, OLMOE)}


def cwm(keys: Keys, fields: dict) -> dict:
    """Reads mlp_bias."""
    return {"mlp_bias": keys.get("mlp_bias", bool, False)}


def cwm_out(config: ModelConfig) -> dict:
    """Writes mlp_bias, the windows of CWM, and its rope in the new spelling, without which
    transformers takes that of the published model."""
    rope = {"rope_parameters": hf_ropes.whole_rope_out(config.ropes[0])}
    return {"mlp_bias": config.mlp_bias, **windows_out(config), **rope}


def phi3(keys: Keys, fields: dict) -> dict:
    """Raises InputError for settings of Phi-4-mini that the decoder does not implement."""
    for key in ("full_attn_mod", "interpolate_factor"):  # as Phi-4-mini's config.json has them
        if (given := keys.get(key, int, 1)) != 1:
            rule = "supported: 1; transformers' Phi3 has nothing else, either"
            raise InputError(
                f"config.json: {key}",
                value=given,
                rule=rule,
                fix=f"remove {key} from config.json if the model works without it, or take another "
                "model",
            )
    return {}


def phi3_out(config: ModelConfig) -> dict:
    """Writes the window and the rotary settings of Phi-3."""
    rope = config.ropes[0]
    original = {"original_max_position_embeddings": rope.original_max_tokens}
    return {
        **window_out(config),
        "partial_rotary_factor": rope.fraction,
        **(original if rope.kind == "longrope" else {}),
    }


def qkv_bias(keys: Keys, fields: dict) -> dict:
    """Reads attention_bias, for queries, keys and values alone."""
    return {"qkv_bias": keys.get("attention_bias", bool, False)}


def glm_out(config: ModelConfig) -> dict:
    """Writes attention_bias and the fraction of a head that GLM rotates."""
    return {**attention_bias_out(config), "partial_rotary_factor": config.ropes[0].fraction}


def glm4_moe(keys: Keys, fields: dict) -> dict:
    """Reads the bias, the experts and the norms of queries and keys of GLM-4.5."""
    norm = {"qk_norm": keys.get("use_qk_norm", bool, False)}
    return {**qkv_bias(keys, fields), **deepseek_experts(keys, fields), **norm}


def glm4_moe_out(config: ModelConfig) -> dict:
    """Writes the keys that `glm4_moe` reads, and the fraction of a head that is rotated."""
    return {**glm_out(config), **deepseek_experts_out(config), "use_qk_norm": config.qk_norm}
