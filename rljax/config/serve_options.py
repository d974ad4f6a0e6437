"""Options of `rljax serve` and `rljax chat`."""

import dataclasses

from rljax.config.declare import option
from rljax.config.options import (
    CompilerOptions,
    TrustOptions,
    dtype_option,
    step_option,
)


@dataclasses.dataclass(frozen=True)
class ServeOptions(CompilerOptions, TrustOptions):
    """rljax serve."""

    model: str = option(
        "", "A run folder, a model folder, or OWNER/NAME of the hub", required=True, first=True
    )
    step: str = step_option()
    name: str = option("", "What clients call the model; default: the folder's name")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = every interface")
    port: int = option(8000, "0 = a free one, which is printed", low=0, high=65535)
    slots: int = option(16, "Samples that decode at a time", low=1)
    tokens: int = option(2048, "Of a slot: prompt and response together", low=2)
    dtype: str = dtype_option(
        "Computed in; default: as the run sampled", "float32", "bfloat16", "float16"
    )
    kv_dtype: str = dtype_option(
        "Of keys and values; default: the model's", "float32", "bfloat16", "float16", "int8"
    )
    layout: str = option(
        "", 'Of the weights: "mesh(data=2, tensor=4)", as sampler.layout; default: split over all '
        "devices as fsdp"
    )  # fmt: skip
    weight_dtype: str = dtype_option(
        "Of the weights while decoding; default: as the run sampled",
        "float32",
        "bfloat16",
        "float16",
        "int8",
    )
    page_tokens: int = option(0, "Of a page of keys and values; 0 = slots of their own", low=0)
    pages: int = option(0, "Of all slots together; 0 = as many as they take", low=0)
    draft_tokens: int = option(
        0, "Read in a step, copied from where the newest tokens have stood before; 0 = off",
        low=0, high=64
    )  # fmt: skip
    chunk_tokens: int = option(256, "Of a prompt, read between two dispatches", low=1)
    steps: int = option(8, "Tokens per dispatch: how often streams get text", low=1)
    max_waiting: int = option(256, "Samples that may wait for a slot; more get a 503", low=0)
    prefix_cache_tokens: int = option(0, "Of prompts kept for later requests; 0 = off", low=0)
    calls: str = option("auto", "How tool calls are written; auto = as the chat template does")
    seed: int = option(0, "Of requests without a seed of their own", low=0, high=2**32 - 1)
    allowed_hosts: tuple[str, ...] = option(
        (), "Names by which clients reach this server, beside addresses and its own; * = any"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web pages that may ask, such as http://localhost:3000; * = any"
    )


@dataclasses.dataclass(frozen=True)
class ChatOptions(CompilerOptions, TrustOptions):
    """rljax chat."""

    model: str = option(
        "", "A run folder, a model folder, or OWNER/NAME of the hub", required=True, first=True
    )
    step: str = step_option()
    environment: str = option(
        "", "What the policy plays with, \"tools(functions=('search(corpus=...)',))\"; default: "
        "the run's"
    )  # fmt: skip
    calls: str = option("", "How tool calls are written, as environment.calls; default: the run's")
    question: str = option("", "Asked alone; default: lines of the terminal, or of standard input")
    system: str = option("", "A system message; without a chat template the beginning of a prompt")
    tokens: int = option(4096, "Of a conversation; at most the model's context", low=2)
    max_turns: int = option(0, "Of the policy for a question; 0 = the run's, or 8", low=0)
    temperature: float | None = option(
        None, "Of the samples, 0 = greedy; default: the run's, or that of the model's "
        "generation_config.json, or greedy", low=0
    )  # fmt: skip
    max_response_tokens: int | None = option(
        None, "Of a response; default: the run's, or 512, or 128 without a chat template", low=1
    )
    steps: int = option(8, "Tokens per dispatch: how often text is shown", low=1)
    seed: int = option(0, "Of the draws", low=0, high=2**32 - 1)
