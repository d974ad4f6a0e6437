"""Reads a Hugging Face config.json, with a record of which keys were read, and the
window of each layer.

Families share these functions; which family reads what is in rljax.models.families, and the rotary
settings in rljax.models.hf_ropes.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

from rljax.errors import InputError

# Keys that do not change the forward pass, beside those of `_is_note`.
_IGNORED = frozenset(
    """architectures attention_dropout resid_pdrop embd_pdrop dtype torch_dtype
    transformers_version use_cache is_llama_config pretraining_tp num_labels id2label label2id
    token_classification_bias
    classifier_dropout is_decoder output_attentions return_dict output_hidden_states
    problem_type chunk_size_feed_forward is_encoder_decoder max_window_layers
    output_router_logits router_aux_loss_coef router_jitter_noise ep_size aux_loss_alpha seq_aux
    num_nextn_predict_layers num_mtp_layers cache_implementation qk_head_dim
    auto_map initial_context_length moe_layer_freq scoring_func
    topk_method model_type hidden_activation hidden_act attn_implementation max_length
    tokenizer_class tokenizer_padding_side tokenizer_model_max_length keys_to_ignore_at_inference
    gradient_checkpointing use_return_dict hidden_dropout step_separator""".split()
)
# Names of one thing. Exporters write a second one beside that which transformers reads, and vLLM or
# an older release may read the second: it is accepted where it says the same.
_NAMES_OF_ONE = (
    ("hidden_activation", "hidden_act", "activation", "activation_function"),
    ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk"),
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("sliding_window", "sliding_window_size"),
    ("max_position_embeddings", "max_sequence_length", "max_seq_length", "max_seq_len")
    + ("seq_length", "model_max_length", "n_positions", "n_ctx"),
    ("hidden_size", "n_embd", "d_model"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    ("head_dim", "kv_channels"),
    ("rms_norm_eps", "norm_eps"),
    ("rope_theta", "rope_base", "rotary_emb_base", "theta"),
)
# Names of a gated activation, which hidden_act names by the function of its gate.
_GATED = {"swiglu": ("silu",), "geglu": ("gelu", "gelu_pytorch_tanh")}
NUMBER = (int, float)
LARGEST_NUMBER = 1e15  # of any setting
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
MISSING = object()


def _is_note(key: str) -> bool:
    """Returns whether a key never changes the forward pass, whatever it is called: a note of
    transformers, transformers.js or Unsloth to itself ("_model_name_or_path",
    "transformers.js_config", "unsloth_version") or the id of a token ("unk_token_id")."""
    own = key.startswith(("_", "unsloth_", "transformers.js", "transformers_js"))
    return own or key.endswith("_token_id")


def refuse_unread(what: str, values: Mapping, unread: list[str]) -> None:
    """Raises one InputError that names every key that nothing read, if there is any."""
    if unread:
        names, one = ", ".join(map(repr, unread)), len(unread) == 1
        raise InputError(
            f"{what} {names}",
            value=values[unread[0]] if one else {key: values[key] for key in unread},
            rule=f"the decoder does not implement {'it' if one else 'them'}, and would silently "
            f"ignore {'it' if one else 'them'}",
            fix=f"remove {names} if the model works without {'it' if one else 'them'}, or take "
            "another model",
        )


class Keys:
    """A config.json that remembers which of its keys were read, so that the rest can be refused."""

    def __init__(self, config: Mapping, defaults: Mapping = {}):  # noqa: B006  never written
        self.config, self.defaults, self.known = config, defaults, set()

    def fields(self, names: Mapping[str, str], of: type) -> dict:
        """Returns {field: value} for {key: field of the dataclass `of`}, each of the field's type.
        Raises InputError as `get` does."""
        types = {f.name: NUMBER if f.type is float else f.type for f in dataclasses.fields(of)}
        return {field: self.get(key, types[field]) for key, field in names.items()}

    def get(self, key: str, kind: type | tuple, default: object = MISSING):
        """Returns the value of a key, or where it is absent or null the family's default, then
        `default`. A key "a|b" may be spelled either way. Raises InputError if there is no value at
        all, for one of another type than `kind`, for numbers beyond LARGEST_NUMBER, and for two
        spellings that disagree."""
        names = key.split("|")
        self.known |= set(names)
        given = [name for name in names if self.config.get(name) is not None]
        for name in given[1:]:  # Gemma's hidden_act was wrong, so hidden_activation goes before it
            if self.config[name] != self.config[given[0]] and name != "hidden_act":
                raise _disagreement(name, self.config[name], given[0], self.config[given[0]])
        value = self.config[given[0]] if given else None
        if value is None:
            null = any(n in self.config for n in names)
            value = self.defaults.get(names[0], default)
            if null and default is not MISSING:
                value = default
            if value is MISSING:
                raise InputError(
                    f"config.json has no {names[0]!r}",
                    fix="use the config.json that came with the weights",
                )
            return value
        if isinstance(value, bool) and kind is not bool or not isinstance(value, kind):
            name = kind.__name__ if isinstance(kind, type) else "number"
            rule = f"must be a {name}"
            fix = f"correct {names[0]}, or download config.json again"
            raise InputError(f"config.json: {names[0]}", value=value, rule=rule, fix=fix)
        if type(value) in NUMBER and abs(value) > LARGEST_NUMBER:
            rule = f"a number of at most {LARGEST_NUMBER:g}"
            fix = f"correct {names[0]}, or download config.json again"
            raise InputError(f"config.json: {names[0]}", value=value, rule=rule, fix=fix)
        return float(value) if kind == NUMBER else value

    def positive(self, key: str, kind: type | tuple, default: object = MISSING):
        """Returns the value as `get` does. Raises InputError unless it is above 0."""
        value = self.get(key, kind, default)
        if not value > 0:
            rule = "above 0"
            fix = "correct it, or download config.json again"
            raise InputError(f"config.json: {key.split('|')[0]}", value=value, rule=rule, fix=fix)
        return value

    def check_all_read(self, family: str) -> None:
        """Raises InputError for a key that nothing read, and for a second name that says something
        else than the first. Exporters write switches that are off (use_mrope: false): off is
        what the decoder does."""
        off = {k for k, v in self.config.items() if v is None or v is False}
        unread = set(self.config) - self.known - _IGNORED - off
        unread = sorted(k for k in unread if not (_is_note(k) or self._is_second_name(k)))
        refuse_unread(f"config.json of a {family} model sets", self.config, unread)

    def _is_second_name(self, key: str) -> bool:
        """Returns whether a key is another name of one that was read, and of the same value. Raises
        InputError for another value."""
        names = next((names for names in _NAMES_OF_ONE if key in names), ())
        names = [name for name in names if name in self.known and name != key]
        given = [name for name in names if name in self.config]
        silent = [name for name in names if name in self.defaults]
        if not given and not silent:
            return False
        first = next((n for n in given if self.config[n] is not None), (given or silent)[0])
        value = self.config[first] if given else self.defaults[first]
        own = self.config[key]
        alike = own == value and isinstance(own, bool) == isinstance(value, bool)
        if not alike and not (isinstance(own, str) and value in _GATED.get(own.lower(), ())):
            raise _disagreement(key, own, first, value)
        return True


def _disagreement(second: str, own: object, first: str, value: object) -> InputError:
    return InputError(
        f"config.json: {second}",
        value=own,
        rule=f"another name of {first}, which is read and is {value!r}",
        fix=f"remove {second} if {first} is right, or correct {first}",
    )


def dual_chunk_tokens(keys: Keys) -> int | None:
    """Returns the tokens up to which `dual_chunk_attention_config` changes nothing: a chunk without
    what is shared with the next one. None: there is none. Raises InputError for settings that
    change shorter sequences, too, or whose chunks cannot be told.

    transformers never reads it, and vLLM does. Within a chunk both attend to all tokens as ever.
    """
    name = "dual_chunk_attention_config"
    settings = keys.get(name, Mapping, None)
    if not settings:
        return None
    inside = Keys(settings)
    chunk, shared = inside.positive("chunk_size", int), inside.get("local_size", int, 0)
    original = inside.positive("original_max_position_embeddings", int, chunk)
    off = {k for k, v in settings.items() if v is None or v is False}
    unread = sorted(set(settings) - inside.known - off)
    refuse_unread(f"config.json: {name} sets", settings, unread)
    if not 0 <= shared < chunk:
        rule = f"0 or above, and below chunk_size, {chunk}"
        fix = "correct it, or download config.json again"
        raise InputError(f"config.json: {name}: local_size", value=shared, rule=rule, fix=fix)
    return min(chunk - shared, original)


def check_quantisation(settings: Mapping) -> None:
    """Raises InputError for quantised weights that rljax.models.huggingface.quantised
    does not decode."""
    if not settings:
        return
    method, kind = settings.get("quant_method"), settings.get("fmt", "e4m3")
    good = method == "mxfp4" or (method == "fp8" and kind in ("e4m3", "float8_e4m3fn"))
    if not good:
        raise InputError(
            "config.json: quantization_config.quant_method",
            value=method if method != "fp8" else f"fp8 of fmt {kind}",
            rule="fp8 (e4m3) and mxfp4 are decoded while loading, others are not",
            fix="give the folder of the model in bfloat16, from which this one was quantised",
        )


# -- which layers are what


def _layer_types(keys: Keys, layers: int) -> list | None:
    types = keys.get("layer_types", list, None)
    if types is not None and len(types) != layers:
        rule = f"{layers}, one each"
        fix = "name one type for each layer, or leave layer_types out"
        raise InputError("config.json: layer_types", value=len(types), rule=rule, fix=fix)
    other = [t for t in types or () if t not in ("full_attention", "sliding_attention")]
    if other:
        rule = "supported: full_attention, sliding_attention"
        fix = "take a model whose layers are of these types"
        raise InputError("config.json: layer_types", value=other[0], rule=rule, fix=fix)
    return types


def windows(keys: Keys, layers: int, default: Callable[[int], bool] | None) -> list[int]:
    """Returns the window of every layer, in tokens, 0 for none: `layer_types` if given; else
    `default(i)` decides which layers slide. Raises InputError for a type of layer that is not
    known, and for a window below 1 where a layer slides."""
    window = keys.get("sliding_window", int, None)
    types = _layer_types(keys, layers)
    if types is None:
        slides = [bool(default and default(i)) for i in range(layers)]
    else:
        slides = [t == "sliding_attention" for t in types]
    if any(slides) and window is not None and window < 1:
        rule = "above 0 where it is on"
        fix = "set sliding_window to the tokens that a layer sees, or to null"
        raise InputError("config.json: sliding_window", value=window, rule=rule, fix=fix)
    return [(window or 0) if s else 0 for s in slides]


def every(keys: Keys, layers: int) -> list[int]:
    """Returns Mistral's windows: one, if there is any, on every layer. Raises InputError if
    it is negative."""
    window = keys.get("sliding_window", int, None)
    if window is not None and window < 0:
        fix = "set sliding_window to the tokens that a layer sees, or to null"
        raise InputError("config.json: sliding_window", value=window, rule="0 or above", fix=fix)
    return [window or 0] * layers


def _windows_are_on(keys: Keys, layers: int) -> bool:
    """Returns whether `use_sliding_window` is, without which no layer may be said to slide."""
    if keys.get("use_sliding_window", bool, False):
        return True
    keys.get("sliding_window", int, None)
    if "sliding_attention" in (_layer_types(keys, layers) or ()):
        raise InputError(
            "config.json: layer_types has sliding_attention",
            rule="use_sliding_window is off",
            fix="use the config.json that came with the weights",
        )
    return False


def qwen_windows(keys: Keys, layers: int) -> list[int]:
    """Returns Qwen's windows: only where they are switched on, and from max_window_layers upwards.
    Raises InputError if layer_types has sliding layers and they are off."""
    if not _windows_are_on(keys, layers):
        return [0] * layers
    first = keys.get("max_window_layers", int, 28)
    return windows(keys, layers, lambda i: i >= first)


def qwen_moe_windows(keys: Keys, layers: int) -> list[int]:
    """Returns one window for all layers, where it is switched on."""
    window = keys.get("sliding_window", int, None)
    return [window or 0 if keys.get("use_sliding_window", bool, False) else 0] * layers


def rotated(keys: Keys, layers: int) -> list[bool]:
    """Returns whether each layer rotates its queries and keys: `no_rope_layers` has a 1 for those
    that do, and without it every `no_rope_layer_interval`-th layer does not. Raises InputError
    unless there is a 0 or a 1 for each layer."""
    given = keys.get("no_rope_layers", list, None)
    interval = keys.positive("no_rope_layer_interval", int, 4)
    if not given:
        return [(i + 1) % interval != 0 for i in range(layers)]
    good = len(given) >= layers and all(type(x) in (int, bool) and x in (0, 1) for x in given)
    if not good:
        rule = f"a 1 (rotated) or a 0 for each of {layers} layers"
        fix = "write one number for each layer, or leave no_rope_layers out"
        raise InputError("config.json: no_rope_layers", value=given, rule=rule, fix=fix)
    return [bool(x) for x in given[:layers]]


def smollm3_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of SmolLM3: only where they are switched on, and on layers that
    are not rotated."""
    if not _windows_are_on(keys, layers):
        return [0] * layers
    rotary = rotated(keys, layers)
    return windows(keys, layers, lambda i: not rotary[i])


def olmo3_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of OLMo 3: on all layers but every fourth."""
    return windows(keys, layers, lambda i: (i + 1) % 4 != 0)


def alternating(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of Gemma 2 and gpt-oss: on every second layer, from the first."""
    return windows(keys, layers, lambda i: i % 2 == 0)


def gemma3_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of Gemma 3: on all layers but the last of each period, of six layers
    unless sliding_window_pattern says otherwise."""
    period = keys.positive("sliding_window_pattern|_sliding_window_pattern", int, 6)
    return windows(keys, layers, lambda i: (i + 1) % period != 0)


def cwm_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of CWM: on all layers but every fourth, from the first."""
    return windows(keys, layers, lambda i: i % 4 != 0)


def exaone4_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of EXAONE 4: on all layers but the last of each period, of four layers
    unless sliding_window_pattern says otherwise. Beside a pattern in letters layer_types counts."""
    if isinstance(keys.config.get("sliding_window_pattern"), str):
        keys.get("sliding_window_pattern", str)
        keys.get("layer_types", list)
        return windows(keys, layers, None)
    if keys.get("sliding_window", int, None) is None:
        keys.get("sliding_window_pattern", int, 0)
        return windows(keys, layers, None)
    period = keys.positive("sliding_window_pattern", int, 4)
    return windows(keys, layers, lambda i: (i + 1) % period != 0)


def gemma4_windows(keys: Keys, layers: int) -> list[int]:
    """Returns the windows of Gemma 4: on all layers but every sixth and, whatever the keys say, the
    last one."""
    return [*windows(keys, layers, lambda i: (i + 1) % 6 != 0)[:-1], 0]


def no_windows(keys: Keys, layers: int) -> list[int]:
    """Returns 0 for every layer: it sees all tokens."""
    return [0] * layers


# -- the whole file


def text_config(config: Mapping, beside: Collection[str] = ()) -> dict:
    """Returns the decoder's keys of a model with images: those of text_config, or beside
    vision_config. Raises InputError for keys outside text_config that nothing reads and that are
    not `beside`."""
    tokens = (f"{name}_token_id" for name in "image video vision_start vision_end vision".split())
    shared = {"vision_config", "audio_config", "text_config", *tokens, *beside}
    text = config.get("text_config")
    outer = {k: v for k, v in config.items() if k not in shared}
    if not isinstance(text, Mapping):
        return outer
    # Tying is a key of the whole model; everything else is the decoder's own.
    keys = Keys(outer)
    keys.get("tie_word_embeddings", bool, False)
    keys.check_all_read(f"{config['model_type']} (outside text_config)")
    tied = {k: v for k, v in outer.items() if k == "tie_word_embeddings" and v is not None}
    return {**text, "architectures": config.get("architectures"), **tied}


def labels(config: Mapping) -> tuple[int, bool]:
    """Returns the number of outputs of a classification head, and whether it has a bias:
    transformers writes num_labels or id2label, and a head per token (a process reward
    model) has a bias unless token_classification_bias is false. Raises InputError for a
    number of labels below 1, and for architectures that are no list."""
    named = config.get("id2label")
    # transformers leaves 2 labels unsaid.
    count = len(named) if isinstance(named, Mapping) and named else config.get("num_labels") or 2
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        rule = "a whole number >= 1"
        fix = "correct num_labels, or name the labels in id2label"
        raise InputError("config.json: num_labels", value=count, rule=rule, fix=fix)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        fix = '"architectures": ["Qwen3ForCausalLM"], or another list of one name'
        raise InputError("config.json: architectures", value=architectures, rule="a list", fix=fix)
    per_token = any("ForTokenClassification" in str(a) for a in architectures)
    whole = any("ForSequenceClassification" in str(a) for a in architectures)
    has_bias = per_token and config.get("token_classification_bias") is not False
    return (count if whole or per_token else 1), has_bias
