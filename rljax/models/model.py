"""Model: the static half of a decoder, with pure functions of its parameter pytree.

Init, the training forward passes (log-probs, values), and the calls that decode
(prefill, extend, decode_step).

Parameters are a nested dict of arrays; layers are stacked on axis 0. Caches are one
rljax.models.cache.Cache per layer; decoding unrolls the layers over them.

Axes: B rows, S tokens, V vocabulary entries.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rljax.batch import Batch, at_last_token
from rljax.errors import InputError
from rljax.kernels.logprob import token_logprobs
from rljax.kernels.logprob.options import (
    LogprobOptions,
    capped,
    gradient_dtype,
    head_product,
    logits,
    product_dtypes,
    wide_dtype,
)
from rljax.kernels.row_tiles import in_tiles
from rljax.mesh import (
    before_head,
    check_products,
    embedded,
    head_by_vocab,
    logits_by_rows,
    runs_once,
    weight_sharding,
)
from rljax.models import cache, invariant, padding
from rljax.models.adapters import lora
from rljax.models.alignment import describing, preceding, prefix_of
from rljax.models.cache import Cache
from rljax.models.cache_tree import Nodes
from rljax.models.config import ModelConfig
from rljax.models.decoder import Decoder, Pass, chunked, position_inputs, recurrence_inputs
from rljax.models.layers import RMSNorm, add_last, on_one_cpu, project_transposed
from rljax.models.multimodal import insert_features, vision_tokens
from rljax.models.scan import routes_of, routes_shape, scan_layers
from rljax.models.trees import nested, split
from rljax.models.vision.names import STACKED

# Steps of a program from which on turning the weights, 3 to 4 times a copy of them, is repaid.
TRANSPOSED_STEPS = 16


@functools.lru_cache(maxsize=16)  # equal models share a program
def _init_program(model: "Model"):
    options = runs_once(model.mesh)
    return jax.jit(model.create, out_shardings=model.shardings(), compiler_options=options)


@functools.cache
def _definition(config: ModelConfig, head: str):
    """Returns (static NNX graph, {path: (shape, logical axes, dtype)}) without allocating a
    weight."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), config, head)))
    weights = {}
    for path, leaf in nnx.to_flat_state(state):
        axes = leaf.get_metadata()["axes"]
        stacked = path[0] == "layers" or (path[0] == "vision" and path[1] in STACKED)
        axes = ("layers", *axes) if stacked else axes
        weights[path] = (leaf.shape, axes, leaf.dtype)
    return graph, weights


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder without its weights: hashable, so roles carry it as a static field."""

    config: ModelConfig
    mesh: Mesh
    head: str = "lm"  # "lm" | "scalar"

    def __post_init__(self):
        if self.config.batch_invariant:
            invariant.check(self.config, self.mesh)
        check_products(self.config.dtype, self.mesh)

    def in_dtype(self, dtype: str, head_in_float32: str = "") -> "Model":
        """Returns the same model on the same parameters, computing in `dtype`, with logits from a
        float32 product ("on") or not ("off"); "" = as it is."""
        config = self.config
        if dtype:
            vision = config.vision and dataclasses.replace(config.vision, dtype=dtype)
            config = dataclasses.replace(config, dtype=dtype, vision=vision)
        if head_in_float32:
            config = dataclasses.replace(config, head_in_float32=head_in_float32 == "on")
        return dataclasses.replace(self, config=config)

    @property
    def computed(self) -> ModelConfig:
        """The config with the sizes that programs compute with (rljax.models.padding)."""
        return padding.padded(self.config, self.mesh.shape["tensor"])

    def shapes(self) -> dict:
        """Returns {path: (shape, logical axes)} of every weight."""
        return {path: leaf[:2] for path, leaf in _definition(self.config, self.head)[1].items()}

    def shardings(self) -> dict:
        """Returns the sharding of every weight, as a pytree like the parameters."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract())

    def abstract(self) -> dict:
        """Returns shape, dtype and sharding of every weight, as a pytree like the parameters."""
        flat = {}
        for path, (shape, axes, dtype) in _definition(self.config, self.head)[1].items():
            layout = weight_sharding(self.mesh, ".".join(path), shape, axes)
            flat[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=layout)
        return nested(flat)

    def create(self, key: jax.Array) -> dict:
        """Returns random parameters, in the shapes of `shapes` (traceable; see init)."""
        return nnx.to_pure_dict(nnx.state(Decoder(nnx.Rngs(key), self.config, self.head)))

    def init(self, key: jax.Array) -> dict:
        """Returns random parameters, in the shapes of `shapes`, created in place on the mesh."""
        return _init_program(self)(key)

    def split(self, params: dict) -> tuple[dict, dict]:
        """Returns the parameters that an optimizer moves, and those frozen under adapters."""
        return split(params, lambda path: lora.is_trained(path, self.config, self.head))

    def _bind(self, params: dict) -> Decoder:
        params = padding.widened(params, self.shapes(), self.config, self.mesh)
        decoder = nnx.merge(_definition(self.computed, self.head)[0], params)
        return on_one_cpu(decoder, self.mesh)

    # -- training

    def _start(self, decoder: Decoder, batch: Batch, columns=0) -> tuple[jax.Array, Pass]:
        """Returns the embedded tokens with images at their positions, and the Pass for every layer;
        `columns` is the number of columns of the cache to be, where they are more than the
        batch's."""
        x = embedded(decoder.embed, batch.tokens, self.mesh)
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        inputs = position_inputs(self.config, positions, max(columns, batch.tokens.shape[1]))
        segments, prefix = batch.segment_ids, prefix_of(batch)
        inputs["chunks"] = chunked(self.config, positions, segments, prefix)
        from_start = jnp.zeros(segments.shape[:1], bool)
        inputs |= recurrence_inputs(self.config, segments, from_start)
        call = Pass(mesh=self.mesh, segments=segments, prefix=prefix, **inputs)
        if batch.pixels is None:
            return x, call
        vision = self.config.vision
        if vision is None:
            raise InputError(
                f"a {self.config.family} model cannot read images",
                value="pixels",
                fix="take a model that reads images, or rows without them",
            )
        features, levels = decoder.vision(batch.pixels, batch.patch_coords, self.mesh)
        is_image = vision_tokens(batch.tokens, batch.segment_ids, batch.mask, vision)
        return insert_features(x, is_image, features), dataclasses.replace(
            call, where=is_image, levels=levels if vision.deepstack_layers else None
        )

    def _normed(self, decoder: Decoder, x: jax.Array) -> jax.Array:
        """Returns the final states as the head reads them, divided by what divides the logits."""
        config = self.config
        x = invariant.of_module(config.batch_invariant, decoder.norm, RMSNorm.__call__, x)
        return x if self.head != "lm" or config.logit_divisor == 1 else x / config.logit_divisor

    def _hidden(self, decoder: Decoder, batch: Batch, hidden=None) -> jax.Array:
        """Returns final normalised hidden states [B, S, D]; a token sees its own segment, causally.
        `hidden`: they are already known (`hidden_and_load`)."""
        return self._hidden_and_load(decoder, batch)[0] if hidden is None else hidden

    def hidden_and_load(self, params: dict, batch: Batch):
        """Returns final hidden states [B, S, D], which the functions below take as `hidden`, and
        sums over the batch's tokens of the load of each layer's experts ({} without any). Raises
        InputError if the batch has images and the model reads none, as all forward passes do."""
        return self._hidden_and_load(self._bind(params), batch)

    def _routes(self, batch: Batch) -> jax.Array | None:
        """Returns the routes of the batch, unless they are another model's: a critic chooses its
        own."""
        if batch.routes is None or self.head != "lm" or self.config.experts is None:
            return None
        fits = batch.routes.shape[2:] == routes_shape(self.config)[:2]
        return batch.routes if fits else None

    def _hidden_and_load(self, decoder: Decoder, batch: Batch):
        options = dict(keep="stats", routes=self._routes(batch))
        x, loads = scan_layers(decoder, *self._start(decoder, batch), **options)
        loads = [{k: v for k, v in stats.items() if k != "ids"} for stats in loads if stats]
        load = jax.tree.map(lambda *layers: jnp.stack(layers), *loads) if loads else {}
        return self._normed(decoder, x), load

    def hidden_states(self, params: dict, batch: Batch) -> list[jax.Array]:
        """Returns the embeddings, what leaves each layer but the last, and the final normalised
        states: layers + 1 arrays [B, S, D]. For parity tests and probes."""
        decoder = self._bind(params)
        x, call = self._start(decoder, batch)
        final, states = scan_layers(decoder, x, call, keep="hidden")
        return [x, *states[:-1], decoder.norm(final)]

    def logprobs(self, params: dict, batch: Batch, temperature=1.0, hidden=None):
        """Returns log pi(tokens[b, t] | tokens[b, :t]) and the entropy of that choice, in nats:
        two [B, S] float32.

        Column 0 is 0, and so carries nothing; so does the first token of a packed segment, unless
        `batch.previous` says what precedes it.
        """
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch, hidden)
        logp, entropy, _ = self._of_targets(decoder, hidden, batch, temperature)
        return describing(logp, batch), describing(entropy, batch)

    def greedy(self, params: dict, batch: Batch, temperature=1.0, hidden=None):
        """Returns `logprobs`, and 1 where the token is the model's most likely
        one: three [B, S]."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch, hidden)
        outputs = self._of_targets(decoder, hidden, batch, temperature, with_greedy=True)
        return tuple(describing(outputs[i], batch) for i in (0, 1, 3))

    def read(self, params: dict, batch: Batch, temperature=1.0):
        """Returns `logprobs`, and sums over the batch's tokens of the load of each layer's experts
        (experts.load_metrics); {} without experts."""
        hidden, load = self.hidden_and_load(params, batch)
        return *self.logprobs(params, batch, temperature, hidden), load

    def _of_targets(self, decoder: Decoder, hidden, batch: Batch, temperature, **flags):
        """Returns the outputs of kernels.logprob at the tokens that follow each hidden state or,
        where `batch.previous` says which, at each token from the state that precedes it."""
        targets = jnp.roll(batch.tokens, -1, axis=1) if batch.previous is None else batch.tokens
        apart = self.config.batch_invariant
        if apart:  # the sampler's, too, is divided in float32
            temperature = jnp.asarray(temperature, jnp.float32)
        hidden = hidden if batch.previous is None else preceding(hidden, batch)
        config, impl = self.config, "invariant" if apart else None
        head = dict(vocab_first=config.tie_embeddings, float32_head=config.head_in_float32)
        head |= dict(head_dtype=config.head_dtype, entries=config.known_ids)
        scaling = dict(temperature=temperature, soft_cap=config.final_soft_cap, mesh=self.mesh)
        weight = decoder.head_weight("lm")
        return token_logprobs(hidden, weight, targets, impl=impl, **scaling, **head, **flags)

    def readout(self, params: dict, batch: Batch, hidden=None) -> tuple[jax.Array, jax.Array]:
        """Returns the hidden state that precedes tokens[b, t], [B, S, D], and the head [D, V] (the
        embedding [V, D] when tied): what the logits of each choice are made of. Column 0 is 0."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch, hidden)
        head = self._known(decoder.head_weight("lm"))
        return preceding(hidden, batch), head.astype(self.config.head_dtype or head.dtype)

    def sum_pi_squared(self, params: dict, batch: Batch, temperature=1.0) -> jax.Array:
        """Returns the sum over the vocabulary of pi(v | tokens[b, :t])^2 = exp(logsumexp(2 z) - 2
        logsumexp(z)): [B, S]."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch)
        outputs_at = functools.partial(self._of_targets, decoder, hidden, batch, with_entropy=False)
        lse, lse_doubled = (outputs_at(temperature / k)[2] for k in (1, 2))
        return describing(jnp.exp(lse_doubled - 2 * lse), batch)

    def values(self, params: dict, batch: Batch, hidden=None) -> jax.Array:
        """Returns V(state before tokens[b, t]): [B, S] float32, from the scalar
        head. Column 0 is 0."""
        return preceding(self.token_scores(params, batch, hidden)[..., 0], batch)

    def token_scores(self, params: dict, batch: Batch, hidden=None) -> jax.Array:
        """Returns the scalar head's outputs after tokens[b, t] was read, squashed as the config
        says: [B, S, labels] float32 (process scores)."""
        decoder = self._bind(params)
        return self._scores(decoder, self._hidden(decoder, batch, hidden))

    def _scores(self, decoder: Decoder, hidden: jax.Array) -> jax.Array:
        scores = hidden.astype(jnp.float32) @ decoder.head_weight("scalar").astype(jnp.float32)
        if self.config.head_bias:
            scores = add_last(scores, decoder.head_bias[...])
        return jnp.tanh(scores) if self.config.squash == "tanh" else scores

    def scores(self, params: dict, batch: Batch) -> jax.Array:
        """Returns the scalar head's outputs after a row's last token: [B, labels] float32
        (outcome scores)."""
        return at_last_token(self.token_scores(params, batch), batch)

    def next_logits(self, params: dict, batch: Batch, columns: jax.Array) -> jax.Array:
        """Returns logits [B, V] float32 of the token after tokens[b, columns[b]], columns [B]."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch)
        hidden = jnp.take_along_axis(hidden, columns[:, None, None], axis=1)[:, 0]
        return self.head_logits(self._known(decoder.head_weight("lm")), hidden)

    def logits(self, params: dict, batch: Batch) -> jax.Array:
        """Returns logits [B, S, V] float32: for parity tests and probes only; training
        never builds them."""
        decoder = self._bind(params)
        head = self._known(decoder.head_weight("lm"))
        return self.head_logits(head, self._hidden(decoder, batch))

    def _known(self, head: jax.Array) -> jax.Array:
        """Returns the head without the entries behind the known ids."""
        count = self.config.known_ids
        return jax.lax.slice_in_dim(head, 0, count, axis=self._vocab_axis) if count else head

    def head_logits(self, head, hidden, transposed=False):
        """Returns logits [..., V] of hidden [..., D] by the sampler's head: the same rules of
        precision and cap as the trainer's. `transposed`: it is [V, D], and few rows meet it
        (layers.project_transposed)."""
        config = self.config
        settings = (config.head_in_float32, config.head_dtype)
        hidden, head, precision = head_product(hidden, head, *settings)
        if transposed:
            dtype = wide_dtype(gradient_dtype(hidden, head))
            settings = dict(precision=precision, preferred_element_type=dtype)
            return capped(project_transposed(hidden, head, **settings), config.final_soft_cap)
        options = LogprobOptions(config.final_soft_cap, config.tie_embeddings, precision=precision)

        def rows(head, hidden):
            return logits(hidden, head, 1.0, options)

        return in_tiles(config.batch_invariant, rows, head, hidden, axes=hidden.ndim - 1)

    # -- decoding: layers unrolled over per-layer caches

    def empty_caches(
        self, slots: int, columns: int, kv_dtype: str = "", pool=None, rings=True
    ) -> list[Cache]:
        """Returns caches of `slots` slots with room for `columns` tokens, or of a pool of pages
        (inside a program). `rings`: layers with a sliding window keep its tokens alone. Raises
        InputError for a `kv_dtype` that keys and values cannot be held in."""
        return cache.empty(self.computed, self.mesh, slots, columns, kv_dtype, pool, rings)

    def prefill(self, params: dict, prompts: Batch, columns: int, kv_dtype: str = "", rings=True):
        """Returns the caches of every layer after right-padded prompts, with room for `columns`
        tokens. Recurrent layers have not read the last token, which decoding reads again. Raises
        InputError for a `kv_dtype` that keys and values cannot be held in, and if the prompts are
        longer than that."""
        return self.prefill_routed(params, prompts, columns, kv_dtype, rings)[0]

    def prefill_routed(
        self, params: dict, prompts: Batch, columns: int, kv_dtype: str = "", rings=True
    ):
        """Returns the caches of `prefill`, and the experts that each token went to
        (scan.routes_of)."""
        decoder = self._bind(params)
        lengths = jnp.sum(prompts.segment_ids > 0, axis=1)
        x, call = self._start(decoder, prompts, columns)
        if call.taken is not None:  # keys and values are written twice, but a state moves on
            before_last = jnp.arange(x.shape[1])[None, :] < lengths[:, None] - 1
            call = dataclasses.replace(call, taken=before_last)
        _, layer_outputs = scan_layers(decoder, x, call, keep="cache")
        cache.check_dtype(self.config, kv_dtype)
        sizes, settings = self.computed, (self.mesh, columns, kv_dtype)
        caches = [
            cache.from_prompt(parts, lengths, sizes.of(kind), *settings, kind, rings)
            for (parts, _), kind in zip(layer_outputs, self.config.kinds, strict=True)
        ]
        routes = routes_of(self.config, [stats for _, stats in layer_outputs])
        return cache.constrain(caches, self.mesh), routes

    def unstack(self, params: dict, steps: int = 1):
        """Returns everything that decode_step reads: (decoder, [(graph, weights, index)] of
        every layer, the head as `mesh.head_by_vocab` splits it). `steps`: how many times at most
        the program reads it.

        Slicing stacked weights inside the decode loop doubles a step on CPU, so they are sliced
        here, before the loop, and index is None. On TPU that would be a copy of every weight: there
        a slice is read by the product itself, and index says which layer of the stack to slice.
        Where a CPU reads them often they are transposed, too (layers.project_transposed).
        """
        decoder = self._bind(params)
        late = self.mesh.devices.flat[0].platform == "tpu"
        transposed = self._transposes_weights and steps >= TRANSPOSED_STEPS
        layers = decoder.unstacked(late=late, transposed=transposed)
        head, config = None, self.config
        if self.head == "lm":
            head = decoder.head_weight("lm")
            if config.batch_invariant:  # the trainer's product, in which nothing is behind the ids
                head = self._known(head)
            kinds = (config.head_in_float32, config.head_dtype)
            dtype = product_dtypes(jnp.dtype(config.dtype), head.dtype, *kinds)[1]
            head = head_by_vocab(head, self.mesh, self._vocab_axis, dtype)
        return decoder, layers, head

    @property
    def _vocab_axis(self) -> int:
        """Returns the vocabulary axis of the head: the embedding [V, D] where it is tied, else [D,
        V]."""
        return 0 if self.config.tie_embeddings else 1

    @property
    def _transposes_weights(self) -> bool:
        """Returns whether decoding may multiply in another order than training, which is faster."""
        ordered = self.mesh.size > 1 or self.config.batch_invariant
        return not ordered and self.mesh.devices.flat[0].platform == "cpu"

    def decode_step(self, unstacked, tokens: jax.Array, columns: jax.Array, caches, shift=0):
        """Reads one token per row, tokens [B], as token columns [B] of its slot -> logits [B, V]
        float32 of the next, new caches. Positions are columns + shift [B]: an image takes fewer
        positions than tokens."""
        return self.decode_tokens(unstacked, tokens[:, None], columns, None, caches, shift)

    def decode_tokens(self, unstacked, tokens: jax.Array, columns, counts, caches, shift=0):
        """Reads a few tokens per row as `decode_step` does, tokens [B, S] of which counts [B] are
        real (None: all) -> logits of the token behind each, row after row [B S, V], new caches."""
        return self.decode_routed(unstacked, tokens, columns, counts, caches, shift)[:2]

    def decode_routed(self, unstacked, tokens: jax.Array, columns, counts, caches, shift=0):
        """Returns what `decode_tokens` does, logits [B S, V] and new caches, and the experts that
        each token went to, [B, S, E, k] (scan.routes_of)."""
        decoder, layers, _ = unstacked
        inputs = (tokens, columns, counts, caches, shift)
        x, caches, routes = self._read(decoder, layers, *inputs, is_step=True)
        return self.says(unstacked, self._normed(decoder, x)), caches, routes

    def says(self, unstacked, hidden: jax.Array) -> jax.Array:
        """Applies the head to final hidden states [B, S, D]: logits, row after row [B S, V]
        float32, or the scores [B, S, labels] of a scalar head."""
        if self.head == "scalar":
            return self._scores(unstacked[0], hidden)
        hidden = before_head(hidden, self.mesh, self.config.vocab_size)
        transposed = self._transposes_weights and self.config.tie_embeddings
        logits = self.head_logits(unstacked[2], hidden, transposed)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits_by_rows(logits, self.mesh, self.config.vocab_size, self.config.ids)

    def read_nodes(self, unstacked, tokens: jax.Array, nodes: Nodes, caches, shift=0):
        """Reads nodes of trees, tokens [B, S], into caches without rings that hold their ancestors
        -> final hidden states [B, S, D] of what each path from the root says, new caches. Positions
        are columns of the sequence + shift [B], as in `decode_step`."""
        decoder, layers, _ = unstacked
        positions = nodes.positions() + jnp.reshape(shift, (-1, 1))
        inputs, valid = position_inputs(self.config, positions, cache.room(caches)), nodes.real
        settings = dict(mesh=self.mesh, segments=valid.astype(jnp.int32), nodes=nodes, is_step=True)
        call = Pass(**settings, **inputs)
        x, caches, _ = self._through(decoder, layers, tokens, call, caches)
        return self._normed(decoder, x), caches

    def look(self, unstacked, tokens: jax.Array, columns: jax.Array, counts, caches, shift=0):
        """Computes the head's outputs behind tokens that `extend` would read, counts [B] >= 1 of
        them real: logits [B, V] behind the last one, or the scores [B, S, labels] of a scalar
        head."""
        decoder, layers, _ = unstacked
        x, *_ = self._read(decoder, layers, tokens, columns, counts, caches, shift)
        if self.head == "lm":
            x = jnp.take_along_axis(x, (counts - 1)[:, None, None], axis=1)
        return self.says(unstacked, self._normed(decoder, x))

    def extend(self, unstacked, tokens: jax.Array, columns: jax.Array, counts, caches, shift=0):
        """Reads more tokens onto slots, tokens [B, S] of which counts [B] are
        real -> new caches."""
        decoder, layers, _ = unstacked
        return self._read(decoder, layers, tokens, columns, counts, caches, shift)[1]

    def _read(
        self, decoder: Decoder, layers, tokens, columns, counts, caches, shift, is_step=False
    ):
        offsets = jnp.arange(tokens.shape[1])
        positions = (columns + shift)[:, None] + offsets[None, :]
        valid = jnp.ones_like(tokens)
        if counts is not None:
            valid = (offsets[None, :] < counts[:, None]).astype(jnp.int32)
        is_step = is_step or tokens.shape[1] == 1
        inputs = position_inputs(self.config, positions, cache.room(caches))
        inputs |= recurrence_inputs(self.config, valid, columns > 0)  # a slot may hold an old state
        settings = dict(segments=valid, columns=columns, counts=counts, is_step=is_step)
        call = Pass(mesh=self.mesh, **settings, **inputs)
        return self._through(decoder, layers, tokens, call, caches)

    def _through(self, decoder: Decoder, layers, tokens, call: Pass, caches):
        x = call.split(decoder.embed(tokens))
        new_caches, stats = [], []
        for (graph, weights, index), layer_cache in zip(layers, caches, strict=True):
            if index is not None:
                weights = jax.tree.map(lambda w, i=index: w[i], weights)
            x, layer_cache, of_experts = nnx.merge(graph, weights)(x, call, layer_cache)
            new_caches.append(layer_cache)
            stats.append(of_experts)
        return x, new_caches, routes_of(self.config, stats)
