"""What is wrong with a malformed Hugging Face folder, case by case."""

# config.json of a model: key -> values that it cannot have.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
BAD_VALUES = [(key, value) for key in SIZES for value in (0, -1, "8", 2.5, True, [8])]
BAD_VALUES += [(key, None) for key in SIZES[:5]]
BAD_VALUES += [
    ("num_key_value_heads", 3),
    ("head_dim", 31),
    ("model_type", "gpt2"),
    ("model_type", None),
    ("model_type", 3),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", -1.0),
    ("rms_norm_eps", float("nan")),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 1),
    ("attention_bias", "no"),
    ("hidden_act", "relu"),
    ("hidden_act", 3),
    ("initializer_range", "0.02"),
    ("rope_parameters", [1]),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "yarn", "factor": -4.0}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}),
    ("rope_parameters", {"rope_type": "dynamic"}),
    ("rope_parameters", {"rope_type": "axial", "factor": 2.0}),
    ("rope_parameters", {"rope_type": 3}),
    ("rope_parameters", {"rope_type": ["llama3"]}),
    ("rope_parameters", {"rope_type": "linear"}),
    ("rope_parameters", {"rope_type": "linear", "factor": "2"}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_parameters", {"rope_theta": "10000"}),
    ("rope_parameters", {"rope_theta": -1.0}),
    ("rope_parameters", {"rope_theta": 1e4, "mrope_section": [1, 2, 3]}),
    ("rope_scaling", {"type": "su", "factor": 2.0}),
    ("use_sliding_window", "yes"),
    ("architectures", 5),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", 7),
    ("num_experts", 8),
    ("attn_logit_softcapping", 50.0),
    ("q_lora_rank", 16),
    ("quantization_config", {"bits": 4}),
    ("vision_config", {}),
    ("", 1),
]

# The whole text of config.json.
CONFIG_TEXTS = [b"", b"{", b"[]", b"null", b"3", b'"qwen3"', b"\xff\xfe{}", b"[" * 100_000]
CONFIG_TEXTS += [b'{"model_type": "qwen3"', b"<html>404</html>", b'{"vocab_size": ' + b"9" * 5000]

# Values of model_type.
FAMILIES = ["mamba", "phimoe", "llama4", "qwen2_vl", "gemma", "deepseek_v2", "kimi_linear", "t5"]
FAMILIES += ["gpt_neox"]

# The header of model.safetensors: what a case makes of a good one.
NORM = "model.norm.weight"
HEADERS = {
    "no header": lambda h: b"",
    "header is no JSON": lambda h: b"{" * 64,
    "header is a list": lambda h: [],
    "header is a number": lambda h: 7,
    "empty header": lambda h: {},
    "entry is null": lambda h: {**h, NORM: None},
    "entry has no dtype": lambda h: {**h, NORM: {k: v for k, v in h[NORM].items() if k != "dtype"}},
    "unknown dtype": lambda h: {**h, NORM: {**h[NORM], "dtype": "F7"}},
    "integer dtype": lambda h: {**h, NORM: {**h[NORM], "dtype": "I32"}},
    "negative shape": lambda h: {**h, NORM: {**h[NORM], "shape": [-1]}},
    "huge shape": lambda h: {**h, NORM: {**h[NORM], "shape": [2**40, 2**40]}},
    "shape is text": lambda h: {**h, NORM: {**h[NORM], "shape": "64"}},
    "shape of another rank": lambda h: {**h, NORM: {**h[NORM], "shape": [8, 8]}},
    "offsets overlap": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, 256]}},
    "offsets backwards": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [256, 0]}},
    "offsets past the end": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, 2**62]}},
    "a tensor is missing": lambda h: {k: v for k, v in h.items() if k != NORM},
    "a tensor is misnamed": lambda h: {("x" if k == NORM else k): v for k, v in h.items()},
}

# model.safetensors.index.json.
INDEXES = {
    "no map": {},
    "map is a list": {"weight_map": []},
    "map of numbers": {"weight_map": {NORM: 3}},
    "map is null": {"weight_map": None},
    "an absent file": {"weight_map": {NORM: "model-00002.safetensors"}},
    "a folder": {"weight_map": {NORM: "."}},
    "an empty name": {"weight_map": {NORM: ""}},
    "too few tensors": {"weight_map": {NORM: "model.safetensors"}},
    "a tensor that its file lacks": {"weight_map": {"lm_head.weight": "model.safetensors"}},
    "no object": [],
}
