"""EndpointError: the ways in which a request to an endpoint can fail."""

# Failures that may be gone at the next attempt, and those that mean the endpoint is down.
TRANSIENT = frozenset({"unreachable", "server_error", "rate_limited"})
DOWN = TRANSIENT | {"timeout"}


class EndpointError(RuntimeError):
    """A failed request.

    kind: unreachable | timeout | rate_limited (429) | server_error (408, 409, 425, 5xx) | rejected
    (any other status but 2xx, certificates) | too_large | malformed (no JSON, or not a chat
    completion) | verdict (an answer without a verdict) | circuit_open. wait_s: the seconds to wait
    that the server sent (Retry-After).
    """

    def __init__(self, kind: str, text: str, wait_s: float | None = None):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.wait_s = kind, text, wait_s
