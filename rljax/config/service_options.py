"""Options of `rljax serve`, `rljax chat` and `rljax pod`."""

import dataclasses
import typing

from rljax.config.declare import Options, option
from rljax.config.options import CompilerOptions, TrustOptions, dtype_option, step_option


@dataclasses.dataclass(frozen=True)
class ServeOptions(CompilerOptions, TrustOptions):
    """Options of `rljax serve`."""

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
        "",
        'Of the weights: "mesh(data=2, tensor=4)", as sampler.layout; default: split over all '
        "devices as fsdp",
    )
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
        0,
        "Read in a step, copied from where the newest tokens have stood before; 0 = off",
        low=0,
        high=64,
    )
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
    """Options of `rljax chat`."""

    model: str = option(
        "", "A run folder, a model folder, or OWNER/NAME of the hub", required=True, first=True
    )
    step: str = step_option()
    environment: str = option(
        "",
        "What the policy plays with, \"tools(functions=('search(corpus=...)',))\"; default: "
        "the run's",
    )
    calls: str = option("", "How tool calls are written, as environment.calls; default: the run's")
    question: str = option("", "Asked alone; default: lines of the terminal, or of standard input")
    system: str = option("", "A system message; without a chat template the beginning of a prompt")
    tokens: int = option(4096, "Of a conversation; at most the model's context", low=2)
    max_turns: int = option(0, "Of the policy for a question; 0 = the run's, or 8", low=0)
    temperature: float | None = option(
        None,
        "Of the samples, 0 = greedy; default: the run's, or that of the model's "
        "generation_config.json, or greedy",
        low=0,
    )
    max_response_tokens: int | None = option(
        None, "Of a response; default: the run's, or 512, or 128 without a chat template", low=1
    )
    steps: int = option(8, "Tokens per dispatch: how often text is shown", low=1)
    seed: int = option(0, "Of the draws", low=0, high=2**32 - 1)


@dataclasses.dataclass(frozen=True)
class PodOptions(Options):
    """Options of `rljax pod`. READ_BY says which verb reads which of them."""

    verb: str = option("", "See above", first=True, required=True)
    type: str = option("", "TPU of one slice: v5litepod-16, v4-32, v6e-256, v5p:4x4x4, ...")
    slices: int = option(1, "Slices of that type, joined by the data-center network", low=1)
    name: str = option("rljax", "Of the pod or job")
    zone: str = option("", "Of Google Cloud")
    project: str = option("", "Of Google Cloud; default: gcloud's own")
    api: str = option(
        "tpu",
        "Service: tpu, Cloud TPU (v4 v5e v5p v6e); compute, Compute Engine (v5p v6e tpu7x)",
        choices=("tpu", "compute"),
    )
    spot: bool = option(False, "Cheaper, and taken away at any time")
    setup: str = option(
        "",
        "Shell command that fills $VENV on a new host; default: install the folder where it "
        "is a clone of rljax, else $RLJAX_SOURCE, with the extras tpu and gcs",
    )
    poll_s: float = option(20.0, "Seconds between two questions to the cloud", above=0)
    hosts: int = option(2, "Of local: processes on this machine", low=1)
    devices: int = option(1, "Of local: virtual CPU devices of each", low=1)
    nodes: int = option(1, "Of slurm and sky: machines", low=1)
    gpus: int = option(8, "Of slurm: GPUs of a node", low=0)
    time: str = option("", "Of slurm: limit, such as 24:00:00")
    partition: str = option("", "Of slurm")
    account: str = option("", "Of slurm")
    image: str = option("python:3.12", "Of jobset: with your code in it, or plain Python")
    queue: str = option("", "Of jobset: the LocalQueue of Kueue")
    accelerators: str = option("", "Of sky: GPUs of a machine, such as H100:8")
    bucket: str = option("", "Of sky: gs:// or s3://, mounted at /runs")
    out: str = option("", "Of accept: folder of the manifest; default: runs/accept")
    command: tuple[str, ...] = option(
        (), "What every host runs, behind --: train quickstart --config.steps=20", positional=True
    )

    def conflicts(self):
        """Yields an unknown verb, and options that the verb does not read."""
        known = self.READ_BY
        if self.verb and self.verb not in known:
            yield "verb", self.verb, f"one of {', '.join(known)}"
            return
        for field in dataclasses.fields(self):
            value, read = getattr(self, field.name), known.get(self.verb, ())
            if field.name != "verb" and value != field.default and field.name not in read:
                yield field.name, value, f"not read by pod {self.verb}"

    _CLOUD = ("type", "slices", "name", "zone", "project", "api", "spot", "poll_s")
    READ_BY: typing.ClassVar[dict[str, tuple[str, ...]]] = {
        "local": ("hosts", "devices", "command"),
        "up": _CLOUD,
        "run": (*_CLOUD, "setup", "command"),
        "logs": _CLOUD,
        "stop": _CLOUD,
        "babysit": (*_CLOUD, "setup", "command"),
        "down": _CLOUD,
        "slurm": ("name", "nodes", "gpus", "time", "partition", "account", "command"),
        "jobset": ("type", "slices", "name", "image", "queue", "spot", "command"),
        "sky": ("type", "slices", "name", "nodes", "accelerators", "bucket", "spot", "command"),
        "supervise": ("command",),
        "accept": (*_CLOUD, "setup", "hosts", "devices", "out"),
    }
