"""Learning from a batch: reductions weigh its tokens, an objective has a gradient, fit takes
steps."""

from rljax.learn.fit import Beside, fit
from rljax.learn.objective import (
    MetricAt,
    Objective,
    Steps,
    loss_alone,
    loss_and_gradient,
    map_microbatches,
    map_tokens,
    select_policy_tokens,
    split_microbatches,
    weighted_loss,
)
from rljax.learn.reductions import (
    positive_token_mean,
    prompt_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum_norm,
)

__all__ = [
    "Beside",
    "MetricAt",
    "Objective",
    "Steps",
    "fit",
    "loss_alone",
    "loss_and_gradient",
    "map_microbatches",
    "map_tokens",
    "positive_token_mean",
    "prompt_mean",
    "select_policy_tokens",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "split_microbatches",
    "token_mean",
    "token_sum_norm",
    "weighted_loss",
]
