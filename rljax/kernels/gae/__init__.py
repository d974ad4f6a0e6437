"""GAE, discounted sums and the next token, over the tokens that the policy chose."""

from rljax.kernels.gae.api import discounted_sum, gae, next_chosen

__all__ = ["discounted_sum", "gae", "next_chosen"]
