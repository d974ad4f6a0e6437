"""Rewards in killable worker processes."""
