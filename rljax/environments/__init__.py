"""Environments: what the policy plays with. `environment.function` names one of these functions or
your own; contract.py says what such a function is."""

from rljax.environments.contract import Call, Done, Opening, Reply, Turn

__all__ = ["Call", "Done", "Opening", "Reply", "Turn"]
