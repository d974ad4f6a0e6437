"""Training data made by models: rejection sampling, trajectories, preferences, step labels."""
