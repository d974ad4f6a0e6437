"""Checkpoints of a run: each step is complete, on disk or under a URL, or does not exist."""
