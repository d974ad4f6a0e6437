"""Rows to learn from: pairs, labels, trajectories, packing."""
