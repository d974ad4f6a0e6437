"""Players make trajectories: `responses` of one turn, `episodes` with an environment, and responses
that are `searched`."""
