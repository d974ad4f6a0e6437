"""Rows of files, tasks and lists, with their columns."""
