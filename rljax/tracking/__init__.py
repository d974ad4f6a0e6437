"""What a run shows while it lives: trackers, the console, charts, timing, compile counts."""
