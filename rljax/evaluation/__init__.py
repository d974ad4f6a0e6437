"""Evaluation: greedy accuracy with intervals, reward models on held-out pairs, saved policies."""
