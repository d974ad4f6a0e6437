"""Rewards by unit tests of programs."""
