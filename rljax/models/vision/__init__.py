"""The vision towers and their configs."""
