"""What a model computes with, and where its parts lie: a part of rljax.config.schema."""

import dataclasses

from rljax.config.names import Settings


@dataclasses.dataclass
class MeshConfig(Settings):
    """Sizes of the mesh axes; one may be -1 = what is left of the devices."""

    data: int = 1  # rows, with whole weights on every device
    fsdp: int = -1  # rows and weights
    expert: int = 1  # experts of a mixture
    context: int = 1  # positions of a sequence
    tensor: int = 1  # parts of every product
    # Slices of devices that only a data center's network connects; they are the outermost part of
    # data. -1 = as the devices say; another number cuts devices that say nothing, GPUs say.
    slices: int = -1
    # ZeRO-1: the optimizer's moments are split over data, too; weights stay whole there.
    shard_optimizer: bool = False

    def sizes(self) -> dict[str, int]:
        """The size of every axis, outermost first."""
        return {
            name: getattr(self, name) for name in ("data", "fsdp", "expert", "context", "tensor")
        }


@dataclasses.dataclass
class ModelSettings(Settings):
    """How the model runs, whatever its family."""

    # Of matmuls, those of decoding being sampler.dtype's: float32 | bfloat16 | float16. float16 has
    # three bits more than bfloat16 and a narrow range: losses are scaled, and a step whose scaled
    # gradient leaves the range is not taken. Not on TPUs.
    dtype: str = "float32"
    # How trained weights are held: float32, or bfloat16, in which every update is rounded
    # stochastically. The optimizer's state is float32.
    weight_dtype: str = "float32"
    # What is stored of every layer for the backward pass; the rest is recomputed. none: everything;
    # dots: products with weights, and attention; attention: attention and the layer's input; full:
    # the input; offload: the input, in host memory.
    remat: str = "full"
    head_in_float32: bool = True  # whether logits are a float32 product, whatever the dtype
    # What the head is rounded to before it is multiplied, in trainer and sampler alike: bfloat16 |
    # float16, "" = nothing. Logits and the head's gradient stay float32; with bfloat16 logits take
    # one pass of a TPU where the float32 head takes three.
    head_dtype: str = ""
    # How attention reads rows whose tokens mesh.context splits. heads: devices trade tokens for
    # heads (Ulysses), padded where context x tensor does not divide them; ring: keys and values go
    # from device to device (ring attention); auto: heads where they divide, else ring.
    context_attention: str = "auto"
    # Whether every sum has an order that does not depend on what is computed beside it. The
    # sampler's log-probs then are the trainer's bit by bit (rljax.models.invariant). It is slower,
    # and for text on one CPU device in float32 (docs/guides/mismatch.md).
    batch_invariant: bool = False
    # Of a mixture of experts: the coefficient of the load-balance loss of Switch and Mixtral, which
    # every update adds to its loss; 0 = off. Published models were trained with 0.001 to 0.02.
    router_aux_loss_coef: float = 0.0
    # By how much the bias of each expert's score, of models that have one (DeepSeek-V3, GLM-4.5),
    # rises or falls after each optimizer step, so that the load evens out; 0 = off. DeepSeek-V3
    # was trained with 0.001.
    router_bias_update_speed: float = 0.0
    # Whether the vision tower of a model with images stays as it is: it has no gradient and no
    # optimizer state, and checkpoints do not hold it.
    freeze_vision: bool = False


@dataclasses.dataclass
class MemoryConfig(Settings):
    """What is kept in host memory while the devices do not need it. The numbers of a run stay the
    same up to rounding; each use costs a copy to the devices, and for a state one back."""

    optimizer_on_host: bool = False  # the optimizers' moments, fetched for each optimizer step
    reference_on_host: bool = False  # the reference's weights, fetched for its log-probs
    # The weights of reward.model, cost_model, judge_model and process_model, fetched for their
    # scores.
    scorers_on_host: bool = False


@dataclasses.dataclass
class LoraSettings(Settings):
    """Low-rank adapters on the actor (and critic), which then train nothing else; the reference
    shares their base. rank 0 = off: all weights are trained."""

    rank: int = 0  # 0 = off
    alpha: float = 32.0  # adapters count alpha / rank times
    targets: tuple[str, ...] = ("*",)  # patterns of linear maps: "q_proj", "self_attn.*", "*"
    base: str = "bfloat16"  # how the frozen weights are held: float32 | bfloat16 | int8 | nf4
    adapter: str = ""  # a PEFT folder to start from; "" = fresh adapters
