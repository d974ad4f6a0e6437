"""What a run leaves to read: run_folder reads it, page and timeline draw it."""
