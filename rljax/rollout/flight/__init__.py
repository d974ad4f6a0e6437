"""Samples that outlive the step in which they began, with a bound on how old a token may be.

tickets: which groups may begin, and which a step learns from. flight: the groups that were begun,
and their scores. in_flight: both, as the source of a run asks for them. ages: how old tokens are.
"""

from rljax.rollout.flight.flight import Flight
from rljax.rollout.flight.in_flight import InFlight
from rljax.rollout.flight.tickets import Tickets
from rljax.rollout.players.clock import Clock
from rljax.rollout.players.episodes.in_flight import EpisodesInFlight
from rljax.rollout.players.responses_in_flight import ResponsesInFlight

__all__ = ["Clock", "EpisodesInFlight", "Flight", "InFlight", "ResponsesInFlight", "Tickets"]
