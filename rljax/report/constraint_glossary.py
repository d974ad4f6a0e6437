"""Meanings of the metrics of costs, of cost models and of a pre-training loss: parts of
rljax.report.glossary."""

# fmt: off
SHARE = "share"

# An update by a loss of costs.
COST_MODELS = {
    "score/safer": ("cost of the safer completion", "score", "falls"),
    "score/more_harmful": ("cost of the more harmful completion", "score", "rises"),
    "pretraining_loss": ("negative log-likelihood of the pre-training examples, before its "
                         "coefficient", "nats per token", "steady or falling; a rise: the policy "
                         "forgets"),
}

CONSTRAINTS = {
    "cost/mean": ("mean cost of the step's completions", "cost",
                  "falls to the multiplier's threshold"),
    "cost/unsafe_fraction": ("completions whose cost is above 0", SHARE, "falls"),
    "multiplier/lambda": ("weight of the cost beside the reward", "x",
                          "rises while costs are above the threshold; at its maximum for long: the "
                          "constraint cannot be met"),
    "multiplier/window_cost": ("mean cost of the last episodes, which the multiplier learns from",
                               "cost", "falls to the threshold"),
    "pretraining/epoch": ("passes over the pre-training examples so far", "epochs", ""),
    "pretraining/tokens": ("tokens of the pre-training examples of this step", "tokens", ""),
}
