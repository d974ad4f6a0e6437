"""Options of `rljax plan`."""

import dataclasses

from rljax.config.declare import option
from rljax.config.options import TrustOptions


@dataclasses.dataclass(frozen=True)
class PlanOptions(TrustOptions):
    """rljax plan."""

    topology: str = option(
        "",
        "Such as v5e:2x4, v5p:4x4x4, 2xv5e:16x16 (two slices); default: the devices of this host",
    )
    json: str = option("", "Where everything is written as JSON")
    programs: tuple[str, ...] = option((), "Compile these alone: sft, generate, learn, ...")
    compile: bool = option(True, "Compile; else (--nocompile) the estimate from shapes alone")
    search: bool = option(False, "Try other meshes, remat and tokens_per_microbatch")
    compiles: int = option(8, "Of --search: how many configs are compiled", low=0)
    seconds: float = option(3600.0, "Of --search: no compile begins after so many", low=0)
    simulate: bool = option(
        False, "Simulate the run: step seconds and the age of tokens by rollouts.max_staleness"
    )
    lengths: str = option(
        "", "Of --simulate: tokens of a response, or of a turn, as "
        "'lognormal(mean=2500, sigma=0.9, cap=8192)' or 'geometric(mean=33, cap=128)'"
    )  # fmt: skip
    turns: str = option("", "Of --simulate: turns of an episode, as 'geometric(mean=4, cap=16)'")
    tools: str = option(
        "", "Of --simulate: seconds between two turns, as 'lognormal(mean=2, sigma=1.2, cap=60)'"
    )
    etas: tuple[int, ...] = option((0, 1, 2, 4), "Of --simulate: each is a rollouts.max_staleness")
    decode_step_s: float | None = option(
        None, "Of --simulate: seconds of a decode step, all slots live", above=0
    )
    decode_idle_s: float | None = option(
        None, "The same with hardly a slot live; default: as with all of them", above=0
    )
    learn_s: float | None = option(None, "Of --simulate: seconds of a step's learning", low=0)
    dispatch_s: float = option(
        0.0, "Of --simulate: the host's seconds from one dispatch of 32 decode steps to the next",
        low=0,
    )  # fmt: skip
    measured: str = option(
        "", "Of --simulate: a run folder whose metrics say the seconds, of a run in flight"
    )

    def conflicts(self):
        read = ("lengths", "turns", "tools", "etas", "decode_step_s", "decode_idle_s", "learn_s",
                "dispatch_s", "measured")  # fmt: skip
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.simulate and field.name in read and value != field.default:
                yield field.name, value, "--simulate reads it"
        if not self.simulate:
            return
        if self.search:
            yield "search", True, "not with --simulate, which compares no meshes"
        if not self.lengths:
            yield (
                "lengths",
                "",
                "needed by --simulate: they decide what staleness buys",
            )
        if self.tools and not self.turns:
            yield "turns", "", "tools are called between turns"
        if any(eta > 64 for eta in self.etas):
            yield "etas", self.etas, "at most 64 steps"
        if (self.decode_step_s is None) != (self.learn_s is None):
            missing = "learn_s" if self.learn_s is None else "decode_step_s"
            yield missing, None, "--decode_step_s and --learn_s go together"
        if self.decode_idle_s and self.decode_idle_s > (self.decode_step_s or 0):
            yield "decode_idle_s", self.decode_idle_s, "at most --decode_step_s"
        if self.measured and self.learn_s is not None:
            yield "measured", self.measured, "either this, or --decode_step_s and --learn_s"
