"""Sources whose examples are in files or tables."""
