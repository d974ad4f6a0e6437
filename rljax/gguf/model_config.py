"""The metadata and tensors of a GGUF file as a Hugging Face config.json and tensor names.

One `Kind` for each general.architecture. A key of the architecture that is not read is refused, for
llama.cpp writes none that leaves the forward pass as it is.
"""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Mapping

import numpy as np

from rljax.errors import InputError
from rljax.files import open_file, read_bytes
from rljax.gguf.header import Header, Tensor
from rljax.gguf.names import ANOTHER_FILE
from rljax.gguf.rows import StoredTensor

LOG = logging.getLogger("rljax")
_LARGEST = 1e15  # of any number
# Keys below the architecture that change no result.
_IGNORED = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "mm.tokens_per_image"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_LAYER = {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
# The constants by which Llama 3.1 and 3.2 scale their rotation; a file holds only the outcome.
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


@dataclasses.dataclass(frozen=True)
class Kind:
    """An architecture of GGUF.

    `model_type` is that of Hugging Face. The names are those of a layer's tensors. `read`
    returns further keys of config.json. `pairs`: rotated pairs are neighbours in the file.
    `norm_shift`: what the file's norms have more than the checkpoint's. `theta`: the default
    where the file has none.
    """

    model_type: str
    architecture: str
    layer: Mapping[str, str]
    read: Callable[["Keys", dict], dict] = lambda keys, config: {}
    pairs: bool = False
    norm_shift: float = 0.0
    theta: float = 10_000.0
    scalings: tuple[str, ...] = ("linear", "yarn")


class Keys:
    """The metadata of one architecture, which remembers what was read."""

    def __init__(self, header: Header, architecture: str):
        self.header, self.prefix = header, f"{architecture}."
        self.known = set(_IGNORED)

    def get(self, key: str, kind: type, default: object = None):
        """Returns a number (int or float), text or bool; `default` where the file has none.
        Raises InputError if there is neither, and for a value of another type or a number
        that is too large."""
        self.known.add(key)
        name = self.prefix + key
        value = self.header.metadata.get(name, default)
        if value is None:
            raise InputError(f"{self.header.path} has no {name}", fix=ANOTHER_FILE)
        numeric = kind in (int, float) and type(value) in (int, float)
        valid = numeric and abs(value) <= _LARGEST if numeric else type(value) is kind
        if not valid or (kind is int and type(value) is not int):
            text = f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else value
            type_name = "number" if kind is float else kind.__name__
            raise self.wrong(key, text, f"one {type_name} is read")
        # A float32 as it was written, not as a float64 shows it: 1e-05.
        return float(str(np.float32(value))) if kind is float else value

    def has(self, key: str) -> bool:
        """Returns whether the file has this key of the architecture."""
        return self.prefix + key in self.header.metadata

    def require(self, key: str, value: object, expected: object, why: str) -> None:
        """Raises InputError unless the value of a key is the one that is read;
        `why` says what for."""
        if value != expected:
            raise self.wrong(key, value, f"{why}: {expected} is read")

    def wrong(self, key: str, value: object, rule: str) -> InputError:
        """Returns the error for a key whose value is not read."""
        subject = f"{self.header.path}: {self.prefix}{key}"
        return InputError(subject, value=value, rule=rule, fix=ANOTHER_FILE)

    def check_all_read(self) -> None:
        """Raises InputError that names the keys of the architecture that nothing read."""
        keys = [k for k in self.header.metadata if k.startswith(self.prefix)]
        unread = sorted(k for k in keys if k.removeprefix(self.prefix) not in self.known)
        if unread:
            raise InputError(
                f"{self.header.path} sets {', '.join(unread)}",
                rule="rljax does not read them, and they change what the model computes",
                fix=ANOTHER_FILE,
            )


# -- architectures --


def _llama(keys: Keys, config: dict) -> dict:
    tensors = keys.header.tensors
    out = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    window = keys.get("attention.sliding_window", int, 0)
    if not window:
        return out
    if any(out.values()):
        raise InputError(
            f"{keys.header.path} has a sliding window and biases",
            rule="a Mistral model has no biases, a Llama model no window",
            fix=ANOTHER_FILE,
        )
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return {**mistral, "sliding_window": window}


def _phi3(keys: Keys, config: dict) -> dict:
    window = keys.get("attention.sliding_window", int, 0)
    # A window as long as the context hides nothing.
    return {"sliding_window": window if 0 < window < config["max_position_embeddings"] else None}


def _gemma(keys: Keys, config: dict) -> dict:
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    out = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": keys.get("attention.sliding_window", int, _GEMMA_WINDOW[keys.prefix]),
    }
    if keys.has("attention.scale"):
        scale = keys.get("attention.scale", float)
        if scale <= 0:
            raise keys.wrong("attention.scale", scale, "a number above 0")
        scalar = scale**-2
        scalar = round(scalar) if abs(scalar - round(scalar)) < 1e-3 else scalar
    elif config["num_hidden_layers"] == _GEMMA_27B[keys.prefix]:
        scalar = embed // heads
    else:
        # Every other published Gemma has it; a file does not say it.
        scalar = 256
        if config["head_dim"] != scalar:
            LOG.warning(
                "%s: query_pre_attn_scalar is taken to be 256, as published models have it: the "
                "file does not say it, and its heads have %d",
                keys.header.path,
                config["head_dim"],
            )
    return {**out, "query_pre_attn_scalar": scalar}


_GEMMA_WINDOW = {"gemma2.": 4096, "gemma3.": 1024}
_GEMMA_27B = {"gemma2.": 46, "gemma3.": 62}  # layers


def _gemma2(keys: Keys, config: dict) -> dict:
    _pattern(keys, 2)
    return {
        **_gemma(keys, config),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3(keys: Keys, config: dict) -> dict:
    return {
        **_gemma(keys, config),
        "sliding_window_pattern": _pattern(keys, 6),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", float, 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
    }


def _pattern(keys: Keys, period: int) -> int:
    """The period of the layers without a window: a number, or one flag for each layer."""
    key = "attention.sliding_window_pattern"
    keys.known.add(key)
    value = keys.header.metadata.get(keys.prefix + key, period)
    if isinstance(value, np.ndarray):
        layers = len(value)

        def fits(p: int) -> bool:
            return all(bool(v) == ((i + 1) % p != 0) for i, v in enumerate(value))

        periods = list(filter(fits, range(1, layers + 1)))
        value = period if period in periods else next(iter(periods), 0)
    if type(value) is not int or value < 1 or (period == 2 and value != 2):
        rule = "layers without a window come at one distance from each other"
        raise keys.wrong(key, value, rule)
    return value


KINDS = {
    "llama": Kind("llama", "Llama", _LAYER, _llama, pairs=True),
    "qwen2": Kind("qwen2", "Qwen2", _LAYER, lambda k, c: {"use_sliding_window": False}),
    "qwen3": Kind(
        "qwen3",
        "Qwen3",
        {**_LAYER, **_QK_NORMS},
        lambda k, c: {"use_sliding_window": False, "attention_bias": False},
    ),
    "gemma2": Kind("gemma2", "Gemma2", _GEMMA_LAYER, _gemma2, norm_shift=1.0),
    "gemma3": Kind(
        "gemma3_text",
        "Gemma3",
        {**_GEMMA_LAYER, **_QK_NORMS},
        _gemma3,
        norm_shift=1.0,
        theta=1_000_000.0,
        scalings=("linear",),
    ),
    "phi3": Kind("phi3", "Phi3", _PHI_LAYER, _phi3, scalings=("longrope",)),
}


def kind_of(header: Header) -> Kind:
    """Returns the kind of a file. Raises InputError that names an architecture that is not read."""
    architecture = header.metadata.get("general.architecture")
    content = header.metadata.get("general.type", "model")
    if content != "model":
        rule = "general.type model is read"
        fix = "name the .gguf file of the model itself"
        raise InputError(f"{header.path} holds no model", value=content, rule=rule, fix=fix)
    if not isinstance(architecture, str) or architecture not in KINDS:
        raise InputError(
            f"{header.path}: general.architecture",
            value=architecture,
            rule=f"read are {', '.join(KINDS)}",
            fix="take the model's Hugging Face folder, whose model_type may be supported",
        )
    return KINDS[architecture]


# -- the whole file --


def hf_config(header: Header) -> dict:
    """Returns config.json of the model that a file holds. Raises InputError for keys and values
    that the decoder would ignore."""
    kind = kind_of(header)
    keys = Keys(header, header.metadata["general.architecture"])
    if keys.get("expert_count", int, 0) or keys.get("expert_used_count", int, 0):
        raise InputError(
            f"{header.path} holds a model of experts",
            value=header.metadata.get(f"{keys.prefix}expert_count"),
            rule="experts of a GGUF file are not read",
            fix="take the model's Hugging Face folder",
        )
    embedding = _tensor(header, "token_embd.weight", 2)
    heads = keys.get("attention.head_count", int)
    embed = keys.get("embedding_length", int)
    if heads < 1:
        keys.require("attention.head_count", heads, 1, "above 0")
    head_dim = keys.get("attention.key_length", int, embed // heads)
    values = keys.get("attention.value_length", int, head_dim)
    keys.require("attention.value_length", values, head_dim, "values as long as keys")
    keys.require("attention.causal", keys.get("attention.causal", bool, True), True, "a decoder")
    config = {
        "architectures": [f"{kind.architecture}ForCausalLM"],
        "model_type": kind.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": embed,
        "intermediate_size": keys.get("feed_forward_length", int),
        "num_hidden_layers": keys.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.get("context_length", int),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32",
        "rope_theta": keys.get("rope.freq_base", float, kind.theta),
    }
    rotated = keys.get("rope.dimension_count", int, head_dim)
    if kind.model_type == "phi3":
        config["partial_rotary_factor"] = rotated / max(head_dim, 1)
    else:
        keys.require("rope.dimension_count", rotated, head_dim, "whole heads are rotated")
    config |= _rope_scaling(kind, keys, config)
    config |= kind.read(keys, config)
    if "hidden_activation" in config:
        del config["hidden_act"]
    keys.check_all_read()
    return config


def _tensor(header: Header, name: str, axes: int) -> Tensor:
    tensor = header.tensors.get(name)
    if tensor is None or len(tensor.shape) != axes:
        raise InputError(
            f"{header.path} has no tensor {name} of {axes} axes",
            value=tensor.shape if tensor else None,
            fix=ANOTHER_FILE,
        )
    return tensor


def _factors(header: Header, name: str) -> list[float]:
    tensor = _tensor(header, name, 1)
    if tensor.type != "F32" or tensor.shape[0] > 4096:
        raise InputError(
            f"{header.path}: tensor {name}",
            value=f"{tensor.type} {tensor.shape}",
            rule="at most 4096 values of F32",
            fix=ANOTHER_FILE,
        )
    out = np.empty(tensor.shape, "<f4")
    file = open_file(header.path)
    try:
        read_bytes(file, header.path, tensor.begin, out)
    finally:
        os.close(file)
    return out.tolist()


def _rope_scaling(kind: Kind, keys: Keys, config: dict) -> dict:
    """Returns rope_scaling, and the keys of config.json that belong to it."""
    header, scaling = keys.header, keys.get("rope.scaling.type", str, "none")
    present = [name for name in _ROPE_TENSORS if name in header.tensors]
    longrope = "longrope" in kind.scalings and set(present) == set(_ROPE_TENSORS[1:])
    context = config["max_position_embeddings"]
    if longrope:
        # Such a file may leave the type unsaid.
        rope_type = scaling if scaling != "none" else "longrope"
        purpose = "the file has factors of LongRoPE"
        keys.require("rope.scaling.type", rope_type, "longrope", purpose)
        original = keys.get("rope.scaling.original_context_length", int)
        factors = {
            "rope_type": "longrope",
            "short_factor": _factors(header, _ROPE_TENSORS[2]),
            "long_factor": _factors(header, _ROPE_TENSORS[1]),
        }
        if keys.has("rope.scaling.attn_factor"):
            factors["attention_factor"] = keys.get("rope.scaling.attn_factor", float)
        return {"rope_scaling": factors, "original_max_position_embeddings": original}
    if present and (present != [_ROPE_TENSORS[0]] or scaling != "none"):
        raise InputError(
            f"{header.path} has the tensors {', '.join(present)} and rope.scaling.type {scaling}",
            rule=f"a {kind.model_type} model has them not, or with another type",
            fix=ANOTHER_FILE,
        )
    if present:
        return {"rope_scaling": _llama3(header, config)}
    if scaling == "none":
        # Phi-3 of 4096 tokens writes its context here, too; without a scaling nothing reads it.
        keys.get("rope.scaling.original_context_length", int, context)
        return {}
    if scaling not in kind.scalings:
        allowed, purpose = " or ".join(("none", *kind.scalings)), f"of a {kind.model_type} model"
        keys.require("rope.scaling.type", scaling, allowed, purpose)
    out = {"rope_type": scaling, "factor": keys.get("rope.scaling.factor", float)}
    if scaling == "yarn":
        original = keys.get("rope.scaling.original_context_length", int, context)
        out["original_max_position_embeddings"] = original
        for hf_key, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if keys.has(f"rope.scaling.{key}"):
                out[hf_key] = keys.get(f"rope.scaling.{key}", float)
    else:
        keys.get("rope.scaling.original_context_length", int, context)
    return {"rope_scaling": out}


def _llama3(header: Header, config: dict) -> dict:
    """Returns the scaling of Llama 3 that has the divisors of frequencies in the file."""
    stored = _factors(header, _ROPE_TENSORS[0])
    factor = round(max(stored, default=1.0), 4)
    half = config["head_dim"] // 2
    low, high, length = _LLAMA3.values()
    divisors = []
    for i in range(half):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * i / config["head_dim"])
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth) if factor else 0.0)
    if len(stored) != half or not np.allclose(stored, divisors, rtol=1e-4, atol=0):
        raise InputError(
            f"{header.path}: tensor {_ROPE_TENSORS[0]} holds other divisors than those of Llama 3",
            value=stored[:4],
            rule=f"low_freq_factor {low}, high_freq_factor {high}, {length} "
            "tokens before it was stretched",
            fix="take the model's Hugging Face folder",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def hf_tensors(header: Header) -> dict[str, StoredTensor]:
    """Returns {Hugging Face name: where and how its rows are stored}. A tensor without a name there
    keeps its own. Raises InputError for queries or keys whose rows are no pairs of each head."""
    kind, architecture = kind_of(header), header.metadata["general.architecture"]
    keys = Keys(header, architecture)
    heads = keys.get("attention.head_count", int)
    kv_heads = keys.get("attention.head_count_kv", int, heads)
    out = {}
    for name, tensor in header.tensors.items():
        if name in _ROPE_TENSORS:  # in config.json
            continue
        match = _BLOCK.fullmatch(name)
        part = match[2] if match else ""
        hf_name = _TOP.get(name, name)
        if part in kind.layer:
            hf_name = f"model.layers.{match[1]}.{kind.layer[part]}.{match[3]}"
        paired = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if kind.pairs else 0
        if paired and (paired < 0 or tensor.shape[0] % (2 * paired)):
            raise InputError(
                f"{header.path}: tensor {name} has shape {tensor.shape}",
                rule=f"an even number of rows for each of {paired} heads",
                fix=ANOTHER_FILE,
            )
        shift = -kind.norm_shift if name.endswith("norm.weight") else 0.0
        out[hf_name] = StoredTensor(
            tensor.type, tensor.shape, tensor.begin, tensor.end, paired, shift
        )
    return out
