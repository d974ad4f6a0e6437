"""The report of a run: run_folder reads the folder, page and timeline draw it."""
