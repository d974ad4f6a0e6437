"""Bytes per device of a run, counted from shapes: the line that a run begins with, and the refusal
of one that cannot fit.

What lives here: parameters, optimizers, references and caches, which are exact, and an estimate of
what programs need besides. What does not: the compiler's own numbers (rljax.plan.compiled). Nothing
is compiled or allocated.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rljax.config import Config, with_overrides
from rljax.errors import InputError
from rljax.kernels.logprob.options import CHUNK_LOGITS
from rljax.mesh import HOST_MEMORY, row_shards
from rljax.models.model import Model
from rljax.roles import Actor, Critic, RewardModel
from rljax.sampler.memory import device_bytes, slots_bytes
from rljax.setup import abstract_roles, abstract_scorers
from rljax.setup.setup import Setup, assemble, load_model

GIB = 2**30
# What programs need besides arguments and caches is estimated to within this factor of the
# compiler's own count (tests/plan/test_plan.py); a run is refused where it cannot fit by the least.
FACTOR = 3.0


def split_bytes(
    weights: float, shards: int, stage: int, *, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12
) -> float:
    """Bytes per device of training W weights on N devices, ZeRO stage 0 to 3 (arXiv 1910.02054):

    W (2 + 2 + K), of which stage 1 divides the optimizer's K by N, 2 the gradient too, 3 all. Ours
    is stage 3 with float32 weights (4 + 4 + 8): mesh.fsdp; mesh.data alone is stage 0.
    """
    if stage not in (0, 1, 2, 3) or shards < 1:
        raise InputError("ZeRO stage, shards", value=(stage, shards), rule="0 to 3, and >= 1")
    parts = ((optimizer_bytes, 1), (gradient_bytes, 2), (weight_bytes, 3))
    return weights * sum(size / (shards if stage >= first else 1) for size, first in parts)


def held_bytes(tree, *, on_host: bool = False) -> int:
    """Bytes of abstract arrays on one device, or of those that wait in its host's memory."""
    total = 0
    for x in jax.tree.leaves(tree):
        waits = x.sharding is not None and x.sharding.memory_kind == HOST_MEMORY
        if waits == on_host:
            shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
            total += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    return total


def held_parts(setup: Setup, roles: dict) -> dict[str, object]:
    """{what is held all through a run: its abstract arrays}. A base under adapters is one, whoever
    reads it, but that of critic_model."""
    parts = abstract_scorers(setup)
    for name, role in roles.items():
        for part, arrays in role.parts().items():
            own = name != "actor" and bool(setup.config.critic_model)
            shared = part == "base" and not own and any(n.endswith("base") for n in parts)
            if not shared:
                parts[f"{name} {part}".rstrip()] = arrays
    return parts


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one device. `held` all through the run, `generate` and `learn` beside it while each
    runs, `waiting` in the host's memory."""

    held: dict[str, int]
    generate: dict[str, int]
    learn: dict[str, int]
    waiting: int = 0

    @property
    def resident(self) -> int:
        return sum(self.held.values())

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.resident + max(sum(self.generate.values()), sum(self.learn.values()))

    @property
    def least(self) -> int:
        """Below which the peak cannot be: caches and gradients are exact, the rest may be less by
        FACTOR."""
        exact = ("keys and values", "gradients")
        parts = []
        for program in (self.generate, self.learn):
            sure = sum(size for name, size in program.items() if name in exact)
            parts.append(sure + (sum(program.values()) - sure) / FACTOR)
        return self.resident + int(max(parts))

    def line(self) -> str:
        """In one sentence."""
        groups = {"weights": 0, "optimizer": 0}
        for name, size in self.held.items():
            groups["optimizer" if name.endswith("optimizer") else "weights"] += size
        groups["keys and values"] = self.generate.get("keys and values", 0)
        groups["gradients"] = self.learn.get("gradients", 0)
        groups["activations"] = sum(self.learn.values()) - groups["gradients"]
        shown = ", ".join(f"{name} {size / GIB:.3g}" for name, size in groups.items() if size)
        host = f"; {self.waiting / GIB:.3g} on the host" if self.waiting else ""
        return f"{self.total / GIB:.3g} GiB per device at the peak ({shown}{host})"


def estimate(setup: Setup, roles: dict | None = None) -> Estimate:
    """Of the run's main phase. `roles`: those of abstract_roles(setup), where they are at hand."""
    roles = abstract_roles(setup) if roles is None else roles
    parts = held_parts(setup, roles)
    held = {name: held_bytes(tree) for name, tree in parts.items()}
    generate, learn = {}, {}
    if setup.needs_reward or "actor" in roles and not setup.learns_offline:
        generate = _generate(setup)
    for role in [r for r in roles.values() if isinstance(r, (Actor, Critic, RewardModel))]:
        found = _learn(setup, role)
        if sum(found.values()) > sum(learn.values()):
            learn = found  # of actor and critic, which are updated one after the other
    waiting = sum(held_bytes(tree, on_host=True) for tree in parts.values())
    if len(setup.phases) > 1 and "actor" not in roles:  # an earlier phase trains the policy
        held |= {"actor weights": held_bytes(setup.model.abstract())}
    return Estimate(held, generate, learn, waiting)


def _generate(setup: Setup) -> dict[str, int]:
    """While a whole batch is decoded, beside what is held."""
    config, model = setup.config, setup.decoding.of(setup.model)
    batch, dtype = config.batch, config.sampler.kv_dtype
    rows = batch.prompts_per_step * batch.samples_per_prompt
    slots = min(config.sampler.slots or rows, rows)
    prompts, columns = batch.prompts_per_step, setup.data.prompt_tokens
    shards, tensor = row_shards(model.mesh), model.mesh.shape["tensor"]
    late = model.mesh.devices.flat[0].platform == "tpu"
    weights = sum(_weight_bytes(model).values())
    facts = model.config
    size = jnp.dtype(facts.dtype).itemsize
    # On CPU and GPU layers are sliced before the loop: a copy; on all, in the dtype of products.
    copied = _layers_bytes(model) if not late else 0
    copied += weights * size // 4 if size < 4 else 0
    tokens = _split(prompts, shards) * columns
    logits = 4 * 4 * _split(slots, shards) * facts.vocab_size // tensor
    return {
        "keys and values": slots_bytes(model, slots, setup.data.prompt_tokens
                                       + config.sampler.max_response_tokens, dtype),
        "prompts": slots_bytes(model, prompts, columns, dtype)
        + tokens * (6 * facts.embed + 4 * facts.mlp // tensor) * size,
        "weights as used": copied,
        "logits": logits,
    }  # fmt: skip


def _learn(setup: Setup, role) -> dict[str, int]:
    """While one role is updated, beside what is held."""
    model, steps = role.model, setup.algorithm.steps
    facts, mesh = model.config, model.mesh
    shards, tensor, context = row_shards(mesh), mesh.shape["tensor"], mesh.shape["context"]
    rows = _split(min(steps.microbatch_rows or steps.rows, steps.rows), shards)
    tokens = rows * setup.row_tokens // context
    size = jnp.dtype(facts.dtype).itemsize
    several = steps.microbatch_rows < steps.rows
    trained = held_bytes(jax.tree.map(_as_float32, role.state.params))
    weights = sum(_weight_bytes(model).values())
    layer = _layers_bytes(model) // facts.layers
    gathered = 2 * layer * mesh.shape["fsdp"] * size // 4 if mesh.shape["fsdp"] > 1 else 0
    chunk = min(rows * setup.row_tokens, max(CHUNK_LOGITS // facts.vocab_size, rows))
    head = facts.embed * facts.vocab_size // tensor * (4 if facts.head_in_float32 else size)
    lm = model.head == "lm"
    return {
        "gradients": trained * (2 if several else 1),
        "weights as used": weights * size // 4 * (size < 4) + gathered,
        "layers": facts.layers * tokens * _kept(facts, tensor, size),
        "one layer": tokens * _worked(facts, tensor, size),
        "logits": (3 * 4 * chunk * facts.vocab_size // tensor + 2 * head) * lm,
        "batch": 24 * 4 * _split(steps.rows, shards) * setup.row_tokens,
    }


def _split(count: int, shards: int) -> int:
    """Of `count` rows those on one device."""
    return count // shards if count % shards == 0 else count


def _as_float32(x):
    return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)


def _weight_bytes(model: Model) -> dict[str, int]:
    """Of a device, by the name of the outermost part, counted in float32."""
    whole = jax.tree.map(_as_float32, model.abstract())
    return {name: held_bytes(part) for name, part in whole.items()}


def _layers_bytes(model: Model) -> int:
    return _weight_bytes(model)["layers"]


def _attention_width(facts) -> tuple[int, int]:
    """Elements of all heads, and of all kv heads, of a token."""
    if facts.latent:
        each = facts.latent.nope_dim + facts.latent.rope_dim
        return facts.heads * each, facts.heads * each
    return facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim


def _kept(facts, tensor: int, size: int) -> int:
    """Bytes of one layer and token that the backward pass finds (rljax.models.remat)."""
    heads, kv = (n // tensor for n in _attention_width(facts))
    mlp = _mlp(facts) // tensor
    products = heads + 2 * kv + facts.embed + 2 * mlp + facts.embed
    elements = {
        "offload": 0,
        "full": facts.embed,
        "attention": facts.embed + heads,
        "dots": facts.embed + heads + products,
        "none": 2 * (3 * facts.embed + 3 * heads + 4 * kv + 3 * mlp),
    }[facts.remat]
    return elements * size


def _mlp(facts) -> int:
    """Elements between the two halves of the feed-forward part, of a token."""
    if facts.experts is None:
        return facts.mlp
    return facts.experts.mlp * facts.experts.per_token


def _worked(facts, tensor: int, size: int) -> int:
    """Bytes of a token while a layer is differentiated."""
    heads, kv = (n // tensor for n in _attention_width(facts))
    return size * (6 * facts.embed + 4 * heads + 4 * kv + 6 * _mlp(facts) // tensor)


# -- what the devices have


def available_bytes(setup: Setup) -> int | None:
    """Of one device of this host; None where it does not say. Devices that a CPU pretends to have
    share its memory."""
    here = [d for d in setup.model.mesh.devices.flat if d in d.client.local_devices()]
    if not here:
        return None
    have = device_bytes(here[0])
    sharing = len(here) if here[0].platform == "cpu" else 1
    return have // sharing if have is not None else None


def check_fits(setup: Setup) -> Estimate:
    """The estimate of a run. Raises InputError where the devices cannot hold it, with the nearest
    config that they can."""
    found, have = estimate(setup), available_bytes(setup)
    if have is None or found.least <= have:
        return found
    changes = nearest_fit(setup, have)
    raise InputError(
        f"this run needs {found.line()}",
        value=f"{have / GIB:.3g} GiB left, less than the least it can do with, "
        f"{found.least / GIB:.3g} GiB",
        fix=as_flags(changes) or "more devices, or a smaller model",
    )


def as_flags(changes: dict[str, object]) -> str:
    """As they are given to a launcher."""
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def nearest_fit(setup: Setup, have: float) -> dict[str, object]:
    """{config field: value} that make the estimate fit, the least harmful first; {} if none of them
    is enough. A change that saves nothing is left out."""
    changes: dict[str, object] = {}
    best = estimate(setup).total
    for name, value in _changes(setup):
        wanted = with_overrides(setup.config, {**changes, name: value}, "plan")
        total = estimate(changed(setup, wanted)).total
        if total < best:
            best, changes = total, {**changes, name: value}
        if best <= have:
            return changes
    return {}


def changed(setup: Setup, config: Config) -> Setup:
    """The same data under another config of the same model and dataflow."""
    devices = list(setup.model.mesh.devices.flat)
    model = load_model(config, setup.tokenizer, devices)
    return assemble(config, setup.tokenizer, setup.data, model, setup.row_tokens)


def _changes(setup: Setup) -> Iterator[tuple[str, object]]:
    """What changes no number of the run, or to rounding, before what slows it down."""
    config, mesh = setup.config, setup.model.mesh
    tokens = config.batch.tokens_per_microbatch
    while tokens // 2 >= setup.row_tokens:
        tokens //= 2
        yield "batch.tokens_per_microbatch", tokens
    order = ("none", "dots", "attention", "full")
    if config.model_settings.remat in order[:-1]:
        yield "model_settings.remat", "full"
    rows = config.batch.prompts_per_step * config.batch.samples_per_prompt
    slots = min(config.sampler.slots or rows, rows)
    while not setup.learns_offline and slots // 2 >= row_shards(mesh):
        slots //= 2
        yield "sampler.slots", slots
    on_host = HOST_MEMORY in [m.kind for m in mesh.devices.flat[0].addressable_memories()]
    if on_host and mesh.devices.flat[0].platform != "cpu":
        yield "memory.optimizer_on_host", True
        yield "memory.reference_on_host", True
        yield "model_settings.remat", "offload"
    if setup.model.config.dtype == "float32":
        yield "model_settings.dtype", "bfloat16"
