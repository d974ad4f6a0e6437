"""Shows a run while it goes on: trackers, the console, charts, timing, counts of
compiled programs."""
