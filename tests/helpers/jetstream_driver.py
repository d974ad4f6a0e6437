"""Run by test_jetstream in an environment that has google-jetstream 0.2.2: its Driver and
orchestrator over our engine. It prints one line of JSON: its tokens and ours."""

import asyncio
import importlib.metadata
import json
import sys
import tempfile

import jax

# 0.2.2 calls what jax has removed since, and kills the process where it is missing.
jax.tree_map = jax.tree.map

from jetstream.core import orchestrator  # noqa: E402
from jetstream.core.proto import jetstream_pb2  # noqa: E402
from jetstream.engine import engine_api  # noqa: E402
from tiny_tokenizer import write_tokenizer  # noqa: E402

from rljax.data.text.tokenizer import load_tokenizer  # noqa: E402
from rljax.mesh import make_mesh  # noqa: E402
from rljax.models.builtin import decoder  # noqa: E402
from rljax.models.model import Model  # noqa: E402
from rljax.sampler import Engine, Sampler, Sampling  # noqa: E402
from rljax.serving.jetstream import JetStreamEngine, register  # noqa: E402

PROMPTS = [[9, 8, 7], [20, 21, 22, 23, 24], [40], [5, 6] * 10, [99, 98, 97, 96], [120, 7]]
LIMITS = [9, 5, 12, 3, 7, 10]


def main(interleaved: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tempfile.mkdtemp()))
    config = decoder(
        tokenizer.vocab_size,
        layers=2,
        embed=16,
        mlp=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        init_std=0.5,
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = model.init(jax.random.key(3))
    engine = Engine(model, 4, 64, steps=1)
    adapter = JetStreamEngine(engine, lambda: params, tokenizer)
    register()
    assert isinstance(adapter, engine_api.Engine)
    driver = orchestrator.Driver(
        prefill_engines=[adapter],
        generate_engines=[adapter],
        prefill_params=[adapter.load_params()],
        generate_params=[adapter.load_params()],
        interleaved_mode=interleaved,
    )
    client = orchestrator.LLMOrchestrator(driver)

    async def ask(request) -> tuple[list[int], str]:
        ids, text = [], ""
        async for response in client.Decode(request):
            sample = response.stream_content.samples[0]
            ids += sample.token_ids
            text += sample.text
        return ids, text

    async def all_of_them():
        request = jetstream_pb2.DecodeRequest
        return await asyncio.gather(
            *(
                ask(request(token_content=request.TokenContent(token_ids=ids), max_tokens=limit))
                for ids, limit in zip(PROMPTS, LIMITS, strict=True)
            ),
            ask(request(text_content=request.TextContent(text="the answer"), max_tokens=4)),
        )

    *theirs, (_, text) = asyncio.run(all_of_them())
    driver.stop()
    sampler = Sampler(engine, chunk_tokens=16)
    bos = adapter.build_tokenizer(None).bos_id  # JetStream puts it in front
    samples = [
        sampler.submit([bos, *ids], Sampling(temperature=0.0, max_response_tokens=limit))[0]
        for ids, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    list(sampler.run(params))
    # The end token ends a request there; it is not among the tokens that JetStream returns.
    ours = [sample.tokens.tolist() for sample in samples]
    ends = set(tokenizer.eos_ids)
    cut = [t[: min((t.index(e) for e in ends if e in t), default=len(t))] for t in ours]
    told = {
        "jetstream": importlib.metadata.version("google-jetstream"),
        "tensorflow": "tensorflow" in sys.modules,
        "theirs": [ids for ids, _ in theirs],
        "ours": cut,
        "text": text,
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "1")
