"""Sampling: the options of a request, their checks, and the same as arrays.

Axes: B rows, V vocabulary entries.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from rljax.errors import InputError
from rljax.models.model import Model
from rljax.sampler.draw import Rules
from rljax.sampler.layout import WEIGHT_DTYPES, Layout, decode_model, decode_weights
from rljax.sampler.memory import check_pages, check_whole

STOP_IDS = 16  # room for stop ids of a request, where none needs more
LOOPS = ("device", "host")
DTYPES = ("", "float32", "bfloat16", "float16")
SWITCHES = ("", "on", "off")
LOWEST_TEMPERATURE = 1e-5  # below it logits / temperature leave float32
MOST_BIAS = 1e4  # far beyond any difference of logits, and float32 stays exact enough
STOP_STRINGS = 64
BIASED_IDS = 304  # room for tokens with a bias; OpenAI's API allows 300


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling options of a request. All are runtime values: none causes a compile
    (max_response_tokens of a whole batch sizes its buffers)."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # drop tokens less likely than min_p times the top token; 0 disables
    max_response_tokens: int = 256
    stop_ids: tuple[int, ...] = ()  # empty: only the length ends a response
    # A response ends with the token that completes one of these; needs a tokenizer.
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    allowed_ids: tuple[int, ...] = ()  # only these tokens; () = all
    seed: int | None = None  # of this request's draws; None = the caller's key decides
    # (low, high): where end_of_thinking_ids has not come after a number of tokens drawn from this
    # range, interrupt_ids are forced. Forced tokens have mask 0 and no log-prob. () = off.
    thinking_tokens: tuple[int, ...] = ()
    end_of_thinking_ids: tuple[int, ...] = ()
    interrupt_ids: tuple[int, ...] = ()

    def greedy(self) -> "Sampling":
        """Returns the same limits, with the most likely token each time."""
        return dataclasses.replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    def __post_init__(self):
        def check(valid, name, rule):
            if not valid:
                raise InputError(
                    f"sampler {name}",
                    value=getattr(self, name),
                    rule=rule,
                    fix=f"set {name} to such a value",
                )

        for name in ("top_k", "max_response_tokens"):
            is_integer = isinstance(getattr(self, name), (int, np.integer))
            check(is_integer and getattr(self, name) < 2**30, name, "a whole number below 2**30")
        low, high = LOWEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
        warm = self.temperature == 0 or low <= self.temperature <= high
        rule = f"0 (greedy), or from {low:g} to {high:g}"
        check(warm, "temperature", rule)
        check(0 < self.top_p <= 1, "top_p", "0 < top_p <= 1")
        check(self.top_k >= 0, "top_k", ">= 0 (0 = off)")
        check(0 <= self.min_p <= 1, "min_p", "between 0 (off) and 1")
        check(self.max_response_tokens >= 1, "max_response_tokens", ">= 1")
        check(all(self.stop_strings), "stop_strings", "no empty string")
        # Each is looked for in every row's text at every dispatch.
        check(len(self.stop_strings) <= STOP_STRINGS, "stop_strings", f"at most {STOP_STRINGS}")
        check(len(self.logit_bias) <= BIASED_IDS, "logit_bias", f"at most {BIASED_IDS} tokens")
        biased = [token for token, _ in self.logit_bias]
        check(len(set(biased)) == len(biased), "logit_bias", "each token once")
        numbers = all(abs(bias) <= MOST_BIAS for _, bias in self.logit_bias)
        rule = f"from {-MOST_BIAS:g} to {MOST_BIAS:g}; forbid tokens by allowed_ids"
        check(numbers, "logit_bias", rule)
        # jax.random.key reads 32 bits of a seed: others would be the same draws.
        seeds = self.seed is None or 0 <= self.seed < 2**32
        check(seeds, "seed", "None, or 0 <= seed < 2**32")
        if self.thinking_tokens:
            rising = len(self.thinking_tokens) == 2
            rising = rising and 0 <= self.thinking_tokens[0] <= self.thinking_tokens[1] < 2**30
            check(rising, "thinking_tokens", "(low, high), 0 <= low <= high, or () = off")
            for name in ("end_of_thinking_ids", "interrupt_ids"):
                check(len(getattr(self, name)) > 0, name, "at least one id beside thinking_tokens")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InputError if an id is not below the model's `vocab_size`."""
        named = {
            "stop_ids": self.stop_ids,
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_ids": self.allowed_ids,
            "end_of_thinking_ids": self.end_of_thinking_ids,
            "interrupt_ids": self.interrupt_ids,
        }
        for name, ids in named.items():
            if bad_ids := [i for i in ids if not 0 <= i < vocab_size]:
                raise InputError(
                    f"sampler {name}",
                    value=bad_ids[0],
                    rule=f"an id of the model, 0 to {vocab_size - 1}",
                    fix="take the id from the tokenizer of the model",
                )


def _one_of(values: Sequence[str]) -> str:
    return f"one of {', '.join(values[1:])}, or ''"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of decoding a whole batch: sizes of programs and memory, and the devices.

    They change no sample, with two exceptions: another dtype, and keys and values that are stored
    in fewer bits than they are computed in. Tokens that were read in chunks, from a prefix or after
    a pause then attend to rounded ones, where a whole prompt attends to exact ones."""

    slots: int = 0  # rows decoded at a time; 0 = all
    loop: str = "device"  # loop that refills slots: "device" | "host"
    kv_dtype: str = ""  # dtype of keys and values; "" = `dtype`
    decode: Callable | None = None  # ids -> text, by the tokenizer, for stop strings
    dtype: str = ""  # dtype of decoding; "" = that of the model
    head_in_float32: str = ""  # logits as a float32 product: on | off, "" = as the model
    look_every: int = 1  # steps between exchanges of all devices about rows that are live
    layout: Layout | None = None  # layout of weights and rows; None = training's, or that of `mesh`
    mesh: Mesh | None = None  # devices that decode and do not train; None = those of training
    weight_dtype: str = ""  # float32 | bfloat16 | float16 | int8; "" = as the weights are
    page_tokens: int = 0  # tokens in a page of keys and values; 0 = contiguous slots
    pages: int = 0  # pages of all slots together; 0 = as many as slots x columns take
    # Draft tokens that a step reads beside the newest one, copied from what followed an earlier
    # occurrence of the newest tokens, and kept if they equal the drawn tokens; 0 = off.
    draft_tokens: int = 0
    # Batch.routes: the experts that each token went to, for training to send it there again.
    record_routes: bool = False

    def __post_init__(self):
        check_whole("slots", self.slots)
        if self.record_routes and (self.loop == "host" or self.draft_tokens):
            raise InputError(
                "sampler.router_replay",
                value=True,
                rule="routes are recorded by the device's loop, a token at a time",
                fix="sampler.loop='device', sampler.draft_tokens=0",
            )
        check_whole("look_every", self.look_every, 1)
        check_pages(self.page_tokens, self.pages)
        if not isinstance(self.layout, Layout | None):
            rule = "a Layout: rljax.sampler.layout.parsed makes one of a config's text"
            raise InputError(
                "sampler layout",
                value=self.layout,
                rule=rule,
                fix="layout=parsed('mesh(tensor=-1)'), or None",
            )
        choices = (  # (field, its values, rule, fix)
            ("loop", LOOPS, "", f"write one of {', '.join(LOOPS)}"),
            ("dtype", DTYPES, _one_of(DTYPES), "--config.sampler.dtype='', the dtype of the model"),
            (
                "head_in_float32",
                SWITCHES,
                "",
                "--config.sampler.head_in_float32=on, off, or '' for the model's own",
            ),
            (
                "weight_dtype",
                WEIGHT_DTYPES,
                _one_of(WEIGHT_DTYPES),
                "--config.sampler.weight_dtype='', the weights as they are",
            ),
        )
        for name, allowed, rule, fix in choices:
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"sampler {name}", value=value, rule=rule, fix=fix)
        if self.page_tokens and self.loop != "host":
            raise InputError(
                "sampler page_tokens",
                value=self.page_tokens,
                rule="pages are given out by the host, between dispatches",
                fix="loop='host'",
            )

    def of(self, model: Model) -> Model:
        """Returns the model as it decodes: on the mesh of decoding, in its dtype, with the weights
        that `weights` returns."""
        model = model.in_dtype(self.dtype, self.head_in_float32)
        if self.mesh is not None:
            model = dataclasses.replace(model, mesh=self.mesh)
        return decode_model(model, self.layout, self.weight_dtype)

    def weights(self, model: Model, params):
        """Returns the weights that `of(model)` reads: `params` itself where nothing differs, else a
        copy made by one program, once within `held_weights`."""
        keep_dtypes = not self.weight_dtype
        return decode_weights(model, self.of(model), params, keep_dtypes=keep_dtypes)


def alike(one: Sampling) -> tuple:
    """Returns the key of a request's rules: equal for requests that share them."""
    draw = (one.temperature, one.top_k, one.top_p, one.min_p)
    return (*draw, one.stop_ids, one.logit_bias, one.allowed_ids)


def stop_room(requests: Sequence[Sampling]) -> int:
    """Returns the room for every row's stop ids: a few sizes only, so that another set
    does not recompile."""
    longest = max([len(request.stop_ids) for request in requests], default=0)
    return max(STOP_IDS, -(-longest // STOP_IDS) * STOP_IDS)


def rules_of(
    requests: Sequence[Sampling], vocab_size: int, *, whole: bool = False, room: int = 0
) -> Rules:
    """Returns the rules of B rows as host arrays [B, ...], for a model of `vocab_size` tokens.

    `whole`: also with the arrays that no request needs, so that a program takes any request. `room`
    for stop ids (0: what the requests need).
    """
    count = len(requests)

    def column(name, dtype):
        return np.array([getattr(request, name) for request in requests], dtype)

    stop_ids = np.full((count, room or stop_room(requests)), -1, np.int32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
    bias_ids = bias = allowed = None
    if whole or any(request.logit_bias for request in requests):
        bias_ids = np.full((count, BIASED_IDS), vocab_size, np.int32)
        bias = np.zeros((count, BIASED_IDS), np.float32)
        for row, request in enumerate(requests):
            for index, (token, value) in enumerate(request.logit_bias):
                bias_ids[row, index], bias[row, index] = token, value
    if whole or any(len(request.allowed_ids) for request in requests):
        allowed = np.full((count, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for row, request in enumerate(requests):
            if len(request.allowed_ids):
                bits = np.zeros(32 * allowed.shape[1], bool)
                bits[list(request.allowed_ids)] = True
                allowed[row] = np.packbits(bits, bitorder="little").view("<u4")
    return Rules(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        stop_ids,
        bias_ids,
        bias,
        allowed,
    )
