"""Scores of trajectories: rewards, judges on the mesh, scores of lines, and reports."""
