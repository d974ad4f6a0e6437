"""Samples that outlive the step in which they began, with a bound on how old a token may be.

tickets: which groups may begin, and which a step learns from. responses: groups of one response
each. episodes: groups of episodes of an environment. in_flight: either of them with tickets, as the
source of a run asks for them. ages: how old their tokens are.
"""

from rljax.rollout.flight.episodes import Episodes
from rljax.rollout.flight.in_flight import PARTIAL_MASKS, InFlight
from rljax.rollout.flight.responses import Responses
from rljax.rollout.flight.tickets import Tickets
from rljax.rollout.players.clock import Clock

__all__ = ["PARTIAL_MASKS", "Clock", "Episodes", "InFlight", "Responses", "Tickets"]
