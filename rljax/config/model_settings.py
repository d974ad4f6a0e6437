"""Settings of a model's numbers and layout: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import is_count_or_rest, option
from rljax.config.names import Settings

_SIZE = {
    "fits": is_count_or_rest,
    "rule": "must be >= 1, or -1 = what is left",
    "fix": "write 1 or more, or -1",
}


@dataclasses.dataclass
class MeshConfig(Settings):
    """Sizes of the mesh axes; one may be -1 and takes the remaining devices."""

    data: int = option(
        1,
        "Parts into which rows are split, with whole weights on every device (data parallelism).",
        **_SIZE,
    )
    fsdp: int = option(-1, "Parts into which rows and weights are split (FSDP).", **_SIZE)
    expert: int = option(1, "Parts into which the experts of a mixture are split.", **_SIZE)
    context: int = option(1, "Parts into which the positions of a sequence are split.", **_SIZE)
    tensor: int = option(
        1, "Parts into which every product with weights is split (tensor parallelism).", **_SIZE
    )
    slices: int = option(
        -1,
        "Slices of devices, which only a data center's network connects; they are the outermost "
        "part of data. -1 = the slices that the platform reports. Devices without slices, such as "
        "GPUs, are divided into this number of them.",
        fits=is_count_or_rest,
        rule="must be >= 1, or -1 = of the devices",
        fix="write -1",
    )
    shard_optimizer: bool = option(
        False, "Splits the optimizer's moments over data, too (ZeRO-1); weights stay whole there."
    )

    def sizes(self) -> dict[str, int]:
        """Returns {axis: size} of every axis, outermost first."""
        return {
            name: getattr(self, name) for name in ("data", "fsdp", "expert", "context", "tensor")
        }


@dataclasses.dataclass
class ModelSettings(Settings):
    """Settings of the model, whatever its family."""

    dtype: str = option(
        "float32",
        "Dtype of matrix products: float32 | bfloat16 | float16; decoding has sampler.dtype. "
        "float16 has three bits more than bfloat16 and a narrow range: losses are scaled, and a "
        "step whose scaled gradient leaves the range is not taken. TPUs do not have float16.",
        choices=("float32", "bfloat16", "float16"),
    )
    weight_dtype: str = option(
        "float32",
        "Dtype of the trained weights: float32, or bfloat16, in which every update is rounded "
        "stochastically. The optimizer's state is float32.",
        choices=("float32", "bfloat16"),
    )
    remat: str = option(
        "full",
        "Activations of every layer that are stored for the backward pass; the rest is "
        "recomputed. none: everything is stored; dots: products with weights, and attention; "
        "attention: attention and the layer's input; full: the input; offload: the input, in host "
        "memory.",
        choices=("none", "dots", "attention", "full", "offload"),
    )
    head_in_float32: bool = option(
        True, "Computes logits as a float32 product, whatever the dtype."
    )
    head_dtype: str = option(
        "",
        "Dtype to which the head is rounded before it is multiplied, in trainer and sampler "
        'alike: bfloat16 | float16; "" = it is not rounded. Logits and the head\'s gradient stay '
        "float32; with bfloat16 logits take one pass of a TPU where the float32 head takes three.",
        choices=("", "bfloat16", "float16"),
    )
    context_attention: str = option(
        "auto",
        "Attention over rows whose tokens mesh.context splits. heads: devices trade tokens for "
        "heads (Ulysses), padded where context x tensor does not divide them; ring: keys and "
        "values go from device to device (ring attention); auto: heads if they divide, else ring.",
        choices=("auto", "heads", "ring"),
    )
    batch_invariant: bool = option(
        False,
        "Computes every sum in an order that does not depend on what else is in the batch, so "
        "that the sampler's log-probs are the trainer's bit by bit (rljax.models.invariant). It "
        "is slower, and only for text on one CPU device in float32 (docs/guides/mismatch.md).",
    )
    router_aux_loss_coef: float = option(
        0.0,
        "Coefficient of the load-balance loss of a mixture of experts (Switch, Mixtral), which "
        "every update adds to its loss; 0 = off. Published models were trained with 0.001 to 0.02.",
        low=0,
    )
    router_bias_update_speed: float = option(
        0.0,
        "Amount by which the bias of each expert's score rises or falls after each optimizer "
        "step, so that the load evens out, in models that have such a bias (DeepSeek-V3, "
        "GLM-4.5); 0 = off. DeepSeek-V3 was trained with 0.001.",
        low=0,
    )
    freeze_vision: bool = option(
        False,
        "Freezes the vision tower of a model with images: it has no gradient and no optimizer "
        "state, and checkpoints do not hold it.",
    )


@dataclasses.dataclass
class MemoryConfig(Settings):
    """Settings of arrays that are kept in host memory while the devices do not need them. The
    numbers of a run stay the same up to rounding; each use costs a copy to the devices, and for a
    state one back."""

    optimizer_on_host: bool = option(
        False,
        "Keeps the optimizers' moments in host memory and fetches them for each optimizer step.",
    )
    reference_on_host: bool = option(
        False, "Keeps the reference's weights in host memory and fetches them for its log-probs."
    )
    scorers_on_host: bool = option(
        False,
        "Keeps the weights of reward.model, cost_model, judge_model and process_model in host "
        "memory and fetches them for their scores.",
    )


@dataclasses.dataclass
class LoraSettings(Settings):
    """Low-rank adapters on the actor (and critic), which then train nothing else; the reference
    shares their base. rank=0 trains all weights."""

    rank: int = option(0, "Rank of the adapters; 0 = off.", low=0)
    alpha: float = option(
        32.0,
        "Scale of the adapters, whose output is multiplied by alpha / rank.",
        above=0,
        fix="write 16",
        needs="rank",
    )
    targets: tuple[str, ...] = option(
        ("*",),
        'Patterns of the linear maps that have adapters: "q_proj", "self_attn.*", "*".',
        fits=bool,
        rule="at least one pattern",
        fix='("*",) for all',
        safe=r"[\w*]*|[*.]*(?:self_attn|mlp|experts|visual)\.[\w.*]*",
        needs="rank",
    )
    base: str = option(
        "bfloat16",
        "Format of the frozen weights: float32 | bfloat16 | int8 | nf4.",
        choices=("float32", "bfloat16", "int8", "nf4"),
        needs="rank",
    )
    adapter: str = option(
        "", 'PEFT folder whose adapters are trained further; "" = new adapters.', path="adapter"
    )
