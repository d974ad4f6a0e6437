"""Options of `rljax play`."""

import dataclasses

from rljax.config.declare import option
from rljax.config.options import CompilerOptions, TrustOptions


@dataclasses.dataclass(frozen=True)
class PlayOptions(CompilerOptions, TrustOptions):
    """rljax play."""

    human: bool = option(False, "You type the replies; a line that ends with \\ goes on")
    policy: str = option("", "Who replies: a run folder, RUN@STEP, a model folder, or OWNER/NAME")
    script: str = option("", "A file of replies, parted by lines of ---")
    row: int = option(0, "Which row of the data", low=0)
    split: str = option("train", "Which rows: train or test", choices=("train", "test"))
    greedy: bool = option(False, "The policy's most likely tokens")
    seed: int = option(0, "Of the episode, and of the policy's samples", low=0)

    def conflicts(self):
        if sum(map(bool, (self.human, self.policy, self.script))) != 1:
            yield "human", self.human, "exactly one of --human, --policy and --script plays"
        if self.greedy and not self.policy:
            yield "greedy", self.greedy, "read with --policy alone"
