"""What the metrics of samples by search mean; see rljax.report.glossary."""

SEARCH = {
    "search/value": (
        "what the simulations of a search found, mean over the tokens",
        "reward",
        "rises; far from reward/mean: the value model or the rollouts mislead it",
    ),
    "search/agreement": (
        "share of the simulations that went to the token that was chosen",
        "share",
        "rises, as search and policy agree",
    ),
    "visits_entropy": (
        "how evenly a search spread its simulations over the next tokens",
        "nats per token",
        "falls, as search and policy agree",
    ),
    "visits_kl": (
        "KL of the policy from the shares of the visits",
        "nats per token",
        "falls",
    ),
}
