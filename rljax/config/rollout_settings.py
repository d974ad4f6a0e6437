"""Where the samples of a step come from: a part of rljax.config.schema."""

import dataclasses

from rljax.config.names import Settings


@dataclasses.dataclass
class RolloutSettings(Settings):
    """Where a step's samples come from: the newest weights, weights of the steps before (in
    flight), or a file of stored rollouts."""

    # By how many steps the weights that drew a token may be older than those that learn from it; 0:
    # every step samples with the newest weights, and begins when the last one is over.
    max_staleness: int = 0
    # How many steps' prompts begin before their step. Less than max_staleness: a step learns from
    # groups that have ended, the oldest first; max_staleness: in the order of the data. -1: half
    # of max_staleness, at least 1.
    ahead: int = -1
    # What new weights do with what older ones have read of responses in flight: keep it
    # (PipelineRL), or read the tokens again (AReaL).
    in_flight_cache: str = "keep"  # or "reread"
    # Of a response that several versions of the policy wrote, learn from: all (none), or the part
    # that the newest of them wrote (stale).
    partial_mask: str = "none"  # or "stale"
    # So many devices, the last ones, sample, and the others train: the next samples are decoded
    # while the weights are learned. 0: one mesh does both, one after the other.
    sampler_devices: int = 0
    # When a score counts: as soon as it is there ("wall"), or from the second dispatch of decoding
    # after it was asked for, whatever it takes ("logical(2)"): runs are then equal bit by bit. With
    # sampler_devices the weights that are learned count as soon as they are there ("wall"), or once
    # the samples of the next step are complete.
    clock: str = "wall"

    # A file of trajectories with their log-probs (rljax sample --trajectories);
    # "" = none.
    replay: str = ""
    replay_share: float = 1.0  # of the prompts of a step that come from it; 1 = all: off-policy

    @property
    def steps_ahead(self) -> int:
        """`ahead`, or what it is where the config does not say."""
        if self.ahead != -1:
            return self.ahead
        return max(1, self.max_staleness // 2) if self.max_staleness else 0
