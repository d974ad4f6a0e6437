"""JetStream's Engine interface over our engine, for code that was written for JetStream.

The methods, properties and results of `jetstream.engine.engine_api` as of google-jetstream 0.2.2
(JetStreamEngine) and of its last source, 0.3 (JetStreamHeadEngine: prefill draws the first token).
JetStream is not imported, and so neither is the TensorFlow that it brings; `register` makes its
isinstance checks true where it is there.

JetStream's requests carry no sampling rules and no seed: they are those of the adapter.

Axes: B slots, P rows of a prefix, S padded tokens, k steps of a dispatch (JetStream's
"speculations").
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import InputError
from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.requests import Sampling
from rljax.sampler.slots import SlotInputs, Slots, Tokens

# The lengths to which JetStream pads prompts; max_prefill_length must be one of them.
BUCKETS = tuple(2**i for i in range(4, 16))
HEAD_CHUNK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class SlotData:
    """The tokens of one slot: tokens and valid (0 or 1) [1, k], lengths [1], log_prob [1, k]."""

    tokens: jax.Array | np.ndarray
    valid: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    log_prob: jax.Array | np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResultTokens:
    """The result of a dispatch. data [B, 2 k + 1] int32 is tokens | valid | length in one array; a
    slot's length counts its response up to the first token of this dispatch: JetStream ends a
    request by it before it reads the tokens, and would lose a last dispatch that counted them."""

    data: jax.Array | np.ndarray
    tokens_idx: tuple[int, int] = dataclasses.field(metadata=dict(static=True))
    valid_idx: tuple[int, int] = dataclasses.field(metadata=dict(static=True))
    length_idx: tuple[int, int] = dataclasses.field(metadata=dict(static=True))
    samples_per_slot: int = dataclasses.field(metadata=dict(static=True))
    log_prob: jax.Array | np.ndarray | None = None  # [B, k] float32

    def copy_to_host_async(self) -> None:
        """Starts the copy to the host."""
        for array in jax.tree.leaves(self):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        """Returns the same result with arrays on the host."""
        return jax.tree.map(np.asarray, self)

    def get_result_at_slot(self, slot: int) -> SlotData:
        """Returns the tokens of one slot."""
        return self.get_result_at_slots((slot,))

    def get_result_at_slots(self, slots: Sequence[int]) -> SlotData:
        """Returns the tokens of N slots: tokens, valid and log_prob [N, k], lengths [N]."""
        indices = np.asarray(slots)

        def column(pair):
            return self.data[indices, pair[0] : pair[1]]

        log_prob = None if self.log_prob is None else self.log_prob[indices]
        return SlotData(
            column(self.tokens_idx), column(self.valid_idx), column(self.length_idx)[:, 0], log_prob
        )


class JetStreamTokenizer:
    """JetStream's Tokenizer over ours. JetStream decodes token by token, so a character that takes
    several tokens is lost in its text; the ids are exact."""

    def __init__(self, tokenizer, max_prefill_length: int):
        self._tokenizer, self._longest = tokenizer, max_prefill_length
        self.pad_id = tokenizer.pad_id
        self.eos_id = tokenizer.eos_ids[0]
        # JetStream puts it in front of the ids that clients send, whatever the model.
        self.bos_id = self.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        self.stop_tokens = set(tokenizer.eos_ids)

    def encode(
        self,
        s: str,
        *,
        is_bos: bool = True,
        max_prefill_length: int | None = None,
        prefill_lengths: Sequence[int] = BUCKETS,
        jax_padding: bool = True,
    ):
        """Returns ids [S] int32, padded to a bucket, and the number of real ones. A longer text
        keeps its last ids."""
        longest = max_prefill_length or self._longest
        ids = self._tokenizer.encode(s, add_special_tokens=is_bos)[-longest:]
        size = min((b for b in prefill_lengths if b >= len(ids)), default=longest)
        padded = np.full(min(size, longest), self.pad_id, np.int32)
        padded[: len(ids)] = ids
        return (jnp.asarray(padded) if jax_padding else padded), len(ids)

    def decode(self, token_ids: Sequence[int], **_) -> str:
        """Returns the text of the ids."""
        return self._tokenizer.decode(token_ids)


class JetStreamEngine:
    """google-jetstream 0.2.2's Engine. It keeps no parameters: `load` returns the current ones."""

    samples_per_slot = 1
    colocated_cpus = None
    use_chunked_prefill = False
    prefill_chunk_size = 0

    def __init__(
        self,
        engine: Engine,
        load: Callable[[], object],
        tokenizer=None,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
    ):
        """`load`: () -> parameters, for load_params. `sampling` is that of all requests, by default
        greedy. Its max_response_tokens is not used: a response ends when JetStream says so, or at
        the end of its slot.

        Raises InputError for an engine with pages, with draft tokens or with slots of less than 17
        tokens, and for a sampling with stop strings or thinking_tokens.
        """
        if engine.page_tokens:
            rule = "0: JetStream's orchestrator says nothing of pages"
            problem = "page_tokens of JetStream's engine"
            fix = "make the engine with page_tokens=0"
            raise InputError(problem, value=engine.page_tokens, rule=rule, fix=fix)
        if engine.draft_tokens:
            rule = "0: JetStream's orchestrator takes one token a step"
            problem = "draft_tokens of JetStream's engine"
            fix = "make the engine with draft_tokens=0"
            raise InputError(problem, value=engine.draft_tokens, rule=rule, fix=fix)
        fits = [bucket for bucket in BUCKETS if bucket < engine.tokens]
        if not fits:
            rule = f"more than {BUCKETS[0]}, the shortest prompt that JetStream pads to"
            fix = f"make the engine with {BUCKETS[0] + 1} tokens to a slot, or more"
            raise InputError("tokens of a slot", value=engine.tokens, rule=rule, fix=fix)
        self.engine, self._load, self._tokenizer = engine, load, tokenizer
        self.max_prefill_length = fits[-1]
        self.sampling = sampling or Sampling(temperature=0.0)
        if self.sampling.stop_strings or self.sampling.thinking_tokens:
            raise InputError(
                "JetStream knows no stop strings and no interruptions",
                fix="leave stop_strings and thinking_tokens of the sampling out, or serve by "
                "`rljax serve`",
            )
        self._rules = engine.rules([self.sampling])
        self._root, self._numbers = jax.random.key(seed), itertools.count()

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots, B."""
        return self.engine.slots

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Mesh of the model, the one that it is trained on."""
        return self.engine.model.mesh

    def load_params(self, *_, **__):
        """Returns the current parameters, not a copy."""
        return self._load()

    def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
        """Returns the sharding that a prefix read by another engine must have."""
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    def get_tokenizer(self) -> None:
        """Returns None: there is no description of a tokenizer. Use build_tokenizer."""
        return None

    def build_tokenizer(self, metadata) -> JetStreamTokenizer:
        """Returns our tokenizer with JetStream's interface. Raises InputError if the engine was
        made without one."""
        if self._tokenizer is None:
            raise InputError("this engine was made without a tokenizer", fix="pass tokenizer=")
        return JetStreamTokenizer(self._tokenizer, self.max_prefill_length)

    def init_decode_state(self, *_, **__) -> dict:
        """Returns B empty slots, and the number of prompt tokens [B] in each."""
        return {
            "slots": self.engine.init_state(),
            "prompt": jnp.zeros(self.engine.slots, jnp.int32),
        }

    def prefill(
        self, *, params, existing_prefix: dict | None = None, padded_tokens, true_length: int
    ) -> dict:
        """Reads padded_tokens [S], of which the first true_length are real, after existing_prefix;
        returns a prefix of one row. Raises InputError for true_length below 1, and for more tokens
        than a slot holds."""
        if existing_prefix is None:
            before = self.engine.empty_prefix()
        else:  # a copy: append writes in place, and others may go on from the same prefix
            before = jax.tree.map(jnp.copy, existing_prefix["cache"])
        cache = self._read(params, before, padded_tokens, true_length)
        return {"cache": cache, "keys": self._keys(None, 1)}

    def insert(self, prefix: dict, decode_state: dict, slot: int, request_id=None) -> dict:
        """Puts a prefix of one row into a slot; `decode_state` is donated."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: dict, decode_state: dict, slots: Sequence[int]) -> dict:
        """Puts row i of a prefix into slots[i], or its only row into all of them; `decode_state` is
        donated. Raises InputError unless there is one slot for each row, or one row."""
        cache, count = prefix["cache"], self.engine.slots
        rows = cache.length.shape[0]
        if rows not in (1, len(slots)):
            rule, fix = f"one per row of the prefix, {rows}", "give one slot for each row"
            raise InputError("slots", value=list(slots), rule=rule, fix=fix)
        # Always as many pairs as slots, so that this compiles once; beyond the last is dropped.
        targets, source = np.full(count, count, np.int32), np.zeros(count, np.int32)
        targets[: len(slots)] = slots
        source[: len(slots)] = np.arange(len(slots)) % rows
        keys = prefix["keys"] if rows == len(slots) else self._keys(None, len(slots))
        rules = jax.tree.map(lambda x: np.repeat(x, count, axis=0), self._rules)
        inputs, prompt = _inputs(cache, keys, source, self.engine.tokens, rules)
        forcing = self.engine.forcing(
            [self.sampling] * count, np.full(count, -1), np.zeros(count, np.int32)
        )
        inputs = dataclasses.replace(inputs, forcing=forcing)
        state = self.engine.insert(cache, decode_state["slots"], targets, source, inputs)
        drawn_tokens = prefix.get("drawn", 0)
        return {
            "slots": state,
            "prompt": decode_state["prompt"].at[targets].set(prompt - drawn_tokens, mode="drop"),
        }

    def generate(self, params, decode_state: dict) -> tuple[dict, ResultTokens]:
        """Samples k tokens in every slot that has not ended; `decode_state` is donated."""
        prompt = decode_state["prompt"]
        count = _response_tokens(decode_state["slots"], prompt)
        steps = self.engine.steps
        state, tokens, _ = self.engine.generate(params, decode_state["slots"], steps)
        return {"slots": state, "prompt": prompt}, _results(tokens, count, steps)

    def _read(self, params, before: Prefix, padded_tokens, true_length: int) -> Prefix:
        tokens = jnp.asarray(padded_tokens, jnp.int32)[None]
        # Of a prompt that is too long JetStream keeps the last tokens and reports all of them.
        count = np.array([min(int(true_length), tokens.shape[1])], np.int32)
        if count[0] < 1:
            rule, fix = "at least one token", "give a prompt of one token or more"
            raise InputError("true_length", value=int(true_length), rule=rule, fix=fix)
        total = int(before.length[0]) + int(before.token[0] >= 0) + int(count[0])
        if total >= self.engine.tokens:
            rule = f"below {self.engine.tokens}"
            fix = "shorten the prompt, or make the engine with more tokens to a slot"
            raise InputError("tokens of a prompt", value=total, rule=rule, fix=fix)
        return self.engine.append(params, before, tokens, count)

    def _keys(self, request_id, count: int) -> np.ndarray:
        """Returns the keys of `count` samples [count, 2]: of a request id (a UUID), or of the next
        numbers."""
        if request_id is None:
            keys = [jax.random.fold_in(self._root, next(self._numbers)) for _ in range(count)]
        else:
            key = self._root
            for shift in range(0, 128, 32):
                key = jax.random.fold_in(key, request_id.int >> shift & 0xFFFFFFFF)
            keys = [jax.random.fold_in(key, i) for i in range(count)]
        return np.stack([np.asarray(jax.random.key_data(key)) for key in keys])


class JetStreamHeadEngine(JetStreamEngine):
    """The Engine of JetStream's last source: prefill also draws the first token of each sample. Its
    methods raise InputError for a `sampler`: the rules of sampling are those of the engine."""

    use_chunked_prefill = True

    @property
    def prefill_chunk_size(self) -> int:
        """Tokens of a chunk."""
        return min(HEAD_CHUNK_TOKENS, self.max_prefill_length)

    def prefill(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens,
        true_length,
        sampler=None,
        request_id=None,
    ) -> tuple[dict, ResultTokens]:
        """Reads padded_tokens [S] after existing_prefix, JetStream's ExistingPrefix; returns a
        prefix and the first token. Raises InputError as JetStreamEngine.prefill, and for
        common_prefix_tokens above those that the cache of existing_prefix has read, or below them
        if a layer has a sliding window."""
        keys = self._keys(request_id, 1)
        return self._draw_first(params, existing_prefix, padded_tokens, true_length, sampler, keys)

    def prefill_multisampling(
        self,
        *,
        params,
        existing_prefix=None,
        padded_tokens,
        true_length,
        sampler=None,
        rng=None,
        num_samples: int = 1,
        request_id=None,
    ) -> tuple[dict, ResultTokens]:
        """Reads one prompt and draws num_samples first tokens; returns a prefix with a row for
        each, for bulk_insert, and the tokens. Raises InputError as `prefill`, and for num_samples
        below 1."""
        if num_samples < 1:
            raise InputError("num_samples", value=num_samples, fix="give num_samples=1 or more")
        keys = self._keys(request_id, num_samples)
        if rng is not None:
            root = jax.random.wrap_key_data(rng) if rng.dtype == jnp.uint32 else rng
            keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(root, i)))(
                jnp.arange(num_samples)
            )
        return self._draw_first(params, existing_prefix, padded_tokens, true_length, sampler, keys)

    def generate(self, params, decode_state: dict, sampler=None) -> tuple[dict, ResultTokens]:
        """Samples k tokens in every slot that has not ended; `decode_state` is donated."""
        _refuse(sampler)
        return super().generate(params, decode_state)

    def free_resource(self, slot: int) -> None:
        """Does nothing: a slot's memory is allocated once."""

    def _draw_first(self, params, existing, padded_tokens, true_length, sampler, keys):
        """Draws the first tokens in slots, as all draws are made: here by an engine with as many
        slots as samples."""
        _refuse(sampler)
        empty = existing is None
        before = self.engine.empty_prefix() if empty else self._common_prefix(existing)
        read = self._read(params, before, padded_tokens, true_length)
        count = len(keys)
        engine = dataclasses.replace(self.engine, slots=count)
        sample_engine = JetStreamEngine(engine, self._load, sampling=self.sampling)
        if count > 1:
            read = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), read)
        prefix = {"cache": read, "keys": keys}
        state = sample_engine.bulk_insert(prefix, sample_engine.init_decode_state(), range(count))
        start = _response_tokens(state["slots"], state["prompt"])
        slots, tokens, _ = engine.generate(params, state["slots"], 1)
        cache = engine.extract(slots, np.arange(count, dtype=np.int32))
        first_tokens = _results(jax.tree.map(lambda x: x[:1], tokens), start, 1)
        return {"cache": cache, "keys": keys, "drawn": 1}, first_tokens

    def _common_prefix(self, existing) -> Prefix:
        """Returns the part of JetStream's ExistingPrefix that a prompt has in common with it."""
        shared = len(existing.common_prefix_tokens)
        read = int(existing.cache.length[0])
        windows = any(kind.window for kind in self.engine.model.config.kinds)
        if shared > read or (shared < read and windows):
            rule = f"the {read} tokens that its cache has read"
            fix = "lower common_prefix_tokens to that, or leave it out"
            raise InputError("common_prefix_tokens", value=shared, rule=rule, fix=fix)
        return self.engine.widen(existing.cache, 0, shared)


def register() -> None:
    """Makes JetStream's isinstance checks true for these classes. Imports JetStream, which imports
    TensorFlow unless `seqio` is a stub; raises InputError if it cannot be imported."""
    try:
        from jetstream.engine import engine_api, tokenizer_api
    except ImportError as error:
        fix = "pip install 'google-jetstream>=0.2.2'"
        raise InputError("JetStream cannot be imported", rule=str(error), fix=fix) from error
    engine_api.Engine.register(JetStreamEngine)
    engine_api.ResultTokens.register(ResultTokens)
    tokenizer_api.Tokenizer.register(JetStreamTokenizer)


def _refuse(sampler) -> None:
    if sampler is not None:
        raise InputError("a sampler function", rule="the draw is ours", fix="pass sampling=")


@jax.jit
def _inputs(cache: Prefix, keys, source, limit, rules) -> tuple[SlotInputs, jax.Array]:
    """Returns the state to write into the slots of rows source [M], and the number of tokens that
    each holds."""
    length = cache.length[source]
    keys = keys[jnp.minimum(jnp.arange(source.shape[0]), keys.shape[0] - 1)]
    limit = jnp.full(source.shape, limit, jnp.int32)
    inputs = SlotInputs(length, cache.token[source], limit, cache.shift[source], keys, rules, None)
    return inputs, length + 1


@jax.jit
def _response_tokens(slots: Slots, prompt) -> jax.Array:
    """Returns the response's length [B] with the next token of each slot."""
    return slots.length + 2 - prompt


def _results(tokens: Tokens, count, steps: int) -> ResultTokens:
    data, logp = _packed(tokens, count)
    return ResultTokens(data, (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1), 1, logp)


@jax.jit
def _packed(tokens: Tokens, count) -> tuple[jax.Array, jax.Array]:
    valid = tokens.valid.T.astype(jnp.int32)
    return jnp.concatenate([tokens.ids.T, valid, count[:, None]], axis=1), tokens.logp.T
