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
from rljax.arrays import fetch, moved_rows, place, put_whole
from rljax.batch import Batch, FinishReason
from rljax.errors import InputError
from rljax.mesh import constrain_rows, make_mesh, replicated, row_sharding, row_shards
from rljax.models.model import Model
from rljax.sampler import slots as slot
from rljax.sampler import speculation
from rljax.sampler.engine import Engine
from rljax.sampler.host_rollout import host_branches, host_rollout
from rljax.sampler.inputs import branch_keys, budgets, forcing_now, request_keys
from rljax.sampler.layout import agree, is_apart, reshard_program, weights_like
from rljax.sampler.memory import check_memory, of_length
from rljax.sampler.requests import Decoding, Sampling, rules_of
from rljax.sampler.sample import RECORD, Sample
from rljax.sampler.stop_strings import cut_at_stop_strings, cut_row
from rljax.sampler.whole_batch import (
    SecondModel,
    Shape,
    fits_a_dispatch,
    in_dispatches,
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
    search: Callable | None = None,
) -> Batch:
    """Samples n responses to each prompt.

    Args:
      model: the model, on the mesh of training.
      params: its weights, read where they lie, or as `decoding.weights` brings them to the layout
        of decoding.
      prompts: [P, L] int32, right-padded.
      lengths: [P] int32, tokens of each prompt.
      key: a JAX key; `sampling.seed` takes its place.
      sampling: the options of all requests.
      n: samples per prompt.
      version: the optimizer step of the weights, for Batch.policy_version.
      decoding: sizes of programs and memory, and where they run.
      images: those of the prompts (rljax.data.online.prompts).
      second: a model to draw from together with this one.
      finished: finished(row, ids of the response, FinishReason), called for rows as they end, while
        others still decode, each once and in no order.
      stop: asked after every dispatch; once it returns True, the rows that still decode end there,
        with FinishReason.ABORT.
      search: rljax.search.Search, which chooses the tokens in place of sampling, all rows to their
        ends.

    Returns a Batch of R = P n rows on the mesh of `model`. Row p n + s is sample s of prompt
    p; `group` is p. EOS is part of the response. A row whose logits are not finite ends
    there, with FinishReason.ABORT.

    A draw depends on (key, row, position) alone: `decoding` changes none while dtypes stay as they
    are, nor does its loop (a host's dispatches, or one program that every host of a pod runs
    unchanged). Neither `finished` nor `stop` is called where all rows may end in the same dispatch.
    On several hosts every one of them is told of every row, and `stop` returns the same on all.

    Raises InputError for prompts that are no token ids of the model, for slots that do not fit the
    memory, and for options that exclude each other.
    """
    home, version = model.mesh, version if decoding.mesh is None else fetch(version)
    model, params, second = _on_layout(model, params, second, decoding)
    prompts, lengths = np.asarray(prompts), np.asarray(lengths, np.int32)
    _check(model, prompts, lengths, sampling, n, decoding, second)
    prompts, rows = prompts.astype(np.int32), prompts.shape[0] * n
    if search is not None:
        key = key if sampling.seed is None else jax.random.key(sampling.seed)
        routes, fix = decoding.record_routes, "algorithm.collect='once()'"
        _refuse_on_host(images, second, "by a search", fix=fix, routes=routes)
        inputs = (model, params, prompts, lengths, key, sampling)
        return _at_home(search(*inputs, n=n, version=version, decoding=decoding), model, home)
    if decoding.loop == "host":
        _refuse_on_host(None, second, "by the host's loop", fix="sampler.loop='device'")
        inputs = (prompts, lengths, key, sampling)
        options = dict(n=n, version=version, decoding=decoding, finished=finished, stop=stop)
        options |= dict(images=images)
        return _at_home(host_rollout(model, params, *inputs, **options), model, home)
    images = images and place(images, model.mesh)
    key = key if sampling.seed is None else jax.random.key(sampling.seed)
    keys, forcing = jax.random.key_data(key), None
    if sampling.thinking_tokens:
        requests, keys = [sampling] * rows, request_keys(key, rows)
        room = slot.forcing_room(requests)
        thinking_budgets = budgets(keys, sampling)
        forcing = slot.forcing_of(requests, room, thinking_budgets, np.repeat(lengths, n))
    queue, settings = (
        (prompts, lengths, keys, None),
        (sampling, n, decoding, version, images, second),
    )
    arguments, shape = _arguments(model, params, queue, forcing, *settings)
    stops = (sampling.stop_strings, decoding.decode)
    tell = None
    if finished is not None:

        def tell(row, ids, reason):
            return finished(row, *cut_row(ids, reason, *stops))

    batch = _decoded(arguments, shape, rows, tell, stop)
    if sampling.stop_strings:
        batch = cut_at_stop_strings(batch, np.repeat(lengths, n), *stops)
    return _at_home(batch, model, home)


def generate_in_program(
    model: Model,
    params,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    *,
    n: int,
    version,
    decoding: Decoding,
    temperature: jax.Array | None = None,
) -> Batch:
    """`generate` as a part of another program, of which the arrays may be traced: n responses to
    each prompt of tokens [P, L] and lengths [P], a Batch of R = P n rows. `temperature`: a traced
    one, above 0, in place of that of `sampling`.

    The draws are those of `generate`. Raises InputError for what the host would have to take part
    in: its own loop, another layout or dtype of the weights, stop strings, limits of thinking,
    drafts, recorded routes.
    """
    _require_in_program(model, params, sampling, decoding)
    model, rows = decoding.of(model), tokens.shape[0] * n
    shape = _shape(n, min(decoding.slots or rows, rows), sampling, decoding)
    model = of_length(model, tokens.shape[1] + sampling.max_response_tokens)
    key = key if sampling.seed is None else jax.random.key(sampling.seed)
    rules = rules_of([sampling] * rows, model.config.ids)
    if temperature is not None:
        rules = dataclasses.replace(rules, temperature=jnp.full(rows, temperature, jnp.float32))
    if shard_count(model, tokens.shape[0], shape.slots) > 1:
        rows_of = functools.partial(constrain_rows, mesh=model.mesh)
        tokens, lengths, rules = jax.tree.map(rows_of, (tokens, lengths, rules))
    version = jnp.asarray(version, jnp.int32)
    queue = (tokens, lengths, jax.random.key_data(key), rules, version)
    return rollout(model, shape, params, *queue, None, None, None)[0]


def _require_in_program(model: Model, params, sampling: Sampling, decoding: Decoding) -> None:
    target = decoding.of(model)
    like = weights_like(target, params, keep_dtypes=not decoding.weight_dtype)
    unsupported = {
        "sampler.loop='host'": decoding.loop == "host",
        "sampler.layout or sampler.weight_dtype": not agree(model, target, params, like),
        "sampler.stop_strings": bool(sampling.stop_strings),
        "sampler.thinking_tokens": bool(sampling.thinking_tokens),
        "sampler.draft_tokens": decoding.draft_tokens > 0,
        "sampler.router_replay": decoding.record_routes,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise InputError(
                f"program_steps with {name}",
                rule="sampling is a part of one program, in which the host takes no part",
                fix=f"program_steps=1, or without {name}",
            )


def branch(
    model: Model,
    params,
    batch: Batch,
    rows,
    at,
    starts,
    key,
    sampling: Sampling,
    *,
    n: int = 1,
    version=0,
    decoding: Decoding = WHOLE_BATCH,
) -> Batch:
    """Samples n continuations of row rows[j] of a batch behind the first at[j] tokens
    of its response.

    Args:
      model: the model, on the mesh of training.
      params: its weights.
      batch: [B, S], as `generate` returned it.
      rows: [M] int32, the rows to go on with.
      at: [M] int32, how many tokens of the row's response are kept.
      starts: [B] int32, the columns at which responses begin.
      key: a JAX key. Row r has the key fold_in(key, r).
      sampling: limits, thinking budgets and stop strings of the whole response.
      n: continuations per branch.
      version: the optimizer step of the weights, for Batch.policy_version.
      decoding: sizes of programs and memory, and where they run.

    Returns a Batch of M n rows, as wide. Row j n + i is continuation i of branch j: a whole
    response, of which the mask is 1 on new tokens alone. The first at[j] tokens have the records of
    their row, and `group` is that of the row.

    A draw depends on (key of the row, at[j], i, position) alone. The host's loop reads a row once,
    whatever is asked of it; the device's loop reads the prefix of every branch once. Raises
    InputError for rows that are not in the batch, and for tokens that are not in their responses.
    """
    home, version = model.mesh, version if decoding.mesh is None else fetch(version)
    model, params, _ = _on_layout(model, params, None, decoding)
    rows, at, starts = (np.asarray(x, np.int32) for x in (rows, at, starts))
    sources = _sources(batch, rows, at, starts, key, sampling)
    columns, lengths = batch.tokens.shape[1], starts[rows] + at
    prompts = np.zeros((len(rows), columns), np.int32)
    for j, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        prompts[j, :length] = sources[row].ids[:length]
    _check(model, prompts, lengths, sampling, n, decoding, None)
    branches = list(zip(rows.tolist(), at.tolist(), strict=True))
    options = dict(n=n, version=version, decoding=decoding)
    if decoding.loop == "host":
        continuations = host_branches(
            model, params, sources, branches, columns, sampling, **options
        )
    else:
        keys = branch_keys(np.stack([sources[row].key for row, _ in branches]), at, n)
        keys, forcing = fetch(keys).reshape(-1, 2), None
        if sampling.thinking_tokens:
            children = [
                sources[row].continued(end, 0, key)
                for (row, end), row_keys in zip(branches, keys.reshape(-1, n, 2), strict=True)
                for key in row_keys
            ]
            requests = [sampling] * len(children)
            forcing = forcing_now(slot.forcing_room(requests), requests, children)
        queue = (prompts, lengths, keys, starts[rows] + sampling.max_response_tokens)
        arguments = _arguments(model, params, queue, forcing, sampling, n, decoding, version)
        continuations = _decoded(*arguments, len(keys), None, None)
    if decoding.loop != "host" and sampling.stop_strings:
        stops = (sampling.stop_strings, decoding.decode)
        continuations = cut_at_stop_strings(
            continuations, np.repeat(starts[rows], n), *stops, np.repeat(at, n)
        )
    return _behind(
        _at_home(continuations, model, home), batch, np.repeat(rows, n), np.repeat(lengths, n)
    )


def _sources(batch: Batch, rows, at, starts, key, sampling: Sampling) -> dict[int, Sample]:
    """Returns {row: its sample} of the rows that are continued. Raises InputError for rows that are
    not in the batch, and for tokens that are not in their responses."""
    if batch.pixels is not None:
        raise InputError("branches of samples with images", fix="prompts of text")
    if rows.ndim != 1 or not len(rows) or at.shape != rows.shape or starts.shape != (batch.rows,):
        value, rule = (rows.shape, at.shape, starts.shape), f"[M], [M] and [{batch.rows}]"
        raise InputError(
            "rows, at and starts of a branch",
            value=value,
            rule=rule,
            fix="give flat arrays: one row and one place for each branch, one start for each row",
        )
    if rows.min() < 0 or rows.max() >= batch.rows:
        raise InputError(
            "rows of a branch",
            value=rows.tolist()[:8],
            rule=f"below {batch.rows}",
            fix="continue rows of this batch alone",
        )
    names = ("sampler_logprobs", "sampler_log_kept", "entropy", "policy_version")
    fields = {name: getattr(batch, name) for name in ("tokens", "mask", "finish_reason", *names)}
    sizes = jnp.sum(batch.segment_ids > 0, axis=1)
    fetched, sizes = fetch(({k: v for k, v in fields.items() if v is not None}, sizes))
    max_tokens = sampling.max_response_tokens
    if int((starts[rows] + max_tokens).max()) > batch.tokens.shape[1]:
        rule = f"a prompt and its response fit the batch's {batch.tokens.shape[1]} columns"
        raise InputError(
            "sampler max_response_tokens",
            value=max_tokens,
            rule=rule,
            fix="lower --config.sampler.max_response_tokens",
        )
    if np.any((at < 0) | (at >= np.minimum(sizes[rows] - starts[rows], max_tokens))):
        rule = (
            "it counts the tokens of the response that are kept (it is no column): fewer than "
            f"those of the response and than max_response_tokens={max_tokens}"
        )
        raise InputError(
            "branch at", value=at.tolist()[:8], rule=rule, fix="branch within the response"
        )
    key = key if sampling.seed is None else jax.random.key(sampling.seed)
    keys = fetch(request_keys(key, batch.rows))
    sources = {}
    for row in dict.fromkeys(rows.tolist()):
        location = (row, slice(int(starts[row]), int(sizes[row])))
        records = np.zeros(sizes[row] - starts[row], RECORD)
        # (A row whose reward failed has mask 0 on all tokens.)
        chosen = fetched["mask"][location] > 0
        records["ids"], records["chosen"] = fetched["tokens"][location], chosen | ~chosen.any()
        for name, field in zip(("logprobs", "log_kept", "entropy", "versions"), names, strict=True):
            records[name] = fetched[field][location] if field in fetched else 0
        sources[row] = source = Sample(
            row,
            fetched["tokens"][row, : starts[row]],
            sampling,
            keys[row],
            drawn=len(records),
            interrupted=int(np.count_nonzero(~records["chosen"])),
            finish_reason=FinishReason(int(fetched["finish_reason"][row])),
        )
        source.record(records)
    return sources


@jax.jit
def _behind(continuations: Batch, batch: Batch, rows, lengths) -> Batch:
    """Returns the continuations with the groups of their rows [R] and, in their first lengths [R]
    columns, what was recorded of these rows."""
    in_prefix = jnp.arange(continuations.tokens.shape[1])[None, :] < lengths[:, None]
    names = ("sampler_logprobs", "sampler_log_kept", "entropy", "policy_version")
    names = [name for name in names if getattr(batch, name) is not None]
    names += ["routes"] if continuations.routes is not None and batch.routes is not None else []

    def wide(x):
        return in_prefix.reshape(*in_prefix.shape, *(1,) * (x.ndim - 2))

    pairs = {name: (getattr(batch, name)[rows], getattr(continuations, name)) for name in names}
    merged = {name: jnp.where(wide(old), old, new) for name, (old, new) in pairs.items()}
    return continuations.replace(**merged, group=batch.group[rows])


def _decoded(arguments: tuple, shape: Shape, rows: int, finished, stop) -> Batch:
    """Returns the batch of the device's loop, run in dispatches where the host has to act between
    them."""
    # Hosts that may be told to stop check for it after every dispatch, too.
    if fits_a_dispatch(shape, rows) or finished is None and hosts.count() == 1:
        batch, drafted = rollout(*arguments)
    else:
        callback = finished or (lambda *_: None)
        batch, drafted = in_dispatches(*arguments, finished=callback, stop=stop)
    timing.drafted(*() if drafted is None else fetch(drafted).tolist())
    return batch


def _on_layout(model: Model, params, second: SecondModel | None, decoding: Decoding):
    """Returns the models as they decode, with the weights that they read."""
    if second is not None:
        second_model, weights = (
            decoding.of(second.model),
            decoding.weights(second.model, second.params),
        )
        second = dataclasses.replace(second, model=second_model, params=weights)
    return decoding.of(model), decoding.weights(model, params), second


def _at_home(batch: Batch, model: Model, home) -> Batch:
    """Moves the batch of a model that has decoded to the mesh of training, `home`."""
    if model.mesh == home:
        return batch
    if set(model.mesh.devices.flat) != set(home.devices.flat):
        return moved_rows(batch, home, "sampler")
    fits = batch.rows % row_shards(home) == 0
    return _with_layout((row_sharding if fits else replicated)(home))(batch)


@functools.lru_cache(maxsize=8)
def _with_layout(sharding):
    """Returns one program that gives all arrays of a batch a layout."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)


def _arguments(
    model: Model, params, queue, forcing, sampling, n, decoding, version, images=None, second=None
):
    """Returns the program's arguments, placed on the mesh, and its shape. `queue`: prompts,
    lengths, keys and limits, or None; with limits rows are as wide as prompts."""
    prompts, lengths, keys, limits = queue
    rows = prompts.shape[0] * n
    slots = min(decoding.slots or rows, rows)
    shape = _shape(n, slots, sampling, decoding, prompts.shape[1] if limits is not None else 0)
    if second is not None:  # no model trains on what a mixture read
        shape = dataclasses.replace(shape, record_routes=False)
    columns = shape.columns or prompts.shape[1] + sampling.max_response_tokens
    model = of_length(model, columns)
    second = second and dataclasses.replace(second, model=of_length(second.model, columns))
    check_memory(model, slots, columns, decoding.kv_dtype)
    rules = rules_of([sampling] * rows, model.config.ids)
    queue, unsplit = (prompts, lengths, keys, rules, limits), replicated(model.mesh)
    if shard_count(model, prompts.shape[0], slots) > 1:
        placed = place(queue, model.mesh)
        if keys.ndim == 1:  # the data of one key, which has no rows
            placed = (*placed[:2], put_whole(keys, unsplit), *placed[3:])
    else:  # every device serves any row, and holds all so that reading prompts sends nothing
        placed = jax.device_put(queue, unsplit)
    *queue, limits = placed
    version = jnp.asarray(version, jnp.int32)
    return (model, shape, params, *queue, version, forcing, images, second, limits), shape


def _shape(n: int, slots: int, sampling: Sampling, decoding: Decoding, columns: int = 0) -> Shape:
    settings = (decoding.kv_dtype, decoding.look_every, decoding.draft_tokens)
    return Shape(n, slots, sampling.max_response_tokens, *settings, columns, decoding.record_routes)


def planned_rollout(
    model: Model,
    params,
    prompts,
    sampling: Sampling,
    *,
    n: int,
    decoding: Decoding,
    second=None,
    branches: bool = False,
) -> tuple[dict[str, tuple], Batch]:
    """Returns the programs that `generate` would run, for a plan: ({program: (jitted function, its
    arguments as shapes, steps of its loop at most)}, rows of zeros of this host, each with all its
    tokens). `branches`: what `branch` would run, of `prompts` that are whole rows."""
    (model, params), resharding = _planned_weights(model, params, decoding)
    if second is not None:
        (second_model, weights), programs = _planned_weights(second.model, second.params, decoding)
        second = dataclasses.replace(second, model=second_model, params=weights)
        resharding |= {f"{name} of the second model": call for name, call in programs.items()}
    count, columns = np.shape(prompts)
    rows, response = count * n, sampling.max_response_tokens
    slots = min(decoding.slots or rows, rows)
    width = columns if branches else columns + response
    model = of_length(model, width)
    shape = _shape(n, slots, sampling, decoding, width if branches else 0)
    requests = [sampling] * rows
    forcing = None
    if sampling.thinking_tokens:
        zeros = np.zeros(rows, np.int32)
        forcing = slot.forcing_of(requests, slot.forcing_room(requests), zeros, zeros)
    splits_rows = shard_count(model, count, slots) > 1
    layout = (row_sharding if splits_rows else replicated)(model.mesh)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    rules = jax.tree.map(lambda x: array(x.shape, x.dtype), rules_of(requests, model.config.ids))
    queue = (array((count, columns), jnp.int32), array((count,), jnp.int32))
    keys = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated(model.mesh))
    if sampling.thinking_tokens or branches:
        keys = array((rows, 2), jnp.uint32)
    queue += (keys, rules, np.zeros((), np.int32))
    limits = array((count,), jnp.int32) if branches else None
    arguments = (model, shape, params, *queue, forcing, None, second, limits)
    steps, name = -(-rows // slots) * response, "branch" if branches else "generate"
    programs = {name: (rollout, arguments, steps)}
    if decoding.loop == "host":
        engine = Engine(
            model,
            slots,
            width,
            kv_dtype=decoding.kv_dtype,
            page_tokens=decoding.page_tokens,
            pages=decoding.pages,
            draft_tokens=decoding.draft_tokens,
        )
        host_programs = engine.programs(params, count, columns)
        programs = {
            "prefill": (*host_programs["prefill"], 1),
            name: (*host_programs["generate"], steps),
        }
    batch, _ = jax.eval_shape(functools.partial(rollout, model, shape), *arguments[2:])
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
    chosen = np.arange(width) >= width - response
    batch = batch.replace(
        segment_ids=np.ones_like(batch.tokens),
        mask=np.broadcast_to(chosen, batch.tokens.shape).astype(np.float32),
        group=np.repeat(np.arange(count, dtype=np.int32), n),
    )
    return resharding | programs, _placed_here(batch)


def planned_search(
    model: Model, params, prompts, sampling: Sampling, *, n: int, decoding: Decoding, search
) -> tuple[dict[str, tuple], Batch]:
    """`planned_rollout` of a `generate` whose tokens `search` chooses."""
    (model, params), resharding = _planned_weights(model, params, decoding)
    options = dict(n=n, decoding=decoding)
    programs, batch = search.planned(model, params, np.shape(prompts), sampling, **options)
    return resharding | programs, _placed_here(batch)


def _placed_here(batch: Batch) -> Batch:
    """Places the rows of a batch on this host."""
    return place(batch, make_mesh(1, 1, 1, devices=jax.local_devices(backend="cpu")[:1]))


def _planned_weights(model: Model, params, decoding: Decoding):
    """Returns ((the model that decodes, the shapes of its weights), the program that makes them of
    `params`, if one does)."""
    target, keep_dtypes = decoding.of(model), not decoding.weight_dtype
    like = weights_like(target, params, keep_dtypes=keep_dtypes)
    if agree(model, target, params, like):
        return (target, params), {}
    if is_apart(model, target):  # sent without a program, but for the one that casts them
        local_target = dataclasses.replace(target, mesh=model.mesh)
        if agree(model, local_target, params, like):
            return (target, like), {}
        return (target, like), {
            "reshard": (reshard_program(model, local_target, keep_dtypes), (params,), 1)
        }
    return (target, like), {"reshard": (reshard_program(model, target, keep_dtypes), (params,), 1)}


def _check(
    model, prompts, lengths, sampling: Sampling, n, decoding: Decoding, second: SecondModel | None
) -> None:
    if n < 1:
        raise InputError("samples per prompt", value=n, fix="give n=1 or more")
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1] or not prompts.size:
        raise InputError(
            "prompts and lengths",
            value=(prompts.shape, lengths.shape),
            rule="[P, L] and [P], at least one prompt",
            fix="pad the prompts on the right to one width, and give the length of each",
        )
    if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
        raise InputError(
            "prompt lengths",
            value=lengths.tolist(),
            rule=f"between 1 and the {prompts.shape[1]} columns",
            fix="give the number of tokens of each prompt, 1 or more",
        )
    vocab_size = model.config.vocab_size
    token_ids = prompts[np.arange(prompts.shape[1])[None, :] < lengths[:, None]]
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        bad_id = token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0]
        raise InputError(
            "prompt",
            value=int(bad_id),
            rule=f"ids from 0 to {vocab_size - 1}",
            fix="encode the prompts by the tokenizer of the model",
        )
    if sampling.stop_strings and decoding.decode is None:
        raise InputError("sampler stop_strings need a tokenizer", fix="pass Decoding(decode=)")
    sampling.check_token_ids(model.config.ids)
    speculation.check(model.config, decoding.draft_tokens)
    if decoding.record_routes and model.config.experts is None:
        rule = f"it records the experts of each token, and a {model.config.family} model has none"
        raise InputError(
            "sampler.router_replay",
            value=True,
            rule=rule,
            fix="--config.sampler.router_replay=False",
        )
    if second is not None and decoding.draft_tokens:
        raise InputError(
            "sampler draft_tokens",
            value=decoding.draft_tokens,
            rule="0 where two models decode together",
            fix="sampler.draft_tokens=0",
        )
    if second is not None and second.model.config.ids != model.config.ids:
        raise InputError(
            "vocabulary of the second model",
            value=second.model.config.ids,
            rule=f"{model.config.ids}, too",
            fix="take a second model with the same tokenizer",
        )


def _refuse_on_host(images, second, phrase: str, *, fix: str, routes=False) -> None:
    for name, value in (("images", images), ("a mixture of two models", second)):
        if value is not None:
            raise InputError(f"{name} cannot be decoded {phrase}", fix=fix)
    if routes:
        raise InputError(
            f"routes of experts cannot be recorded {phrase}", fix="sampler.router_replay=False"
        )
