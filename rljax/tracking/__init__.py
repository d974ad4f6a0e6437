"""Shows a run while it lives: trackers, the console, charts, timing, compile counts."""
