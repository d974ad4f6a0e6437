"""The rollouts that `algorithm.collect` names: what a step samples, and what it keeps of that."""
