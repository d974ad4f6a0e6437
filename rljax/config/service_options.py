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
    name: str = option("", "Name of the model for clients; default: the folder's name")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = every interface")
    port: int = option(
        8000, "Port to listen on; 0 = a free one, which is printed", low=0, high=65535
    )
    slots: int = option(16, "Samples that decode at a time", low=1)
    tokens: int = option(2048, "Largest length of prompt and response together, in tokens", low=2)
    dtype: str = dtype_option(
        "Dtype of decoding; default: as the run sampled", "float32", "bfloat16", "float16"
    )
    kv_dtype: str = dtype_option(
        "Dtype of keys and values; default: the model's", "float32", "bfloat16", "float16", "int8"
    )
    layout: str = option(
        "",
        'Mesh of the weights, "mesh(data=2, tensor=4)", as sampler.layout; default: split over '
        "all devices as fsdp",
    )
    weight_dtype: str = dtype_option(
        "Dtype of the weights while decoding; default: as the run sampled",
        "float32",
        "bfloat16",
        "float16",
        "int8",
    )
    page_tokens: int = option(
        0, "Tokens in a page of keys and values; 0 = no pages, each slot has its own columns", low=0
    )
    pages: int = option(
        0, "Number of pages of all slots together; 0 = as many as the slots take", low=0
    )
    draft_tokens: int = option(
        0,
        "Draft tokens read in a step, copied from where the newest tokens have stood before; 0 = "
        "off",
        low=0,
        high=64,
    )
    chunk_tokens: int = option(
        256, "Tokens of a prompt that are read between two dispatches", low=1
    )
    steps: int = option(8, "Tokens per dispatch; streams get text after each", low=1)
    max_waiting: int = option(
        256, "Largest number of samples that wait for a slot; more get a 503", low=0
    )
    prefix_cache_tokens: int = option(
        0, "Tokens of prompts that are kept for later requests; 0 = off", low=0
    )
    calls: str = option("auto", "Format of tool calls; auto = as the chat template writes them")
    seed: int = option(0, "Seed of requests that have none", low=0, high=2**32 - 1)
    allowed_hosts: tuple[str, ...] = option(
        (), "Names by which clients reach this server, beside addresses and its own; * = any"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins of web pages that may send requests, such as http://localhost:3000; * = any"
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
        "Environment in which the policy acts, \"tools(functions=('search(corpus=...)',))\"; "
        "default: the run's",
    )
    calls: str = option("", "Format of tool calls, as environment.calls; default: the run's")
    question: str = option(
        "", "Question that is asked alone; default: lines of the terminal, or of standard input"
    )
    system: str = option("", "A system message; without a chat template the beginning of a prompt")
    tokens: int = option(
        4096, "Largest length of a conversation, in tokens; at most the model's context", low=2
    )
    max_turns: int = option(
        0, "Largest number of replies of the policy to a question; 0 = the run's, or 8", low=0
    )
    temperature: float | None = option(
        None,
        "Temperature of the samples, 0 = greedy; default: the run's, or that of the model's "
        "generation_config.json, or greedy",
        low=0,
    )
    max_response_tokens: int | None = option(
        None,
        "Largest length of a response, in tokens; default: the run's, or 512, or 128 without a "
        "chat template",
        low=1,
    )
    steps: int = option(8, "Tokens per dispatch; text is shown after each", low=1)
    seed: int = option(0, "Seed of the samples", low=0, high=2**32 - 1)


@dataclasses.dataclass(frozen=True)
class PodOptions(Options):
    """Options of `rljax pod`. READ_BY says which verb reads which of them."""

    verb: str = option("", "See above", first=True, required=True)
    type: str = option("", "TPU of one slice: v5litepod-16, v4-32, v6e-256, v5p:4x4x4, ...")
    slices: int = option(1, "Slices of that type, joined by the data-center network", low=1)
    name: str = option("rljax", "Name of the pod or job")
    zone: str = option("", "Zone of Google Cloud")
    project: str = option("", "Project of Google Cloud; default: gcloud's own")
    api: str = option(
        "tpu",
        "Service: tpu, Cloud TPU (v4 v5e v5p v6e); compute, Compute Engine (v5p v6e tpu7x)",
        choices=("tpu", "compute"),
    )
    spot: bool = option(False, "Use spot machines: cheaper, and taken away at any time")
    setup: str = option(
        "",
        "Shell command that fills $VENV on a new host; default: install the folder where it "
        "is a clone of rljax, else $RLJAX_SOURCE, with the extras tpu and gcs",
    )
    poll_s: float = option(20.0, "Seconds between two questions to the cloud", above=0)
    hosts: int = option(2, "Processes on this machine (local)", low=1)
    devices: int = option(1, "Virtual CPU devices of each process (local)", low=1)
    nodes: int = option(1, "Number of machines (slurm, sky)", low=1)
    gpus: int = option(8, "GPUs of a node (slurm)", low=0)
    time: str = option("", "Time limit, such as 24:00:00 (slurm)")
    partition: str = option("", "Partition (slurm)")
    account: str = option("", "Account (slurm)")
    image: str = option(
        "python:3.12", "Container image with your code in it, or plain Python (jobset)"
    )
    queue: str = option("", "LocalQueue of Kueue (jobset)")
    accelerators: str = option("", "GPUs of a machine, such as H100:8 (sky)")
    bucket: str = option("", "Bucket, gs:// or s3://, mounted at /runs (sky)")
    out: str = option(
        "", "Folder of the manifest; default: runs/accept (accept)", path="written_folder"
    )
    command: tuple[str, ...] = option(
        (), "Command of every host, behind --: train quickstart --config.steps=20", positional=True
    )

    def conflicts(self):
        """Yields an unknown verb, and options that the verb does not read."""
        fields_of_verbs = self.READ_BY
        if self.verb and self.verb not in fields_of_verbs:
            yield "verb", self.verb, f"one of {', '.join(fields_of_verbs)}"
            return
        for field in dataclasses.fields(self):
            value, read_fields = getattr(self, field.name), fields_of_verbs.get(self.verb, ())
            if field.name != "verb" and value != field.default and field.name not in read_fields:
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
