"""Serving of a policy on disk: from the options of `rljax serve` to a running server."""

import dataclasses
import functools
import importlib.util
import json
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import jax

from rljax import hub
from rljax.config.declare import check_options
from rljax.config.service_options import ServeOptions
from rljax.config.trust import unscored
from rljax.data.text.tokenizer import CharTokenizer, Tokenizer
from rljax.environments.calls import parser
from rljax.environments.request_fields import STOPS
from rljax.errors import InputError, printable
from rljax.policies import SavedPolicy, load_policy
from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.layout import AUTO, held_weights, parsed
from rljax.sampler.memory import check_pages
from rljax.serving.defaults import API_TEMPERATURE, defaults_of
from rljax.serving.fields import STOP_TOKENS
from rljax.serving.worker import Worker
from rljax.setup.decoding import decoding_of


def require_packages() -> None:
    """Raises InputError unless the extra of the server is installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"{package} is not installed", fix="pip install 'starlette>=0.40' 'uvicorn>=0.30'"
            )


def make_worker(policy: SavedPolicy, options: ServeOptions) -> Worker:
    """Returns the decode thread of a loaded policy, with its programs compiled. Raises InputError
    for slots longer than the model's context."""
    context = policy.model.config.max_tokens
    if options.tokens > context:
        rule = f"the model's context is {context} tokens"
        raise InputError("--tokens", value=options.tokens, rule=rule, fix=f"--tokens={context}")
    decoding = decoding_of(policy.config, policy.tokenizer)
    decoding = dataclasses.replace(
        decoding,
        dtype=options.dtype or decoding.dtype,
        layout=parsed(options.layout),
        weight_dtype=options.weight_dtype or decoding.weight_dtype,
    )
    weights = functools.partial(decoding.weights, policy.model)
    engine = Engine(
        decoding.of(policy.model),
        options.slots,
        options.tokens,
        options.kv_dtype,
        steps=options.steps,
        page_tokens=options.page_tokens,
        pages=options.pages,
        draft_tokens=options.draft_tokens,
        stop_ids=len(parser(options.calls, policy.tokenizer).stop_ids(policy.tokenizer))
        + STOPS
        + STOP_TOKENS
        + len(policy.config.sampler.stop_strings),
    )
    sampler = _sampler(engine, options, policy.tokenizer.decode)
    with held_weights():  # made once
        warm_up(engine, weights(policy.params), options, policy.tokenizer.decode)
        return Worker(sampler, policy.params, max_waiting=options.max_waiting, weights=weights)


def _sampler(engine: Engine, options: ServeOptions, decode: Callable) -> Sampler:
    return Sampler(
        engine,
        key=jax.random.key(options.seed),
        chunk_tokens=options.chunk_tokens,
        prefix_cache_tokens=options.prefix_cache_tokens,
        decode=decode,
    )


def warm_up(engine: Engine, params, options: ServeOptions, decode: Callable) -> None:
    """Compiles what requests need by decoding a few: one alone, one that begins like it, several at
    a time, more than there are slots, and one that is aborted."""
    sampler = _sampler(engine, options, decode)  # of its own: nothing of it is counted or kept
    sampling = Sampling(max_response_tokens=1, seed=0)
    rounds = [[0] * 3], [[0] * 2], [[0]] * 2, [[0]] * (engine.slots + 1)
    for prompts in rounds:
        for ids in prompts:
            sampler.submit(ids[: engine.request_tokens - 1], sampling)
        list(sampler.run(params, raw_logprobs=True))
    sampling = Sampling(max_response_tokens=engine.request_tokens - 1)  # and no seed
    samples = sampler.submit([0], sampling)
    sampler.step(params, raw_logprobs=True)
    if samples[0].finish_reason is None:
        sampler.abort(samples[0])  # as one whose client has gone
    if engine.page_tokens:
        sampler.warm_up_pages(params)


def example_request(address: str, tokenizer: Tokenizer) -> str:
    """Returns a shell command that asks the server, in characters that its model knows."""
    prompt = tokenizer.alphabet[:8] if isinstance(tokenizer, CharTokenizer) else "The answer is"
    body = shlex.quote(json.dumps({"prompt": prompt, "max_tokens": 8}))
    return f"curl {address}/v1/completions -H 'content-type: application/json' -d {body}"


def serve(options: ServeOptions) -> None:
    """Loads a policy, listens, and serves until SIGINT or SIGTERM. Raises InputError for options
    out of range, a layout of "auto", an address that cannot be bound, and a policy that cannot
    be loaded."""
    check_options(options)
    check_pages(options.page_tokens, options.pages)
    if options.layout == AUTO:
        rule = "a mesh: what is fastest depends on the load, which nobody knows beforehand"
        raise InputError("--layout", value=AUTO, rule=rule, fix='--layout="mesh(tensor=2)"')
    parsed(options.layout)
    require_packages()
    # After the check: the extra may be absent.
    from rljax.serving.app import Loading, in_background, make_app
    from rljax.serving.connections import ConnectionLimits, connections_for

    limits = ConnectionLimits(connections=connections_for(options.slots + options.max_waiting))
    hub_model = hub.model_name(options.model)
    name = options.name or (
        hub_model.repository if hub_model else Path(options.model).resolve().name
    )
    loading, worker, stop = Loading(), None, threading.Event()
    try:
        # At once, so that a port in use is an error before minutes of loading.
        with in_background(loading, options.host, options.port, limits) as address:
            arguments = dict(trust_code=options.trust_code, read=unscored, today=True)
            policy = load_policy(options.model, options.step, **arguments)
            worker = make_worker(policy, options)
            guard = dict(hosts=options.allowed_hosts, origins=options.allowed_origins)
            # What ends a response of the run ends one of the server.
            stops = policy.config.sampler.stop_strings
            defaults = defaults_of(policy, API_TEMPERATURE)
            arguments = dict(calls=options.calls, images=policy.images, stops=stops, **guard)
            arguments["defaults"] = defaults.fields()
            tokenizer = policy.tokenizer
            del policy  # with its weights, where decoding has others
            loading.app = make_app(worker, tokenizer, name, **arguments)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            print(f"serving {name} at {address}/v1")
            print(f"requests that say nothing: {printable(defaults.line())}")
            print(example_request(address, tokenizer), flush=True)
            stop.wait()
            print("stopping: what is running has 10 s", flush=True)
    finally:
        if worker is not None:
            worker.close()
