"""One decoder for all families of models; a family is a value of its config."""
