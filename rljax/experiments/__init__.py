"""Several runs and what they say together: sweeps, the comparison of offline methods."""
