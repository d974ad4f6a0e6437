"""Serving a policy on disk: from the options of launchers/serve.py to a running server."""

import dataclasses
import importlib.util
from pathlib import Path

import jax

from rljax.config.options import ServeOptions, check_options
from rljax.errors import InputError
from rljax.sampler import Engine, Sampler
from rljax.serving.worker import Worker
from rljax.setup.policies import SavedPolicy, load_policy
from rljax.setup.setup import decoding_of


def require_packages() -> None:
    """Raises InputError where the extra of the server is not installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{package} is not installed", fix="pip install 'rljax[serve]'")


def make_worker(policy: SavedPolicy, options: ServeOptions) -> Worker:
    """The decode thread of a loaded policy."""
    context = policy.model.config.max_tokens
    if options.tokens > context:
        rule = f"the model's context is {context} tokens"
        raise InputError("--tokens", value=options.tokens, rule=rule)
    decoding = decoding_of(policy.config, policy.tokenizer)
    decoding = dataclasses.replace(decoding, dtype=options.dtype or decoding.dtype)
    engine = Engine(
        decoding.of(policy.model),
        options.slots,
        options.tokens,
        options.kv_dtype,
        steps=options.steps,
        stop_ids=len(policy.tokenizer.eos_ids),
    )
    sampler = Sampler(
        engine,
        key=jax.random.key(options.seed),
        chunk_tokens=options.chunk_tokens,
        prefix_cache_tokens=options.prefix_cache_tokens,
        decode=policy.tokenizer.decode,
    )
    return Worker(sampler, policy.params, max_waiting=options.max_waiting)


def serve(options: ServeOptions) -> None:
    """Load, listen, and serve until SIGINT or SIGTERM."""
    check_options(options)
    require_packages()
    # After the check: the extra may be absent.
    from rljax.serving.app import http_server, listen, make_app

    address = listen(options.host, options.port)  # before minutes of loading
    policy = load_policy(Path(options.model), options.step)
    worker = make_worker(policy, options)
    name = options.name or Path(options.model).resolve().name
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"serving {name} at http://{host}:{address.getsockname()[1]}/v1", flush=True)
    try:
        http_server(make_app(worker, policy.tokenizer, name)).run(sockets=[address])
    finally:
        worker.close()
