"""Search in the tree of continuations, as a way of decoding."""
