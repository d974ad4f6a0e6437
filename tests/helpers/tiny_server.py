"""A server of a random model of one layer, on a thread of this process."""

import contextlib

import jax

from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Engine, Sampler
from rljax.serving.worker import Worker

NAME, SLOTS, SLOT_TOKENS, CHUNK = "tiny", 4, 96, 16


@contextlib.contextmanager
def tiny_server(tokenizer):
    """(engine, params, worker, address)."""
    from rljax.serving.app import in_background, make_app

    config = decoder(
        tokenizer.vocab_size,
        layers=1,
        embed=16,
        mlp=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        init_std=0.5,
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    engine, params = Engine(model, SLOTS, SLOT_TOKENS, steps=4), model.init(jax.random.key(3))
    worker = Worker(make_sampler(engine, tokenizer), params, max_waiting=60)
    with in_background(make_app(worker, tokenizer, NAME)) as address:
        yield engine, params, worker, address
    worker.close()


def make_sampler(engine, tokenizer):
    return Sampler(engine, chunk_tokens=CHUNK, prefill_rows=2, decode=tokenizer.decode)
