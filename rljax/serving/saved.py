"""Serve what is on disk: the options of launchers/serve.py, from a folder to a running server.

What lives here: loading and wiring. What does not: the routes (app), the decode thread (worker).
"""

import dataclasses
import importlib.util
from pathlib import Path

import jax

from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy, load_policy
from rljax.sampler import Engine, Sampler
from rljax.sampler.requests import DTYPES
from rljax.serving.worker import Worker
from rljax.setup.setup import decoding_of


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The flags of launchers/serve.py."""

    model: str
    step: str = "latest"  # of a run: latest | best | a number
    name: str = ""  # that clients use; empty = the folder's
    host: str = "127.0.0.1"
    port: int = 8000  # 0 = a free one
    slots: int = 16
    tokens: int = 2048  # of a slot: prompt and response
    dtype: str = ""  # what is computed in; empty = sampler.dtype of the run, or as the model does
    kv_dtype: str = ""  # empty = what is computed in
    chunk_tokens: int = 256
    steps: int = 8  # tokens per dispatch: how often streams get text and requests get in
    max_waiting: int = 256
    prefix_cache_tokens: int = 0
    seed: int = 0  # of requests without one


def check_options(options: ServeOptions) -> None:
    """Every problem of the flags at once, before a model is loaded. Raises InputError."""
    problems = []
    low = {"port": 0, "max_waiting": 0, "prefix_cache_tokens": 0, "seed": 0}
    high = {"port": 65535, "seed": 2**32 - 1}
    names = ("port", "slots", "tokens", "chunk_tokens", "steps", "max_waiting", "seed")
    for name in (*names, "prefix_cache_tokens"):
        value, most = getattr(options, name), high.get(name, 2**31 - 1)
        if not low.get(name, 1) <= value <= most:
            problems.append(f"--{name}={value}: from {low.get(name, 1)} to {most}")
    if options.dtype not in DTYPES:
        problems.append(f"--dtype={options.dtype}: one of {', '.join(DTYPES[1:])}")
    if not options.model:
        problems.append("--model: a run folder or a Hugging Face folder")
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            problems.append(f"{package} is not installed: pip install 'rljax[serve]'")
    if problems:
        raise InputError("cannot serve:\n  " + "\n  ".join(problems))


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
    # After the check: the extra may be absent.
    from rljax.serving.app import http_server, listen, make_app

    found = listen(options.host, options.port)  # before minutes of loading
    policy = load_policy(options.model, options.step)
    worker = make_worker(policy, options)
    name = options.name or Path(options.model).resolve().name
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"serving {name} at http://{host}:{found.getsockname()[1]}/v1", flush=True)
    try:
        http_server(make_app(worker, policy.tokenizer, name)).run(sockets=[found])
    finally:
        worker.close()
