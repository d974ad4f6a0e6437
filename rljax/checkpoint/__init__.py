"""Checkpoints of a run: a step on disk or under a URL, whole or not there."""
