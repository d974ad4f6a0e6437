"""Low-rank adapters and quantised frozen weights."""
