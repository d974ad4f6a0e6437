"""What the metrics of samples in flight mean (rollouts.max_staleness): (meaning, unit, what is
healthy), for rljax.report.glossary. `steps` are steps of the dataflow; staleness/mean and
staleness/max count optimizer steps, of which a step may have several."""

# fmt: off
SHARE = "share"

IN_FLIGHT = {
    "staleness/steps_mean": ("steps by which the weights that drew a token are older than those "
                             "that learn from it, mean over tokens", "steps",
                             "about half of rollouts.max_staleness; a correction weighs it"),
    "staleness/steps_max": ("the same, of the oldest token", "steps",
                            "never above rollouts.max_staleness"),
    "staleness/span_max": ("steps between the oldest and the newest token of one response, at most",
                           "steps", "0 where no response outlives a step"),
    "staleness/partial_fraction": ("responses that weights of several steps wrote", SHARE,
                                   "the longer the responses, the more; see rollouts.partial_mask"),
    "staleness/masked_fraction": ("tokens left out as older than the newest part of their response "
                                  "(rollouts.partial_mask)", SHARE,
                                  "below 0.3; above, long responses hardly teach"),
    "queue/open": ("groups that began and that no step has learned from yet", "groups",
                   "at most rollouts.ahead steps of groups"),
    "queue/complete": ("of these, groups that have ended and been scored", "groups",
                       "above 0: the next step waits less"),
    "queue/oldest_steps": ("steps since the oldest open group began", "steps",
                           "at most rollouts.max_staleness"),
    "queue/dropped": ("dead groups that other prompts replaced since the last step", "groups",
                      "as many as have equal scores; far more than a step has: other prompts"),
    "queue/dropped_tokens": ("tokens of these groups", "tokens", "small beside batch/tokens"),
    "time/beside_s": ("decoding on rollouts.sampler_devices while the others learned", "seconds",
                      "near time/learn_s; less: fewer of them, or more prompts ahead; with a long "
                      "time/generate_s: more of them, or one mesh"),
    "slots/live_share": ("steps of slots that gave a token", SHARE,
                         "above 0.9; below, more prompts ahead (rollouts.ahead) fill the slots"),
    "slots/dispatches": ("dispatches of decoding since the last step", "dispatches", ""),
    "slots/decode_steps": ("steps of decoding in them: each gives every live slot a token", "steps",
                           "the fewer for the same batch/tokens, the better the slots are used"),
    "slots/reread_tokens": ("tokens in flight that were read again, after new weights or a "
                            "checkpoint", "tokens", "0 with rollouts.in_flight_cache='keep', but "
                            "for checkpoints"),
}
