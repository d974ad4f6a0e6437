"""ModelConfig: a family (Llama, Gemma, DeepSeek, ...) is a value of this one dataclass.

rljax.models.families makes one from a Hugging Face config.json.
"""

import dataclasses
import math

from rljax.errors import InputError
from rljax.models.adapters.quantise import KINDS
from rljax.models.experts import ExpertsConfig
from rljax.models.remat import POLICIES
from rljax.models.vision.config import VisionConfig

# No published decoder comes near these; they bound what a config.json can ask for.
DTYPES = ("float32", "bfloat16", "float16")  # of products, and of weights
MOST_LAYERS = 1_000
MOST_EXPERTS = 100_000  # of all layers together
LARGEST_SIZE = 2**24
LARGEST_TOKENS = 2**40
LARGEST_THETA = 1e15


def _check(valid: bool, name: str, value, rule: str) -> None:
    if not valid:
        fix = f"set {name.rpartition('.')[2]} of the model to such a value"
        raise InputError(name, value=value, rule=rule, fix=fix)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary frequencies: theta^(-2i/d), changed for long contexts by `kind`.

    linear: divided by factor. llama3: long wavelengths divided, short kept, blended between. yarn
    (arXiv 2309.00071): the same by number of rotations, and cos and sin scaled by `amplitude`.
    proportional: the fraction is of the pairs of a whole head, those that rotate fastest.

    Two kinds depend on how long sequences may get (ModelConfig.rope_tokens). longrope (arXiv
    2402.13753): each frequency is divided by its own factor, of `long_factor` for sequences longer
    than `original_max_tokens` and else of `short_factor`; with an amplitude. dynamic (NTK): theta
    grows with the length beyond `original_max_tokens`.
    """

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3 | yarn | longrope | dynamic | proportional
    factor: float = 1.0
    original_max_tokens: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0  # 0 = from factor and the two below
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    fraction: float = 1.0  # of a head's elements, the first ones, are rotated
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # Frequencies that follow time, height and width (multimodal rope); () = one position per token.
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False

    def __post_init__(self):
        numbers = {k: v for k, v in dataclasses.asdict(self).items() if isinstance(v, float)}
        kinds = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
        _check(self.kind in kinds, "rope kind", self.kind, f"one of {', '.join(kinds)}")
        above_0 = "theta factor low_freq_factor high_freq_factor beta_fast beta_slow"
        for name in (*above_0.split(), "original_max_tokens"):
            largest = LARGEST_THETA if name == "theta" else LARGEST_TOKENS
            value = getattr(self, name)
            _check(0 < value <= largest, f"rope {name}", value, f"above 0, at most {largest:g}")
        for name, value in numbers.items():  # false for NaN, too
            valid = abs(value) <= LARGEST_THETA
            _check(valid, f"rope {name}", value, f"a number of at most {LARGEST_THETA:g}")
        if self.kind == "yarn":
            _check(self.theta > 1, "rope theta", self.theta, "above 1 with yarn")
        integers = all(type(n) is int and n >= 0 for n in self.sections)
        valid = not self.sections or (integers and len(self.sections) == 3)
        _check(valid, "rope mrope_section", self.sections, "three whole numbers")
        _check(0 < self.fraction <= 1, "rope partial_rotary_factor", self.fraction, "above 0, to 1")
        if self.kind == "longrope":
            original = self.original_max_tokens
            _check(original > 1, "rope original_max_position_embeddings", original, "above 1")
            for name in ("short_factor", "long_factor"):
                value = getattr(self, name)
                valid = len(value) > 0 and all(0 < x <= LARGEST_THETA for x in value)
                _check(valid, f"rope {name}", value, "numbers above 0, one for each pair")
        if self.kind == "llama3":
            valid = self.low_freq_factor <= self.high_freq_factor
            _check(valid, "rope scaling", self, "low_freq_factor <= high_freq_factor")

    @property
    def amplitude(self) -> float:
        """The factor of cos and sin: the attention factor of yarn and longrope, else 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.kind == "longrope":
            grown = math.log(max(self.factor, 1.0)) / math.log(self.original_max_tokens)
            return math.sqrt(1 + grown)
        if self.mscale and self.mscale_all_dim:
            numerator, denominator = (
                yarn_mscale(self.factor, m) for m in (self.mscale, self.mscale_all_dim)
            )
            return numerator / denominator
        return yarn_mscale(self.factor)

    @property
    def follows_length(self) -> bool:
        """Returns whether the frequencies depend on how long sequences may get."""
        return self.kind in ("longrope", "dynamic")

    def dims(self, head_dim: int) -> int:
        """Returns the number of elements of a head that are rotated, those by an angle of 0
        included."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor 0.1 mscale log(factor) + 1 (arXiv 2309.00071); 1 where the context
    is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). q_rank 0 = full-rank queries."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0
    interleaved: bool = True  # rotary pairs are neighbours, not halves

    def __post_init__(self):
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"):
            minimum, value = int(name != "q_rank"), getattr(self, name)
            valid = minimum <= value <= LARGEST_SIZE
            _check(valid, f"latent.{name}", value, f"{minimum} to {LARGEST_SIZE}")


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Gated delta net (arXiv 2412.06464): layers with a recurrent state in place of keys and
    values. Each key head serves value_heads / key_heads value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4  # tokens that the convolution before it sees, the newest included
    # Whether the projections are two maps, ordered by key heads (Qwen3-Next), or one each.
    joined: bool = False

    def __post_init__(self):
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
            minimum, value = 1 + (name == "taps"), getattr(self, name)
            valid = type(value) is int and minimum <= value <= LARGEST_SIZE
            _check(valid, f"delta.{name}", value, f"{minimum} to {LARGEST_SIZE}")
        valid = self.value_heads % self.key_heads == 0
        rule = f"a multiple of key_heads={self.key_heads}"
        _check(valid, "delta.value_heads", self.value_heads, rule)


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Settings that may differ from layer to layer. Layers of one kind share a compiled body."""

    window: int = 0  # keys a token sees, itself included; 0 = all
    chunk: int = 0  # positions are cut into chunks of so many, none seen from another; 0 = no
    rope: int | None = 0  # which of ModelConfig.ropes; None: queries and keys are not rotated
    experts: bool = False
    head_dim: int = 0  # 0 = ModelConfig.head_dim
    kv_heads: int = 0  # 0 = ModelConfig.kv_heads
    values_of_keys: bool = False  # values are made of the map of keys
    # In place of attention a gated delta net, ModelConfig.delta, or a ModelConfig.short_conv.
    recurrent: bool = False


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of layers first, first + 1, ... whose kinds repeat `unit`, `repeats` times."""

    first: int
    unit: tuple[LayerKind, ...]
    repeats: int

    def layers_of(self, member: int) -> range:
        """Indices of the layers that are the unit's `member`."""
        period = len(self.unit)
        return range(self.first + member, self.first + period * self.repeats, period)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters W + (alpha / rank) A B (arXiv 2106.09685); only they are trained.

    `targets` are patterns of Hugging Face module names below a layer, or of their last part:
    "q_proj", "self_attn.*", "*"; those of routed experts say so: "*.experts.*". `base` is how the
    frozen weights are held. rank 0: no adapter.
    """

    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = ("*",)
    base: str = "bfloat16"  # float32 | bfloat16 | int8 | nf4
    quantised_experts: bool = True  # whether a base of codes has those of routed experts, too

    def __post_init__(self):
        valid = isinstance(self.rank, int) and self.rank >= 0
        _check(valid, "lora.rank", self.rank, "a whole number >= 0")
        _check(0 < self.alpha < math.inf, "lora.alpha", self.alpha, "above 0")
        bases = ("float32", "bfloat16", *KINDS)
        _check(self.base in bases, "lora.base", self.base, f"one of {', '.join(bases)}")
        _check(len(self.targets) > 0, "lora.targets", self.targets, "at least one pattern")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder. Sizes in elements; matmuls run in `dtype`, weights are kept in
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
    kinds: tuple[LayerKind, ...] = ()  # one per layer; () = plain layers
    ropes: tuple[Rope, ...] = (Rope(),)
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the stored norm scales
    pre_norms: bool = True  # norms before attention and mlp
    post_norms: bool = False  # norms after them, before they are added to the stream
    # A stored number that multiplies what leaves each layer. It is not trained.
    layer_scales: bool = False
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # "head": a norm of each head | "whole": of all heads as one vector | "l2": of each head,
    # without a weight, after the rotation and on rotated layers alone (Llama 4).
    qk_norm_kind: str = "head"
    # The numbers of heads, and of kv heads, that a norm of all of them takes the mean of, where the
    # others are padding (rljax.models.padding); None = all.
    normed_heads: tuple[int, int] | None = None
    attention_scale: float = 0.0  # of q k; 0 = head_dim^-1/2
    # Queries of layers that are not rotated are multiplied by 1 + temperature_slope log(1 +
    # floor((p + 1) / temperature_floor)) at position p (arXiv 2501.19399). 0 = they are not.
    temperature_floor: int = 0
    temperature_slope: float = 0.1
    value_norm: bool = False  # a norm of the values of each head, without a weight
    temperature_on_all: bool = False  # queries of all layers are, with p in the place of p + 1
    attention_soft_cap: float = 0.0  # c tanh(x / c) of the scores; 0 = none
    final_soft_cap: float = 0.0  # the same of the logits
    sinks: bool = False  # one more logit per head in the attention softmax
    attention_gate: bool = False  # what heads give is multiplied by sigmoid(W x)
    embed_scale: float = 1.0  # of the token embeddings
    residual_scale: float = 1.0  # of what attention and mlp add to the stream
    logit_divisor: float = 1.0  # of the logits
    rope_interleaved: bool = False  # rotary pairs are neighbours, not halves
    # The length that sequences may reach, for ropes that follow it; 0 = the width of the batch or
    # the cache. Whoever samples and trains sets it, or tokens cached before a sequence grew long
    # would have been rotated otherwise than in training.
    rope_tokens: int = 0
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    # Tokens that a short convolution (rljax.models.short_convolution) sees, the newest included.
    short_conv: int = 0  # 0 = the model has none
    experts: ExpertsConfig | None = None
    lora: LoraConfig | None = None
    vision: VisionConfig | None = None
    freeze_vision: bool = False  # the tower is not trained
    tie_embeddings: bool = False
    # The ids that the tokenizer has, where the embedding has more rows: those behind them have no
    # text, and are in no softmax and never drawn. 0 = as many as rows.
    known_ids: int = 0
    labels: int = 1  # outputs of the scalar head
    head_bias: bool = False  # of the scalar head
    squash: str = "none"  # of what the scalar head gives: "tanh" where tanh(s) was fitted
    # The model_type of the model with images or sound whose decoder this is. Its folder holds
    # towers, too, which are not read. "" = the folder is that of the decoder alone.
    part_of: str = ""
    init_std: float = 0.02
    dtype: str = "float32"
    weight_dtype: str = "float32"
    head_in_float32: bool = True
    head_dtype: str = ""  # what the head is rounded to before it is multiplied; "" = nothing
    # The way attention reads rows split over mesh.context: one of rljax.models.attention's.
    context_attention: str = "auto"
    batch_invariant: bool = False  # see rljax.models.invariant
    # The coefficient of the experts' load-balance loss in every update (rljax.roles.balance); 0 =
    # none.
    router_aux_loss_coef: float = 0.0
    # The step of experts.correction towards an even load after every optimizer step; 0 = none.
    router_bias_update_speed: float = 0.0
    # The activations of a layer that the backward pass keeps: one of rljax.models.remat.POLICIES.
    remat: str = "full"

    def __post_init__(self):
        sizes = "vocab_size embed mlp layers heads kv_heads head_dim max_tokens labels"
        for name in sizes.split():
            value = getattr(self, name)
            valid = isinstance(value, int) and value >= 1
            _check(valid, f"model.{name}", value, "a whole number >= 1")
            largest = dict(layers=MOST_LAYERS, max_tokens=LARGEST_TOKENS).get(name, LARGEST_SIZE)
            _check(value <= largest, f"model.{name}", value, f"at most {largest}")
        valid = type(self.known_ids) is int and 0 <= self.known_ids <= self.vocab_size
        _check(valid, "model.known_ids", self.known_ids, f"0 to vocab_size={self.vocab_size}")
        if self.known_ids == self.vocab_size:  # one value for one model
            object.__setattr__(self, "known_ids", 0)
        _check(self.squash in ("none", "tanh"), "model.squash", self.squash, "none or tanh")
        if self.heads % self.kv_heads:
            raise InputError(
                "model.kv_heads does not divide model.heads",
                value=(self.kv_heads, self.heads),
                fix="set kv_heads to a divisor of heads, such as heads itself",
            )
        _check(self.rope_dims % 2 == 0, "model.head_dim", self.rope_dims, "even: rotary pairs")
        valid = type(self.rope_tokens) is int and 0 <= self.rope_tokens <= LARGEST_TOKENS
        _check(valid, "model.rope_tokens", self.rope_tokens, "a whole number >= 0")
        valid = self.pre_norms or self.post_norms
        _check(valid, "model.pre_norms", self.pre_norms, "on, or post_norms are")
        valid = 0 < self.norm_eps < math.inf  # false for NaN, too
        _check(valid, "model.norm_eps", self.norm_eps, "above 0")
        for name in ("embed_scale", "residual_scale", "logit_divisor"):
            value = getattr(self, name)
            _check(0 < abs(value) < math.inf, f"model.{name}", value, "a number, not 0")
        from_0 = "init_std attention_scale attention_soft_cap final_soft_cap"
        for name in (*from_0.split(), "router_aux_loss_coef", "router_bias_update_speed"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, f"model.{name}", value, "0 or above")
        if self.experts:
            count = self.experts.count * self.layers
            _check(count <= MOST_EXPERTS, "experts of all layers", count, f"at most {MOST_EXPERTS}")
        choices = {
            "remat": POLICIES,
            "dtype": DTYPES,
            "weight_dtype": DTYPES,
            "activation": ("silu", "gelu", "gelu_tanh"),
            "qk_norm_kind": ("head", "whole", "l2"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _check(value in allowed, f"model.{name}", value, f"one of {', '.join(allowed)}")
        if not self.kinds:  # plain layers
            kind = LayerKind(experts=self.experts is not None)
            object.__setattr__(self, "kinds", (kind,) * self.layers)
        valid = len(self.kinds) == self.layers
        _check(valid, "model.kinds", len(self.kinds), f"one per layer, {self.layers}")
        unread = {
            "rope_tokens": not any(rope.follows_length for rope in self.ropes),
            "router_aux_loss_coef": not self.experts,
            "router_bias_update_speed": not (self.experts and self.experts.correction_bias),
        }
        for name in (name for name, nothing_reads_it in unread.items() if nothing_reads_it):
            object.__setattr__(self, name, type(getattr(self, name))(0))
        self._check_kinds()
        for rope in self.ropes:
            self._check_rope(rope)
        if self.vision:
            out_embed = self.vision.out_embed
            _check(
                out_embed == self.embed, "vision.out_embed", out_embed, f"model.embed, {self.embed}"
            )

    def _check_kinds(self) -> None:
        """Raises InputError for a layer whose settings the model does not have."""
        speed, free = self.router_bias_update_speed, self.lora is None or not self.lora.rank
        rule = "0 with lora: the biases are a part of its frozen base"
        _check(free or not speed, "model_settings.router_bias_update_speed", speed, rule)
        for name in ("temperature_floor", "temperature_slope"):
            value = getattr(self, name)
            _check(0 <= value < LARGEST_TOKENS, f"model.{name}", value, "0 or above")
        valid = self.short_conv == 0 or 2 <= self.short_conv <= LARGEST_SIZE
        _check(valid, "model.short_conv", self.short_conv, f"2 to {LARGEST_SIZE}, or 0")
        for kind in self.kinds:
            valid = 0 <= kind.chunk <= LARGEST_TOKENS and not (kind.chunk and kind.window)
            _check(valid, "model.kinds: chunk", kind, "0 or above, and without a window")
            valid = not kind.chunk or self.latent is None
            _check(valid, "model.kinds: chunk", kind, "none with latent attention")
            valid = kind.rope is None or 0 <= kind.rope < len(self.ropes)
            _check(valid, "model.kinds: rope", kind.rope, "one of ropes")
            alike = [k for k in self.kinds if k.rope == kind.rope and kind.rope is not None]
            valid = len({k.head_dim for k in alike}) <= 1
            _check(valid, "model.kinds: head_dim", kind, "one size for layers of one rope")
            valid = not (kind.head_dim or kind.kv_heads) or self.latent is None
            _check(valid, "model.kinds: head_dim", kind, "one size with latent attention")
            valid = not kind.experts or self.experts is not None
            _check(valid, "model.kinds: experts", kind, "model.experts is set")
            valid = not kind.recurrent or (self.delta is not None) != (self.short_conv > 0)
            _check(valid, "model.kinds: recurrent", kind, "either model.delta or short_conv is set")
            valid = not kind.recurrent or not (kind.window or kind.chunk or kind.rope is not None)
            _check(valid, "model.kinds: recurrent", kind, "without window, chunk and rope")
        # The room of a slot is what its layers with attention have.
        valid = not all(kind.recurrent for kind in self.kinds)
        _check(valid, "model.kinds: recurrent", len(self.kinds), "a layer or more with attention")
        valid = not (self.attention_gate and self.latent)
        _check(valid, "model.attention_gate", self.attention_gate, "off with latent attention")

    def _check_rope(self, rope: Rope) -> None:
        """Raises InputError for a rope whose settings do not fit the size of a head."""
        dims = rope.dims(self.rope_dims)
        # An odd size is rounded up to pairs by the plain kinds, as transformers does it.
        minimum = 4 if rope.kind == "dynamic" else 1
        valid = dims >= minimum and (dims % 2 == 0 or rope.kind not in ("yarn", "longrope"))
        rule = (
            f"at least {minimum} of {self.rope_dims} elements; of yarn and longrope an even number"
        )
        _check(valid, "rope partial_rotary_factor", rope.fraction, rule)
        for name in ("short_factor", "long_factor"):
            value, pairs = getattr(rope, name), dims // 2
            valid = rope.kind != "longrope" or len(value) == pairs
            _check(valid, f"rope {name}", len(value), f"{pairs} numbers, one for each rotary pair")
        valid = not rope.sections or sum(rope.sections) == dims // 2
        _check(valid, "rope mrope_section", rope.sections, f"adds up to {dims // 2}")

    @property
    def ids(self) -> int:
        """Number of ids to choose from: V of all log-probs and draws."""
        return self.known_ids or self.vocab_size

    @property
    def has_frozen(self) -> bool:
        """Returns whether an optimizer moves a part of the weights alone: then a checkpoint holds
        that part."""
        return self.lora is not None or (self.freeze_vision and self.vision is not None)

    @property
    def recurrent(self) -> bool:
        """Returns whether some layer keeps a state of all tokens it has read, so that a sequence
        cannot go back to fewer of them."""
        return any(kind.recurrent for kind in self.kinds)

    @property
    def rope_dims(self) -> int:
        """The number of elements of a head that may be rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    def of(self, kind: LayerKind) -> "ModelConfig":
        """Returns the config with the sizes of a layer of this kind."""
        if not (kind.head_dim or kind.kv_heads):
            return self
        head_dim, kv_heads = kind.head_dim or self.head_dim, kind.kv_heads or self.kv_heads
        return dataclasses.replace(self, head_dim=head_dim, kv_heads=kv_heads)

    def rope_dims_of(self, rope: int) -> int:
        """Returns the number of elements of a head that may be rotated in layers with this one of
        `ropes`."""
        kind = next((kind for kind in self.kinds if kind.rope == rope), LayerKind())
        return self.of(kind).rope_dims

    @property
    def scale(self) -> float:
        """The factor of q k in attention scores."""
        dims = self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim
        return self.attention_scale or dims**-0.5

    def stacks(self) -> tuple[Stack, ...]:
        """Returns the layers as few repeating stacks: training scans over each, so that compile
        time does not grow with depth."""
        kinds, stacks, start = self.kinds, [], 0
        while start < len(kinds):
            best = (1, 1)  # period, repeats
            for period in range(1, min(_LONGEST_PERIOD, (len(kinds) - start) // 2) + 1):
                repeats = 1
                unit = kinds[start : start + period]
                while kinds[start + repeats * period : start + (repeats + 1) * period] == unit:
                    repeats += 1
                if repeats > 1 and period * repeats > best[0] * best[1]:
                    best = (period, repeats)
            stacks.append(Stack(start, kinds[start : start + best[0]], best[1]))
            start += best[0] * best[1]
        return tuple(stacks)


_LONGEST_PERIOD = 16  # of a pattern of layer kinds; Gemma 3 repeats every 6 layers
