"""The run folder: its lock, its files, and its copy under a URL."""
