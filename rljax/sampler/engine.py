"""The engine: JetStream's verbs over slots, each one jitted program. It holds no weights.

prefill, insert, generate, extend, fork, extract, release. Parameters are an argument of every call,
so the next call after an update uses the new arrays; the decode state is donated. Which request
gets a slot is decided in `stream`.

Axes: B slots, T columns of a slot, P rows of a prefix, S tokens of a call, M pairs of a slot and a
row of a prefix, k steps.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, put_whole
from rljax.batch import batch_from_rows
from rljax.errors import InputError
from rljax.mesh import row_shards
from rljax.models import cache
from rljax.models.cache_pages import Pool
from rljax.models.model import Model
from rljax.sampler import slots as slot
from rljax.sampler import speculation
from rljax.sampler.memory import check_memory, check_pages, check_whole, model_of_slots, pool_for
from rljax.sampler.requests import STOP_IDS, Sampling, rules_of
from rljax.sampler.slots import SlotInputs, Slots, Tokens


def _program(*, donate=()):
    return functools.partial(jax.jit, static_argnums=0, donate_argnums=donate)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """The cached beginnings of P sequences, outside of any slot. `length` [P] tokens are cached;
    `token` [P] is the next to read, -1 where nothing was appended yet."""

    caches: list
    length: jax.Array
    token: jax.Array
    shift: jax.Array

    @property
    def rows(self) -> int:
        """P, the number of sequences."""
        return self.length.shape[0]

    @property
    def columns(self) -> int:
        """The columns of the layer that holds the most."""
        return cache.room(self.caches)


@dataclasses.dataclass(frozen=True)
class Engine:
    """Slots of `tokens` tokens each (prompt and response). Static: every program is compiled once
    for each shape of its arguments."""

    model: Model
    slots: int
    tokens: int
    kv_dtype: str = ""
    steps: int = 32  # at most, per dispatch of generate
    stop_ids: int = STOP_IDS  # room for those of one request
    forcing_tokens: int = 0  # room for the phrases of interruptions; 0 = none can be asked for
    page_tokens: int = 0  # of a page of keys and values; 0 = each slot has its columns to itself
    pages: int = 0  # of all slots together; 0 = as many as their columns take
    draft_tokens: int = 0  # that a step reads beside the newest one (rljax.sampler.speculation)

    def __post_init__(self):
        for name in ("slots", "tokens", "steps", "stop_ids"):
            check_whole(name, getattr(self, name), 1)
        check_pages(self.page_tokens, self.pages)
        object.__setattr__(self, "model", model_of_slots(self.model, self.tokens))
        speculation.check(self.model.config, self.draft_tokens)
        check_memory(self.model, self.slots, self.tokens, self.kv_dtype, self.pool)

    @property
    def pool(self) -> Pool | None:
        """The pages of the slots, split as they are; None where slots are contiguous."""
        return pool_for(self.model, self.slots, self.tokens, self.page_tokens, self.pages)

    @property
    def request_tokens(self) -> int:
        """Tokens, prompt and response, that one request may have: a slot's, or those that the pages
        of a device hold and one more, which is not read."""
        if (pool := self.pool) is None:
            return self.tokens
        return min(self.tokens, pool.count // pool.shards * pool.page_tokens + 1)

    # -- what a request is, as arrays

    def check(self, one: Sampling) -> None:
        """Raises InputError if this engine cannot serve a request: it has too many stop ids, or an
        interruption for which there is no room."""
        one.check_token_ids(self.model.config.ids)
        if len(one.stop_ids) > self.stop_ids:
            raise InputError(
                "sampler stop_ids",
                value=len(one.stop_ids),
                rule=f"at most {self.stop_ids} for this engine",
                fix="Engine(stop_ids=)",
            )
        if one.thinking_tokens and slot.forcing_room([one]) > self.forcing_tokens:
            raise InputError(
                "this engine has no room for interruptions",
                value=slot.forcing_room([one]),
                rule=f"at most its forcing_tokens, {self.forcing_tokens}",
                fix="Engine(forcing_tokens=...) of at least that many, or a shorter interrupt text",
            )

    def rules(self, requests: list[Sampling]):
        """Returns the rules of M requests as host arrays; their shapes do not depend
        on the requests."""
        for request in requests:
            self.check(request)
        return rules_of(requests, self.model.config.ids, whole=True, room=self.stop_ids)

    def forcing(self, requests: list[Sampling], budgets, prompt_tokens):
        """Returns the interruptions of M requests, after budgets [M] tokens of thinking behind
        prompt_tokens [M]; None if this engine has no room for any."""
        if not self.forcing_tokens:
            return None
        return slot.forcing_of(requests, self.forcing_tokens, budgets, prompt_tokens)

    def can_go_back(self, read: int) -> bool:
        """Returns whether a slot that has read `read` tokens still has what fewer of them need: no
        sliding window has gone round, and no layer is recurrent."""
        config = self.model.config
        rings = all(not kind.window or read <= kind.window for kind in config.kinds)
        return rings and not config.recurrent

    # -- verbs

    def init_state(self) -> Slots:
        """Returns the state of B empty slots."""
        blank = [Sampling()]
        forcing = self.forcing(blank, np.array([-1]), np.array([0]))
        return _init_state(self, self.rules(blank), forcing)

    def abstract_state(self) -> Slots:
        """Returns shape, dtype and sharding of everything in `init_state`, of
        which nothing is allocated: programs are compiled ahead of time for it
        (rljax.models.model.Model.abstract)."""
        state = jax.eval_shape(self.init_state)

        def with_sharding(x, s):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

        return jax.tree.map(with_sharding, state, slot.layout(state, self.model.mesh))

    def lower_generate(self):
        """Returns the lowered program of `generate`, to compile ahead of time or to inspect."""
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        return _generate.lower(self, self.model.abstract(), self.abstract_state(), steps, steps)

    def programs(self, params, rows: int, columns: int) -> dict[str, tuple]:
        """{name: (jitted function, its arguments as shapes)} of a batch of `rows` prompts that the
        host's loop decodes: the reading of all prompts, and a dispatch of at most `steps` steps."""
        numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows, columns), jnp.int32)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        return {
            "prefill": (_prefill, (self, params, tokens, numbers, None)),
            "generate": (_generate, (self, params, self.abstract_state(), steps, steps)),
        }

    def prefill(self, params, tokens, true_lengths, images: dict | None = None) -> Prefix:
        """Reads right-padded prompts [P, S] of true_lengths [P] >= 1 in one pass; all but the last
        token count as read.

        Args:
          params: the weights of the model.
          tokens: [P, S] int32.
          true_lengths: [P] int32.
          images: {"pixels", "patch_coords", "rope_positions", "shift"} of the prompts, or None.

        Raises InputError if S is more than a slot holds.
        """
        if tokens.shape[1] > self.tokens:
            raise InputError(
                "columns of prompts",
                value=tokens.shape[1],
                rule=f"at most the {self.tokens} tokens of a slot",
                fix="shorten the prompts, or make the engine with more tokens to a slot",
            )
        return _prefill(self, params, tokens, true_lengths, images)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def empty_prefix(self, rows: int = 1) -> Prefix:
        """Returns `rows` sequences of no tokens, with a slot's room."""
        caches = self.model.empty_caches(rows, self.tokens, self.kv_dtype)
        zeros = jnp.zeros((rows,), jnp.int32)
        return Prefix(caches, *_on_mesh((zeros, zeros - 1, zeros), self.model.mesh))

    @_program(donate=2)
    def append(self, params, prefix: Prefix, tokens, counts) -> Prefix:
        """Reads tokens [P, S], of which counts [P] are real, behind what `prefix` holds: chunks of
        a long prompt, a shared beginning, a tool's reply. `prefix` is donated."""
        return _appended(self, params, prefix, tokens, counts)

    @_program()
    def gather(self, state: Slots, shard: int, pages: np.ndarray, length: int) -> Prefix:
        """Returns the first `length` tokens of pages [P] of a shard as one sequence with
        a slot's room."""
        index = jnp.reshape(shard * self.slots // self.pool.shards, (1,))
        table, lengths = state.table.at[index].set(pages), state.length.at[index].set(length)
        rows = slot.take(
            dataclasses.replace(state, table=table, length=lengths), index, self.model.mesh
        )
        blank = self.model.empty_caches(1, self.tokens, self.kv_dtype)
        caches = [
            cache.resized(layer, blank_layer.columns)
            for layer, blank_layer in zip(rows, blank, strict=True)
        ]
        return Prefix(caches, *(jnp.full((1,), value, jnp.int32) for value in (length, -1, 0)))

    @_program()
    def widen(self, prefix: Prefix, row, length) -> Prefix:
        """Returns row `row` of a prefix, cut to `length` read tokens, as one sequence with
        a slot's room."""
        blank = self.model.empty_caches(1, self.tokens, self.kv_dtype)
        target, source = jnp.zeros((1,), jnp.int32), jnp.reshape(row, (1,))
        caches = [
            cache.write_rows(blank_layer, layer, target, source)
            for blank_layer, layer in zip(blank, prefix.caches, strict=True)
        ]
        # (Not weakly typed: a weakly typed result would compile the other programs again.)
        length = jnp.full((1,), length, jnp.int32)
        caches = [cache.first_tokens(layer, length) for layer in caches]
        return Prefix(caches, length, jnp.full((1,), -1, jnp.int32), prefix.shift[source])

    def with_table(self, state: Slots, table: np.ndarray) -> Slots:
        """Returns the state with the pages [B, P] int32 of every slot, counted from the
        first of its device; a number that is no page is none. No other slot may write a page
        that several read."""
        # (With the sharding that programs return: another one would compile them again.)
        layout = slot.rows_layout(table, self.model.mesh)
        return dataclasses.replace(state, table=put_whole(table, layout))

    @_program(donate=2)
    def insert(
        self, prefix: Prefix, state: Slots, slots, source, inputs: SlotInputs, first=None
    ) -> Slots:
        """Puts row source [M] of `prefix` into slots [M], live; a slot out of range is dropped. The
        samples of a group are one row into many slots. Pages of their `first` [M] tokens are not
        written, as they hold them (None: 0). `state` is donated."""
        state = slot.insert(state, (prefix.caches,), slots, source, self.model.mesh, first)
        return _pinned(self, slot.enter(state, inputs, slots))

    def generate(
        self, params, state: Slots, steps, enough_free=None, raw_logprobs: bool = False
    ) -> tuple[Slots, Tokens, int]:
        """Does up to `steps` steps, each a token (with drafts: or more) in every live slot, or
        until `enough_free` slots are not live. Returns the state, Tokens of `self.steps` rows (or
        more), and the steps done. `state` is donated. `raw_logprobs`: the log-probs are those of
        temperature 1, not of the distribution that was drawn from."""
        enough_free = self.slots if enough_free is None else enough_free
        return _generate(self, params, state, steps, enough_free, raw_logprobs)

    def extend(
        self,
        params,
        state: Slots,
        slots,
        tokens,
        counts,
        inputs: SlotInputs | None = None,
        live=True,
    ) -> Slots:
        """Reads tokens [M, S], of which counts [M] are real, behind what slots [M] hold, and makes
        them live where `live` [M] says so. `state` is donated.

        `inputs` [M] is what the slots are before that: how many of their tokens count, the token
        behind these, and the rules and limits from here on. Without it, which reads back how much
        the slots hold, they go on by their own. Raises InputError if a slot would hold more tokens
        than it has room for.
        """
        in_range = np.asarray(slots) < self.slots
        if inputs is None:
            lengths = fetch(state.length)[np.minimum(np.asarray(slots), self.slots - 1)]
        else:
            lengths = np.asarray(inputs.length)
        if (
            longest := int(np.max((lengths + 1 + np.asarray(counts))[in_range], initial=0))
        ) > self.tokens:
            raise InputError(
                "tokens behind a slot",
                value=longest,
                rule=f"at most {self.tokens}",
                fix="shorten the continuation, or make the engine with more tokens to a slot",
            )
        return _extend(self, params, state, slots, tokens, counts, inputs, live)

    @_program(donate=2)
    def park(self, state: Slots, beside: Prefix, slots, rows) -> Prefix:
        """Copies what slots [M] hold into rows [M] of `beside`, which is donated; a row out of
        range is dropped."""
        prefix = _taken(self, state, slots)
        source = jnp.arange(len(slots))
        caches = [
            cache.write_rows(target_layer, source_layer, rows, source)
            for target_layer, source_layer in zip(beside.caches, prefix.caches, strict=True)
        ]
        return dataclasses.replace(beside, caches=cache.constrain(caches, self.model.mesh))

    def restore(self, prefixes: Sequence[Prefix], state: Slots, slots, source) -> Slots:
        """Puts the caches of rows source [M] into slots [M], for `extend` to go on behind; the rows
        of the prefixes count on. A slot out of range is dropped. `state` is donated."""
        caches = tuple(prefix.caches for prefix in prefixes)
        return _restore(self, caches, state, slots, source)

    @_program(donate=1)
    def fork(self, state: Slots, source, slots, keys) -> Slots:
        """Copies slot `source` into slots [M], which go on with keys [M, 2]. `state` is donated."""
        prefix = _taken(self, state, jnp.reshape(source, (1,)))
        zeros = jnp.zeros(slots.shape, jnp.int32)
        state = slot.insert(state, (prefix.caches,), slots, zeros, self.model.mesh)
        rows = dataclasses.replace(state, caches=(), table=None)
        copied = jax.tree.map(lambda x: x.at[slots].set(x[source], mode="drop"), rows)
        key = copied.key.at[slots].set(keys, mode="drop")
        # The slots keep pages of their own.
        fields = dict(caches=state.caches, table=state.table, key=key)
        return _pinned(self, dataclasses.replace(copied, **fields))

    @_program()
    def extract(self, state: Slots, slots) -> Prefix:
        """Returns the contents of slots [M] as a prefix of M rows. The slots stay as they are."""
        return _taken(self, state, slots)

    @_program(donate=1)
    def release(self, state: Slots, slots) -> Slots:
        """Frees slots [M]. `state` is donated."""
        live = state.live.at[slots].set(False, mode="drop")
        return _pinned(self, dataclasses.replace(state, live=live))

    @_program(donate=1)
    def clear(self, state: Slots, slots) -> Slots:
        """Frees slots [M] and fills them with zeros. `state` is donated.

        A masked NaN is still a NaN in a weighted sum, so slots whose logits were not finite must
        not be reused as they are.
        """

        def zero(x):
            return x.at[slots].set(0, mode="drop")

        # Pages are read as zero behind a slot's tokens, so they can be used as they are.
        caches = [layer if layer.pool else jax.tree.map(zero, layer) for layer in state.caches[0]]
        caches, length, token = (caches,), zero(state.length), zero(state.token)
        live = state.live.at[slots].set(False, mode="drop")
        state = dataclasses.replace(state, caches=caches, length=length, token=token, live=live)
        return _pinned(self, state)


def _pinned(engine: Engine, state: Slots) -> Slots:
    """Returns the state with the sharding that it had at first, so that donated buffers can be
    written in place; on one device, too."""
    return jax.lax.with_sharding_constraint(state, slot.layout(state, engine.model.mesh))


def _on_mesh(tree, mesh):
    """Returns the arrays with their rows split over the mesh where they divide (inside a program);
    on one device, too."""
    return jax.lax.with_sharding_constraint(tree, slot.rows_layout(tree, mesh))


@functools.partial(jax.jit, static_argnums=0)
def _init_state(engine: Engine, rules, forcing) -> Slots:
    room = (engine.slots, engine.tokens, engine.kv_dtype, rules, forcing, engine.pool)
    return _pinned(engine, slot.empty([engine.model], *room, engine.draft_tokens))


@_program()
def _prefill(engine: Engine, params, tokens, lengths, images) -> Prefix:
    prompts = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
    shift = jnp.zeros_like(lengths)
    if images is not None:
        names = ("pixels", "patch_coords", "rope_positions")
        prompts, shift = prompts.replace(**{name: images[name] for name in names}), images["shift"]
    caches = engine.model.prefill(params, prompts, tokens.shape[1], engine.kv_dtype)
    last_tokens = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    return Prefix(caches, lengths - 1, last_tokens, shift)


def _appended(engine: Engine, params, prefix: Prefix, tokens, counts) -> Prefix:
    """Reads the token that the prefix still has to read, if there is one, and all new tokens but
    the last, which is then the next to be read."""
    no_token = prefix.token < 0
    sequence = jnp.concatenate([prefix.token[:, None], tokens], axis=1)
    inputs = jnp.where(no_token[:, None], sequence[:, 1:], sequence[:, :-1])
    read_counts = jnp.maximum(counts - no_token, 0)
    unstacked = engine.model.unstack(params)
    caches = engine.model.extend(
        unstacked, inputs, prefix.length, read_counts, prefix.caches, prefix.shift
    )
    next_token = jnp.take_along_axis(sequence, counts[:, None], axis=1)[:, 0]
    return Prefix(caches, prefix.length + read_counts, next_token, prefix.shift)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _generate(engine: Engine, params, state: Slots, steps, enough_free, raw_logprobs=False):
    models = [(engine.model, engine.model.unstack(params, engine.steps))]
    steps = jnp.minimum(steps, engine.steps)
    rules, drafts = state.rules, speculation.uncounted(state.drafts)
    draw_rules = dataclasses.replace(rules, raw_logprobs=raw_logprobs)
    state = dataclasses.replace(state, drafts=drafts, rules=draw_rules)
    state, tokens, steps_done = slot.decode(models, 0.0, state, steps, engine.steps, enough_free)
    return _pinned(engine, dataclasses.replace(state, rules=rules)), tokens, steps_done


@_program(donate=2)
def _extend(engine: Engine, params, state: Slots, slots, tokens, counts, inputs, live) -> Slots:
    if inputs is None:
        live = state.live.at[slots].set(live, mode="drop")
        state = dataclasses.replace(state, live=live)
    else:
        state = slot.enter(state, inputs, slots, live)
    drafts = speculation.extended(state.drafts, slots, state.length, tokens, counts)
    state = dataclasses.replace(state, drafts=drafts)
    if len(slots) * row_shards(engine.model.mesh) >= engine.slots:
        return _pinned(engine, _extended_in_place(engine, params, state, slots, tokens, counts))
    slot_rows = _taken(engine, state, slots)
    prefix = _appended(engine, params, slot_rows, tokens, counts)
    arguments = (slots, jnp.arange(len(slots)), engine.model.mesh)
    state = slot.insert(state, (prefix.caches,), *arguments, slot_rows.length)

    def put(array, values):
        return array.at[slots].set(values, mode="drop")

    length, token = put(state.length, prefix.length), put(state.token, prefix.token)
    return _pinned(engine, dataclasses.replace(state, length=length, token=token))


def _extended_in_place(engine: Engine, params, state: Slots, slots, tokens, counts) -> Slots:
    """Extends the caches without a copy of any slot: all slots take part, most of them with no
    tokens, and each device reads for the slots that it has."""
    slot_tokens = (
        jnp.zeros((engine.slots, tokens.shape[1]), jnp.int32).at[slots].set(tokens, mode="drop")
    )
    slot_counts = jnp.zeros((engine.slots,), jnp.int32).at[slots].set(counts, mode="drop")
    slot_tokens, slot_counts = _on_mesh((slot_tokens, slot_counts), engine.model.mesh)
    caches = cache.with_table(state.caches[0], state.table)
    prefix = Prefix(caches, state.length, state.token, state.shift)
    prefix = _appended(engine, params, prefix, slot_tokens, slot_counts)
    caches = (cache.with_table(prefix.caches, None),)
    return dataclasses.replace(state, caches=caches, length=prefix.length, token=prefix.token)


@_program(donate=2)
def _restore(engine: Engine, caches: tuple, state: Slots, slots, source) -> Slots:
    layers = jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
    return _pinned(engine, slot.insert(state, (layers,), slots, source, engine.model.mesh))


def _taken(engine: Engine, state: Slots, slots) -> Prefix:
    """Returns the rows of the slots as a prefix; a slot out of range gives an arbitrary row."""

    def pick(x):
        return jnp.take(x, slots, axis=0, mode="clip")

    rows = jax.tree.map(pick, (state.length, state.token, state.shift))
    return Prefix(slot.take(state, slots, engine.model.mesh), *rows)
