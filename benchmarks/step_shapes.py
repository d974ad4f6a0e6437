"""Shapes, prompts and laps that the benchmarks of a whole training step share.

Imports neither rljax nor JAX when it is read: the environments of the peers and the processes of
the reward read it, too.
"""

import contextlib
import dataclasses
import os
import random
import resource
import statistics
import time

END = 1  # the first id that ends a response where responses end early; 0 is padding
FIRST_CHARACTER = 0x10000  # token ids from 2 on are the characters from here on


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a Qwen3-shaped decoder with random float32 weights."""

    vocabulary: int = 4096
    layers: int = 8
    embed: int = 512
    mlp: int = 1536
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    tie_embeddings: bool = False

    def layer_weights(self) -> int:
        """Weights of the products of all layers."""
        heads = 2 * self.heads + 2 * self.kv_heads
        return self.layers * self.embed * (heads * self.head_dim + 3 * self.mlp)

    def forward_flops(self, positions: int, outputs: int, pairs: int) -> float:
        """FLOPs of a forward pass: 2 for each weight of a layer and position, and for each weight
        of the output layer and token that is predicted; attention over `pairs` of a token and one
        that it sees."""
        products = positions * self.layer_weights() + outputs * self.embed * self.vocabulary
        return 2 * products + 4 * pairs * self.heads * self.head_dim * self.layers


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sequences of one training step: `prompts` groups of `samples` responses, computed
    `microbatch` sequences at a time."""

    name: str = "fixed"
    prompts: int = 4
    samples: int = 8
    shortest_prompt: int = 32
    longest_prompt: int = 32
    response: int = 128  # tokens at most
    mean_response: int = 0  # one token in so many ends a response; 0 = none does
    slots: int = 0  # rows that rljax decodes at a time; 0 = all
    microbatch: int = 32
    decoder: Decoder = Decoder()

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def columns(self) -> int:
        return self.longest_prompt + self.response

    def stop_ids(self) -> tuple[int, ...]:
        """Token ids of which each ends a response. Random weights give every token nearly the same
        chance, so that lengths are geometric."""
        if not self.mean_response:
            return ()
        return tuple(range(END, END + max(self.decoder.vocabulary // self.mean_response, 1)))

    def prompt_ids(self, index: int) -> list[int]:
        """Prompt `index` of an endless series, the same in every framework, without a stop id."""
        draw = random.Random(f"prompt {index}")
        first_id = max((END, *self.stop_ids())) + 1
        count = draw.randint(self.shortest_prompt, self.longest_prompt)
        return [draw.randrange(first_id, self.decoder.vocabulary) for _ in range(count)]


SHAPES = {
    "fixed": Shape(),
    "long": Shape("long", shortest_prompt=128, longest_prompt=128),
    "ragged": Shape("ragged", prompts=32, shortest_prompt=8, mean_response=33, slots=32),
}


@dataclasses.dataclass
class Cost:
    """The costs of the process so far, or between two moments."""

    wall_s: float
    cpu_s: float  # user and system seconds of all threads
    system_s: float
    page_faults: int  # those that read no disk
    peak_mb: float  # largest resident set since `forget_peak`

    def since(self, before: "Cost") -> "Cost":
        """Returns the costs from `before` on."""
        spent = {name: value - vars(before)[name] for name, value in vars(self).items()}
        return Cost(**{**spent, "peak_mb": self.peak_mb})


def spent() -> Cost:
    """Returns the costs of the process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    wall, cpu = time.perf_counter(), usage.ru_utime + usage.ru_stime
    return Cost(wall, cpu, usage.ru_stime, usage.ru_minflt, _peak_mb())


def forget_peak() -> None:
    """Begins the peak of the resident set anew, where the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_mb() -> float:
    """Returns the peak of the resident set in MB: that of the whole process where the system has no
    /proc."""
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as file:
            return next(int(x.split()[1]) / 1024 for x in file if x.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def lap(function) -> Cost:
    """Returns the costs of a call of `function`, which waits for its results."""
    forget_peak()
    before = spent()
    function()
    return spent().since(before)


def spread(values: list[float]) -> dict:
    """{"min", "median", "max"} of readings."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def spreads(laps: list[Cost]) -> dict:
    """The spread of every number of the laps."""
    return {name: spread([vars(x)[name] for x in laps]) for name in vars(laps[0])}


# -- the task that a run of rljax is given: a character for each token id --


def task(vocabulary: int, **fields: int):
    """The prompts of the shape that has these fields."""
    from rljax.tasks import Stream, Task

    shape = Shape(decoder=Decoder(vocabulary), **fields)
    alphabet = "".join(chr(FIRST_CHARACTER + i) for i in range(vocabulary - 2))

    def row(index: int) -> dict:
        text = "".join(alphabet[i - 2] for i in shape.prompt_ids(index))
        return {"prompt": text, "ground_truth": "none", "data_source": "step"}

    return Task(alphabet, Stream(row), [row(0)], reward=f"{__file__}:distinct_tokens()")


def task_text(shape: Shape) -> str:
    """`task` as the component text of a config."""
    names = ("shortest_prompt", "longest_prompt", "mean_response")
    options = "".join(f", {name}={getattr(shape, name)}" for name in names)
    return f"{__file__}:task(vocabulary={shape.decoder.vocabulary}{options})"


def distinct_tokens(response: str, num_tokens: int) -> float:
    """A score that costs nothing and differs within a group."""
    return float((len(set(response)) + num_tokens) % 7)
