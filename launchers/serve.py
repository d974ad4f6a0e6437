"""Serve: python launchers/serve.py --model=RUN_OR_MODEL_FOLDER [--port=8000 --slots=16]

An OpenAI-compatible endpoint: POST /v1/completions and /v1/chat/completions (streaming, n, stop,
seed, logprobs), GET /v1/models, /health, /metrics. Needs `pip install 'rljax[serve]'`.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("model", "", "A run folder, or a Hugging Face folder")
flags.DEFINE_string("step", "latest", "Of a run: latest, best, or the number of a checkpoint")
flags.DEFINE_string("name", "", "What clients call the model; default: the folder's name")
flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 = every interface")
flags.DEFINE_integer("port", 8000, "0 = a free one, which is printed")
flags.DEFINE_integer("slots", 16, "Samples that decode at a time")
flags.DEFINE_integer("tokens", 2048, "Of a slot: prompt and response together")
flags.DEFINE_string("dtype", "", "Computed in: float32, bfloat16; default: as the run sampled")
flags.DEFINE_string("kv_dtype", "", "Of keys and values: bfloat16, int8; default: the model's")
flags.DEFINE_integer("chunk_tokens", 256, "Of a prompt, read between two dispatches")
flags.DEFINE_integer("steps", 8, "Tokens per dispatch: how often streams get text")
flags.DEFINE_integer("max_waiting", 256, "Samples that may wait for a slot; more get a 503")
flags.DEFINE_integer("prefix_cache_tokens", 0, "Of prompts kept for later requests; 0 = off")
flags.DEFINE_integer("seed", 0, "Of requests without a seed of their own")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")


def main(_: list[str]) -> int:
    from rljax.serving.saved import ServeOptions, serve
    from rljax.tracking import compiles

    options = ServeOptions(
        model=_FLAGS.model,
        step=_FLAGS.step,
        name=_FLAGS.name,
        host=_FLAGS.host,
        port=_FLAGS.port,
        slots=_FLAGS.slots,
        tokens=_FLAGS.tokens,
        dtype=_FLAGS.dtype,
        kv_dtype=_FLAGS.kv_dtype,
        chunk_tokens=_FLAGS.chunk_tokens,
        steps=_FLAGS.steps,
        max_waiting=_FLAGS.max_waiting,
        prefix_cache_tokens=_FLAGS.prefix_cache_tokens,
        seed=_FLAGS.seed,
    )
    compiles.use_cache(_FLAGS.compilation_cache)
    serve(options)
    return 0


if __name__ == "__main__":
    launch.run(main, needs_config=False)
