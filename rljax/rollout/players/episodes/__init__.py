"""Episodes: trajectories of several turns, in which an environment answers the policy."""
