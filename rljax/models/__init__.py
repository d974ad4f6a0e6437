"""One decoder; families are values of one config."""
