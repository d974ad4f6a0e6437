"""The process of one system in a comparison: it takes a step whenever it is told to, and says what
the step cost. Its standard output belongs to the comparison; what libraries print goes to standard
error."""

import dataclasses
import functools
import json
import os
import sys

from step_shapes import Decoder, Shape, forget_peak, spent


class Worker:
    """Laps of whole steps: `wait`, then `generated`, then `done`, again and again."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.options = json.loads(sys.argv[1])

    @functools.cached_property
    def shape(self) -> Shape:
        """Returns the options as a shape."""
        return Shape(**{**self.options, "decoder": Decoder(**self.options["decoder"])})

    def say(self, message: dict) -> None:
        print(json.dumps(message), file=self._out, flush=True)

    def wait(self) -> None:
        """Waits for the next lap and starts it; ends the process where there is none."""
        if sys.stdin.readline().strip() != "step":
            os._exit(0)  # libraries' threads would keep it alive
        forget_peak()
        self._started = self._middle = spent()
        self._tokens = 0

    def generated(self, tokens: int) -> None:
        """Notes that `tokens` more tokens of responses have been generated. The last call of a lap
        ends its generation."""
        self._middle = spent()
        self._peak, self._tokens = self._middle.peak_mb, self._tokens + tokens
        forget_peak()

    def done(self, **fields) -> None:
        """Ends the lap, and reports its costs with these `fields`."""
        ended = spent()
        generate, update = self._middle.since(self._started), ended.since(self._middle)
        step = ended.since(self._started)
        step.peak_mb = max(update.peak_mb, self._peak)
        parts = {"generate": generate, "update": update, "step": step}
        costs = {name: dataclasses.asdict(cost) for name, cost in parts.items()}
        self.say({**costs, "response_tokens": self._tokens, **fields})


def reward(response_ids: list[int]) -> float:
    """A score that costs nothing and differs within a group."""
    return float((len(set(response_ids)) + len(response_ids)) % 7)
