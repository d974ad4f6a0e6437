"""Log-prob and entropy of target tokens straight from hidden states: no `[N, V]` array is kept."""

from rljax.kernels.logprob.api import token_logprobs

__all__ = ["token_logprobs"]
