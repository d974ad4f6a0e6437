"""How a request to an endpoint can fail. What lives here: the exception and its kinds. What does
not: who raises it (rljax.rewards.judges.endpoint, endpoint_http).
"""

# What may be gone at the next attempt, and what says that the endpoint is down.
TRANSIENT = frozenset({"unreachable", "server_error", "rate_limited"})
DOWN = TRANSIENT | {"timeout"}


class EndpointError(RuntimeError):
    """kind: unreachable | timeout | rate_limited (429) | server_error (408, 409, 425, 5xx) |
    rejected (any other status but 2xx, certificates) | too_large | malformed (no JSON, or not a
    chat completion) | verdict (an answer that says no verdict) | circuit_open. wait_s: what the
    server asked for (Retry-After)."""

    def __init__(self, kind: str, text: str, wait_s: float | None = None):
        super().__init__(f"{kind}: {text}")
        self.kind, self.said, self.wait_s = kind, text, wait_s
