"""Processes that can be killed: what rewards and episodes run in."""
