"""`generate`: samples responses to a whole batch of prompts.

Checks the arguments and chooses the loop: the device's (whole_batch) or the host's (host_rollout).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts
from rljax.arrays import fetch, moved_rows, place
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.mesh import make_mesh, replicated, row_sharding, row_shards
from rljax.models.model import Model
from rljax.sampler import slots as slot
from rljax.sampler import speculation
from rljax.sampler.engine import Engine
from rljax.sampler.host_rollout import host_rollout
from rljax.sampler.keys import budgets, request_keys
from rljax.sampler.layout import agree, is_apart, reshard_program, weights_like
from rljax.sampler.memory import check_memory
from rljax.sampler.requests import Decoding, Sampling, rules_of
from rljax.sampler.stop_strings import cut_at_stop_strings, cut_row
from rljax.sampler.whole_batch import (
    SecondModel,
    Shape,
    fits_a_turn,
    in_turns,
    rollout,
    shard_count,
)
from rljax.tracking import timing

WHOLE_BATCH = Decoding()


def generate(
    model: Model,
    params,
    prompts,
    lengths,
    key,
    sampling: Sampling,
    *,
    n: int = 1,
    version=0,
    decoding: Decoding = WHOLE_BATCH,
    images: dict | None = None,
    second: SecondModel | None = None,
    finished: Callable[[int, list[int], int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Batch:
    """Sample n responses to each prompt: prompts [P, L] int32 right-padded, lengths [P] -> Batch of
    R = P n rows.

    Row p n + s is sample s of prompt p; `group` is p. EOS is part of the response. A draw depends
    on (key, row, place) alone: `decoding` changes none while dtypes stay as they are, nor does its
    loop (a host's dispatches, or one program that every host of a pod runs unchanged). `images` are
    those of the prompts (rljax.data.online.prompts). `second`: a model to draw from together with
    this one. A row whose logits are not finite ends there, with FinishReason.ABORT.

    `finished(row, ids of the response, FinishReason)` is called for rows as they end, while others
    still decode, each once and in no order; `stop` is asked after every turn of decoding: once it
    returns True, the rows that still decode end there, with FinishReason.ABORT. Neither is called
    where all rows may end in the same turn. On several hosts every one of them is told of every
    row, and `stop` returns the same on all.

    The weights are read where they lie, or as `decoding.weights` brings them to the layout of
    decoding; the batch lies on the mesh of `model`.
    """
    home, version = model.mesh, version if decoding.mesh is None else fetch(version)
    model, params, second = _on_layout(model, params, second, decoding)
    prompts, lengths = np.asarray(prompts), np.asarray(lengths, np.int32)
    _check(model, prompts, lengths, sampling, n, decoding, second)
    prompts, rows = prompts.astype(np.int32), prompts.shape[0] * n
    if decoding.loop == "host":
        _refuse_on_host(images, second)
        inputs = (prompts, lengths, key, sampling)
        options = dict(n=n, version=version, decoding=decoding, finished=finished, stop=stop)
        return _at_home(host_rollout(model, params, *inputs, **options), model, home)
    images = images and place(images, model.mesh)
    inputs = (prompts, lengths, key, sampling, n, decoding, version, images, second)
    arguments, shape = _arguments(model, params, *inputs)
    stops = (sampling.stop_strings, decoding.decode)
    # Hosts that may be told to stop look up after every turn, too.
    if fits_a_turn(shape, rows) or finished is None and hosts.count() == 1:
        batch, drafted = rollout(*arguments)
    else:
        tell = lambda *_: None  # noqa: E731
        if finished is not None:
            tell = lambda row, ids, why: finished(row, *cut_row(ids, why, *stops))  # noqa: E731
        batch, drafted = in_turns(*arguments, finished=tell, stop=stop)
    timing.drafted(*() if drafted is None else fetch(drafted).tolist())
    if sampling.stop_strings:
        batch = cut_at_stop_strings(batch, np.repeat(lengths, n), *stops)
    return _at_home(batch, model, home)


def _on_layout(model: Model, params, second: SecondModel | None, decoding: Decoding):
    """The models as they decode, with the weights that they read."""
    if second is not None:
        other, weights = decoding.of(second.model), decoding.weights(second.model, second.params)
        second = dataclasses.replace(second, model=other, params=weights)
    return decoding.of(model), decoding.weights(model, params), second


def _at_home(batch: Batch, model: Model, home) -> Batch:
    """The batch of a model that decoded on the mesh of training, `home`."""
    if model.mesh == home:
        return batch
    if set(model.mesh.devices.flat) != set(home.devices.flat):
        return moved_rows(batch, home, "sampler")
    fits = batch.rows % row_shards(home) == 0
    return _with_layout((row_sharding if fits else replicated)(home))(batch)


@functools.lru_cache(maxsize=8)
def _with_layout(sharding):
    """The program that gives a batch a layout: one, and not one for each of its arrays."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)


def _arguments(
    model: Model, params, prompts, lengths, key, sampling, n, decoding, version, images, second
):
    """The program's arguments, placed on the mesh, and its shape."""
    rows = prompts.shape[0] * n
    slots = min(decoding.slots or rows, rows)
    shape = _shape(n, slots, sampling, decoding)
    columns = prompts.shape[1] + sampling.max_response_tokens
    check_memory(model, slots, columns, decoding.kv_dtype)
    key = key if sampling.seed is None else jax.random.key(sampling.seed)
    keys = request_keys(key, rows)
    forcing = None
    if sampling.thinking_tokens:
        requests = [sampling] * rows
        room = slot.forcing_room(requests)
        spent = budgets(keys, sampling)
        forcing = slot.forcing_of(requests, room, spent, np.repeat(lengths, n))
    rules = rules_of([sampling] * rows, model.config.vocab_size)
    queue = (prompts, lengths, keys, rules)
    if shard_count(model, prompts.shape[0], slots) > 1:
        placed = place(queue, model.mesh)
    else:  # every device serves any row: whole there, nothing of it is sent while prompts are read
        placed = jax.device_put(queue, replicated(model.mesh))
    version = jnp.asarray(version, jnp.int32)
    return (model, shape, params, *placed, version, forcing, images, second), shape


def _shape(n: int, slots: int, sampling: Sampling, decoding: Decoding) -> Shape:
    how = (decoding.kv_dtype, decoding.look_every, decoding.draft_tokens)
    return Shape(n, slots, sampling.max_response_tokens, *how)


def planned_rollout(
    model: Model, params, prompts, sampling: Sampling, *, n: int, decoding: Decoding, second=None
) -> tuple[dict[str, tuple], Batch]:
    """What `generate` would run, for a plan: ({program: (jitted function, its arguments as shapes,
    turns of its loop at most)}, rows of zeros of this host, each with all its tokens)."""
    (model, params), resharding = _planned_weights(model, params, decoding)
    if second is not None:
        (other, weights), programs = _planned_weights(second.model, second.params, decoding)
        second = dataclasses.replace(second, model=other, params=weights)
        resharding |= {f"{name} of the second model": call for name, call in programs.items()}
    count, columns = np.shape(prompts)
    rows, response = count * n, sampling.max_response_tokens
    slots = min(decoding.slots or rows, rows)
    shape = _shape(n, slots, sampling, decoding)
    requests = [sampling] * rows
    forcing = None
    if sampling.thinking_tokens:
        none = np.zeros(rows, np.int32)
        forcing = slot.forcing_of(requests, slot.forcing_room(requests), none, none)
    split = shard_count(model, count, slots) > 1
    layout = (row_sharding if split else replicated)(model.mesh)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=layout)  # noqa: E731
    rules = jax.tree.map(
        lambda x: array(x.shape, x.dtype), rules_of(requests, model.config.vocab_size)
    )
    queue = (array((count, columns), jnp.int32), array((count,), jnp.int32))
    queue += (array((rows, 2), jnp.uint32), rules, np.zeros((), np.int32))
    arguments = (model, shape, params, *queue, forcing, None, second)
    turns = -(-rows // slots) * response
    programs = {"generate": (rollout, arguments, turns)}
    if decoding.loop == "host":
        engine = Engine(
            model, slots, columns + response, kv_dtype=decoding.kv_dtype,
            page_tokens=decoding.page_tokens, pages=decoding.pages,
            draft_tokens=decoding.draft_tokens,
        )  # fmt: skip
        hosts = engine.programs(params, count, columns)
        programs = {"prefill": (*hosts["prefill"], 1), "generate": (*hosts["generate"], turns)}
    batch, _ = jax.eval_shape(functools.partial(rollout, model, shape), *arguments[2:])
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
    chosen = np.arange(columns + response) >= columns
    batch = batch.replace(
        segment_ids=np.ones_like(batch.tokens),
        mask=np.broadcast_to(chosen, batch.tokens.shape).astype(np.float32),
        group=np.repeat(np.arange(count, dtype=np.int32), n),
    )
    here = make_mesh(1, 1, 1, devices=jax.local_devices(backend="cpu")[:1])
    return resharding | programs, place(batch, here)


def _planned_weights(model: Model, params, decoding: Decoding):
    """((the model that decodes, the shapes of its weights), the program that makes them of
    `params`, if one does)."""
    target, kept = decoding.of(model), not decoding.weight_dtype
    like = weights_like(target, params, keep_dtypes=kept)
    if agree(model, target, params, like):
        return (target, params), {}
    if is_apart(model, target):  # sent, by no program but the one that makes them narrow
        narrow = dataclasses.replace(target, mesh=model.mesh)
        if agree(model, narrow, params, like):
            return (target, like), {}
        return (target, like), {"reshard": (reshard_program(model, narrow, kept), (params,), 1)}
    return (target, like), {"reshard": (reshard_program(model, target, kept), (params,), 1)}


def _check(
    model, prompts, lengths, sampling: Sampling, n, decoding: Decoding, second: SecondModel | None
) -> None:
    if n < 1:
        raise InputError("samples per prompt", value=n, rule=">= 1")
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1] or not prompts.size:
        raise InputError(
            "prompts and lengths",
            value=(prompts.shape, lengths.shape),
            rule="[P, L] and [P], at least one prompt",
        )
    if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
        raise InputError(
            "prompt lengths",
            value=lengths.tolist(),
            rule=f"between 1 and the {prompts.shape[1]} columns",
        )
    vocab_size = model.config.vocab_size
    real = prompts[np.arange(prompts.shape[1])[None, :] < lengths[:, None]]
    if real.min() < 0 or real.max() >= vocab_size:
        bad = real[(real < 0) | (real >= vocab_size)][0]
        raise InputError("prompt", value=int(bad), rule=f"ids from 0 to {vocab_size - 1}")
    if sampling.stop_strings and decoding.decode is None:
        raise InputError("sampler stop_strings need a tokenizer", fix="pass Decoding(decode=)")
    sampling.check_token_ids(vocab_size)
    speculation.check(model.config, decoding.draft_tokens)
    if second is not None and decoding.draft_tokens:
        raise InputError(
            "sampler draft_tokens", value=decoding.draft_tokens,
            rule="0 where two models decode together", fix="sampler.draft_tokens=0",
        )  # fmt: skip
    if second is not None and second.model.config.vocab_size != vocab_size:
        raise InputError(
            "vocabulary of the second model",
            value=second.model.config.vocab_size,
            rule=f"{vocab_size}, too",
        )


def _refuse_on_host(images, second) -> None:
    for name, value in (("images", images), ("a mixture of two models", second)):
        if value is not None:
            raise InputError(
                f"{name} cannot be decoded by the host's loop", fix="sampler.loop='device'"
            )
