"""Shows a run while it goes on: trackers, console, charts, timing, counts of programs."""
