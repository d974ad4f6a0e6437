"""Experiments of several runs: sweeps, and the comparison of offline methods."""
