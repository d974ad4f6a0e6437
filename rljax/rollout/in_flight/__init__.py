"""Samples that outlive the step in which they began, with a bound on how old a token may be.

tickets: which groups may begin, and which a step learns from. responses: groups of one response
each. in_flight: both, as the source of a run asks for them. ages: how old their tokens are.
clock: when what comes from outside counts.
"""

from rljax.rollout.in_flight.clock import Clock
from rljax.rollout.in_flight.in_flight import PARTIAL_MASKS, InFlight
from rljax.rollout.in_flight.responses import Responses
from rljax.rollout.in_flight.tickets import Tickets
from rljax.rollout.ready import Ready

__all__ = ["PARTIAL_MASKS", "Clock", "InFlight", "Ready", "Responses", "Tickets"]
