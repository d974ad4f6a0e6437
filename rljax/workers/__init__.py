"""Worker processes that can be killed, in which rewards and episodes run."""
