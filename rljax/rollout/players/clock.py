"""Clock: when what comes from outside, a score or a reply of an environment, counts."""

import dataclasses
import re
import time
from collections.abc import Callable

from rljax.errors import InputError

_NOTHING_S = 0.01  # seconds to wait for news while nothing decodes


@dataclasses.dataclass
class Clock:
    """Counts dispatches of decoding. `dispatches` 0, the wall's clock: what comes counts as soon as
    it is there. Otherwise it counts from the dispatches-th dispatch on after it was asked for, and
    the loop waits where it is late: a run is then the same whatever the speed of the outside."""

    dispatches: int = 0
    now: int = 0

    @classmethod
    def parsed(cls, text: str) -> "Clock":
        """Returns the clock that a config names, "wall" or "logical(2)". Raises InputError for
        any other text."""
        if text == "wall":
            return cls()
        match = re.fullmatch(r"logical\((\d{1,6})\)", text)
        if not match or int(match[1]) < 1:
            rule = "'wall', or 'logical(2)': what comes counts from the second dispatch on"
            raise InputError(
                "rollouts.clock", value=text, rule=rule, fix="--config.rollouts.clock=wall"
            )
        return cls(int(match[1]))

    def tick(self) -> None:
        """Counts a dispatch."""
        self.now += 1

    def idle(self) -> None:
        """Waits a little, or counts on, as nothing decodes."""
        if self.dispatches:
            self.now += 1
        else:
            time.sleep(_NOTHING_S)

    def due(self, asked: int, done: Callable[[], bool]) -> bool:
        """Returns whether what was asked for at `asked` counts now; it may have to be waited
        for."""
        return self.now >= asked + self.dispatches if self.dispatches else done()
