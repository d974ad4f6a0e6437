"""Players make trajectories: `responses` of one turn, `episodes` with an environment, and
`searched` ones."""
